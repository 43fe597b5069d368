"""Embeddings: linear layers of one-hot vectors, which are never formed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ekfac.curvature.eigenbasis import Basis, rotate_rows
from ekfac.curvature.layers.base import Layer, Reading, square_sum
from ekfac.curvature.layers.recognise import multiplies_with_its_weight
from ekfac.curvature.layers.shapes import BlockShape


class EmbeddingLayer(Layer):
    """``nn.Embedding``: A is diagonal, with the frequency of each token; B is as in a linear layer.

    h is the tensor of tokens ``[N, S]`` instead of one-hot rows. Positions with ``padding_idx`` have no gradient and
    are ignored.
    """

    module: Any
    diagonal_inputs = True

    def __init__(self, module: nn.Embedding | nn.EmbeddingBag, roles: frozenset[str], *, sua: bool = False) -> None:
        super().__init__(module, roles)
        self.shape = BlockShape(1, module.embedding_dim, module.num_embeddings)

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Refuse ``scale_grad_by_freq``, whose gradient is no sum over examples, and sparse gradients."""
        return isinstance(module, nn.Embedding) and not (module.sparse or module.scale_grad_by_freq)

    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        return x.reshape(n, -1), live_gradient(self.module, x, d).reshape(n, -1, 1, self.shape.out)

    def free_dims(self, x: Tensor) -> int:
        return x.dim()

    def shared(self, x: Tensor) -> bool:
        """Return whether the input is position indices: four or more consecutive integers are no coincidence."""
        return x.dim() == 1 and len(x) > 3 and bool((x.diff() == 1).all())

    def numbers_per_position(self) -> int:
        """Count a few copies of delta, for sums over equal tokens; one-hot rows are never formed."""
        return 4 * self.shape.out

    def input_sum(self, h: Tensor, sharing: str, diagonal: bool, into: Tensor | None = None) -> tuple[Tensor, int]:
        """Count tokens; under "reduce", sum squared per-example frequencies."""
        n, s = h.shape
        live = torch.ones_like(h, dtype=torch.float64)
        if self.module.padding_idx is not None:
            live = live * (h != self.module.padding_idx)
        if sharing == "expand":
            counts = live.new_zeros(self.shape.inputs).index_add_(0, h.reshape(-1), live.reshape(-1))[None]
            return (counts if into is None else into.add_(counts)), n * s
        tokens, frequency = _per_example_sums(h, live[..., None] / s, self.shape.inputs)
        squares = live.new_zeros(self.shape.inputs).index_add_(0, tokens, frequency[:, 0].square())[None]
        return (squares if into is None else into.add_(squares)), n

    def scaling_sum(self, h: Tensor, delta: Tensor, basis: Basis, memory: int) -> Tensor:
        """Sum gradients by token within each example, square them, and sum over examples."""
        if delta.dim() == 5:
            return torch.stack([self.scaling_sum(h, one, basis, memory) for one in delta]).sum(0)
        rows = rotate_rows(delta.flatten(0, 2).T[None], basis.U_B)[0].T
        tokens, gradients = _per_example_sums(h, rows.reshape(*h.shape, -1), self.shape.inputs)
        total = gradients.new_zeros(self.shape.inputs, self.shape.out)
        return total.index_add_(0, tokens, gradients.square()).T[None]

    def probe(self, h: Tensor, delta: Tensor, columns: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return torch.einsum("nsgo,go->nsg", delta, rows), columns[0][h][..., None]

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"].T[None]

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        return {"weight": matrix[0].T}


class OwnForwardEmbeddingLayer(EmbeddingLayer):
    """A subclass of ``nn.Embedding`` that overrides forward but calls ``F.embedding``, perhaps scaling its result."""

    seen_through_linear = True

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        return super().supports(module) and multiplies_with_its_weight(module)


class EmbeddingBagReading(Reading):
    """Reads ``nn.EmbeddingBag``: every token of a bag is a position, with its share of the bag's gradient."""

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tokens ``[N, L]`` or ``[1, M]``, the bag of each, and its weight in the bag."""
        names = ("input", "offsets", "per_sample_weights")
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        tokens, offsets, weights = (given.get(name) for name in names)
        assert tokens is not None
        if tokens.dim() == 2:
            bags = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
            count = len(tokens)
        else:
            assert offsets is not None
            starts = offsets[:-1] if self.module.include_last_offset else offsets
            bags = (torch.arange(len(tokens), device=tokens.device)[:, None] >= starts).sum(1) - 1
            count = len(starts)
            tokens, bags = tokens[None], bags[None]
        if weights is None:
            weights = torch.ones(tokens.shape, device=tokens.device, dtype=self.module.weight.dtype)
            if self.module.mode == "mean":
                live = weights if self.module.padding_idx is None else weights * (tokens != self.module.padding_idx)
                sizes = weights.new_zeros(count).index_add_(0, bags.reshape(-1), live.reshape(-1))
                weights = 1 / sizes.clamp(min=1)[bags]
        return [tokens, bags, weights.reshape(tokens.shape)]

    def examples(self, kept: Sequence[Tensor]) -> int:
        return len(kept[0]) if len(kept[0]) > 1 else int(kept[1].max()) + 1

    def read(self, kept: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[str, tuple[Tensor, Tensor]]:
        tokens, bags, weights = kept
        (d,) = grads
        assert d is not None
        return {"": (tokens, d[bags] * weights[..., None].to(d.dtype))}


class EmbeddingBagLayer(EmbeddingLayer):
    """``nn.EmbeddingBag`` that sums or averages."""

    reading = EmbeddingBagReading

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Refuse mode "max", which is not a sum, and whatever embeddings refuse."""
        return (
            isinstance(module, nn.EmbeddingBag)
            and module.mode in ("sum", "mean")
            and not (module.sparse or module.scale_grad_by_freq)
        )


class TransposedEmbedding(Layer):
    """An embedding that shares its weight with an output layer, as a transposed use of that layer.

    The looked-up vector's gradient takes the role of h, the one-hot token that of delta. If there are direct uses too,
    its scale is balanced against theirs, so that the joint factors do not depend on the scale of the loss.
    """

    module: Any
    transposed = True

    def __init__(self, module: nn.Embedding, roles: frozenset[str], columns: int, own_forward: bool = False) -> None:
        super().__init__(module, roles)
        self.seen_through_linear = own_forward  # type: ignore[misc]
        self.shape = BlockShape(1, module.num_embeddings, columns)

    def positions(self, x: Tensor, d: Tensor, n: int) -> tuple[Tensor, Tensor]:
        h = live_gradient(self.module, x, d).reshape(n, -1, 1, d.shape[-1])
        tokens = d.new_zeros(*x.shape, self.shape.out).scatter_(-1, x[..., None], 1.0)
        tokens = live_gradient(self.module, x, tokens)
        tokens = tokens.reshape(n, -1, 1, self.shape.out)
        return F.pad(h, (0, self.shape.columns - h.shape[-1])), tokens

    def free_dims(self, x: Tensor) -> int:
        return x.dim()

    def positions_per_example(self, d: Tensor, n: int) -> int:
        return d.numel() // (n * d.shape[-1])

    def squared_inputs(self, x: Tensor, d: Tensor) -> tuple[Tensor, int]:
        return square_sum(live_gradient(self.module, x, d)), x.numel() * self.shape.columns

    def stack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        raise AssertionError("the layer that owns the weight stacks its gradient")

    def unstack(self, matrix: Tensor) -> dict[str, Tensor]:
        raise AssertionError("the layer that owns the weight unstacks its gradient")


def live_gradient(module: nn.Embedding, tokens: Tensor, d: Tensor) -> Tensor:
    """Return the looked-up vectors' gradient (or other values per position), zeroed at ``padding_idx``."""
    return d if module.padding_idx is None else d * (tokens != module.padding_idx)[..., None].to(d.dtype)


def _per_example_sums(tokens: Tensor, values: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Sum values ``[N, S, D]`` over equal tokens within each example; return the token and sum of each distinct pair.

    There are at most N S pairs; the remaining rows are zero, so no size has to be read from the device.
    """
    n, s = tokens.shape
    pairs = (torch.arange(n, device=tokens.device)[:, None] * vocabulary + tokens).reshape(-1)
    pairs, order = pairs.sort()
    where = torch.cat([pairs.new_zeros(1), (pairs[1:] != pairs[:-1]).long().cumsum(0)])
    sums = values.new_zeros(n * s, values.shape[-1])
    sums.index_add_(0, where, values.reshape(n * s, -1)[order])
    return torch.zeros_like(pairs).scatter_(0, where, pairs % vocabulary), sums
