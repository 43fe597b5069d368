"""Which block has each parameter, and what a step needs to know of each block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.curvature.blocks import Block, find_blocks
from ekfac.optim.methods.base import Method
from ekfac.optim.methods.rules import State
from ekfac.optim.options import EngineOptions
from ekfac.optim.statistics.refresh import TRIES, Schedule

Members = tuple[bool, tuple[nn.Parameter, ...]]


class Coverage:
    """Assigns parameters to blocks, and knows from the schedule what each step does with them.

    Args:
        model: The model.
        settings: Checked options.
        method: What is done with blocks that a layer covers.
        state: Where each block keeps its tensors, by parameter.
    """

    def __init__(
        self, model: nn.Module, settings: EngineOptions, method: Method, state: MutableMapping[Tensor, State]
    ) -> None:
        self.model = model
        self.settings = settings
        self.method = method
        self.state = state
        self.schedule = Schedule(settings.refresh_every, settings.deterministic)
        self.applied_steps = 0
        #: Grows whenever tensors that a captured step may hold on to were replaced.
        self.generation = 0
        #: What the optimizer was given, and those of them that are trained now: the others are frozen.
        self.offered: list[nn.Parameter] = []
        self.parameters: list[nn.Parameter] = []
        #: Blocks as they have been at some time, and the state of those that are frozen now.
        self._known: dict[Members, Block] = {}
        self.put_away: dict[Members, State] = {}
        self.blocks: list[Block] = []
        #: The covered blocks, numbered.
        self._index: dict[Block, int] = {}
        #: The place of each parameter's layer among all of the model, frozen ones too.
        self._layer_of: dict[nn.Parameter, int] = {}
        self._layout: tuple[bool, ...] = ()
        #: Parameters whose layers turned out never to be called.
        self.silent: set[nn.Parameter] = set()

    @property
    def device(self) -> torch.device:
        """Where the trained parameters are."""
        return (self.parameters or self.offered)[0].device

    # --- what is covered ------------------------------------------------------------------------------------------

    def blocks_of(self, parameters: Iterable[nn.Parameter]) -> list[Block]:
        """The blocks that these parameters would be assigned to."""
        s = self.settings
        return find_blocks(
            self.model,
            parameters,
            include=s.include,
            exclude=s.exclude,
            sua=s.sua,
            max_factor_dim=s.max_factor_dim,
            identity=s.basis == "identity",
            unsupported=s.unsupported,
            silent=self.silent,
        )

    def assign(self, parameters: Iterable[nn.Parameter]) -> set[Block]:
        """Assign the trained parameters to blocks. Blocks that stay or come back as they were keep their state.

        Returns:
            Covered blocks that have not been there before.
        """
        offered = list(parameters)
        found = self.blocks_of(offered)
        new = {b for b in found if members(b) not in self._known}
        blocks = [self._known.setdefault(members(b), b) for b in found]
        for block in self.blocks:
            if block not in blocks:
                self.put_away[members(block)] = self._pop_state(block)
        for block in blocks:
            if members(block) in self.put_away:
                self.state[block.key].update(self.put_away.pop(members(block)))
            elif not fits(block, self.state.get(block.key, {})):
                self._pop_state(block)
        self.offered = offered
        self.parameters = [p for p in offered if p.requires_grad]
        #: All of the model's, those that are trained here first.
        self._everything = list(dict.fromkeys([*self.parameters, *self.model.parameters()]))
        self.blocks = blocks
        self.generation += 1
        self._index = {b: i for i, b in enumerate(b for b in blocks if b.covered)}
        self._layer_of = layers_in_order(self.model)
        self._layout = tuple(p.requires_grad for p in offered)
        return {b for b in new if b.covered}

    def _pop_state(self, block: Block) -> State:
        """Take a block's state away; momentum, which belongs to the parameter, stays."""
        state = dict(self.state.pop(block.key, {}))
        if "momentum_buffer" in state:
            self.state[block.key]["momentum_buffer"] = state.pop("momentum_buffer")
        return state

    # --- what this step will need ---------------------------------------------------------------------------------

    def _due(self, block: Block) -> bool:
        """Whether this step begins with a full solve for the block's basis."""
        if not block.covered:
            return False
        state = self.state.get(block.key, {})
        return (
            not self.method.ready(state) or state.get("strayed", 0) >= TRIES or self.schedule.solve(self.applied_steps)
        )

    def _renews(self, block: Block) -> bool:
        """Whether this step uses a basis that is not known before it."""
        return self._due(block) or (block.covered and self.schedule.turns_within(self.applied_steps))

    @property
    def masks_turns(self) -> bool:
        """Whether a step that turns bases may be found later to be one that changes nothing.

        Not where the next forward pass would have taken something else, had that been known.
        """
        s = self.settings
        return (
            self.method.masks_turns
            and not self.method.needs_examples
            and s.factor_every in (None, 1)
            and s.factor_decay > 0
        )

    def _turns(self, block: Block) -> tuple[int, int]:
        """How many iterations the two sides of the block's basis get after this step."""
        if strayed := self.state.get(block.key, {}).get("strayed", 0):
            return (1, 1) if strayed < TRIES else (0, 0)  # the next step solves for it
        return self.schedule.turns_after(self.applied_steps + 1, self._index[block], len(self._index))

    def wants_factors(self, block: Block) -> bool:
        """Whether this step takes its batch into the block's A and B."""
        every, layer = self.settings.factor_every, self._layer_of[block.key]
        if self.settings.factor_decay > 0 and self.schedule.takes_factors(self.applied_steps, layer, every):
            return True
        return self._renews(block) or (self.settings.factor_decay == 0 and any(self._turns(block)))

    def _turns_small(self) -> bool:
        """Whether bases may be turned in a graph, which keeps what that takes: some eight float64 matrices a lane."""
        most = max((max(block.factor_numbers()) for block in self._index), default=0)
        return self.masks_turns and 8 * 8 * most <= self.settings.memory_limit


def widest(block: Block) -> int:
    """The numbers of the largest of a block's matrices: its gradient, A or B."""
    return max(block.shape.numel, *block.factor_numbers())


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
