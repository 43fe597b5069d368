"""``python -m ekfac.lab.show.evidence``: pictures and tables of the pages, from recorded runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ekfac.lab.registry import LabError
from ekfac.lab.show.evidence.pages import fill_pages
from ekfac.lab.show.evidence.pictures import draw
from ekfac.lab.show.evidence.record import Record


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what was asked for; return 0, or 2 if something is wrong with the record or the pages."""
    parse = argparse.ArgumentParser(prog="python -m ekfac.lab.show.evidence", description=__doc__, allow_abbrev=False)
    parse.add_argument("what", nargs="*", help="pictures, tables, or both [default: both]")
    parse.add_argument("--results", default="results", help="folder of recorded runs")
    parse.add_argument("--docs", default="docs", help="folder of the pages")
    given = parse.parse_args(arguments)
    what = given.what or ["pictures", "tables"]
    try:
        unknown = [word for word in what if word not in ("pictures", "tables")]
        if unknown:
            raise LabError(f"unknown: {unknown[0]!r}; known: pictures, tables")
        record = Record(given.results)
        if "pictures" in what:
            draw(record, Path(given.docs) / "images", lambda line: print(line, flush=True))
        if "tables" in what:
            for file in fill_pages(record, given.docs):
                print(f"written: {file}")
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
