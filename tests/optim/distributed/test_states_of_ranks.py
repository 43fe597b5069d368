"""State that several ranks share: written under one layout and read under another, by torch's ways and by ours."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import started
import states_worker as worker
from ranks import TESTS, Ends, assert_near, common_folder, of, one_at_a_time, run_ranks

pytestmark = [
    pytest.mark.over_a_second,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return common_folder(tmp_path_factory, "states")


def run_in(folder: Path, name: str, world: int, scenarios: tuple[str, ...]) -> Ends:
    (folder / name).mkdir(exist_ok=True)
    return run_ranks("states_worker.py", world, scenarios, folder / name)


@pytest.fixture(scope="module")
def four(folder: Path) -> Ends:
    return run_in(folder, "four", 4, ("first_stretch", "dcp_saves", "moves_of_words", "state_of_one_rank"))


@pytest.fixture(scope="module")
def two(folder: Path, four: Ends) -> Ends:
    return run_in(
        folder, "two", 2, ("second_stretch", "dcp_loads", "dcp_full", "a_layer_that_is_gone", "used_gradients")
    )


@pytest.fixture(scope="module")
def alone(folder: Path, two: Ends) -> Path:
    """The third stretch, on one process."""
    of(two, "second_stretch")
    done = folder / "alone-done"
    with one_at_a_time(folder):
        if not done.exists():
            for chain in worker.CHAINS:
                for method in worker.SAVED:
                    worker.stretch(chain, method, 2, folder=folder / "shared")
            for way in ("sharded", "flat"):
                worker.dcp_save("alone", way, folder=folder / "shared")
            done.touch()
    return folder


@pytest.fixture(scope="module")
def again(alone: Path) -> Ends:
    return run_in(alone, "again", 4, ("last_stretch", "dcp_loads_of_one"))


@pytest.mark.parametrize("method", worker.SAVED)
def test_a_training_moves_from_layout_to_layout(method: str, again: Ends) -> None:
    """4 ranks, 2, 1 and 4 again, with a layer that is frozen at the first move: the course is that of one process."""
    model, opt = worker.make("alone", method, 1)
    worker.train(model, opt, "alone", range(worker.STEPS[-1]))
    for end in of(again, "last_stretch"):
        for chain in worker.CHAINS:
            assert_near(end[f"{chain}-{method}"]["model"], worker.whole(model))


def assert_moved(ends: list[Any], method: str, saver: str) -> None:
    """Rows, FSDP2 with tensor parallel, FSDP2 alone, columns."""
    for end in ends:
        assert_near(end[f"{method}, {saver}"], worker.words_alone(method))


@pytest.mark.parametrize(("method", "saver"), [move for move in worker.MOVES if move not in worker.MORE_MOVES])
def test_a_training_moves_to_and_from_tensor_parallel(method: str, saver: str, four: Ends) -> None:
    assert_moved(of(four, "moves_of_words"), method, saver)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "saver"), worker.MORE_MOVES)
def test_more_move_to_and_from_tensor_parallel(method: str, saver: str, folder: Path) -> None:
    assert_moved(of(run_in(folder, "more", 4, ("more_moves_of_words",)), "more_moves_of_words"), method, saver)


@pytest.fixture(scope="module")
def went_on() -> dict[str, dict[str, Tensor]]:
    """One process's training, at the moment when it is saved and two steps later."""
    model, opt = worker.make("alone", "nothing set", 1)
    worker.train(model, opt, "alone", range(6))
    shown = worker.whole(model)
    worker.train(model, opt, "alone", range(6, 8))
    assert opt.average.offsets
    return {"shown": shown, "model": worker.whole(model)}


@pytest.mark.parametrize("layout", ["whole", "fsdp"])
@pytest.mark.parametrize(("saved", "way"), worker.OF_FOUR)
def test_torch_checkpoints_of_four_ranks_are_read_by_two(
    saved: str, way: str, layout: str, two: Ends, went_on: dict[str, dict[str, Tensor]]
) -> None:
    """With nothing set, so that the average of the weights is among what is saved."""
    for end in of(two, "dcp_loads"):
        for moment, expected in went_on.items():
            assert_near(end[f"{saved}, {way} as {layout}"][moment], expected)


