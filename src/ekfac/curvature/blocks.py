"""Partitions a model's parameters into blocks, which are preconditioned independently."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ekfac.curvature.layers.base import ElementwiseLayer, Layer
from ekfac.curvature.layers.convolution import Convs, TransposedConvs
from ekfac.curvature.layers.embedding import OwnForwardEmbeddingLayer, TransposedEmbedding
from ekfac.curvature.layers.kinds import KINDS, layer_class
from ekfac.curvature.layers.shapes import BlockShape
from ekfac.curvature.real import state_dtype

#: Wider sides are kept diagonal by default: a basis for 50,000 classes would take 10 GB.
MAX_FACTOR_DIM = 4_096
#: Convolutions that read more inputs per position than this use SUA by default. The full factors of VGG11's layers,
#: up to 4,608 wide, would make its step several times as long.
WIDE = 512


#: Which of the parameters that a weight is computed from has its shape, by the parametrization.
NORMED: dict[type[nn.Module], str] = {
    parametrizations._WeightNorm: "original1",
    parametrizations._SpectralNorm: "original",
}
#: Why a complex parameter has no layer.
COMPLEX = "complex, no basis"


@dataclass(eq=False)
class Block:
    """Parameters that are preconditioned together, and the modules whose calls provide their statistics.

    Attributes:
        name: The owning module's name, or the parameter's if no layer covers it.
        layer: Reads the owner's calls and lays out the gradient.
        uses: Every module that uses the weight, with the layer that reads its calls; empty without a Kronecker block.
        parameters: The trained parameters by role ("weight", "bias").
        parameter_names: Their names in the model.
        diagonal_A: Whether A is kept as a vector.
        diagonal_B: Whether B is kept as a vector.
        note: A remark for the summary.
        why: Why no layer covers the parameter; empty if one does, or if the user excluded it.
        through: Whether the weight is computed from a trained parameter of its shape, as by weight norm: the basis is
            that of the layer's calls, the gradient that of the parameter.
    """

    name: str
    layer: Layer
    uses: dict[nn.Module, Layer]
    parameters: dict[str, nn.Parameter]
    parameter_names: dict[str, str]
    diagonal_A: bool = False
    diagonal_B: bool = False
    note: str = field(default="")
    why: str = field(default="")
    through: bool = False

    @functools.cached_property
    def shape(self) -> BlockShape:
        """G, O, I, T, E of the block."""
        return self.layer.shape

    @functools.cached_property
    def key(self) -> nn.Parameter:
        """The block's first parameter, under which its state is stored."""
        return next(iter(self.parameters.values()))

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of factors, bases and scalings: float32 under half-precision parameters."""
        return state_dtype(self.key)

    @functools.cached_property
    def covered(self) -> bool:
        """Whether a layer covers the block; otherwise it gets the diagonal method."""
        return bool(self.uses)

    @functools.cached_property
    def multiplications(self) -> int:
        """The multiplications in a product of the gradient with a basis on its longer side; 0 without a basis."""
        s = self.shape
        return s.numel * max(s.out, s.inputs) if self.covered else 0

    @property
    def form(self) -> Hashable:
        """Everything that blocks must have in common to be stacked."""
        return self.covered, self.shape, self.diagonal_A, self.diagonal_B, self.dtype, self.key.device

    def stack(self, tensors: Iterable[Tensor]) -> Tensor:
        """Bring tensors in the order of ``parameters`` into the form ``[G, O, C]``, in the block's dtype."""
        named = zip(self.parameters, tensors, strict=True)
        return self.layer.stack({role: tensor.to(self.dtype) for role, tensor in named})

    def unstack(self, matrix: Tensor) -> list[Tensor]:
        """Turn ``[G, O, C]`` into tensors shaped like the parameters, in their order."""
        out = self.layer.unstack(matrix)
        return [out[role] for role in self.parameters]

    def describe(self) -> str:
        """Describe in a few words how the block is represented."""
        text = self.layer.describe()
        kept = [side for side, diagonal in (("A", self.diagonal_A), ("B", self.diagonal_B)) if diagonal]
        if self.covered and kept:
            text += f", {' and '.join(kept)} diagonal"
        return f"{text} ({self.note})" if self.note else text

    def factor_numbers(self) -> tuple[int, int]:
        """Return the numbers of entries of A and B."""
        s = self.shape
        return (
            s.groups * (s.inputs if self.diagonal_A else s.inputs**2),
            s.groups * (s.out if self.diagonal_B else s.out**2),
        )

    def eigen_numbers(self) -> int:
        """Return the number of entries of A, B, their eigenvectors and their eigenvalues together."""
        s = self.shape
        values = (0 if self.diagonal_A else s.inputs) + (0 if self.diagonal_B else s.out)
        return 2 * sum(self.factor_numbers()) + s.groups * values


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a layer's name equals, lies below, or matches one of the patterns."""
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
    through: bool = False,
) -> list[Block]:
    """Assign every trained parameter to exactly one block, in the model's order.

    Args:
        model: The model.
        parameters: The parameters that are trained; all with ``requires_grad`` by default.
        include: Names or patterns of layers that get a Kronecker block; all by default.
        exclude: Names or patterns of layers that do not.
        sua: Treat a convolution's taps as uncorrelated; None does so for more than ``WIDE`` inputs per position.
        max_factor_dim: A side wider than this is kept diagonal.
        identity: Keep every side diagonal (``basis="identity"``).
        unsupported: "diagonal" gives parameters without a layer the diagonal method, "error" refuses them.
        silent: Parameters whose layers are known never to be called; treated as if no layer covered them.
        frozen: Treat frozen parameters as trained.
        through: Cover weights under weight or spectral norm too: for rules that take only a basis from the calls.
    """
    names = {p: name for name, p in model.named_parameters()}
    chosen = set(names) if parameters is None else set(parameters)
    # An empty parameter has nothing to train, and its layer has no factors.
    trained = {p for p in names if p in chosen and (p.requires_grad or frozen) and p.numel()}
    modules = dict(model.named_modules())
    beside = _beside(modules, names)
    _check_patterns(modules | beside, include, exclude)

    wanted = trained.difference(silent)
    users = _users(modules, wanted, include, exclude, through)
    users |= _users(beside, wanted - users.keys(), include, exclude, through)

    blocks: list[Block] = []
    taken: set[nn.Parameter] = set()
    for parameter, sharing in users.items():
        if parameter in taken:
            continue
        block = _layer_block(parameter, sharing, users, names, sua)
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
    owners = {p: (name, m) for name, m in reversed(modules.items()) for p in m._parameters.values() if p is not None}
    for p in rest:
        name, owner = owners[p]
        asked = matches(name, exclude) or (include is not None and not matches(name, include))
        why = "" if asked else "its layer is never called" if p in silent else _why(owner, p, p in users)
        blocks.append(Block(names[p], ElementwiseLayer(p), {}, {"parameter": p}, {"parameter": names[p]}, why=why))
    order = {p: i for i, p in enumerate(names)}
    return sorted(blocks, key=lambda b: order[b.key])


