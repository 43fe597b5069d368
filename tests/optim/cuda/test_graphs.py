"""Steps replayed from CUDA graphs are the steps that would have been run: on a GPU, and on an emulated one."""

import copy
import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import ekfac
import paper
from ekfac import rules
from ekfac.optim.cuda.replay import recording
from ekfac.optim.cuda.streams import SideStream
from emulated_cuda import emulated

pytestmark = [pytest.mark.over_a_second, pytest.mark.filterwarnings("error:cuda_graphs. .*recorded")]

RULES = ["running", "per_example", "anchored", "kronecker", "adam", "rmsprop", "adagrad"]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with emulated() if request.param == "emulated" else nullcontext():
        yield request.param


def on_both(name: str, cases: Sequence[Any], emulated: Collection[Any]) -> pytest.MarkDecorator:
    """Every case on a GPU, where none takes long; on an emulated one some, and the rest where slow ones are asked for.

    What those others do is on the emulated GPU in test_emulated.py too.
    """
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param("gpu", *values, marks=pytest.mark.gpu))
        found.append(pytest.param("emulated", *values, marks=() if case in emulated else pytest.mark.slow))
    return pytest.mark.parametrize(f"device, {name}", found, indirect=["device"])


devices = pytest.mark.parametrize("device", [pytest.param("gpu", marks=pytest.mark.gpu), "emulated"], indirect=True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 5)).double().cuda()


