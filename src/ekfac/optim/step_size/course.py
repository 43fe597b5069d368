"""The built-in course of a training, for users who set none: how the rate rises and falls, and the average of weights.

The rate warms up, then falls slowly, or along a cosine to a known end. The average of the weights, which the model
shows between steps, does what a falling rate does, without a known end.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ekfac import checks
from ekfac.optim.state.validation import check_count, check_tensor, refuse

#: Steps of warm-up where a rate is named and an end is known.
WARMUP = 100
#: Fewest and most steps over which the built-in rate rises, and how many columns are worth one of them: the first bases
#: and second moments rest on few batches, and wide ones need more.
RISE = (10, 100, 8)
#: The rate of networks up to ``NARROW`` wide; wider ones get less, by the square root.
LARGEST_RATE = 0.02
NARROW = 64
#: Without a known end the rate falls as 1 / sqrt(1 + t / ANNEAL).
ANNEAL = 100.0
#: k: the weights after step t count as t^k, so that the average is over about the last ninth of the training so far.
POWER = 8
#: Running statistics of batch-norm, which belong to the weights that they were taken with.
VARIANCE = "running_var"
STATISTICS = ("running_mean", VARIANCE)


def width_of(weights: Iterable[Tensor]) -> float:
    """Return how wide a network is: the geometric mean, over all its weights, of their layers' inputs (or channels)."""
    matrices = [p for p in weights if p.is_floating_point() and p.dim() > 1 and p.numel()]
    size = sum(p.numel() for p in matrices)
    return math.exp(sum(p.numel() / size * math.log(p.shape[1]) for p in matrices))


def usual_rate(width: float) -> float:
    """Return the rate for a network: 0.02 sqrt(64 / width), at most 0.02.

    A step moves every weight by about the same amount, but what that does to an output grows with how many weights the
    output sums over.
    """
    return LARGEST_RATE * min(1.0, math.sqrt(NARROW / width))


def usual_warmup(width: float) -> int:
    """Return the steps over which the rate of a network rises."""
    least, most, columns = RISE
    return min(most, max(least, round(width / columns)))


@dataclass(frozen=True)
class RateCourse:
    """What lr is multiplied by over the steps t.

    Attributes:
        warmup: Steps of linear warm-up.
        anneal: Without ``total_steps``, fall as 1 / sqrt(1 + t / anneal); None for no fall.
        total_steps: Fall to zero over so many steps along a cosine.
        automatic: Nobody has asked for it: a rate that somebody names has no course.
    """

    warmup: int = 0
    anneal: float | None = None
    total_steps: int | None = None
    automatic: bool = False

    def __post_init__(self) -> None:
        checks.integer("warmup", self.warmup, least=0)
        if self.anneal is not None:
            checks.number("anneal", self.anneal, above=0)
        if self.total_steps is not None:
            checks.integer("total_steps", self.total_steps, least=1)

    def factor(self, t: int) -> float:
        """Return the factor of the step after t applied ones."""
        warmup = self.warmup if self.total_steps is None else min(self.warmup, max(1, self.total_steps // 10))
        rise = min(1.0, (t + 1) / warmup) if warmup else 1.0
        if self.total_steps is not None:
            return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, t / self.total_steps)))
        return rise if self.anneal is None else rise * (1 + t / self.anneal) ** -0.5


def course_of(decay_steps: float | str | None, total_steps: int | None, warmup: int | None) -> RateCourse:
    """Return the built-in course of the rate: where the user has given neither a rate nor one, warm-up and a slow fall.

    Args:
        decay_steps: See :class:`~ekfac.optim.options.StepSize`.
        total_steps: The length of the training, if it is known.
        warmup: Steps of the built-in warm-up; None where a rate is given, or the rule has none.
    """
    if total_steps is not None:
        return RateCourse(warmup or WARMUP, None, total_steps)
    if isinstance(decay_steps, str):
        return RateCourse() if warmup is None else RateCourse(warmup, ANNEAL, automatic=True)
    return RateCourse(0, decay_steps)


