"""Fuzzing as a command: ``make fuzz``. Seeded, resumable, in minutes; see docs/reliability.md."""
