"""The optimizers at the paper's settings and with its plain schedule, which the oracle follows step by step."""

from typing import Any

from torch import nn

import ekfac
from ekfac import PAPER

KFAC_PAPER = {name: PAPER[name] for name in ("lr", "damping", "refresh_every", "refresh")}
NO_UPDATE = {name: value for name, value in PAPER.items() if name not in ("lr", "step_size")}


class EKFAC(ekfac.EKFAC):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **{**PAPER, **options})


class KFAC(ekfac.KFAC):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **{**KFAC_PAPER, **options})


class Preconditioner(ekfac.Preconditioner):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **{**NO_UPDATE, **options})
