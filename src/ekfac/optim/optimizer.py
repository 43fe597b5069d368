"""The optimizers' step: take directions from the engine, bound their length, and update the parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ekfac import checks
from ekfac.curvature.factors import no_autocast
from ekfac.optim.base import Base, read_by_method_of
from ekfac.optim.distributed.joining import Joinable
from ekfac.optim.distributed.shards import held
from ekfac.optim.distributed.states import States, keep_own, whole_state
from ekfac.optim.engine import Engine
from ekfac.optim.groups import EXTRA, Grouped
from ekfac.optim.methods.base import Method
from ekfac.optim.methods.eigenbasis import EigenMethod
from ekfac.optim.options import EngineOptions, StepSize
from ekfac.optim.state import checkpoint
from ekfac.optim.state.average import load_average, save_average
from ekfac.optim.state.outline import drop_outline, outline, outline_average
from ekfac.optim.state.stats import engine_stats
from ekfac.optim.state.validation import check_number
from ekfac.optim.statistics import takeover
from ekfac.optim.step_size.adaptive_damping import begin_comparison
from ekfac.optim.step_size.kl_clip import KLClip
from ekfac.optim.step_size.lr_fraction import LRFraction
from ekfac.optim.step_size.lr_schedule import LRSchedule
from ekfac.optim.step_size.max_change import bound_change
from ekfac.optim.step_size.sparse_inputs import follow_inputs
from ekfac.optim.step_size.weight_average import WeightAverage
from ekfac.optim.types import ADDRESS, CLEAR, Direction, GroupRates, Rates, StepInputs

#: Group options that a recorded CUDA graph has baked in.
BUILT_IN = ("momentum", "nesterov", "weight_decay", "decay_vectors", "cautious_decay", "decoupled_weight_decay")


class Optimizer(Base, Joinable, Grouped):
    """What EKFAC and KFAC share.

    Args:
        model: The model.
        arguments: All other arguments, by name.
        defaults: Options of groups that do not set their own.
        methods: The methods for blocks that a layer covers, and for the rest.
        lr_schedule: The built-in schedule of lr, for groups without a torch scheduler.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: dict[str, Any],
        defaults: dict[str, Any],
        methods: tuple[Method[Any], EigenMethod],
        lr_schedule: LRSchedule,
    ) -> None:
        checks.model(model)
        self._arguments = {name: value for name, value in arguments.items() if name != "params"}
        self.step_size: StepSize = arguments["step_size"]
        self.lr_schedule = lr_schedule
        self.kl_clip = KLClip(self.step_size.kl_clip)
        Grouped.__init__(self, model, arguments["params"], defaults)
        self.state = states = States()
        options, parameters = EngineOptions.of(arguments), self._all_parameters()
        self.engine = Engine(model, parameters, options, *methods, states, whole_steps=True)
        states.follow(self.engine)
        self.engine.collector.on_changed = self._follow_replacements(weakref.ref(self))
        engine = weakref.proxy(self.engine)
        self.average = WeightAverage(model, self.step_size.average, lambda value: engine.executor.read_back(value))
        self.average.watch(self.engine.collector.capture.forwards)
        compares = self.engine.method.compares_gradients
        self.lr_fraction = LRFraction(self.step_size.lr_fraction if compares else None)
        try:
            self._check_damping_within_layers(self.engine.partition.blocks)
        except ValueError:
            self.close()
            raise
        takeover.register(self.engine.collector)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of Algorithm 1: basis, scaling, direction (see :mod:`ekfac.optim.engine`), then the update.

        Args:
            closure: Clears the gradients, computes the loss, calls backward and returns the loss. It is called first,
                and again after the update if :class:`AdaptiveDamping` adapts in this step.
        """
        engine, comparison = self.engine, None
        if closure is None and not engine.collector.capture.examples and self._only_to_initialise():
            self._outline()
            return None
        if engine.outlined:
            drop_outline(engine)
        if self._join_config is not None:
            self._notify_join()
        adaptation = None if self._adaptation is None else self._adapts()
        if adaptation is not None:
            engine.settle()
            maximize = self.param_groups[0]["maximize"]
            comparison = begin_comparison(adaptation, engine, closure, maximize, self.average)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if adaptation is None:
            engine.settle()  # after the closure, because it synchronises with the last step
        if hasattr(self, "found_inf"):
            self._apply_scaler()
        device = self.param_groups[0]["params"][0].device
        casts = torch.is_autocast_enabled(device.type)
        with no_autocast(device) if casts else nullcontext():
            if comparison is not None:
                comparison.before(loss)
            try:
                rates = self._rates()
                engine.executor.average_shown = False
                done = engine.step(rates, self._apply)
                ok = engine.executor.last_mask if done else None
                if rates.called is not None:  # other processes contribute to the update; it is complete only here
                    self.average.after_update(self.average.in_update, self.average.included.weight, ok)
            except BaseException:
                self.average.rest()
                raise
        if done and comparison is not None:
            comparison.after()
        self.average.end_step(done, ok, engine.executor.average_shown)
        if done:
            if self.lr_schedule.automatic and not engine.schedule.applied_steps:
                self.lr_schedule = follow_inputs(self.lr_schedule, engine)
            known = engine.schedule.derivatives
            with no_autocast(device) if casts else nullcontext():
                engine.finish(rates)
            if engine.schedule.derivatives and not known:
                self._use_derivative_defaults(self.param_groups)
        return loss

    def _only_to_initialise(self) -> bool:
        """Detect the step with lr = 0 by which torch.distributed.checkpoint initialises an optimizer's state."""
        nothing = not self.engine.collector.capture.separate_examples
        return nothing and all(bool(group["lr"] == 0) for group in self.param_groups)

    def _outline(self) -> None:
        """Make a skeleton state that a checkpoint can be loaded into."""
        self.engine.collector.follow()
        self._index()
        groups = [GroupRates(0.0, g["damping"], betas=g.get("betas")) for g in self.param_groups]
        with_momentum = {p for g in self.param_groups if g["momentum"] for p in g["params"]}
        outline(self.engine, Rates(groups, self._group_of), with_momentum)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # If this is True, a GradScaler passes its findings to step() in attributes. This reveals a scaler that was not
        # passed to us (s would be too large by the square of its scale), and lets processes skip a step together.
        # Other callers, such as Lightning, take True to mean that gradients cannot be clipped; for them it is False.
        options = self.engine.options
        return read_by_method_of(torch.amp.GradScaler) and (options.grad_scaler is None or options.processes.size > 1)

    def _apply_scaler(self) -> None:
        """Unscale the gradients if the scaler leaves that to the step; refuse a scaler that was not passed."""
        if self.engine.options.grad_scaler is not None:
            scale = getattr(self, "grad_scale", None)
            if scale is not None:  # by the scaler's own function, which does not bump the tensors' versions
                grads = [held(p.grad) for p in self._all_parameters() if p.grad is not None]
                torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros_like(scale), 1 / scale)
            return
        for name in ("found_inf", "grad_scale"):  # the scaler deletes them only after a step that succeeds
            self.__dict__.pop(name, None)
        raise RuntimeError(
            "a GradScaler has called step(), so captured gradients are scaled by an unknown factor: pass it as "
            f"{type(self).__name__}(model, grad_scaler=scaler), or, if a framework creates it later, call "
            "opt.attach_scaler(scaler) before the first backward pass"
        )

    def _rates(self) -> Rates:
        """Return lr, damping, L2 penalty and sign of every group in this step, and begin the weight average's step.

        The built-in schedule and its weight average apply to groups with neither a torch scheduler nor an lr of their
        own. Averaging that was requested explicitly applies to all groups.
        """
        schedule, average, t = self.lr_schedule, self.average, self.engine.schedule.applied_steps
        default_factor = schedule.factor(t, self.engine.schedule.derivatives)
        explicit_factor, automatic = schedule.explicit.factor(t), schedule.automatic
        groups, fixed, compares = [], [], self.lr_fraction.start is not None
        averaged: list[nn.Parameter] = []
        for index, group in enumerate(self.param_groups):
            lr, tensor = group["lr"], isinstance(group["lr"], Tensor)
            if tensor or index in self._damping_functions or self._checked.get(index) != (lr, group["damping"]):
                self._check_group(index)
            lr = lr.reshape(()) if tensor else lr
            # A tensor on a GPU was set by the user; comparing it would make the host wait.
            explicit = automatic and (group["lr_named"] or (tensor and lr.is_cuda) or bool(lr != self.defaults["lr"]))
            by_torch = "initial_lr" in group  # written by all torch schedulers
            factor = 1.0 if by_torch else explicit_factor if explicit else default_factor
            lr = lr if factor == 1.0 else lr * factor
            if average.wanted or (average.wanted is None and automatic and not (explicit or by_torch)):
                averaged += group["params"]
            l2, betas = 0.0 if group["decoupled_weight_decay"] else float(group["weight_decay"]), group.get("betas")
            groups.append(GroupRates(lr, group["damping"], l2, bool(group["maximize"]), betas, compares))
            fixed.append((*(group[name] for name in BUILT_IN), len(group["params"]), *(betas or ())[1:]))
        indexed = self.engine.partition.generation, *[len(group["params"]) for group in self.param_groups]
        if indexed != self._indexed:
            self._index()
            self._indexed = indexed
        clips = self.kl_clip.bound is not None
        if self.engine.shares():  # what to average is decided with the other processes, in _apply
            average.enter_step()
            return Rates(
                groups,
                self._group_of,
                called=average.called,
                weights_edited=average.edits.systematic,
                candidates=tuple(averaged),
                keeps_gradients=clips,
            )
        average.begin_step(averaged, self._group_of, t)
        included = average.included
        shows = included.complete and self._adaptation is None  # adaptive damping needs z after the update
        addresses = tuple(map(ADDRESS, (*included.parameters, *included.offsets)))
        return Rates(
            groups,
            self._group_of,
            fixed=(tuple(fixed), self.step_size, shows, addresses),
            averaged=tuple(included.parameters),
            average_weight=included.weight,
            keeps_gradients=clips,
            shows=shows,
        )

    def _apply(self, inputs: StepInputs, directions: list[Direction], rates: Rates) -> None:
        """Bound the length of the step, update the parameters, and include them in the weight average."""
        processes, lrs = self.engine.options.processes, [group.lr for group in rates.groups]
        steps, shortened = {p: step for d in directions for p, step in d.steps.items()}, None
        max_change, clips, adapts = self.step_size.max_change, self.kl_clip.bound is not None, self.lr_fraction.start
        if adapts is not None:
            fraction = self.lr_fraction.take(directions, inputs.ok)
            lrs = [lr * fraction for lr in lrs]
        lr_of = {p: lrs[index] for p, index in rates.group_of.items()} if clips or max_change is not None else {}
        if max_change is not None:
            steps, shortened = bound_change(directions, lr_of, max_change, inputs.gradients, processes, inputs.weights)
        if adapts is not None:
            self.lr_fraction.follow(directions, shortened, inputs.ok)
        if clips:
            steps = self.kl_clip(steps, directions, lr_of, inputs, processes)

        average, averaged, together = self.average, rates.averaged, inputs.agreed is not None
        if together:
            average.begin_step(rates.candidates, inputs.gradients, self.engine.schedule.applied_steps, inputs.agreed)
            averaged = tuple(average.included.parameters)
        elif self.engine.executor.can_replay:
            offsets = {p: average.offsets[p] for p in averaged}
            kept = offsets, rates.average_weight, self._spared, rates.shows
            if self.engine.executor.update(self.param_groups, lrs, steps, inputs, *kept):
                return
        average.before_update(averaged)
        for group, lr in zip(self.param_groups, lrs, strict=True):
            self._update_parameters(group, steps, lr, inputs)
        if not together:  # else step() does this, after the other processes' parameters have arrived
            average.after_update(averaged, rates.average_weight, inputs.ok)

    def _update_parameters(
        self, group: dict[str, Any], steps: dict[nn.Parameter, Tensor], lr: float | Tensor, inputs: StepInputs
    ) -> None:
        """Set theta <- theta (1 - lr wd) - lr v, v <- mu v + p: torch's SGD on the preconditioned gradient."""
        updated = [p for p in group["params"] if p in steps]
        if not updated:
            return
        p_steps = [steps[p] for p in updated]
        parameters: list[Tensor] = [inputs.weights.get(p, p) for p in updated] if inputs.weights else updated
        mu, ok = group["momentum"], inputs.ok
        lr = lr if ok is None else lr * ok
        if mu:
            velocities = []
            for p, step in zip(updated, p_steps, strict=True):
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(step, memory_format=torch.contiguous_format)
                velocities.append(state["momentum_buffer"])
            torch._foreach_mul_(velocities, mu if ok is None else (1 + (mu - 1) * ok).to(velocities[0]))
            torch._foreach_add_(velocities, p_steps)
            p_steps = list(torch._foreach_add(p_steps, velocities, alpha=mu)) if group["nesterov"] else velocities
        if group["weight_decay"] and group["decoupled_weight_decay"]:
            decayed = [i for i, p in enumerate(updated) if group["decay_vectors"] or p not in self._spared]
            weights, their_steps = [parameters[i] for i in decayed], [p_steps[i] for i in decayed]
            decay(weights, their_steps, lr * group["weight_decay"], group["cautious_decay"])
        if isinstance(lr, Tensor):
            torch._foreach_sub_(parameters, torch._foreach_mul(p_steps, lr.to(p_steps[0])))
        else:
            torch._foreach_add_(parameters, p_steps, alpha=-float(lr))

    def close(self) -> None:
        """Remove the hooks, leave the averaged weights in the model, and free recorded CUDA graphs."""
        self.average.rest()
        super().close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients and drop captured data that no step has used."""
        super().zero_grad(set_to_none)
        self.engine.collector.drop()
        self.average.cleared = True

    def stats(self) -> dict[str, float]:
        """Return scalars for any logger: damping, KL-clip hits, refreshes, drift, fallbacks, skipped steps, seconds."""
        stats = engine_stats(self.engine)
        stats["damping"] = float(self.param_groups[0]["damping"])
        if (adaptation := self._adapts()) is not None:
            stats.update(adaptation.stats())
        return stats | {"kl_clip_hits": float(self.kl_clip.hits), "pace": self.lr_fraction.fraction}

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with counters and the model's parameter names under "ekfac"; all plain data.

        With several processes, each of which holds a part of the state, all must call this. Each gets the whole state,
        which can be loaded by any number of processes.
        """
        self.engine.collector.follow()
        whole = whole_state(self.engine)
        extra = checkpoint.engine_state(self.engine, whole)
        extra |= {"pace": self.lr_fraction.save(), "lr_schedule": self.lr_schedule.save()}
        extra["kl_clip_hits"] = float(self.kl_clip.hits)
        names, processes = self.engine.partition.names, self.engine.options.processes
        if self.engine.outlined:
            default_lr = self.defaults["lr"] if self.lr_schedule.automatic else None
            extra["average"] = outline_average(self.average, self.param_groups, default_lr, names)
        else:
            extra["average"] = save_average(self.average, names, processes)
        extra["adaptive_damping"] = None if self._adaptation is None else self._adaptation.save()
        saved = super().state_dict()
        state = {}
        if whole.states:  # an entry for every parameter, as torch.distributed.checkpoint requires
            state = {index: whole.states.get(p, {}) for index, p in enumerate(self._all_parameters())}
        saved["param_groups"][0][EXTRA] = extra
        drop_outline(self.engine)
        return {**saved, "state": state, "ekfac": extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Everything is checked first: names, settings, and the shape, dtype and values of every entry. If anything does
        not fit, an error names the block and the entry, and nothing is changed.
        """
        self.engine.collector.follow()
        state_dict = checkpoint.as_named_here(self.engine, state_dict)
        saved = checkpoint.check(self.engine, state_dict)
        groups = self._saved_groups(state_dict.get("param_groups"))
        found = state_dict.get("state")
        if not isinstance(found, Mapping):
            raise ValueError(f"state_dict, 'state': is of type {type(found).__name__}. Allowed: a dict")
        places = zip((i for group in groups for i in group["params"]), self._all_parameters(), strict=True)
        loaded = checkpoint.prepare(self.engine, saved, {p: found[i] for i, p in places if i in found})
        check_number("'kl_clip_hits'", saved.get("kl_clip_hits"), least=0)
        self.lr_fraction.check(saved.get("pace"))
        lr_schedule = self.lr_schedule.load(saved.get("lr_schedule"))
        if self._adaptation is not None:
            self._adaptation.check(saved.get("adaptive_damping"))
        parameters = {name: p for p, name in self.engine.partition.names.items()}
        average = None if checkpoint.is_blank(saved) else saved.get("average")
        take_average = load_average(self.average, average, parameters)
        drop_outline(self.engine)
        groups[0][EXTRA] = {}
        super().load_state_dict({**state_dict, "state": {}, "param_groups": groups})
        checkpoint.adopt(self.engine, loaded)
        self.state = states = States()  # torch's load_state_dict has replaced it by a plain dict
        states.update({p: of_parameter for p, of_parameter in loaded.states.items() if of_parameter})
        states.follow(self.engine)
        self.engine.partition.take_states(states)
        keep_own(self.engine)
        take_average()
        self.kl_clip.hits, self.lr_schedule = saved["kl_clip_hits"], lr_schedule
        self.lr_fraction.load(saved.get("pace"), self._all_parameters()[0].device)
        if self._adaptation is not None:
            self._adaptation.load(saved.get("adaptive_damping"))


def decay(weights: list[Tensor], steps: list[Tensor], amount: float | Tensor, cautious: bool) -> None:
    """Apply AdamW's decoupled weight decay, theta <- theta (1 - lr wd), before the step.

    Args:
        weights: The weights.
        steps: What is subtracted from them next, up to a positive factor.
        amount: lr wd.
        cautious: Decay a weight only if the step shrinks it too (cautious weight decay, Chen et al., 2025).
    """
    if not weights:
        return
    if not cautious:
        left = 1 - amount
        torch._foreach_mul_(weights, left.to(weights[0]) if isinstance(left, Tensor) else left)
        return
    parts = torch._foreach_sign(weights)
    torch._foreach_mul_(parts, [step.to(p) for p, step in zip(weights, steps, strict=True)])
    torch._foreach_clamp_min_(parts, 0)
    torch._foreach_clamp_max_(parts, CLEAR)
    torch._foreach_mul_(parts, (-amount / CLEAR).to(parts[0]) if isinstance(amount, Tensor) else -amount / CLEAR)
    torch._foreach_addcmul_(weights, weights, parts)
