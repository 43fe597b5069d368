"""A table of which block covers each parameter, its factor sizes and its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ekfac import checks
from ekfac.curvature.blocks import MAX_FACTOR_DIM, Block, find_blocks

# float64 matrices of a factor's size that a warm refresh holds at once: the factor, the basis, their product and its QR
# decomposition. Measured with tests/allocations.py; a full solve takes no more.
WORKSPACE = 4
# Matrices of a gradient's size that a step holds at once: the gradient, its projection, the update.
IN_FLIGHT = 3


@dataclass(frozen=True)
class Row:
    """One block: its name, parameters, representation, and the bytes of its state and of a step's temporaries.

    With several processes, ``owner`` is the rank that keeps the state, and ``here`` the bytes of it on this process.
    """

    name: str
    parameters: tuple[str, ...]
    numbers: int
    block: str
    A: str
    B: str
    bytes: int
    why: str = ""
    temporary: int = 0
    owner: int | None = None
    here: int = 0


@dataclass(frozen=True)
class Summary:
    """The blocks of a model; ``print`` it, or read ``rows``."""

    rows: tuple[Row, ...]

    @property
    def bytes(self) -> int:
        """Bytes of state on this process, without momentum."""
        return sum(row.here for row in self.rows)

    @property
    def peak(self) -> int:
        """Bytes of state and temporaries while the largest block's basis is updated, one block at a time."""
        return self.bytes + max((row.temporary for row in self.rows if row.here), default=0)

    def __str__(self) -> str:
        shared = any(r.owner is not None for r in self.rows)
        head = ("block", "parameters", "numbers", "A", "B", "state", *(["rank"] if shared else []), "how")
        body = [
            (r.name or "(model)", ", ".join(p.rpartition(".")[2] for p in r.parameters), f"{r.numbers:,}", r.A, r.B,
             human(r.bytes), *([str(r.owner)] if shared else []), f"{r.block} ({r.why})" if r.why else r.block)
            for r in self.rows
        ]  # fmt: skip
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        right = {2, 3, 4, 5, len(head) - 2}
        lines = [
            "  ".join(
                c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in [head, tuple("-" * w for w in widths), *body]
        ]
        numbers = sum(r.numbers for r in self.rows)
        covered = sum(r.numbers for r in self.rows if r.block != "diagonal")
        fraction = 100 * covered / max(1, numbers)
        everywhere = f" of {human(sum(r.bytes for r in self.rows))} on this rank" if shared else ""
        lines.append(
            f"{numbers:,} parameters, {fraction:.1f} % in Kronecker or exact blocks; "
            f"state {human(self.bytes)}{everywhere}, about {human(self.peak)} at the peak of a step"
        )
        return "\n".join(line.rstrip() for line in lines)


def human(size: float) -> str:
    """Format a number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def summarise(
    blocks: Iterable[Block],
    numbers: Callable[[Block], int],
    owner: Callable[[Block], int | None] = lambda block: None,
    here: Callable[[Block], int] | None = None,
) -> Summary:
    """Return the table of given blocks.

    Args:
        blocks: The blocks.
        numbers: Returns the number of entries in a block's state.
        owner: Returns a block's owner, if there are several processes.
        here: Returns how many of the entries this process keeps; all by default.
    """
    here = numbers if here is None else here

    def side(dim: int, diagonal: bool, groups: int) -> str:
        text = f"{dim}" if diagonal else f"{dim} x {dim}"
        return f"{groups} x ({text})" if groups > 1 else text

    rows = []
    for b in blocks:
        s = b.shape
        rows.append(
            Row(
                b.name,
                tuple(b.parameter_names.values()),
                s.numel,
                b.describe(),
                side(s.inputs, b.diagonal_A, s.groups) if b.covered else "-",
                side(s.out, b.diagonal_B, s.groups) if b.covered else "-",
                numbers(b) * b.dtype.itemsize,
                b.why,
                _temporary(b),
                owner(b),
                here(b) * b.dtype.itemsize,
            )
        )
    return Summary(tuple(rows))


def low_coverage(blocks: Sequence[Block]) -> str | None:
    """Describe which parameters have no block and why, if these are more than half; else return None.

    Parameters that the user excluded do not count.
    """
    left = sorted((b for b in blocks if not b.covered and b.why), key=lambda b: -b.shape.numel)
    total = sum(b.shape.numel for b in blocks)
    missing = sum(b.shape.numel for b in left)
    if 2 * missing <= total:
        return None
    most = ", ".join(f"{b.name} ({b.shape.numel:,}: {b.why})" for b in left[:3])
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return (
        f"{100 * missing / total:.0f} % of the parameters have no Kronecker or exact block and follow the diagonal "
        f"method: {most}{more}. opt.summary() has the table"
    )


def _temporary(block: Block) -> int:
    """Estimate the temporary bytes of a step that updates a block's basis."""
    sides = (block.diagonal_A, block.diagonal_B)
    widest = max((n for n, diagonal in zip(block.factor_numbers(), sides, strict=True) if not diagonal), default=0)
    in_flight = IN_FLIGHT * block.shape.numel * torch.finfo(block.dtype).bits // 8
    return in_flight + (WORKSPACE * 8 * widest if block.covered else 0)


def summary(
    model: nn.Module,
    *,
    sua: bool | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    max_factor_dim: int | None = MAX_FACTOR_DIM,
) -> Summary:
    """Show which block would cover each trainable parameter of a model, its factor sizes and its memory.

    The last line gives the state's size, and the peak of a step on a CPU. Model, gradients and activations are extra.

    Example:
        >>> import torch, ekfac
        >>> print(ekfac.summary(torch.nn.Linear(3, 2)))  # doctest: +ELLIPSIS
        block    parameters    numbers      A      B  state  how...

    Args:
        model: The model.
        sua: Treat the taps of convolutions as uncorrelated; by default for those that read many inputs per position.
        include: Names or patterns of layers to cover; all by default.
        exclude: Names or patterns of layers to leave to the diagonal method.
        max_factor_dim: A side wider than this is kept diagonal.
    """
    checks.trainable(model)
    blocks = find_blocks(model, include=include, exclude=exclude, sua=sua, max_factor_dim=max_factor_dim, through=True)
    # s and the mean gradient, in addition to factors and basis.
    return summarise(blocks, lambda b: 2 * b.shape.numel + (b.eigen_numbers() if b.covered else 0))
