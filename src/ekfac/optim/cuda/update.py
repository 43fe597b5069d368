"""The update of all parameters, with decay and average, by one kernel in place of some fifteen passes over memory.

``Optimizer._update_parameters`` and :class:`~ekfac.optim.step_size.course.WeightAverage` are what it has to
agree with, and what runs where this cannot: without Triton, in other dtypes, with momentum.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.optim.cuda import ahead

#: Where the kernel runs.
DEVICES = {"cuda"}
#: Numbers in a row of the kernel's table, which is made where Triton need not be.
COLUMNS = 12
#: Whether it has been seen to run on a device.
_known: dict[torch.device, bool] = {}


@dataclass
class Row:
    """One parameter of an update.

    Attributes:
        parameter: What is updated, its numbers one after the other.
        step: Its step, of the same shape.
        offset: z - x, laid out like the parameter; None where there is no average.
        decay: Weight decay.
        cautious: Whether that is only where the step makes a weight smaller.
        group: The place of its rate.
        shows: Whether the parameter is left with the average, x = z - d.
    """

    parameter: Tensor
    step: Tensor
    offset: Tensor | None
    decay: float
    cautious: bool
    group: int
    shows: bool = False

    def numbers(self) -> list[int]:
        """Return the row of the table."""
        sizes, strides = merged(self.step)
        decay = struct.unpack("q", struct.pack("d", self.decay))[0]
        offset = 0 if self.offset is None else self.offset.data_ptr()
        addresses = self.parameter.data_ptr(), self.step.data_ptr(), offset
        flags = int(self.cautious) + 2 * int(self.shows)
        return [*addresses, self.step.numel(), *sizes[1:], *strides, decay, flags, self.group]


class Table:
    """Where a graph finds what to update: made before it is recorded, and filled when all addresses are known.

    Args:
        most: The most rows.
        device: Where it is.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.place = torch.empty(most, COLUMNS, dtype=torch.int64, device=device)
        self._rows: list[Row] = []

    def of(self, rows: list[Row]) -> Tensor:
        """Return where the rows will be."""
        self._rows = rows
        return self.place[: len(rows)]

    def fill(self) -> None:
        """Write them, and let go of the tensors."""
        if self._rows:
            self.place[: len(self._rows)].copy_(torch.tensor([row.numbers() for row in self._rows]))
        self._rows = []


def rows_of(
    groups: Sequence[Mapping[str, Any]],
    steps: Mapping[nn.Parameter, Tensor],
    offsets: Mapping[nn.Parameter, Tensor],
    spared: Container[Tensor],
    shows: bool = False,
) -> list[Row] | None:
    """Return what the kernel is to do, where a default decay spares some parameters; None where it cannot.

    With ``shows`` it leaves the average in the parameters.
    """
    rows = []
    for index, group in enumerate(groups):
        if group["momentum"]:
            return None
        decay = float(group["weight_decay"]) if group["decoupled_weight_decay"] else 0.0
        for p in group["params"]:
            step = steps.get(p)
            if step is None or not p.numel():
                continue
            tensors = [p.detach(), step] if p not in offsets else [p.detach(), step, offsets[p]]
            if not all(t.dtype == torch.float32 and t.device == p.device and t.shape == p.shape for t in tensors):
                return None
            if p.device.type not in DEVICES or p.numel() >= 2**31:
                return None
            order = sorted(range(p.dim()), key=lambda i, p=p: -p.stride(i))  # type: ignore[misc]
            parameter, step, *offset = (t.permute(order) for t in tensors)
            if not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (parameter, *offset)):
                return None
            step = step if len(merged(step)[0]) == 3 else step.contiguous()
            its_decay = decay if group["decay_vectors"] or p not in spared else 0.0
            mine = offset[0] if offset else None
            rows.append(Row(parameter, step, mine, its_decay, bool(group["cautious_decay"]), index, shows))
    return rows if len({row.parameter.device for row in rows}) == 1 else None


def merged(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Return sizes and strides of a tensor with as few dimensions as can tell where its numbers are, at least three."""
    sizes, strides = [1], [0]
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if n == 1:
            continue
        if strides[-1] == n * stride or sizes[-1] == 1:
            sizes[-1], strides[-1] = sizes[-1] * n, stride
        else:
            sizes.append(n)
            strides.append(stride)
    missing = 3 - len(sizes)
    return [1] * missing + sizes, [0] * missing + strides


def runs_on(device: torch.device) -> bool:
    """Tell whether the kernel runs, from trying it once; warn where it should and does not."""
    if device not in _known:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # no time to compile anything
        ahead.wait()
        try:
            p, step, d = torch.ones(3, 1, device=device).unbind()
            launch([Row(p, step, d, 0.1, True, 0)], [0.5], None, 0.5)
            _known[device] = bool(p.item() < 1)
        except Exception as error:  # whatever it is, the update can do without
            _known[device] = False
            if not isinstance(error, ImportError):  # torch has Triton with it on some systems alone
                warnings.warn(f"parameters are updated without a kernel of its own: {error}", RuntimeWarning,
                              stacklevel=2)  # fmt: skip
    return _known[device]


def launch(
    rows: Sequence[Row],
    lrs: Sequence[float | Tensor],
    ok: Tensor | None,
    weight: float | Tensor,
    table: Tensor | None = None,
) -> None:
    """Update parameters and offsets.

    Args:
        rows: The parameters.
        lrs: The rate of each group.
        ok: 0 on the device in a step that must change nothing; None where that is known.
        weight: What the newest weights count in the average.
        table: Where the table will be, in a graph: nothing can be copied there while it is recorded.
    """
    from ekfac.optim.cuda import update_kernels as k

    device = rows[0].parameter.device
    if table is None:
        table = torch.tensor([row.numbers() for row in rows])
        table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
    like = rows[0].parameter.new_empty((), dtype=torch.float64)
    # Numbers are tensors: the same graph serves all.
    rates = [v.to(like) if isinstance(v, Tensor) else like.new_full((), v) for v in lrs]
    given = (1.0 if ok is None else ok, weight)
    good, c = (v.to(like) if isinstance(v, Tensor) else like.new_full((), v) for v in given)
    together = rates[0] if len(rates) == 1 else torch.stack(rates)
    largest = max(row.step.numel() for row in rows)
    grid = min(k.PARTS, -(-largest // k.TILE)), len(rows)
    with torch.cuda.device_of(like):
        k.update[grid](table, table.view(torch.float64), together, good, c, TILE=k.TILE)
