"""Captures h and delta during forward and backward passes."""
