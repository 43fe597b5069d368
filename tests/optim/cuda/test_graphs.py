"""Steps replayed from CUDA graphs are the steps that would have been run: on a GPU, and on an emulated one."""

import copy
import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import ekfac
from ekfac.optim.cuda.replay import recording
from ekfac.optim.cuda.streams import SideStream
from emulated_cuda import emulated

pytestmark = [pytest.mark.over_a_second, pytest.mark.filterwarnings("error:cuda_graphs. .*recorded")]

# On an emulated GPU some are enough; on a real one, where -m gpu asks for them, none takes long.
MORE = [pytest.param(rule, marks=pytest.mark.slow) for rule in ("anchored", "kronecker", "adam", "rmsprop", "adagrad")]
RULES = ["running", "per_example", *MORE]


@pytest.fixture(autouse=True, params=[pytest.param("gpu", marks=pytest.mark.gpu), "emulated"])
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "emulated" and request.function is test_a_process_ends_well:
        pytest.skip("another process has no emulated GPU")
    with emulated() if request.param == "emulated" else nullcontext():
        yield


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


def both_ways(steps: int, kind: str, make, **options: object) -> int:
    """Train with and without graphs; the weights must agree. Returns how many steps were replayed."""
    model = network()
    twin = copy.deepcopy(model)
    opt = make(model, cuda_graphs=True, **options)
    plain = make(twin, cuda_graphs=False, **options)
    for p, q in zip(train(opt, model, steps, kind), train(plain, twin, steps, kind), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert opt.stats()["skipped_steps"] == plain.stats()["skipped_steps"]
    assert opt.stats()["steps"] == plain.stats()["steps"]
    return opt.engine.executor.step_graphs.replays


@pytest.mark.parametrize("kind", ["plain", "nan", "clip", "rates", "sizes"])
@pytest.mark.parametrize("rule", RULES)
def test_replayed_steps_equal_those_that_are_run(rule: str, kind: str) -> None:
    replays = both_ways(40, kind, ekfac.EKFAC, scaling=rule, lr=1e-3, damping=1e-2, refresh_every=10)
    assert replays >= 10, f"only {replays} of 40 steps were replayed"


@pytest.mark.parametrize("options", [{"kl_clip": 1e-3}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1},
                                     {"weight_decay": 0.1, "decoupled_weight_decay": False}])  # fmt: skip
def test_replayed_updates(options: dict[str, object]) -> None:
    assert both_ways(40, "plain", ekfac.EKFAC, lr=1e-3, **options) >= 10


@pytest.mark.parametrize("kind", ["plain", "nan", "damping"])
def test_replayed_kfac(kind: str) -> None:
    assert both_ways(40, kind, ekfac.KFAC, lr=1e-3, damping=1e-2, refresh_every=10) >= 10


@pytest.mark.parametrize("rule", ["anchored", "running", "per_example"])
def test_batches_that_the_factors_do_not_see_are_replayed_as_such(rule: str) -> None:
    assert both_ways(60, "plain", ekfac.EKFAC, scaling=rule, lr=1e-3, damping=1e-2, factor_every=3) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["anchored", "running", "per_example"])
@pytest.mark.parametrize("memory", [1, 50_000, 2**28], ids=["sums", "sums that are replayed", "calls"])
def test_convolutions_whose_sums_are_taken_before_the_step(rule: str, memory: int) -> None:
    def trained(cuda_graphs: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(96, 5)
        model = nn.Sequential(*layers).double().cuda()
        opt = ekfac.EKFAC(model, scaling=rule, lr=1e-3, damping=1e-2, memory_limit=memory, cuda_graphs=cuda_graphs)
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
opt = ekfac.EKFAC(model, memory_limit=20_000)
for _ in range(30):
    opt.zero_grad()
    model(torch.randn(24, 3, 6, 6, device="cuda")).square().mean().backward()
    opt.step()
assert opt.engine.executor.step_graphs.replays
if {closed}:
    opt.close()
    assert not (opt.engine.executor.step_graphs._recorded or opt.engine.executor.replays["taking statistics"]._graphs)
"""


@pytest.mark.parametrize("closed", [True, False])
def test_a_process_ends_well(closed: bool) -> None:
    """Python wipes what is freed: who still refers to a stream that is gone would crash."""
    ends = [sys.executable, "-c", TRAINS_AND_ENDS.format(closed=closed)]
    done = subprocess.run(ends, env={**os.environ, "PYTHONMALLOC": "debug"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_graph_that_is_garbage_does_not_spoil_the_next_capture() -> None:
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


def test_per_example_from_the_start_in_every_basis() -> None:
    more = {"scaling": "per_example", "scaling_decay": 0.9, "on_refresh": "kronecker"}
    assert both_ways(60, "plain", ekfac.EKFAC, lr=1e-3, damping=1e-2, refresh_every=10, **more) >= 10


@pytest.mark.parametrize("anneal", [None, 30.0])
def test_a_learning_rate_on_the_device_is_read_at_every_step(anneal: float | None) -> None:
    def make(model: nn.Module, **options: object) -> ekfac.EKFAC:
        return ekfac.EKFAC(model, lr=torch.tensor(1e-3, device="cuda"), **options)

    assert both_ways(40, "lr on the device", make, anneal=anneal) >= 10


def test_deterministic_schedule_is_replayed_too() -> None:
    assert both_ways(40, "plain", ekfac.EKFAC, deterministic=True, refresh_every=10) >= 10


def test_a_loaded_checkpoint_is_what_the_next_replay_uses() -> None:
    model = network()
    opt = ekfac.EKFAC(model)
    train(opt, model, 20)
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    first = train(opt, model, 10)
    opt.load_state_dict(saved)
    model.load_state_dict(weights)
    before = opt.engine.executor.step_graphs.replays
    for p, q in zip(first, train(opt, model, 10), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert opt.engine.executor.step_graphs.replays > before, "captured again"


@pytest.mark.slow
def test_a_basis_that_is_turned_beside_the_next_batch_is_there_when_it_is_needed() -> None:
    def wide() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 700), nn.Tanh(), nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 5)).cuda()

    def trained(beside: bool) -> list[Tensor]:
        model = wide()
        opt = ekfac.EKFAC(model, lr=1e-3, refresh_every=5)
        opt.engine.executor.side = SideStream(beside)
        for t in range(60):
            opt.zero_grad()
            x, y = (tensor.float() for tensor in batch(t))
            mse_loss(model(x), y).backward()
            opt.step()
        assert opt.engine.executor.step_graphs.replays >= 10 and opt.stats()["warm_refreshes"] > 30
        return [p.detach().clone() for p in model.parameters()]

    for p, q in zip(trained(beside=True), trained(beside=False), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["anchored", "running", "kronecker"])
def test_many_layers_side_by_side(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ekfac.optim.cuda.streams.LARGE", 40 * 41)

    def trained(cuda_graphs: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        widths = [12, *(16 + 4 * (k % 9) for k in range(30)), 5]
        model = nn.Sequential(*(m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())))
        model.double().cuda()
        # Plain damping: as a fraction of eigenvalues that vanish over 30 layers it would let the weights run away.
        own = {"damping": 1e-2, "damping_mode": "plain", "cuda_graphs": cuda_graphs}
        opt = ekfac.EKFAC(model, scaling=rule, lr=1e-3, **own)
        weights = train(opt, model, 60, "nan")
        return weights, opt.engine.executor.step_graphs.replays

    (found, replays), (expected, _) = trained(True), trained(False)
    assert replays >= 45, f"only {replays} of 60 steps were replayed"
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
