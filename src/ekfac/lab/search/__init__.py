"""Searches over settings, and selection from their results."""
