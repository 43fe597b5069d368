"""Searches over settings, and choosing from what they found."""
