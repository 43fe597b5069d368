"""Fills the pages' tables and claims, between markers, from recorded runs.

``python -m ekfac.lab.show.evidence`` reads ``results/`` and writes to ``docs/``. None of these tables is typed by hand.
"""

from ekfac.lab.show.evidence.pages import fill, fill_pages
from ekfac.lab.show.evidence.record import Record

__all__ = ["Record", "fill", "fill_pages"]
