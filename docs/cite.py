"""Numbers live once: pages take them from the record.

A marker names where a number comes from; a plain forge shows the number alone::

    validation loss <!-- n: step/real.jsonl:[task=gpt,sched=none].hist.-1.val .2f -->2.83<!-- /n -->
    a step takes <!-- n: gpt.ekfac.ms .0f -->26<!-- /n --> ms
    it took <!-- n: in bench/host_h200.txt -->43<!-- /n --> ms

The first is a path into a JSON or JSONL file of ``results/``: keys, indices, and ``[key=value,...]``, which takes the
last entry that fits; of several files (``*``) the mean. The second is a name from ``named.py``, for what is computed or
long to write. The third stands in a record that is plain text, and is only checked. The last word is Python's format.

``python docs/cite.py`` writes all numbers anew (part of ``make figures``); ``python docs/cite.py KEY`` shows one.
A test fails if a number differs from its record, or if a page holds a measured number without a marker.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
MARKER = re.compile(r"<!-- n: (.+?) -->(.*?)<!-- /n -->")
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?"
# Decimals, and whole numbers with a unit.
UNIT = r"(?: ?(?:%|ms\b|MiB|MB|GB|x\b|times\b)| s\b)"
MEASURED = re.compile(rf"(?<![\w.,-])(?:(\d+(?:,\d{{3}})*\.\d+)(?=x\b|(?![\w-]))|({NUMBER})(?={UNIT}))")

# Pages whose numbers must be marked.
PAGES = ("README.md", *(f"docs/{name}.md" for name in (
    "index", "quickstart", "migrate", "rules", "works", "memory_speed", "recipes", "tuning", "troubleshooting",
    "curvature", "gallery", "results", "mnist", "cifar", "claims", "comparison", "suite", "distributed", "reliability",
)))  # fmt: skip
# Pages of long tables, whose numbers must stand in a record that the page links to. What is left tells of settings, or,
# in docs/design.md, of trials without a record.
LINKED = ("docs/performance.md", "docs/layers.md")
# What looks measured and is not: versions, settings and their bounds, other people's numbers with their source.
ALLOWED = {
    "docs/quickstart.md": {"0.3"},
    "docs/migrate.md": {"0.02", "0.01", "0.005", "0.003", "0.006", "0.95", "0.3", "0.7", "0.5"},
    "docs/rules.md": {"0.1"},
    "docs/memory_speed.md": {"2.11", "2.13", "0.1", "256", "64"},
    "docs/tuning.md": {"0.02", "0.01", "0.95", "0.98", "0.3", "0.75", "0.1", "1.5"},
    "docs/curvature.md": {"12"},
    "docs/results.md": {"0.1"},
    "docs/suite.md": {"16.5", "64"},
    "docs/recipes.md": {"0.06"},
    "docs/mnist.md": {"1.05"},
    "docs/claims.md": {"1.05", "90"},
    "docs/performance.md": {"804", "550"},  # peaks of runs in results/*/finals, in their metrics.jsonl
    "docs/layers.md": {"513", "256", "0.98", "0.95"},
    "docs/distributed.md": {"2.13", "20"},
    "docs/reliability.md": {"2.13", "10"},
}


@cache
def load(file: Path) -> Any:
    """Return what a record holds: JSON, or the list of a JSONL file's lines."""
    text = file.read_text()
    return [json.loads(line) for line in text.splitlines()] if file.suffix == ".jsonl" else json.loads(text)


def pick(found: Any, path: str) -> Any:
    """Follow a path of keys, indices and selections."""
    for part in re.findall(r"\[[^\]]*\]|[^.\[\]]+", path):
        if part.startswith("["):
            wanted = [pair.split("=") for pair in part[1:-1].split(",")]
            found = [one for one in found if all(_text(one, key) == value for key, value in wanted)][-1]
        else:
            found = found[part] if isinstance(found, dict) else found[int(part)]
    return found


def _text(found: Any, path: str) -> str:
    try:
        return str(pick(found, path))
    except (KeyError, IndexError):
        return ""


def value(key: str) -> float:
    """Return the number behind a key.

    Raises:
        KeyError: If nothing has that name.
    """
    if ":" in key:
        files, _, path = key.partition(":")
        found = [float(pick(load(file), path)) for file in sorted(RESULTS.glob(files))]
        return sum(found) / len(found)
    from named import NAMED, mnist  # it reads records with load and pick of this module

    return mnist()[key] if key.startswith("mnist.") else NAMED[key]()


def cited(what: str, shown: str) -> str:
    """Return the text that a marker must hold.

    Raises:
        LookupError: If the record has no such number.
    """
    key, _, form = what.rpartition(" ")
    if key != "in":
        return format(value(key), form).replace("%", " %")
    if not stands(shown, (RESULTS / form).read_text()):
        raise LookupError(f"{shown} is not in results/{form}")
    return shown


def stands(shown: str, text: str) -> bool:
    """Tell whether a number, to the digits shown, stands in a text: itself, or as a fraction of one."""
    wanted, decimals = float(shown.replace(",", "")), len(shown.partition(".")[2])
    there = (float(number.replace(",", "")) for number in re.findall(NUMBER, text))
    return any(round(scale * number, decimals) == wanted for number in there for scale in (1, 100))


def fill(text: str) -> str:
    """Return a page with every marked number written anew."""
    return MARKER.sub(lambda match: f"<!-- n: {match[1]} -->{cited(match[1], match[2])}<!-- /n -->", text)


def loose(text: str, allowed: set[str]) -> Iterator[str]:
    """Return measured numbers of a page that neither a marker nor a written table on it holds; code is left out."""
    blocks = re.compile(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->", re.DOTALL)
    written = "".join(match[0] for match in blocks.finditer(text))
    text = blocks.sub("", MARKER.sub("", text))
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]+>|https?://\S+", " ", text)
    for decimal, whole in MEASURED.findall(text):
        if (decimal or whole) not in allowed and not stands(decimal or whole, written):
            yield decimal or whole


def unlinked(page: Path, allowed: set[str]) -> list[str]:
    """Return measured numbers of a page that no record which it links to holds."""
    text = page.read_text()
    files = [page.parent / target for target in re.findall(r"\]\((\.\./results/[^)#]+)", text)]
    records = "".join(file.read_text() for file in files if file.is_file())
    return [number for number in loose(text, allowed) if not stands(number, records)]


def main(words: list[str]) -> None:
    """Write all pages' numbers, or show some."""
    for key in words:
        print(key, value(key))
    for page in [] if words else [ROOT / name for name in PAGES]:
        before = page.read_text()
        if (after := fill(before)) != before:
            page.write_text(after)
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
