"""``python -m fuzz``: attacks the library, prints a table, and exits with 1 if a promise was not kept."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from ekfac.lab.training.runs import machine
from fuzz import (
    arguments,
    commands,
    files,
    inputs,
    invariances,
    kills,
    networks,
    pairs,
    replicas,
    runs,
    saves,
    solvers,
    spikes,
    states,
    studies,
)
from fuzz.harness import Fuzzer, Outcome, attempt, run, table

MODULES = (
    *(files, inputs, saves, runs, studies, commands, arguments, states, solvers, spikes, kills, replicas),
    *(networks, invariances, pairs),
)
FUZZERS: dict[str, Fuzzer] = {fuzzer.name: fuzzer for module in MODULES for fuzzer in module.FUZZERS}


def recorded(outcome: Outcome, seed: int) -> dict[str, object]:
    """Return what a page says of a fuzzer, with what it takes to repeat it."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "fuzzer": outcome.fuzzer.name,
        "tries": outcome.held + len(outcome.failures),
        "held": outcome.held,
        "failures": {str(number): why[:200] for number, why in outcome.failures.items()},
        "seconds": round(outcome.seconds),
        "seed": seed,
        "commit": commit.stdout.strip(),
        "command": f"PYTHONPATH=tests .venv/bin/python -m fuzz --only {outcome.fuzzer.name} --seed {seed}",
        "machine": machine()["processor"],
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], choices=list(FUZZERS), help="this fuzzer; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all random choices")
    parser.add_argument("--tries", type=int, help="of each fuzzer, instead of its own number")
    parser.add_argument("--repeat", type=int, help="make this one try of --only again, with its traceback")
    parser.add_argument("--journal", type=Path, default=Path(".fuzz"), help="folder that remembers what was tried")
    parser.add_argument("--record", type=Path, help="JSONL file that gets one line a fuzzer: tries, held, commit")
    parser.add_argument("--fresh", action="store_true", help="forget what was tried with this seed")
    values = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [FUZZERS[name] for name in values.only or FUZZERS]
    if values.repeat is not None:
        if len(chosen) != 1:
            parser.error("--repeat needs one --only")
        what, why, _ = attempt(chosen[0], values.seed, values.repeat)
        print(why or f"held: {what}")
        return int(why is not None)
    outcomes = []
    for fuzzer in chosen:
        journal = values.journal / f"seed-{values.seed}" / f"{fuzzer.name}.jsonl"
        if values.fresh:
            journal.unlink(missing_ok=True)
        numbers = range(values.tries if values.tries is not None else fuzzer.tries)
        outcome = run(fuzzer, values.seed, numbers, journal, lambda line: print(line, file=sys.stderr, flush=True))
        print(f"{fuzzer.name}: {outcome.held} of {len(numbers)} held in {outcome.seconds:.0f} s", flush=True)
        outcomes.append(outcome)
        if values.record is not None:
            with values.record.open("a") as stream:
                stream.write(json.dumps(recorded(outcome, values.seed)) + "\n")
    print()
    print(table(outcomes))
    return int(any(outcome.failures for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
