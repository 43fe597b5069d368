"""From recorded runs to the pages: tables and claims between markers.

``python -m ekfac.lab.show.evidence`` reads ``results/`` and writes into ``docs/``. None of its tables is typed.
"""

from ekfac.lab.show.evidence.pages import fill, fill_pages
from ekfac.lab.show.evidence.record import Record

__all__ = ["Record", "fill", "fill_pages"]
