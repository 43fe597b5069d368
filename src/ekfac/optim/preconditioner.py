"""EKFAC's preconditioning without the update, for use with any torch optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from ekfac import checks
from ekfac.curvature.factors import no_autocast
from ekfac.optim import options
from ekfac.optim.base import Base, copied
from ekfac.optim.distributed.processes import DEFAULT
from ekfac.optim.distributed.states import keep_own, whole_state
from ekfac.optim.engine import Engine
from ekfac.optim.methods.factory import eigen_methods, take_rule
from ekfac.optim.methods.rules import Rule
from ekfac.optim.options import DAMPING, Batch, Coverage, Damping, EngineOptions, Numerics, Refresh, arguments_of
from ekfac.optim.state import checkpoint
from ekfac.optim.state.stats import engine_stats
from ekfac.optim.statistics import takeover
from ekfac.optim.types import Direction, GroupRates, Rates, StepInputs


class Preconditioner(Base):
    r"""Replaces ``.grad`` by the gradient preconditioned in a Kronecker-factored eigenbasis.

    For every layer with input h, output gradient delta and gradient G of shape (out, in + 1):

    .. math::
        A = E[h h^T] = U_A S_A U_A^T, \quad B = E[\delta \delta^T] = U_B S_B U_B^T, \quad
        g = U_B^T G U_A, \quad G \leftarrow U_B \, (m / \sqrt{s}) \, U_A^T

    with m the running mean of g, as in :class:`EKFAC`'s default: the result has the size of Adam's steps and already
    includes momentum. With ``scaling="running", damping_mode="plain"`` the middle is the paper's g / (s + \epsilon).

    Example:
        >>> import torch, ekfac
        >>> model = torch.nn.Linear(3, 2)
        >>> pre = ekfac.Preconditioner(model)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> model(torch.randn(8, 3)).square().mean().backward()
        >>> pre.step()
        True
        >>> sgd.step()
        >>> sgd.zero_grad()

    Args:
        model: The model; its first input dimension is the batch.
        betas: Decays of m and, for "adam", of s; the rule's own by default.
        damping: epsilon, a positive number or a function of the step.
        damping_mode: As in :class:`EKFAC`.
        scaling: As in :class:`EKFAC`.
        refresh_every: Steps between updates of a basis.
        refresh: How bases are updated, and from which batches A and B are computed.
        coverage: Which layers get a Kronecker block, and of what form.
        batch: How the loss treats a batch.
        numerics: Memory and speed.
        grad_scaler: The ``torch.amp.GradScaler`` in use, so that statistics are unscaled.
        process_group: The ranks that train replicas of the model and share statistics; each owns some of the blocks.
            By default torch's default group, if there is one. None keeps this process on its own.
        **old: Argument names of version 0.1, with a DeprecationWarning.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        betas: tuple[float, float] | None = None,
        damping: Damping = DAMPING,
        damping_mode: str = "spectral",
        scaling: str | Rule = "belief",
        refresh_every: int | None = None,
        refresh: Refresh = Refresh(),
        coverage: Coverage = Coverage(),
        batch: Batch = Batch(),
        numerics: Numerics = Numerics(),
        grad_scaler: torch.amp.GradScaler | None = None,
        process_group: Any = DEFAULT,
        **old: Any,
    ) -> None:
        arguments = arguments_of("Preconditioner", locals())
        checks.model(model)
        options.damping("damping", damping)
        rule = take_rule(arguments)
        self._arguments = {**arguments, "scaling": rule}
        self.model = model
        self.damping = damping
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        parameters, methods = list(model.parameters()), eigen_methods(rule, damping_mode)
        self.engine = Engine(model, parameters, EngineOptions.of(arguments), *methods, self.state, whole_steps=False)
        takeover.register(self.engine.collector)

    def step(self) -> bool:
        """Replace every ``.grad`` by its preconditioned form, in place.

        Returns:
            Whether it was done. If a gradient is not finite, all are set to None, so that the optimizer that follows
            skips the parameters; on a GPU they are set to zero instead, which needs no synchronisation.
        """
        engine = self.engine
        engine.settle()
        epsilon = options.damping("damping", self.damping, engine.schedule.applied_steps)
        rates = Rates([GroupRates(1.0, epsilon)], dict.fromkeys(engine.partition.parameters, 0))
        with no_autocast(engine.partition.device):
            done = engine.step(rates, self._replace)
            if done:
                engine.finish(rates)
        if done is False:
            for p in engine.partition.parameters:
                p.grad = None
        return done is not False

    def _replace(self, inputs: StepInputs, directions: list[Direction], rates: Rates) -> None:
        for direction in directions:
            for p, step in direction.steps.items():
                inputs.gradients[p].copy_(step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients and drop captured data that no step has used."""
        self.model.zero_grad(set_to_none)
        self.engine.collector.drop()

    def stats(self) -> dict[str, float]:
        """Return scalars for any logger."""
        stats = engine_stats(self.engine)
        stats["damping"] = options.damping("damping", self.damping, self.engine.schedule.applied_steps)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, by parameter name, as plain data; with several processes, all must call this."""
        self.engine.collector.follow()
        whole = whole_state(self.engine)
        extra = checkpoint.engine_state(self.engine, whole)
        names = self.engine.partition.names
        return {"state": {names[p]: state for p, state in whole.states.items()}, "ekfac": extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; all of it is checked first, as by :class:`EKFAC`."""
        self.engine.collector.follow()
        state_dict = checkpoint.as_named_here(self.engine, state_dict)
        saved = checkpoint.check(self.engine, state_dict)
        parameters = {name: p for p, name in self.engine.partition.names.items()}
        found = state_dict.get("state")
        if not isinstance(found, Mapping) or not all(name in parameters for name in found):
            raise ValueError("state_dict, 'state': must be a dict by names of this model's parameters")
        loaded = checkpoint.prepare(self.engine, saved, {parameters[name]: state for name, state in found.items()})
        checkpoint.adopt(self.engine, loaded)
        self.state.clear()
        self.state.update(loaded.states)
        self.engine.partition.take_states(self.state)
        keep_own(self.engine)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = memo[id(self)] = object.__new__(type(self))  # before the model is copied: it may refer to this
        new.__init__(copied(self.model, memo), **self._arguments)  # type: ignore[misc]
        new.load_state_dict(self.state_dict())
        return new
