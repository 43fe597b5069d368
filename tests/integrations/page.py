"""Write the table of networks into docs/works.md from what the tests have recorded: page.py RECORD PAGE."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

BEGIN, END = "<!-- begin networks -->\n", "<!-- end networks -->"


def table(record: str) -> str:
    """The rows in the order of their packages."""
    rows = [json.loads(line) for line in record.splitlines()]
    lines = [
        "| network | library | works | covered | loss at first | EKFAC, after 60 steps | AdamW |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['network']} | {row['package']} | yes | {100 * row['covered']:.1f} % | {row['first']:.2f} | "
            f"{row['ekfac']:.3f} | {row['adamw']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    record, page = map(Path, sys.argv[1:3])
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    made = page.with_suffix(".new")
    made.write_text(before + BEGIN + table(record.read_text()) + END + after)
    os.replace(made, page)


if __name__ == "__main__":
    main()
