"""Which block covers each parameter: the map from a model to the pieces that are preconditioned."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ekfac.curvature.layers.base import ElementwiseLayer, Layer, LinearLayer
from ekfac.curvature.layers.convolution import ConvolutionLayer, Convs, TransposedConvolutionLayer, TransposedConvs
from ekfac.curvature.layers.embedding import EmbeddingLayer, TransposedEmbedding
from ekfac.curvature.layers.norms import BatchNormLayer, GroupNormLayer, LayerNormLayer, RMSNormLayer
from ekfac.curvature.layers.shapes import BlockShape

#: Kinds of modules and the class that reads them. A subclass counts when it leaves ``forward`` as it is.
KINDS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    **dict.fromkeys(Convs, ConvolutionLayer),
    **dict.fromkeys(TransposedConvs, TransposedConvolutionLayer),
    nn.Embedding: EmbeddingLayer,
    nn.LayerNorm: LayerNormLayer,
    nn.RMSNorm: RMSNormLayer,
    nn.GroupNorm: GroupNormLayer,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), BatchNormLayer),
}

#: Sides that are wider are kept diagonal where nothing is said: a basis for 50,000 classes would take 10 GB.
MAX_FACTOR_DIM = 4_096
#: Inputs of a convolution at one position from which on its taps are taken as uncorrelated where nothing is said. The
#: factors of VGG11's layers, with up to 4,608, would make its step several times as long.
WIDE = 512


@dataclass(eq=False)
class Block:
    """Parameters that are preconditioned together, and the modules whose calls tell about them.

    Attributes:
        name: The owning module's name, or the parameter's where no layer covers it.
        layer: Reads the owner and lays out the gradient.
        uses: Every module that uses the weight, with the layer that reads its calls; empty without a Kronecker block.
        parameters: The trained parameters by role ("weight", "bias").
        parameter_names: Their names in the model.
        diagonal_A: Whether A is kept as a vector.
        diagonal_B: Whether B is kept as a vector.
        note: What else a reader of the summary should know.
    """

    name: str
    layer: Layer
    uses: dict[nn.Module, Layer]
    parameters: dict[str, nn.Parameter]
    parameter_names: dict[str, str]
    diagonal_A: bool = False
    diagonal_B: bool = False
    note: str = field(default="")

    @property
    def shape(self) -> BlockShape:
        """G, O, I, T, E of the block."""
        return self.layer.shape

    @functools.cached_property
    def key(self) -> nn.Parameter:
        """The parameter under which the block's state is kept: its first."""
        return next(iter(self.parameters.values()))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of factors, bases and scalings: float32 under half-precision parameters."""
        return self.key.dtype if self.key.dtype in (torch.float32, torch.float64) else torch.float32

    @property
    def covered(self) -> bool:
        """Whether a layer's calls feed the block, or it is the plain diagonal method."""
        return bool(self.uses)

    def stack(self, tensors: Iterable[Tensor]) -> Tensor:
        """Tensors in the order of ``parameters`` to ``[G, O, C]`` in the block's dtype."""
        named = zip(self.parameters, tensors, strict=True)
        return self.layer.stack({role: tensor.to(self.dtype) for role, tensor in named})

    def unstack(self, matrix: Tensor) -> list[Tensor]:
        """``[G, O, C]`` to tensors shaped like the parameters, in their order."""
        out = self.layer.unstack(matrix)
        return [out[role] for role in self.parameters]

    def describe(self) -> str:
        """How the block is represented, in a few words."""
        text = self.layer.describe()
        kept = [side for side, diagonal in (("A", self.diagonal_A), ("B", self.diagonal_B)) if diagonal]
        if self.covered and kept:
            text += f", {' and '.join(kept)} diagonal"
        return f"{text} ({self.note})" if self.note else text

    def factor_numbers(self) -> tuple[int, int]:
        """How many numbers A and B have."""
        s = self.shape
        return (
            s.groups * (s.inputs if self.diagonal_A else s.inputs**2),
            s.groups * (s.out if self.diagonal_B else s.out**2),
        )

    def eigen_numbers(self) -> int:
        """How many numbers A, B, their eigenvectors and their eigenvalues have."""
        s = self.shape
        values = (0 if self.diagonal_A else s.inputs) + (0 if self.diagonal_B else s.out)
        return 2 * sum(self.factor_numbers()) + s.groups * values


def layer_class(module: nn.Module) -> type[Layer] | None:
    """The class that reads a module, or None if it cannot be read exactly."""
    for kind, cls in KINDS.items():
        if isinstance(module, kind) and type(module).forward is kind.forward and cls.supports(module):
            return cls
    return None


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a layer's name equals, lies below, or fits one of the patterns."""
    return any(name == p or name.startswith(p + ".") or fnmatchcase(name, p) for p in patterns)


