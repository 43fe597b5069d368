"""Checks that a checkpoint's entries can belong to a block, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from ekfac import checks
from ekfac.curvature.blocks import Block
from ekfac.optim.statistics.partition import COUNTS

#: Entries that a block has all or none of.
TOGETHER = (
    ("A", "B", "factor_weight"),
    ("U_A", "U_B", "S_A", "S_B", "s"),
    ("inverse_A", "inverse_B", "inverse_extra", "added_A", "added_B", "inverted_at"),
)
#: Tensors whose shapes follow from the block's.
SHAPED = {*(n for names in TOGETHER for n in names), "m", "inverted_A", "inverted_B", "usual"} - {"inverted_at"}
LAYOUT = "construct the optimizer with the same sua, basis, include, exclude and max_factor_dim as when it was saved"
#: The largest deviation of a basis from orthonormality; enough for bases saved in half precision.
DRIFT = 0.05


def refuse(where: str, what: str) -> NoReturn:
    """Raise a ValueError that names the place in the checkpoint."""
    raise ValueError(f"state_dict, {where}: {what}. Nothing was loaded")


def shapes_of(block: Block) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a block's state."""
    s = block.shape
    A = (s.groups, s.inputs) + (() if block.diagonal_A else (s.inputs,))
    B = (s.groups, s.out) + (() if block.diagonal_B else (s.out,))
    whole = (s.groups, s.out, s.columns)
    found: dict[str, tuple[int, ...]] = {"s": whole, "m": whole, "count": (), "examples": ()}
    if not block.covered:
        return found
    found |= {"A": A, "B": B, "factor_weight": (), "usual": (), "S_A": A[:2], "S_B": B[:2]}
    found |= {"inverse_A": A, "inverse_B": B, "inverted_A": A, "inverted_B": B, "added_A": A[:1], "added_B": A[:1]}
    if s.extra:
        found["inverse_extra"] = B
    if not block.diagonal_A:
        found["U_A"] = A
    if not block.diagonal_B:
        found["U_B"] = B
    return found


def check_state(block: Block, state: Mapping[str, Any], fields: set[str]) -> None:
    """Refuse state that a block cannot have reached.

    Args:
        block: The block.
        state: The saved entries, by name.
        fields: The names that are allowed.
    """
    name, shapes = f"block '{block.name}'", shapes_of(block)
    for key, value in state.items():
        where = f"{name}, {key!r}"
        if key not in fields:
            refuse(where, f"is no entry of this optimizer's state. Allowed: {', '.join(sorted(fields))}")
        if key in ("failed_refreshes", "strayed"):
            _numbered(where, checks.integer, value, least=0)
        elif key == "near":
            _numbered(where, checks.flag, value)
        elif key == "inverted_at":
            _numbered(where, checks.number, value, above=0)
        elif key in shapes or isinstance(value, Tensor):
            if key in SHAPED and key not in shapes:
                refuse(where, f"is of another layout of this block; {LAYOUT}")
            check_tensor(where, key, value, shapes.get(key, ...), block.dtype)
        elif not isinstance(value, Real) or not math.isfinite(value):
            refuse(where, f"is {value!r}. Allowed: a tensor or a finite number")
    for names in TOGETHER:
        wanted = [n for n in names if n in fields and (n in shapes or n == "inverted_at")]
        there = [n for n in wanted if n in state]
        if block.covered and there and len(there) < len(wanted):
            refuse(name, f"has {', '.join(there)}, but lacks {', '.join(n for n in wanted if n not in state)}")
    for side in "AB":
        if f"inverse_{side}" in state:
            # No entry of (M + added I)^-1 exceeds 1 / added.
            most = 10 / state[f"added_{side}"].double().min()
            if bool(state[f"inverse_{side}"].double().abs().max() > most):
                refuse(f"{name}, 'inverse_{side}'", f"is larger than 1 / added_{side}, which is impossible")


def check_tensor(where: str, key: str, value: Any, shape: Any, dtype: torch.dtype) -> None:
    """Refuse an entry of the wrong shape or dtype, with non-finite or impossible values.

    Args:
        where: The place in the checkpoint.
        key: The name of the entry.
        value: The entry.
        shape: The required shape; ``...`` for any.
        dtype: The dtype in which it will be stored.
    """
    if key in COUNTS and not isinstance(value, Tensor):  # older versions stored these as plain numbers
        _numbered(where, checks.number, value, least=0)
        return
    if not isinstance(value, Tensor):
        refuse(where, f"is of type {type(value).__name__}. Allowed: a tensor")
    if shape is not ... and tuple(value.shape) != shape:
        refuse(where, f"has shape {tuple(value.shape)}, not {shape}: another model's, or another layout; {LAYOUT}")
    if value.is_complex() or value.is_quantized or value.is_sparse or value.is_meta or value.dtype == torch.bool:
        refuse(where, f"is a {value.layout} tensor of {value.dtype} on {value.device}. Allowed: real numbers")
    if not value.is_floating_point():
        if key in SHAPED or key == "momentum_buffer":
            refuse(where, f"is of {value.dtype}. Allowed: floating point")
        return
    kept = value.detach().to(torch.float64 if key in COUNTS else dtype)
    if not bool(torch.isfinite(kept).all()):
        refuse(where, f"is not finite in {kept.dtype}")
    if key in ("U_A", "U_B"):
        eye = torch.eye(kept.shape[-1], dtype=kept.dtype, device=kept.device)
        if kept.numel() and not bool((kept.mT @ kept - eye).abs().amax() <= DRIFT):
            refuse(where, "is no basis: its columns are not orthonormal")
    elif key in ("m", "momentum_buffer", "offset"):
        limit = torch.finfo(kept.dtype).max ** 0.375  # gradients are clamped to this
        if bool((kept.abs() > limit).any()):
            refuse(where, f"has entries beyond {limit:.1e}, to which gradients are clamped")
    elif key in SHAPED or key in COUNTS:
        diagonal = kept.diagonal(dim1=-2, dim2=-1) if kept.dim() == 3 and key != "s" else kept
        positive = key.startswith(("inverse", "added"))
        if bool((diagonal <= 0).any() if positive else (diagonal < 0).any()):
            refuse(where, f"has {'entries that are not positive' if positive else 'negative entries'}")


def check_count(where: str, value: Any) -> None:
    """Refuse anything but a non-negative integer in the range of int64."""
    _numbered(where, checks.integer, value, least=0)
    if value >= 2**63:
        refuse(where, "is too large for a count")


def check_number(where: str, value: Any, **bounds: float) -> None:
    """Refuse anything but a number within bounds."""
    _numbered(where, checks.number, value, **bounds)


def _numbered(where: str, check: Any, value: Any, **bounds: Any) -> None:
    try:
        check("value", value, **bounds)
    except (ValueError, OverflowError) as error:
        refuse(where, str(error)[:200])
