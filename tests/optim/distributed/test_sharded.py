"""Parameters that are sharded over ranks: the same as one process, however they are laid out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sharded_worker as worker
from ranks import Ends, assert_near, common_folder, of, run_ranks

pytestmark = [
    pytest.mark.over_a_second,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]

ON_TWO = (
    "ddp", "fsdp", "fsdp_in_other_ways", "tensor_parallel", "other_kinds_of_layers", "preconditioner",
    "mixed_precision", "refusals", "scaler_skips_on_one_rank", "bytes_and_messages",
)  # fmt: skip
ON_FOUR = ("ddp", "fsdp", "hsdp", "tensor_parallel", "bytes_and_messages")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run_ranks("sharded_worker.py", 2, ON_TWO, common_folder(tmp_path_factory, "sharded-two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run_ranks("sharded_worker.py", 4, ON_FOUR, common_folder(tmp_path_factory, "sharded-four"))


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run_ranks("sharded_worker.py", 4, ("more_on_four",), common_folder(tmp_path_factory, "sharded-more"))


def assert_as_one(ends: list[Any], method: str) -> None:
    expected = worker.eventful(method)
    for end in ends:
        assert end["skipped"] == expected["skipped"] == 1
        assert_near(end["model"], expected["model"])
        assert_near(end["shown"], expected["shown"])


@pytest.mark.parametrize(
    ("world", "layout", "method"),
    [
        *((2, "ddp", method) for method in worker.HYBRID),
        *((2, "fsdp", method) for method in worker.base.TRAJECTORIES),
        *((4, layout, method) for layout in ("ddp", "fsdp", "hsdp") for method in worker.ON_FOUR[layout]),
    ],
)
def test_ranks_train_as_one_process_does(world: int, layout: str, method: str, request: pytest.FixtureRequest) -> None:
    assert_as_one([end[method] for end in of(request.getfixturevalue({2: "two", 4: "four"}[world]), layout)], method)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "method", "world"), worker.MORE)
def test_more_ranks_train_as_one_process_does(layout: str, method: str, world: int, more: Ends) -> None:
    assert_as_one([end[f"{layout}: {method}"] for end in of(more, "more_on_four")], method)


@pytest.mark.parametrize("method", ["nothing set", "default"])
@pytest.mark.parametrize("layout", ["fsdp, root alone", "fsdp, after"])
def test_it_does_not_matter_what_is_sharded_when(layout: str, method: str, two: Ends) -> None:
    expected = worker.eventful(method)
    for end in of(two, "fsdp_in_other_ways"):
        assert_near(end[layout][method]["model"], expected["model"])
        assert_near(end[layout][method]["shown"], expected["shown"])


@pytest.mark.parametrize(("layout", "method", "world"), worker.SPREAD)
def test_ranks_compute_layers_together(layout: str, method: str, world: int, request: pytest.FixtureRequest) -> None:
    expected = worker.spread(method, layout)
    for end in of(request.getfixturevalue({2: "two", 4: "four"}[world]), "tensor_parallel"):
        assert end[f"{layout}: {method}"]["skipped"] == expected["skipped"] == 1
        assert_near(end[f"{layout}: {method}"]["model"], expected["model"])


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "method", "world"), worker.MORE_SPREAD)
def test_more_ranks_compute_layers_together(layout: str, method: str, world: int, more: Ends) -> None:
    expected = worker.spread(method, layout)
    for end in of(more, "more_on_four"):
        assert end[f"{layout}: {method}"]["skipped"] == expected["skipped"] == 1
        assert_near(end[f"{layout}: {method}"]["model"], expected["model"])


@pytest.mark.parametrize("layout", ["units", "root"])
def test_kinds_of_layers_are_recognised_and_read_when_sharded(layout: str, two: Ends) -> None:
    expected = worker.kinds()
    for end in of(two, "other_kinds_of_layers"):
        assert end[layout]["covered"] == expected["covered"] >= 8
        assert_near(end[layout]["model"], expected["model"])


def test_preconditioner_on_pieces(two: Ends) -> None:
    expected = worker.preconditioned()
    for end in of(two, "preconditioner"):
        assert_near(end["model"], expected["model"])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.2)])
def test_mixed_precision_policy(dtype: str, tolerance: float, two: Ends) -> None:
    """State stays in the precision of the parameters; the course is that of full precision, up to the policy's."""
    expected, start = worker.mixed()["model"], dict(worker.network().named_parameters())
    for end in of(two, "mixed_precision"):
        assert end[dtype]["dtypes"] == ["torch.float32", "torch.float64"]
        for name, value in expected.items():
            moved = (value - start[name]).norm()
            assert (end[dtype]["model"][name] - value).norm() <= tolerance * moved, name


def test_what_cannot_be_shared_is_refused(two: Ends) -> None:
    for said in of(two, "refusals"):
        assert "process_group: parameter '0.weight' is sharded over ranks [0, 1]" in said["alone"]
        assert "AdaptiveDamping" in said["adaptive"]
        assert "parameter 'weight' is complex (torch.complex64) and sharded over ranks" in said["complex"]
        assert "parameter '0.weight' was replaced after steps were taken" in said["too late"]
        assert said["afterwards"] == ""
    first, second = of(two, "refusals")
    assert "rank 1 of the process group" in first["one rank fails within"]
    assert "made to fail" in second["one rank fails within"]


@pytest.mark.parametrize("how", ["whole", "fsdp"])
def test_a_scaler_that_skips_on_one_rank_leaves_nobody_waiting(how: str, two: Ends) -> None:
    expected = worker.scaled_alone()["model"]
    for end in of(two, "scaler_skips_on_one_rank"):
        assert end[how]["skipped"] == 1
        for name, value in expected.items():
            assert torch.allclose(end[how]["model"][name], value, rtol=1e-3, atol=1e-4), name


def test_a_mesh_of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    ends = run_ranks("sharded_worker.py", 1, ("one_rank",), common_folder(tmp_path_factory, "sharded-one"))
    (end,) = of(ends, "one_rank")
    for method, found in end.items():
        assert_near(found["model"], worker.eventful(method)["model"])


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_keeps_its_part_of_the_curvature(world: int, layout: str, request: pytest.FixtureRequest) -> None:
    alone = worker.traffic("ddp", 0, 1)
    ends = [end[layout] for end in of(request.getfixturevalue({2: "two", 4: "four"}[world]), "bytes_and_messages")]
    for kept in ("counted", "summary"):
        assert sum(end[kept] for end in ends) == alone[kept]
        for end in ends:
            assert abs(end[kept] / alone[kept] * world - 1) <= 0.15
    for end in ends:  # but for two counts a block, in float64
        assert end["summary"] <= end["counted"] <= end["summary"] + 12 * 3 * 8
        assert "on this rank" in end["text"]
    assert "on this rank" not in alone["text"]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("world", [2, 4])
def test_messages_and_bytes_of_a_step(world: int, layout: str, request: pytest.FixtureRequest) -> None:
    """A few messages an owner; in an ordinary step fewer bytes than averaging the gradients takes.

    In one that takes statistics no more than 1.5 times as many as DDP's averaging.
    """
    for end in of(request.getfixturevalue({2: "two", 4: "four"}[world]), "bytes_and_messages"):
        assert all(messages <= 2 * world + 6 for messages, _, _ in end[layout]["steps"][1:])
        assert max(sent for _, sent, _ in end[layout]["steps"]) <= 1.5 * end["ddp"]["averaging"]
        ordinary = [sent for _, sent, all_take in end[layout]["steps"] if not all_take]
        assert len(ordinary) >= 2
        assert max(ordinary) <= end[layout]["averaging"]
