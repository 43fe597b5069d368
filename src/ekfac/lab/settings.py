"""Settings from a YAML file, overridden by those on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import LabError


def read_settings(file: str | Path) -> dict[str, Any]:
    """Read settings: the names of ``ekfac train``'s options, and ``options`` for those of the optimizer.

    Raises:
        LabError: If it cannot be read, or is not a mapping of known names.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise LabError("--config needs PyYAML: pip install 'ekfac[lab]'") from None
    try:
        found = _numbers(yaml.safe_load(Path(file).read_bytes()))  # bytes, so that the locale does not matter
    except (OSError, ValueError, TypeError, LookupError, RecursionError, yaml.YAMLError) as error:
        # YAML's constructors (of dates, numbers) raise various exceptions.
        raise LabError(f"config {file} cannot be read: {_reason(error)}") from error
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise LabError(f"config {file} must be a mapping of settings: 'lr: 0.01'")
    settings = {name.replace("-", "_"): value for name, value in found.items()}
    known = {item.name for item in fields(TrainConfig)}
    for name in settings:
        if name not in known:
            raise LabError(f"config {file}: unknown setting {name!r}; known: {', '.join(sorted(known))}")
    if "plugins" in settings:
        raise LabError(f"config {file}: a file cannot load plugins; pass --plugin on the command line")
    options = settings.get("options", {})
    if not isinstance(options, Mapping):
        raise LabError(f"config {file}: options must be a mapping, not {options!r}")
    if "options" in settings:
        settings["options"] = {str(name): value for name, value in options.items()}
    return settings


def _reason(error: Exception) -> str:
    """Describe in one line what is wrong with a file, and where."""
    problem, place = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem and place is not None:
        return f"line {place.line + 1}, column {place.column + 1}: {problem}"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _numbers(value: Any) -> Any:
    """Convert numbers that YAML 1.1 reads as text, such as 1e-3 without a point."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: _numbers(item) for name, item in value.items()}
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def with_file(file: str | Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge given settings over those of a file, if there is one; options are merged one by one."""
    if file is None:
        return dict(given)
    found = read_settings(file)
    merged = {**found, **given}
    if "options" in found or "options" in given:
        merged["options"] = {**found.get("options", {}), **given.get("options", {})}
    return merged
