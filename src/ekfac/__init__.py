"""Natural gradient in a Kronecker-factored eigenbasis: an optimizer, its curvature, and a lab.

`EKFAC` and `KFAC` are torch optimizers, and `AdaptiveDamping` a damping that they find by themselves; `Preconditioner`
leaves the step to another one; `fisher` gives the curvature of a model over a dataset as an operator, a `Curvature`;
`summary` tells which block covers each parameter of a model; `doctor` tries a model for some fifty steps and says what
to set.
"""

from typing import TYPE_CHECKING, Any

from ekfac.curvature.fisher import fisher
from ekfac.curvature.operators import Curvature, correlation, relative_error, spectrum_distance
from ekfac.curvature.summary import summary
from ekfac.optim.ekfac import EKFAC
from ekfac.optim.kfac import KFAC
from ekfac.optim.options import PAPER
from ekfac.optim.preconditioner import Preconditioner
from ekfac.optim.step_size.adaptive_damping import AdaptiveDamping

if TYPE_CHECKING:
    from ekfac.diagnosis.doctor import doctor

__version__ = "0.1.0"

__all__ = [
    "EKFAC",
    "KFAC",
    "PAPER",
    "AdaptiveDamping",
    "Curvature",
    "Preconditioner",
    "__version__",
    "correlation",
    "doctor",
    "fisher",
    "relative_error",
    "spectrum_distance",
    "summary",
]


def __getattr__(name: str) -> Any:
    """Import what is rarely needed when it is asked for."""
    if name == "doctor":
        from ekfac.diagnosis.doctor import doctor

        return doctor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
