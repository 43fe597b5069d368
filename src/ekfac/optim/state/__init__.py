"""State in and out: checkpoints, curvature, scalars for loggers."""
