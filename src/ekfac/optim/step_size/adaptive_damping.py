"""Adaptive damping: the Levenberg-Marquardt rule, on averages that are robust to noisy batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ekfac import checks
from ekfac.curvature.real import as_real, gradient_of
from ekfac.optim.engine import Engine
from ekfac.optim.step_size.weight_average import WeightAverage
from ekfac.optim.types import StepInputs

#: Damping decreases for reduction ratios above GOOD and increases for ratios below POOR.
GOOD, POOR = 0.75, 0.25
#: A step is undone if the loss exceeds the prediction by the fraction SURPRISE of the model's terms; damping is then
#: multiplied by omega^-LEAP.
SURPRISE, LEAP = 0.5, 4
#: Changes of the loss below this many units of rounding are ignored.
ROUNDING = 16.0
#: The fields in a checkpoint.
SAVED = ("damping", "actual", "predicted", "undone_steps", "watched")


@dataclass(frozen=True)
class AdaptiveDamping:
    r"""Damping that adapts to how well the quadratic model predicts the loss: ``EKFAC(model, damping=...)``.

    Every few steps the loss of the batch is evaluated again after the update d, and its decrease is compared with the
    one predicted by the gradient G and the undamped curvature C in use:

    .. math::
        r = \frac{L(\theta) - L(\theta + d)}{-(G \cdot d + \frac{1}{2} d^T C d)}, \qquad
        \epsilon \leftarrow \omega \epsilon \; \text{ if } r > 3/4, \qquad
        \epsilon \leftarrow \epsilon / \omega \; \text{ if } r < 1/4

    A single batch is noisy, so both decreases are averaged over comparisons before they are divided. Each is measured
    in units of ``|G d| + d^T C d / 2``, and the actual one is clamped to that, so that all comparisons count equally. A
    step is undone if it increases the loss, and by more than half that unit beyond the prediction; damping then rises
    by more. At first, and after a step was undone, every step is compared.

    ``opt.step`` needs a closure, as for torch's LBFGS: a function that clears the gradients, computes the loss of this
    step's batch, calls backward and returns the loss. Its second call leaves gradients, buffers, captured statistics
    and the random state as they were, and sees the same dropout masks as the first.

    Example:
        >>> import torch, ekfac
        >>> model, x, y = torch.nn.Linear(4, 2), torch.randn(32, 4), torch.randn(32, 2)
        >>> opt = ekfac.EKFAC(model, **{**ekfac.PAPER, "damping": ekfac.AdaptiveDamping(start=1.0)})
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (model(x) - y).square().sum(1).mean()
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(10):
        ...     loss = opt.step(closure)
        >>> opt.stats()["damping"] < 1.0
        True

    Args:
        start: The initial damping.
        least: Lower bound on the damping.
        most: Upper bound on the damping.
        every: Compare every ``every`` steps, and in this many consecutive steps at first and after one was undone.
        omega: A comparison multiplies damping by this factor or its inverse.
        decay: Weight of the past in the averages; 0 uses each comparison alone.
    """

    start: float = 1e-3
    least: float = 1e-8
    most: float = 1e2
    every: int = 5
    omega: float = 0.75
    decay: float = 0.8

    def __post_init__(self) -> None:
        for name in ("start", "least", "most"):
            checks.number(name, getattr(self, name), above=0)
        if not self.least <= self.start <= self.most:
            raise ValueError(f"start={self.start!r} must lie between least={self.least!r} and most={self.most!r}")
        checks.integer("every", self.every, least=1)
        checks.number("omega", self.omega, above=0, below=1)
        checks.number("decay", self.decay, least=0, below=1)


class Adaptation:
    """The current damping of one optimizer: a function of the step, like any other, but with state."""

    def __init__(self, settings: AdaptiveDamping) -> None:
        self.settings = settings
        self.damping = settings.start
        #: Averages over comparisons. Both start at zero; the bias cancels in their ratio.
        self.actual = 0.0
        self.predicted = 0.0
        self.undone_steps = 0
        #: How many of the next steps are all compared, so that a divergence is not missed.
        self.watched = settings.every

    def __call__(self, step: int) -> float:
        """Return the current damping."""
        return self.damping

    @property
    def ratio(self) -> float:
        """Actual over predicted decrease of the loss; NaN if no decrease was predicted."""
        return self.actual / self.predicted if self.predicted > 0 else math.nan

    def due(self, step: int) -> bool:
        """Return whether this step is compared."""
        return self.watched > 0 or step % self.settings.every == 0

    def learn(self, fall: float, slope: float, curved: float) -> bool:
        """Adapt to the decrease of the loss, given G.d and d^T C d of the model; return whether to keep the step.

        A step that is not kept counts in no average.
        """
        size = abs(slope) + curved / 2
        if size == 0:  # nothing has moved
            return True
        actual, predicted = -1.0, 0.0  # if anything is no longer finite
        if math.isfinite(fall + size):
            actual, predicted = fall / size, -(slope + curved / 2) / size
        omega, keep = self.settings.omega, self.settings.decay
        undone = actual < min(0.0, predicted - SURPRISE) and self.damping < self.settings.most
        self.watched = self.settings.every if undone else max(0, self.watched - 1)
        if undone:
            self.undone_steps += 1
            self.damping /= omega**LEAP
        else:
            self.actual = keep * self.actual + (1 - keep) * max(-1.0, min(1.0, actual))
            self.predicted = keep * self.predicted + (1 - keep) * predicted
            if self.actual < max(0.0, POOR * self.predicted):
                self.damping /= omega
            elif self.actual > GOOD * self.predicted > 0:
                self.damping *= omega
        self._keep_in_bounds()
        return not undone

    def stats(self) -> dict[str, float]:
        """Return scalars for a logger."""
        return {"damping": self.damping, "reduction_ratio": self.ratio, "undone_steps": float(self.undone_steps)}

    def save(self) -> dict[str, Any]:
        """Return the state as plain numbers."""
        return {name: getattr(self, name) for name in SAVED}

    def check(self, saved: Any) -> None:
        """Refuse what :meth:`save` cannot have returned."""
        if saved is None:
            return
        if not isinstance(saved, Mapping) or not all(name in saved for name in SAVED):
            raise ValueError(f"state_dict, 'adaptive_damping': must be a dict with {', '.join(SAVED)}, or None")
        for name in SAVED:
            least = None if name == "actual" or name == "predicted" else 0
            checks.number(f"state_dict, 'adaptive_damping', {name!r}", saved[name], least=least)

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Restore what :meth:`save` returned, within bounds; None comes from a damping that did not adapt."""
        if saved is not None:
            for name in SAVED:
                setattr(self, name, saved[name])
            self._keep_in_bounds()

    def _keep_in_bounds(self) -> None:
        self.damping = max(self.settings.least, min(self.settings.most, self.damping))


