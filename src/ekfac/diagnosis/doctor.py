"""``ekfac.doctor``: probes a copy of a model for about fifty steps, then reports what to expect and what to set."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ekfac import checks
from ekfac.curvature.summary import Summary, human
from ekfac.diagnosis.probe import Prices, Probe, Trial, random_numbers_restored
from ekfac.optim.options import DAMPING, PAPER, Batch, Group, into_groups, out_of_groups
from ekfac.optim.statistics.schedule import INTERVAL

#: Factors between grid points of lr and damping, and how often the grid is extended if the best point is on its edge.
LR_FACTOR, DAMPING_FACTOR, FURTHER = 3.0, 10.0, 3
#: The refresh intervals in the table of prices.
INTERVALS = (1, 5, 10, 20, 50, 100, 200, 500)
#: The given settings are kept if they reach the best decrease of the loss up to this fraction.
KEPT = 0.2
#: Settings within this fraction of the best decrease count as equal; the most cautious one is chosen.
EQUAL = 0.02
#: Refreshes may add the first fraction to a step; the given interval is kept if they add at most the second.
AFFORDABLE, BEARABLE = 0.1, 0.5
#: Explains :func:`_chosen` and :func:`_interval` to the user.
RULE = (
    f"how it is chosen: the given lr and damping if they reach {1 - KEPT:.0%} of the best decrease of the loss; else, "
    f"of all within {EQUAL:.0%} of it, those with the most damping, then the smallest lr;\nthe given refresh_every if "
    f"refreshes add at most {BEARABLE:.0%} to a step; else the smallest at which they add at most {AFFORDABLE:.0%}"
)
LINES = 12


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`doctor` found; ``print`` it, or use :meth:`to_dict`.

    Attributes:
        summary: Which block covers each parameter, and its memory.
        batch_size: The number of examples in the first batch.
        steps: The number of probe steps.
        first_loss: The loss before them, over the first batches.
        last_loss: The loss after them.
        noise_scale: tr(covariance of an example's gradient) / |gradient|^2 before them, in examples: infinite if noise
            hides the gradient, None if there is only one example.
        noise_scale_after: The same after them.
        reduction_ratio: Actual over predicted decrease of the loss; None if the quadratic model predicted no decrease.
        drift: Largest off-diagonal residual of the factors in the old basis at a refresh; 0 if it still fits.
        drift_steps: Steps between these refreshes.
        captured_bytes: Peak memory of captured inputs and output gradients.
        prices: Seconds per step: Adam's, and EKFAC's without and with statistics and refreshes.
        trials: The short runs.
        trial_steps: The number of steps in each.
        options: The given options of EKFAC.
        works: Whether a short run lowered the loss.
        settings: The lr, damping and refresh_every to use, as far as they differ from the given ones or the defaults.
        notes: Remarks, one line each.
    """

    summary: Summary
    batch_size: int
    steps: int
    first_loss: float
    last_loss: float
    noise_scale: float | None
    noise_scale_after: float | None
    reduction_ratio: float | None
    drift: float
    drift_steps: int
    captured_bytes: int
    prices: Prices
    trials: tuple[Trial, ...]
    trial_steps: int
    options: dict[str, Any]
    works: bool
    settings: dict[str, float | int]
    notes: tuple[str, ...]

    def python_line(self) -> str:
        """Return a line of Python that constructs EKFAC with these settings."""
        return f"opt = ekfac.{_call(self.options, self.settings)}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON, with None for non-finite numbers."""
        data: dict[str, Any] = _plain({**asdict(self), "options": out_of_groups(self.options)})
        data["blocks"] = data.pop("summary")["rows"]
        data["state_bytes"] = self.summary.bytes
        data["price_at"] = {str(interval): self.prices.at(interval) for interval in INTERVALS}
        return data

    def __str__(self) -> str:
        parts = [self._head(), self._blocks(), self._numbers(), self._price(), self._settings()]
        if self.notes:
            parts.append("\n".join(f"! {note}" for note in self.notes))
        return "\n\n".join(parts)

    def _head(self) -> str:
        numbers = sum(row.numbers for row in self.summary.rows)
        return (
            f"{numbers:,} parameters, batches of {self.batch_size}; {self.steps} probe steps took the loss "
            f"from {self.first_loss:.4g} to {self.last_loss:.4g}"
        )

    def _blocks(self) -> str:
        if len(self.summary.rows) <= LINES:
            table = str(self.summary)
        else:
            kinds = Counter(row.block.split()[0].rstrip(",") for row in self.summary.rows)
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            table = f"{len(self.summary.rows)} blocks: {counts}\n{str(self.summary).splitlines()[-1]}"
        return f"{table}; captured at most {human(self.captured_bytes)}"

    def _numbers(self) -> str:
        ratio = "none was predicted" if self.reduction_ratio is None else f"{self.reduction_ratio:.2f}"
        return "\n".join(
            [
                f"gradient noise scale       {_examples(self.noise_scale)} at first, "
                f"{_examples(self.noise_scale_after)} after the probe",
                f"actual over predicted drop {ratio}   (1: the quadratic model holds; below: steps too long for it)",
                f"drift of the basis         {self.drift:.2f} over {self.drift_steps} steps   (0: it still fits)",
            ]
        )

    def _price(self) -> str:
        seconds = [self.prices.at(interval) for interval in INTERVALS]
        rows = [
            ("basis updated every", [f"{interval}" for interval in INTERVALS]),
            ("ms per step", [f"{1e3 * s:.4g}" for s in seconds]),
            ("times Adam's", [f"{s / self.prices.adam:.3f}" for s in seconds]),
        ]
        lines = [f"{name:20}" + "".join(f"{cell:>8}" for cell in cells) for name, cells in rows]
        return "\n".join([*lines, f"Adam: {1e3 * self.prices.adam:.3g} ms"])

    def _settings(self) -> str:
        lrs = sorted({trial.lr for trial in self.trials})
        dampings = sorted({trial.damping for trial in self.trials})
        loss = {(trial.lr, trial.damping): f"{trial.loss:.4g}" for trial in self.trials}
        heads = [f"damping {d:.2g}" for d in dampings] if len(dampings) > 1 else [""]
        lines = [f"loss after {self.trial_steps} steps" + "".join(f"{head:>16}" for head in heads)]
        for lr in lrs:
            lines.append(f"{f'lr {lr:.2g}':>{len(lines[0]) - 16 * len(dampings)}}")
            lines[-1] += "".join(f"{loss.get((lr, d), ''):>16}" for d in dampings)
        if self.works:
            lines += [f"to use: {_call(self.options, self.settings)}", RULE]
        return "\n".join(line.rstrip() for line in lines)


