"""Evaluation in another thread: what is captured belongs to its thread and its graph."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ekfac import EKFAC, KFAC, Preconditioner
from loops import NETWORKS

#: Together they take long.
pytestmark = pytest.mark.over_a_second

STEPS = 8


def evaluate(model: nn.Module, opt: Any, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def evaluate_with_gradients_on(model: nn.Module, opt: Any, x: Tensor) -> None:
    model(x)


def gradient_of_the_input(model: nn.Module, opt: Any, x: Tensor) -> None:
    x = x.clone().requires_grad_(True)
    torch.autograd.grad(model(x).square().sum(), x)


def paused(model: nn.Module, opt: Any, x: Tensor) -> None:
    with opt.paused():
        model(x).square().sum()


def refused(model: nn.Module, opt: Any, x: Tensor) -> None:
    with torch.no_grad(), contextlib.suppress(RuntimeError, IndexError, AssertionError):
        model(x[..., :1])  # of the wrong shape: breaks off in the middle


EVALUATIONS: dict[str, Callable[[nn.Module, Any, Tensor], None]] = {
    "without gradients": evaluate,
    "with gradients on": evaluate_with_gradients_on,
    "the input's gradient": gradient_of_the_input,
    "paused": paused,
    "raises": refused,
}


@contextmanager
def beside(function: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Call a function in another thread, over and over; gives what lets it run once, between two lines of this one."""
    go, done, stop = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        while go.wait() and not stop.is_set():
            go.clear()
            try:
                function()
            except BaseException as error:
                errors.append(error)
            done.set()

    def once() -> None:
        done.clear()
        go.set()
        assert done.wait(30)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield once
    finally:
        stop.set()
        go.set()
        thread.join()
    assert not errors, errors


class InTheMiddle(nn.Module):
    """Does something in the middle of a forward pass, and in the middle of its backward pass."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.act()
        out = x * 1.0
        if out.requires_grad:
            out.register_hook(lambda g: self.act())
        return out


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "default": lambda m: EKFAC(m, refresh_every=3),
    "per_example": lambda m: EKFAC(m, scaling="per_example", damping=1e-2, refresh_every=3),
    "KFAC": lambda m: KFAC(m, refresh_every=3),
    "Preconditioner": lambda m: Preconditioner(m, refresh_every=3),
}


def train(kind: str, network: str, evaluation: str | None) -> tuple[list[Tensor], dict[str, float]]:
    """Train, with an evaluation in another thread at every point of a step; returns the weights and the stats."""
    torch.manual_seed(0)
    build, shape = NETWORKS[network]
    inner = build()
    nest: list[Callable[[], None]] = []
    trainer = threading.get_ident()

    def act() -> None:
        if nest and threading.get_ident() == trainer:
            nest[0]()

    layers = list(inner) if isinstance(inner, nn.Sequential) else [inner]
    model = nn.Sequential(InTheMiddle(act), *(m for layer in layers for m in (layer, InTheMiddle(act))))
    opt = KINDS[kind](model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    x_eval = torch.randn(3, *shape)
    other = nullcontext(lambda: None)
    if evaluation is not None:
        other = beside(lambda: EVALUATIONS[evaluation](model, opt, x_eval))  # type: ignore[assignment]
    with other as once:
        nest.append(once)
        for step in range(STEPS):
            x = torch.randn(8, *shape, generator=torch.Generator().manual_seed(step))
            once()
            opt.zero_grad()
            once()
            loss = model(x).square().sum(1).mean()
            once()
            loss.backward()
            once()
            opt.step()
            if kind == "Preconditioner":
                sgd.step()
        nest.clear()
    return [p.detach().clone() for p in model.parameters()], opt.stats()


@functools.cache
def trained_alone(kind: str, network: str) -> tuple[list[Tensor], dict[str, float]]:
    return train(kind, network, None)


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize(
    ("kind", "network"),
    [*((kind, "linear") for kind in KINDS), *(("default", n) for n in NETWORKS if n != "linear")],
)
def test_evaluation_in_another_thread_changes_nothing(kind: str, network: str, evaluation: str) -> None:
    alone, alone_stats = trained_alone(kind, network)
    found, stats = train(kind, network, evaluation)
    for p, q in zip(alone, found, strict=True):
        assert torch.equal(p, q)
    same = ("steps", "skipped_steps", "refreshes", "warm_refreshes", "solver_fallbacks")
    assert {n: stats[n] for n in same} == {n: alone_stats[n] for n in same}


def test_a_model_that_is_trained_in_another_thread_than_it_was_made_in() -> None:
    torch.manual_seed(0)
    model = NETWORKS["linear"][0]()
    opt = EKFAC(model)

    def step() -> None:
        opt.zero_grad()
        model(torch.randn(8, 4)).square().sum(1).mean().backward()
        opt.step()

    step()
    with beside(step) as once:
        for _ in range(3):
            once()
    step()
    assert opt.stats()["steps"] == 5


def add_gradient(model: nn.Module, part: Tensor) -> None:
    model(part).square().sum().div(8).backward()


def test_forwards_in_several_threads_are_one_batch() -> None:
    """Each thread adds its half to ``.grad``: the step is that of the whole batch."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends = []
    for threads in (False, True):
        torch.manual_seed(0)
        model = NETWORKS["linear"][0]().double()
        opt = EKFAC(model, scaling="running", damping=1e-2, damping_mode="plain")
        for _ in range(3):
            opt.zero_grad()
            for part in (x[:4], x[4:]):
                if threads:
                    thread = threading.Thread(target=add_gradient, args=(model, part))
                    thread.start()
                    thread.join()
                else:
                    add_gradient(model, part)
            opt.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_two_batches_through_attention_before_one_backward_pass() -> None:
    """Each has its own number of examples: what was captured of the first is arranged by it, and not by the last."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).double()
    twin = copy.deepcopy(model)
    batches = [torch.randn(n, 5, 4, dtype=torch.float64) for n in (8, 3)]
    for net, at_once in ((model, True), (twin, False)):
        opt = EKFAC(net, scaling="running", damping=1e-2, damping_mode="plain")
        losses = []
        for x in batches:
            losses.append(net(x).square().sum() / 11)
            if not at_once:
                losses.pop().backward()
        if at_once:
            torch.stack(losses).sum().backward()
        opt.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


class Gate(nn.Module):
    """Holds a thread in the middle of its forward pass until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer = threading.get_ident()
        self.inside, self.free = threading.Event(), threading.Event()
        self.in_training: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        if threading.get_ident() == self.trainer:
            self.in_training()
        else:
            self.inside.set()
            assert self.free.wait(120)
        return x