class WeightAverage:
    r"""Trains weights z and shows their running average x.

    .. math:: x \leftarrow x + c_t (z - x), \quad c_t = (k + 1) / (t + k + 1)

    The parameters hold x from the end of a step to the model's next forward with gradients: what is evaluated, saved
    and exported is the average. From there to the end of the next step they hold z, with which gradients are computed.
    What is kept is d = z - x, so a change that somebody makes to the weights in between changes both.

    A model that is trained by other methods than its forward has no such moment, and is not averaged. Neither are
    parameters in half precision or sharded over ranks.

    Args:
        model: The model.
        wanted: Average; None for where the built-in course has the rate.
    """

    def __init__(self, model: nn.Module, wanted: bool | None) -> None:
        self.wanted = wanted
        self._model = weakref.ref(model)
        #: d = z - x of parameters, and of running statistics by their module.
        self.offsets: dict[nn.Parameter, Tensor] = {}
        self.statistics: dict[tuple[nn.Module, str], Tensor] = {}
        #: Whether the parameters hold z.
        self.training = False
        #: Whether this model can be averaged: None until its first step.
        self.possible: bool | None = None
        #: Of the step under way: what :attr:`possible` is after it, the parameters whose average takes it in, and c.
        self._possible_now: bool | None = None
        self.averaged: list[nn.Parameter] = []
        self.weight = 0.0
        #: Whether there was a forward since the last step, and it was in training mode; None if there was none.
        self._forward_in_training: bool | None = None
        self._trains_in_eval = False
        #: Parameters in whose update the offsets hold d - z.
        self._in_update: Sequence[nn.Parameter] = ()
        #: x of the running statistics while their modules hold z.
        self._shown: dict[tuple[nn.Module, str], Tensor] = {}
        #: The modules that keep running statistics; looked for at the first step.
        self._norms: list[nn.Module] | None = None

    def before_forward(self) -> None:
        """Put z into the parameters, as the model's forward is about to be called with gradients.

        Not in evaluation mode, where many forget ``no_grad``, unless the model has been seen to be trained in it.
        """
        model = self._model()
        trains = model is not None and model.training
        self._forward_in_training = trains or bool(self._forward_in_training)
        if not self.training and model is not None and (trains or self._trains_in_eval):
            self._to_training()

    @torch.no_grad()
    def _to_training(self) -> None:
        self.training = True
        # What is frozen, or has another shape by now, stays as it is.
        self.offsets = {p: d for p, d in self.offsets.items() if p.requires_grad and p.shape == d.shape}
        if self.offsets:
            torch._foreach_add_(list(self.offsets), self._moved())
        places = [place for place in self.statistics if place[0].training]
        if places:
            buffers = [getattr(module, name) for module, name in places]
            self._shown = dict(zip(places, torch._foreach_add(buffers, 0), strict=True))
            offsets = [self.statistics[place].to(b) for place, b in zip(places, buffers, strict=True)]
            torch._foreach_add_(buffers, offsets)
            torch._foreach_clamp_min_([b for b, (_, name) in zip(buffers, places, strict=True) if name == VARIANCE], 0)

    def _moved(self) -> list[Tensor]:
        """Return the offsets where their parameters are, which the user may have moved or cast."""
        for p, d in self.offsets.items():
            if d.device != p.device or d.dtype != p.dtype:
                self.offsets[p] = d.to(p)
        return list(self.offsets.values())

    @torch.no_grad()
    def rest(self) -> None:
        """Show x, after a step that was refused too."""
        if self._in_update:
            self.after_update(self._in_update)
        if self.training:
            self.training = False
            if self.offsets:
                torch._foreach_sub_(list(self.offsets), self._moved())
            if self._shown:
                torch._foreach_copy_(
                    [getattr(module, name) for module, name in self._shown], list(self._shown.values())
                )
            self._shown = {}

    # --- a step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_step(self, parameters: Iterable[nn.Parameter], t: int) -> None:
        """Make sure that the parameters hold z; nothing is decided, as the step may yet be refused.

        Args:
            parameters: Those that are to be averaged.
            t: How many steps there were before.
        """
        wanted = dict.fromkeys(parameters)
        self.averaged, self.weight, self._possible_now = [], 0.0, self.possible
        if not (wanted or self.offsets):
            return
        if self.possible is None:
            self._possible_now = self._forward_in_training is not None
        if not self._possible_now:
            return
        if not self.training:
            self._to_training()
        self.offsets = {p: d for p, d in self.offsets.items() if p in wanted}  # others go on from z
        self.averaged = [p for p in wanted if p.grad is not None and p.dtype in (torch.float32, torch.float64)]
        self.weight = (POWER + 1) / (t + POWER + 1)
        for p in self.averaged:
            if p not in self.offsets:
                self.offsets[p] = torch.zeros_like(p)

    @torch.no_grad()
    def before_update(self, averaged: Sequence[nn.Parameter]) -> None:
        """Prepare to see by how much the step moves the parameters."""
        if averaged:
            self._in_update = averaged
            torch._foreach_sub_([self.offsets[p] for p in averaged], list[Tensor](averaged))

    @torch.no_grad()
    def after_update(
        self, averaged: Sequence[nn.Parameter], weight: float | Tensor = 0.0, ok: Tensor | None = None
    ) -> None:
        """Take the new z into the average.

        Args:
            averaged: As in :meth:`before_update`.
            weight: c.
            ok: 0 on the device in a step that changed nothing; None where that is known.
        """
        if averaged:
            self._in_update = ()
            offsets = [self.offsets[p] for p in averaged]
            torch._foreach_add_(offsets, list(averaged))
            remaining = 1 - weight if ok is None else 1 - weight * ok
            torch._foreach_mul_(offsets, remaining.to(offsets[0]) if isinstance(remaining, Tensor) else remaining)

    @torch.no_grad()
    def end_step(self, done: bool | None, ok: Tensor | None) -> None:
        """Take the new running statistics into their average, d <- (1 - c) (z - x), and show everything.

        Args:
            done: Whether the step was taken: False if it was skipped, None if there was no gradient.
            ok: 0 on the device in a step that changed nothing; None where that is known.
        """
        seen, self._forward_in_training = self._forward_in_training, None
        if done is not None:
            self.possible = self._possible_now
        if not self.offsets:
            return
        self._trains_in_eval |= seen is False
        self._norms = norms_of(self._model()) if self._norms is None else self._norms
        for module in self._norms:
            for name in STATISTICS if module.training else ():
                if (module, name) not in self._shown:
                    self.statistics[module, name] = torch.zeros_like(getattr(module, name))
        if self._shown:
            buffers = [getattr(module, name) for module, name in self._shown]
            offsets = torch._foreach_sub(buffers, list(self._shown.values()))
            weight = self.weight if done else 0.0
            remaining = 1 - weight if ok is None else (1 - weight * ok).to(offsets[0])
            torch._foreach_mul_(offsets, remaining)
            torch._foreach_sub_(buffers, offsets)
            self.statistics.update(zip(self._shown, offsets, strict=True))
            self._shown = {}
        torch._foreach_sub_(list(self.offsets), list(self.offsets.values()))
        self.training = False

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, names: Mapping[nn.Parameter, str]) -> dict[str, Any] | None:
        """Return what is kept, as plain data; None if it is nothing."""
        if self.possible is None and not self.offsets:
            return None
        model = self._model()
        modules = {} if model is None else {module: name for name, module in model.named_modules()}
        offsets = {names[p]: d for p, d in self.offsets.items() if p in names}
        statistics = {f"{modules[m]}.{name}": d for (m, name), d in self.statistics.items() if m in modules}
        return {
            "possible": bool(self.possible),
            "trains_in_eval": self._trains_in_eval,
            "training": self.training,
            "offsets": offsets,
            "statistics": statistics,
            "entries": len(offsets) + len(statistics),
        }

    def load(self, saved: Mapping[str, Any] | None, parameters: Mapping[str, nn.Parameter]) -> Callable[[], None]:
        """Check what :meth:`save` returned; nothing changes before what this returns is called."""
        offsets: dict[nn.Parameter, Tensor] = {}
        statistics: dict[tuple[nn.Module, str], Tensor] = {}
        saved = {} if saved is None else saved
        if not isinstance(saved, Mapping):
            refuse("'average'", f"is of type {type(saved).__name__}. Allowed: a dict")
        flags = {name: saved.get(name, False) for name in ("possible", "trains_in_eval", "training")}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                refuse(f"'average', {name!r}", f"is {flag!r}. Allowed: True or False")
        for name, d in dict(saved.get("offsets") or {}).items():
            if name not in parameters:
                refuse("'average', 'offsets'", f"{name!r} is no parameter of this model")
            p = parameters[name]
            _check(f"parameter '{name}', 'average'", d, p)
            offsets[p] = d.detach().to(p, copy=True)
        model = self._model()
        modules = {} if model is None else dict(model.named_modules())
        for place, d in dict(saved.get("statistics") or {}).items():
            owner, _, name = str(place).rpartition(".")
            module = modules.get(owner)
            buffer = getattr(module, name, None) if name in STATISTICS else None
            if module is None or not isinstance(buffer, Tensor):
                refuse("'average', 'statistics'", f"{place!r} is no running statistic of this model")
            _check(f"buffer '{place}', 'average'", d, buffer)
            statistics[module, name] = d.detach().to(buffer, copy=True)
        found, entries = len(offsets) + len(statistics), saved.get("entries", 0)
        check_count("'average', 'entries'", entries)
        if found < entries:
            refuse("'average'", f"lacks {entries - found} of {entries} entries")

        def take() -> None:
            self.offsets, self.statistics, self._shown = offsets, statistics, {}
            self.possible = flags["possible"] if saved else None
            self._trains_in_eval, self.training = flags["trains_in_eval"], flags["training"]

        return take


def norms_of(model: nn.Module | None) -> list[nn.Module]:
    """Return the modules of a model that keep running statistics."""
    modules = [] if model is None else list(model.modules())
    return [m for m in modules if isinstance(m, _NormBase) and isinstance(m.running_mean, Tensor)]


def _check(where: str, offset: Any, like: Tensor) -> None:
    check_tensor(where, "offset", offset, tuple(like.shape), like.dtype)
    if not offset.is_floating_point():
        refuse(where, f"is of {offset.dtype}. Allowed: floating point")
