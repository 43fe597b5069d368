"""The kernel of the update does what ``Optimizer._update_parameters`` and the average of weights do.

Without a GPU it is run by Triton's interpreter, as in test_fused.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ekfac.optim.cuda import update
from ekfac.optim.optimizer import decay
from emulated_cuda import by_lists

pytestmark = pytest.mark.filterwarnings("error:.*without the fused kernel")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")),
]
#: The shape of a parameter, and how its step lies in what it is a part of.
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]] = {
    "contiguous": ((40, 51), lambda: torch.randn(40, 51)),
    "several tiles": ((3, 1001), lambda: torch.randn(3, 1001)),
    "beside a bias": ((7, 33), lambda: torch.randn(7, 34)[:, :-1]),
    "a bias": ((7,), lambda: torch.randn(7, 34)[:, -1]),
    "transposed": ((8, 4), lambda: torch.randn(4, 8).T),
    "tap by tap": ((5, 6, 3, 3), lambda: torch.randn(5, 9, 6).transpose(1, 2).unflatten(2, (3, 3))),
    "at odd places": ((2, 3, 4, 5), lambda: torch.randn(5, 4, 3, 2).permute(3, 2, 1, 0)),
    "one number": ((1,), lambda: torch.randn(1)),
    "at an odd address": ((64,), lambda: torch.randn(65)[1:]),
    "no dimension": ((), lambda: torch.randn(())),
}


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "DEVICES", {"cuda", "cpu"} if INTERPRETED else {"cuda"})


def group_of(parameters: list[Any], **options: Any) -> dict[str, Any]:
    usual = {"momentum": 0.0, "weight_decay": 0.6, "decoupled_weight_decay": True, "decay_vectors": False}
    return {"params": parameters, **usual, "cautious_decay": True, **options}


def made(device: str) -> tuple[list[nn.Parameter], dict[Any, Tensor], dict[Any, Tensor]]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape).to(device)) for shape, _ in LAYOUTS.values()]
    steps: dict[Any, Tensor] = {}
    for p, (_, make) in zip(parameters, LAYOUTS.values(), strict=True):
        step = make()
        whole = step if step._base is None else step._base
        steps[p] = whole.to(device).as_strided(step.shape, step.stride(), step.storage_offset())
    return parameters, steps, {p: 0.1 * torch.randn_like(p).detach() for p in parameters}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numbers", ["tensors", "floats"])
@pytest.mark.parametrize("averages", ["all", "some", "none"])
@pytest.mark.parametrize(
    "options",
    [{}, {"cautious_decay": False}, {"decay_vectors": True}, {"weight_decay": 0.0}, {"decoupled_weight_decay": False}],
    ids=str,
)
def test_the_kernel_agrees_with_lists(device: str, numbers: str, averages: str, options: dict[str, Any]) -> None:
    parameters, steps, offsets = made(device)
    offsets = {p: d for i, (p, d) in enumerate(offsets.items()) if averages == "all" or (averages == "some" and i % 2)}
    number = {"dtype": torch.float64, "device": device}
    lrs: list[Any] = [0.02, 0.3]
    ok, weight = torch.tensor(1.0, **number), 0.25  # type: ignore[call-overload]
    if numbers == "tensors":
        lrs, weight = [torch.tensor(lr, **number) for lr in lrs], torch.tensor(weight, **number)
    groups = [group_of(parameters[::2], **options), group_of(parameters[1::2], weight_decay=0.1)]
    wanted = {p: (p.detach().clone(), offsets[p].clone() if p in offsets else None) for p in parameters}
    with torch.no_grad():
        for group, lr in zip(groups, lrs, strict=True):
            for p in group["params"]:
                truth, d = wanted[p]
                old, decays = truth.clone(), group["decay_vectors"] or (p.dim() > 1 and p is not parameters[0])
                if decays and group["weight_decay"] and group["decoupled_weight_decay"]:
                    decay([truth], [steps[p]], lr * group["weight_decay"], group["cautious_decay"])
                truth -= steps[p] * float(lr)
                if d is not None:
                    d.add_(truth - old).mul_(1 - float(weight))
    rows = update.rows_of(groups, steps, offsets, {parameters[0], *(p for p in parameters if p.dim() < 2)})
    assert rows is not None and len(rows) == len(parameters)
    assert update.runs_on(parameters[0].device)
    update.launch(rows, lrs, ok if numbers == "tensors" else None, weight)
    for p in parameters:
        truth, d = wanted[p]
        torch.testing.assert_close(p.detach(), truth, rtol=1e-6, atol=1e-6)
        if d is not None:
            torch.testing.assert_close(offsets[p], d, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_masked_step_changes_nothing(device: str) -> None:
    parameters, steps, offsets = made(device)
    for step in steps.values():
        step.fill_(torch.nan)
    before = [t.detach().clone() for t in (*parameters, *offsets.values())]
    rows = update.rows_of([group_of(parameters)], steps, offsets, ())
    assert rows is not None
    update.launch(rows, [0.1], torch.zeros((), dtype=torch.float64, device=device), 0.5)
    assert all(torch.equal(t, old) for t, old in zip((*parameters, *offsets.values()), before, strict=True))


def test_what_the_kernel_cannot_do_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "DEVICES", {"cpu"})

    def fits(p: Tensor, offset: Tensor | None = None, step: Tensor | None = None, **options: Any) -> bool:
        given = {p: torch.zeros_like(p) if step is None else step}
        rows = update.rows_of([group_of([p], **options)], given, {} if offset is None else {p: offset}, ())  # type: ignore[dict-item, arg-type]
        return rows is not None

    p = torch.randn(4, 8)
    assert fits(p) and fits(p, p.clone()) and fits(p, step=torch.randn(8, 4).T)
    channels_last = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    assert fits(channels_last, torch.zeros_like(channels_last))
    assert not fits(channels_last, torch.zeros(2, 4, 3, 3))
    assert not fits(p, momentum=0.9)
    assert not fits(p.double()) and not fits(p.bfloat16()) and not fits(p, p.double())
    assert not fits(torch.randn(4, 16)[:, ::2]) and not fits(torch.randn(4, 9)[:, :8])
    assert not fits(torch.randn(33)[1:])  # not where vectors may begin
    assert not fits(torch.randn(0, 3))  # nothing to do


def test_a_kernel_that_cannot_be_compiled_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, warned in ((RuntimeError("no ptxas"), 1), (ImportError("no triton"), 0)):

        def fail(*args: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(update, "_known", {})
        monkeypatch.setattr(update, "launch", fail)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert not update.runs_on(torch.device("cpu")) and not update.runs_on(torch.device("cpu"))
        assert len(seen) == warned


@pytest.mark.skipif(INTERPRETED, reason="with TRITON_INTERPRET=1 nothing is compiled")
def test_the_kernel_compiles_for_an_h200() -> None:
    """Which Triton does without one; and it moves four numbers at once."""
    triton = pytest.importorskip("triton", reason="needs Triton")
    from triton.backends.compiler import GPUTarget

    from ekfac.optim.cuda import update_kernels as k

    assert k.COLUMNS == update.COLUMNS
    names, built_in = k.update.arg_names, {"TILE": k.TILE}
    signature = {name: "constexpr" if name in built_in else "*fp64" for name in names} | {"table": "*i64"}
    constants = {(i,): built_in[name] for i, name in enumerate(names) if name in built_in}
    source = triton.compiler.ASTSource(fn=k.update, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"] and "st.global.v4" in compiled.asm["ptx"]


@pytest.mark.gpu
def test_a_graph_can_hold_the_kernel() -> None:
    parameters, steps, offsets = made("cuda")
    number = {"dtype": torch.float64, "device": "cuda"}
    lr, ok, weight = (torch.tensor(v, **number) for v in (0.02, 1.0, 0.25))  # type: ignore[call-overload]
    assert update.runs_on(parameters[0].device)
    rows = update.rows_of([group_of(parameters)], steps, offsets, ())
    assert rows is not None
    table, graph = update.Table(len(rows), torch.device("cuda")), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update.launch(rows, [lr], ok, weight, table.of(rows))
    table.fill()
    for value, good in ((0.02, 1.0), (0.3, 0.0), (0.1, 1.0)):
        lr.fill_(value)
        ok.fill_(good)
        wanted = [t.detach().clone() for t in (*parameters, *offsets.values())]
        twins = [update.Row(p, r.step, d, r.decay, r.cautious, 0) for r, p, d in zip(
            rows, wanted, wanted[len(parameters):], strict=False)]  # fmt: skip
        by_lists(twins, [lr], ok, weight)
        graph.replay()
        torch.testing.assert_close([*map(torch.detach, parameters), *offsets.values()], wanted, rtol=1e-5, atol=1e-6)
