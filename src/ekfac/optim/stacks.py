"""Blocks of one shape, handled as one: a network of twelve equal layers then launches a twelfth of the kernels.

The states of such blocks are concatenated along G. Each block's own state holds views of the result, so code that
reads, saves or changes the state of one block need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.curvature.blocks import Block
from ekfac.optim.statistics.partition import Partition
from ekfac.optim.types import BlockStep, Direction, Rates, StepInputs

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


def block_step(
    blocks: Sequence[Block], inputs: StepInputs, rates: Rates, squares_all: bool, bounded: bool = False
) -> BlockStep:
    """Return the gradient to precondition, ``[G, O, C]`` of each block, and how to recover what backward left.

    The gradient is the current ``.grad``, normalised to a mean over examples, with L2 penalty and sign. If it was
    rescaled as a whole, ``ratio`` undoes that; if it differs in other ways, ``left`` is the gradient as backward left
    it, which updates the scaling. So clipping never enlarges an update. Adam-like rules square the gradient that they
    average, clipped and with the penalty (``squares_all``). If the step is skipped, all are zero, unless the method
    tolerates non-finite gradients (``bounded``).
    """
    G, ratio, left = _gradient_of(blocks, inputs, rates, squares_all)
    if inputs.bad is not None and not bounded:
        G = G.masked_fill(inputs.bad, 0.0)
        ratio, left = (None if t is None else t.masked_fill(inputs.bad, 0.0) for t in (ratio, left))
    own = rates.groups[rates.group_of[blocks[0].key]]
    small = inputs.small and ratio is None and left is None
    return BlockStep(G, inputs.n, own, inputs.ok, ratio, left, blocks=len(blocks), small=small)


def _gradient_of(
    blocks: Sequence[Block], inputs: StepInputs, rates: Rates, squares_all: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the blocks' gradients, and the factor that undoes a rescaling or the gradients as backward left them."""
    rescaled, mean, dtype, penalised = {} if squares_all else inputs.rescaled, inputs.mean, blocks[0].dtype, False
    each: list[dict[str, Tensor]] = []
    for block in blocks:
        each.append(gradients := {})
        for role, p in block.parameters.items():
            given, group = inputs.gradients.get(p), rates.groups[rates.group_of[p]]
            g = torch.zeros(p.shape, device=p.device) if given is None else given
            if g.dtype != dtype:
                g = g.to(dtype)
            if isinstance(mean, Tensor) or mean != 1:
                g = g * (mean.to(g) if isinstance(mean, Tensor) else mean)
            gradients[role] = g
            penalised |= group.maximize or bool(group.l2)
    if len(blocks) > 1:
        if not (rescaled or penalised):
            return blocks[0].layer.stack_all([block.layer for block in blocks], each), None, None
        return _one_by_one(blocks, inputs, rates, squares_all)
    parameters, stack = blocks[0].parameters, blocks[0].layer.stack
    G, ratio, left = stack(gradients), None, None
    if rescaled:
        own = {role: rescaled[p] for role, p in parameters.items() if p in rescaled}
        if own and len(parameters) == 1:
            ratio = next(iter(own.values())).to(dtype)
        elif own:
            left = stack({role: g * own.get(role, 1.0) for role, g in gradients.items()})
    if penalised:
        groups = {role: rates.of(p) for role, p in parameters.items()}
        whole = left if left is not None else G if ratio is None else G * ratio
        weights = {role: inputs.weights.get(p, p).to(dtype) for role, p in parameters.items()}
        penalty = stack({role: groups[role].l2 * weight for role, weight in weights.items()})
        sign = stack(
            {role: torch.full_like(g, -1.0 if groups[role].maximize else 1.0) for role, g in gradients.items()}
        )
        G = sign * G + penalty
        left, ratio = None if squares_all else whole, None
    return G, ratio, left


def _one_by_one(
    blocks: Sequence[Block], inputs: StepInputs, rates: Rates, squares_all: bool
) -> tuple[Tensor, None, Tensor | None]:
    found = [_gradient_of((block,), inputs, rates, squares_all) for block in blocks]
    gradients, ratios, lefts = zip(*found, strict=True)
    if all(r is None for r in (*ratios, *lefts)):
        return torch.cat(gradients), None, None
    whole = [g if r is None else g * r for g, r, _ in found]
    left = torch.cat([w if given is None else given for w, given in zip(whole, lefts, strict=True)])
    return torch.cat(gradients), None, left


def tensors_in(state: Any) -> set[str]:
    """Return the names of a state's tensors that can be stacked."""
    return {name for name, value in state.__dict__.items() if isinstance(value, Tensor)} - APART


def concatenated(tensors: list[Tensor]) -> Tensor:
    """Concatenate tensors; return a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
