"""The suite: many small tasks, every method on the same footing, one table and one performance profile."""
