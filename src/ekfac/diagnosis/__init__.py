"""Probes a copy of a model for some fifty steps, then reports what to expect and which settings to use."""
