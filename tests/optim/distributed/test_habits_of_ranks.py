"""Nothing set, so that the average of the weights is shown: other ways to shard, wrap and call a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import habits_worker as worker
from ekfac.optim.distributed.owners import Owners
from ekfac.optim.distributed.processes import Processes
from ekfac.optim.distributed.shards import Shards
from ranks import Ends, assert_equal, assert_near, assert_replicas, common_folder, of, run_ranks

pytestmark = [
    pytest.mark.over_a_second,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]

ON_TWO = (
    "ways_of_sharding", "accumulated", "recomputed", "unused", "joined_with_nothing_set",
    "a_rank_without_batch_and_nothing_set", "running_statistics", "wrapped", "other_models", "offloaded",
    "weights_that_somebody_changes", "parts_alone",
)  # fmt: skip
ON_FOUR = ("ways_of_sharding", "a_rank_without_batch_and_nothing_set", "part_of_the_ranks")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run_ranks("habits_worker.py", 2, ON_TWO, common_folder(tmp_path_factory, "habits-two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run_ranks("habits_worker.py", 4, ON_FOUR, common_folder(tmp_path_factory, "habits-four"))


def assert_as_alone(ends: list[Any], pieces: int = 1, ways: int = 1) -> None:
    """Compare parameters, and what evaluation has shown on the way, with those of one process."""
    expected = worker.alone(pieces)
    for end in ends:
        assert len(end) >= ways
        for found in end.values():
            assert_near(found["model"], expected["model"])
            assert_near(found["shown"], expected["shown"])


def test_copies_that_were_gathered_before_are_let_go(two: Ends) -> None:
    assert_as_alone(of(two, "ways_of_sharding"), ways=7)


def test_copies_of_four_ranks(four: Ends) -> None:
    assert_as_alone(of(four, "ways_of_sharding"))


@pytest.mark.slow
def test_all_copies_of_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> None:
    name = "all_ways_of_sharding"
    ends = run_ranks("habits_worker.py", 4, (name,), common_folder(tmp_path_factory, "habits-more"))
    assert_as_alone(of(ends, name), ways=8)


def test_gradients_of_several_passes(two: Ends) -> None:
    assert_as_alone(of(two, "accumulated"), pieces=2, ways=2)


def test_what_is_computed_again_within_a_backward_pass(two: Ends) -> None:
    assert_as_alone(of(two, "recomputed"), ways=5)


@pytest.mark.parametrize("scenario", ["wrapped", "offloaded"])
def test_ddp_or_what_is_in_it_and_parameters_on_the_cpu(scenario: str, two: Ends) -> None:
    assert_as_alone(of(two, scenario))


def test_a_part_of_the_ranks(four: Ends) -> None:
    assert_as_alone(of(four, "part_of_the_ranks"))


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_layers_that_some_batches_do_not_use(layout: str, two: Ends) -> None:
    for end in of(two, "unused"):
        assert_near(end[layout]["model"], worker.some_unused(layout)["model"])


@pytest.mark.parametrize("who", ["one after the other", "one without any"])
def test_join_with_nothing_set(who: str, two: Ends) -> None:
    ends = [end[who] for end in of(two, "joined_with_nothing_set")]
    assert_replicas(ends)
    average = ends[0]["state"]["ekfac"]["average"]
    assert average["possible"] and len(average["offsets"]) == len(ends[0]["model"])


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_may_have_no_batch_and_averages_all_the_same(world: int, request: pytest.FixtureRequest) -> None:
    scenario = "a_rank_without_batch_and_nothing_set"
    ends = [end[""] for end in of(request.getfixturevalue({2: "two", 4: "four"}[world]), scenario)]
    for end in ends:
        assert_near(end["model"], worker.missing()["model"])
    assert_replicas(ends)


def test_running_statistics_are_saved_as_the_first_rank_has_them(two: Ends) -> None:
    first, second = of(two, "running_statistics")
    assert len(first["saved"]["statistics"]) == 2
    assert_equal(first["saved"], second["saved"])
    for end in (first, second):
        assert_near(end["resumed"], end["went on"])


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "without a batch"])
def test_ranks_find_together_that_somebody_changes_weights(layout: str, two: Ends) -> None:
    """Also where one of them alone can tell."""
    first, second = (end[layout] for end in of(two, "weights_that_somebody_changes"))
    assert first["averaged"][0] > 0 == first["averaged"][-1]
    assert_equal(first, second)


def test_ranks_find_together_that_only_parts_are_called(two: Ends) -> None:
    first, second = of(two, "parts_alone")
    assert first["averaged"][5] > 0 == first["averaged"][-1]
    assert_equal(first, second)


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "compiled"])
@pytest.mark.parametrize("name", worker.MODELS)
def test_other_models(name: str, layout: str, two: Ends) -> None:
    for end in of(two, "other_models"):
        expected = worker.other(name, "") if worker.MODELS[name][1] else end[f"{name}, ddp"]
        assert_near(end[f"{name}, {layout}"]["model"], expected["model"])
        assert end[f"{name}, {layout}"]["averaged"] == expected["averaged"] > 0


def test_parameters_that_rest_elsewhere_than_they_are_used_are_refused() -> None:
    """As CPUOffloadPolicy has it where there is a GPU."""
    p: Any = SimpleNamespace(device=torch.device("cpu"), device_mesh=SimpleNamespace(device_type="cuda"))
    with pytest.raises(ValueError, match=r"'0\.weight' is stored on cpu and used on cuda.*without offload_policy"):
        Shards(Owners(Processes(None), lambda block: 1))._check(p, "0.weight")