def begin_comparison(
    adaptation: Adaptation,
    engine: Engine,
    closure: Callable[[], Any] | None,
    maximize: bool,
    average: WeightAverage,
) -> Comparison | None:
    """Prepare to compare the actual with the predicted decrease of the loss; None if damping does not adapt now."""
    if closure is None:
        raise ValueError(
            "step() with AdaptiveDamping needs a closure, because it evaluates the loss after the update too: "
            "opt.step(closure), where closure() clears the gradients, computes the loss, calls backward, returns it"
        )
    if engine.partition.sharded:
        raise ValueError(
            "damping=AdaptiveDamping(...) with parameters that are sharded over ranks. Allowed: a number, a "
            "function of the step, or whole parameters on every rank"
        )
    if not adaptation.due(engine.schedule.applied_steps):
        return None
    return Comparison(adaptation, engine, closure, maximize, average)


class Comparison:
    """One step after which damping adapts; made before the first call of the closure, to save the random state.

    Args:
        adaptation: The damping.
        engine: The engine whose parameters are updated.
        closure: Computes the loss.
        maximize: Whether the loss is maximized.
        average: The weight average.
    """

    def __init__(
        self,
        adaptation: Adaptation,
        engine: Engine,
        closure: Callable[[], Any],
        maximize: bool,
        average: WeightAverage,
    ) -> None:
        self._adaptation = adaptation
        self._engine = engine
        self._closure = closure
        self._average = average
        self._sign = -1.0 if maximize else 1.0
        device = engine.partition.device
        self._devices = [device] if device.type == "cuda" else []
        self._random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]

    def before(self, loss: Any) -> None:
        """Record loss, parameters, and gradients as backward left them, even if they were clipped since."""
        self._loss = as_number(loss)
        self._rounding = torch.finfo(loss.dtype if isinstance(loss, Tensor) else torch.float32).eps * ROUNDING
        engine = self._engine
        watch = engine.collector.watch
        live = StepInputs({p: gradient_of(p) for p in engine.partition.parameters if p.grad is not None}, {}, {})
        watch.measure(live)
        ratios = watch.rescaling(live, loss_scale=1.0)
        self._gradients = {p: g * ratios[p] if p in ratios else g for p, g in live.gradients.items()}
        self._theta = {p: as_real(p.detach()).clone() for p in live.gradients}
        self._velocity = {p: None if (v := self._velocity_of(p)) is None else v.clone() for p in live.gradients}
        self._examples = engine.collector.capture.examples
        self._offsets = {p: d.clone() for p, d in self._average.offsets.items()}

    def after(self) -> None:
        """Evaluate the loss again, adapt damping unless rounding hides the change, and undo the step if need be."""
        if self._engine.settle():  # the step was skipped
            return
        slope, curved = self._model()
        torch.clear_autocast_cache()  # it holds casts of the old weights
        size = self._engine.options.processes.size
        numbers = [self._loss, self._evaluate(), float(self._examples), slope * size, curved * size]
        loss, new_loss, examples, slope, curved = self._over_processes(numbers)
        unit = self._sign / examples if self._engine.options.batch.reduction == "sum" else self._sign
        slope *= unit
        hidden = abs(slope) + curved / 2 < self._rounding * abs(unit * loss)
        if not (hidden or self._adaptation.learn(unit * (loss - new_loss), slope, curved)):
            self._undo()

    def _velocity_of(self, parameter: nn.Parameter) -> Tensor | None:
        found: Tensor | None = self._engine.partition.states.get(parameter, {}).get("momentum_buffer")
        return found

    def _undo(self) -> None:
        """Restore parameters, momentum and weight average; keep what was learnt of the curvature."""
        for p, theta in self._theta.items():
            as_real(p).copy_(theta)
            now, before = self._velocity_of(p), self._velocity[p]
            if now is not None:
                now.copy_(torch.zeros_like(now) if before is None else before)
        self._average.put_back(self._offsets)

    def _over_processes(self, numbers: list[float]) -> list[float]:
        """Average numbers over processes, so that all adapt alike."""
        processes = self._engine.options.processes
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._engine.partition.device)
        return [number / processes.size for number in processes.sum(mine).tolist()]

    def _model(self) -> tuple[float, float]:
        """Return G.d and d^T C d of the update d, over the blocks that this process owns."""
        engine, owners = self._engine, self._engine.partition.owners
        like = torch.zeros((), dtype=torch.float64, device=engine.partition.device)
        slope, curved = [like], [like]
        for block in filter(owners.mine, engine.partition.blocks):
            parameters = block.parameters.values()
            moved = {p: as_real(p) - self._theta[p] for p in parameters if p in self._theta}
            slope += [(self._gradients[p] * d).sum().to(like) for p, d in moved.items()]
            if moved:
                D = block.stack(moved[p] if p in moved else torch.zeros_like(p) for p in parameters)
                state = engine.partition.state(block)
                curved.append(engine.method_of(block).quadratic_form(block, state, D).to(like))
        return float(torch.stack(slope).sum()), float(torch.stack(curved).sum())

    def _evaluate(self) -> float:
        """Return the loss of the same batch at the current parameters, without side effects."""
        engine, collector = self._engine, self._engine.collector
        collector.drop()
        gradients = {p: p.grad for p in engine.partition.parameters}
        buffers = {buffer: buffer.clone() for buffer in engine.model.buffers()}
        collector.watch.enabled = False
        try:
            for p in gradients:
                p.grad = None
            with torch.random.fork_rng(self._devices), torch.enable_grad(), collector.capture.forwards.paused():
                torch.set_rng_state(self._random[0])
                for device, state in zip(self._devices, self._random[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
                return as_number(self._closure())
        finally:
            collector.watch.enabled = True
            collector.drop()
            for p, gradient in gradients.items():
                p.grad = gradient
            for buffer, value in buffers.items():
                buffer.copy_(value)


def as_number(loss: Any) -> float:
    """Convert the closure's return value to a number."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.item()
    if isinstance(loss, (int, float)):
        return float(loss)
    raise ValueError(
        f"closure() returned {loss!r}. Allowed with AdaptiveDamping: the loss, a number or a one-element tensor"
    )
