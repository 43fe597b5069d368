"""Computes the sums for A, B and s* from a block's calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ekfac.curvature import factors, products
from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.layers.base import Call, Layer
from ekfac.curvature.layers.derivative import DerivativeLayer
from ekfac.curvature.scaling import chunks

#: Further backward passes over the same forward: the same calls with other output gradients.
Passes = Sequence[Sequence[Call]]

#: This many positions are enough for factors of up to half as many columns.
ROWS = 4096

#: Returns some examples of a captured tensor, in the block's dtype.
Cut = Callable[[Tensor], Tensor]


@dataclass
class FactorSums:
    """Sums over examples that give A (divided by ``terms``) and B (divided by N)."""

    A: Tensor
    terms: int | Tensor
    B: Tensor

    def mirror(self) -> None:
        """Complete A and B: after additions, only their upper halves are valid."""
        for matrix in (self.A, self.B):
            if matrix.dim() == 3:
                factors.mirror(matrix)


def factor_sums(
    block: Block,
    calls: Sequence[Call],
    n: int,
    sharing: str,
    memory: int,
    further: Passes = (),
    into: FactorSums | None = None,
    half: bool = False,
) -> FactorSums:
    """Sum h h^T and delta delta^T over n examples; several calls of a layer are positions of the same example.

    Args:
        block: The block.
        calls: Its calls in one forward pass, with their output gradients.
        n: The number of examples.
        sharing: "expand" or "reduce".
        memory: Bound in bytes on temporary tensors.
        further: See :data:`Passes`.
        into: Sums of earlier batches to add to, in place; call :meth:`FactorSums.mirror` at the end.
        half: Use tensor cores for half-precision tensors, whose products they compute exactly.
    """
    A, B, terms = (None, None, 0) if into is None else (into.A, into.B, into.terms)
    additions = 0
    if sharing != "expand":
        for call in calls:
            refuse_unaligned(block, call.layer, call.x, n)
    half = half and all(call.d.dtype in factors.HALF for call in calls)
    as_is = half and takes_half(calls) and not further
    direct = len(calls) == 1 and (calls[0].layer.direct_inputs or (as_is and calls[0].layer.reads_whole_inputs))
    with (factors.tensor_cores if half else factors.full_precision)(block.key.device):
        if block.layer.scattered:
            sides = block.dtype, block.diagonal_A, block.diagonal_B
            new_A, found, new_B = block.layer.sums_of_calls(calls, *sides)
            for others in further:
                new_B += block.layer.sums_of_calls(others, *sides)[2]
            A = new_A if A is None else A.add_(new_A)
            B = new_B if B is None else B.add_(new_B)
            terms += found
        elif sharing == "expand" and any(isinstance(call.layer, DerivativeLayer) for call in calls):
            for of_pass in (calls, *further):
                sums = sums_of_products(block, of_pass, n, memory)
                A = sums.A if A is None else A.add_(sums.A)
                B = sums.B if B is None else B.add_(sums.B)
                terms += sums.terms
        elif sharing == "expand" and direct and not block.diagonal_A:
            layer, n = calls[0].layer, rows_if_unaligned(calls[0], n)
            for cut, count in cuts(block, calls, n, memory, further, unfolded=False, as_is=as_is):
                for (one,) in (calls, *further):
                    B = factors.output_sum(layer.deltas(cut(one.x), cut(one.d), count), sharing, block.diagonal_B, B)
                A, found = layer.input_sum_directly(cut(calls[0].x), count, A)
                terms += found
                additions += 1
        else:
            for h, delta in sums_of_positions(block, calls, n, memory, further):
                A, found = block.layer.input_sum(h, sharing, block.diagonal_A, A)
                delta = delta.flatten(0, 1) if delta.dim() == 5 else delta
                B = factors.output_sum(delta, sharing, block.diagonal_B, B)
                terms += found
                additions += 1
                del h, delta  # free them before the next ones are made
    assert A is not None and B is not None
    sums = FactorSums(A.to(block.dtype), terms, B)
    if into is None and additions + len(further) > 1 and A.device.type == "cpu":  # only there are sums cut into strips
        sums.mirror()
    return sums


def sums_of_products(block: Block, calls: Sequence[Call], n: int, memory: int) -> FactorSums:
    """Return the sums of a layer's own calls and of the products that derivatives make with its weight.

    For each product k let A_k be the mean of h h^T and B_k the sum of delta delta^T. A is proportional to
    sum_k tr(B_k) A_k and B to sum_k tr(A_k) B_k: the partial traces of sum_k A_k x B_k, scaled to have its trace. So a
    product counts in proportion to its part in the gradient, whichever of its sides carries the units of the loss.
    tr(A) is the mean square of the layer's own inputs. If the loss contains only derivatives, the last layer's own call
    gets no gradient and no product is with inputs; then tr(A) is as if all entries were ones.

    Args:
        block: The block.
        calls: The calls.
        n: The number of examples.
        memory: Bound in bytes on temporary tensors.
    """
    if products.are_plain_rows(block, calls):
        A, B = products.sums_of_rows(block, calls)
        return FactorSums(A.mul_(n), n, B)
    parts = [_sums_of_call(block, call, n, memory) for call in calls]
    As, Bs = torch.stack([part.A for part in parts]), torch.stack([part.B for part in parts])
    inputs, outputs = (_traces(of, vector) for of, vector in ((As, block.diagonal_A), (Bs, block.diagonal_B)))
    of_A, of_B = products.weights(block, calls, [part.terms for part in parts], inputs, outputs)
    return FactorSums(torch.tensordot(of_A, As, 1).mul_(n), n, torch.tensordot(of_B, Bs, 1))


def _sums_of_call(block: Block, call: Call, n: int, memory: int) -> FactorSums:
    A: Tensor | None = None
    B: Tensor | None = None
    terms, layer = 0, call.layer
    direct, n = layer.direct_inputs and not block.diagonal_A, rows_if_unaligned(call, n)
    for cut, count in cuts(block, [call], n, memory, unfolded=not direct):
        x, d = cut(call.x), cut(call.d)
        if direct:
            new, found = layer.input_sum_directly(x, count)
            delta = layer.deltas(x, d, count)
        else:
            h, delta = layer.positions(x, d, count)
            new, found = layer.input_sum(h, "expand", block.diagonal_A)
        A = new if A is None else A + new
        new = factors.output_sum(delta, "expand", block.diagonal_B)
        B = new if B is None else B + new
        terms += found
    assert A is not None and B is not None
    return FactorSums(A, terms, B)


def _traces(matrices: Tensor, diagonal: bool) -> Tensor:
    """Return the trace of each of several factors, summed over groups."""
    return (matrices if diagonal else matrices.diagonal(dim1=-2, dim2=-1)).flatten(1).sum(1)


def batched_factor_sums(block: Block, calls: Sequence[Call], scale_B: float, half: bool) -> list[FactorSums]:
    """Return the sums for one call each of several linear layers of one shape, in batched products.

    Args:
        block: One of the blocks.
        calls: One call per block, all of one shape.
        scale_B: A factor for B.
        half: See :func:`factor_sums`.
    """
    layer = calls[0].layer
    with (factors.tensor_cores if half else factors.full_precision)(block.key.device):
        x, d = (
            torch.stack([t.reshape(-1, t.shape[-1]) for t in of])
            for of in zip(*((c.x, c.d) for c in calls), strict=True)
        )
        if not (half and takes_half(calls)):
            x, d = x.to(block.dtype), d.to(block.dtype)
        elif x.dtype != d.dtype:
            x = x.to(d.dtype)
        A = layer.batched_input_sums(x)
        B = factors.outer_sum(d.transpose(0, 1), block.diagonal_B)
    if scale_B != 1:
        B.mul_(scale_B)
    return [FactorSums(A[i : i + 1], x.shape[1], B[i : i + 1]) for i in range(len(calls))]


def takes_half(calls: Sequence[Call]) -> bool:
    """Return whether calls ran in half precision, so that sums can use the same half-precision inputs."""
    return all(c.layer.takes_half and c.d.dtype in factors.HALF for c in calls)


def stride(block: Block, calls: Sequence[Call], n: int) -> int:
    """Choose a stride over the batch that leaves enough for A and B: a few thousand positions, and twice the width.

    It is odd, so that a batch of examples that alternate in kind is sampled evenly. B is a mean over examples, so the
    omitted ones are accounted for by their number.
    """
    lengths = {len(t) for call in calls for t in (call.x, call.d)}
    if len(lengths) > 1 or not all(call.layer.splittable for call in calls):
        return 1
    positions = sum(call.layer.positions_per_example(call.d, n) for call in calls) * n
    A, B = 0 if block.diagonal_A else block.shape.inputs, 0 if block.diagonal_B else block.shape.out
    step = min(positions // max(ROWS, 2 * A, 2 * B), lengths.pop())
    return max(1, step - 1 + step % 2)


def scaling_sum(block: Block, calls: Sequence[Call], n: int, basis: Basis, memory: int, further: Passes = ()) -> Tensor:
    """Sum the squared gradient in the basis over n examples, ``[G, O, C]``.

    Half of the memory is for h, delta and their projections, the other half for products of them.
    """
    total: Tensor | None = None
    for call in calls:
        refuse_unaligned(block, call.layer, call.x, n)
    with factors.full_precision(block.key.device):
        if len(calls) == 1 and not further and calls[0].layer.direct_scaling(calls[0].x, n, basis):
            ((layer, x, d),) = ((call.layer, call.x, call.d) for call in calls)
            for cut, _ in cuts(block, calls, n, memory // 2, unfolded=False):
                part = layer.scaling_sum_directly(cut(x), cut(d), basis)
                total = part if total is None else total.add_(part)
            assert total is not None
            return total
        for h, delta in positions(block, calls, n, memory // 2, further):
            part = block.layer.scaling_sum(h, delta, basis, memory // 2)
            total = part if total is None else total.add_(part)
            del h, delta, part  # free them before the next ones are made
    assert total is not None
    return total


def refuse_unaligned(block: Block, layer: Layer, x: Tensor, n: int) -> None:
    """Raise if a call's positions cannot be assigned to examples, for statistics that need per-example gradients."""
    if not layer.has_examples(x, n) and x.numel():
        refuse(
            block,
            x,
            f"whose leading dimension is not a multiple of the number of examples, {n} (set by the model's input, or "
            "by batch_dim, count=, batch(n))",
        )


