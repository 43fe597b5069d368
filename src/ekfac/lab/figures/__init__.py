"""The paper's figures: from recorded runs, from small fresh ones, or computed on the spot."""

# Each module registers its own.
from ekfac.lab.figures import (  # noqa: F401
    autoencoder,
    batch_size,
    cifar,
    comparison,
    convolution,
    correlation,
    error,
    frequency,
    rescaling,
    schedule,
    sensitivity,
)
from ekfac.lab.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.figures.making import make

__all__ = ["FIGURES", "FigureSpec", "Request", "make"]