def find_blocks(
    model: nn.Module,
    parameters: Iterable[nn.Parameter] | None = None,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    sua: bool | None = False,
    max_factor_dim: int | None = None,
    identity: bool = False,
    unsupported: str = "diagonal",
    silent: Collection[nn.Parameter] = (),
    frozen: bool = False,
) -> list[Block]:
    """Assign every trained parameter to exactly one block, in the model's order.

    Args:
        model: The model.
        parameters: The parameters that are trained; all with ``requires_grad`` by default.
        include: Names or patterns of layers that get a Kronecker block; all by default.
        exclude: Names or patterns of layers that do not.
        sua: Take a convolution's taps as uncorrelated; None where it reads more than ``WIDE`` numbers at a position.
        max_factor_dim: A side wider than this is kept diagonal.
        identity: Keep every side diagonal (``basis="identity"``).
        unsupported: "diagonal" gives parameters without a layer the diagonal method, "error" refuses them.
        silent: Parameters whose layers are known never to be called; they count as without a layer.
        frozen: Take parameters that are frozen as if they were trained.
    """
    names = {p: name for name, p in model.named_parameters()}
    chosen = set(names) if parameters is None else set(parameters)
    trained = {p for p in names if p in chosen and (p.requires_grad or frozen)}
    modules = dict(model.named_modules(remove_duplicate=True))
    hidden = {c for m in modules.values() if isinstance(m, nn.MultiheadAttention) for c in m.modules()}
    _check_patterns(modules, include, exclude)

    users: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, module in modules.items():
        if module in hidden or layer_class(module) is None:
            continue
        if (include is not None and not matches(name, include)) or matches(name, exclude):
            continue
        for role in ("weight", "bias"):
            parameter = module._parameters.get(role)
            if parameter is not None and parameter in trained and parameter not in silent:
                users.setdefault(parameter, []).append((name, module))

    blocks: list[Block] = []
    taken: set[nn.Parameter] = set()
    for parameter, sharing in users.items():
        if parameter in taken:
            continue
        block = _layer_block(parameter, sharing, users, trained, names, sua)
        if block is None:
            continue
        limit = max_factor_dim if max_factor_dim is not None else float("inf")
        block.diagonal_A = identity or block.layer.diagonal_inputs or block.shape.inputs > limit
        block.diagonal_B = identity or block.shape.out > limit
        blocks.append(block)
        taken.update(block.parameters.values())
    rest = [p for p in names if p in trained and p not in taken]
    if rest and unsupported == "error":
        raise ValueError(
            f"unsupported='error', and no layer that can be preconditioned covers: "
            f"{', '.join(names[p] for p in rest)}. Allowed: unsupported='diagonal', or freeze them"
        )
    blocks += [Block(names[p], ElementwiseLayer(p), {}, {"parameter": p}, {"parameter": names[p]}) for p in rest]
    order = {p: i for i, p in enumerate(names)}
    return sorted(blocks, key=lambda b: order[b.key])


def _check_patterns(modules: dict[str, nn.Module], include: Sequence[str] | None, exclude: Sequence[str]) -> None:
    for argument, patterns in (("include", include or ()), ("exclude", exclude)):
        for pattern in patterns:
            if not any(matches(name, [pattern]) for name in modules):
                layers = ", ".join(n for n, m in modules.items() if n and layer_class(m)) or "none"
                raise ValueError(f"{argument}={pattern!r} names no module of the model. Layers: {layers}")


def _layer_block(
    parameter: nn.Parameter,
    sharing: list[tuple[str, nn.Module]],
    users: dict[nn.Parameter, list[tuple[str, nn.Module]]],
    trained: set[nn.Parameter],
    names: dict[nn.Parameter, str],
    sua: bool | None,
) -> Block | None:
    """The block of a parameter that one module, or several that are tied, use; None where they do not fit."""
    # An embedding tied to an output layer is read as a transposed use of that layer.
    owners = [(n, m) for n, m in sharing if not isinstance(m, nn.Embedding)] or sharing
    name, owner = owners[0]
    roles = {}
    for role in ("weight", "bias"):
        p = owner._parameters.get(role)
        # A bias that the other modules do not share cannot be a column of the joint block.
        if p is not None and p in users and (p is parameter or users[p] == owners):
            roles[role] = p
    if parameter not in roles.values():
        return None
    cls = layer_class(owner)
    assert cls is not None
    layer = cls(owner, frozenset(roles), sua=bool(sua))
    if sua is None and isinstance(owner, (*Convs, *TransposedConvs)):
        sua = math.prod(owner.kernel_size) > 1 and layer.shape.inputs > WIDE
        layer = cls(owner, frozenset(roles), sua=sua)
    uses: dict[nn.Module, Layer] = {owner: layer}
    for _, module in sharing:
        if module is owner:
            continue
        if isinstance(module, nn.Embedding) and not isinstance(owner, nn.Embedding):
            if not isinstance(owner, nn.Linear):
                return None
            uses[module] = TransposedEmbedding(module, frozenset({"weight"}), layer.shape.columns)
        elif layer_class(module) is cls:
            other = cls(module, frozenset(roles), sua=bool(sua))
            if other.shape != layer.shape:
                return None
            uses[module] = other
        else:
            return None
    others = ", ".join(n for n, m in sharing if m is not owner)
    note = f"shared with {others}" if others else ""
    return Block(name, layer, uses, roles, {role: names[p] for role, p in roles.items()}, note=note)
