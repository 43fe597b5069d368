"""What is trained: which block has each parameter, and where its state is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.curvature.blocks import Block, find_blocks
from ekfac.optim.distributed.owners import Owners
from ekfac.optim.options import EngineOptions
from ekfac.optim.types import BlockState

Members = tuple[bool, tuple[nn.Parameter, ...]]


class Partition:
    """Assigns parameters to blocks, and keeps the state of each.

    Args:
        model: The model.
        options: What is covered.
        state: Where each block keeps its tensors, by its first parameter: torch's ``optimizer.state``.
        state_class: What a block's state is.
        numbers: How many numbers are kept for a block.
    """

    def __init__(
        self,
        model: nn.Module,
        options: EngineOptions,
        state: MutableMapping[Tensor, Any],
        state_class: Callable[[Block], type[BlockState]],
        numbers: Callable[[Block], int],
    ) -> None:
        self.model = model
        self.states = state
        self._options = options
        self._state_class = state_class
        self.owners = Owners(options.processes, numbers)
        #: Blocks of other processes whose factors, and whose bases, are known there.
        self.factors_elsewhere: set[Members] = set()
        self.ready_elsewhere: set[Members] = set()
        #: Grows whenever tensors that a CUDA graph may hold on to were replaced.
        self.generation = 0
        #: What the optimizer was given, and those of them that are trained now: the others are frozen.
        self.offered: list[nn.Parameter] = []
        self.parameters: list[nn.Parameter] = []
        #: All of the model's, those that are trained here first.
        self.everything: list[nn.Parameter] = []
        self.blocks: list[Block] = []
        #: The covered blocks, numbered.
        self.covered: dict[Block, int] = {}
        #: The place of each parameter's layer among all of the model, frozen ones too.
        self.layer_of: dict[nn.Parameter, int] = {}
        #: Parameters whose layers turned out never to be called.
        self.silent: set[nn.Parameter] = set()
        #: Blocks as they have been at some time, and the state of those that are frozen now.
        self._known: dict[Members, Block] = {}
        self.put_away: dict[Members, BlockState] = {}
        self._layout: tuple[bool, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the trained parameters are."""
        return (self.parameters or self.offered)[0].device

    # --- blocks ---------------------------------------------------------------------------------------------------

    def blocks_of(self, parameters: Iterable[nn.Parameter], frozen: bool = False) -> list[Block]:
        """The blocks that these parameters would be assigned to; with ``frozen``, if none of them were frozen."""
        o = self._options
        return find_blocks(
            self.model,
            parameters,
            include=o.include,
            exclude=o.exclude,
            sua=o.sua,
            max_factor_dim=o.max_factor_dim,
            identity=o.basis == "identity",
            unsupported="diagonal" if frozen else o.unsupported,
            silent=() if frozen else self.silent,
            frozen=frozen,
        )

    def assign(self, parameters: Iterable[nn.Parameter]) -> set[Block]:
        """Assign the trained parameters to blocks. Blocks that stay or come back as they were keep their state.

        Returns:
            Covered blocks that have not been there before.
        """
        offered = list(parameters)
        found = self.blocks_of(offered)
        new = {b for b in found if b.covered and members(b) not in self._known}
        blocks = [self._known.setdefault(members(b), b) for b in found]
        for block in self.blocks:
            if block not in blocks:
                self.put_away[members(block)] = self._pop(block)
        for block in blocks:
            if members(block) in self.put_away:
                self.state(block).update(self.put_away.pop(members(block)))
            elif not fits(block, self.states.get(block.key, {})):
                self._pop(block)
        self.offered = offered
        self.parameters = [p for p in offered if p.requires_grad]
        self.everything = list(dict.fromkeys([*self.parameters, *self.model.parameters()]))
        self.blocks = blocks
        self.generation += 1
        self.covered = {b: i for i, b in enumerate(b for b in blocks if b.covered)}
        self.layer_of = layers_in_order(self.model)
        self._layout = tuple(p.requires_grad for p in offered)
        self.assign_owners()
        return new

    def assign_owners(self) -> None:
        """Give every parameter an owner among the processes that train together."""
        size = self._options.processes.size
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

    def is_current(self) -> bool:
        """Tell whether the same parameters are frozen as when they were assigned."""
        return tuple(p.requires_grad for p in self.offered) == self._layout

    # --- state ----------------------------------------------------------------------------------------------------

    def state(self, block: Block) -> Any:
        """A block's state; an empty one is kept from now on."""
        state = self.peek(block)
        self.states[block.key] = state
        return state

    def peek(self, block: Block) -> Any:
        """A block's state; where there is none yet, an empty one that is not kept."""
        found = self.states.get(block.key)
        if isinstance(found, BlockState):
            return found
        state = self._state_class(block)(found)
        if found:  # from a checkpoint, or the momentum alone
            self.states[block.key] = state
        return state

    def has_factors(self, block: Block) -> bool:
        """Tell whether A and B of a block are known, here or at its owner."""
        return "A" in self.peek(block) or members(block) in self.factors_elsewhere

    def note_elsewhere(self, block: Members, factors: bool = False, ready: bool = False) -> None:
        """Note what another process now has of a block that it owns."""
        if factors:
            self.factors_elsewhere.add(block)
        if ready:
            self.ready_elsewhere.add(block)

    def _pop(self, block: Block) -> BlockState:
        """Take a block's state away; momentum, which belongs to the parameter, stays."""
        state: BlockState = self.peek(block)
        self.states.pop(block.key, None)
        if "momentum_buffer" in state:
            self.states[block.key] = {"momentum_buffer": state.pop("momentum_buffer")}
        return state


def layers_in_order(model: nn.Module) -> dict[nn.Parameter, int]:
    """The place of each parameter's layer among those of a model that have parameters of their own."""
    layers = [parameters for m in model.modules() if (parameters := list(m.parameters(recurse=False)))]
    return {p: place for place, parameters in reversed(list(enumerate(layers))) for p in parameters}


def members(block: Block) -> Members:
    """What makes a block the same as one before."""
    return block.covered, tuple(block.parameters.values())


def fits(block: Block, state: Mapping[str, Any]) -> bool:
    """Whether a block's state, from a checkpoint say, is laid out as the block is."""
    s, A, shape = state.get("s"), state.get("A"), block.shape
    if isinstance(s, Tensor) and tuple(s.shape) != (shape.groups, shape.out, shape.columns):
        return False
    if A is None:
        return True
    return block.covered and tuple(A.shape) == (shape.groups, shape.inputs) + (
        () if block.diagonal_A else (shape.inputs,)
    )
