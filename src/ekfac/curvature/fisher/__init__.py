"""The Fisher of a model over a dataset, exact or approximated, as an operator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ekfac import checks
from ekfac.curvature import factors, statistics
from ekfac.curvature.blocks import Block, find_blocks
from ekfac.curvature.capture.attached import unseen
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.eigensolvers import eigh_with_fallback
from ekfac.curvature.fisher.batches import Progress
from ekfac.curvature.fisher.estimates import Estimate
from ekfac.curvature.fisher.likelihoods import Loss
from ekfac.curvature.fisher.passes import Data
from ekfac.curvature.fisher.per_example import ExampleGradients
from ekfac.curvature.layers.base import Call
from ekfac.curvature.operators.dense import SecondMoment
from ekfac.curvature.operators.operator import Curvature
from ekfac.curvature.operators.parts import DiagonalPart, EigenPart, Part
from ekfac.curvature.operators.vectors import Layout

APPROXIMATIONS = ("full", "block", "diagonal", "kfac", "ekfac")


def fisher(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    approximation: str = "ekfac",
    estimate: str = "empirical",
    draws: int = 1,
    seed: int = 0,
    sharing: str = "expand",
    sua: bool | None = False,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    max_factor_dim: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    progress: bool | None = None,
) -> Curvature:
    r"""Compute the Fisher of a model over a dataset, as an operator.

    .. math::
        G = \frac1N \sum_n E[g_n g_n^T], \quad g_n = \nabla_\theta \, l_n

    with l_n the loss of example n. The expectation is over the given label (``empirical``), over labels drawn from the
    model (``sampled``), or over all labels (``exact``: C - 1 backward passes for C classes).

    The data is streamed once, or twice for EKFAC (A and B, then s* in their eigenbasis). The model runs in evaluation
    mode on its device, and is left unchanged.

    Example:
        >>> import torch, ekfac
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> data = [(torch.randn(32, 4), torch.randint(3, (32,))) for _ in range(4)]
        >>> G = ekfac.fisher(model, data, "categorical", approximation="ekfac", estimate="exact")
        >>> v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        >>> step = G.solve(v, damping=1e-3)
        >>> G.trace().shape
        torch.Size([])

    Args:
        model: The model; parameters with ``requires_grad`` count.
        batches: A loader or any iterable of batches: (inputs, target), (input, ..., input, target), or a mapping with
            its target under "labels", "label", "targets", "target" or "y". The first dimension of the first tensor
            is the batch.
        loss: A function of (output, target) that returns one loss per example or their mean; or "categorical" (classes
            in the last dimension), "bernoulli" (logits) or "gaussian" (unit variance), summed over an example's terms;
            or torch's CrossEntropyLoss, BCEWithLogitsLoss or MSELoss.
        approximation: "full" (all parameters together), "block" (exact within each layer), "diagonal", "kfac" or
            "ekfac"; with the last two, parameters without a covered layer get their diagonal.
        estimate: "empirical", "sampled" or "exact"; the last two need a likelihood.
        draws: The number of labels drawn per example, for "sampled".
        seed: The seed of the draws.
        sharing: "expand" or "reduce": how the positions of one example enter A and B.
        sua: Treat the taps of a convolution as uncorrelated; None uses the optimizers' default.
        include: Names or patterns of layers that get factors; all by default.
        exclude: Names or patterns of layers that do not.
        max_factor_dim: A side wider than this is kept diagonal.
        dtype: Compute in this dtype, on a copy of the model; its own by default.
        device: Compute on this device, on a copy of the model; its own by default.
        progress: Show a bar: True, False, or None for "when it takes long".
    """
    checks.one_of("approximation", approximation, APPROXIMATIONS)
    checks.one_of("sharing", sharing, ("expand", "reduce"))
    if sua is not None:
        checks.flag("sua", sua)
    elif sharing == "reduce":
        sua = False
    if max_factor_dim is not None:
        checks.integer("max_factor_dim", max_factor_dim, least=1)
    covered = None if include is None else checks.patterns("include", include)
    left_out = checks.patterns("exclude", exclude)
    if torch.is_inference_mode_enabled():
        raise RuntimeError("fisher() needs gradients: call it outside torch.inference_mode()")
    if sua and sharing == "reduce":
        raise ValueError("sua=True with sharing='reduce' is not defined. Allowed: sua=True with sharing='expand'")
    checks.model(model)
    checks.real("fisher()", model)
    try:
        once = iter(batches) is batches
    except TypeError:
        raise TypeError(f"batches={batches!r} must be a loader or an iterable of batches") from None
    how = Estimate(loss, estimate, draws, seed)
    bar = Progress(progress, passes=2 if approximation == "ekfac" else 1)
    if approximation == "ekfac" and once:
        raise ValueError(
            "batches is an iterator, which can be read only once, and EKFAC reads the data twice: pass a DataLoader or "
            "a list of batches"
        )
    with unseen(model), evaluation_copy(model, dtype, device) as (inner, cast):
        if inner is not model and isinstance(loss, nn.Module):
            how.loss = copy.deepcopy(loss).to(device=device, dtype=dtype)  # it may have weights of classes
        data = Data(inner, batches, how, cast, bar)

        def blocks_of(silent: Collection[nn.Parameter] = ()) -> list[Block]:
            return find_blocks(
                inner,
                include=covered,
                exclude=left_out,
                sua=sua,
                max_factor_dim=max_factor_dim,
                silent=silent,
            )

        blocks = blocks_of()
        if approximation in ("full", "block"):
            parts, n = exact_parts(data, blocks, together=approximation == "full")
        else:
            silent = data.silent_layers([block for block in blocks if block.covered])
            if silent:
                blocks = blocks_of({p for block in silent for p in block.parameters.values()})
            parts, n = structured_parts(data, blocks, approximation, sharing)
        return Curvature(approximation, layout_of(inner), parts, n)


def layout_of(model: nn.Module) -> Layout:
    """Return names and shapes of a model's trained parameters."""
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    return Layout(tuple(trained), tuple(trained.values()))


