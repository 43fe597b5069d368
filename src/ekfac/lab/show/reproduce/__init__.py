"""Reproduces a figure or a table: a plan with its cost, the runs, the figure, and a verdict on each claim."""

from ekfac.lab.show.reproduce.catalogue import EXPERIMENTS, Experiment
from ekfac.lab.show.reproduce.steps import Plan, Result, finish, make_plan

__all__ = ["EXPERIMENTS", "Experiment", "Plan", "Result", "finish", "make_plan"]
