"""What is captured when, and what it is given, without a GPU: tensors pose as a GPU's, and a stand-in for the graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ekfac.optim.cuda import replay, streams
from ekfac.optim.cuda.replay import Replays
from ekfac.optim.cuda.streams import OwnStream, ParallelStreams


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
        #: Whose graph it is.
        self.of: Replays | None = None

    def __call__(self, x: Tensor) -> tuple[Any, ...]:
        if self.fails:
            raise RuntimeError("no kernel for this")
        self.calls += 1
        self.captured.append((x, 2 * x))
        return self.captured[-1][1], "constant"

    def replay(self) -> None:
        assert self.of is not None
        (x, _), ((_, [place], (returned, _)),) = self.captured[-1], self.of._graphs.values()
        assert x is place
        returned.copy_(2 * x)


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Doubling:
    """Its last call is what a graph holds."""
    found = Doubling()

    @contextmanager
    def nothing(*arguments: Any, **options: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(replay, "recording", nothing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: found)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the user's")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=0))
    return found


def replays(memory: int | None = None, enabled: bool = True) -> Replays:
    return Replays("doubling", enabled, memory)


def test_the_third_call_is_captured_and_later_ones_are_replayed(function: Doubling) -> None:
    of = function.of = replays()
    kept = []
    for value in range(6):
        doubled, constant = of("key", function, on_gpu(value, 1.0))
        kept.append(doubled)
        assert constant == "constant"
    assert function.calls == 3
    assert [t.tolist() for t in kept] == [[2.0 * value, 2.0] for value in range(6)], "each has its own"


def test_what_is_read_where_it_is_must_still_be_there(function: Doubling) -> None:
    of = function.of = replays()
    fixed, elsewhere = on_gpu(1.0), on_gpu(1.0)
    for _ in range(4):
        of("key", function, on_gpu(1.0), fixed=[fixed])
    assert function.calls == 3 and len(of._graphs) == 1
    of("key", function, on_gpu(1.0), fixed=[elsewhere])
    assert function.calls == 4 and not of._graphs, "recorded anew when it has been seen often enough"
    for _ in range(3):
        of("key", function, on_gpu(1.0), fixed=[elsewhere])
    assert function.calls == 6 and len(of._graphs) == 1


@pytest.mark.parametrize("other", [lambda n: ("key", on_gpu(*range(n + 1))), lambda n: (n, on_gpu(1.0))])
def test_other_forms_and_keys_are_other_graphs(function: Doubling, other: Callable[[int], tuple[Any, Tensor]]) -> None:
    of = replays()
    for n in range(4):
        key, x = other(n)
        for _ in range(2):
            of(key, function, x)
    assert function.calls == 8 and not of._graphs


def test_what_does_not_fit_runs(function: Doubling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Doubling, "replay", lambda self: None)
    of = replays(memory=30)
    for _ in range(5):
        of("key", function, on_gpu(1.0, 2.0, 3.0))
    assert function.calls == 3
    for _ in range(5):
        of("key", function, on_gpu(1.0, 2.0, 3.0, 4.0))
        of("another", function, on_gpu(1.0, 2.0, 3.0))
    assert function.calls == 3 + 5 + 3, "12 bytes and as many for the answer; the same form has the same places"
    of.clear()
    for _ in range(5):
        of("key", function, on_gpu(1.0, 2.0, 3.0, 4.0))
    assert function.calls == 11 + 1, "seen often enough before"


def test_another_stream_waits_for_the_last_replay(function: Doubling, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[str, str]] = []

    class Named(str):
        def wait_stream(self, other: str) -> None:
            waits.append((self, other))

    now = ["a", "a", "a", "a", "b", "b", "a"]
    given = iter([Named(name) for name in now[2:]])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: next(given))
    of = function.of = replays()
    for _ in now:
        of("key", function, on_gpu(1.0))
    assert waits == [("b", "a"), ("a", "b")]


def test_a_function_that_cannot_be_captured_runs_from_then_on(function: Doubling) -> None:
    of = replays()
    for _ in range(2):
        of("key", function, on_gpu(1.0))
    function.fails = True
    told = pytest.warns(RuntimeWarning, match="doubling cannot be recorded and runs eagerly: no kernel for this")
    with told, pytest.raises(RuntimeError):
        of("key", function, on_gpu(1.0))
    function.fails = False
    assert of("key", function, on_gpu(1.0))[0].tolist() == [2.0] and not of._graphs


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


def test_graphs_that_live_have_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        __slots__ = ("cuda_stream",)  # not to be referred to weakly, which is not safe with torch's

        def __init__(self, address: int) -> None:
            self.cuda_stream = address

    given = itertools.cycle(range(4))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(given)))
    device = torch.device("cuda")
    first, second, third = (OwnStream(device) for _ in range(3))
    assert [s.stream.cuda_stream for s in (first, second, third)] == [0, 1, 2]
    del second
    assert [OwnStream(device).stream.cuda_stream for _ in range(3)] == [3, 1, 3], "not 0 and 2, which are held on to"


def test_lanes_of_an_optimizer_that_is_gone_serve_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: object())
    device = torch.device("cuda", 5)

    def opened(lanes: ParallelStreams) -> list[object]:
        for _ in range(2):
            with lanes.opened(device):
                assert lanes.open
            assert not lanes.open
        return list(lanes._streams)

    one, other = ParallelStreams(), ParallelStreams()
    first, second = opened(one), opened(other)
    assert len(set(first + second)) == 2 * streams.STREAMS, "two that live may be replayed side by side"
    del one
    assert opened(ParallelStreams()) == first


def test_lanes_that_are_not_open_run_their_parts_in_order() -> None:
    done: list[int] = []

    def part(index: int) -> Callable[[], int]:
        def run() -> int:
            done.append(index)
            return index

        return run

    assert ParallelStreams()([part(index) for index in range(5)], [1, 5, 3, 2, 4]) == done == list(range(5))
