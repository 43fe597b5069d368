"""A step on several processes: each block's owner computes its basis, direction and update, and broadcasts the result.

    backward -> statistics to the owners -> basis, direction, update by the owner -> parameters to all processes

If parameters are sharded, the owner gathers gradient and parameter from all ranks, and returns each rank's shard.

Everything that depends on rounding (solves, products, long sums) is computed by one process only. So replicas stay
bit-identical with any number of threads, on different processors, and when a solver fails on one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ekfac.curvature.blocks import Block
from ekfac.curvature.real import as_complex
from ekfac.curvature.statistics import scaling_sum
from ekfac.optim.distributed.agreement import (
    COMPARE_EVERY,
    REMEDY,
    Report,
    RollCall,
    check_structure,
    compare_parameters,
    roll_call,
    structure_of,
)
from ekfac.optim.distributed.shards import Shards, is_sharded, local
from ekfac.optim.distributed.states import keep_own, make_contiguous
from ekfac.optim.statistics.gradients import largest_magnitudes, made_real
from ekfac.optim.statistics.partition import identity
from ekfac.optim.statistics.refresh import iterated_numbers
from ekfac.optim.statistics.refused import refuse_unless_used
from ekfac.optim.statistics.sums import BlockSums, no_scaling
from ekfac.optim.types import Direction, Rates, StepInputs

if TYPE_CHECKING:
    from ekfac.optim.engine import Engine

T = TypeVar("T")


class Replicas:
    """What the engine does differently in a step that it takes together with other processes.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.processes = engine.options.processes
        self.owners = engine.partition.owners
        self.shards = Shards(self.owners)
        #: An error since the last roll call; it is raised once the other processes know.
        self.failure: Exception | None = None
        #: Flags by which owners report failure, not yet read by the host.
        self._flags: list[Tensor] = []
        self._checked: Any = None

    def together(self) -> bool:
        """Return whether other processes take part, or parameters are sharded (even on a single process)."""
        size = self.processes.size
        if size != self.owners.size:  # torch.distributed was initialised or shut down since
            self._engine.partition.assign_owners()
            keep_own(self._engine)
        return size > 1 or self._engine.partition.sharded

    # --- before a step --------------------------------------------------------------------------------------------

    def begin(self, rates: Rates) -> StepInputs | bool | None:
        """Agree on the step; return its inputs, or what :meth:`Engine.step` returns if there is nothing to compute."""
        engine, collector, partition = self._engine, self._engine.collector, self._engine.partition
        self._check_model()
        inputs, finite = None, True
        try:
            inputs = collector.inputs()
            if inputs is not None:
                collector.watch.measure(inputs)
                finite = engine.executor.check_finite(list(inputs.sizes.values()), wait=True)[0]
        except Exception as error:
            self.failure = self.failure or error
        if inputs is None:
            inputs = StepInputs({}, collector.calls, collector.sums, float(collector.separate_examples))
            inputs.batches = self.processes.size // collector.capture.mesh.size
            inputs.solves, inputs.warm = engine.schedule.due()
            made_real(inputs, engine.partition.complex)
        call = self._call(inputs, finite, rates)
        if not any(holder is not None for holder in call.holders):
            collector.drop()
            return None
        if not call.examples:
            refuse_unless_used(self.processes, collector.watch.used_by_last_step(inputs.gradients), partition.device)
            collector.drop()
            return None
        if not call.finite:
            engine.skip()
            self.look_ahead()
            return False
        if engine.schedule.applied_steps % COMPARE_EVERY == 0:
            replicated = {name: p for p, name in engine.partition.names.items() if not is_sharded(p)}
            compare_parameters(self.processes, replicated)
        self._fetch_gradients(inputs, call)
        if self.shards:
            touched = [p for p, was in zip(engine.partition.offered, call.touched, strict=True) if was]
            self.shards.make_whole(inputs, call.largest, touched, engine.executor.whole_steps)
        return inputs

    def _check_model(self) -> None:
        partition = self._engine.partition
        if self._checked != (self.processes.size, partition.offered):
            structure = structure_of(partition.names, partition.offered)
            check_structure(self.processes, structure, partition.device)
            self.shards.learn(partition.offered_names())
            self._checked = self.processes.size, partition.offered
        if self.processes.size > 1:
            self._engine.collector.overlap.connect(partition.device)

    def _call(self, inputs: StepInputs, finite: bool, rates: Rates) -> RollCall:
        """Agree on the step, and exchange the outcomes of warm refreshes."""
        engine, partition = self._engine, self._engine.partition
        if self._flags:  # from the last step, on a GPU
            self._raise_if_failed()
        mine = {block.key for block in partition.covered if self.owners.mine(block)}
        near: list[bool | None] = [
            getattr(partition.states.get(p), "near", None) if p in mine else None for p in partition.offered
        ]
        silent = [name for p, name in partition.names.items() if p in partition.silent]
        touched = set(inputs.touched)
        seen = {block.key for found in (inputs.calls, inputs.sums, inputs.samples) for block in found}
        overlap, sums = engine.collector.overlap, engine.collector.sums
        places = {block.key: overlap.place(block, sums) for block in partition.covered}
        steps, trains = engine.schedule.applied_steps, [p.requires_grad for p in partition.offered]
        report = Report(
            failed=self.failure is not None,
            at=(steps, trains, silent, overlap.described()),
            finite=finite,
            examples=bool(inputs.n > 0),
            called=rates.called or 0,
            weights_edited=rates.weights_edited,
            sent=len(overlap.sent),
            passes=overlap.passes,
            gradients=[p in inputs.gradients for p in partition.offered],
            touched=[p in touched for p in partition.offered],
            near=near,
            seen=[p in seen for p in partition.offered],
            places=[places.get(p, 0.0) for p in partition.offered],
            largest=self.shards.largest(inputs, partition.device),
        )
        call = roll_call(self.processes, partition.device, report)
        if not call.diverged:  # even if the step fails, as other processes may be waiting
            overlap.catch_up(call, partition.offered, sums)
        self._raise_together(call.failed)
        if call.diverged:
            raise RuntimeError(
                "process_group: ranks are at different steps, or train (freeze) different parameters: this one has "
                f"taken {steps} steps and trains {len(partition.parameters)} parameters. " + REMEDY
            )
        inputs.agreed = call
        known = dict(zip(partition.offered, call.near, strict=True))
        for block in partition.covered:
            if known[block.key] is not None and not self.owners.mine(block):
                partition.state(block).near = known[block.key]
        return call

    def look_ahead(self) -> None:
        """Plan which statistics the next backward pass sends."""
        self._engine.collector.overlap.look_ahead(self._engine.schedule.expected(()))

    def verify(self, inputs: StepInputs) -> None:
        """Check that gradients are what the layers' calls account for, and find rescalings to undo."""
        collector, partition, call = self._engine.collector, self._engine.partition, inputs.agreed
        assert call is not None
        if collector.fingerprints.unverified:
            touched = {p for p, was in zip(partition.offered, call.touched, strict=True) if was}
            here = self.owners.mine if self.shards else lambda block: True
            try:
                collector.fingerprints.verify(inputs, touched, collector.loss_scale(), here)
            except RuntimeError as error:
                self.failure = error
            first = self.processes.rank if self.failure is not None else self.processes.size
            self._raise_together(int(self.processes.minimum(torch.tensor(first, device=partition.device))))
        if not self._engine.method.squares_all:
            inputs.rescaled = collector.watch.rescaling(inputs, collector.loss_scale())
            self._fetch_rescaling(inputs, call)

    def _raise_together(self, first: int) -> None:
        """Raise on all ranks if one has failed: its own error there, a reference to it elsewhere."""
        failure, self.failure = self.failure, None
        if first < self.processes.size:
            raise failure or _failed_elsewhere(first)

    def _fetch_gradients(self, inputs: StepInputs, call: RollCall) -> None:
        """Send gradients to ranks that have none for lack of a batch."""
        wanted: dict[int, list[Tensor]] = {}
        fetched = []
        for p, holder, complete in zip(self._engine.partition.offered, call.holders, call.complete, strict=True):
            if holder is None or complete:
                continue
            if p in self.shards:
                if p not in inputs.gradients:  # this process contributes zero
                    inputs.gradients[p] = p.grad = torch.zeros_like(p)
                continue
            if p not in inputs.gradients:
                inputs.gradients[p] = torch.empty_like(inputs.weights.get(p, p))
                fetched.append(p)
            wanted.setdefault(holder, []).append(inputs.gradients[p])
        if wanted:
            self.processes.broadcast(wanted)
            inputs.sizes.update(zip(fetched, largest_magnitudes([inputs.gradients[p] for p in fetched]), strict=True))
        inputs.gradients = {p: inputs.gradients[p] for p in self._engine.partition.parameters if p in inputs.gradients}

    def _fetch_rescaling(self, inputs: StepInputs, call: RollCall) -> None:
        """Send the rescaling factors of fetched gradients to the ranks that fetched them."""
        wanted: dict[int, list[Tensor]] = {}
        ratios: dict[nn.Parameter, Tensor] = {}
        for p, holder, complete in zip(self._engine.partition.offered, call.holders, call.complete, strict=True):
            if holder is not None and not complete and p not in self.shards:
                one = torch.ones((), dtype=torch.float64, device=p.device)
                ratios[p] = inputs.rescaled.get(p, one).to(one, copy=True)
                wanted.setdefault(holder, []).append(ratios[p])
        if wanted:
            self.processes.broadcast(wanted)
            inputs.rescaled.update(ratios)

    # --- within a step --------------------------------------------------------------------------------------------

    def compute_eigenbases(self, blocks: Sequence[Block], inputs: StepInputs, rates: Rates) -> None:
        """Compute the bases that this process owns; of the others, only track what all must know."""
        engine, partition = self._engine, self._engine.partition
        renewed = [b for b in blocks if b in inputs.solves or b in inputs.warm]

        def renew(block: Block) -> None:
            engine.compute_eigenbases([block], inputs, rates)
            make_contiguous(partition.state(block))

        self._run(renew, list(filter(self.owners.mine, renewed)))
        for block in renewed:
            if not self.owners.mine(block):
                if block in inputs.solves:
                    state = partition.state(block)
                    state.strayed = 0
                    state.pop("near", None)
                partition.note_elsewhere(identity(block), ready=True)
        if engine.method.needs_examples and renewed:
            self.broadcast_bases(renewed)
            self.processes.sum_to_owners(self._by_owner(self._held_scaling(renewed, inputs)))

    def precondition(self, blocks: Sequence[Block], inputs: StepInputs, rates: Rates) -> list[Direction]:
        """Compute the directions of the blocks that this process owns; those of the others are empty."""
        mine = list(filter(self.owners.mine, blocks))
        found = self._run(lambda b: self._engine.precondition([b], inputs, rates)[0], mine)
        return self._with_products([found.get(b) or Direction(b, {}, None) for b in blocks])

    def _run(self, function: Callable[[Block], T], blocks: list[Block]) -> dict[Block, T]:
        """Map a function over blocks; a failing block is left out, and reported to all ranks at the end of the step."""

        def guarded(block: Block) -> T | None:
            try:
                return function(block)
            except Exception as error:
                self.failure = self.failure or error
                return None

        found = self._engine.executor.parallel(guarded, blocks)
        return {block: one for block, one in zip(blocks, found, strict=True) if one is not None}

    def _with_products(self, directions: list[Direction]) -> list[Direction]:
        """Share the inner products that measure agreement with the last directions among all processes."""
        if not self._engine.method.compares_gradients:
            return directions
        device = self._engine.partition.device
        rows = torch.zeros(len(directions), 7, dtype=torch.float64, device=device)
        for row, direction in zip(rows, directions, strict=True):
            if direction.products is not None:
                row[0] = 1
                row[1:].copy_(direction.products.reshape(-1))
        self.processes.sum(rows)
        return [
            Direction(d.block, d.steps, d.gradient, row[1:].view(2, 3) if known else None)
            for d, row, known in zip(directions, rows, (rows[:, 0] > 0).tolist(), strict=True)
        ]

    def _held_scaling(self, blocks: list[Block], inputs: StepInputs) -> dict[Block, list[Tensor]]:
        """Sum s* over this process's examples, in the bases that this step has updated."""
        engine, found = self._engine, {}
        for block in blocks:
            sums = inputs.sums.setdefault(block, BlockSums())
            basis = engine.method.basis(block, engine.partition.state(block))
            assert basis is not None
            for calls, count in sums.held:
                sums.add_scaling(scaling_sum(block, calls, count, basis, engine.options.numerics.memory_limit))
            sums.held = []
            sums.scaling = no_scaling(block) if sums.scaling is None else sums.scaling.contiguous()
            found[block] = [sums.scaling]
        return found

    def broadcast_bases(self, blocks: Iterable[Block]) -> None:
        """Broadcast the bases of these blocks: every process needs them for s* of its own examples."""
        partition = self._engine.partition
        bases: dict[Block, list[Tensor]] = {}
        for block in blocks:
            state, shape = partition.state(block), block.shape
            sides = {"A": (shape.inputs, block.diagonal_A), "B": (shape.out, block.diagonal_B)}
            sizes: dict[str, tuple[int, ...]] = {f"S_{side}": (shape.groups, d) for side, (d, _) in sides.items()}
            sizes |= {f"U_{side}": (shape.groups, d, d) for side, (d, diagonal) in sides.items() if not diagonal}
            for name, size in sizes.items():
                if name not in state or (name.startswith("U") and state[name].shape != size):
                    state[name] = torch.zeros(size, dtype=block.dtype, device=block.key.device)
                elif not state[name].is_contiguous():
                    state[name] = state[name].contiguous()
            bases[block] = [state[name] for name in sizes]
        self.processes.broadcast(self._by_owner(bases))

    def _by_owner(self, tensors: dict[Block, list[Tensor]]) -> dict[int, list[Tensor]]:
        found: dict[int, list[Tensor]] = {}
        for block, of_block in tensors.items():
            found.setdefault(self.owners.of(block), []).extend(of_block)
        return found

    def refresh(self, due: dict[Block, tuple[int, int]], rates: Rates) -> None:
        """Run the warm refreshes that are due between two steps, each by its owner."""
        engine = self._engine

        def renew(block: Block) -> None:
            engine.warm_refresh({block: due[block]}, rates)
            make_contiguous(engine.partition.state(block))

        with engine.executor.overlapped(engine.partition.device, iterated_numbers(due)):
            self._run(renew, list(filter(self.owners.mine, due)))
        if engine.method.needs_examples:
            engine.executor.join()
            self.broadcast_bases(due)

    # --- after it -------------------------------------------------------------------------------------------------

    def hand_round(self, inputs: StepInputs) -> None:
        """Give all processes the parameters (or gradients) that their owners have updated."""
        whole_steps = self._engine.executor.whole_steps
        whole = {p: g for p, g in inputs.gradients.items() if p not in self.shards}
        self._broadcast_results({p: inputs.weights.get(p, p) for p in whole} if whole_steps else whole)
        self._return_pieces(inputs)
        if self.failure is not None or not any(flag.is_cuda for flag in self._flags):
            self._raise_if_failed()
        if not whole_steps:
            for p, gradient in inputs.gradients.items():
                if p.grad is None:  # fetched for lack of a batch
                    p.grad = as_complex(gradient, p)

    def _broadcast_results(self, results: dict[nn.Parameter, Tensor]) -> None:
        """Broadcast the owners' updated parameters (or gradients), with a flag that tells whether an owner failed."""
        partition = self._engine.partition
        found: dict[int, list[Tensor]] = {}
        for block in partition.blocks:
            found.setdefault(self.owners.of(block), []).extend(
                results[p] for p in block.parameters.values() if p in results
            )
        rank = self.processes.rank
        self._flags = []
        for owner, tensors in sorted(found.items()):
            if tensors:
                failed = owner if owner == rank and self.failure is not None else self.processes.size
                self._flags.append(torch.full((), failed, dtype=torch.int64, device=tensors[0].device))
                tensors.append(self._flags[-1])
        self.processes.broadcast(found)

    def _return_pieces(self, inputs: StepInputs) -> None:
        """Return updated shards (or gradients) from owners to ranks, with a flag that tells whether an owner failed."""
        if not self.shards:
            return
        whole_steps, size = self._engine.executor.whole_steps, self.processes.size
        pieces = {p: p if whole_steps else p.grad for p in inputs.gradients if p in self.shards}
        held = {p: local(piece) for p, piece in pieces.items() if piece is not None}
        failed = self.processes.rank if self.failure is not None else size
        flag = torch.full((), failed, dtype=torch.int64, device=self._engine.partition.device)
        self._flags += self.shards.scatter(inputs.weights if whole_steps else inputs.gradients, held, flag)

    def _raise_if_failed(self) -> None:
        """Read the owners' flags of the last step."""
        flags, self._flags = [int(flag) for flag in self._flags], []
        self._raise_together(min(flags, default=self.processes.size))


def _failed_elsewhere(rank: int) -> RuntimeError:
    return RuntimeError(f"rank {rank} of the process group could not do its part of this step; see its own error")