@contextmanager
def evaluation_copy(
    model: nn.Module, dtype: torch.dtype | None, device: str | torch.device | None
) -> Iterator[tuple[nn.Module, torch.dtype | None]]:
    """Yield the model in evaluation mode, copied if dtype or device differ, and the dtype to cast inputs to."""
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"dtype={dtype!r} is not allowed. Allowed: torch.float32, torch.float64, None")
    first = next(model.parameters())
    if (dtype or first.dtype) != first.dtype or (
        device is not None and checks.device("device", device) != first.device
    ):
        copied = copy.deepcopy(model).to(device=device, dtype=dtype).eval()
        yield copied, dtype
        return
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield model, dtype
    finally:
        for module, mode in modes:
            module.training = mode


def exact_parts(data: Data, blocks: Sequence[Block], *, together: bool) -> tuple[list[Part], int]:
    """Compute the exact Fisher, over all parameters or block by block, from per-example gradients; return N too."""
    layout = layout_of(data.model)
    cut = [("all parameters", layout.names)] if together else [
        (block.name, tuple(block.parameter_names.values())) for block in blocks
    ]  # fmt: skip
    places = [layout.places(names) for _, names in cut]
    sizes = dict(zip(layout.names, layout.sizes, strict=True))
    sums = [SecondMoment(name, names, sum(sizes[n] for n in names)) for name, names in cut]

    def add(rows: Tensor) -> None:
        for one, at in zip(sums, places, strict=True):
            one.add(rows if together else rows[:, at].contiguous())

    n = data.sweep([], lambda *_: None, ExampleGradients(data.model, layout.names, 8 * data.memory), add)
    return [one.part(n) for one in sums], n


def structured_parts(data: Data, blocks: Sequence[Block], approximation: str, sharing: str) -> tuple[list[Part], int]:
    """Compute the diagonal, KFAC or EKFAC of covered layers, and the diagonal of the rest; return N too."""
    covered = [block for block in blocks if block.covered]
    rest = [block for block in blocks if not block.covered]
    names = [name for block in rest for name in block.parameter_names.values()]
    rows = ExampleGradients(data.model, names, 8 * data.memory) if rest else None
    squares = torch.zeros(rows.size if rows else 0, dtype=blocks[0].dtype, device=data.device)

    def add(gradients: Tensor) -> None:
        squares.add_(gradients.square().sum(0))

    if approximation == "diagonal":
        bases = {block: plain_basis(block) for block in covered}
        s, n = second_moments(data, bases, rows, add)
    else:
        bases, n = eigenbases(data, covered, sharing, rows, add)
        s = {block: basis.kronecker() for block, basis in bases.items()}
        if approximation == "ekfac":
            s, _ = second_moments(data, bases)
    entries = dict(zip(names, (squares / n).split([block.shape.numel for block in rest]), strict=True))
    parts: list[Part] = []
    for block in blocks:
        mine = tuple(block.parameter_names.values())
        if not block.covered:
            parts.append(DiagonalPart(block.name, mine, entries[mine[0]]))
            continue
        part = EigenPart(block.name, mine, bases[block], s[block], order_of(block))
        parts.append(DiagonalPart(block.name, mine, part.diagonal()) if approximation == "diagonal" else part)
    return parts, n


