"""Predict an optimizer's memory and arithmetic before it is constructed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from ekfac import checks
from ekfac.curvature import statistics
from ekfac.curvature.blocks import COMPLEX, Block
from ekfac.curvature.capture.attached import unseen
from ekfac.curvature.capture.counting import count_examples, tensors
from ekfac.curvature.layers.base import Call, Layer
from ekfac.curvature.summary import Row, Summary, human, summarise
from ekfac.optim.methods.factory import eigen_methods, take_rule
from ekfac.optim.methods.rules import Rule
from ekfac.optim.options import Coverage, Refresh, check_group
from ekfac.optim.statistics.fingerprints import is_strict
from ekfac.optim.statistics.partition import blocks_under
from ekfac.optim.statistics.schedule import BATCHES, INTERVAL, LATER, LATER_BATCHES, stretches

#: Operations of a warm refresh of a D x D factor, in multiples of D^3: the product A U; a QR decomposition by two
#: products, a Cholesky factor and a triangular solve; one correcting product; the eigenvalues; the change of basis.
REFRESH = 13.0


@dataclass(frozen=True)
class Price:
    """What a block costs on top of the model's own passes: average floating-point operations per step.

    Attributes:
        statistics: To accumulate A and B.
        refresh: To update the bases, and to carry the rule's state to the new ones.
        projection: To project the gradient into the basis and back.
    """

    statistics: float = 0.0
    refresh: float = 0.0
    projection: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all three."""
        return self.statistics + self.refresh + self.projection

    def __add__(self, other: Price) -> Price:
        return Price(
            self.statistics + other.statistics, self.refresh + other.refresh, self.projection + other.projection
        )


@dataclass(frozen=True)
class PlannedBlock:
    """One block of a plan.

    Attributes:
        row: Its row in ``summary``.
        A: How A is kept, and why if not whole.
        B: The same for B.
        price: Its cost; without statistics if no batch was given.
    """

    row: Row
    A: str
    B: str
    price: Price


@dataclass(frozen=True)
class Plan:
    """The blocks of a model with their memory and cost; ``print`` it, or read ``blocks``.

    Attributes:
        blocks: One entry per block.
        summary: The table that ``opt.summary()`` will show.
        model: Floating-point operations of the model's own forward and backward pass; None if no batch was given.
        examples: The number of examples in the batch.
    """

    blocks: tuple[PlannedBlock, ...]
    summary: Summary
    model: float | None
    examples: int | None

    @property
    def bytes(self) -> int:
        """Bytes of state."""
        return self.summary.bytes

    @property
    def peak(self) -> int:
        """Bytes of state and of temporaries within a step."""
        return self.summary.peak

    @property
    def price(self) -> Price:
        """The average cost of a step."""
        return sum((block.price for block in self.blocks), Price())

    @property
    def share(self) -> float | None:
        """The cost of a step as a fraction of the model's own passes."""
        return None if not self.model else self.price.total / self.model

    def __str__(self) -> str:
        head = ("block", "state", "A", "B", "statistics", "refresh", "projection", "of the model's")
        body = [
            (b.row.name or "(model)", human(b.row.bytes), b.A, b.B, *map(flops, parts(b.price)), self._share(b.price))
            for b in self.blocks
        ]
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        lines = []
        for line in [head, tuple("-" * w for w in widths), *body]:
            cells = enumerate(zip(line, widths, strict=True))
            lines.append("  ".join(c.ljust(w) if i in (0, 2, 3) else c.rjust(w) for i, (c, w) in cells))
        told = f"state {human(self.bytes)}, about {human(self.peak)} at the peak of a step; a step costs on average "
        told += f"{flops(self.price.total)} operations"
        if self.model:
            told += f", {self._share(self.price)} of the {flops(self.model)} of the model's own passes over the batch"
        return "\n".join(line.rstrip() for line in [*lines, told])

    def _share(self, price: Price) -> str:
        return "-" if not self.model else f"{100 * price.total / self.model:.1f} %"


def parts(price: Price) -> tuple[float, float, float]:
    """Return the parts of a price."""
    return price.statistics, price.refresh, price.projection


def flops(number: float) -> str:
    """Format a number of operations with a unit prefix."""
    for unit in ("", "K", "M", "G", "T"):
        if number < 1000 or unit == "T":
            return f"{number:.3g} {unit}".rstrip()
        number /= 1000
    raise AssertionError