def batch(step: int, n: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(n, 12, generator=generator, dtype=torch.float64)
    y = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return x.cuda(), y.cuda()


def train(opt: torch.optim.Optimizer, model: nn.Module, steps: int, kind: str = "plain") -> list[Tensor]:
    for t in range(steps):
        opt.zero_grad()
        x, y = batch(t, 32 if kind != "sizes" or t % 3 else 24)
        if kind == "nan" and t in (7, 8, 15):
            x[0, 0] = float("nan")
        mse_loss(model(x), y).backward()
        if kind == "clip" and t % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if kind == "lr on the device":
            opt.param_groups[0]["lr"].fill_(1e-3 / (1 + t))
        if kind == "rates":
            opt.param_groups[0]["lr"] = 1e-3 / (1 + t)
            opt.param_groups[0]["damping"] = 1e-2 / (1 + t)
        if kind == "damping":
            opt.param_groups[0]["damping"] = 1e-1 if t // 5 % 2 else 1e-2
        opt.step()
    return [p.detach().clone() for p in model.parameters()]


def both_ways(device: str, kind: str, make, steps: int = 40, **options: object) -> None:
    """Train with and without graphs; the weights must agree. On an emulated GPU fewer steps have to do."""
    steps, least = (steps, 10) if device == "gpu" else (steps * 3 // 5, 5)
    model = network()
    twin = copy.deepcopy(model)
    opt = make(model, numerics=ekfac.Numerics(cuda_graphs=True), **paper.grouped(options))
    plain = make(twin, numerics=ekfac.Numerics(cuda_graphs=False), **paper.grouped(options))
    for p, q in zip(train(opt, model, steps, kind), train(plain, twin, steps, kind), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert opt.stats()["skipped_steps"] == plain.stats()["skipped_steps"]
    assert opt.stats()["steps"] == plain.stats()["steps"]
    replays = opt.engine.executor.step_graphs.replays
    assert replays >= least, f"only {replays} of {steps} steps were replayed"


@on_both(
    "rule, kind",
    list(itertools.product(RULES, ["plain", "nan", "clip", "rates", "sizes"])),
    emulated=[("running", "clip"), ("running", "rates"), ("per_example", "sizes")],
)
def test_replayed_steps_equal_those_that_are_run(device: str, rule: str, kind: str) -> None:
    # With each example's scalings a batch that A and B take in, or one of another size, is another step.
    steps = 70 if rule == "per_example" else 40
    both_ways(device, kind, ekfac.EKFAC, scaling=rule, lr=1e-3, damping=1e-2, refresh_every=10, steps=steps)


PENALTY = {"weight_decay": 0.1, "decoupled_weight_decay": False}


@on_both(
    "options", [{"kl_clip": 1e-3}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}, PENALTY],
    emulated=[PENALTY],
)  # fmt: skip
def test_replayed_updates(device: str, options: dict[str, object]) -> None:
    both_ways(device, "plain", ekfac.EKFAC, lr=1e-3, **options)


@on_both("kind", ["plain", "nan", "damping"], emulated=["damping"])
def test_replayed_kfac(device: str, kind: str) -> None:
    both_ways(device, kind, ekfac.KFAC, lr=1e-3, damping=1e-2, refresh_every=10)


@on_both("rule", ["anchored", "running", "per_example"], emulated=["running"])
def test_batches_that_the_factors_do_not_see_are_replayed_as_such(device: str, rule: str) -> None:
    more = {"refresh": ekfac.Refresh(factor_every=3)}
    both_ways(device, "plain", ekfac.EKFAC, scaling=rule, lr=1e-3, damping=1e-2, steps=60, **more)


@on_both(
    "rule, memory", list(itertools.product(["anchored", "running", "per_example"], [1, 50_000, 2**28])), emulated=[]
)
def test_convolutions_whose_sums_are_taken_before_the_step(device: str, rule: str, memory: int) -> None:
    def trained(cuda_graphs: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(96, 5)
        model = nn.Sequential(*layers).double().cuda()
        opt = ekfac.EKFAC(model, scaling=rule, lr=1e-3, damping=1e-2, numerics=ekfac.Numerics(memory, cuda_graphs))
        for t in range(60):
            generator = torch.Generator().manual_seed(t)
            x, y = (torch.randn(24, *size, generator=generator).double().cuda() for size in ((3, 6, 6), (5,)))
            opt.zero_grad()
            mse_loss(model(x), y).backward()
            opt.step()
        return [p.detach() for p in model.parameters()], opt.engine.executor.step_graphs.replays

    # Otherwise no two trainings agree to the last bit, and what solvers make of it is seen after 60 steps.
    with torch.backends.cudnn.flags(deterministic=True):
        (found, replays), (expected, _) = trained(True), trained(False)
    assert replays >= 10, "statistics of every batch, and yet replayed"
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)


TRAINS_AND_ENDS = """
import torch
from torch import nn
import ekfac
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 5)).cuda()
opt = ekfac.EKFAC(model, numerics=ekfac.Numerics(memory_limit=20_000))
for _ in range(30):
    opt.zero_grad()
    model(torch.randn(24, 3, 6, 6, device="cuda")).square().mean().backward()
    opt.step()
assert opt.engine.executor.step_graphs.replays
if {closed}:
    opt.close()
    assert not (opt.engine.executor.step_graphs._recorded or opt.engine.executor.replays["taking statistics"]._graphs)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("closed", [True, False])
def test_a_process_ends_well(closed: bool) -> None:
    """Python wipes what is freed: who still refers to a stream that is gone would crash."""
    ends = [sys.executable, "-c", TRAINS_AND_ENDS.format(closed=closed)]
    done = subprocess.run(ends, env={**os.environ, "PYTHONMALLOC": "debug"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@devices
def test_a_graph_that_is_garbage_does_not_spoil_the_next_capture(device: str) -> None:
    x = torch.zeros(3, device="cuda")

    def captured(meanwhile: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with recording(graph):
            meanwhile()
            x.add_(1)
        return graph

    def collect_now() -> None:
        gc.set_threshold(1)
        for _ in range(100):
            list[int]()

    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        garbage: list[object] = [captured(lambda: None)]
        garbage.append(garbage)
        del garbage
        captured(collect_now).replay()
    finally:
        gc.set_threshold(*before)
    torch.testing.assert_close(x, torch.ones_like(x))


@devices
def test_per_example_from_the_start_in_every_basis(device: str) -> None:
    more = {"scaling": rules.PerExample(decay=0.9, restart=True), "refresh_every": 10}
    both_ways(device, "plain", ekfac.EKFAC, lr=1e-3, damping=1e-2, steps=60, **more)


@on_both("decay_steps", [None, 30.0], emulated=[30.0])
def test_a_learning_rate_on_the_device_is_read_at_every_step(device: str, decay_steps: float | None) -> None:
    def make(model: nn.Module, **options: object) -> ekfac.EKFAC:
        return ekfac.EKFAC(model, lr=torch.tensor(1e-3, device="cuda"), **options)

    both_ways(device, "lr on the device", make, step_size=ekfac.StepSize(decay_steps=decay_steps))


@on_both("refresh", [ekfac.Refresh(deterministic=True)], emulated=[])
def test_deterministic_schedule_is_replayed_too(device: str, refresh: ekfac.Refresh) -> None:
    both_ways(device, "plain", ekfac.EKFAC, refresh=refresh, refresh_every=10)


@devices
def test_a_loaded_checkpoint_is_what_the_next_replay_uses(device: str) -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    train(opt, model, 14)
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    first = train(opt, model, 6)
    opt.load_state_dict(saved)
    model.load_state_dict(weights)
    before = opt.engine.executor.step_graphs.replays
    for p, q in zip(first, train(opt, model, 6), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert opt.engine.executor.step_graphs.replays > before, "captured again"


@on_both("steps", [60], emulated=[])
def test_a_basis_that_is_turned_beside_the_next_batch_is_there_when_it_is_needed(device: str, steps: int) -> None:
    def wide() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 5)).cuda()

    def trained(beside: bool) -> list[Tensor]:
        model = wide()
        opt = ekfac.EKFAC(model, lr=1e-3, refresh_every=5)
        opt.engine.executor.side = SideStream(beside)
        for t in range(steps):
            opt.zero_grad()
            x, y = (tensor.float() for tensor in batch(t))
            mse_loss(model(x), y).backward()
            opt.step()
        assert opt.engine.executor.step_graphs.replays >= 10 and opt.stats()["warm_refreshes"] > 30
        return [p.detach().clone() for p in model.parameters()]

    for p, q in zip(trained(beside=True), trained(beside=False), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@on_both("rule", ["anchored", "running", "kronecker"], emulated=[])
def test_many_layers_side_by_side(device: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ekfac.optim.cuda.streams.LARGE", 40 * 41)

    def trained(cuda_graphs: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        widths = [12, *(16 + 4 * (k % 9) for k in range(30)), 5]
        model = nn.Sequential(*(m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())))
        model.double().cuda()
        # Plain damping: as a fraction of eigenvalues that vanish over 30 layers it would let the weights run away.
        own = {"damping": 1e-2, "damping_mode": "plain", "numerics": ekfac.Numerics(cuda_graphs=cuda_graphs)}
        opt = ekfac.EKFAC(model, scaling=rule, lr=1e-3, **own)
        weights = train(opt, model, 60, "nan")
        return weights, opt.engine.executor.step_graphs.replays

    (found, replays), (expected, _) = trained(True), trained(False)
    assert replays >= 45, f"only {replays} of 60 steps were replayed"
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
