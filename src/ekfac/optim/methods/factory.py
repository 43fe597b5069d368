"""Makes methods from ``scaling`` and ``damping_mode``."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import fields
from typing import Any

from ekfac import checks
from ekfac.optim.methods.belief import Belief
from ekfac.optim.methods.damping import DAMPING_MODES
from ekfac.optim.methods.eigenbasis import EigenMethod
from ekfac.optim.methods.rules import Anchored, Kronecker, PerExample, Rule, Running
from ekfac.optim.methods.torch_rules import Adagrad, Adam, RMSProp
from ekfac.optim.methods.wide import WideEigenMethod
from ekfac.optim.options import RULE_OPTIONS

#: Rules by name.
RULES: dict[str, type[Rule]] = {
    "belief": Belief,
    "anchored": Anchored,
    "running": Running,
    "per_example": PerExample,
    "kronecker": Kronecker,
    "adam": Adam,
    "rmsprop": RMSProp,
    "adagrad": Adagrad,
}


def take_rule(arguments: MutableMapping[str, Any]) -> Rule:
    """Pop ``scaling`` and all options of rules from the arguments; return the rule that they describe."""
    scaling = arguments.pop("scaling")
    given = {name: arguments.pop(name) for name in ("betas", *RULE_OPTIONS) if name in arguments}
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(scaling, Rule):
        if given:
            name = next(iter(given))
            raise ValueError(f"{name}={given[name]!r} beside scaling={scaling!r}: set it in the rule")
        return scaling
    if isinstance(scaling, type) and issubclass(scaling, Rule):
        name = scaling.__name__
        raise ValueError(f"scaling={name} is a class. Allowed: an instance of it, scaling={name}(), or a rule's name")
    checks.one_of("scaling", scaling, RULES)
    own = {f.name for f in fields(RULES[scaling])}
    if "on_refresh" in given:
        allowed = ("carry", "kronecker") if "restart" in own else ("carry",)
        checks.one_of("on_refresh", given["on_refresh"], allowed)
        given["on_refresh"] = given["on_refresh"] == "kronecker"
    if "betas" in given:
        checks.decays("betas", given["betas"])
        given["betas"] = tuple(given["betas"])
    if "eps" in given:
        checks.number("eps", given["eps"], above=0)
    for name in ("scaling_decay", "alpha"):
        if name in given:
            checks.number(name, given[name], least=0, below=1)
    options = {RULE_OPTIONS.get(name, name): value for name, value in given.items()}
    return RULES[scaling](**{name: value for name, value in options.items() if name in own})


def eigen_methods(rule: Rule, damping_mode: Any) -> tuple[EigenMethod, EigenMethod]:
    """Return the methods for blocks that a layer covers and for the rest."""
    checks.one_of("damping_mode", damping_mode, DAMPING_MODES)
    damp = DAMPING_MODES[damping_mode]
    return EigenMethod(rule, damp, WideEigenMethod(rule, damp)), EigenMethod(rule.elementwise(), damp)