@pytest.mark.parametrize("way", worker.WAYS)
@pytest.mark.parametrize("saved", ["whole", "fsdp"])
def test_torch_checkpoints_of_four_ranks_are_read_by_one(
    saved: str, way: str, four: Ends, folder: Path, went_on: dict[str, dict[str, Tensor]]
) -> None:
    of(four, "dcp_saves")
    end = worker.dcp_load(folder / "shared" / f"dcp-{saved}-{way}-4", "alone", way)
    for moment, expected in went_on.items():
        assert_near(end[moment], expected)


@pytest.mark.parametrize("way", ["sharded", "flat"])
def test_torch_checkpoints_of_one_process_are_read_by_four(
    way: str, again: Ends, went_on: dict[str, dict[str, Tensor]]
) -> None:
    for end in of(again, "dcp_loads_of_one"):
        for layout in ("whole", "fsdp", "hsdp"):
            for moment, expected in went_on.items():
                assert_near(end[f"{way} as {layout}"][moment], expected)


def test_the_whole_state_on_one_rank(two: Ends) -> None:
    first, second = of(two, "dcp_full")
    assert (first["parts"], second["parts"]) == (7, 0)
    for end in (first, second):
        assert_near(end["resumed"], end["model"])


def test_state_dict_on_one_rank_says_who_is_missing(four: Ends) -> None:
    first, *others = of(four, "state_of_one_rank")
    assert "state_dict() was called on rank 0, not on ranks [1, 2, 3]" in first["said"]
    assert "Gave up after 1 s" in first["said"]
    for end in (first, *others):  # and they are in step afterwards
        assert end["steps"] == 2
        assert_near(end["model"], first["model"])


# --- a layer that is gone -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:parameters .* are no longer part of the model")
@pytest.mark.parametrize(("method", "at"), worker.GONE)
def test_ranks_save_the_state_of_a_model_that_has_lost_a_layer(method: str, at: int, two: Ends) -> None:
    for end in of(two, "a_layer_that_is_gone"):
        assert_near(end[f"{method}, {at}"], worker.without_a_layer(method, at, process_group=None))


# --- gradients that the last step has used ------------------------------------------------------------------------


def test_ranks_are_told_of_gradients_that_the_last_step_has_used(two: Ends) -> None:
    for end in of(two, "used_gradients"):
        assert any("gradients that the last step used" in text for text in end["told"])
        assert all(torch.equal(end["before"][name], after) for name, after in end["after"].items())
        assert "no captured examples" in end["said"]


# --- a rank that dies ---------------------------------------------------------------------------------------------


def survive(folder: Path, world: int, kills: int, steps: int) -> None:
    """Kill a rank in so many steps, each at some moment of it; torchrun starts all anew."""
    chance = random.Random(kills)
    for step in sorted(chance.sample(range(1, steps), kills)):
        (folder / f"kill-{chance.randrange(world)}-{step}-{chance.randrange(60)}").touch()
    worker_file = str(TESTS / "states_worker.py")
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}",
               f"--max-restarts={kills}", worker_file, "elastic", str(folder), str(steps)]  # fmt: skip
    path = os.pathsep.join([str(TESTS), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = started.run(command, env=environment, timeout=120 + 60 * kills)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(list(folder.glob("killed-*"))) == kills
    model, opt = worker.make("alone", "nothing set", 1)
    worker.train(model, opt, "alone", range(steps))
    end = torch.load(folder / "state.pt", weights_only=True)
    assert end["step"] == end["state"]["ekfac"]["applied_steps"] == steps
    assert_near(end["model"], worker.whole(model))


def test_a_rank_dies_and_training_goes_on_exactly(tmp_path: Path) -> None:
    survive(tmp_path, world=2, kills=1, steps=8)


@pytest.mark.slow
def test_ranks_die_twenty_times(tmp_path: Path) -> None:
    survive(tmp_path, world=4, kills=20, steps=60)
