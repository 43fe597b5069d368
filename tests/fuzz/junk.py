"""Values that have no business where they turn up."""

from __future__ import annotations

import copy
import random
from typing import Any

JSON: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**70, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "abc", "1e-3", "\x00", "é\u202e", "../../etc", "<script>alert(1)</script>", "x" * 5000),
    *([], [1], [[]], {}, {"a": 1}, {"a": {"b": [None]}}),
)


def paths(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested data, its root included."""
    found = [at]
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        found += paths(value, (*at, key))
    return found


def mutated(data: Any, chance: random.Random, values: tuple[Any, ...] = JSON) -> tuple[Any, str]:
    """Change one place of nested data: another value, a missing key, a strange one."""
    data = copy.deepcopy(data)
    at = chance.choice(paths(data))
    if not at:
        return copy.deepcopy(chance.choice(values)), "all of it"
    inner = data
    for key in at[:-1]:
        inner = inner[key]
    how = chance.choice(("replace", "replace", "replace", "remove", "add"))
    if how == "replace":
        inner[at[-1]] = copy.deepcopy(chance.choice(values))
    elif how == "remove":
        del inner[at[-1]]
    elif isinstance(inner, dict):
        inner[chance.choice(("", "x", "epoch", "__class__"))] = copy.deepcopy(chance.choice(values))
    else:
        inner.insert(0, copy.deepcopy(chance.choice(values)))
    return data, f"{how} {'.'.join(map(str, at))}"
