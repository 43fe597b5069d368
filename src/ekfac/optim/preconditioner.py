"""EKFAC without the update: for use with any torch optimizer."""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from typing_extensions import Self, Unpack

from ekfac.curvature.factors import no_autocast
from ekfac.curvature.operators import Curvature
from ekfac.curvature.summary import Summary
from ekfac.optim import options
from ekfac.optim.factory import build_engine, check_model
from ekfac.optim.methods.rules import State
from ekfac.optim.options import CurvatureArguments, Damping
from ekfac.optim.state import checkpoint, exchange
from ekfac.optim.state.stats import engine_stats
from ekfac.optim.types import Update


class Preconditioner:
    r"""Replaces ``.grad`` by the gradient preconditioned in a Kronecker-factored eigenbasis.

    For every layer with input h, output gradient delta and gradient G of shape (out, in + 1):

    .. math::
        A = E[h h^T] = U_A S_A U_A^T, \quad B = E[\delta \delta^T] = U_B S_B U_B^T, \quad
        g = U_B^T G U_A, \quad G \leftarrow U_B \, (m / \sqrt{s_\epsilon / N}) \, U_A^T

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
        **arguments: See :class:`ekfac.optim.options.CurvatureArguments`.
    """

    def __init__(
        self, model: nn.Module, *, damping: Damping = options.DAMPING, **arguments: Unpack[CurvatureArguments]
    ) -> None:
        check_model(model)
        options.damping("damping", damping)
        self._arguments: dict[str, Any] = {"damping": damping, **arguments}
        self.model = model
        self.damping = damping
        self.state: defaultdict[Tensor, State] = defaultdict(dict)
        parameters = list(model.parameters())
        self.engine = build_engine("Preconditioner", model, parameters, self.state, dict(arguments), also=("damping",))

    def step(self) -> bool:
        """Replace every ``.grad`` by its preconditioned form, in place.

        Returns:
            Whether it was done. If a gradient is not finite all are set to None, so that the optimizer that follows
            leaves the parameters alone; on a GPU they are set to zero, as the host does not wait to know.
        """
        epsilon = options.damping("damping", self.damping, self.engine.applied_steps)
        update = Update(lambda block: epsilon)
        with no_autocast(self.engine.device):
            directions = self.engine.directions(update)
        if directions is None:
            for p in self.engine.parameters:
                p.grad = None
            return False
        for direction in directions:
            for p, step in zip(direction.block.parameters.values(), direction.steps, strict=True):
                if p.grad is not None:
                    p.grad.copy_(step)
        if directions:
            with no_autocast(self.engine.device):
                self.engine.finish(update)
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients and drop what was captured and not used."""
        self.model.zero_grad(set_to_none)
        self.engine.drop()

    def statistics(self) -> AbstractContextManager[None]:
        """Backward passes inside give factors and s* in place of the training loss's; ``.grad`` is left alone."""
        return self.engine.statistics()

    def batch(self, n: int) -> AbstractContextManager[None]:
        """All layers called inside see the same ``n`` examples, whether the model's own forward is called or not."""
        return self.engine.capture.batch(n)

    def paused(self) -> AbstractContextManager[None]:
        """Forwards and backwards inside are not captured."""
        return self.engine.capture.paused()

    def summary(self) -> Summary:
        """Which block covers each parameter."""
        return self.engine.summary()

    def stats(self) -> dict[str, float]:
        """Scalars for any logger."""
        stats = engine_stats(self.engine)
        stats["damping"] = options.damping("damping", self.damping, self.engine.applied_steps)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Everything, keyed by parameter name, as plain data."""
        extra = checkpoint.engine_state(self.engine)
        names: dict[Tensor, str] = {p: n for n, p in self.model.named_parameters()}
        return {"state": {names[p]: dict(s) for p, s in self.state.items() if p in names}, "ekfac": extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; another model's is refused and nothing is changed."""
        saved = checkpoint.check(self.engine, state_dict)
        parameters = dict(self.model.named_parameters())
        state = checkpoint.converted(self.engine, {parameters[n]: s for n, s in state_dict["state"].items()})
        checkpoint.adopt(self.engine, saved, state)
        self.state.clear()
        self.state.update(state)

    def curvature(self) -> Curvature:
        """What has been learnt so far, as an operator: products, solves, spectrum; a snapshot."""
        return exchange.curvature(self.engine)

    def seed(self, operator: Curvature) -> None:
        """Start from a KFAC or EKFAC operator of the same model instead of from nothing."""
        exchange.seed(self.engine, operator)

    def close(self) -> None:
        """Remove the hooks from the model."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self)(copy.deepcopy(self.model, memo), **self._arguments)
        new.load_state_dict(self.state_dict())
        memo[id(self)] = new
        return new
