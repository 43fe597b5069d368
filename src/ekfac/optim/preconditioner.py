"""EKFAC without the update: for use with any torch optimizer."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

from torch import Tensor, nn
from typing_extensions import Self, Unpack

from ekfac.curvature.factors import no_autocast
from ekfac.optim import options
from ekfac.optim.base import Base, check_model
from ekfac.optim.distributed.states import keep_own, whole_state
from ekfac.optim.factory import build_engine
from ekfac.optim.options import CurvatureArguments, Damping
from ekfac.optim.state import checkpoint
from ekfac.optim.state.stats import engine_stats
from ekfac.optim.types import Direction, GroupRates, Rates, StepInputs


class Preconditioner(Base):
    r"""Replaces ``.grad`` by the gradient preconditioned in a Kronecker-factored eigenbasis.

    For every layer with input h, output gradient delta and gradient G of shape (out, in + 1):

    .. math::
        A = E[h h^T] = U_A S_A U_A^T, \quad B = E[\delta \delta^T] = U_B S_B U_B^T, \quad
        g = U_B^T G U_A, \quad G \leftarrow U_B \, (m / \sqrt{s}) \, U_A^T

    with m the running mean of g, as in :class:`EKFAC`'s default: a gradient of the size of Adam's steps, which has its
    momentum already. With ``scaling="running", damping_mode="plain"`` the middle is the paper's g / (s + \epsilon).

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
        model: The model; its forward counts the examples.
        damping: epsilon, a positive number or a function of the step.
        betas: Decays of rules that have them, such as the default; see :class:`EKFAC`.
        **arguments: See :class:`ekfac.optim.options.CurvatureArguments`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        damping: Damping = options.DAMPING,
        betas: tuple[float, float] | None = None,
        **arguments: Unpack[CurvatureArguments],
    ) -> None:
        check_model(model)
        options.damping("damping", damping)
        self._arguments: dict[str, Any] = {"damping": damping, "betas": betas, **arguments}
        self.model = model
        self.damping = damping
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        parameters = list(model.parameters())
        self.engine = build_engine(
            "Preconditioner",
            model,
            parameters,
            self.state,
            {**arguments, "betas": betas},
            also=("damping",),
            whole_steps=False,
        )

    def step(self) -> bool:
        """Replace every ``.grad`` by its preconditioned form, in place.

        Returns:
            Whether it was done. If a gradient is not finite all are set to None, so that the optimizer that follows
            leaves the parameters alone; on a GPU they are set to zero, as the host does not wait to know.
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
            if not direction.steps:  # another process's
                continue
            for p, step in zip(direction.block.parameters.values(), direction.steps, strict=True):
                if p in inputs.gradients:
                    inputs.gradients[p].copy_(step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients and drop what was captured and not used."""
        self.model.zero_grad(set_to_none)
        self.engine.collector.drop()

    def stats(self) -> dict[str, float]:
        """Return scalars for any logger."""
        stats = engine_stats(self.engine)
        stats["damping"] = options.damping("damping", self.damping, self.engine.schedule.applied_steps)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return everything, keyed by parameter name, as plain data; with several processes, all must call this."""
        self.engine.settle(wait=True)
        whole = whole_state(self.engine)
        extra = checkpoint.engine_state(self.engine, whole)
        names: dict[Tensor, str] = {p: n for n, p in self.model.named_parameters()}
        return {"state": {names[p]: s for p, s in whole.states.items()}, "ekfac": extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; another model's is refused and nothing is changed."""
        saved = checkpoint.check(self.engine, state_dict)
        parameters = dict(self.model.named_parameters())
        saved_state = {parameters[n]: s for n, s in state_dict["state"].items()}
        checkpoint.check_complete(self.engine, saved, saved_state)
        state = checkpoint.converted(self.engine, saved_state)
        checkpoint.adopt(self.engine, saved, state)
        self.state.clear()
        self.state.update(state)
        keep_own(self.engine)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self)(copy.deepcopy(self.model, memo), **self._arguments)
        new.load_state_dict(self.state_dict())
        memo[id(self)] = new
        return new
