"""Displays: terminal, report, figures, pages."""
