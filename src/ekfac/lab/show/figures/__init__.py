"""The paper's figures: from recorded runs, from small fresh ones, or computed on the spot."""

# Each module registers its figure.
from ekfac.lab.show.figures import (  # noqa: F401
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
from ekfac.lab.show.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.show.figures.making import make

__all__ = ["FIGURES", "FigureSpec", "Request", "make"]
