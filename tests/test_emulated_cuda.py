"""The emulated GPU shows what a real one would: what graphs freeze, what may not be read, which streams race."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from emulated_cuda import GPU, Graph, emulated
from emulated_streams import Race, Stream


@pytest.fixture(autouse=True)
def device() -> Iterator[GPU]:
    with emulated() as device:
        gc.disable()
        try:
            yield device
        finally:
            gc.enable()


def recorded(device: GPU, function: Callable[[], object]) -> Graph:
    graph = Graph()
    with device.graph(graph):
        function()
    return graph


def test_tensors_are_told_apart_and_know_their_gradients() -> None:
    x = torch.randn(3, 4)
    y = x.cuda()
    assert (y.device.type, y.is_cuda, y.is_cpu, x.is_cuda) == ("cuda", True, False, False)
    assert torch.equal(y.cpu(), x) and y.to("cuda") is y and y.tolist() == x.tolist()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
    model(y).square().sum().backward()
    assert all(p.is_cuda and p.grad is not None and p.grad.is_cuda for p in model.parameters())
    with pytest.raises(RuntimeError, match="same device"):
        y + x


def test_a_graph_does_again_what_was_recorded_and_nothing_else(device: GPU) -> None:
    x, state, number = torch.ones(2, device="cuda"), {"s": torch.zeros(2, device="cuda")}, 3.0
    made: list[Tensor] = []

    def function() -> None:
        made.append(x * number)
        state["s"].add_(made[0])
        x.view(2, 1)[0].mul_(2)

    graph = recorded(device, function)
    assert x.tolist() == [1, 1] and state["s"].tolist() == [0, 0] and made[0].isnan().all(), "nothing has run"
    number = 5.0
    graph.replay()
    assert state["s"].tolist() == [3, 3] and x.tolist() == [2, 1], "with the number of then"
    graph.replay()
    assert state["s"].tolist() == [9, 6] and made[0].tolist() == [6, 3]
    state["s"] = torch.zeros(2, device="cuda")
    graph.replay()
    assert state["s"].tolist() == [0, 0], "what has come in its place is not seen"


@pytest.mark.parametrize(
    "reads",
    [
        Tensor.item, bool, Tensor.tolist, Tensor.cpu, Tensor.nonzero, lambda x: x[x > 0], torch.linalg.eigh,
        lambda x: torch.tensor([1.0, 2.0], device="cuda"), lambda x: torch.zeros(1).copy_(x.view(-1)),
        lambda x: x.copy_(torch.ones(1, 1)), lambda x: torch.cuda.synchronize(),
    ],
)  # fmt: skip
def test_a_graph_cannot_wait_for_itself(device: GPU, reads: Callable[[Tensor], object]) -> None:
    x = torch.ones(1, 1, device="cuda")
    reads(x)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        recorded(device, lambda: reads(x))
    assert device.recording is None


def test_streams_that_do_not_wait_race(device: GPU) -> None:
    x, side = torch.ones(4, device="cuda"), Stream()
    with pytest.raises(Race), device.on(side):
        x[:2].sum()
    side.wait_stream(device.stream)
    with device.on(side):
        x[:2].add_(1)
    x[2:].add_(1)  # another part of it
    with pytest.raises(Race):
        x[1:].sum()
    device.stream.wait_stream(side)
    assert x.tolist() == [2, 2, 2, 2]


def test_memory_that_another_stream_uses_is_not_free(device: GPU) -> None:
    side = Stream()
    for waits in (True, False):
        x = torch.ones(4, device="cuda")
        side.wait_stream(device.stream)
        with device.on(side):
            x.add_(1)
        del x
        if waits:
            device.stream.wait_stream(side)
            torch.ones(1, device="cuda").add_(1)
        else:
            with pytest.raises(Race, match="memory that is free"):
                torch.ones(1, device="cuda").add_(1)


def test_branches_of_a_graph_have_to_be_joined(device: GPU) -> None:
    x, branch = torch.ones(4, device="cuda"), Stream()

    def forks(joins: bool) -> None:
        main = device.stream
        branch.wait_stream(main)
        with device.on(branch):
            x.add_(1)
        if joins:
            main.wait_stream(branch)

    recorded(device, lambda: forks(True)).replay()
    assert x.tolist() == [2, 2, 2, 2]
    with pytest.raises(AssertionError, match="never joined"):
        recorded(device, lambda: forks(False))
