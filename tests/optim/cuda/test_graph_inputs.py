"""What a captured step is given at every replay, without a GPU: a stand-in for the graph runs the step again."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import ekfac
from ekfac.optim.cuda.executor import CudaExecutor
from ekfac.optim.cuda.nonfinite import NonFiniteMask
from ekfac.optim.cuda.step_graphs import REPEATS, StepGraphs, tensors_of
from ekfac.optim.engine import Apply, Engine
from ekfac.optim.statistics.schedule import EARLY
from ekfac.optim.types import Rates, StepInputs


class StandIn:
    """Instead of kernels it remembers the call, and the places that it reads."""

    run: Callable[[], None]
    pool: Pool | None = None
    stream: Stream | None = None
    destroyed = 0

    def replay(self) -> None:
        assert self.stream is not None and self.stream.destroyed == self.destroyed, "its workspace was freed"
        self.run()

    def __del__(self) -> None:
        if self.pool is not None:
            self.pool.graphs -= 1
        if self.stream is not None:
            self.stream.destroyed += 1


@dataclass
class Stream:
    """Its graphs share a workspace, which torch frees when one of them is destroyed."""

    destroyed: int = 0

    @property
    def cuda_stream(self) -> int:
        return id(self)


@dataclass
class Pool:
    """Memory that captures share, with torch's rules: it is not opened when its graphs are gone or one is spoilt."""

    graphs: int = 0
    used: bool = False
    recording: bool = False

    def open(self) -> None:
        if self.recording:
            raise RuntimeError("already recording")
        if self.used and not self.graphs:
            raise RuntimeError("use_count > 0")
        self.used = self.recording = True

    def close(self, place: StandIn) -> None:
        self.recording = False
        self.graphs += 1
        place.pool = self


@dataclass
class Torch:
    """What stands in for torch.cuda: the pools that it gave, and what the next captures run into."""

    pools: list[Pool] = field(default_factory=list)
    spoilt: list[str] = field(default_factory=list)

    def graph_pool_handle(self) -> Pool:
        self.pools.append(Pool())
        return self.pools[-1]


