"""The default with one part left out, as optimizers of the lab, for results/suite/ablation.json.

ekfac --plugin benchmarks/ablation.py suite run results/suite/ablation.json --out runs/ablation --data-dir DATA
"""

from __future__ import annotations

from typing import Any

from torch import nn

import ekfac
from ekfac import EKFAC, Coverage, StepSize, rules
from ekfac.lab.optimizers import register_optimizer


def variant(name: str, about: str, **changes: Any) -> None:
    """Register the default with some options set."""

    def build(model: nn.Module, **options: Any) -> ekfac.EKFAC:
        return EKFAC(model, **{**changes, **options})

    register_optimizer(f"ekfac-{name}", build, about=about)


variant(
    "eager", "coordinates whose mean and gradient disagree in sign do not wait", scaling=rules.Belief(cautious=False)
)
variant("adam", "the second moment of Adam in place of AdaBelief's", scaling=rules.Belief(floor=1.0))
variant("no-basis", "no eigenbasis", coverage=Coverage(basis="identity"))
variant("latest", "the latest weights instead of their average", step_size=StepSize(average=False))
variant("no-decay", "no weight decay", weight_decay=0.0)
