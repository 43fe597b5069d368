"""The suite's record on the pages: what ``ekfac suite report`` writes, part by part."""

from __future__ import annotations

from ekfac.lab.show.evidence.record import MISSING, Record
from ekfac.lab.suite import config, page
from ekfac.lab.suite.records import CONFIG, Records, read_config
from ekfac.lab.suite.results import Results

#: Where the record is.
PLACE = "suite/h200"


def results(record: Record) -> Results | None:
    """Return the results with warm-up and a cosine, or ``None`` if there is no record."""
    folder = record.folder / PLACE
    if not (folder / CONFIG).is_file():
        return None
    return Results(config.parse(*read_config(folder)), Records(folder), "cosine")


def measured(record: Record) -> str:
    """Return the table of all tasks and methods, with what its signs mean."""
    found = results(record)
    return MISSING if found is None else "\n".join([*page.table(found), "", page.key(found)])


def compared(record: Record) -> str:
    """Return how often ours are ahead of the best rival."""
    found = results(record)
    return MISSING if found is None else "\n".join(page.standings(found)).strip() or MISSING


def profile(record: Record) -> str:
    """Return on what fraction of tasks each method is how fast."""
    found = results(record)
    return MISSING if found is None else "\n".join(page.profiles(found)).strip() or MISSING


def divergences(record: Record) -> str:
    """Return how many runs diverged, by method."""
    found = results(record)
    return MISSING if found is None else "\n".join(page.divergences([found]))