class Shared(nn.Module):
    """A convolution, another that is called twice, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(x)))).flatten(1))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Torch:
    """Let steps on the CPU be captured: by remembering them, and what they are to read."""
    under_way: list[StandIn] = []
    stood_in = Torch()

    @contextmanager
    def graph(place: StandIn, pool: Pool, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert not gc.isenabled(), "what the collector destroys during a capture can spoil it"
        pool.open()
        place.stream, place.destroyed = stream, stream.destroyed
        under_way.append(place)
        try:
            yield
        except RuntimeError:
            under_way.clear()
            raise RuntimeError("there was an error before") from None
        under_way.clear()
        pool.close(place)

    run_eagerly = StepGraphs.run

    def recorded_run(graphs: StepGraphs, engine: Engine, inputs: StepInputs, rates: Rates, apply: Apply) -> None:
        if stood_in.spoilt:
            raise RuntimeError(stood_in.spoilt.pop())
        ok = inputs.ok = torch.ones((), dtype=torch.float64)

        def run() -> None:
            again = replace(inputs)
            run_eagerly(graphs, engine, again, rates, apply)
            assert again.ok is not None
            ok.copy_(again.ok)

        under_way[0].run = run

    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandIn)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", stood_in.graph_pool_handle)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the user's")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(NonFiniteMask, "expect", lambda self, ok: None)
    monkeypatch.setattr(StepGraphs, "run", recorded_run)
    monkeypatch.setattr("ekfac.optim.statistics.collector.may_use_rows", lambda block, options: False)  # not on a GPU
    monkeypatch.setattr(CudaExecutor, "graphs_possible", lambda self, device: self.options.numerics.cuda_graphs)
    monkeypatch.setattr(CudaExecutor, "check_finite", lambda self, sizes, wait: (True, self.mask.mask(sizes)))
    monkeypatch.setattr(
        "ekfac.optim.engine.make_executor", lambda *given: CudaExecutor(*given[:2], torch.device("cpu"))
    )
    return stood_in


def trained(make: type[ekfac.EKFAC], **options: Any) -> tuple[list[Tensor], int]:
    """Weights after 50 steps on batches of two sizes, some in two parts, and how many steps were replayed."""
    torch.manual_seed(0)
    model = Shared().double()
    opt = make(model, lr=1e-3, damping=1e-2, refresh_every=10, **options)
    for t in range(50):
        generator = torch.Generator().manual_seed(t)
        n = 16 if t % 7 else 12
        x, y = torch.randn(n, 3, 6, 6, generator=generator).double(), torch.randn(n, 5, generator=generator).double()
        opt.zero_grad()
        for part in (slice(0, n // 2), slice(n // 2, n)) if t % 5 == 4 else (slice(0, n),):
            (mse_loss(model(x[part]), y[part]) * len(x[part]) / n).backward()
        opt.step()
    return [p.detach() for p in model.parameters()], opt.engine.executor.step_graphs.replays


@pytest.mark.over_a_second
@pytest.mark.parametrize("kind", ["belief", "anchored", "running", "per_example", "KFAC"])
@pytest.mark.parametrize("factor_every", [None, 3])
def test_a_replay_is_given_all_that_the_step_reads(recording: Torch, kind: str, factor_every: int | None) -> None:
    make: type[ekfac.EKFAC] = ekfac.KFAC if kind == "KFAC" else ekfac.EKFAC
    options: dict[str, Any] = {"factor_every": factor_every}
    options |= {} if kind == "KFAC" else {"scaling": kind}
    options |= {"eps": 1e-4} if kind == "belief" else {}  # where a gradient is zero, its rounding is divided by eps
    found, replays = trained(make, cuda_graphs=True, **options)
    expected, none = trained(make, cuda_graphs=False, **options)
    assert replays >= 10 and none == 0
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def small(**options: Any) -> tuple[nn.Sequential, ekfac.EKFAC]:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(6, 6), nn.Tanh())]).double()
    return model, ekfac.EKFAC(model, **{"lr": 1e-3, "refresh_every": 100, **options})


def replayed(model: nn.Module, opt: ekfac.EKFAC, steps: int, sizes: tuple[int, ...] = (16,)) -> int:
    """Train; how many of the steps were replayed."""
    before = opt.engine.executor.step_graphs.replays
    for step in range(steps):
        opt.zero_grad()
        model(torch.randn(sizes[step % len(sizes)], 6).double()).square().sum(1).mean().backward()
        opt.step()
    return opt.engine.executor.step_graphs.replays - before


def test_captured_steps_share_memory_and_are_captured_again_after_a_checkpoint(recording: Torch) -> None:
    model, opt = small(refresh_every=16)
    assert replayed(model, opt, 40) == 40 - 1 - REPEATS, "whether bases turn or not: all but the first and two"
    opt.param_groups[0]["weight_decay"] = 0.1
    assert replayed(model, opt, 10) == 10 - REPEATS, "another step"
    recorded = list(opt.engine.executor.step_graphs._recorded.values())
    assert len(recording.pools) == 1 and recording.pools[0].graphs == len(recorded)
    assert len([step for step in recorded if not step.inputs.samples]) == 2
    assert any(step.inputs.samples for step in recorded), "a step that takes its batch in is one as well"
    gradients = [list(tensors_of(step.inputs)) for step in recorded]
    assert all(len(set(map(id, same))) == 1 for same in zip(*gradients, strict=True)), "gradients at one place"
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert replayed(model, opt, 10) == 10 - REPEATS and len(recording.pools) == 2


def test_batches_of_all_sizes_are_one_step_where_nothing_is_taken_in_of_them(recording: Torch) -> None:
    model, opt = small(refresh_every=16)
    assert replayed(model, opt, 40, (16, 12, 8)) == 40 - 1 - REPEATS
    recorded = opt.engine.executor.step_graphs._recorded.values()
    assert len([step for step in recorded if not step.inputs.samples]) == 1


def test_batches_of_which_too_much_would_be_kept_have_no_place(recording: Torch) -> None:
    model, opt = small(refresh_every=16, numerics=ekfac.Numerics(memory_limit=16 * 6 * 8 * 15 // 2))
    assert replayed(model, opt, 40) == 40 - 1 - REPEATS
    executor = opt.engine.executor
    assert executor.defers_statistics and not (executor.static_buffers.open or executor.static_samples)
    recorded = opt.engine.executor.step_graphs._recorded.values()
    assert len(recorded) == 1 and not any(step.inputs.samples for step in recorded)


@pytest.mark.over_a_second
def test_factors_and_scalings_of_all_layers_are_part_of_the_one_replay(
    recording: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt = small(scaling="per_example", damping=1e-2, refresh=ekfac.Refresh(factor_every=2))
    replayed(model, opt, 110)
    called: list[str] = []
    monkeypatch.setattr(CudaExecutor, "call", lambda self, what, *given, **options: called.append(what))
    assert replayed(model, opt, 20) == 20 and not called
    assert opt.engine.schedule.intervals.takes_factors(opt.engine.schedule.applied_steps, 2), (
        "half of them took some in"
    )


@pytest.mark.over_a_second
def test_sums_that_were_taken_before_the_step_are_part_of_its_replay(recording: Torch) -> None:
    """Those of an embedding, which are small, and of a layer that there was no room for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    numerics = ekfac.Numerics(memory_limit=16 * 5 * (6 + 4) * 8)
    opt = ekfac.EKFAC(model, scaling="per_example", lr=1e-3, damping=1e-2, refresh_every=100, numerics=numerics)
    for t in range(140):
        opt.zero_grad()
        model(torch.randint(7, (16, 5))).square().sum(-1).mean().backward()
        if t == 110:
            before = opt.engine.executor.step_graphs.replays
            assert {b.name for b in opt.engine.collector.calls} == {"4"} != set(opt.engine.collector.sums)
        opt.step()
    assert opt.engine.executor.step_graphs.replays - before == 30