def doctor(
    model: nn.Module,
    loader: Iterable[Any],
    loss: Callable[..., Tensor],
    *,
    steps: int = 50,
    trial_steps: int = 30,
    say: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> Diagnosis:
    """Try EKFAC on copies of a model for about fifty steps, and report what to expect and which settings to use.

    The model, its gradients and the random number generators are left as they were.

    Example:
        >>> import torch, ekfac
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> batches = [(torch.randn(32, 4), torch.randint(2, (32,))) for _ in range(10)]
        >>> found = ekfac.doctor(model, batches, torch.nn.functional.cross_entropy)
        >>> found.works, sorted(set(found.settings) - {"lr", "refresh_every"})
        (True, [])

    Args:
        model: The model, on the device to train on.
        loader: Batches: (inputs, target), a mapping with its target under "labels", "target" or "y", or inputs alone.
        loss: ``loss(output, target)``, or ``loss(output)`` for batches without a target: the mean over the batch's
            examples, or one number per example.
        steps: The number of probe steps.
        trial_steps: The number of steps in each of the short runs: with the given lr and others around it, and for
            rules that read damping, with other dampings.
        say: Called with a line about each stage.
        **options: Options of EKFAC to start from.

    Raises:
        ValueError: If the loader is empty, the loss is neither a number nor one per example, not finite or without
            gradient, or an option is wrong.
    """
    checks.integer("steps", steps, least=5)
    checks.integer("trial_steps", trial_steps, least=1)
    if not callable(loss):
        raise ValueError(f"loss={loss!r} must be a function of the model's output and the target")
    options = into_groups(options)
    checks.real("doctor()", model)
    if options.get("batch", Batch()).reduction != "mean":
        raise ValueError("doctor takes losses that are means over the examples: batch=Batch(reduction='mean')")
    if callable(options.get("damping")):
        raise ValueError("doctor varies the damping, so it must be a number, not a function")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with random_numbers_restored(device, loader), torch.enable_grad():
        say("reading batches")
        return _examine(Probe(model, loader, loss, steps, options), steps, trial_steps, say)


def _examine(probe: Probe, steps: int, trial_steps: int, say: Callable[[str], None]) -> Diagnosis:
    say("measuring the gradient's noise")
    first = probe.check()
    interval = steps // 5
    noise = probe.noise_scale(probe.model)
    say(f"taking {steps} probe steps")
    course = probe.course(steps, interval)
    trials = tuple(_trials(probe, trial_steps, first, say))
    say("timing steps")
    prices = probe.prices()
    ratio = course.actual / course.predicted if course.predicted > 0 else math.nan
    lr, damping = probe.middle()
    best = _chosen(trials, first, given=(lr, damping))
    works = best.loss < first
    settings: dict[str, float | int] = {}
    if works:
        every = probe.options.get("refresh_every") or INTERVAL
        given = {"lr": lr, "damping": damping, "refresh_every": every}
        found = {"lr": best.lr, "damping": best.damping, "refresh_every": _interval(prices, every)}
        settings = {name: value for name, value in found.items() if value != given[name]}
    return Diagnosis(
        summary=course.summary,
        batch_size=probe.batches[0].n,
        steps=steps,
        first_loss=course.first_loss,
        last_loss=course.last_loss,
        noise_scale=noise,
        noise_scale_after=course.noise_after,
        reduction_ratio=ratio if math.isfinite(ratio) else None,
        drift=course.drift,
        drift_steps=interval,
        captured_bytes=course.captured_bytes,
        prices=prices,
        trials=trials,
        trial_steps=trial_steps,
        options=probe.options,
        works=works,
        settings=settings,
        notes=tuple(_notes(trials, best, first, ratio, course.last_loss)),
    )


def _trials(probe: Probe, steps: int, first: float, say: Callable[[str], None] = lambda line: None) -> list[Trial]:
    """Try the given settings and those around them in short runs, and more if the best is on the edge."""
    lr, damping = probe.middle()
    done: dict[tuple[int, int], Trial] = {}
    damps = probe.damps()
    wanted = {(i, j) for i in (-1, 0, 1) for j in ((-1, 0, 1) if damps else (0,))}
    for _ in range(1 + FURTHER):
        for i, j in sorted(wanted - set(done)):
            changes = {"lr": lr * LR_FACTOR**i} if i else {}
            changes |= {"damping": damping * DAMPING_FACTOR**j} if j else {}
            with_what = ", ".join(f"{name} {value:.2g}" for name, value in changes.items()) or "the given settings"
            say(f"short run {len(done) + 1}: {steps} steps with {with_what}")
            done[i, j] = probe.trial(steps, **changes)
        best = _chosen(done.values(), first)
        i, j = next(place for place, trial in done.items() if trial is best)
        wanted = {(i - 1, j), (i + 1, j), *([(i, j - 1), (i, j + 1)] if damps else [])}
    return list(done.values())


def _chosen(trials: Iterable[Trial], first: float, given: tuple[float, float] | None = None) -> Trial:
    """Choose the given lr and damping if they do well, else the trial with the lowest loss.

    Ties go to the most damping, then to the smallest lr.
    """
    trials = list(trials)
    least = min(trial.loss for trial in trials)
    fall = max(0.0, first - least)
    kept = [t for t in trials if (t.lr, t.damping) == given and t.loss <= least + KEPT * fall]
    if kept:
        return kept[0]
    bar = least + EQUAL * fall if math.isfinite(least) else math.inf
    return min((t for t in trials if t.loss <= bar), key=lambda t: (-t.damping, t.lr))


def _interval(prices: Prices, given: int | None = None) -> int:
    """Choose the given interval if refreshes are cheap enough at it, else the shortest at which they are."""
    if given is not None and prices.at(given) <= (1 + BEARABLE) * prices.plain:
        return given
    for interval in INTERVALS:
        if prices.at(interval) <= (1 + AFFORDABLE) * prices.plain:
            return interval
    return INTERVALS[-1]


def _notes(trials: tuple[Trial, ...], best: Trial, first: float, ratio: float, last: float) -> list[str]:
    """Return remarks, one line each."""
    notes = []
    if not best.loss < first:
        notes.append("no setting lowered the loss: try a smaller lr or more damping, or look at data and loss")
        return notes
    lost = sum(math.isinf(t.loss) or t.loss > first for t in trials)
    if lost:
        notes.append(f"{lost} of the {len(trials)} short runs ended above their initial loss")
    if not last < first:
        notes.append("with the given lr and damping the loss did not decrease over the probe steps")
    elif ratio < 0.25:
        notes.append("the loss decreases far less than the quadratic model predicts: more damping, or a smaller lr")
    return notes


def _call(options: dict[str, Any], settings: dict[str, float | int]) -> str:
    """Return the call of EKFAC with these options and settings, as they were tried."""
    wanted = {**into_groups(options), **settings}
    paper = {name for name, value in PAPER.items() if wanted.get(name, ...) == value}
    if len(set(PAPER) - paper) <= len(settings):
        rest = {name: value for name, value in wanted.items() if name not in paper}
        return f"EKFAC(model, **ekfac.PAPER | {_written(rest)})" if rest else "EKFAC(model, **ekfac.PAPER)"
    rest = {name: value for name, value in wanted.items() if (name, value) != ("damping", DAMPING)}
    return f"EKFAC({', '.join(['model', *(f'{name}={_number(value)}' for name, value in rest.items())])})"


def _written(options: dict[str, Any]) -> str:
    return "{" + ", ".join(f'"{name}": {_number(value)}' for name, value in options.items()) + "}"


def _number(value: Any) -> str:
    if isinstance(value, Group):
        return f"ekfac.{value!r}"
    return f"{value:.2g}" if isinstance(value, float) else repr(value)


def _examples(scale: float | None) -> str:
    if scale is None:
        return "unknown"
    return "more examples than were read" if math.isinf(scale) else f"{scale:.3g} examples"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
