"""No number changes: trajectories of all rules are those that were recorded, and old checkpoints go on as they did.

``record.py`` made the record, and compares to the last bit on one machine. Here a tolerance leaves room for what other
instruction sets, libraries and numbers of threads make of the same sums.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trajectories.cases import CASES
from trajectories.record import CHECKPOINTS, DIGESTS
from trajectories.run import Digest, begin, resume_case, run_case

#: The largest difference seen between instruction sets, libraries' code paths and numbers of threads is about 1e-12.
TOLERANCE = 1e-9
RECORDED: dict[str, Digest] = {name: Digest(**digest) for name, digest in json.loads(DIGESTS.read_text()).items()}


def load(file: str) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(Path(__file__).with_name(f"{file}.pt"), weights_only=True)
    return checkpoint


def test_the_record_has_all_cases() -> None:
    assert RECORDED.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_trajectory(name: str) -> None:
    digest = Digest.of(CASES[name], run_case(CASES[name]))
    assert digest.difference(RECORDED[name]) <= TOLERANCE


@pytest.mark.parametrize("file", CHECKPOINTS)
def test_checkpoint_of_the_version_before(file: str) -> None:
    name = CHECKPOINTS[file]
    case = CASES[name]
    digest = Digest.of(case, resume_case(case, load(file)))
    assert digest.difference(RECORDED[name], first=case.saved or 0) <= TOLERANCE


@pytest.mark.parametrize("file", CHECKPOINTS)
def test_a_checkpoint_holds_what_the_trajectory_needs(file: str) -> None:
    """With the state of a new optimizer the run goes elsewhere: the test above sees whether state is taken back."""
    name = CHECKPOINTS[file]
    case = CASES[name]
    checkpoint = load(file)
    fresh = resume_case(case, {**checkpoint, "opt": begin(case).opt.state_dict()})
    assert Digest.of(case, fresh).difference(RECORDED[name], first=case.saved or 0) > 1e3 * TOLERANCE


@pytest.mark.parametrize("file", CHECKPOINTS)
def test_a_checkpoint_from_before_steps_were_rearranged_goes_on(file: str) -> None:
    """Other steps refresh bases and take in batches since then, so the numbers that follow are near, and no more.

    The default has another rate since then, and another rule: its old checkpoint goes on at the rate that it holds.
    """
    name = CHECKPOINTS[file]
    case = CASES[name]
    digest = Digest.of(case, resume_case(case, load(f"before_{file}")))
    if file == "default":
        assert digest.losses[-1] < digest.losses[0]
    else:
        assert digest.difference(RECORDED[name], first=case.saved or 0) < 0.1
