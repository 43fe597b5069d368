"""Runs fuzzers: every try has a number, its own random numbers, and a line in a journal, so that nothing is lost."""

from __future__ import annotations

import json
import random
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

Try = Callable[[random.Random, Path], str]


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass(frozen=True)
class Fuzzer:
    """One kind of attack.

    Attributes:
        name: Its name on the command line.
        promise: What must hold, in one line.
        tries: How many tries ``make fuzz`` makes.
        attack: Makes one try in an empty folder; returns in a few words what was tried, or raises.
    """

    name: str
    promise: str
    tries: int
    attack: Try


@dataclass
class Outcome:
    """What came of a fuzzer's tries."""

    fuzzer: Fuzzer
    held: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


def attempt(fuzzer: Fuzzer, seed: int, number: int) -> tuple[str, str | None, float]:
    """Make one try; return what was tried, why it failed if it did, and the seconds it took."""
    chance = random.Random(f"{seed} {fuzzer.name} {number}")
    torch.manual_seed(chance.randrange(2**31))
    start = time.monotonic()
    what, why = "", None
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            what = fuzzer.attack(chance, Path(folder))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            lines = str(error).splitlines()
            why = f"{type(error).__name__}: {lines[0] if lines else ''}"
            if not isinstance(error, Broken):
                why += f" ({Path(last.filename).name}:{last.lineno})"
    return what, why, time.monotonic() - start


def run(fuzzer: Fuzzer, seed: int, numbers: Iterable[int], journal: Path, say: Callable[[str], None]) -> Outcome:
    """Make the tries that the journal does not have yet, and return what came of all of them."""
    outcome = Outcome(fuzzer)
    journal.parent.mkdir(parents=True, exist_ok=True)
    lines = journal.read_text().split("\n")[:-1] if journal.exists() else []  # a last one without its end is left out
    known: dict[int, dict[str, object]] = {entry["try"]: entry for entry in map(json.loads, lines)}
    journal.write_text("".join(line + "\n" for line in lines))
    with journal.open("a") as stream:
        for number in numbers:
            entry = known.get(number)
            if entry is None:
                what, why, seconds = attempt(fuzzer, seed, number)
                entry = {"try": number, "what": what, "failure": why, "seconds": round(seconds, 3)}
                stream.write(json.dumps(entry) + "\n")
                stream.flush()
                if why is not None:
                    say(f"{fuzzer.name} {number}: {why}")
            outcome.seconds += float(entry["seconds"])  # type: ignore[arg-type]
            if entry["failure"] is None:
                outcome.held += 1
                outcome.kinds[str(entry["what"])] += 1
            else:
                outcome.failures[number] = str(entry["failure"])
    return outcome


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the outcomes as text: tried, held, and the failures by their reason."""
    rows = [("fuzzer", "tried", "held", "failed", "seconds", "promise")]
    below = []
    for one in outcomes:
        failed = len(one.failures)
        rows.append(
            (
                one.fuzzer.name,
                str(one.held + failed),
                str(one.held),
                str(failed),
                f"{one.seconds:.0f}",
                one.fuzzer.promise,
            )
        )
        reasons: dict[str, list[int]] = {}
        for number, why in one.failures.items():
            reasons.setdefault(why[:110], []).append(number)
        for why, numbers in sorted(reasons.items(), key=lambda item: -len(item[1]))[:12]:
            below.append(f"{one.fuzzer.name}: {len(numbers)} x {why}  [try {numbers[0]}]")
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=False))
        )
        + "  "
        + row[5]
        for row in rows
    ]
    return "\n".join([*lines, *([""] if below else []), *below])
