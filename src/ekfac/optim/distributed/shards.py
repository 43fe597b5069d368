"""Sharded parameters (FSDP2, HSDP, tensor parallel): gathered at their owners during a step.

    .grad, theta: shards -> owner        direction, update: by the owner        theta: owner -> shards

Each direction is one all-to-all, in which each of W ranks sends or receives about a W-th of all numbers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ekfac.curvature.real import as_real
from ekfac.optim.distributed.owners import Owners

if TYPE_CHECKING:
    from ekfac.optim.types import StepInputs

#: A shard's offset in the full tensor, and its shape.
Region = tuple[tuple[int, ...], tuple[int, ...]]


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing that class, which is slow."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor; a plain tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "device_mesh") else tensor  # type: ignore[attr-defined]


def held(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor (or the whole plain tensor), as real numbers."""
    return as_real(local(tensor))


def units(model: nn.Module) -> list[Any]:
    """Return the modules that ``fully_shard`` was applied to, which gather their parameters when they run."""
    return [m for m in model.modules() if hasattr(m, "reshard") and hasattr(m, "unshard")]


def reshard(model: nn.Module) -> list[Any]:
    """Restore the sharded parameters, as the optimizer knows them; return the units that had gathered theirs."""
    gathered = [unit for unit in dict.fromkeys([*units(model), *_units_around()]) if not _holds_pieces(unit)]
    for unit in gathered:
        unit.state_dict()  # reshards; within a forward, reshard() would do nothing
    return gathered


@contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """Reshard the model while shards may change; gather again at the end what was gathered before."""
    gathered = reshard(model)
    try:
        yield
    finally:
        for unit in gathered:
            unit.unshard()


def _units_around() -> Iterator[Any]:
    """Find units among the modules being called now: the model may be part of an outer module's unit."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and hasattr(frame.f_locals.get("self"), "reshard"):
            yield frame.f_locals["self"]
        frame = frame.f_back


def _holds_pieces(unit: Any) -> bool:
    """Return whether a unit holds only shards: it has not gathered its parameters, nor started to."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    if any(getattr(group, "_all_gather_result", None) is not None for group in groups):
        unit.unshard()  # wait until gathering has finished
    return all(is_sharded(p) for p in _own(unit)) and all(getattr(group, "is_sharded", True) for group in groups)


