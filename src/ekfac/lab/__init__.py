"""The lab: the paper's experiments, and a place to try your own.

A plugin extends it through what this module exports; :mod:`ekfac.lab.training.run` has ``train``, ``TrainConfig`` and
``load_run``.
"""

from ekfac.lab.data.datasets import Dataset, Split, register_dataset
from ekfac.lab.optimizers import of_parameters, register_optimizer
from ekfac.lab.registry import LabError
from ekfac.lab.tasks import Task, label_correct, label_cross_entropy, register_task

__all__ = [
    "Dataset",
    "LabError",
    "Split",
    "Task",
    "label_correct",
    "label_cross_entropy",
    "of_parameters",
    "register_dataset",
    "register_optimizer",
    "register_task",
]
