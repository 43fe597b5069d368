"""The suite's tasks by name."""

from ekfac.lab.suite.tasks import images, sequences  # noqa: F401  (they register their tasks)
from ekfac.lab.suite.tasks.base import TASKS, Context, Examples, Problem, Windows

__all__ = ["TASKS", "Context", "Examples", "Problem", "Windows"]
