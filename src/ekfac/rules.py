"""Scaling rules with options of their own: ``EKFAC(model, scaling=ekfac.rules.Running(decay=0.99))``."""

from ekfac.optim.methods.belief import Belief as Belief
from ekfac.optim.methods.factory import RULES as RULES
from ekfac.optim.methods.rules import Anchored as Anchored
from ekfac.optim.methods.rules import Kronecker as Kronecker
from ekfac.optim.methods.rules import PerExample as PerExample
from ekfac.optim.methods.rules import Rule as Rule
from ekfac.optim.methods.rules import Running as Running
from ekfac.optim.methods.torch_rules import Adagrad as Adagrad
from ekfac.optim.methods.torch_rules import Adam as Adam
from ekfac.optim.methods.torch_rules import RMSProp as RMSProp
