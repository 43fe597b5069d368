"""Checkpoints of a model that was in a wrapper then, and is not now, or the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

#: What wrappers call the model that they hold: DataParallel and DDP, torch.compile, FSDP, activation checkpointing.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def bare(name: str) -> str:
    """Return a parameter's name without what wrappers have added."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def named_as_here(model: nn.Module, offered: Mapping[str, Any], state_dict: Any) -> Any:
    """Return a state dict under the names that the model has now, if only wrappers make the difference; else as it is.

    Args:
        model: The model.
        offered: The names that the optimizer was given.
        state_dict: What a checkpoint holds; nothing of it has been checked.
    """
    saved = saved_in(state_dict)
    theirs = saved.get("parameters") if isinstance(saved, Mapping) else None
    if (
        not isinstance(theirs, Mapping)
        or theirs.keys() == offered.keys()
        or not all(isinstance(n, str) for n in theirs)
    ):
        return state_dict
    same = sorted(map(bare, theirs)) == sorted(map(bare, offered)) and len({*map(bare, offered)}) == len(offered)
    if not same:
        return state_dict
    here = {bare(n): n for n in (*dict(model.named_parameters()), *dict(model.named_buffers()))}

    def new(name: Any) -> Any:
        return here.get(bare(name), name) if isinstance(name, str) else name

    def keys(found: Any) -> Any:
        return {new(name): value for name, value in found.items()} if isinstance(found, Mapping) else found

    def each(found: Any) -> Any:
        return [new(name) for name in found] if isinstance(found, list) else found

    def entries(found: Any, name: str) -> Any:
        if not isinstance(found, list):
            return found
        return [{**e, name: each(e[name])} if isinstance(e, Mapping) and name in e else e for e in found]

    def parts(found: Any, changes: Mapping[str, Any]) -> Any:
        known = isinstance(found, Mapping)
        return {**found, **{n: f(found[n]) for n, f in changes.items() if n in found}} if known else found

    def listed(found: Any) -> Any:
        return entries(found, "parameters")

    average = {"offsets": keys, "statistics": keys, "resting": each}
    named = parts(saved, {
        "parameters": keys, "silent": each, "blocks": listed, "put_away": listed,
        "average": lambda found: parts(found, average),
    })  # fmt: skip
    found = {**state_dict, "ekfac": named}
    if "param_groups" in found:
        found["param_groups"] = entries(found["param_groups"], "param_names")
    elif "state" in found:
        found["state"] = keys(found["state"])
    return found


def saved_in(state_dict: Any) -> Any:
    """Return what a state dict holds under "ekfac": beside the rest, or where torch has put it, in the first group."""
    if not isinstance(state_dict, Mapping):
        return None
    groups = state_dict.get("param_groups") or [{}]
    inside = groups[0].get("ekfac") if isinstance(groups, list) and isinstance(groups[0], Mapping) else None
    return state_dict.get("ekfac", inside)