def plan(
    model: nn.Module,
    batch: Any = None,
    *,
    scaling: str | Rule = "belief",
    refresh_every: int | None = None,
    refresh: Refresh = Refresh(),
    coverage: Coverage = Coverage(),
    device: str | torch.device | None = None,
) -> Plan:
    """Predict what ``EKFAC(model)`` would store and compute, block by block.

    Nothing is allocated: the model runs once on the "meta" device, to find its layers' shapes and its arithmetic. The
    model itself may be on that device. Not counted are the weight average (as many numbers as the model has),
    element-wise work, and launch overhead.

    Example:
        >>> import torch, ekfac
        >>> print(ekfac.plan(torch.nn.Linear(3, 2), torch.randn(8, 3)))  # doctest: +ELLIPSIS
        block    state  A          B      statistics...

    Args:
        model: The model.
        batch: A batch as passed to the model's forward: a tensor, a tuple of arguments or a dict of keyword arguments;
            real or on the "meta" device. Without one, costs that depend on the batch are left out.
        scaling: As in :class:`~ekfac.EKFAC`.
        refresh_every: As in :class:`~ekfac.EKFAC`.
        refresh: As in :class:`~ekfac.EKFAC`.
        coverage: As in :class:`~ekfac.EKFAC`.
        device: The device for training, on which the interval of wide sides depends; by default the model's.
    """
    checks.model(model, there=False)
    check_group("refresh", refresh)
    check_group("coverage", coverage)
    parameters = [p for p in model.parameters() if p.requires_grad]
    covered, rest = eigen_methods(take_rule({"scaling": scaling}), "spectral")
    blocks = blocks_under(coverage, model, parameters, through=not is_strict(covered, coverage))
    summary = summarise(blocks, lambda b: (covered if b.covered else rest).numbers(b))
    calls, own, n = ({}, None, None) if batch is None else watched(model, blocks, batch)
    kind = torch.device(device).type if device is not None else parameters[0].device.type
    every = refresh_every or INTERVAL * (1 if refresh.deterministic else LATER)
    moments = len(covered.rule.moments)
    planned = []
    for block, row in zip(blocks, summary.rows, strict=True):
        price = Price()
        if block.covered:
            price = price_of(block, calls.get(block, ()), n or 1, every, refresh, moments, kind)
        A, B = (kept(block, side, coverage) for side in "AB")
        planned.append(PlannedBlock(row, A, B, price))
    return Plan(tuple(planned), summary, own, n)


def kept(block: Block, side: str, coverage: Coverage) -> str:
    """Describe how one side of a block is kept, and why if not whole."""
    if not block.covered:
        return block.why if side == "A" and block.why == COMPLEX else "-"
    diagonal, width = (block.diagonal_A, block.shape.inputs) if side == "A" else (block.diagonal_B, block.shape.out)
    if not diagonal:
        return f"{width} whole"
    if coverage.basis == "identity":
        return f"{width} diagonal (basis='identity')"
    if side == "A" and block.layer.diagonal_inputs:
        return f"{width} diagonal (tokens)"
    return f"{width} diagonal (over {coverage.max_factor_dim:,})"


def price_of(
    block: Block, calls: Sequence[Call], n: int, every: int, refresh: Refresh, moments: int, device: str
) -> Price:
    """Return the average cost of a covered block per step.

    Args:
        block: The block.
        calls: Its calls in one forward pass, on the "meta" device.
        n: The number of examples.
        every: The refresh interval.
        refresh: How bases are updated.
        moments: The number of running means kept in the basis.
        device: The kind of device for training.
    """
    s = block.shape
    A, B = 0 if block.diagonal_A else s.inputs, 0 if block.diagonal_B else s.out
    taken = 0.0
    for call in calls:
        inexact = not refresh.deterministic and block.dtype == torch.float32
        step = statistics.stride(block, [call], n) if inexact and not block.layer.scattered else 1
        hidden = call.layer.reading is not None or call.layer.seen_through_linear  # whose outputs are not the block's
        rows = call.x.numel() / call.x.shape[-1] if hidden else call.layer.positions_per_example(call.d, n) * n / step
        taken += 2 * rows * s.groups * (s.taps * s.inputs * max(A, 1) + s.out * max(B, 1))
    spacing = refresh.factor_every or max(1, every // (BATCHES if refresh.deterministic else LATER_BATCHES))
    turns = 2.0 * s.groups * s.out * s.columns * (A + B)
    renewed = 0.0
    for width, stretch in zip((A, B), stretches(block, device), strict=True):
        if width:
            renewed += (REFRESH * s.groups * width**3 + (1 + moments) * turns * width / (A + B)) / (every * stretch)
    return Price(taken / spacing, renewed, 2 * turns)


def watched(model: nn.Module, blocks: Sequence[Block], batch: Any) -> tuple[dict[Block, list[Call]], float, int]:
    """Run the model on the "meta" device; return each block's calls, the model's operations, and the batch size."""
    named = dict(batch) if isinstance(batch, Mapping) else {}
    args = batch if isinstance(batch, tuple) else () if named else (batch,)
    args, kwargs = without_memory(args), without_memory(named)
    counted = count_examples(args, kwargs, 0)
    found: dict[Block, list[Call]] = {}
    handles = []

    def hook(block: Block, layer: Layer) -> Any:
        def seen(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            x = next(tensors(given), None)
            d = next(tensors(output), None)
            if x is not None and d is not None:
                found.setdefault(block, []).append(Call(layer, x, d))

        return seen

    for block in blocks:
        for module, layer in block.uses.items():
            handles.append(module.register_forward_hook(hook(block, layer)))
    state = {name: without_memory(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    counter = FlopCounterMode(display=False)
    try:
        with unseen(model), counter, torch.enable_grad():
            output = functional_call(model, state, args, kwargs)
            outputs = [t.sum() for t in tensors(output) if t.grad_fn is not None]
            if outputs:
                torch.autograd.backward(outputs)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"batch: the model cannot run on the 'meta' device, as its forward reads values ({error}). "
            "Allowed: plan(model), which leaves out what depends on the batch"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    n = counted.n if counted.n is not None else 1
    return found, float(counter.get_total_flops()), n


def without_memory(value: Any) -> Any:
    """Copy tensors, also nested ones, to the "meta" device."""
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta").requires_grad_(value.requires_grad)
    if isinstance(value, tuple | list):
        return type(value)(map(without_memory, value))
    return {k: without_memory(v) for k, v in value.items()} if isinstance(value, dict) else value
