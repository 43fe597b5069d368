"""The optimizers at the paper's settings and with its plain schedule, which the oracle follows step by step.

Options have one plain name each here, as the oracle's do: :func:`grouped` puts them where the optimizers take them.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

import ekfac
from ekfac import PAPER
from ekfac.optim.methods.factory import take_rule
from ekfac.optim.options import RULE_OPTIONS, into_groups

KFAC_PAPER = {name: PAPER[name] for name in ("lr", "damping", "refresh_every", "refresh")}
NO_UPDATE = {name: value for name, value in PAPER.items() if name not in ("lr", "step_size")}


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with plain names in their groups, and those of a rule in the rule."""
    found = into_groups(options)
    if RULE_OPTIONS.keys() & found.keys():
        found.setdefault("scaling", "belief")
        found["scaling"] = take_rule(found)
    return found


class EKFAC(ekfac.EKFAC):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **grouped({**PAPER, **options}))


class KFAC(ekfac.KFAC):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **into_groups({**KFAC_PAPER, **options}))


class Preconditioner(ekfac.Preconditioner):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **grouped({**NO_UPDATE, **options}))