def _beside(modules: dict[str, nn.Module], parameters: Container[Any]) -> dict[str, nn.Module]:
    """Return modules that are plain attributes of others and hold the model's parameters, as in torchrl's losses."""
    inside, found = set(modules.values()), {}
    for name, module in modules.items():
        roots = {key: m for key, m in vars(module).items() if isinstance(m, nn.Module) and m not in inside}
        for key, root in roots.items():
            for below, child in root.named_modules(prefix=f"{name}.{key}".strip(".")):
                if child not in inside and any(p in parameters for p in child._parameters.values()):
                    inside.add(child)
                    found[below] = child
    return found


def _users(
    modules: dict[str, nn.Module],
    wanted: Collection[nn.Parameter],
    include: Sequence[str] | None,
    exclude: Sequence[str],
    through: bool,
) -> dict[nn.Parameter, list[Use]]:
    """Return the modules of known kinds that use each of the wanted parameters."""
    inner = {c for m in modules.values() if isinstance(m, nn.MultiheadAttention) for c in m.modules() if c is not m}
    users: dict[nn.Parameter, list[Use]] = {}
    for name, module in modules.items():
        cls = None if module in inner or _has_no_factors(module) else layer_class(module)
        for part, roles in ({} if cls is None else cls.parts(module)).items():
            use = Use(f"{name}.{part}".strip("."), module, part, under_norm(module) if through else None)
            if (include is not None and not matches(use.name, include)) or matches(use.name, exclude):
                continue
            for parameter in use.parameters(roles).values():
                if parameter in wanted:
                    users.setdefault(parameter, []).append(use)
    return users


def _why(module: nn.Module, parameter: Tensor, tied: bool) -> str:
    """Return why no layer covers a parameter of a module."""
    kind = type(module).__name__
    if parameter.is_complex():
        return COMPLEX
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return "a parametrization computes the layer's weight from it"
    if isinstance(module, torch.jit.ScriptModule):
        return "its layer is scripted, so its inputs cannot be captured"
    if not {"weight_g", "weight_orig"}.isdisjoint(module._parameters):
        return "a hook computes the layer's weight from it"
    if tied:
        return "layers of several kinds share it"
    known = [k for k in KINDS if isinstance(module, k)]
    if known and type(module).forward is not known[0].forward:
        return f"{kind} overrides forward"
    return f"{kind} has {KINDS[known[0]].unsupported_form}" if known else f"{kind} is not a known kind of layer"


