"""Collects each block's statistics from backward passes, and schedules updates of its factors and basis."""
