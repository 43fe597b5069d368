"""Networks of the tasks."""