def overlapped(kind: str, evaluation: str | None, until: str) -> list[Tensor]:
    """Train; every step begins while another thread is in the middle of a forward pass, and that ends at some point."""
    torch.manual_seed(0)
    gate = Gate()
    model = nn.Sequential(nn.Linear(6, 5), gate, nn.Tanh(), nn.Linear(5, 3))
    opt = KINDS[kind](model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    errors: list[BaseException] = []

    def evaluate_beside() -> None:
        try:
            EVALUATIONS[str(evaluation)](model, opt, torch.randn(3, 6))
        except BaseException as error:
            errors.append(error)

    for step in range(STEPS):
        gate.inside.clear()
        gate.free.clear()
        thread = threading.Thread(target=evaluate_beside)

        def pass_by(point: str, thread: threading.Thread = thread) -> None:
            if evaluation is not None and point == until:
                gate.free.set()
                thread.join()

        if evaluation is not None:
            thread.start()
            assert gate.inside.wait(120)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        gate.in_training = lambda: pass_by("forward")
        opt.zero_grad()
        loss = model(x).square().sum(1).mean()
        pass_by("backward")
        loss.backward()
        pass_by("step")
        opt.step()
        if kind == "Preconditioner":
            sgd.step()
        pass_by("end")
    assert not errors, errors
    return [p.detach().clone() for p in model.parameters()]


@functools.cache
def never_overlapped(kind: str) -> list[Tensor]:
    return overlapped(kind, None, "")


@pytest.mark.parametrize("until", ["forward", "backward", "step", "end"])
@pytest.mark.parametrize("evaluation", ["without gradients", "with gradients on", "paused"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_passes_of_two_threads_overlap(kind: str, evaluation: str, until: str) -> None:
    for p, q in zip(never_overlapped(kind), overlapped(kind, evaluation, until), strict=True):
        assert torch.equal(p, q)