def refuse(block: Block, x: Tensor, why: str) -> NoReturn:
    """Raise because an input's positions cannot be assigned to examples."""
    raise ValueError(
        f"layer '{block.name}': its input has shape {tuple(x.shape)}, {why}. So it has no per-example gradients, "
        "which scaling='per_example', sharing='reduce' and fisher's 'ekfac' need. "
        f"Allowed: exclude=['{block.name}'], which gives it the diagonal method, or options that need only sums over "
        "positions (another scaling, sharing='expand')"
    )


def rows_if_unaligned(call: Call, n: int) -> int:
    """Return the number of examples, or of rows if these cannot be assigned to examples; sums over both are equal."""
    return n if call.layer.has_examples(call.x, n) else len(call.x)


def sums_of_positions(
    block: Block, calls: Sequence[Call], n: int, memory: int, further: Passes = ()
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield :func:`positions` for sums over all of them; call by call if some cannot be assigned to examples."""
    if all(call.layer.has_examples(call.x, n) for call in calls):
        yield from positions(block, calls, n, memory, further)
        return
    balance = balances(calls)
    for i, call in enumerate(calls):
        yield from positions(block, [call], rows_if_unaligned(call, n), memory, [[one[i]] for one in further], balance)


def positions(
    block: Block,
    calls: Sequence[Call],
    n: int,
    memory: int,
    further: Passes = (),
    balance: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield h and delta of all calls side by side, in chunks of examples that fit into ``memory`` bytes.

    With further backward passes over the same inputs, delta is ``[passes, n, S, G, O]``.
    """
    if further and any(call.layer.transposed for call in calls):
        # Here h is itself a gradient, which passes do not share.
        for one in (calls, *further):
            yield from positions(block, one, n, memory, (), balance)
        return
    balance = balances(calls) if balance is None else balance
    for cut, count in cuts(block, calls, n, memory, further):
        h, delta = side_by_side(calls, cut, count, balance)
        if further:
            more = [joined(block.layer, [c.layer.deltas(cut(c.x), cut(c.d), count) for c in one]) for one in further]
            delta = torch.stack([delta, *more])
            del more
        yield h, delta
        del h, delta  # free them before the next ones are made


def cuts(
    block: Block,
    calls: Sequence[Call],
    n: int,
    memory: int,
    further: Passes = (),
    unfolded: bool = True,
    as_is: bool = False,
) -> Iterator[tuple[Cut, int]]:
    """Split the examples so that h and delta, with one copy of each, fit into ``memory`` bytes.

    If h is not formed (``unfolded=False``), the input counts instead. Tensors are converted to the block's dtype, or,
    with ``as_is``, to the output gradient's: the half precision to which autocast converted the inputs.
    """
    numbers = 0
    for call in calls:
        at = call.layer.positions_per_example(call.d, n) if unfolded else 0
        numbers += at * (call.layer.numbers_per_position() + len(further) * block.shape.groups * block.shape.out)
        numbers += (call.x.numel() + (1 + len(further)) * call.d.numel()) // n
    each = 2 * numbers * torch.finfo(block.dtype).bits // 8
    splittable = all(call.layer.splittable for call in calls)
    for start, stop in chunks(n, each, memory) if splittable else [(0, n)]:

        def cut(tensor: Tensor, start: int = start, stop: int = stop) -> Tensor:
            return _examples(tensor, start, stop, n, calls[0].d.dtype if as_is else block.dtype)

        yield cut, stop - start


def _examples(tensor: Tensor, start: int, stop: int, n: int, dtype: torch.dtype) -> Tensor:
    k = tensor.shape[0] // n
    part = tensor if (start, stop) == (0, n) else tensor[start * k : stop * k]
    return part.to(dtype) if part.is_floating_point() else part


def side_by_side(calls: Sequence[Call], cut: Cut, n: int, balance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return h and delta of several calls as positions of the same n examples."""
    parts = [call.layer.positions(cut(call.x), cut(call.d), n) for call in calls]
    if balance is not None:
        # Every product delta h^T is unchanged.
        parts = [
            (h * balance, delta / balance) if call.layer.transposed else (h, delta)
            for call, (h, delta) in zip(calls, parts, strict=True)
        ]
    if len(parts) == 1:
        return parts[0]
    layer, delta = calls[0].layer, joined(calls[0].layer, [delta for _, delta in parts])
    return (parts[0][0] if layer.adds_calls else torch.cat([h for h, _ in parts], 1)), delta


def joined(layer: Layer, deltas: Sequence[Tensor]) -> Tensor:
    """Return delta of several calls as positions of the same examples, or their sum if the layer adds its calls."""
    return torch.stack(list(deltas)).sum(0) if layer.adds_calls else torch.cat(list(deltas), 1)


def balances(calls: Sequence[Call]) -> Tensor | None:
    """Return the factor that gives h of transposed uses the mean square of direct uses; None without both.

    It is computed over all examples at once, so that it does not depend on how they are split. If transposed uses
    received no gradient, the factor is huge, and they enter neither A nor B.
    """
    if len({call.layer.transposed for call in calls}) < 2:
        return None
    squares = []
    for kind in (False, True):
        of = [call.layer.squared_inputs(call.x, call.d) for call in calls if call.layer.transposed == kind]
        count = sum(entries for _, entries in of)
        squares.append(torch.stack([square for square, _ in of]).sum() / count)
    direct, transposed = squares
    finfo = torch.finfo(transposed.dtype)
    c = torch.where(transposed > 0, direct / transposed.clamp(min=finfo.tiny), finfo.max**0.5).sqrt()
    return torch.where(c > 0, c, 1.0)