def _has_no_factors(module: nn.Module) -> bool:
    """Return whether a module has an empty or a complex parameter."""
    return any(p is not None and (p.numel() == 0 or p.is_complex()) for p in module._parameters.values())


def _check_patterns(modules: dict[str, nn.Module], include: Sequence[str] | None, exclude: Sequence[str]) -> None:
    for argument, patterns in (("include", include or ()), ("exclude", exclude)):
        for pattern in patterns:
            parts = (f"{n}.{part}" for n, m in modules.items() if (cls := layer_class(m)) for part in cls.parts(m))
            if not any(matches(name, [pattern]) for name in itertools.chain(modules, parts)):
                layers = ", ".join(n for n, m in modules.items() if n and layer_class(m)) or "none"
                raise ValueError(f"{argument}={pattern!r} matches no module of the model. Layers: {layers}")


def under_norm(module: nn.Module) -> nn.Parameter | None:
    """Return the parameter of the weight's shape that weight or spectral norm computes a linear layer's weight from."""
    cls = layer_class(module) if nn.utils.parametrize.is_parametrized(module, "weight") else None
    if cls is None or not cls.linear:
        return None
    made: Any = module.parametrizations
    steps = made["weight"]
    kinds = [kind for kind in NORMED if len(steps) == 1 and isinstance(steps[0], kind)]
    found = steps._parameters[NORMED[kinds[0]]] if kinds else None
    return None if found is None or found.is_complex() else found


@dataclass(frozen=True)
class Use:
    """A part of a module that a block may cover, with the name that the block would have.

    Attributes:
        name: The name.
        module: The module.
        part: The part.
        normed: The parameter that the weight is computed from, if the block may cover that.
    """

    name: str
    module: nn.Module
    part: str
    normed: nn.Parameter | None = None

    def parameters(self, roles: Iterable[str]) -> dict[str, nn.Parameter]:
        """Return those parameters that the module itself holds, which excludes most parametrized ones."""
        found = {}
        for role in roles:
            owner, _, name = role.rpartition(".")
            parameter = self.module.get_submodule(owner)._parameters.get(name)
            if parameter is None and role == "weight":
                parameter = self.normed
            if parameter is not None:
                found[role] = parameter
        return found


def _layer_block(
    parameter: nn.Parameter,
    sharing: list[Use],
    users: dict[nn.Parameter, list[Use]],
    names: dict[nn.Parameter, str],
    sua: bool | None,
) -> Block | None:
    """Return the block of a parameter used by one module or several tied ones; None if these are incompatible."""
    # An embedding tied to an output layer is treated as a transposed use of that layer.
    owners = [use for use in sharing if not isinstance(use.module, nn.Embedding)] or sharing
    name, owner, part = owners[0].name, owners[0].module, owners[0].part
    cls = layer_class(owner)
    assert cls is not None
    roles = {}
    for role, p in owners[0].parameters(cls.parts(owner)[part]).items():
        # A bias can only be a column of the block if all modules share it too.
        if p in users and (p is parameter or users[p] == owners):
            roles[role] = p
    layer = cls.of_part(owner, part, frozenset(roles), sua=bool(sua))
    if sua is None and isinstance(owner, (*Convs, *TransposedConvs)):
        sua = math.prod(owner.kernel_size) > 1 and layer.shape.inputs > WIDE
        layer = cls.of_part(owner, part, frozenset(roles), sua=sua)
    uses: dict[nn.Module, Layer] = {owner: layer}
    for use in sharing:
        module = use.module
        if module is owner:
            if use.part != part:
                return None
            continue
        if isinstance(module, nn.Embedding) and not isinstance(owner, nn.Embedding):
            if not isinstance(owner, nn.Linear):
                return None
            uses[module] = TransposedEmbedding(
                module, frozenset({"weight"}), layer.shape.columns, layer_class(module) is OwnForwardEmbeddingLayer
            )
        elif layer_class(module) is cls:
            other = cls.of_part(module, use.part, frozenset(roles), sua=bool(sua))
            if other.shape != layer.shape:
                return None
            uses[module] = other
        else:
            return None
    others = ", ".join(use.name for use in sharing if use.module is not owner)
    note = f"shared with {others}" if others else ""
    normed = owners[0].normed
    through = normed is not None and normed is roles.get("weight")
    note = "the weight is computed from it" if through else note
    return Block(name, layer, uses, roles, {role: names[p] for role, p in roles.items()}, note=note, through=through)
