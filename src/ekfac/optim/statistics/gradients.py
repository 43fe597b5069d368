"""Watches gradients: their size at the end of backward, and whether they were changed afterwards.

Clipping, unscaling or averaging rescales ``.grad`` between backward and step. The step preconditions the current
``.grad``, but rules that divide by s update it with the gradient as backward left it; otherwise clipping would make
updates larger. The largest magnitude of each gradient at the end of backward suffices to undo a rescaling, and reveals
NaN and infinity.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ekfac.curvature.capture.capture import Capture
from ekfac.curvature.capture.hooks import Mutable, remove_hooks
from ekfac.curvature.real import as_real, gradient_of
from ekfac.optim.distributed.processes import Processes
from ekfac.optim.distributed.shards import any_sharded, held, is_sharded, local
from ekfac.optim.statistics.fingerprints import Fingerprints
from ekfac.optim.types import StepInputs

#: Up to this size, torch's fused norms are the fastest way to a tensor's largest magnitude.
FEW = 1024


def made_real(inputs: StepInputs, parameters: Iterable[nn.Parameter]) -> StepInputs:
    """Replace complex parameters and their gradients in a step's inputs by real views."""
    inputs.gradients.update({p: gradient_of(p) for p in parameters if p in inputs.gradients})
    inputs.weights.update({p: as_real(p.detach()) for p in parameters})
    return inputs


