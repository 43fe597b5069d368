"""The update of all parameters, with decay and average, in one kernel instead of about fifteen passes over memory.

``Optimizer._update_parameters`` and :class:`~ekfac.optim.step_size.weight_average.WeightAverage` are the reference, and
the fallback without Triton, for other dtypes, and with momentum.
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

#: Device types with a kernel.
DEVICES = {"cuda"}
#: Numbers per row of the kernel's table; repeated here because ``update_kernels`` cannot be imported without Triton.
COLUMNS = 12
#: Whether the kernel ran in a trial, by device.
_known: dict[torch.device, bool] = {}


@dataclass
class Row:
    """One parameter of an update.

    Attributes:
        parameter: The parameter, as a contiguous tensor.
        step: Its step, of the same shape.
        offset: z - x, laid out like the parameter; None without an average.
        decay: Weight decay.
        cautious: Whether to decay a weight only if the step shrinks it too.
        group: The index of its group.
        shows: Whether to leave the average x = z - d in the parameter.
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
    """A recorded update's table of pointers: allocated before recording, and filled once all addresses are known.

    Args:
        most: The largest number of rows.
        device: The device.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self.place = torch.empty(most, COLUMNS, dtype=torch.int64, device=device)
        self._rows: list[Row] = []

    def of(self, rows: list[Row]) -> Tensor:
        """Return the part of the table that the rows will be written to."""
        self._rows = rows
        return self.place[: len(rows)]

    def fill(self) -> None:
        """Write the rows, and drop the references to their tensors."""
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
    """Return the rows of an update, or None if the kernel does not support it.

    The default decay leaves ``spared`` parameters alone; ``shows`` leaves the average in the parameters.
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
    """Return a tensor's sizes and strides with adjacent dimensions merged where possible, padded to at least three."""
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
    """Return whether the kernel runs, from a single trial; warn if it fails though Triton is installed."""
    if device not in _known:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # nothing can be compiled during recording
        ahead.wait()
        try:
            p, step, d = torch.ones(3, 1, device=device).unbind()
            launch([Row(p, step, d, 0.1, True, 0)], [0.5], None, 0.5)
            _known[device] = bool(p.item() < 1)
        except Exception as error:  # any failure falls back to the update without a kernel
            _known[device] = False
            if not isinstance(error, ImportError):  # torch ships Triton only on some systems
                warnings.warn(f"parameters are updated without the fused kernel: {error}", RuntimeWarning,
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
        lrs: The lr of each group.
        ok: 0 on the device if the step is to be skipped, else 1; None if the host knows that it is not.
        weight: The weight of the newest parameters in the average.
        table: During recording, the table to be filled later, as nothing can be copied from the host then.
    """
    from ekfac.optim.cuda import update_kernels as k

    device = rows[0].parameter.device
    if table is None:
        table = torch.tensor([row.numbers() for row in rows])
        table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
    like = rows[0].parameter.new_empty((), dtype=torch.float64)
    # Pass numbers as tensors, so that one graph serves all values.
    rates = [v.to(like) if isinstance(v, Tensor) else like.new_full((), v) for v in lrs]
    given = (1.0 if ok is None else ok, weight)
    good, c = (v.to(like) if isinstance(v, Tensor) else like.new_full((), v) for v in given)
    together = rates[0] if len(rates) == 1 else torch.stack(rates)
    largest = max(row.step.numel() for row in rows)
    grid = min(k.PARTS, -(-largest // k.TILE)), len(rows)
    with torch.cuda.device_of(like):
        k.update[grid](table, table.view(torch.float64), together, good, c, TILE=k.TILE)
