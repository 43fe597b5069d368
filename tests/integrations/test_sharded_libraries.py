"""A tiny Llama on two ranks under fully_shard, Accelerate's FSDP2 plugin and Lightning's ModelParallelStrategy.

Each trains, in float64 and to the last digits, as one process with the whole batch does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import libraries_worker as worker
from ranks import TESTS, assert_near

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")


def on_two_ranks(name: str, folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               worker.__file__, name, str(folder)]  # fmt: skip
    path = os.pathsep.join([str(TESTS), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", ["fully_sharded", "accelerate", "accelerate_resumed", "lightning"])
def test_a_llama_trains_as_on_one_process(name: str, tmp_path: Path) -> None:
    package = name.partition("_")[0]
    if name != "fully_sharded":
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    model = worker.llama()
    opt = worker.optimizer(model)
    expected = worker.result(model, opt, worker.train(model, opt))
    for end in on_two_ranks(name, tmp_path):
        assert end["sharded"] and end["steps"] == worker.STEPS
        assert end["covered"] == expected["covered"] == 21
        assert_near(end["model"], expected["model"])
        assert end["losses"][-1] < 0.5 * expected["losses"][0]


def test_a_llama_whose_head_is_its_embedding(tmp_path: Path) -> None:
    for end in on_two_ranks("tied", tmp_path):
        assert end["sharded"] and end["covered"] == 20
        assert_near(end["model"], end["replicas"])
        assert end["losses"][-1] < 0.7 * end["losses"][0]
