"""The suite: many small tasks, every method under equal conditions, one table and one performance profile."""
