"""One self-contained page about a set of runs: interactive curves, tables, planes, machine, commands."""

from ekfac.lab.show.report.page import page, write_report

__all__ = ["page", "write_report"]