class GradientWatch:
    """Records the largest magnitude of every gradient at the end of each backward pass.

    Args:
        parameters: The parameters to watch.
        processes: The processes that average their gradients.
        fingerprints: Called at the end of a backward pass.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], processes: Processes, fingerprints: Fingerprints) -> None:
        self._processes = processes
        self._fingerprints = fingerprints
        self.enabled = True
        #: Returns the capture to be told when a backward pass that brought gradients has ended, if it still exists.
        self.on_end: Callable[[], Capture | None] = lambda: None
        #: Whether all gradients come from a single backward pass.
        self.single_pass = False
        self.no_gradients = True
        self._left: dict[nn.Parameter, tuple[Tensor, Tensor, int]] = {}
        #: Largest magnitudes after the last backward pass, and after the last one whose gradients a step has used.
        self.newest: tuple[list[nn.Parameter], list[Tensor]] = [], []
        self.used = self.newest
        self._task = -1
        self._handled_pass = -1  # the pass that before_backward has already handled
        self.parameters: list[nn.Parameter] = []
        #: Whether any are sharded over ranks.
        self._sharded = False
        self._handles: list[RemovableHandle] = []
        self.hooks = Mutable(self._handles)
        #: Whether to record gradients' norms too: once gradients were changed between backward and step.
        self.lengths_wanted = False
        self._lengths: dict[nn.Parameter, Tensor] = {}
        weakref.finalize(self, remove_hooks, self._handles)
        self.attach(parameters)

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch these parameters."""
        self.hooks.restore()
        remove_hooks(self._handles)
        self.parameters = list(parameters)
        self._sharded = any_sharded(self.parameters)
        me = weakref.ref(self)

        def accumulated(parameter: Tensor) -> None:
            if (watch := me()) is not None:
                watch.backward_runs()

        self._handles += [p.register_post_accumulate_grad_hook(accumulated) for p in self.parameters]

    def close(self) -> None:
        """Remove the hooks."""
        self.hooks.restore()
        remove_hooks(self._handles)
        self.forget()

    def mute(self) -> None:
        """Mute the parameters' hooks, if a hook on the model's output can report the backward pass instead."""
        if not self._sharded and self._processes.size == 1:
            self.hooks.mute(True)

    def catch_up(self) -> None:
        """Detect, from the gradients, a backward pass that bypassed the output while the hooks were muted."""
        if not self.hooks.away:
            return
        self.hooks.restore()
        there = [p for p in self.parameters if p.grad is not None and (p not in self._left or self.touched(p))]
        if any(bool(p.grad.any()) for p in there if p.grad is not None):
            self._backward_ended()

    def forget(self) -> None:
        """Drop all records."""
        if self.hooks.away:
            self.hooks.restore()
        self._left = {}
        self._lengths = {}
        self._task = -1
        self.single_pass = False
        self._fingerprints.left = {}

    @contextmanager
    def set_aside(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Save gradients and restore them at the end; do not watch inside."""
        saved = [(p, p.grad) for p in parameters]
        for p, _ in saved:
            p.grad = None
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True
            for p, grad in saved:
                p.grad = grad

    def before_forward(self) -> None:
        """Record, at the start of a forward pass, whether there are gradients to which its backward pass will add."""
        self.catch_up()
        self.no_gradients = self._has_no_gradients()

    def before_backward(self) -> bool:
        """Return, as a backward pass reaches the model, whether gradients were cleared since the forward pass."""
        task = torch._C._current_graph_task_id()
        if self.no_gradients or task == self._handled_pass:
            return False
        self._handled_pass = task
        self.no_gradients = self._has_no_gradients(or_unknown=self.parameters[0].device.type == "cpu")
        return self.cleared

    def _has_no_gradients(self, or_unknown: bool = False) -> bool:
        """Return whether there are no gradients, or all have been set to zero after backward (which reads them).

        Gradients without a backward pass since the last step are read only with ``or_unknown``.
        """
        there = [p for p in self.parameters if p.grad is not None]
        or_unknown = or_unknown and not self._sharded
        if not all(self.touched(p) or (or_unknown and p not in self._left) for p in there):
            return False
        return not any(g.is_sparse or bool(g.any()) for p in there if (g := p.grad) is not None)

    @property
    def cleared(self) -> bool:
        """Whether the gradients of the last backward pass were cleared.

        With sharded parameters this is unknown after a pass that left its gradients in buffers, to be reduced later.
        """
        return self.no_gradients and not (self._sharded and not self._left)

    def backward_runs(self) -> None:
        """Arrange to record the gradients once the current backward pass has ended."""
        task = torch._C._current_graph_task_id()
        if not self.enabled or task == self._task:
            return
        self._task = task
        # DistributedDataParallel and fully_shard queue their averaging later than this. A callback that is queued by a
        # callback runs after theirs.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._backward_ended))

    @torch.no_grad()
    def _backward_ended(self) -> None:
        self._task = -1
        self.hooks.restore()
        if (capture := self.on_end()) is not None:
            capture.backward_ended()
        self.single_pass, self.no_gradients = self.no_gradients, False
        live = [p for p in self.parameters if p.grad is not None and not p.grad.is_sparse]
        real = [gradient_of(p) if p.is_complex() else p.grad for p in live if p.grad is not None]
        grads = [p.grad for p in live if p.grad is not None]
        sizes = largest_magnitudes([local(g) for g in real] if self._sharded else real)
        self._left = {p: (size, g, g._version) for p, size, g in zip(live, sizes, grads, strict=True)}
        self.newest = live, sizes
        if self.lengths_wanted or self._sharded:
            self._lengths = lengths_of(live)
        if not self._sharded:
            self._fingerprints.note()

    def used_by_last_step(self, gradients: Mapping[nn.Parameter, Tensor]) -> bool:
        """Return whether these are the gradients of the last step, perhaps clipped by a common factor; reads them."""
        parameters, before = self.used
        if not before or gradients.keys() != set(parameters):
            return False
        now = largest_magnitudes([held(gradients[p]) for p in parameters])
        pairs = [(float(a), float(b)) for a, b in zip(now, before, strict=True)]
        ratios = [a / b for a, b in pairs if b > 0]
        return bool(ratios) and max(ratios) < 1 + 1e-3 and max(ratios) < (1 + 1e-3) * min(ratios)

    def touched(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient was changed in place or replaced after backward."""
        left = self._left.get(parameter)
        return left is not None and (left[1] is not parameter.grad or left[2] != parameter.grad._version)

    def any_touched(self) -> bool:
        """Return whether any gradient was."""
        return any(g is not p.grad or g._version != version for p, (_, g, version) in self._left.items())

    def measure(self, inputs: StepInputs) -> None:
        """Find each gradient's largest magnitude now and at the end of backward, and which gradients were touched."""
        changed, pieces = [], []
        for p, gradient in inputs.gradients.items():
            known = self._left.get(p)
            if known is None:
                changed.append(p)
                continue
            size, left, version = known
            inputs.sizes[p] = inputs.left[p] = size
            if left is not p.grad or version != gradient._version:
                changed.append(p)
                inputs.touched.append(p)
            elif self._sharded and is_sharded(gradient):  # torch changes these in place without bumping versions
                changed.append(p)
                pieces.append(p)
        if changed:
            grads = [inputs.gradients[p] for p in changed]
            now = largest_magnitudes([local(g) for g in grads] if self._sharded else grads)
            inputs.sizes.update(zip(changed, now, strict=True))
            for p in changed:
                inputs.left.setdefault(p, inputs.sizes[p])
        if pieces:
            now_long = lengths_of(pieces)
            pairs = [(inputs.left[p], inputs.sizes[p], self._lengths[p], now_long[p]) for p in pieces]
            numbers = torch.stack([torch.stack([x.double() for x in four]) for four in pairs]).tolist()
            inputs.touched += [p for p, four in zip(pieces, numbers, strict=True) if _differ(*four)]

    def rescaling(self, inputs: StepInputs, loss_scale: float | Tensor) -> dict[nn.Parameter, Tensor]:
        """Find, for each touched gradient, the factor that restores its size at the end of backward.

        If the largest entry and the norm imply different factors, the gradient was not rescaled but clipped entry by
        entry, masked or replaced; its factor is then 1.
        """
        ratios = {p: _ratio(inputs.left[p], inputs.sizes[p], loss_scale) for p in inputs.touched}
        self.lengths_wanted |= bool(ratios)
        for p, (before, now) in self._both_lengths(list(ratios)).items():
            apart = (_ratio(before, now, loss_scale) / ratios[p] - 1).abs()
            ratios[p] = torch.where(apart < 1e-2, ratios[p], 1.0)
        if self._processes.size > 1:
            # Gradients that differed between processes after backward have been averaged by hand. That is no
            # rescaling, and any clipping of the average cannot be undone.
            left = [None if is_sharded(p) else inputs.left.get(p) for p in self.parameters]
            apart = self._processes.differ(left, self.parameters[0].device)
            for p, by_hand in zip(self.parameters, apart, strict=True):
                if p in ratios:
                    ratios[p] = torch.where(by_hand, 1.0, ratios[p])
        return ratios

    def _both_lengths(self, touched: list[nn.Parameter]) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
        """Return the norms of gradients at the end of backward and now, if both are known.

        Shards' squared norms are summed over all ranks, which have the same parameters in ``touched``; replicated
        shards increase both norms alike.
        """
        known = [p for p in touched if p in self._lengths and p.grad is not None]
        now = lengths_of(known)
        found = {p: (self._lengths[p], now[p]) for p in known if not is_sharded(p)}
        if pieces := [p for p in touched if is_sharded(p)]:
            none = torch.zeros(3, dtype=torch.float64, device=pieces[0].device)
            one = none.new_ones(())
            rows = [
                torch.stack([self._lengths[p].to(none) ** 2, now[p].to(none) ** 2, one]) if p in now else none
                for p in pieces
            ]
            for p, (before, after, ranks) in zip(pieces, self._processes.sum(torch.stack(rows)), strict=True):
                if ranks == self._processes.size:
                    found[p] = before.sqrt(), after.sqrt()
        return found


def lengths_of(parameters: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return the norm of each gradient, or of this process's shard of it."""
    grads = [held(p.grad) for p in parameters if p.grad is not None]
    return dict(zip(parameters, torch._foreach_norm(grads), strict=True)) if grads else {}


def _differ(left: float, now: float, left_length: float, now_length: float) -> bool:
    """Return whether a gradient's largest entry or norm shows that it was changed after backward."""
    return abs(left - now) > 1e-12 * left or abs(left_length - now_length) > 1e-12 * left_length


def _ratio(before: Tensor, now: Tensor, loss_scale: float | Tensor) -> Tensor:
    return torch.where(now > 0, before / (now * loss_scale).clamp(min=torch.finfo(now.dtype).tiny), 1.0)


def largest_magnitudes(tensors: list[Tensor]) -> list[Tensor]:
    """Return max |x| of each tensor: NaN if it contains one, 0 if it is empty."""
    if not tensors:
        return []
    numbers = [t.numel() for t in tensors]
    if not all(numbers):
        tensors = [t if n else t.new_zeros(1) for t, n in zip(tensors, numbers, strict=True)]
    if max(numbers) <= FEW or tensors[0].device.type != "cpu":
        return list(torch._foreach_norm(tensors, torch.inf))
    found: list[Tensor] = []
    for t, n in zip(tensors, numbers, strict=True):
        if n <= FEW:
            found += torch._foreach_norm([t], torch.inf)
            continue
        smallest, largest = torch.aminmax(t)  # ten times as fast as torch's norm
        found.append(torch.maximum(-smallest, largest))
    return found
