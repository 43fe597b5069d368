"""From the calls of a block's layers to its sums: A, B and s*."""

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

#: So many positions are enough for a factor of up to half as many columns.
ROWS = 4096

#: Takes a few examples out of a captured tensor, in the block's dtype.
Cut = Callable[[Tensor], Tensor]


@dataclass
class FactorSums:
    """Sums over examples that give A (divided by ``terms``) and B (divided by N)."""

    A: Tensor
    terms: int | Tensor
    B: Tensor

    def mirror(self) -> None:
        """Make A and B whole: where something was added to them, only their upper halves are sure to be right."""
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
        calls: Its calls in one forward pass, with what the backward pass brought.
        n: The number of examples.
        sharing: "expand" or "reduce".
        memory: Bytes that temporary tensors may take.
        further: See :data:`Passes`.
        into: Sums of earlier batches, which these are added to, in place; :meth:`FactorSums.mirror` is due at the end.
        half: Take products of half-precision tensors on tensor cores, where they are exact.
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
                del h, delta  # before the next ones are made
    assert A is not None and B is not None
    sums = FactorSums(A.to(block.dtype), terms, B)
    if into is None and additions + len(further) > 1 and A.device.type == "cpu":  # elsewhere no sum is taken by strips
        sums.mirror()
    return sums


def sums_of_products(block: Block, calls: Sequence[Call], n: int, memory: int) -> FactorSums:
    """Return the sums of a layer's own calls and of the products that derivatives have made with its weight.

    Of each product k let A_k be the mean of h h^T and B_k the sum of delta delta^T. Then A is in proportion to
    sum_k tr(B_k) A_k and B to sum_k tr(A_k) B_k: the partial traces of sum_k A_k x B_k, whose trace theirs have, too.
    So a product counts for as much as it has to do with the gradient, and it does not matter which of its two sides
    has the units of the loss. tr(A) is the layer's own inputs' mean square. Where the loss has only derivatives, no
    gradient comes to the last layer's own call: then no product is with inputs, and their entries count as ones.

    Args:
        block: The block.
        calls: The calls.
        n: The number of examples.
        memory: Bytes that temporary tensors may take.
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
    """Return the trace, over all groups, of each of several factors."""
    return (matrices if diagonal else matrices.diagonal(dim1=-2, dim2=-1)).flatten(1).sum(1)


def sums_of_alike(block: Block, calls: Sequence[Call], more: float, half: bool) -> list[FactorSums]:
    """Return the sums of one call each of linear layers of one shape, by the same products for all.

    Args:
        block: One of them.
        calls: The calls, of one shape too.
        more: What B is multiplied by.
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
        A = layer.inputs_of_alike(x)
        B = factors.outer_sum(d.transpose(0, 1), block.diagonal_B)
    if more != 1:
        B.mul_(more)
    return [FactorSums(A[i : i + 1], x.shape[1], B[i : i + 1]) for i in range(len(calls))]


def takes_half(calls: Sequence[Call]) -> bool:
    """Tell whether calls ran in half precision, so that their sums can be taken of what they have multiplied."""
    return all(c.layer.takes_half and c.d.dtype in factors.HALF for c in calls)


def stride(block: Block, calls: Sequence[Call], n: int) -> int:
    """Choose the stride over a batch that is enough for A and B: a few thousand positions, twice the width.

    Odd, so that entries that alternate in kind are all met. What is left out is made up for by the number of examples:
    B is a mean over these.
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

    Half of the memory is for h, delta and their projections, the other half for what is made of them.
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
            del h, delta, part  # before the next ones are made
    assert total is not None
    return total


def refuse_unaligned(block: Block, layer: Layer, x: Tensor, n: int) -> None:
    """Raise if positions of a call belong to no example, for statistics that need each example's own gradient."""
    if not layer.has_examples(x, n) and x.numel():
        refuse(
            block,
            x,
            f"whose leading dimension is no multiple of the number of examples, {n} (the model's input counts them, or "
            "batch_dim, count=, batch(n))",
        )


def refuse(block: Block, x: Tensor, why: str) -> NoReturn:
    """Raise, as an input's positions belong to no example."""
    raise ValueError(
        f"layer '{block.name}': its input has shape {tuple(x.shape)}, {why}, so that "
        "it has no gradient per example, which scaling='per_example', sharing='reduce' and fisher's 'ekfac' need. "
        f"Allowed: exclude=['{block.name}'], which gives it the diagonal method, or a rule that needs sums over "
        "positions alone (another scaling, sharing='expand')"
    )


def rows_if_unaligned(call: Call, n: int) -> int:
    """Return the number of examples, or of rows where these belong to no example: sums over both are the same."""
    return n if call.layer.has_examples(call.x, n) else len(call.x)


def sums_of_positions(
    block: Block, calls: Sequence[Call], n: int, memory: int, further: Passes = ()
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield :func:`positions` for sums over all of them; calls that do not line up with examples come apart."""
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
    """Yield h and delta of all calls side by side, a few examples at a time, to fit into ``memory`` bytes.

    Where there are further backward passes over the same inputs, delta is ``[passes, n, S, G, O]``.
    """
    if further and any(call.layer.transposed for call in calls):
        # Here h is itself a gradient, so that no two passes share it.
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
        del h, delta  # before the next ones are made


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

    Where h is not written out (``unfolded=False``) the input stands in its place. Tensors come in the block's dtype, or
    as they are: then inputs that autocast has turned into half precision before the product come so.
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
        # Every product delta h^T stays as it is.
        parts = [
            (h * balance, delta / balance) if call.layer.transposed else (h, delta)
            for call, (h, delta) in zip(calls, parts, strict=True)
        ]
    if len(parts) == 1:
        return parts[0]
    layer, delta = calls[0].layer, joined(calls[0].layer, [delta for _, delta in parts])
    return (parts[0][0] if layer.adds_calls else torch.cat([h for h, _ in parts], 1)), delta


def joined(layer: Layer, deltas: Sequence[Tensor]) -> Tensor:
    """Return delta of several calls as positions of the same examples, or added up where the layer's calls are."""
    return torch.stack(list(deltas)).sum(0) if layer.adds_calls else torch.cat(list(deltas), 1)


def balances(calls: Sequence[Call]) -> Tensor | None:
    """Return the factor that gives transposed uses' h the mean square of direct ones'; None without both.

    It is taken over all examples at once, so that it does not depend on how they are split. Where no gradient has come
    to transposed uses it is huge: they have a part neither in A nor in B.
    """
    if len({call.layer.transposed for call in calls}) < 2:
        return None
    squares = []
    for transposed in (False, True):
        of = [call.layer.squared_inputs(call.x, call.d) for call in calls if call.layer.transposed == transposed]
        count = sum(entries for _, entries in of)
        squares.append(torch.stack([square for square, _ in of]).sum() / count)
    direct, in_basis = squares
    finfo = torch.finfo(in_basis.dtype)
    c = torch.where(in_basis > 0, direct / in_basis.clamp(min=finfo.tiny), finfo.max**0.5).sqrt()
    return torch.where(c > 0, c, 1.0)
