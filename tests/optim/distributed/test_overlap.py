"""Statistics that are sent during the backward pass: exact whenever they come, and one half of each factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import overlap_worker as worker
from ekfac.optim.distributed.buckets import half, whole
from ranks import Ends, assert_near, assert_replicas, common_folder, of, run_ranks

pytestmark = [
    pytest.mark.over_a_second,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]

ON_TWO = ("statistics_at_odd_times", "during_the_backward_pass", "groups_are_used_again")
ON_FOUR = ("statistics_at_odd_times",)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run_ranks("overlap_worker.py", 2, ON_TWO, common_folder(tmp_path_factory, "overlap-two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run_ranks("overlap_worker.py", 4, ON_FOUR, common_folder(tmp_path_factory, "overlap-four"))


@pytest.mark.parametrize(
    ("world", "method", "full"),
    [(world, *case) for world in (2, 4) for case in worker.CASES if world == 2 or case not in worker.MORE],
)
def test_it_does_not_matter_when_statistics_are_complete(
    world: int, method: str, full: int, request: pytest.FixtureRequest
) -> None:
    """Dropped on one rank, of more or fewer passes than before, of layers that one rank does not use, and so on."""
    ends = of(request.getfixturevalue({2: "two", 4: "four"}[world]), "statistics_at_odd_times")
    assert_as_one([end[f"{method}, {full}"] for end in ends], method)
    if full == 1 and method == "default":
        assert sum(ends[-1][f"{method}, 1"]["early"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("method", "full"), worker.MORE)
def test_nor_does_it_on_four_ranks(method: str, full: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    name = "more_at_odd_times"
    ends = run_ranks("overlap_worker.py", 4, (name,), common_folder(tmp_path_factory, "overlap-more"))
    assert_as_one([end[f"{method}, {full}"] for end in of(ends, name)], method)


def assert_as_one(ends: list[Any], method: str) -> None:
    expected = worker.eventful(method)
    for found in ends:
        assert found["skipped"] == expected["skipped"] == 1
        assert_near(found["model"], expected["model"])
    assert_replicas(ends)


def test_buckets_leave_while_the_backward_pass_goes_on(two: Ends) -> None:
    names = [str(i) for i in range(10, -2, -2)]
    for end in of(two, "during_the_backward_pass"):
        assert end["planned"] == [[], names, names, names]  # the first step learns in which order layers come
        assert end["in the end"] == [0, 6, 6, 6]
        assert end["at first"][0] == 0
        assert all(count >= 4 for count in end["at first"][1:])


def test_groups_of_optimizers_that_are_gone_are_used_again(two: Ends) -> None:
    for end in of(two, "groups_are_used_again"):
        assert len(set(end["counts"])) == 1
        assert not end["shared"]


@pytest.mark.parametrize("d", range(1, 8))
def test_one_half_is_enough(d: int) -> None:
    matrix = torch.randn(3, d, d)
    matrix = matrix + matrix.mT
    packed = half(matrix)
    assert packed.shape[1] <= d * (d + 1) / 2 + d / 2
    assert torch.equal(whole(packed, d), matrix)


def test_vectors_stay_as_they_are() -> None:
    diagonal = torch.rand(2, 5)
    assert half(diagonal) is diagonal
