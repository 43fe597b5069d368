"""Validates a run's records and settings that were read from a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Larger integers mean damage: no count in a record comes near, and not every reader could represent them.
_MOST = 2**63


def number(value: Any) -> bool:
    """Return whether this is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < _MOST if isinstance(value, int) else math.isfinite(value)


def check_record(record: Any, epoch: int) -> dict[str, Any]:
    """Return a record if it is a valid one of that epoch.

    Raises:
        ValueError: If it is not; the message says why.
    """
    if not isinstance(record, dict):
        raise ValueError(f"a record must be an object, not {type(record).__name__}")
    for name in ("epoch", "step"):
        if not number(record.get(name)) or not isinstance(record[name], int) or record[name] < 0:
            raise ValueError(f"{name} must be an integer of at least 0, not {record.get(name)!r}")
    if record["epoch"] != epoch:
        raise ValueError(f"the record is of epoch {record['epoch']}, not {epoch}")
    if not isinstance(record.get("diverged"), bool):
        raise ValueError(f"diverged must be true or false, not {record.get('diverged')!r}")
    if not number(record.get("seconds")) or record["seconds"] < 0:
        raise ValueError(f"seconds must be a number of at least 0, not {record.get('seconds')!r}")
    if "train_loss" not in record:
        raise ValueError("there is no train_loss")
    for name, value in record.items():
        _check_value(name, value)
    return record


def _check_value(name: str, value: Any) -> None:
    values = value if isinstance(value, Mapping) else {name: value}
    for inner, one in values.items():
        if one is not None and not isinstance(one, bool) and not number(one):
            raise ValueError(f"{inner} must be a finite number or null, not {one!r}")


def check_history(history: Any) -> list[dict[str, Any]]:
    """Return a list of records if each is valid and of its epoch.

    Raises:
        ValueError: If not.
    """
    if not isinstance(history, list):
        raise ValueError(f"a history must be a list, not {type(history).__name__}")
    return [check_record(record, epoch) for epoch, record in enumerate(history)]


def check_about(about: Any) -> dict[str, Any]:
    """Return the information about a run, if it is valid.

    Raises:
        ValueError: If not.
    """
    if not isinstance(about, dict):
        raise ValueError(f"about must be an object, not {type(about).__name__}")
    for name in ("versions", "machine", "examples", "floor"):
        if not isinstance(about.get(name, {}), dict):
            raise ValueError(f"about: {name} must be an object, not {about[name]!r}")
    for name in ("examples", "floor"):
        for split, value in about.get(name, {}).items():
            if not number(value):
                raise ValueError(f"about: {name}: {split} must be a number, not {value!r}")
    for name in ("parameters", "race_seconds"):
        if name in about and not number(about[name]):
            raise ValueError(f"about: {name} must be a number, not {about[name]!r}")
    for name in ("command", "data_dir", "data_sha256"):
        if not isinstance(about.get(name, ""), str):
            raise ValueError(f"about: {name} must be text, not {about[name]!r}")
    return about
