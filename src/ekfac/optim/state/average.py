"""The weight average in checkpoints: unsharded, however parameters are laid out over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.curvature.real import real_shape
from ekfac.optim.distributed.processes import Processes
from ekfac.optim.distributed.shards import held, piece_of, whole_of
from ekfac.optim.state.validation import check_count, check_tensor, refuse
from ekfac.optim.step_size.running_statistics import STATISTICS
from ekfac.optim.step_size.weight_average import PATIENCE, WeightAverage

#: What is true or false of an average; older checkpoints lack some.
FLAGS = ("possible", "trains_in_eval", "training", "alternates", "previews")


def save_average(
    average: WeightAverage, names: Mapping[nn.Parameter, str], processes: Processes
) -> dict[str, Any] | None:
    """Return the average's state as plain data; None if there is none. With several processes, all must call this.

    Running statistics, which every process computes from its own batches, are those of the first process. Between
    forward and step the modules' own have already changed; what is saved is their current offset from the average.
    """
    if average.possible is None and not average.offsets:
        return None
    model = average.model
    modules = {} if model is None else {module: name for name, module in model.named_modules()}
    offsets = {names[p]: whole_of(average.offsets[p], p) for p in names if p in average.offsets}
    now = {place: getattr(*place) - x for place, x in average.statistics.shown.items()}
    found = {**{place: d.clone() for place, d in average.statistics.offsets.items()}, **now}
    statistics = {f"{modules[m]}.{name}": d for (m, name), d in found.items() if m in modules}
    if processes.size > 1:
        statistics = processes.gather({place: d.cpu() for place, d in statistics.items()})[0]
    return {
        "possible": bool(average.possible),
        "trains_in_eval": average.trains_in_eval,
        "alternates": average.alternates,
        "training": average.training,
        "previews": average.previews >= PATIENCE,
        "resting": [names[p] for p in names if average.training and p in average.resting],
        "offsets": offsets,
        "statistics": statistics,
        "entries": len(offsets) + len(statistics),
    }


def load_average(
    average: WeightAverage, saved: Mapping[str, Any] | None, parameters: Mapping[str, nn.Parameter]
) -> Callable[[], None]:
    """Check what :func:`save_average` returned; return a function that loads it."""
    offsets: dict[nn.Parameter, Tensor] = {}
    statistics: dict[tuple[nn.Module, str], Tensor] = {}
    saved = {} if saved is None else saved
    if not isinstance(saved, Mapping):
        refuse("'average'", f"is of type {type(saved).__name__}. Allowed: a dict")
    flags = {name: saved.get(name, False) for name in FLAGS}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            refuse(f"'average', {name!r}", f"is {flag!r}. Allowed: True or False")
    for part in ("offsets", "statistics"):
        if not isinstance(saved.get(part) or {}, Mapping):
            refuse(f"'average', {part!r}", f"is of type {type(saved[part]).__name__}. Allowed: a dict")
    for name, d in dict(saved.get("offsets") or {}).items():
        if name not in parameters:
            refuse("'average', 'offsets'", f"{name!r} is no parameter of this model")
        p = parameters[name]
        _check(f"parameter '{name}', 'average'", d, real_shape(p), p.dtype.to_real())
        offsets[p] = piece_of(d.detach(), p).to(held(p.detach()), copy=True)
    resting = saved.get("resting", [])  # missing in older checkpoints
    if not isinstance(resting, list) or not all(isinstance(name, str) and name in parameters for name in resting):
        refuse("'average', 'resting'", f"is {resting!r}. Allowed: names of parameters")
    modules = {} if average.model is None else dict(average.model.named_modules())
    for place, d in dict(saved.get("statistics") or {}).items():
        owner, _, name = str(place).rpartition(".")
        module = modules.get(owner)
        buffer = getattr(module, name, None) if name in STATISTICS else None
        if module is None or not isinstance(buffer, Tensor):
            refuse("'average', 'statistics'", f"{place!r} is no running statistic of this model")
        _check(f"buffer '{place}', 'average'", d, tuple(buffer.shape), buffer.dtype)
        statistics[module, name] = d.detach().to(buffer, copy=True)
    found, entries = len(offsets) + len(statistics), saved.get("entries", 0)
    check_count("'average', 'entries'", entries)
    if found < entries:
        refuse("'average'", f"lacks {entries - found} of {entries} entries")

    def take() -> None:
        possible = flags["possible"] if saved else None
        others = {name: flags[name] for name in FLAGS if name != "possible"}
        average.adopt(offsets, statistics, possible, {parameters[name] for name in resting}, **others)

    return take


def _check(where: str, offset: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_tensor(where, "offset", offset, shape, dtype)
    if not offset.is_floating_point():
        refuse(where, f"is of {offset.dtype}. Allowed: floating point")
