"""Loads checkpoints across wrappers: the model was in one when saved and is not now, or the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

#: Names by which wrappers hold the model: DataParallel and DDP, torch.compile, FSDP, activation checkpointing.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def bare(name: str) -> str:
    """Strip wrappers' prefixes from a parameter's name."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def named_as_here(model: nn.Module, offered: Mapping[str, Any], state_dict: Any) -> Any:
    """Rename a state dict's parameters to the model's current names, if only wrappers' prefixes differ.

    Args:
        model: The model.
        offered: The names of the optimizer's parameters.
        state_dict: An unchecked checkpoint.
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
    """Return the entry "ekfac" of a state dict: at the top, or in the first group, where torch may have moved it."""
    if not isinstance(state_dict, Mapping):
        return None
    groups = state_dict.get("param_groups") or [{}]
    inside = groups[0].get("ekfac") if isinstance(groups, list) and isinstance(groups[0], Mapping) else None
    return state_dict.get("ekfac", inside)
