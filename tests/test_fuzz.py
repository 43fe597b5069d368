"""A few tries of every fuzzer, and the harness itself; ``make fuzz`` makes thousands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuzz.__main__ import FUZZERS
from fuzz.harness import Broken, Fuzzer, attempt, run, table

#: How many, or which.
TRIES: dict[str, int | range] = {
    "disk-full": 3,
    "kills": 1,
    "save-checkpoint": 15,
    "train": 10,
    "runs": 15,
    "studies": 6,
    "constructors": 10,
    "spikes": 2,
    "moments": 2,
    "batches": 2,
    "solvers": 6,
    "states": 12,
    "settings": 5,
    "plans": 15,
    "suites": 2,
    "databases": 3,
    "beside": 5,
    "pickles": 7,
    "replicas": range(5, 6),  # two ranks with nothing set, unlike threads and a solver that fails on one
    "ranks": 3,
    "networks": 25,
    "resumed": 6,
    "unchanged": 6,
    "pairs": 1,
}


@pytest.mark.parametrize("name", list(FUZZERS))
def test_a_few_tries(name: str) -> None:
    tries = TRIES.get(name, 25)
    for number in range(tries) if isinstance(tries, int) else tries:
        what, why, _ = attempt(FUZZERS[name], 123, number)
        assert why is None, f"try {number}: {why}"
        assert what


def _sometimes(chance, folder: Path) -> str:
    assert not list(folder.iterdir())
    if chance.random() < 0.5:
        raise Broken("tails")
    return "heads"


def test_tries_are_seeded_journalled_and_not_repeated(tmp_path: Path) -> None:
    fuzzer = Fuzzer("coin", "heads", 20, _sometimes)
    first = run(fuzzer, 5, range(10), tmp_path / "coin", lambda line: None)
    kept = (tmp_path / "coin").read_text()
    (tmp_path / "coin").write_text(kept + '{"try": 10, "wha')  # killed in the middle of a line
    said: list[str] = []
    again = run(fuzzer, 5, range(20), tmp_path / "coin", said.append)
    assert 0 < first.held < 10 and first.held + len(first.failures) == 10
    assert {n: w for n, w in again.failures.items() if n < 10} == first.failures
    assert len(said) == len(again.failures) - len(first.failures)
    fresh = run(fuzzer, 5, range(20), tmp_path / "other", lambda line: None)
    assert fresh.failures == again.failures and fresh.kinds == again.kinds
    text = table([again])
    assert f"{len(again.failures)} x Broken: tails" in text and "heads" in text
    assert [json.loads(line)["try"] for line in (tmp_path / "coin").read_text().splitlines()] == list(range(20))