def test_a_capture_that_fails_changes_nothing_and_spoils_no_other(recording: Torch) -> None:
    model, opt = small(deterministic=True, factor_every=1, refresh_every=100)
    assert replayed(model, opt, 40, (12,)) >= 10
    opt.param_groups[0]["weight_decay"] = 0.1
    recording.spoilt += ["no kernel for this"] * 2  # with the batch that is taken in, and without
    with pytest.warns(RuntimeWarning, match="cannot be recorded and runs eagerly: no kernel for this") as told:
        assert replayed(model, opt, 40) == 0
    assert len([w for w in told if "recorded" in str(w.message)]) == 2 and not opt.engine.executor.step_graphs._places
    assert gc.isenabled()
    opt.param_groups[0]["weight_decay"] = 0.3
    assert replayed(model, opt, 40, (12,)) >= 20, "steps of the other kind, captured again"
    gc.disable()
    try:
        opt.param_groups[0]["weight_decay"] = 0.2
        replayed(model, opt, 20, (8,))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_steps_that_turn_all_bases_are_replayed(recording: Torch) -> None:
    model, opt = small()
    assert replayed(model, opt, EARLY) == EARLY - 1 - REPEATS, "all but the first, which solves, and two"
    assert opt.stats()["warm_refreshes"] == 8 * (EARLY - 1), "each block's in each"


@pytest.mark.parametrize(
    ("rule", "on_refresh"),
    [("anchored", "kronecker"), ("running", "carry"), ("running", "kronecker"), ("adam", "carry"), ("kronecker", None)],
)
def test_a_replayed_step_that_must_change_nothing_turns_no_basis(
    recording: Torch, rule: str, on_refresh: str | None
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 6).double()
    opt = ekfac.EKFAC(model, lr=1e-3, scaling=rule, **({} if on_refresh is None else {"on_refresh": on_refresh}))
    assert replayed(model, opt, 5) == 2
    opt.engine.settle()
    before, turned = copy.deepcopy((opt.state[model.weight], model.weight.detach())), opt.stats()["warm_refreshes"]
    opt.zero_grad()
    model(torch.full((16, 6), float("nan")).double()).sum(1).mean().backward()
    opt.step()
    opt.engine.settle()
    after = opt.state[model.weight], model.weight.detach()
    assert opt.engine.executor.step_graphs.replays == 3, "the step was replayed"
    assert opt.stats()["warm_refreshes"] == turned
    for name in (n for n, value in before[0].items() if isinstance(value, Tensor) and n != "products"):
        assert torch.equal(before[0][name], after[0][name]), name
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("rule", ["adam", "rmsprop", "adagrad", "belief"])
def test_the_number_of_examples_is_written_where_a_graph_writes_it(recording: Torch, rule: str) -> None:
    """By the device, to one place: a number that the host writes would be that of the step that was recorded last."""
    torch.manual_seed(0)
    model = nn.Linear(6, 6).double()
    opt = ekfac.EKFAC(model, lr=1e-3, scaling=rule)
    places = set()
    for n in (16, 8) * 8:
        replayed(model, opt, 1, (n,))
        examples = opt.state[model.weight].examples
        assert float(examples) == n
        places.add(examples.data_ptr())
    assert opt.engine.executor.step_graphs.replays >= 6 and len(places) == 1
