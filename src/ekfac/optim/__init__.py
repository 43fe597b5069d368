"""Training: optimizers and preconditioners built on :mod:`ekfac.curvature`."""
