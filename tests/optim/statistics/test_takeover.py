"""What an optimizer leaves behind: nothing, at once; and who has the hooks where several train the same parameters."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ekfac
from ekfac import EKFAC, KFAC, Preconditioner
from loops import NETWORKS, mlp, usual

OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "default": EKFAC,
    "paper": lambda m: EKFAC(m, **ekfac.PAPER),
    "per_example": lambda m: EKFAC(m, scaling="per_example"),
    "KFAC": KFAC,
    "momentum": lambda m: KFAC(m, momentum=0.9),
    "Preconditioner": Preconditioner,
}


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def train(model: nn.Module, opt: Any, shape: tuple[int, ...], steps: int = 3) -> Tensor:
    for _ in range(steps):
        opt.zero_grad()
        loss = model(torch.randn(6, *shape)).square().sum(1).mean()
        loss.backward()
        opt.step()
    return loss


def hooks(model: nn.Module) -> int:
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return on_modules + sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("loss", ["gone", "alive", "kept for another pass", "without a backward pass"])
@pytest.mark.parametrize(
    ("name", "network"), [*((n, "linear") for n in OPTIMIZERS), *(("default", n) for n in NETWORKS if n != "linear")]
)
def test_reference_counting_alone_frees_an_optimizer(name: str, network: str, loss: str) -> None:
    build, shape = NETWORKS[network]
    model = build()
    opt = OPTIMIZERS[name](model)
    last: Tensor | None = train(model, opt, shape)
    if loss == "gone":
        last = None
    elif loss != "alive":
        last = model(torch.randn(6, *shape)).square().sum(1).mean()
        if loss == "kept for another pass":
            last.backward(retain_graph=True)
    state = next(v for s in opt.state.values() for v in s.values() if isinstance(v, Tensor))
    engine = opt.engine
    gone = [weakref.ref(x) for x in (opt, engine, engine.collector, engine.collector.capture, engine.replicas, state)]
    model_gone = weakref.ref(model)
    del opt, engine, state
    assert [ref() for ref in gone] == [None] * 6
    assert hooks(model) == 0
    del model
    assert model_gone() is None
    if last is not None and loss != "alive":
        last.backward()  # the graph is still good


def test_the_first_optimizer_of_a_process_is_freed_too() -> None:
    code = """
        import gc, weakref
        gc.disable()
        import torch, ekfac
        model = torch.nn.Linear(3, 2)
        opt = ekfac.EKFAC(model)
        model(torch.randn(4, 3)).sum().backward()
        opt.step()
        refs = weakref.ref(opt), weakref.ref(model)
        del opt, model
        assert [ref() for ref in refs] == [None, None]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("keep", [False, True], ids=["the last one", "all of them"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_many_in_a_row_leave_one_set_of_hooks(name: str, keep: bool) -> None:
    model = mlp()
    opt = OPTIMIZERS[name](model)
    one, kept, refs, losses = hooks(model), [], [], []
    for _ in range(25):
        opt = OPTIMIZERS[name](model)
        losses.append(train(model, opt, (5,), 2))
        refs.append(weakref.ref(opt))
        if keep:
            kept.append(opt)
        assert hooks(model) == one
    assert sum(ref() is not None for ref in refs) == (25 if keep else 1)
    kept.clear()
    del opt
    assert hooks(model) == 0 and not any(ref() for ref in refs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_later_optimizer_takes_over_and_gives_back(name: str) -> None:
    model, twin = mlp(), mlp()
    first, alone = OPTIMIZERS[name](model), OPTIMIZERS[name](twin)
    with EKFAC(model) as second:
        usual(model, second)
        with pytest.raises(RuntimeError, match="constructed later trains the same parameters"):
            first.step()
        first.state_dict()
    model.load_state_dict(twin.state_dict())
    for _ in range(3):
        usual(model, first)
        usual(twin, alone)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(RuntimeError, match=r"step\(\) after close\(\)"):
        second.step()


def test_one_that_is_deleted_gives_back_too() -> None:
    model = mlp()
    first = EKFAC(model)
    second = KFAC(model)
    usual(model, second)
    del second
    usual(model, first)
    assert first.stats()["steps"] == 1


def test_optimizers_of_different_parameters_live_side_by_side() -> None:
    model = mlp()
    first = EKFAC(model, params=list(model[0].parameters()))
    second = EKFAC(model, params=list(model[2].parameters()))
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        model(torch.randn(8, 5)).square().sum(1).mean().backward()
        first.step()
        second.step()
    assert first.stats()["steps"] == second.stats()["steps"] == 2
    first.add_param_group({"params": list(model[2].parameters())})
    with pytest.raises(RuntimeError, match="constructed later"):
        first.step()


def test_a_constructor_that_fails_takes_nothing_over() -> None:
    model = mlp()
    first = EKFAC(model)
    groups = [{"params": [model[0].weight], "damping": 0.1}, {"params": [model[0].bias], "damping": 0.2}]
    with pytest.raises(ValueError, match="within layer '0'"):
        EKFAC(model, params=groups)
    usual(model, first)
    assert first.stats()["steps"] == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_graph_from_before_close_is_of_no_interest(name: str) -> None:
    model = mlp()
    opt = OPTIMIZERS[name](model)
    loss = model(torch.randn(8, 5)).square().sum(1).mean()
    opt.close()
    loss.backward()
    assert not opt.engine.collector.sums and not opt.engine.collector.capture.examples