def eigenbases(
    data: Data,
    blocks: Sequence[Block],
    sharing: str,
    rows: ExampleGradients | None,
    add_rows: Callable[[Tensor], None],
) -> tuple[dict[Block, Basis], int]:
    """Make a pass over the data for A and B; return their eigenbases and N."""
    sums: dict[Block, statistics.FactorSums] = {}

    def receive(block: Block, passes: Sequence[Sequence[Call]], n: int, again: bool) -> None:
        if again and not any(call.layer.transposed for call in passes[0]):  # A already includes these inputs
            add_outputs(sums[block], block, passes, n, sharing, data.memory)
            return
        sums[block] = statistics.factor_sums(block, passes[0], n, sharing, data.memory, passes[1:], sums.get(block))

    n = data.sweep(blocks, receive, rows, add_rows)
    bases = {}
    for block in blocks:
        total = sums.pop(block, None)
        if total is None:  # the loss does not depend on this layer
            bases[block] = plain_basis(block, 0.0)
            continue
        U_A, S_A = eigenvectors(block, "A", total.A.div_(total.terms), block.diagonal_A)
        U_B, S_B = eigenvectors(block, "B", total.B.div_(n), block.diagonal_B)
        bases[block] = Basis(block.shape, U_A, U_B, S_A, S_B)
    return bases, n


def add_outputs(
    sums: statistics.FactorSums, block: Block, passes: Sequence[Sequence[Call]], n: int, sharing: str, memory: int
) -> None:
    """Add further backward passes to B; A already includes their inputs."""
    with factors.full_precision(block.key.device):
        for calls in passes:
            for cut, count in statistics.cuts(block, calls, n, memory):
                deltas = [call.layer.deltas(cut(call.x), cut(call.d), count) for call in calls]
                delta = deltas[0] if len(deltas) == 1 else torch.cat(deltas, 1)
                sums.B = factors.output_sum(delta, sharing, block.diagonal_B, sums.B)


def eigenvectors(block: Block, side: str, matrix: Tensor, diagonal: bool) -> tuple[Tensor | None, Tensor]:
    """Return U and S of a factor, which is symmetrised in place; U is None for a diagonal side."""
    if diagonal:
        return None, matrix.clamp(min=0)
    factors.mirror(matrix)
    with factors.full_precision(matrix.device):
        solved = eigh_with_fallback(matrix, symmetric=True)
    if solved.rung == "kept":
        raise RuntimeError(
            f"layer '{block.name}': {side} has no eigendecomposition; its activations or gradients are not finite"
        )
    return solved.U, solved.values


def second_moments(
    data: Data,
    bases: dict[Block, Basis],
    rows: ExampleGradients | None = None,
    add_rows: Callable[[Tensor], None] | None = None,
) -> tuple[dict[Block, Tensor], int]:
    """Make a pass over the data for s*, the mean squared gradients in given bases; return N too."""
    sums: dict[Block, Tensor] = {}

    def receive(block: Block, passes: Sequence[Sequence[Call]], n: int, again: bool) -> None:
        found = statistics.scaling_sum(block, passes[0], n, bases[block], data.memory, passes[1:])
        sums[block] = sums[block].add_(found) if block in sums else found

    n = data.sweep(list(bases), receive, rows, add_rows)
    return {b: sums[b] / n if b in sums else torch.zeros_like(basis.kronecker()) for b, basis in bases.items()}, n


def plain_basis(block: Block, value: float = 1.0) -> Basis:
    """Return the identity basis with all eigenvalues equal to ``value``."""
    s = block.shape
    ones = torch.full((s.groups, s.inputs + s.out), value, dtype=block.dtype, device=block.key.device)
    return Basis(s, None, None, ones[:, : s.inputs], ones[:, s.inputs :])


def order_of(block: Block) -> Tensor | None:
    """Return the index of the parameter entry at each place of ``[G, O, C]``; None if the orders agree."""
    at, numbers = 0, {}
    for role, p in block.parameters.items():
        numbers[role] = torch.arange(at, at + p.numel(), device="cpu").reshape(p.shape)
        at += p.numel()
    order = block.layer.stack(numbers).reshape(-1)
    same = torch.equal(order, torch.arange(at, device="cpu"))
    return None if same else order.to(block.key.device, torch.int32)
