"""EKFAC: natural gradient descent in a Kronecker-factored eigenbasis, as a torch optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from ekfac.curvature.factors import no_autocast
from ekfac.curvature.operators import Curvature
from ekfac.curvature.summary import Summary
from ekfac.optim import options
from ekfac.optim.base import Grouped, Groups
from ekfac.optim.cuda.step_graphs import Rates, StepGraphs
from ekfac.optim.engine import Engine
from ekfac.optim.factory import build_engine, check_model
from ekfac.optim.options import CurvatureArguments, Damping
from ekfac.optim.state import checkpoint, exchange
from ekfac.optim.state.stats import engine_stats
from ekfac.optim.step_size.adaptive_damping import Adaptation, AdaptiveDamping, Comparison
from ekfac.optim.step_size.steplength import KLClip, Pace, trusted
from ekfac.optim.types import Update, Work

#: Measured defaults; docs/tuning.md has the evidence.
LR = 0.01
ANNEAL = 300.0
TRUST = 1.0
PACE = 0.03


class EKFAC(Grouped):
    r"""Natural gradient descent in a Kronecker-factored eigenbasis (George et al., 2018).

    For every layer with input h, output gradient delta and gradient G of shape (out, in + 1):

    .. math::
        &A = E[h h^T] = U_A S_A U_A^T, \quad B = E[\delta \delta^T] = U_B S_B U_B^T, \quad s = S_B S_A^T
            && \text{every } \texttt{refresh\_every} \text{ steps} \\
        &g = U_B^T G U_A, \quad s \leftarrow \rho s + (1 - \rho) N g^2, \quad
            m \leftarrow \beta m + (1 - \beta) g \\
        &p = U_B \, (m / \sqrt{s_\epsilon / N}) \, U_A^T, \quad
            \theta \leftarrow \theta - \eta \, p / \sqrt{1 + t / \texttt{anneal}}

    This is the default, ``scaling="anchored"``: a step of Adam's size, with second moments that start at KFAC's
    eigenvalues in every new basis; s with a subscript is damped (see :mod:`ekfac.optim.methods.damping`).
    ``EKFAC(model, **ekfac.PAPER)`` is the paper's EKFAC-ra, which has g / (s + \epsilon) in place of the fraction;
    other rules are in :mod:`ekfac.optim.methods.rules`.

    Example:
        >>> import torch, ekfac
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> opt = ekfac.EKFAC(model)
        >>> x, y = torch.randn(32, 4), torch.randint(2, (32,))
        >>> for _ in range(3):
        ...     opt.zero_grad()
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        ...     opt.step()

    Args:
        model: The model; its forward counts the examples.
        params: torch's parameter groups over the model's parameters, for an lr, weight_decay, momentum or damping
            of their own, or some parameters; all by default. Those that are frozen wait until they are not.
        lr: Learning rate, a number or a one-element tensor.
        anneal: The learning rate falls as lr / sqrt(1 + t / anneal) over steps t; None keeps it as it is, for use with
            a schedule of your own.
        pace: The share of lr that the first step takes, at most 1, under scaling="anchored"; later steps take more
            while gradients keep agreeing with the last direction, less when they point back, up to lr. None for lr at
            all times.
        trust: Bound on the relative change |update| / |theta| of all L layers' weights together in one step, before
            momentum: each layer's update is shortened to trust / L at the most. None for no bound.
        damping: epsilon, a positive number, a function of the step, or :class:`AdaptiveDamping`, which finds it from
            how far the loss falls; then ``step`` needs a closure.
        momentum: mu, as in torch's SGD.
        nesterov: Use Nesterov's form of momentum.
        weight_decay: Weight decay.
        decoupled_weight_decay: Shrink the parameters directly (True), or add L2 to the gradient.
        maximize: Ascend instead.
        kl_clip: Bound on lr^2 sum g p over all parameters; directions p are shortened to keep it. Where p is g / damped
            s, as in the paper, that is twice the KL divergence of the step.
        **arguments: See :class:`ekfac.optim.options.CurvatureArguments`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        params: Groups | None = None,
        lr: float | Tensor = LR,
        anneal: float | None = ANNEAL,
        pace: float | None = PACE,
        trust: float | None = TRUST,
        damping: Damping | AdaptiveDamping = options.DAMPING,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = True,
        maximize: bool = False,
        kl_clip: float | None = None,
        **arguments: Unpack[CurvatureArguments],
    ) -> None:
        if trust is not None:
            options.number("trust", trust, above=0)
        self.trust, self.pace = trust, Pace(pace)
        self._build(
            model,
            params,
            {
                "lr": lr,
                "damping": damping,
                "momentum": momentum,
                "nesterov": nesterov,
                "weight_decay": weight_decay,
                "decoupled_weight_decay": decoupled_weight_decay,
                "maximize": maximize,
            },
            kl_clip,
            anneal,
            dict(arguments),
        )
        self._arguments.update(anneal=anneal, trust=trust, pace=pace)
        if not self.engine.method.has_alignment:
            self.pace = Pace()

    def _build(
        self,
        model: nn.Module,
        params: Groups | None,
        defaults: dict[str, Any],
        kl_clip: float | None,
        anneal: float | None,
        arguments: dict[str, Any],
    ) -> None:
        self._arguments = {"kl_clip": kl_clip, **defaults, **arguments}
        check_model(model)
        if anneal is not None:
            options.number("anneal", anneal, above=0)
        self.anneal = anneal
        self.kl_clip = KLClip(kl_clip)
        super().__init__(model, params, defaults)
        self.engine = self._make_engine(model, arguments)
        self._graphs = StepGraphs(self)
        try:
            self._check_damping_within_layers(self.engine.blocks)
        except ValueError:
            self.close()
            raise

    def _make_engine(self, model: nn.Module, arguments: dict[str, Any]) -> Engine:
        also = options.keywords(EKFAC.__init__)
        return build_engine(type(self).__name__, model, self._all_parameters(), self.state, arguments, also)

    # --- the step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of Algorithm 1: basis, scaling, direction (see :mod:`ekfac.optim.engine`), then the update.

        Args:
            closure: Clears the gradients, computes the loss, calls backward and returns the loss. It is called first,
                and once more after the update in steps from which an :class:`AdaptiveDamping` learns.
        """
        comparison = self._comparison(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if hasattr(self, "found_inf"):
            for name in ("found_inf", "grad_scale"):  # the scaler takes them back only after a step
                self.__dict__.pop(name, None)
            raise RuntimeError(
                "a GradScaler has called step(), so captured gradients are scaled by a number that is not known here: "
                f"pass it as {type(self).__name__}(model, grad_scaler=scaler)"
            )
        with no_autocast(self.engine.device):
            done = self._step(loss, comparison)
        if done and comparison is not None:
            comparison.after()
        if done:
            with no_autocast(self.engine.device):
                self.engine.finish(self._update())
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # A scaler tells such optimizers what it has found, in attributes. So one that was not passed shows itself; it
        # would divide ``.grad`` but not what was captured, and s would be too large by the square of its scale.
        return self.engine.settings.grad_scaler is None

    def _step(self, loss: Any, comparison: Comparison | None) -> bool:
        """Change the parameters; whether that was to be done."""
        self._current_damping()
        if comparison is not None:
            comparison.before(loss)
        if not self._graphs.step():
            work = self.engine.prepare()
            if work is None or not self.engine.judge(work):
                return False
            self.compute(work, self._rates())
        return True

    def compute(self, work: Work, rates: Rates) -> None:
        """The part of a step that the device does, from gradients to new parameters; a CUDA graph can hold it."""
        directions = self.engine.compute(work, self._update(rates))
        pace = self.pace.take(self.engine, directions)
        lrs = [lr * pace for lr in rates.lr]
        lr_of = {p: lrs[index] for p, index in self._group_index().items()}
        steps, factors = trusted(directions, lr_of, self.trust)
        self.pace.follow(self.engine, directions, factors)
        steps = self.kl_clip(steps, directions, lr_of)
        for group, lr in zip(self.param_groups, lrs, strict=True):
            self._update_parameters(group, steps, lr)

    def _comparison(self, closure: Callable[[], Any] | None) -> Comparison | None:
        """Prepare to compare this step's fall of the loss with the model's, where damping is to learn from it."""
        adaptation = self._adapts()
        if adaptation is None:
            return None
        if closure is None:
            raise ValueError(
                "step() with AdaptiveDamping needs a closure, as it looks at the loss after the update too: "
                "opt.step(closure), where closure() clears the gradients, computes the loss, calls backward, returns it"
            )
        self.engine.settle()
        if not adaptation.due(self.engine.applied_steps):
            return None
        return Comparison(adaptation, self.engine, closure, self.param_groups[0]["maximize"])

    def _rates(self) -> Rates:
        """The numbers of this step that change from step to step: the annealed lr, and damping, of every group."""
        t = self.engine.applied_steps
        factor = 1.0 if self.anneal is None else (1 + t / self.anneal) ** -0.5
        lrs = [lr.reshape(()) if isinstance(lr := g["lr"], Tensor) else lr for g in self.param_groups]
        return Rates([lr * factor for lr in lrs], [g["damping"] for g in self.param_groups])

    def _update(self, rates: Rates | None = None) -> Update:
        """What the engine asks about the groups."""
        index_of, groups = self._group_index(), self.param_groups
        damping = [float(g["damping"]) for g in groups] if rates is None else rates.damping

        def l2_of(p: nn.Parameter) -> float:
            group = groups[index_of[p]]
            return 0.0 if group["decoupled_weight_decay"] else float(group["weight_decay"])

        return Update(
            damping_of=lambda block: damping[index_of[block.key]],
            l2_of=l2_of,
            maximize_of=lambda p: bool(groups[index_of[p]]["maximize"]),
        )

    def _update_parameters(self, group: dict[str, Any], steps: dict[nn.Parameter, Tensor], lr: float | Tensor) -> None:
        """theta <- theta (1 - lr wd) - lr v, with v <- mu v + p: torch's SGD on the preconditioned gradient."""
        parameters = [p for p in group["params"] if p in steps]
        if not parameters:
            return
        p_steps = [steps[p] for p in parameters]
        mu, ok = group["momentum"], self.engine.ok
        if ok is not None:
            lr = lr * ok
        if group["weight_decay"] and group["decoupled_weight_decay"]:
            shrink = 1 - lr * group["weight_decay"]
            torch._foreach_mul_(parameters, shrink.to(parameters[0]) if isinstance(shrink, Tensor) else shrink)
        if mu:
            velocities = []
            for p, step in zip(parameters, p_steps, strict=True):
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(step, memory_format=torch.contiguous_format)
                velocities.append(state["momentum_buffer"])
            torch._foreach_mul_(velocities, mu if ok is None else (1 + (mu - 1) * ok).to(velocities[0]))
            torch._foreach_add_(velocities, p_steps)
            p_steps = list(torch._foreach_add(p_steps, velocities, alpha=mu)) if group["nesterov"] else velocities
        if isinstance(lr, Tensor):
            torch._foreach_sub_(parameters, torch._foreach_mul(p_steps, lr.to(p_steps[0])))
        else:
            torch._foreach_add_(parameters, p_steps, alpha=-lr)

    # --- around it ------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients and drop what was captured and not used."""
        super().zero_grad(set_to_none)
        self.engine.drop()

    def statistics(self) -> AbstractContextManager[None]:
        """Backward passes inside give factors and s* in place of the training loss's; ``.grad`` is left alone.

        For the true Fisher: ``with opt.statistics(): sampled_loss.backward(retain_graph=True)``.
        """
        return self.engine.statistics()

    def batch(self, n: int) -> AbstractContextManager[None]:
        """All layers called inside see the same ``n`` examples, whether the model's own forward is called or not."""
        return self.engine.capture.batch(n)

    def paused(self) -> AbstractContextManager[None]:
        """Forwards and backwards inside are not captured."""
        return self.engine.capture.paused()

    def summary(self) -> Summary:
        """Which block covers each parameter, its factor sizes and its memory."""
        return self.engine.summary()

    def stats(self) -> dict[str, float]:
        """Scalars for any logger: damping, KL-clip hits, refreshes, drift, fallbacks, skipped steps, seconds."""
        stats = engine_stats(self.engine)
        stats["damping"] = float(self.param_groups[0]["damping"])
        if (adaptation := self._adapts()) is not None:
            stats.update(adaptation.stats())
        stats["kl_clip_hits"] = float(self.kl_clip.hits)
        stats["pace"] = self.pace.share
        return stats

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict, and under "ekfac" the counters and the model's parameter names; all plain data."""
        extra = checkpoint.engine_state(self.engine)
        extra["kl_clip_hits"] = float(self.kl_clip.hits)
        extra["pace"] = self.pace.save()
        extra["adaptive_damping"] = None if self._adaptation is None else self._adaptation.save()
        return {**super().state_dict(), "ekfac": extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; another model's is refused and nothing is changed."""
        saved = checkpoint.check(self.engine, state_dict)
        theirs = [list(group["params"]) for group in state_dict["param_groups"]]
        mine = [group["params"] for group in self.param_groups]
        if list(map(len, theirs)) != list(map(len, mine)):
            sizes = [", ".join(str(len(group)) for group in groups) for groups in (theirs, mine)]
            raise ValueError(f"state_dict has groups of {sizes[0]} parameters, this optimizer of {sizes[1]}")
        ours = self._all_parameters()
        saved_state = {
            p: state_dict["state"][index]
            for indices, group in zip(theirs, mine, strict=True)
            for index, p in zip(indices, group, strict=True)
            if index in state_dict["state"]
        }
        state = checkpoint.converted(self.engine, saved_state)
        checkpoint.adopt(self.engine, saved, state)
        super().load_state_dict({**state_dict, "state": {}})
        self.state.clear()
        self.state.update(state)
        self.engine.state = self.state  # torch has put a new dict there
        self.kl_clip.hits = saved["kl_clip_hits"]
        self.pace.load(saved["pace"], ours[0].device)
        if self._adaptation is not None:
            self._adaptation.load(saved.get("adaptive_damping"))

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} has hooks on its model and cannot be pickled: save opt.state_dict() and the "
            "model's, or copy both with copy.deepcopy(opt), whose .model is the copy"
        )

    def curvature(self) -> Curvature:
        """What has been learnt so far, as an operator: products, solves, spectrum; a snapshot."""
        return exchange.curvature(self.engine)

    def seed(self, operator: Curvature) -> None:
        """Start from a KFAC or EKFAC operator of the same model instead of from nothing."""
        exchange.seed(self.engine, operator)

    def close(self) -> None:
        """Remove the hooks from the model and let go of captured steps."""
        self.engine.close()
        self._graphs.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        model = copy.deepcopy(self.model, memo)
        parameters = dict(model.named_parameters())
        groups = []
        for index, group in enumerate(self.param_groups):
            settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            if index in self._damping_functions:
                function = self._damping_functions[index]
                settings["damping"] = function.settings if isinstance(function, Adaptation) else function
            groups.append({"params": [parameters[name] for name in group["param_names"]], **settings})
        new = type(self)(model, params=groups, **self._arguments)
        new.load_state_dict(self.state_dict())
        memo[id(self)] = new
        return new