def _own(unit: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters of a unit, without those of nested units."""
    yield from unit.parameters(recurse=False)
    for child in unit.children():
        if not hasattr(child, "reshard"):
            yield from _own(child)


class Shards:
    """Knows which rank holds which shard of every sharded parameter.

    Args:
        owners: The owners of blocks.
    """

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._processes = owners.processes
        #: The shard of every rank, by parameter.
        self._regions: dict[nn.Parameter, list[Region]] = {}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._regions

    def __bool__(self) -> bool:
        return bool(self._regions)

    def learn(self, parameters: Mapping[nn.Parameter, str]) -> None:
        """Exchange which rank holds which shard; all processes must call this.

        Args:
            parameters: The parameters with their names.
        """
        sharded = {p: name for p, name in parameters.items() if is_sharded(p)}
        for p, name in sharded.items():
            self._check(p, name)
        everyone = self._processes.gather([_region(p) for p in sharded]) if sharded else []
        self._regions = {p: [theirs[index] for theirs in everyone] for index, p in enumerate(sharded)}
        for p, regions in self._regions.items():
            if sum(math.prod(shape) for _, shape in set(regions)) != p.numel():
                raise ValueError(
                    f"parameter '{sharded[p]}': its shards {sorted(set(regions))} (offset, shape) do not make up its "
                    f"shape {tuple(p.shape)}. Allowed: shards that split it along its dimensions, and replicas of them"
                )

    def _check(self, p: Any, name: str) -> None:
        if p.device.type != p.device_mesh.device_type:
            raise ValueError(
                f"parameter '{name}' is stored on {p.device.type} and used on {p.device_mesh.device_type}, as with "
                "CPUOffloadPolicy. Allowed: fully_shard without offload_policy"
            )
        if p.is_complex():
            raise ValueError(
                f"parameter '{name}' is complex ({p.dtype}) and sharded over ranks. Allowed: keep it whole on every "
                "rank, fully_shard(..., ignored_params={p}), or hold its real and imaginary parts as real parameters"
            )
        ranks = sorted(p.device_mesh.mesh.flatten().tolist())
        group = self._processes.ranks
        if not set(ranks) <= set(group):
            raise ValueError(
                f"process_group: parameter '{name}' is sharded over ranks {ranks}, statistics are shared by ranks "
                f"{group}. Allowed: a group of all ranks with shards or replicas of the model, such as "
                "mesh.get_group() of a one-dimensional mesh"
            )

    def largest(self, inputs: StepInputs, device: torch.device) -> list[float]:
        """Return the largest magnitude in this process's shard of each gradient, now and at the end of backward."""
        none = torch.zeros((), dtype=torch.float64, device=device)
        found = [of.get(p, none).to(none) for p in self._regions for of in (inputs.sizes, inputs.left)]
        return torch.stack(found).tolist() if found else []

    def make_whole(self, inputs: StepInputs, largest: list[float], touched: list[nn.Parameter], weights: bool) -> None:
        """Gather full gradients at their owners, and complete the inputs on all ranks.

        Args:
            inputs: A step's inputs.
            largest: The maximum over ranks of :meth:`largest`.
            touched: Parameters whose gradients some rank has changed after backward.
            weights: Whether to gather the parameters at their owners too.
        """
        for p, size, left in zip(self._regions, largest[::2], largest[1::2], strict=True):
            if p in inputs.gradients:
                inputs.sizes[p], inputs.left[p] = torch.tensor([size, left], dtype=torch.float64, device=p.device)
        inputs.touched = [p for p in touched if p in inputs.gradients]
        mine = {p: g for p, g in inputs.gradients.items() if p in self._regions}
        inputs.gradients.update(self.gather({p: placed(g, p) for p, g in mine.items()}))
        if weights:
            inputs.weights |= self.gather({p: local(p).detach() for p in mine})

    def gather(self, pieces: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Gather shards from all ranks into full tensors, for the parameters that this rank owns."""
        rank, size = self._processes.rank, self._processes.size
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        incoming: list[list[Tensor]] = [[] for _ in range(size)]
        whole = {}
        for p, piece in pieces.items():
            owner, regions = self._owners.of_parameter(p), self._regions[p]
            # Of replicated shards, only the first rank's is sent.
            first = {region: r for r, region in reversed(list(enumerate(regions)))}
            if first[regions[rank]] == rank:
                outgoing[owner].append(piece)
            if owner == rank:
                whole[p] = torch.empty(p.shape, dtype=piece.dtype, device=piece.device)
                for region, r in first.items():
                    incoming[r].append(_cut(whole[p], region))
        if pieces:
            self._processes.exchange(outgoing, incoming, next(iter(pieces.values())).device)
        return whole

    def scatter(
        self, whole: Mapping[nn.Parameter, Tensor], pieces: Mapping[nn.Parameter, Tensor], flag: Tensor
    ) -> list[Tensor]:
        """Copy owners' full tensors to the shards of all ranks; return every rank's flag."""
        rank, size = self._processes.rank, self._processes.size
        outgoing: list[list[Tensor]] = [[] for _ in range(size)]
        incoming: list[list[Tensor]] = [[] for _ in range(size)]
        for p, piece in pieces.items():
            owner = self._owners.of_parameter(p)
            incoming[owner].append(piece)
            if owner == rank:
                for r, region in enumerate(self._regions[p]):
                    outgoing[r].append(_cut(whole[p], region).to(piece.dtype))
        flags = [torch.empty_like(flag) for _ in range(size)]
        for of_rank, theirs in zip((*outgoing, *incoming), (*[flag] * size, *flags), strict=True):
            of_rank.append(theirs)
        self._processes.exchange(outgoing, incoming, flag.device)
        return flags


def _cut(whole: Tensor, region: Region) -> Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(*region, strict=True))]


def _region(p: Any) -> Region:
    """Return the offset and shape of this process's shard of a parameter."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return tuple(map(int, offset)), tuple(map(int, shape))


def placed(gradient: Any, parameter: Any) -> Tensor:
    """Return the shard of a gradient that matches its parameter's shard, reducing over ranks if necessary."""
    if is_sharded(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def whole_of(piece: Tensor, parameter: Any) -> Tensor:
    """Gather a tensor that is sharded like a parameter; all ranks that hold shards of it must call this."""
    if not is_sharded(parameter):
        return piece
    whole: Any = torch.empty_like(parameter, dtype=piece.dtype)
    local(whole).copy_(piece)
    found: Tensor = whole.full_tensor()
    return found


def piece_of(whole: Tensor, parameter: Any) -> Tensor:
    """Return this process's shard of a full tensor, sharded like a parameter."""
    return _cut(whole, _region(parameter)) if is_sharded(parameter) else whole


def any_sharded(parameters: Iterable[Tensor]) -> bool:
    """Return whether any of these parameters is sharded."""
    return any(map(is_sharded, parameters))
