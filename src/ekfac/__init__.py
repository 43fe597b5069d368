"""Natural gradient in a Kronecker-factored eigenbasis: an optimizer, its curvature, and a lab.

`EKFAC` and `KFAC` are torch optimizers; `Preconditioner` leaves the step to another one; `fisher` gives the curvature
of a model over a dataset as an operator, a `Curvature`; `summary` tells which block covers each parameter of a model.
"""

from ekfac.curvature.fisher import fisher
from ekfac.curvature.operators import Curvature, correlation, relative_error, spectrum_distance
from ekfac.curvature.summary import summary
from ekfac.optim.ekfac import EKFAC
from ekfac.optim.kfac import KFAC
from ekfac.optim.preconditioner import Preconditioner

__version__ = "0.1.0"

__all__ = [
    "EKFAC",
    "KFAC",
    "Curvature",
    "Preconditioner",
    "__version__",
    "correlation",
    "fisher",
    "relative_error",
    "spectrum_distance",
    "summary",
]
