"""Assigns trained parameters to blocks, and holds their state."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ekfac import checks
from ekfac.curvature.blocks import Block, find_blocks
from ekfac.curvature.real import state_dtype
from ekfac.optim.distributed.owners import Owners
from ekfac.optim.distributed.shards import any_sharded, is_sharded, resharded, units
from ekfac.optim.options import Coverage
from ekfac.optim.statistics.model_changes import ModelChanges
from ekfac.optim.types import BlockState

#: A dict's values.
VALUES = operator.methodcaller("values")
#: The least number of factor entries in a part of a network, whose bases are refreshed together.
PART = 2**21

T = TypeVar("T")
Identity = tuple[bool, tuple[nn.Parameter, ...]]
#: State in float64, whatever the dtype of the block.
COUNTS = ("count", "examples")


@dataclass(frozen=True)
class Assigned:
    """What an assignment of parameters to blocks has changed.

    Attributes:
        new: Covered blocks seen for the first time.
        recast: Whether the model was cast or moved.
        moved: Whether it was moved to another kind of device.
    """

    new: set[Block]
    recast: bool
    moved: bool


class Partition:
    """Assigns parameters to blocks, and holds the state of each.

    Args:
        model: The model.
        coverage: Which layers are covered.
        state: torch's ``optimizer.state``: each block's state is under its first parameter.
        state_class: The class of a block's state.
        owners: Which process owns each block.
        through: Whether weights under weight or spectral norm are covered; see :func:`find_blocks`.
    """

    def __init__(
        self,
        model: nn.Module,
        coverage: Coverage,
        state: MutableMapping[Tensor, Any],
        state_class: Callable[[Block], type[BlockState]],
        owners: Owners,
        through: bool = False,
    ) -> None:
        self.model = model
        self.states = state
        self._coverage, self._through = coverage, through
        self._state_class = state_class
        self.owners = owners
        #: Blocks owned by other processes that have factors, and those that have a basis.
        self.factors_elsewhere: set[Identity] = set()
        self.ready_elsewhere: set[Identity] = set()
        #: Incremented whenever tensors that a CUDA graph may refer to are replaced.
        self.generation = 0
        #: The parameters that the optimizer was given, and those of them that are trained now (not frozen).
        self.offered: list[nn.Parameter] = []
        self.parameters: list[nn.Parameter] = []
        #: The trained parameters that are complex.
        self.complex: list[nn.Parameter] = []
        #: All parameters of the model, trained ones first.
        self.everything: list[nn.Parameter] = []
        #: The names of all parameters of the model.
        self.names: dict[nn.Parameter, str] = {}
        #: The module that holds each parameter, and its name there.
        self.places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
        #: Whether parameters are sharded over ranks, and whether they are gathered for use (fully_shard).
        self.sharded = self.gathers = False
        self.blocks: list[Block] = []
        #: The covered blocks, each with the index of its part, and the number of parts; see :func:`in_parts`.
        self.covered: dict[Block, int] = {}
        self.parts = 1
        #: Parameters whose layers are never called.
        self.silent: set[nn.Parameter] = set()
        #: All blocks that ever existed, and the state of those that are frozen now.
        self._known: dict[Identity, Block] = {}
        self.put_away: dict[Identity, BlockState] = {}
        #: Unsharded parameters, and where they are.
        self._whole: list[tuple[nn.Parameter, nn.Module, str]] = []
        self._snapshot = Snapshot([], [])
        self._modules: list[nn.Module] = []
        #: The kind of device that the parameters were on when they were assigned.
        self.kind = ""
        #: If not empty, why no step can be taken: how the model's parameters have changed since construction.
        self.problem = ""
        self._changes = ModelChanges(model)

    @property
    def device(self) -> torch.device:
        """The device of the trained parameters."""
        return (self.parameters or self.offered)[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the state; that of the first parameter's if there are several."""
        return state_dtype((self.parameters or self.offered)[0])

    # --- blocks ---------------------------------------------------------------------------------------------------

    def blocks_of(
        self,
        parameters: Iterable[nn.Parameter],
        frozen: bool = False,
        silent: Collection[nn.Parameter] | None = None,
    ) -> list[Block]:
        """Return the blocks that these parameters would be assigned to.

        Args:
            parameters: The parameters.
            frozen: Treat frozen parameters as trained.
            silent: Treat these as parameters whose layers are never called.
        """
        if silent is None:
            silent = () if frozen else self.silent
        return blocks_under(self._coverage, self.model, parameters, silent, frozen, self._through)

    def block_with(self, key: Identity) -> Block | None:
        """Return the block that these parameters form, or would form if none were frozen."""
        covered, parameters = key
        blocks = self.blocks_of(parameters, frozen=True, silent=() if covered else parameters)
        return {identity(block): block for block in blocks}.get(key)

    def offered_names(self) -> dict[nn.Parameter, str]:
        """Return the names of the given parameters; for those the model has lost, numbers that agree over ranks."""
        return {p: self.names.get(p, f"(lost, number {i})") for i, p in enumerate(self.offered)}

    def assign(self, parameters: Iterable[nn.Parameter]) -> Assigned:
        """Assign the trained parameters to blocks. Blocks that persist or reappear keep their state."""
        offered = list(parameters)
        self.sharded = any_sharded(offered)
        self.gathers = self.sharded and bool(units(self.model))
        with resharded(self.model) if self.gathers else nullcontext():
            return self._assign(offered)

    def _assign(self, offered: list[nn.Parameter]) -> Assigned:
        self.problem = self._changes.compare(offered)
        before = {identity(b): (b.dtype, b.shape) for b in self.blocks}, self.kind
        blocks, new = [], set()
        for block in self.blocks_of(offered):
            known = self._known.get(identity(block))
            # A module may have been replaced, or a parameter may have another shape.
            if known is None or known.uses.keys() != block.uses.keys() or known.shape != block.shape:
                self._known[identity(block)] = known = block
                new |= {block} if block.covered else set()
            blocks.append(known)
        kept = set(map(identity, blocks))
        for block in self.blocks:
            if identity(block) not in kept:
                self.put_away[identity(block)] = self._pop(block)
        for block in blocks:
            block.__dict__.pop("dtype", None)  # the model may have been cast since
            if identity(block) in self.put_away:
                self.state(block).update(self.put_away.pop(identity(block)))
            elif not fits(block, self.states.get(block.key, {})):
                self._pop(block)
            elif self.states.get(block.key):
                self.state(block)
        self.offered = offered
        self.parameters = [p for p in offered if p.requires_grad and p.numel()]  # an empty one has nothing to train
        self.complex = [p for p in self.parameters if p.is_complex()]
        self.names = {p: name for name, p in self.model.named_parameters()}
        held = [(p, m, name) for m in self.model.modules() for name, p in m._parameters.items() if p is not None]
        self.places = {p: (m, name) for p, m, name in reversed(held)}
        chosen = set(offered)
        scripted = torch.jit.ScriptModule  # its parameters cannot be replaced
        self._whole = [x for x in held if x[0] in chosen and not (is_sharded(x[0]) or isinstance(x[1], scripted))]
        self.everything = list(dict.fromkeys([*self.parameters, *self.names]))
        self.blocks = blocks
        self.generation += 1
        self.covered, self.parts = in_parts([b for b in blocks if b.covered])
        # With fully_shard, modules hold gathered parameters during use, so their identities cannot be compared.
        modules = () if self.gathers else self.model.modules()
        self._modules = [m for m in modules if not isinstance(m, scripted)]
        self._snapshot = Snapshot(offered, self._modules)
        self.kind = self.device.type
        self.assign_owners()
        forms, kind = before
        # A layer found never to be called gets another kind of block, but that is no cast.
        changed = any(forms.get(identity(b), (b.dtype, b.shape)) != (b.dtype, b.shape) for b in blocks)
        recast = changed or kind not in ("", self.kind)
        if recast:
            self._convert()
        return Assigned(new, recast, kind not in ("", self.kind))

    def give_up_on(self, silent: list[Block]) -> None:
        """Switch layers with gradients that were never called to the diagonal method, with a warning."""
        warnings.warn(
            "these layers have gradients although layer(x) was never called, so they get the diagonal method: "
            + checks.listed([b.name for b in silent]),
            RuntimeWarning,
            stacklevel=3,
        )
        self.silent.update(p for b in silent for p in b.parameters.values())

    def assign_owners(self) -> None:
        """Assign every parameter an owner among the processes that train together."""
        size = self.owners.processes.size
        if size != self.owners.size > 1:
            raise RuntimeError(
                f"the process group had {self.owners.size} ranks, which share this optimizer's state, and now has "
                f"{size}: save state_dict() on all ranks before such a change, and load it into a new optimizer"
            )
        if size > 1:
            self.owners.assign(self.blocks_of(self.offered, frozen=True))

    def is_frozen(self) -> bool:
        """Return whether all parameters are frozen."""
        return not any(p.requires_grad for p in self.offered)

    def is_replaced(self) -> bool:
        """Return whether ``fully_shard`` or tensor parallelism has replaced parameters by sharded ones."""
        if not dist.is_available() or not dist.is_initialized():
            return False
        return any(m._parameters.get(name) is not p for p, m, name in self._whole)

    def replace(self) -> dict[nn.Parameter, nn.Parameter]:
        """Find the replacement of every given parameter, and reset.

        Returns:
            The new parameter for every old one.
        """
        with resharded(self.model):
            now = dict(self.model.named_parameters())
        names = {p: self.names[p] for p in self.offered}
        if any(map(len, self.states.values())) or self.put_away:
            name = next(name for p, name in names.items() if now.get(name) is not p)
            raise RuntimeError(
                f"parameter '{name}' was replaced after steps were taken (by fully_shard or tensor parallel?). Shard "
                "the model before the first step; or save state_dict() first and load it into a new optimizer"
            )
        if missing := [name for name in names.values() if name not in now]:
            raise RuntimeError(f"parameter '{missing[0]}' is no longer part of the model: construct a new optimizer")
        self.owners.forget()
        self.states.clear()
        self.blocks, self._known, self.silent, self._changes = [], {}, set(), ModelChanges(self.model)
        return {p: now[name] for p, name in names.items()}

    def is_exchanged(self) -> bool:
        """Return whether parameters are temporarily replaced by other tensors, as within functional_call."""
        held = (p for m in self._modules for p in m._parameters.values() if p is not None)
        return not all(isinstance(p, nn.Parameter) for p in held)

    def is_current(self) -> bool:
        """Return whether parameters have the same modules, dtypes, devices and requires_grad as when assigned."""
        return self._snapshot.unchanged()

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self, block: Block) -> Any:
        """Return a block's state; create it if there is none."""
        found = self.states.get(block.key)
        if not isinstance(found, BlockState):  # a plain dict from a checkpoint, or momentum alone
            found = self.states[block.key] = self._state_class(block)(found)
        return found

    def _convert(self) -> None:
        """Convert state to the dtype and device of its block, after the model was cast or moved."""
        dtypes: dict[Tensor, torch.dtype] = {p: b.dtype for b in self.blocks for p in b.parameters.values()}
        for p, state in self.states.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    exact = name in COUNTS or p not in dtypes or not value.is_floating_point()
                    state[name] = value.to(p.device, value.dtype if exact else dtypes[p])

    def take_states(self, states: MutableMapping[Tensor, Any]) -> None:
        """Use another mapping for state from now on; its entries may be plain dicts.

        State that was put away for a frozen block is restored if the block is trained now.
        """
        self.states = states
        for block in self.blocks:
            if identity(block) in self.put_away:
                self.state(block).update(self.put_away.pop(identity(block)))
            elif block.key in states:
                self.state(block)

    def note_elsewhere(self, block: Identity, factors: bool = False, ready: bool = False) -> None:
        """Record that another process, the owner of a block, has its factors or its basis."""
        if factors:
            self.factors_elsewhere.add(block)
        if ready:
            self.ready_elsewhere.add(block)

    def _pop(self, block: Block) -> BlockState:
        """Remove and return a block's state, except momentum, which belongs to the parameter."""
        state: BlockState = self.state(block)
        del self.states[block.key]
        if "momentum_buffer" in state:
            self.states[block.key] = self._state_class(block)({"momentum_buffer": state.pop("momentum_buffer")})
        return state


