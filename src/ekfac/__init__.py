"""An optimizer that steps in a Kronecker-factored eigenbasis, its curvature, and a lab.

`EKFAC` and `KFAC` are torch optimizers, `AdaptiveDamping` adapts their damping, and `Preconditioner` works with any
other optimizer. `StepSize`, `Refresh`, `Coverage`, `Batch` and `Numerics` group less common options; `rules` has the
scaling rules. `fisher` computes the curvature of a model over a dataset as an operator, a `Curvature`. `summary` shows
which block covers each parameter, and `plan` predicts memory and arithmetic. `doctor` tries a model for about fifty
steps and recommends settings. `graphed` wraps a training step so that it replays CUDA graphs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ekfac import rules
    from ekfac.curvature.fisher import fisher
    from ekfac.curvature.operators import Curvature, correlation, relative_error, spectrum_distance
    from ekfac.curvature.summary import summary
    from ekfac.diagnosis.doctor import doctor
    from ekfac.optim.cuda.graphed import graphed
    from ekfac.optim.ekfac import EKFAC
    from ekfac.optim.kfac import KFAC
    from ekfac.optim.options import PAPER, Batch, Coverage, Numerics, Refresh, StepSize
    from ekfac.optim.plan import plan
    from ekfac.optim.preconditioner import Preconditioner
    from ekfac.optim.step_size.adaptive_damping import AdaptiveDamping

__version__ = "0.2.0"

__all__ = [
    "EKFAC",
    "KFAC",
    "PAPER",
    "AdaptiveDamping",
    "Batch",
    "Coverage",
    "Curvature",
    "Numerics",
    "Preconditioner",
    "Refresh",
    "StepSize",
    "__version__",
    "correlation",
    "doctor",
    "fisher",
    "graphed",
    "plan",
    "relative_error",
    "rules",
    "spectrum_distance",
    "summary",
]


# Imported lazily, so that `ekfac --version` does not wait for torch.
_PLACES = {
    "EKFAC": "optim.ekfac",
    "KFAC": "optim.kfac",
    "PAPER": "optim.options",
    "Batch": "optim.options",
    "Coverage": "optim.options",
    "Numerics": "optim.options",
    "Refresh": "optim.options",
    "StepSize": "optim.options",
    "AdaptiveDamping": "optim.step_size.adaptive_damping",
    "Curvature": "curvature.operators",
    "Preconditioner": "optim.preconditioner",
    "correlation": "curvature.operators",
    "doctor": "diagnosis.doctor",
    "fisher": "curvature.fisher",
    "graphed": "optim.cuda.graphed",
    "plan": "optim.plan",
    "relative_error": "curvature.operators",
    "spectrum_distance": "curvature.operators",
    "summary": "curvature.summary",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name in _PLACES:
        value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    elif name in ("curvature", "diagnosis", "optim", "rules"):
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List all public names, imported or not."""
    return sorted({*globals(), *__all__})
