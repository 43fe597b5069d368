"""What is trained: which block has each parameter, and where its state is."""

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
from ekfac.optim.statistics.roster import Roster
from ekfac.optim.types import BlockState

#: What a dict holds.
VALUES = operator.methodcaller("values")
#: A part of a network whose bases are refreshed together has at least so many numbers in its factors.
PART = 2**21

T = TypeVar("T")
Members = tuple[bool, tuple[nn.Parameter, ...]]
#: State that is counted in float64 whatever the dtype of the block.
COUNTS = ("count", "examples")


@dataclass(frozen=True)
class Assigned:
    """What has changed with an assignment.

    Attributes:
        new: Covered blocks that have not been there before.
        recast: Whether the model was cast, or moved.
        moved: Whether it is now on another kind of device.
    """

    new: set[Block]
    recast: bool
    moved: bool


class Partition:
    """Assigns parameters to blocks, and keeps the state of each.

    Args:
        model: The model.
        coverage: What is covered.
        state: Where each block keeps its tensors, by its first parameter: torch's ``optimizer.state``.
        state_class: What a block's state is.
        owners: Which process keeps it.
    """

    def __init__(
        self,
        model: nn.Module,
        coverage: Coverage,
        state: MutableMapping[Tensor, Any],
        state_class: Callable[[Block], type[BlockState]],
        owners: Owners,
    ) -> None:
        self.model = model
        self.states = state
        self._coverage = coverage
        self._state_class = state_class
        self.owners = owners
        #: Blocks of other processes whose factors, and whose bases, are known there.
        self.factors_elsewhere: set[Members] = set()
        self.ready_elsewhere: set[Members] = set()
        #: Grows whenever tensors that a CUDA graph may hold on to were replaced.
        self.generation = 0
        #: What the optimizer was given, and those of them that are trained now: the others are frozen.
        self.offered: list[nn.Parameter] = []
        self.parameters: list[nn.Parameter] = []
        #: Those of them that are complex.
        self.complex: list[nn.Parameter] = []
        #: All of the model's, those that are trained here first.
        self.everything: list[nn.Parameter] = []
        #: The names of all parameters of the model.
        self.names: dict[nn.Parameter, str] = {}
        #: The module that holds each, and its name there.
        self.places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
        #: Whether ranks hold pieces of parameters, and whether they gather them when these are used.
        self.sharded = self.gathers = False
        self.blocks: list[Block] = []
        #: The covered blocks, each with the number of its part, and how many parts there are: see :func:`in_parts`.
        self.covered: dict[Block, int] = {}
        self.parts = 1
        #: Parameters whose layers are never called.
        self.silent: set[nn.Parameter] = set()
        #: Blocks as they have been at some time, and the state of those that are frozen now.
        self._known: dict[Members, Block] = {}
        self.put_away: dict[Members, BlockState] = {}
        #: Parameters that are whole, and where they are.
        self._whole: list[tuple[nn.Parameter, nn.Module, str]] = []
        self._layout = Layout([], [])
        self._modules: list[nn.Module] = []
        #: The kind of device that the parameters were on when they were assigned.
        self.kind = ""
        #: Why no step can be taken: the model has other parameters than when it was given.
        self.problem = ""
        self._roster = Roster(model)

    @property
    def device(self) -> torch.device:
        """Where the trained parameters are."""
        return (self.parameters or self.offered)[0].device

    @property
    def dtype(self) -> torch.dtype:
        """In what their states are kept, or the first one's where they are of several."""
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
            frozen: As if none were frozen.
            silent: As if these were those whose layers are never called.
        """
        if silent is None:
            silent = () if frozen else self.silent
        return blocks_under(self._coverage, self.model, parameters, silent, frozen)

    def block_with(self, key: Members) -> Block | None:
        """Return the block of these parameters as it is, or would be if none were frozen."""
        covered, parameters = key
        blocks = self.blocks_of(parameters, frozen=True, silent=() if covered else parameters)
        return {members(block): block for block in blocks}.get(key)

    def offered_names(self) -> dict[nn.Parameter, str]:
        """Return the names of what was offered; numbers, on all ranks the same, for what the model has lost."""
        return {p: self.names.get(p, f"(lost, number {i})") for i, p in enumerate(self.offered)}

    def assign(self, parameters: Iterable[nn.Parameter]) -> Assigned:
        """Assign the trained parameters to blocks. Blocks that stay or come back as they were keep their state."""
        offered = list(parameters)
        self.sharded = any_sharded(offered)
        self.gathers = self.sharded and bool(units(self.model))
        with resharded(self.model) if self.gathers else nullcontext():
            return self._assign(offered)

    def _assign(self, offered: list[nn.Parameter]) -> Assigned:
        self.problem = self._roster.compare(offered)
        before = {members(b): (b.dtype, b.shape) for b in self.blocks}, self.kind
        blocks, new = [], set()
        for block in self.blocks_of(offered):
            known = self._known.get(members(block))
            # A module may have taken another's place, or a parameter have other numbers.
            if known is None or known.uses.keys() != block.uses.keys() or known.shape != block.shape:
                self._known[members(block)] = known = block
                new |= {block} if block.covered else set()
            blocks.append(known)
        kept = set(map(members, blocks))
        for block in self.blocks:
            if members(block) not in kept:
                self.put_away[members(block)] = self._pop(block)
        for block in blocks:
            block.__dict__.pop("dtype", None)  # the model may have been cast since
            if members(block) in self.put_away:
                self.state(block).update(self.put_away.pop(members(block)))
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
        scripted = torch.jit.ScriptModule  # whose parameters nobody replaces
        self._whole = [x for x in held if x[0] in chosen and not (is_sharded(x[0]) or isinstance(x[1], scripted))]
        self.everything = list(dict.fromkeys([*self.parameters, *self.names]))
        self.blocks = blocks
        self.generation += 1
        self.covered, self.parts = in_parts([b for b in blocks if b.covered])
        # Where ranks gather parameters when these are used, modules hold now the one, now the other.
        modules = () if self.gathers else self.model.modules()
        self._modules = [m for m in modules if not isinstance(m, scripted)]
        self._layout = Layout(offered, self._modules)
        self.kind = self.device.type
        self.assign_owners()
        forms, kind = before
        # A layer that was found not to be called is laid out anew, but its numbers are as they were.
        changed = any(forms.get(members(b), (b.dtype, b.shape)) != (b.dtype, b.shape) for b in blocks)
        recast = changed or kind not in ("", self.kind)
        if recast:
            self._convert()
        return Assigned(new, recast, kind not in ("", self.kind))

    def give_up_on(self, silent: list[Block]) -> None:
        """Give layers that have gradients but were never called the diagonal method, with a warning."""
        warnings.warn(
            "these layers have gradients although layer(x) was never called, so they get the diagonal method: "
            + checks.listed([b.name for b in silent]),
            RuntimeWarning,
            stacklevel=3,
        )
        self.silent.update(p for b in silent for p in b.parameters.values())

    def assign_owners(self) -> None:
        """Give every parameter an owner among the processes that train together."""
        size = self.owners.processes.size
        if size != self.owners.size > 1:
            raise RuntimeError(
                f"the process group had {self.owners.size} ranks, which share this optimizer's state, and now has "
                f"{size}: save state_dict() on all of them before, and load it into a new optimizer"
            )
        if size > 1:
            self.owners.assign(self.blocks_of(self.offered, frozen=True))

    def is_frozen(self) -> bool:
        """Tell whether nothing is to be trained now."""
        return not any(p.requires_grad for p in self.offered)

    def is_replaced(self) -> bool:
        """Tell whether ``fully_shard`` or tensor parallel has put sharded parameters in the place of whole ones."""
        if not dist.is_available() or not dist.is_initialized():
            return False
        return any(m._parameters.get(name) is not p for p, m, name in self._whole)

    def replace(self) -> dict[nn.Parameter, nn.Parameter]:
        """Find what stands in the place of each parameter that was offered, and start anew.

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
            raise RuntimeError(f"parameter '{missing[0]}' is gone from the model: construct this anew")
        self.owners.forget()
        self.states.clear()
        self.blocks, self._known, self.silent, self._roster = [], {}, set(), Roster(self.model)
        return {p: now[name] for p, name in names.items()}

    def is_exchanged(self) -> bool:
        """Tell whether other tensors stand in the place of parameters for a while, as under functional_call."""
        held = (p for m in self._modules for p in m._parameters.values() if p is not None)
        return not all(isinstance(p, nn.Parameter) for p in held)

    def is_current(self) -> bool:
        """Tell whether parameters are frozen, cast and placed as when they were assigned, in the same modules."""
        return self._layout.holds()

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self, block: Block) -> Any:
        """Return a block's state, kept from now on if there was none."""
        found = self.states.get(block.key)
        if not isinstance(found, BlockState):  # from a checkpoint, or the momentum alone
            found = self.states[block.key] = self._state_class(block)(found)
        return found

    def _convert(self) -> None:
        """Bring state to the device and into the dtype of its block: the model was cast or moved."""
        dtypes: dict[Tensor, torch.dtype] = {p: b.dtype for b in self.blocks for p in b.parameters.values()}
        for p, state in self.states.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    exact = name in COUNTS or p not in dtypes or not value.is_floating_point()
                    state[name] = value.to(p.device, value.dtype if exact else dtypes[p])

    def take_states(self, states: MutableMapping[Tensor, Any]) -> None:
        """Keep state in another mapping from now on, whose entries may be plain dicts.

        What was put away for a block that is trained now, as it was not when a checkpoint was written, comes back.
        """
        self.states = states
        for block in self.blocks:
            if members(block) in self.put_away:
                self.state(block).update(self.put_away.pop(members(block)))
            elif block.key in states:
                self.state(block)

    def note_elsewhere(self, block: Members, factors: bool = False, ready: bool = False) -> None:
        """Note what another process now has of a block that it owns."""
        if factors:
            self.factors_elsewhere.add(block)
        if ready:
            self.ready_elsewhere.add(block)

    def _pop(self, block: Block) -> BlockState:
        """Take a block's state away; momentum, which belongs to the parameter, stays."""
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
) -> list[Block]:
    """Return the blocks of a model's parameters under what is to be covered; see :func:`find_blocks`."""
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
    )


