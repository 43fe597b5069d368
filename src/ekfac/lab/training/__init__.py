"""Training runs and their folders."""
