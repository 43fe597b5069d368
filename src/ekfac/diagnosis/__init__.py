"""Probes a copy of a model for about fifty steps, then reports what to expect and which settings to use."""
