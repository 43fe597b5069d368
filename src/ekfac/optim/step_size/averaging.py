"""The average of the weights, which the model shows between steps: what a falling rate does, without a known end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ekfac.optim.state.validation import check_count, check_tensor, refuse

#: k: the weights after step t count as t^k, so that the average is over about the last ninth of the training so far.
POWER = 8
#: Running statistics of batch-norm, which belong to the weights that they were taken with.
VARIANCE = "running_var"
STATISTICS = ("running_mean", VARIANCE)


def average_weight(t: int) -> float:
    """Return c, the weight of the newest weights in the average after t earlier steps."""
    return (POWER + 1) / (t + POWER + 1)


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
        self._forward_seen = False
        self._trains_in_eval = False
        #: x of the running statistics while their modules hold z.
        self._shown: dict[tuple[nn.Module, str], Tensor] = {}
        self._known_norms: list[nn.Module] | None = None

    def before_forward(self) -> None:
        """Put z into the parameters, as the model's forward is about to be called with gradients.

        Not in evaluation mode, where many forget ``no_grad``, unless the model has been seen to be trained in it.
        """
        self._forward_seen = True
        model = self._model()
        if not self.training and model is not None and (model.training or self._trains_in_eval):
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
        """Show x."""
        if self.training:
            self.training = False
            if self.offsets:
                torch._foreach_sub_(list(self.offsets), self._moved())
            if self._shown:
                torch._foreach_copy_(
                    [getattr(module, name) for module, name in self._shown], list(self._shown.values())
                )
            self._shown = {}

    @torch.no_grad()
    def begin_step(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Make sure that the parameters hold z.

        Returns:
            Those that are averaged, for the other methods.
        """
        wanted = dict.fromkeys(parameters)
        if not (wanted or self.offsets):
            return []
        if self.possible is None:
            self.possible = self._forward_seen
        if not self.possible:
            return []
        if not self.training:
            self._trains_in_eval = self._trains_in_eval or self._forward_seen
            self._to_training()
        self._forward_seen = False
        self.offsets = {p: d for p, d in self.offsets.items() if p in wanted}  # others go on from z
        averaged = [p for p in wanted if p.grad is not None and p.dtype in (torch.float32, torch.float64)]
        for p in averaged:
            if p not in self.offsets:
                self.offsets[p] = torch.zeros_like(p)
        return averaged

    @torch.no_grad()
    def before_update(self, averaged: Sequence[nn.Parameter]) -> None:
        """Prepare to see by how much the step moves the parameters."""
        if averaged:
            torch._foreach_sub_([self.offsets[p] for p in averaged], list[Tensor](averaged))

    @torch.no_grad()
    def after_update(
        self, averaged: Sequence[nn.Parameter], weight: float | Tensor = 0.0, ok: Tensor | None = None
    ) -> None:
        """Take the new z into the average.

        Args:
            averaged: What :meth:`begin_step` returned.
            weight: c.
            ok: 0 on the device in a step that changed nothing; None where that is known.
        """
        if averaged:
            offsets = [self.offsets[p] for p in averaged]
            torch._foreach_add_(offsets, list(averaged))
            remaining = 1 - weight if ok is None else 1 - weight * ok
            torch._foreach_mul_(offsets, remaining.to(offsets[0]) if isinstance(remaining, Tensor) else remaining)

    @torch.no_grad()
    def end_step(self, weight: float, ok: Tensor | None) -> None:
        """Take the new running statistics into their average, and show everything; 0 for a step that was skipped."""
        self._average_statistics(1 - weight if ok is None else 1 - weight * ok)
        self.rest()

    def _average_statistics(self, remaining: float | Tensor) -> None:
        """Do the same with the running statistics: d <- (1 - c) (z - x), and x = z - d is shown."""
        for module in self._norms():
            for name in STATISTICS if module.training else ():
                if (module, name) not in self._shown:
                    self.statistics[module, name] = torch.zeros_like(getattr(module, name))
        if self._shown:
            buffers = [getattr(module, name) for module, name in self._shown]
            offsets = torch._foreach_sub(buffers, list(self._shown.values()))
            torch._foreach_mul_(offsets, remaining.to(offsets[0]) if isinstance(remaining, Tensor) else remaining)
            torch._foreach_sub_(buffers, offsets)
            self.statistics.update(zip(self._shown, offsets, strict=True))
            self._shown = {}

    def _norms(self) -> list[nn.Module]:
        """Return the modules that keep running statistics."""
        if self._known_norms is None:
            model = self._model()
            modules = [] if model is None else list(model.modules())
            self._known_norms = [m for m in modules if isinstance(m, _NormBase) and isinstance(m.running_mean, Tensor)]
        return self._known_norms

    def model_changed(self) -> None:
        """Look for running statistics anew."""
        self._known_norms = None

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


def _check(where: str, offset: Any, like: Tensor) -> None:
    check_tensor(where, "offset", offset, tuple(like.shape), like.dtype)
    if not offset.is_floating_point():
        refuse(where, f"is of {offset.dtype}. Allowed: floating point")
