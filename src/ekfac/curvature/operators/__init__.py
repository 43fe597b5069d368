"""Curvature as a linear operator, and distances between two operators."""

from ekfac.curvature.operators.measures import correlation, relative_error, spectrum_distance
from ekfac.curvature.operators.operator import Curvature

__all__ = ["Curvature", "correlation", "relative_error", "spectrum_distance"]
