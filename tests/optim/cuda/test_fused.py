"""The default rule's own kernels do what the rule does.

Without a GPU they are run by Triton's interpreter, if it is there: TRITON_INTERPRET=1 pytest
tests/optim/cuda/test_fused.py (with NumPy below 2.4 for Triton 3.6).
"""

import copy
import importlib.util
import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ekfac
from ekfac.optim.cuda import fused
from ekfac.optim.executor import Executor
from ekfac.optim.methods import damping
from ekfac.optim.methods.belief import Belief
from ekfac.optim.methods.eigenbasis import EigenMethod
from ekfac.optim.types import BlockStep, EigenState, GroupRates

pytestmark = pytest.mark.filterwarnings("error:.*without its fused kernels")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")),
]
FAINT_UNIT = 2.0**-30
#: G, O, C and how many blocks.
SHAPES = [(1, 1, 1, 1), (1, 30, 33, 1), (1, 40, 65, 3), (2, 7, 31, 5), (3, 1, 120, 2)]


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICES", {"cuda", "cpu"} if INTERPRETED else {"cuda"})


class Block:
    """A parameter without a basis."""

    covered = False


def gradients(t: int, shape: tuple[int, int, int, int], device: str) -> Tensor:
    G, out, C, blocks = shape
    generator = torch.Generator().manual_seed(t)
    g = 0.3 * torch.randn(G * blocks, out, C, generator=torch.Generator().manual_seed(1000))
    g += torch.randn(g.shape, generator=generator)
    if t == 20:
        g *= 1e4  # a spike
    if t == 30:
        g[:G] = 0  # a block without a gradient
    if t % 7 == 5:
        g.view(-1)[0] = torch.nan  # a step that must change nothing
    return g.to(device)


def take(method: EigenMethod, state: EigenState, step: BlockStep) -> Tensor:
    method.project(Block(), state, step)  # type: ignore[arg-type]
    method.update_scaling(state, step)
    return method.project_back(method.rescale(Block(), state, step), step)  # type: ignore[arg-type]


def step_of(t: int, shape: tuple[int, int, int, int], device: str, dtype: torch.dtype, kind: str) -> BlockStep:
    number = {"dtype": torch.float64, "device": device}
    bad = t % 7 == 5
    ok = torch.tensor(0.0 if bad else 1.0, **number) if bad or t % 3 else None
    beta = torch.tensor(0.9, **number) if kind == "tensors" else 0.9
    n = torch.tensor(32.0 + t, **number) if kind == "tensors" else 32.0 + t
    step = BlockStep(gradients(t, shape, device).to(dtype), n, GroupRates(0.1, 0.1, betas=(beta, 0.95)), ok)
    step.blocks = shape[3]
    if kind == "faint":
        step.gradient *= FAINT_UNIT  # a power of two, so that both precisions see the same numbers
    if kind == "clipped":
        step.left = 3.0 * step.gradient
    return step


def close(found: Tensor, truth: Tensor, unit: float = 1.0) -> bool:
    # A mean of one number can be far smaller than what it is the mean of, which is of the size of ``unit``.
    least = 1e-2 * unit if truth.numel() == 1 and bool(truth.abs().max() > 1e-7 * unit) else 0.0
    return bool((found.double() - truth).abs().max() <= 1e-5 * truth.abs().max().clamp(min=least))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["numbers", "tensors", "clipped", "not cautious", "faint"])
