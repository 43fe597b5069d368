"""Sends statistics to the owners of their blocks, packed in buckets, with only half of each symmetric factor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ekfac.curvature.blocks import Block
from ekfac.curvature.statistics import FactorSums
from ekfac.optim.distributed.owners import Owners
from ekfac.optim.statistics.sums import BlockSums, Expected, no_scaling

#: A bucket of this many bytes is full.
FULL = 25 * 2**20
#: A bucket's packed numbers, and the handle of their reduction.
Sent = tuple[Tensor, Any]


@dataclass(frozen=True)
class Bucket:
    """Statistics of some blocks that are sent to one owner in one message.

    Attributes:
        owner: The receiving rank.
        parts: The blocks, each with whether its factors and its scaling are included.
    """

    owner: int
    parts: tuple[tuple[Block, bool, bool], ...]

    @property
    def blocks(self) -> Iterator[Block]:
        """The blocks."""
        return (block for block, _, _ in self.parts)

    def pack(self, sums: Mapping[Block, BlockSums]) -> Tensor:
        """Pack this process's statistics, with zeros for layers in which it saw no example."""
        found = []
        for block, factors, scaling in self.parts:
            of, like = sums.get(block, BlockSums()), torch.empty(0, dtype=block.dtype, device=block.key.device)
            if factors and of.factors is None:
                found.append(like.new_zeros(sum(sizes(block))))
            elif factors and of.factors is not None:
                terms = torch.as_tensor(of.factors.terms).to(like)
                found += [half(of.factors.A), terms, half(of.factors.B)]
            if scaling:
                found.append(no_scaling(block) if of.scaling is None else of.scaling)
        return torch.cat([t.reshape(-1) for t in found])

    def unpack(self, flat: Tensor, sums: dict[Block, BlockSums], unseen: set[Block]) -> None:
        """Unpack sums over all processes into ``sums``, except for blocks without statistics on any process."""
        for block, factors, scaling in self.parts:
            shape, of = block.shape, BlockSums() if block in unseen else sums.setdefault(block, BlockSums())
            if factors:
                A, terms, B, flat = flat.split([*(counts := sizes(block)), flat.numel() - sum(counts)])
                sides = (A, shape.inputs, block.diagonal_A), (B, shape.out, block.diagonal_B)
                A, B = (
                    t.view(shape.groups, d).clone() if diagonal else whole(t.view(shape.groups, -1), d)
                    for t, d, diagonal in sides
                )
                of.factors = FactorSums(A, terms.view(()).clone(), B)
            if scaling:
                s, flat = flat.split([count := no_scaling(block, "meta").numel(), flat.numel() - count])
                of.scaling = s.view(shape.groups, shape.out, shape.columns).clone()


def layout(owners: Owners, expected: Mapping[Block, Expected]) -> list[Bucket]:
    """Divide a step's statistics into buckets, last layers first, in the order of a backward pass.

    The result is the same on all processes, and in resumed runs: the rounding of a sum depends on the position of its
    terms in a bucket.
    """
    found: list[Bucket] = []
    open_: dict[Any, tuple[list[tuple[Block, bool, bool]], int]] = {}
    for block, what in reversed(list(expected.items())):
        if not (what.factors or what.scaling):
            continue
        kind = owners.of(block), block.dtype, block.key.device
        parts, size = open_.pop(kind, ([], 0))
        numbers = sum(sizes(block)) * what.factors + no_scaling(block, "meta").numel() * what.scaling
        parts.append((block, what.factors, what.scaling))
        size += numbers * block.dtype.itemsize
        if size < FULL:
            open_[kind] = parts, size
        else:
            found.append(Bucket(kind[0], tuple(parts)))
    return found + [Bucket(kind[0], tuple(parts)) for kind, (parts, _) in open_.items()]


def reduce_statistics(
    owners: Owners,
    sums: dict[Block, BlockSums],
    expected: Mapping[Block, Expected],
    unseen: set[Block],
    sent: Mapping[Bucket, Sent],
    counts: Iterable[float],
    device: torch.device,
) -> list[Tensor]:
    """Sum factors and scalings over processes, at their owners, and fingerprints and counts, on all processes.

    The host does not wait for the device.

    Args:
        owners: The owners of blocks.
        sums: This process's statistics; replaced by the sums over all, for the blocks that it owns.
        expected: What every process has gathered for each block.
        unseen: Blocks without statistics on any process.
        sent: Buckets that are already being reduced, with their handles.
        counts: Further numbers to sum.
        device: The device on which these are summed.

    Returns:
        The sums of the further numbers.
    """
    processes = owners.processes
    buckets = [b for b in layout(owners, expected) if b in sent or not unseen.issuperset(b.blocks)]
    under_way = [(b, *(sent[b] if b in sent else processes.sum_packed(b.pack(sums), b.owner))) for b in buckets]
    marked = [sums.setdefault(b, BlockSums()) for b, what in expected.items() if what.fingerprint and b not in unseen]
    small = [torch.tensor([float(c) for c in counts], dtype=torch.float64, device=device)]
    small += [small[0].new_zeros(2) if e.fingerprint is None else e.fingerprint.to(small[0]) for e in marked]
    totals, *fingerprints = processes.sum(torch.cat(small)).split([len(s) for s in small])
    for entry, total in zip(marked, fingerprints, strict=True):
        entry.fingerprint = total
    for block in expected.keys() & sums.keys():
        sums[block].factors = sums[block].scaling = None
    for bucket, flat, work in under_way:
        work.wait()
        if bucket.owner == processes.rank:
            bucket.unpack(flat, sums, unseen)
    return list(totals.unbind())


def sizes(block: Block) -> tuple[int, int, int]:
    """Return the packed sizes of A, its number of terms, and B."""
    sides = (block.shape.inputs, block.diagonal_A), (block.shape.out, block.diagonal_B)
    A, B = (block.shape.groups * (d if diagonal else d + d // 2 * d) for d, diagonal in sides)
    return A, 1, B


def half(matrix: Tensor) -> Tensor:
    """Pack the upper half of each symmetric matrix of ``[G, D, D]``; return diagonal factors as they are.

    The matrix is divided into four blocks. The upper right one is kept as it is; the upper triangles of the diagonal
    blocks, one of them transposed, together fill a square. This needs no index tensors, which on a GPU would be larger
    than the matrix.
    """
    if matrix.dim() == 2:
        return matrix
    d = matrix.shape[-1]
    a, odd = d // 2, d % 2
    square = matrix[:, :a, :a].mT.tril(-1) + matrix[:, a : d - odd, a + odd :].triu(1 - odd)
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    return torch.cat([diagonal, matrix[:, :a, a:].flatten(1), square.flatten(1)], 1)


def whole(packed: Tensor, d: int) -> Tensor:
    """Invert :func:`half`."""
    a, odd = d // 2, d % 2
    diagonal, right, square = packed.split([d, a * (d - a), a * a], 1)
    upper = packed.new_zeros(len(packed), d, d)
    upper[:, :a, a:] = right.view(len(packed), a, d - a)
    upper[:, :a, :a] = square.view(len(packed), a, a).tril(-1).mT
    upper[:, a : d - odd, a + odd :] = square.view(len(packed), a, a).triu(1 - odd)
    matrix = upper + upper.mT
    matrix.diagonal(dim1=1, dim2=2).copy_(diagonal)
    return matrix
