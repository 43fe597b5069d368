"""Parameters that are sharded over ranks: the same as one process, however they are laid out."""

from __future__ import annotations

import pytest
import torch

import sharded_worker as worker
from ranks import Ends, assert_near, of, run_ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch was built without torch.distributed"
)

ON_TWO = ("fsdp", "fsdp_in_other_ways")
ON_FOUR = ("fsdp", "hsdp")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run_ranks("sharded_worker.py", 2, ON_TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run_ranks("sharded_worker.py", 4, ON_FOUR, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize(("world", "layout"), [(2, "fsdp"), (4, "fsdp"), (4, "hsdp")])
@pytest.mark.parametrize("method", worker.base.TRAJECTORIES)
def test_ranks_train_as_one_process_does(
    method: str, world: int, layout: str, request: pytest.FixtureRequest
) -> None:
    expected = worker.eventful(method)
    for end in of(request.getfixturevalue({2: "two", 4: "four"}[world]), layout):
        assert end[method]["skipped"] == expected["skipped"] == 1
        assert_near(end[method]["model"], expected["model"])


@pytest.mark.parametrize("layout", ["fsdp, root alone", "fsdp, after"])
def test_it_does_not_matter_what_is_sharded_when(layout: str, two: Ends) -> None:
    expected = worker.eventful("default")
    for end in of(two, "fsdp_in_other_ways"):
        assert_near(end[layout]["model"], expected["model"])
