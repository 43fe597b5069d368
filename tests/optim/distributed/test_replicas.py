"""Processes that share statistics: equal to the bit, the same as one process, and in step when something goes wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import ekfac
import replicas_worker as worker
from ekfac.optim.distributed.owners import Owners, arithmetic
from ekfac.optim.distributed.processes import Processes
from ranks import Ends, assert_equal, assert_near, assert_replicas, common_folder, of, run_ranks

pytestmark = [
    pytest.mark.over_a_second,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]

ON_TWO = (
    "trajectories", "a_rank_without_batch", "unlike_threads", "solvers_fail_on_one_rank", "not_finite_on_one_rank",
    "each_its_own_model", "errors", "joined", "saved_and_loaded", "torch_checkpoints", "complex_parameters",
    "ranks_with_sparse_inputs",
)  # fmt: skip
ON_FOUR = (
    "trajectories", "a_rank_without_batch", "not_finite_on_one_rank", "subgroups", "saved_and_loaded",
    "ranks_with_sparse_inputs",
)  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run_ranks("replicas_worker.py", 2, ON_TWO, common_folder(tmp_path_factory, "replicas-two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run_ranks("replicas_worker.py", 4, ON_FOUR, common_folder(tmp_path_factory, "replicas-four"))


# --- the same as one process --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "method"), [*((2, method) for method in worker.TRAJECTORIES), *((4, method) for method in worker.FEW)]
)
def test_processes_train_as_one_does(method: str, world: int, request: pytest.FixtureRequest) -> None:
    ends = of(request.getfixturevalue({2: "two", 4: "four"}[world]), "trajectories")
    assert_as_one([end[method] for end in ends], method)


@pytest.mark.slow
@pytest.mark.parametrize("method", worker.MORE)
def test_more_processes_train_as_one_does(method: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    name = "more_trajectories"
    ends = run_ranks("replicas_worker.py", 4, (name,), common_folder(tmp_path_factory, "replicas-more"))
    assert_as_one([end[method] for end in of(ends, name)], method)


def assert_as_one(ends: list[Any], method: str) -> None:
    expected = worker.eventful(method)
    for end in ends:
        assert end["skipped"] == expected["skipped"] == 1
        assert_near(end["model"], expected["model"])
    assert_replicas(ends)


@pytest.mark.parametrize("method", ["nothing set", "running", "kfac"])
def test_complex_parameters_are_handed_round(method: str, two: Ends) -> None:
    ends = [end[method] for end in of(two, "complex_parameters")]
    expected = worker.turned(method=method)
    for end in ends:
        assert_near(end["before"], expected["before"])
        assert end["model"]["turn"].is_complex() and not torch.equal(end["model"]["turn"], end["before"]["turn"])
    assert_replicas(ends)


@pytest.mark.parametrize("world", [2, 4])
def test_inputs_are_as_sparse_as_those_of_one_process(world: int, request: pytest.FixtureRequest) -> None:
    ends = of(request.getfixturevalue({2: "two", 4: "four"}[world]), "ranks_with_sparse_inputs")
    expected = worker.mostly_zero()
    schedule, mean = expected["state"]["ekfac"]["lr_schedule"], (6 * 1 + 12 * 20) / 18
    assert schedule["scale"] == pytest.approx((256 / (8 * mean)) ** (0.5 * 256 / 260))
    for end in ends:
        assert end["state"]["ekfac"]["lr_schedule"] == schedule
    assert_replicas(ends)


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_may_have_no_batch(world: int, request: pytest.FixtureRequest) -> None:
    ends = of(request.getfixturevalue({2: "two", 4: "four"}[world]), "a_rank_without_batch")
    for end in ends:
        assert_near(end["model"], worker.missing()["model"])
    assert_replicas(ends)


# --- equal to the bit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", worker.METHODS)
def test_ranks_with_unlike_threads_are_equal(method: str, two: Ends) -> None:
    assert_replicas([end[method] for end in of(two, "unlike_threads")])


@pytest.mark.slow
@pytest.mark.parametrize("method", worker.METHODS)
def test_ranks_that_are_unlike_in_everything_are_equal_after_two_hundred_steps(
    method: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = "unlike_in_everything"
    ends = run_ranks("replicas_worker.py", 2, (name,), common_folder(tmp_path_factory, "replicas-unlike"))
    found = [end[method] for end in of(ends, name)]
    assert_replicas(found)
    assert found[0]["state"]["ekfac"]["applied_steps"] == 200
    assert all(bool(value.isfinite().all()) for value in found[0]["model"].values())


@pytest.mark.parametrize("method", ["default", "running", "per_example, warm"])
def test_solvers_that_fail_on_one_rank_leave_replicas_equal(method: str, two: Ends) -> None:
    ends = [end[method] for end in of(two, "solvers_fail_on_one_rank")]
    assert_replicas(ends)
    assert ends[0]["state"]["ekfac"]["fallbacks"].get("kept", 0) > 0


# --- decisions, groups and errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
def test_all_skip_what_one_must(world: int, request: pytest.FixtureRequest) -> None:
    ends = of(request.getfixturevalue({2: "two", 4: "four"}[world]), "not_finite_on_one_rank")
    assert [end["skipped"] for end in ends] == [1] * world
    assert_replicas(ends)


def test_without_a_group_every_process_is_on_its_own(two: Ends) -> None:
    for rank, end in enumerate(of(two, "each_its_own_model")):
        assert_near(end["model"], worker.alone(rank)["model"])


def test_groups_of_ranks(four: Ends) -> None:
    for pair in (slice(0, 2), slice(2, 4)):
        ends = of(four, "subgroups")[pair]
        expected = worker.eventful(ends[0]["method"])
        assert_near(ends[0]["end"]["model"], expected["model"])
        assert_replicas([end["end"] for end in ends])
        assert all("this process is not in the group" in end["refused"] for end in ends)


def test_errors_come_to_all_ranks(two: Ends) -> None:
    first, second = of(two, "errors")
    for said in (first, second):
        assert "'1.bias': (4,) torch.float64 on rank 0, none on rank 1" in said["other model"]
        assert "process_group=None" in said["other model"]
        assert "parameter '3.weight' differs between ranks" in said["other weights"]
        assert "train (freeze) different parameters" in said["other layers frozen"]
        assert "parameter '5.bias' differs between ranks" in said["changed later"]
        assert said["fine"] == ""
    assert "rank 1 of the process group" in first["one rank fails before"]
    assert "parameter '3.bias': its gradient is torch.sparse_coo" in second["one rank fails before"]
    assert "rank 1 of the process group" in first["one rank fails within"]
    assert "made to fail" in second["one rank fails within"]


def test_join(two: Ends) -> None:
    ends = of(two, "joined")
    assert [end["steps"] for end in ends] == [5, 5]
    assert_replicas(ends)


# --- state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("method", ["default", "running", "per_example, warm", "kfac"])
def test_state_of_many_is_state_of_one(method: str, world: int, request: pytest.FixtureRequest) -> None:
    ends = [end[method] for end in of(request.getfixturevalue({2: "two", 4: "four"}[world]), "saved_and_loaded")]
    model = worker.network()
    kind, own = worker.METHODS[method]
    model.load_state_dict(ends[0]["half"]["weights"])
    model[3].weight.requires_grad_(False)
    opt = kind(model, **own)
    opt.load_state_dict(ends[0]["half"]["state"])
    model[3].weight.requires_grad_(True)
    worker.train_whole(model, opt, range(6, 10))
    for end in ends:
        assert_equal(end["went on"]["model"], end["resumed"]["model"], "resumed")
        assert_near(end["went on"]["model"], {n: p.detach() for n, p in model.named_parameters()})
    assert_replicas([end["resumed"] for end in ends])
    assert_replicas([end["went on"] for end in ends])
    if method != "kfac":
        assert torch.allclose(ends[1]["curvature"], opt.curvature().diagonal(), rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_keeps_its_part(world: int, request: pytest.FixtureRequest) -> None:
    ends = [end["default"] for end in of(request.getfixturevalue({2: "two", 4: "four"}[world]), "trajectories")]
    whole = worker.eventful("default")["bytes"]
    kept = [end["bytes"] for end in ends]
    assert sum(kept) == whole
    assert max(kept) < 0.8 * whole


def test_torch_checkpoints(two: Ends) -> None:
    ends = of(two, "torch_checkpoints")
    for end in ends:
        assert_near(end["in memory"]["model"], end["went on"]["model"])
        assert_near(end["from disk"]["model"], end["went on"]["model"])
        assert_near(end["new"]["model"], end["went on"]["model"])
    for how in ("went on", "in memory", "from disk", "new"):
        assert_replicas([end[how] for end in ends])


# --- owners and arguments -----------------------------------------------------------------------------------------


class Many(Processes):
    """So many processes, none of which runs."""

    @property
    def size(self) -> int:
        return 4


def test_owners_share_arithmetic_and_bytes() -> None:
    widths = [400, 300, 300, 300, 200, 200, 100, 100, 400, 50, 50, 250]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    opt = ekfac.EKFAC(nn.Sequential(*layers, nn.PReLU()))
    numbers = opt.engine.method.numbers
    owners = Owners(Many(None), numbers)
    owners.assign(opt.engine.partition.blocks)
    for cost in (arithmetic, numbers):
        loads = [sum(cost(b) for b in opt.engine.partition.blocks if owners.of(b) == rank) for rank in range(4)]
        assert max(loads) <= 1.3 * sum(loads) / 4
    before = {b: owners.of(b) for b in opt.engine.partition.blocks}
    owners.assign(opt.engine.partition.blocks)  # when a layer is frozen, say: nobody's state moves
    assert before == {b: owners.of(b) for b in opt.engine.partition.blocks}


@pytest.mark.parametrize("group", [3, "world", object()])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(ValueError, match="process_group="):
        ekfac.EKFAC(nn.Linear(2, 2), process_group=group)
