"""Everything is in the state dict: a run continued in a new process is the run that was never stopped."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ekfac
import started
from helpers import mean_loss
from paper import EKFAC, KFAC

# Imported by the test and run as a program in the new process: trains from a checkpoint, or from the start.
ROOT = str(Path(__file__).parents[2])  # the workers import the tests' optimizers

WORKER = """
import sys

import torch
from torch import nn
from torch.nn import functional as F

import ekfac
import paper

METHODS = {
    "per_example": (paper.EKFAC, {"scaling": "per_example", "scaling_decay": 0.9}),
    "running": (paper.EKFAC, {"scaling": "running", "kl_clip": 0.01}),
    "carried": (paper.EKFAC, {"scaling": "running", "on_refresh": "carry", "sharing": "reduce"}),
    "kronecker": (paper.EKFAC, {"scaling": "kronecker", "damping_mode": "factored"}),
    "kfac": (paper.KFAC, {}),
    "default": (ekfac.EKFAC, {}),
    "default kfac": (ekfac.KFAC, {}),
}


def build(method):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 48), nn.PReLU(),
        nn.Linear(48, 3),
    )
    kind, own = METHODS[method]
    return model, kind(model, lr=0.02, momentum=0.9, weight_decay=0.01, refresh_every=4, **own)


def go(model, opt, first, last):
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, 2, 3, 3, generator=generator)
        y = torch.randint(3, (16,), generator=generator)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()


