"""Short runs on copies of a model: the measurements of :func:`ekfac.doctor`."""

from __future__ import annotations

import copy
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ekfac.curvature.blocks import Block
from ekfac.curvature.fisher.batches import Batch, read_batch
from ekfac.curvature.summary import Summary
from ekfac.optim.ekfac import EKFAC
from ekfac.optim.options import Refresh, into_groups
from ekfac.optim.statistics.schedule import BATCHES, EARLY, stretches

#: The number of batches to measure the noise scale, and to evaluate a trial.
NOISE_BATCHES, JUDGED_BATCHES = 8, 4
NEVER = 10**9


@dataclass(frozen=True)
class Trial:
    """One short run: its settings and its final loss, infinite if it diverged."""

    lr: float
    damping: float
    loss: float


@dataclass(frozen=True)
class Prices:
    """Seconds per training step.

    Attributes:
        adam: With Adam.
        plain: With EKFAC, in a step that collects no statistics and updates no basis.
        statistics: In a step that updates A and B of all layers.
        renewing: In a step that also updates all bases.
        factor_every: The option of this name, if given; else updates of A and B follow the interval.
        wide: The fraction of all refresh work that is due per interval, as wide sides are refreshed less often.
    """

    adam: float
    plain: float
    statistics: float
    renewing: float
    factor_every: int | None = None
    wide: float = 1.0

    def at(self, refresh_every: int) -> float:
        """Return the average seconds per step for a refresh interval."""
        taken = max(0.0, self.statistics - self.plain)
        renewed = max(0.0, self.renewing - max(self.statistics, self.plain))
        between = self.factor_every or max(1, refresh_every // BATCHES)
        return self.plain + taken / between + self.wide * renewed / refresh_every


@dataclass(frozen=True)
class Course:
    """The results of the probe steps."""

    summary: Summary
    first_loss: float
    last_loss: float
    actual: float
    predicted: float
    drift: float
    captured_bytes: int
    noise_after: float | None


class Probe:
    """A model that is copied for every run, with its batches and loss.

    Args:
        model: The model; only copies of it are trained.
        loader: Batches, in the forms that :func:`ekfac.fisher` accepts.
        loss: ``loss(output, target)``, or ``loss(output)`` if batches have no target.
        steps: The number of batches to read; they are repeated if there are fewer.
        options: Options of EKFAC.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        loss: Callable[..., Tensor],
        steps: int,
        options: Mapping[str, Any],
    ) -> None:
        parameter = next((p for p in model.parameters() if p.requires_grad), None)
        if parameter is None:
            raise ValueError("the model has no parameters to train")
        self.device = parameter.device
        self.loss_of = loss
        self.options = into_groups(options)
        self.batches = [read_batch(b, self.device, None, False) for b in itertools.islice(loader, steps)]
        if not self.batches:
            raise ValueError("the loader is empty: it gave no batch")
        try:
            self.model = copy.deepcopy(model).train()
        except RuntimeError as error:
            raise ValueError(f"the model cannot be copied: {error}") from error

    # --- one batch ------------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: Batch, seed: int = 0) -> Tensor:
        """Return the mean loss of a batch; equal seeds give equal dropout masks.

        Raises:
            ValueError: If the loss is neither a number nor one number per example.
        """
        torch.manual_seed(seed)
        output = model(*batch.args, **batch.kwargs)
        value = self.loss_of(output) if batch.target is None else self.loss_of(output, batch.target)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise ValueError(f"loss must return a tensor of floating-point numbers, not {value!r}")
        if value.dim() > 1 or (value.dim() == 1 and len(value) != batch.n):
            raise ValueError(
                f"loss must return one number, the mean over examples, or one for each of the {batch.n} examples; "
                f"it returned a tensor of shape {tuple(value.shape)}"
            )
        return value.mean()

    def check(self) -> float:
        """Check that the loss can be trained; return its value before the first step."""
        value = self.loss(self.model, self.batches[0])
        if not value.requires_grad:
            raise ValueError("loss does not depend on the model's parameters: it has no gradient")
        if not math.isfinite(value.item()):
            raise ValueError(f"the loss is {value.item()} before the first step")
        return self.judge(self.model)

    @torch.no_grad()
    def judge(self, model: nn.Module) -> float:
        """Return the mean loss over the first few batches."""
        judged = self.batches[:JUDGED_BATCHES]
        return statistics.fmean(self.loss(model, batch).item() for batch in judged)

    def optimizer(self, **changes: Any) -> EKFAC:
        """Return EKFAC on a fresh copy of the model, with some options changed."""
        return EKFAC(copy.deepcopy(self.model), **into_groups({**self.options, **changes}))

    def step(self, optimizer: torch.optim.Optimizer, model: nn.Module, index: int) -> Tensor:
        """Take one training step; return the loss before it."""
        optimizer.zero_grad()
        loss = self.loss(model, self.batches[index % len(self.batches)], index)
        loss.backward()
        optimizer.step()
        return loss.detach()

    # --- the measurements -----------------------------------------------------------------------------------------

    def noise_scale(self, model: nn.Module) -> float | None:
        """Return tr(covariance of an example's gradient) / |gradient|^2; None if there is only one example.

        It uses the gradients of several batches of equal size, or of two halves of the only one: noise is what makes
        the mean of their squared lengths exceed the squared length of their mean.
        """
        alike = [b for b in self.batches if b.n == self.batches[0].n][:NOISE_BATCHES]
        parts = alike if len(alike) > 1 else _halves(alike[0])
        if len(parts) < 2:
            return None
        rows = [self._gradient(model, batch) for batch in parts]
        k, n = len(rows), parts[0].n
        mean = torch.stack(rows).mean(0)
        square_mean, mean_square = float(mean @ mean), statistics.fmean(float(row @ row) for row in rows)
        trace = max(0.0, mean_square - square_mean) * n * k / (k - 1)
        signal = square_mean - trace / (k * n)
        return trace / signal if signal > 0 else math.inf

    def _gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        parameters = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(self.loss(model, batch), parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([g.detach().flatten().float() for g in found])

    def course(self, steps: int, every: int) -> Course:
        """Take the probe steps; every ``every`` steps, compare the loss with the quadratic model's prediction."""
        optimizer = self.optimizer(refresh_every=every, average=False)  # averaging would hide the step being compared
        model = optimizer.model
        first = self.judge_paused(optimizer)
        falls: list[tuple[float, float]] = []
        try:
            for index in range(steps):
                if (index + 1) % every:
                    self.step(optimizer, model, index)
                else:
                    falls.append(self._checked_step(optimizer, index))
        except RuntimeError:  # expected if the run has diverged; raised again otherwise
            if math.isfinite(self.judge_paused(optimizer)):
                raise
        stats = optimizer.stats()
        last = self.judge_paused(optimizer)
        with optimizer.paused():
            noise = self.noise_scale(model) if math.isfinite(last) else None
        optimizer.close()
        return Course(
            optimizer.summary(),
            first,
            last,
            sum(actual for actual, _ in falls),
            sum(predicted for _, predicted in falls),
            float(stats.get("residual_drift", 0.0)),
            int(stats.get("captured_bytes", 0)),
            noise,
        )

    def judge_paused(self, optimizer: EKFAC) -> float:
        """Return the loss over the first few batches, without capturing anything."""
        with optimizer.paused():
            return self.judge(optimizer.model)

    def _checked_step(self, optimizer: EKFAC, index: int) -> tuple[float, float]:
        """Take a step; return the actual decrease of the batch's loss and the predicted one, -g.d - d.F d / 2."""
        model, batch = optimizer.model, self.batches[index % len(self.batches)]
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        before = {name: p.detach().clone() for name, p in named.items()}
        loss = self.step(optimizer, model, index)
        moved = {name: p.detach() - before[name] for name, p in named.items()}
        slope = sum(float((p.grad * moved[name]).sum()) for name, p in named.items() if p.grad is not None)
        curved = float(optimizer.curvature().quadratic(moved))
        with torch.no_grad(), optimizer.paused():
            after = self.loss(model, batch, index)
        return loss.item() - after.item(), -slope - curved / 2

    def middle(self) -> tuple[float, float]:
        """Return the lr and damping in the options, or EKFAC's defaults."""
        sample = self.optimizer()
        group = sample.param_groups[0]
        sample.close()
        return float(group["lr"]), float(group["damping"])

    def damps(self) -> bool:
        """Return whether the rule reads damping."""
        sample = self.optimizer()
        sample.close()
        return sample.engine.method.reads_eigenvalues

    def trial(self, steps: int, **changes: float) -> Trial:
        """Run a few steps, with another lr or damping. Without, the lr has the schedule that it has in training."""
        optimizer = self.optimizer(**changes)
        lr, damping = (float(optimizer.param_groups[0][name]) for name in ("lr", "damping"))
        try:
            for index in range(steps):
                self.step(optimizer, optimizer.model, index)
            loss = self.judge_paused(optimizer)
        except RuntimeError:
            loss = self.judge_paused(optimizer)
            if math.isfinite(loss):
                raise
        optimizer.close()
        return Trial(lr, damping, loss if math.isfinite(loss) else math.inf)

    def prices(self, repeats: int = 8) -> Prices:
        """Time a step of Adam and three kinds of steps of EKFAC: plain, with statistics, with all bases updated.

        They are timed in turns, and the minimum of each counts, as other load on the machine only adds time.
        """
        given = self.options.get("refresh", Refresh())
        never = {"refresh_every": NEVER, "deterministic": True}
        plain = self.optimizer(**never, factor_every=NEVER)
        taking = self.optimizer(**never, factor_every=1)
        # Unless deterministic, each of the first steps refreshes the bases by iteration, but wide ones less often.
        renewing = self.optimizer(refresh_every=1 if given.deterministic else NEVER)
        wide = 1.0 if given.deterministic else work_due(renewing.engine.partition.covered)
        model = copy.deepcopy(self.model)
        optimizers = {"plain": plain, "statistics": taking, "renewing": renewing}
        racing: list[tuple[torch.optim.Optimizer, nn.Module]] = [(torch.optim.Adam(model.parameters(), lr=1e-4), model)]
        racing += [(optimizer, optimizer.model) for optimizer in optimizers.values()]
        seconds = [[self._seconds(*one, index) for one in racing] for index in range(max(EARLY, repeats) + 1)]
        adam, *found = (min(times[2:]) for times in zip(*seconds, strict=True))
        prices = dict(zip(optimizers, found, strict=True))
        if wide < 1:
            prices["renewing"] = seconds[EARLY][-1]
        for optimizer in optimizers.values():
            optimizer.close()
        return Prices(adam, **prices, factor_every=given.factor_every, wide=wide)

    def _seconds(self, optimizer: torch.optim.Optimizer, model: nn.Module, index: int) -> float:
        self._wait()
        started = time.perf_counter()
        self.step(optimizer, model, index)
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def work_due(blocks: Iterable[Block]) -> float:
    """Return the fraction of all refresh work, in proportion to the cube of a side, that is due per interval."""
    whole = due = 0.0
    for block in blocks:
        A, B = stretches(block)
        for width, stretch, diagonal in (
            (block.shape.inputs, A, block.diagonal_A),
            (block.shape.out, B, block.diagonal_B),
        ):
            work = 0 if diagonal else block.shape.groups * width**3
            whole, due = whole + work, due + work / stretch
    return due / whole if whole else 1.0


def _halves(batch: Batch) -> list[Batch]:
    """Split a batch into two halves of equal size; return nothing if it has one example."""
    half = batch.n // 2
    if half == 0:
        return []

    def cut(start: int) -> Batch:
        def rows(t: Tensor) -> Tensor:
            return t[start : start + half] if t.dim() and len(t) == batch.n else t

        args, kwargs, target = tree_map_only(Tensor, rows, (batch.args, batch.kwargs, batch.target))
        return Batch(args, kwargs, target, half)

    return [cut(0), cut(half)]


@contextmanager
def random_numbers_restored(device: torch.device, loader: Any) -> Iterator[None]:
    """Restore the random states of torch, numpy, Python and the loader at the end."""
    own = getattr(loader, "generator", None)
    state = own.get_state() if isinstance(own, torch.Generator) else None
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
        if isinstance(own, torch.Generator) and state is not None:
            own.set_state(state)
