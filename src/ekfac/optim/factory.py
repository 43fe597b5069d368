"""Builds the engine behind EKFAC and Preconditioner from their keyword arguments."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from ekfac.optim import options
from ekfac.optim.engine import Engine
from ekfac.optim.methods.damping import DAMPING_MODES
from ekfac.optim.methods.eigenbasis import EigenMethod
from ekfac.optim.methods.rules import RULES, Rule
from ekfac.optim.options import EngineOptions

#: Arguments that are a rule's own options, and their names there.
RULE_OPTIONS = {"scaling_decay": "decay", "on_refresh": "restart", "betas": "betas", "alpha": "alpha", "eps": "eps"}


def make_rule(arguments: dict[str, Any]) -> Rule:
    """The rule that ``scaling`` names, with those of the arguments that it has; or the rule itself."""
    scaling = arguments.get("scaling", "anchored")
    given = {name: arguments[name] for name in RULE_OPTIONS if arguments.get(name) is not None}
    if isinstance(scaling, Rule):
        if given:
            name = next(iter(given))
            raise ValueError(f"{name}={given[name]!r} beside scaling={scaling!r}: say it there")
        return scaling
    options.one_of("scaling", scaling, RULES)
    own = {f.name for f in fields(RULES[scaling])}
    if "on_refresh" in given:
        allowed = ("carry", "kronecker") if "restart" in own else ("carry",)
        options.one_of("on_refresh", given["on_refresh"], allowed)
        given["on_refresh"] = given["on_refresh"] == "kronecker"
    if "betas" in given:
        options.decays("betas", given["betas"])
        given["betas"] = tuple(given["betas"])
    if "eps" in given:
        options.number("eps", given["eps"], above=0)
    for name in ("scaling_decay", "alpha"):
        if name in given:
            options.number(name, given[name], least=0, below=1)
    return RULES[scaling](**{RULE_OPTIONS[n]: value for n, value in given.items() if RULE_OPTIONS[n] in own})


def build_engine(
    who: str,
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    state: MutableMapping[Tensor, Any],
    arguments: dict[str, Any],
    also: Iterable[str],
    whole_steps: bool,
) -> Engine:
    """Check :class:`CurvatureArguments` and build the engine with its rule; ``also`` are other arguments of ``who``."""
    settings = EngineOptions.from_arguments(who, arguments, also=("scaling", "damping_mode", *RULE_OPTIONS, *also))
    rule = make_rule(arguments)
    mode = arguments.get("damping_mode", "spectral")
    options.one_of("damping_mode", mode, DAMPING_MODES)
    method, elementwise = (EigenMethod(r, DAMPING_MODES[mode]) for r in (rule, rule.elementwise()))
    return Engine(model, parameters, settings, method, elementwise, state, whole_steps)
