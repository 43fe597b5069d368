"""What is captured when, and what it is given, without a GPU: tensors pose as a GPU's, and a stand-in for the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ekfac.optim import capturing
from ekfac.optim.capturing import Lanes, Replays, Streams


class OnGPU(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def on_gpu(*values: float) -> Tensor:
    return torch.tensor(values).as_subclass(OnGPU)


class Doubling:
    """A function that remembers its calls, and does again what was captured when its graph is replayed."""

    def __init__(self) -> None:
        self.calls = 0
        self.captured: list[tuple[Tensor, Tensor]] = []
        self.fails = False

    def __call__(self, x: Tensor) -> tuple[Any, ...]:
        if self.fails:
            raise RuntimeError("no kernel for this")
        self.calls += 1
        self.captured.append((x, 2 * x))
        return self.captured[-1][1], "constant"

    def replay(self) -> None:
        x, doubled = self.captured[-1]
        doubled.copy_(2 * x)


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Doubling:
    """Its last call is what a graph holds."""
    found = Doubling()

    @contextmanager
    def nothing(*arguments: Any, **options: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(capturing, "capturing", nothing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: found)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def replays(memory: int | None = None, enabled: bool = True) -> Replays:
    return Replays("doubling", enabled, lambda device: "a stream", memory)  # type: ignore[return-value, arg-type]


def test_the_third_call_is_captured_and_later_ones_are_replayed(function: Doubling) -> None:
    of = replays()
    kept = []
    for value in range(6):
        doubled, constant = of("key", function, on_gpu(value, 1.0))
        kept.append(doubled)
        assert constant == "constant"
    assert function.calls == 3
    assert [t.tolist() for t in kept] == [[2.0 * value, 2.0] for value in range(6)], "each has its own"


@pytest.mark.parametrize("other", [lambda n: ("key", on_gpu(*range(n + 1))), lambda n: (n, on_gpu(1.0))])
def test_other_forms_and_keys_are_other_graphs(function: Doubling, other: Callable[[int], tuple[Any, Tensor]]) -> None:
    of = replays()
    for n in range(4):
        key, x = other(n)
        for _ in range(2):
            of(key, function, x)
    assert function.calls == 8 and not of._captured


def test_what_does_not_fit_runs(function: Doubling) -> None:
    of = replays(memory=20)
    for _ in range(5):
        of("key", function, on_gpu(1.0, 2.0, 3.0))
    assert function.calls == 3
    for _ in range(5):
        of("key", function, on_gpu(1.0, 2.0, 3.0, 4.0))
        of("another", function, on_gpu(1.0, 2.0, 3.0))
    assert function.calls == 3 + 5 + 3, "12 and 16 bytes are more than 20; the same form has the same place"


def test_a_function_that_cannot_be_captured_runs_from_then_on(function: Doubling) -> None:
    of = replays()
    for _ in range(2):
        of("key", function, on_gpu(1.0))
    function.fails = True
    told = pytest.warns(RuntimeWarning, match="doubling cannot be captured and runs without: no kernel for this")
    with told, pytest.raises(RuntimeError):
        of("key", function, on_gpu(1.0))
    function.fails = False
    assert of("key", function, on_gpu(1.0))[0].tolist() == [2.0] and not of._captured


def test_nothing_is_captured_within_a_capture_or_on_the_cpu(
    function: Doubling, monkeypatch: pytest.MonkeyPatch
) -> None:
    off, of = replays(enabled=False), replays()
    for _ in range(5):
        off("key", function, on_gpu(1.0))
        of("key", function, torch.ones(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(5):
        of("key", function, on_gpu(1.0))
    assert function.calls == 15


def test_streams_are_made_together_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter(range(100))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: next(given))
    streams = Streams(3)
    assert streams.on(torch.device("cuda")) == streams.on(torch.device("cuda")) == [0, 1, 2]
    streams.forget()
    assert streams.on(torch.device("cuda")) == [3, 4, 5]


def test_lanes_that_are_not_open_run_their_parts_in_order() -> None:
    done: list[int] = []

    def part(index: int) -> Callable[[], int]:
        def run() -> int:
            done.append(index)
            return index

        return run

    assert Lanes()([part(index) for index in range(5)], [1, 5, 3, 2, 4]) == done == list(range(5))