def test_the_kernels_agree_with_the_rule_in_float64(
    device: str, shape: tuple[int, int, int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[int] = []
    launch = fused.launch
    monkeypatch.setattr(fused, "launch", lambda *args: (launches.append(1), launch(*args))[1])
    plain = EigenMethod(Belief(cautious=kind != "not cautious"), damping.plain)
    kernels = fused.fused(plain)
    assert isinstance(kernels, fused.FusedBelief)
    state, truth = EigenState(), EigenState()
    steps = 50 if device == "cuda" else 32
    for t in range(steps):
        x = take(kernels, state, step_of(t, shape, device, torch.float32, kind))
        y = take(plain, truth, step_of(t, shape, device, torch.float64, kind))
        assert torch.equal(state.count, truth.count) and torch.equal(state.examples, truth.examples)
        unit = FAINT_UNIT if kind == "faint" else 1.0
        compared = ("x", x, y, 1.0), ("m", state.m, truth.m, unit), ("s", state.s, truth.s, unit**2)
        for name, found, wanted, size in compared:
            assert close(found, wanted, size), (name, t)
    assert len(launches) >= steps - 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_block_has_parts_of_several_tiles(device: str) -> None:
    shape = (1, 700, 1500, 1)  # more than 1024 * 512 numbers, and no multiple of them
    plain = EigenMethod(Belief(), damping.plain)
    kernels = fused.fused(plain)
    state, truth = EigenState(), EigenState()
    for t in range(5 if device == "cuda" else 2):
        x = take(kernels, state, step_of(t, shape, device, torch.float32, "tensors"))
        y = take(plain, truth, step_of(t, shape, device, torch.float64, "tensors"))
        assert close(x, y) and close(state.m, truth.m) and close(state.s, truth.s)


@pytest.mark.skipif(INTERPRETED, reason="with TRITON_INTERPRET=1 nothing is compiled")
@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize(
    ("kernel", "singles", "doubles"),
    [("measure", "seen m s sums", "ok count examples n"), ("update", "g seen m s x sums lengths", "ok count beta"),
     ("scale", "x lengths", "ok count beta")],
)  # fmt: skip
def test_the_kernels_compile_for_an_h200(kernel: str, singles: str, doubles: str, cautious: bool) -> None:
    """Which Triton does without one."""
    triton = pytest.importorskip("triton", reason="needs Triton")
    from triton.backends.compiler import GPUTarget

    from ekfac.optim.cuda import kernels

    function = getattr(kernels, kernel)
    types = dict.fromkeys(singles.split(), "*fp32") | dict.fromkeys(doubles.split(), "*fp64")
    types |= {"size": "i32", "tiles": "i32"}
    built_in = {"BETA_2": 0.95, "EPS": 1e-8, "FLOOR": 0.005, "SPIKE": 10.0, "CAUTIOUS": cautious}
    built_in |= {"PARTS": kernels.PARTS, "TILE": kernels.TILE}
    names = function.arg_names
    constants = {(i,): built_in[name] for i, name in enumerate(names) if name in built_in}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def test_other_rules_and_dtypes_are_left_alone() -> None:
    class Mine(Belief):
        pass

    mine = EigenMethod(Mine(), damping.plain)
    assert fused.fused(mine) is mine
    state, step = EigenState(), step_of(0, (1, 3, 4, 1), "cpu", torch.float64, "numbers")
    method = fused.fused(EigenMethod(Belief(), damping.plain))
    assert isinstance(method, fused.FusedBelief)
    for _ in range(2):
        take(method, state, step)
        assert not fused.fits(method.rule, state, step)


def test_kernels_that_cannot_be_compiled_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule itself steps in, with one warning; none where Triton is missing."""
    monkeypatch.setattr(fused, "DEVICES", {"cpu"})
    plain = EigenMethod(Belief(), damping.plain)
    for error, warned in ((RuntimeError("no ptxas"), 1), (ImportError("no triton"), 0)):

        def fail(*args: object, error: Exception = error) -> Tensor:
            raise error

        monkeypatch.setattr(fused, "_known", {})
        monkeypatch.setattr(fused, "launch", fail)
        state, truth = EigenState(), EigenState()
        method = fused.fused(plain)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for t in range(4):
                x = take(method, state, step_of(t, (1, 3, 4, 2), "cpu", torch.float32, "numbers"))  # type: ignore[arg-type]
                assert torch.equal(x, take(plain, truth, step_of(t, (1, 3, 4, 2), "cpu", torch.float32, "numbers")))
        assert len(seen) == warned


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_graph_can_hold_the_kernels(shape: tuple[int, int, int, int]) -> None:
    method = fused.fused(EigenMethod(Belief(), damping.plain))
    assert isinstance(method, fused.FusedBelief)
    state, place = EigenState(), step_of(1, shape, "cuda", torch.float32, "tensors")
    take(method, state, step_of(0, shape, "cuda", torch.float32, "tensors"))
    take(method, state, step_of(1, shape, "cuda", torch.float32, "tensors"))
    twin = copy.deepcopy(state)
    assert isinstance(place.gradient, Tensor) and isinstance(place.n, Tensor) and place.ok is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = take(method, state, place)
    for t in range(2, 50):
        step = step_of(t, shape, "cuda", torch.float32, "tensors")
        assert isinstance(step.gradient, Tensor) and isinstance(step.n, Tensor)
        place.gradient.copy_(step.gradient)
        place.n.copy_(step.n)
        place.ok.fill_(1.0 if step.ok is None else float(step.ok))
        graph.replay()
        assert torch.equal(x, take(method, twin, step))  # the same kernels, in the same order
    assert torch.equal(state.m, twin.m) and torch.equal(state.s, twin.s) and torch.equal(state.count, twin.count)


@pytest.mark.parametrize("device", DEVICES)
def test_a_training_is_the_same_within_rounding(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":  # where only the test asks for them
        known: dict[object, Any] = {}
        monkeypatch.setattr(
            Executor, "method", lambda self, method, block: known.setdefault(method, fused.fused(method))
        )
    launches = []
    launch = fused.launch
    monkeypatch.setattr(fused, "launch", lambda *args: (launches.append(1), launch(*args))[1])
    trained = {}
    for enabled in (True, False):
        monkeypatch.setattr(fused.FusedBelief, "enabled", enabled)
        torch.manual_seed(0)
        layers = nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh()
        model = nn.Sequential(*layers, nn.Linear(40, 5)).to(device)
        opt = ekfac.EKFAC(model, eps=1e-4)  # coordinates of rounding errors alone stay where they are
        for t in range(20 if device == "cuda" else 8):
            x = torch.randn(64, 20, generator=torch.Generator().manual_seed(t)).to(device)
            opt.zero_grad()
            nn.functional.mse_loss(model(x), x[:, :5].sin()).backward()
            if t == 5:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            opt.step()
        assert len(launches) > 8  # of three stacks; a graph holds them from some step on
        with torch.no_grad():
            trained[enabled] = nn.functional.mse_loss(model(x), x[:, :5].sin()).item()
    # Not the weights: which coordinates wait hangs on the sign of a product, and there on its rounding.
    assert trained[True] == pytest.approx(trained[False], rel=0.02)