def main(folder, first, last):
    torch.set_num_threads(1)
    for method in METHODS:
        model, opt = build(method)
        saved = torch.load(f"{folder}/{method}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        go(model, opt, int(first), int(last))
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, f"{folder}/{method}-end.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
"""
worker: dict[str, Any] = {"__name__": "worker"}
exec(WORKER, worker)


def assert_same_data(one: Any, two: Any, where: str = "state") -> None:
    """Bit-equal tensors and equal numbers, through dicts and lists."""
    assert type(one) is type(two), where
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one.keys() - {"refresh_seconds"}:  # a clock's reading
            assert_same_data(one[key], two[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(two), where
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            assert_same_data(a, b, f"{where}[{i}]")
    elif isinstance(one, Tensor):
        assert one.dtype == two.dtype and torch.equal(one, two), where
    else:
        assert one == two or one != one, where


def assert_plain(value: Any, where: str = "state") -> None:
    """Tensors, numbers, strings, None and containers of them: nothing that needs this library to be read."""
    if isinstance(value, dict):
        for key, item in value.items():
            assert isinstance(key, str | int), where
            assert_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            assert_plain(item, f"{where}[{i}]")
    else:
        assert value is None or isinstance(value, Tensor | int | float | str | bool), f"{where} is a {type(value)}"


@pytest.mark.parametrize("method", worker["METHODS"])
@pytest.mark.parametrize("at", [3, 4, 5])
def test_resumed_in_this_process(method: str, at: int) -> None:
    """At three points: before a refresh, at it, after it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, opt = worker["build"](method)
        worker["go"](model, opt, 0, at)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
        worker["go"](model, opt, at, 11)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        assert_plain(saved["opt"])
        model_2, opt_2 = worker["build"](method)
        model_2.load_state_dict(saved["model"])
        opt_2.load_state_dict(saved["opt"])
        assert_same_data(opt_2.state_dict(), saved["opt"])
        worker["go"](model_2, opt_2, at, 11)
        assert_same_data(model_2.state_dict(), model.state_dict())
        assert_same_data(opt_2.state_dict(), opt.state_dict())
    finally:
        torch.set_num_threads(threads)


@pytest.mark.over_a_second
def test_resumed_in_a_new_process(tmp_path: Path) -> None:
    """All methods, saved after 6 steps here, continued there to the 11th: bit for bit what is got without a stop."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ends = {}
    try:
        for method in worker["METHODS"]:
            model, opt = worker["build"](method)
            worker["go"](model, opt, 0, 6)
            torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / f"{method}.pt")
            worker["go"](model, opt, 6, 11)
            ends[method] = dict(model.state_dict()), opt.state_dict()
    finally:
        torch.set_num_threads(threads)
    (tmp_path / "worker.py").write_text(WORKER)
    done = started.run(["worker.py", tmp_path, "6", "11"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for method, (weights, state) in ends.items():
        end = torch.load(tmp_path / f"{method}-end.pt", weights_only=True)
        assert_same_data(dict(end["model"]), weights, method)
        assert_same_data(end["opt"], state, method)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [EKFAC, KFAC])
def test_float32_state_under_half_precision_parameters_survives_a_load(dtype: torch.dtype, kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3), nn.PReLU()).to(dtype)
    opt = kind(model, lr=0.01, momentum=0.9)
    for _ in range(3):
        opt.zero_grad()
        mean_loss(model, (torch.randn(8, 5, dtype=dtype), torch.zeros(8, 3, dtype=dtype))).backward()
        opt.step()
    for p in model.parameters():
        for key, value in opt.state[p].items():
            if isinstance(value, Tensor) and value.is_floating_point() and key != "momentum_buffer":
                assert value.dtype == torch.float32, key
    saved = copy.deepcopy(opt.state_dict())
    other = kind(copy.deepcopy(model), lr=0.01, momentum=0.9)
    other.load_state_dict(saved)
    assert_same_data(other.state_dict(), saved)


def test_a_damping_function_stays_outside_the_checkpoint() -> None:
    model = nn.Linear(3, 2)
    opt = EKFAC(model, lr=0.1, damping=lambda step: 1.0 / (step + 1))
    for _ in range(3):
        opt.zero_grad()
        mean_loss(model, (torch.randn(4, 3), torch.zeros(4, 2))).backward()
        opt.step()
    saved = opt.state_dict()
    assert_plain(saved)
    assert saved["param_groups"][0]["damping"] == pytest.approx(1 / 3)
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    other = EKFAC(twin, lr=0.1, damping=lambda step: 1.0 / (step + 1))
    other.load_state_dict(saved)
    mean_loss(twin, (torch.randn(4, 3), torch.zeros(4, 2))).backward()
    other.step()
    assert other.param_groups[0]["damping"] == pytest.approx(1 / 4)


def test_a_load_takes_the_checkpoints_options_as_torch_does() -> None:
    model = nn.Linear(3, 2)
    opt = EKFAC(model, lr=0.1, damping=0.5)
    saved = opt.state_dict()
    opt.close()
    other = EKFAC(model, lr=0.2, damping=0.7)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.1 and other.param_groups[0]["damping"] == 0.5


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["default", "momentum", "kfac"])
def test_torchs_own_functions_take_and_give_the_state(name: str, flat: bool, tmp_path: Path) -> None:
    """torch.distributed.checkpoint, into an optimizer that has taken no step, in memory and over a file."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    kinds = {
        "default": lambda m: ekfac.EKFAC(m, lr=0.01),
        "momentum": lambda m: ekfac.EKFAC(m, lr=0.01, scaling="running", momentum=0.9),
        "kfac": lambda m: ekfac.KFAC(m, lr=0.01),
    }

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2)).double()

    def go(model: nn.Module, opt: Any, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()

    model = network()
    opt = kinds[name](model)
    go(model, opt, range(5))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))
    torch.save(saved, tmp_path / "state.pt")
    weights = copy.deepcopy(model.state_dict())
    go(model, opt, range(5, 9))
    for state in (saved, torch.load(tmp_path / "state.pt", weights_only=True)):
        other = network()
        other.load_state_dict(weights)
        again = kinds[name](other)
        get_optimizer_state_dict(other, again, options=options)  # as a template is made: it leaves nothing behind
        set_optimizer_state_dict(other, again, copy.deepcopy(state), options=options)
        go(other, again, range(5, 9))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_a_template_of_the_state_leaves_nothing_behind() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    models[1].load_state_dict(models[0].state_dict())
    opts = [ekfac.EKFAC(m) for m in models]
    get_optimizer_state_dict(models[1], opts[1], options=StateDictOptions(flatten_optimizer_state_dict=True))
    x = torch.randn(5, 3)
    for model, opt in zip(models, opts, strict=True):
        model(x).square().mean().backward()
        opt.step()
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize("steps", [1, 60])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["nothing set", "a norm with a rate of its own", "momentum", "per_example", "kfac"])
def test_a_checkpoint_of_torchs_is_loaded_before_the_first_step(
    name: str, flat: bool, steps: int, tmp_path: Path
) -> None:
    """torch.distributed.checkpoint fills what is there: a new optimizer has places for what steps leave."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    kinds = {
        "nothing set": lambda m: ekfac.EKFAC(m),
        "a norm with a rate of its own": lambda m: ekfac.EKFAC(
            m, params=[{"params": m[1].parameters(), "lr": 0.01}, {"params": [*m[0].parameters(), *m[3].parameters()]}]
        ),
        "momentum": lambda m: ekfac.EKFAC(m, lr=0.01, scaling="running", momentum=0.9),
        "per_example": lambda m: ekfac.EKFAC(m, lr=0.01, scaling="per_example"),
        "kfac": lambda m: ekfac.KFAC(m, lr=0.01),
    }

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()

    def go(model: nn.Module, opt: Any, numbers: range) -> None:
        for step in numbers:
            x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, other = network(), network()
    opt, new = kinds[name](model), kinds[name](other)
    go(model, opt, range(steps))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, opt, options=options)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    template: Any = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, new, options=options)}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(template["model"])
    set_optimizer_state_dict(other, new, template["optimizer"], options=options)
    for one, o in ((model, opt), (other, new)):
        go(one, o, range(steps, steps + 4))
    for p, q in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
