"""Blocks of one shape, handled as one: a network of twelve equal layers then launches a twelfth of the kernels.

The states of such blocks are concatenated along G. Each block's own state holds views of the result, so code that
reads, saves or changes the state of one block need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.curvature.blocks import Block
from ekfac.optim.statistics.partition import Partition
from ekfac.optim.types import BlockStep, Direction

#: State that belongs to a parameter rather than the block, and is not stacked.
APART = frozenset({"momentum_buffer"})


class Stack:
    """One block with its state, or several of one shape with their states stacked.

    Args:
        blocks: The blocks.
        state: Holds the stacked tensors; the block's own state if there is only one.
    """

    def __init__(self, blocks: tuple[Block, ...], state: Any) -> None:
        self.blocks = blocks
        #: Represents all of them wherever only the shape matters.
        self.first = blocks[0]
        self.multiplications = blocks[0].multiplications
        self.state = state
        #: The stacked tensors of which the blocks have views, and those views.
        self._known: dict[str, Tensor] = {}
        self._views: list[dict[str, Tensor]] = [{} for _ in blocks]

    def parts(self, stacked: Tensor) -> list[Tensor]:
        """Split a stacked tensor, ``[G, ...]`` or one number per block, into the blocks' parts."""
        return list(stacked.unbind() if stacked.dim() == 1 else stacked.split(len(stacked) // len(self.blocks)))

    def directions(
        self, P: Tensor, step: BlockStep, gradients: Mapping[nn.Parameter, Tensor], keeps_gradients: bool
    ) -> list[Direction]:
        """Split the preconditioned gradients P into one direction per block."""
        G = step.gradient if keeps_gradients and isinstance(step.gradient, Tensor) else None
        layer, Gs = self.first.layer, [G]
        if len(self.blocks) > 1:
            unstacked = layer.unstack_all([block.layer for block in self.blocks], P)
            Gs = [None] * len(self.blocks) if G is None else list(self.parts(G))
        else:
            unstacked = [layer.unstack(P)]
        found = []
        for block, matrices, g in zip(self.blocks, unstacked, Gs, strict=True):
            steps = {q: matrices[role] for role, q in block.parameters.items() if q in gradients}
            found.append(Direction(block, steps, g, step.products))
        return found

    def gather(self, states: list[Any]) -> bool:
        """Stack the blocks' current tensors; return False if their names, shapes or dtypes differ."""
        names = tensors_in(states[0])
        if any(tensors_in(state) != names for state in states[1:]):
            return False
        for name in names:
            tensors = [state.__dict__[name] for state in states]
            if all(t is views.get(name) for t, views in zip(tensors, self._views, strict=True)):
                continue
            if len({(t.shape, t.dtype, t.device) for t in tensors}) > 1:
                return False
            self.state[name] = torch.stack(tensors) if not tensors[0].dim() else torch.cat(tensors)
        for name in tensors_in(self.state) - names:
            del self.state[name]
        self.update_views(states)
        return True

    def update_views(self, states: list[Any]) -> None:
        """Give each block a view of its part of every new stacked tensor."""
        for name in tensors_in(self.state):
            stacked = self.state.__dict__[name]
            if self._known.get(name) is not stacked:
                self._known[name] = stacked
                for state, views, part in zip(states, self._views, self.parts(stacked), strict=True):
                    state.__dict__[name] = views[name] = part


class Stacks:
    """The blocks of a partition, those of one shape stacked.

    Args:
        partition: The blocks and their states.
        stacked_by: Whether a block's method can handle several blocks at once.
    """

    def __init__(self, partition: Partition, stacked_by: Callable[[Block], bool]) -> None:
        self._partition = partition
        self._stacked_by = stacked_by
        self._of: dict[Block, Stack] = {}
        self._alone: dict[Block, Stack] = {}
        self._generation = -1

    def of(self, blocks: Iterable[Block], kind: Callable[[Block], Hashable]) -> list[Stack]:
        """Return stacks that together hold these blocks.

        Args:
            blocks: The blocks.
            kind: Blocks are stacked only if this is equal; None for a block that must not be stacked.
        """
        if self._generation != self._partition.generation:
            self._arrange()
        wanted, found = list(blocks), []
        among = set(wanted) if self._of else None
        done: set[Block] = set()
        for block in wanted:
            if block in done:
                continue
            stack = self._of.get(block)
            if stack is None or among is None or not self._fits(stack, among, kind):
                stack = self._alone[block]
                stack.state = self._partition.states.get(block.key)
                if stack.state is None:
                    stack.state = self._partition.state(block)
            else:
                done.update(stack.blocks)
            found.append(stack)
        return found

    def update_views(self, stack: Stack) -> None:
        """Give each block of a stack a view of its part of every new stacked tensor."""
        stack.update_views(self.states(stack))

    def states(self, stack: Stack) -> list[Any]:
        """Return the states of a stack's blocks."""
        return [self._partition.state(block) for block in stack.blocks]

    def _fits(self, stack: Stack, among: set[Block], kind: Callable[[Block], Hashable]) -> bool:
        kinds = {kind(block) if block in among else None for block in stack.blocks}
        return len(kinds) == 1 and None not in kinds and stack.gather(self.states(stack))

    def _arrange(self) -> None:
        self._generation = self._partition.generation
        groups: dict[Hashable, list[Block]] = {}
        for block in filter(self._stacked_by, self._partition.blocks):
            groups.setdefault(block.form, []).append(block)
        stacks = [Stack(tuple(g), type(self._partition.state(g[0]))()) for g in groups.values() if len(g) > 1]
        self._alone = {block: Stack((block,), None) for block in self._partition.blocks}
        self._of = {block: stack for stack in stacks for block in stack.blocks}


def tensors_in(state: Any) -> set[str]:
    """Return the names of a state's tensors that can be stacked."""
    return {name for name, value in state.__dict__.items() if isinstance(value, Tensor)} - APART


def concatenated(tensors: list[Tensor]) -> Tensor:
    """Concatenate tensors; return a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