def in_parts(blocks: list[Block]) -> tuple[dict[Block, int], int]:
    """Return the parts of a network whose bases are refreshed together, by number, and how many there are.

    Blocks of one shape are in one part. The bases of a small network are so cheap that few parts are best.
    """
    shapes = {form: i for i, form in enumerate(dict.fromkeys(b.form for b in blocks))}
    numbers = sum(sum(b.factor_numbers()) for b in blocks)
    parts = max(1, min(len(shapes), numbers // PART))
    return {b: shapes[b.form] * parts // len(shapes) for b in blocks}, parts


class Layout:
    """What the assignment of parameters to blocks takes for granted: asked for at every forward pass, so it is quick.

    Args:
        parameters: Those that are trained or frozen.
        modules: All that hold parameters.
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

    def holds(self) -> bool:
        """Tell whether all is as it was."""
        forms, inside = self._now()
        return forms == self._forms and list(map(id, inside)) == self._ids


def members(block: Block) -> Members:
    """Return what makes a block the same as one before."""
    return block.covered, tuple(block.parameters.values())


def only(blocks: Collection[Block], found: Mapping[Block, T]) -> dict[Block, T]:
    """Return what there is of some blocks."""
    return {block: of for block, of in found.items() if block in blocks}


def fits(block: Block, state: Mapping[str, Any]) -> bool:
    """Tell whether a block's state, which may come from a checkpoint, is laid out as the block is."""
    s, A, shape = state.get("s"), state.get("A"), block.shape
    if isinstance(s, Tensor) and tuple(s.shape) != (shape.groups, shape.out, shape.columns):
        return False
    if A is None:
        return True
    return block.covered and tuple(A.shape) == (shape.groups, shape.inputs) + (
        () if block.diagonal_A else (shape.inputs,)
    )
