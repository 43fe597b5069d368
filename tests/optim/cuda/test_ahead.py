"""Kernels are compiled beside the first batch, for what their launches will be given."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ekfac.optim.cuda import ahead, fused, update
from ekfac.optim.methods.belief import Belief
from ekfac.optim.types import BlockStep, EigenState, GroupRates

CUDA = torch.device("cuda:0")


class Kernel:
    """Notes what it is compiled for, and launched with."""

    src = metadata = None

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.launched: list[Any] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def warmup(self, *arguments: Any, grid: Any, **built_in: Any) -> Kernel:
        assert self.may_go_on.wait(10)
        self.compiled.append((arguments, built_in))
        return self

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **built_in: Any) -> None:
            kinds = tuple(a.dtype if isinstance(a, torch.Tensor) else 1 for a in arguments)
            self.launched.append((kinds, built_in))

        return launch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = {name: Kernel() for name in ("measure", "update", "scale", "of_parameters")}
    rule: Any = SimpleNamespace(**{n: found[n] for n in ("measure", "update", "scale")}, PARTS=512, TILE=1024)
    of_parameters: Any = SimpleNamespace(update=found["of_parameters"], PARTS=256, TILE=1024)
    launchers: list[Any] = []
    runtime: Any = ModuleType("triton.runtime")
    runtime.driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=lambda *given: launchers.append(given)))
    for name, module in (
        ("triton", ModuleType("triton")), ("triton.runtime", runtime), ("ekfac.optim.cuda.kernels", rule),
        ("ekfac.optim.cuda.update_kernels", of_parameters),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("ekfac.optim.cuda.kernels", rule, raising=False)
    monkeypatch.setattr("ekfac.optim.cuda.update_kernels", of_parameters, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(ahead, "_started", set())
    return {**found, "launchers": launchers}


def test_what_is_compiled_is_what_is_launched(kernels: dict[str, Any]) -> None:
    rule = Belief()
    ahead.compile_ahead(CUDA, rule)
    ahead.wait()
    ahead.compile_ahead(CUDA, rule)  # again: for another training
    ahead.wait()
    step, state = BlockStep(torch.ones(1, 1, 1), 1.0, GroupRates(0.1, 0.0, betas=(0.95, 0.95))), EigenState()
    step.g = step.seen = step.gradient  # type: ignore[assignment]
    state.m, state.s = torch.ones(2, 1, 1, 1).unbind()
    state.count, state.examples = torch.ones(2, dtype=torch.float64).unbind()
    fused.launch(rule, state, step)
    p, of_step, d = torch.ones(3, 1).unbind()
    update.launch([update.Row(p, of_step, d, 0.1, True, 0)], [0.5], None, 0.5)
    for name in ("measure", "update", "scale", "of_parameters"):
        assert len(kernels[name].compiled) == 1 and kernels[name].compiled == kernels[name].launched, name
    assert len(kernels["launchers"]) == 4


def test_the_first_launch_waits_and_a_failure_is_no_matter(
    kernels: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "_known", {})
    kernels["measure"].warmup = None  # which fails
    kernels["of_parameters"].may_go_on.clear()
    ahead.compile_ahead(CUDA, Belief())
    timer = threading.Timer(0.2, kernels["of_parameters"].may_go_on.set)
    timer.start()
    update.runs_on(torch.device("cpu"))
    assert len(kernels["of_parameters"].compiled) == 1 and not ahead._running
    timer.join()


def test_nothing_is_compiled_for_other_rules_and_devices(kernels: dict[str, Any]) -> None:
    ahead.compile_ahead(torch.device("cpu"), Belief())
    ahead.compile_ahead(CUDA, None)
    assert not ahead._running


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled then")
def test_triton_has_what_is_asked_of_it() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    from triton.runtime.jit import JITFunction

    assert "grid" in inspect.signature(JITFunction.warmup).parameters


@pytest.mark.gpu
def test_kernels_are_compiled_ahead_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an exception that would have been passed over."""
    pytest.importorskip("triton", reason="needs Triton")
    for function in (ahead._rule, ahead._update):
        function(Belief())
