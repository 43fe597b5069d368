"""``python -m ekfac.lab.show.evidence``: the tables of the pages, from recorded runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ekfac.lab.registry import LabError
from ekfac.lab.show import replay
from ekfac.lab.show.evidence.pages import fill_pages
from ekfac.lab.show.evidence.record import Record


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what was requested; return 0, or 2 if something is wrong with the record or the pages."""
    parse = argparse.ArgumentParser(prog="python -m ekfac.lab.show.evidence", description=__doc__, allow_abbrev=False)
    parse.add_argument("what", nargs="*", help="tables, race [default: both]")
    parse.add_argument("--results", default="results", help="folder of recorded runs")
    parse.add_argument("--docs", default="docs", help="folder of the pages")
    race = Path(replay.__file__).with_name(replay.FILE)
    parse.add_argument("--race", default=str(race), help="the demo's recorded race")
    given = parse.parse_args(arguments)
    what = given.what or ["tables", "race"]
    try:
        unknown = [word for word in what if word not in ("tables", "race")]
        if unknown:
            raise LabError(f"unknown: {unknown[0]!r}; known: tables, race")
        record = Record(given.results)
        if "tables" in what:
            for file in fill_pages(record, given.docs):
                print(f"written: {file}")
        if "race" in what and record.autoencoder(replay.BATCH):
            file = Path(given.race)
            text = json.dumps(replay.extract(given.results), indent=1) + "\n"
            if not file.exists() or file.read_text() != text:
                file.write_text(text)
                print(f"written: {file}")
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