def blocks_under(
    c: Coverage,
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    silent: Collection[nn.Parameter] = (),
    frozen: bool = False,
    through: bool = False,
) -> list[Block]:
    """Return the blocks of a model's parameters under coverage options; see :func:`find_blocks`."""
    return find_blocks(
        model,
        parameters,
        include=c.include,
        exclude=c.exclude,
        sua=False if c.sua is None and c.sharing == "reduce" else c.sua,
        max_factor_dim=c.max_factor_dim,
        identity=c.basis == "identity",
        unsupported="diagonal" if frozen else c.unsupported,
        silent=silent,
        frozen=frozen,
        through=through,
    )


def in_parts(blocks: list[Block]) -> tuple[dict[Block, int], int]:
    """Split a network into parts whose bases are refreshed together; return each block's part, and their number.

    Blocks of one shape are in one part. The bases of a small network are so cheap that few parts are best.
    """
    shapes = {form: i for i, form in enumerate(dict.fromkeys(b.form for b in blocks))}
    numbers = sum(sum(b.factor_numbers()) for b in blocks)
    parts = max(1, min(len(shapes), numbers // PART))
    return {b: shapes[b.form] * parts // len(shapes) for b in blocks}, parts


class Snapshot:
    """A snapshot of all that the assignment to blocks depends on; quick to compare, as every forward pass does.

    Args:
        parameters: The given parameters, trained or frozen.
        modules: All modules that hold parameters.
    """

    def __init__(self, parameters: list[nn.Parameter], modules: list[nn.Module]) -> None:
        self._parameters = parameters
        self._parts: list[Any] = [part for m in modules for part in (m._parameters, m._modules)]
        self._forms, self._inside = self._now()
        self._ids = list(map(id, self._inside))

    def _now(self) -> tuple[list[object], list[object]]:
        parameters = self._parameters
        forms = [p.requires_grad for p in parameters], [p.dtype for p in parameters], [p.shape for p in parameters]
        where = [p.device for p in parameters[:1]]
        return [*forms, where], list(itertools.chain.from_iterable(map(VALUES, self._parts)))

    def unchanged(self) -> bool:
        """Return whether nothing has changed."""
        forms, inside = self._now()
        return forms == self._forms and list(map(id, inside)) == self._ids


def identity(block: Block) -> Identity:
    """Return a block's identity, by which it is recognised when blocks are assigned anew."""
    return block.covered, tuple(block.parameters.values())


def only(blocks: Collection[Block], found: Mapping[Block, T]) -> dict[Block, T]:
    """Restrict a mapping to some blocks."""
    return {block: of for block, of in found.items() if block in blocks}


def fits(block: Block, state: Mapping[str, Any]) -> bool:
    """Return whether a state, perhaps from a checkpoint, has the shapes of a block."""
    s, A, shape = state.get("s"), state.get("A"), block.shape
    if isinstance(s, Tensor) and tuple(s.shape) != (shape.groups, shape.out, shape.columns):
        return False
    if A is None:
        return True
    return block.covered and tuple(A.shape) == (shape.groups, shape.inputs) + (
        () if block.diagonal_A else (shape.inputs,)
    )
