"""Record every trajectory to the last bit, or compare with such a record.

    python tests/trajectories/record.py FILE             write losses, last parameters and checkpoints of all cases
    python tests/trajectories/record.py --compare FILE   run all cases again, go on from the checkpoints, and compare
    python tests/trajectories/record.py --commit         rewrite what the test compares with, which is in this folder

Bits are the same only on one machine with one number of threads and one version of torch: one thread is used. The
committed record is of the version before the code was rearranged. Rewrite it only for a change that is meant to change
numbers.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from trajectories.cases import CASES, Case  # noqa: E402
from trajectories.run import Digest, Trajectory, resume_case, run_case  # noqa: E402

#: The committed digests, and the cases whose checkpoints are committed.
DIGESTS = HERE / "digests.json"
CHECKPOINTS = {
    "default": "default, batchnorm",
    "paper": "paper, batchnorm",
    "kfac": "kfac, batchnorm",
}


def as_data(trajectory: Trajectory) -> dict[str, Any]:
    losses = torch.tensor(trajectory.losses, dtype=torch.float64)
    return {"losses": losses, "parameters": trajectory.parameters, "checkpoint": trajectory.checkpoint}


def relative_difference(one: Tensor, two: Tensor) -> float:
    """The largest, relative to the largest entry; 0 only if they are equal to the last bit."""
    if torch.equal(one, two):
        return 0.0
    difference = (one - two).abs().max() / two.abs().max()
    return float(difference)


def difference(found: Trajectory, recorded: dict[str, Any], first: int = 0) -> float:
    """The largest relative one of losses and of any parameter."""
    pairs = [(torch.tensor(found.losses, dtype=torch.float64), recorded["losses"][first:])]
    if found.parameters.keys() != recorded["parameters"].keys():
        return float("nan")
    pairs += [(p, recorded["parameters"][name]) for name, p in found.parameters.items()]
    return float(torch.tensor([relative_difference(*pair) for pair in pairs]).max())  # NaN if any is


def write(path: Path, data: bytes) -> None:
    """Replace a file at once."""
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(data)
    os.replace(beside, path)


def saved(data: Any) -> bytes:
    file = io.BytesIO()
    torch.save(data, file)
    return file.getvalue()


def record(path: Path) -> None:
    write(path, saved({name: as_data(run_case(case, copy.deepcopy)) for name, case in CASES.items()}))
    print(f"{len(CASES)} cases in {path}, {path.stat().st_size / 2**20:.1f} MiB")


def attempts(name: str, case: Case, recorded: dict[str, Any]) -> list[tuple[str, float]]:
    """The case from its start, and from the recorded checkpoint where there is one."""
    found = [(name, difference(run_case(case), recorded))]
    if recorded["checkpoint"] is not None:
        again = resume_case(case, recorded["checkpoint"])
        found.append((f"{name}, from its checkpoint", difference(again, recorded, first=case.saved or 0)))
    return found


def compare(path: Path) -> int:
    """Print which cases are equal to the last bit, and how far the others are off; returns how many are."""
    recorded = torch.load(path, weights_only=True)
    for what, names in (("record", CASES.keys() - recorded), ("table", recorded.keys() - CASES)):
        for name in sorted(names):
            print(f"not in the {what}: {name}")
    found: list[tuple[str, float]] = []
    failed: list[str] = []
    for name in recorded:
        if name not in CASES:
            continue
        try:
            found += attempts(name, CASES[name], recorded[name])
        except Exception as error:  # all others are to be seen nevertheless
            failed.append(f"{name}: {type(error).__name__}: {error}")
    others = [(name, error) for name, error in found if error != 0]
    for name, error in found:
        if error == 0:
            print(f"equal     {name}")
    for name, error in others:
        print(f"{error:8.1e}  {name}")
    for line in failed:
        print(f"failed    {line}")
    print(f"{len(found) - len(others)} of {len(found) + len(failed)} are equal to the last bit", end="")
    worst = f"; largest relative difference {max(error for _, error in others):.1e}" if others else ""
    print(f"{worst}; {len(failed)} failed" if failed else worst)
    return len(others) + len(failed) + len(recorded.keys() ^ CASES.keys())


def commit() -> None:
    digests = {}
    for name, case in CASES.items():
        trajectory = run_case(case, copy.deepcopy)
        digests[name] = dataclasses.asdict(Digest.of(case, trajectory))
        for file, of in CHECKPOINTS.items():
            if of == name:
                write(HERE / f"{file}.pt", saved(trajectory.checkpoint))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(digest)}" for name, digest in digests.items())
    write(DIGESTS, f"{{\n{lines}\n}}\n".encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", type=Path, help="where to write a full record")
    what.add_argument("--compare", type=Path, metavar="FILE", help="a full record to compare with")
    what.add_argument("--commit", action="store_true", help="rewrite the digests and checkpoints beside this script")
    parser.add_argument("--threads", type=int, default=1, help="how many torch may use (default 1)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.compare is not None:
        return int(compare(given.compare) > 0)
    if given.commit:
        commit()
    else:
        record(given.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
