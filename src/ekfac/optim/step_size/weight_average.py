"""The running average of the weights, which the model holds between steps.

It goes with the built-in schedule of lr (:mod:`ekfac.optim.step_size.lr_schedule`), and has the effect of an lr that
decays to zero, but needs no known end of training.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ekfac.curvature.capture.forwards import Forwards
from ekfac.optim.distributed.agreement import RollCall
from ekfac.optim.distributed.shards import any_sharded, held, reshard, resharded
from ekfac.optim.executor import Readback
from ekfac.optim.step_size.pairs import Pairs, pieces
from ekfac.optim.step_size.running_statistics import AveragedStatistics, Place
from ekfac.optim.step_size.weight_edits import WeightEdits

#: k: the weights after step t count as t^k, so the average covers about the last ninth of training so far.
POWER = 8
#: Averaging ends after this many consecutive steps whose gradients did not come from the model's forward.
PATIENCE = 3
#: How a model was called since the last step, if at all.
NOT_CALLED, IN_EVALUATION, IN_TRAINING = range(3)


class Included(NamedTuple):
    """What the average includes of the current step.

    Attributes:
        possible: What :attr:`WeightAverage.possible` will be once the step has been taken.
        parameters: The parameters whose average includes it.
        offsets: Their offsets.
        complete: Whether these are all offsets that there are.
        weight: c.
    """

    possible: bool | None = None
    parameters: Sequence[nn.Parameter] = ()
    offsets: Sequence[Tensor] = ()
    complete: bool = False
    weight: float = 0.0


class WeightAverage:
    r"""Trains weights z, and puts their running average x into the model between steps.

    .. math:: x \leftarrow x + c_t (z - x), \quad c_t = (k + 1) / (t + k + 1)

    The parameters hold x from the end of a step until the model's next forward pass with gradients (see also
    :meth:`before_preview`), so x is what you evaluate, save and export. From then until the end of the next step they
    hold z, at which gradients are computed. The state is d = z - x, so user code that changes the weights in between
    changes both. A frozen parameter holds x throughout; its d is kept until it is unfrozen.

    Some things are not averaged: models trained by other methods than their forward, since those give no moment to
    switch to z; models whose weights user code changes repeatedly (see :class:`WeightEdits`); and parameters in half
    precision.

    Running statistics of batch-norm are averaged too, by :class:`AveragedStatistics`. If parameters are sharded, each
    rank averages its shards; gathered copies are freed before the shards change.

    Args:
        model: The model.
        wanted: Whether to average; None averages parameters on the built-in schedule.
        read_back: Returns a handle by which the host can read a tensor, perhaps later.
    """

    def __init__(self, model: nn.Module, wanted: bool | None, read_back: Callable[[Tensor], Readback]) -> None:
        self.wanted = wanted
        #: Detects changes of weights by user code; the number of consecutive steps with gradients at x.
        self.edits, self._at_average = WeightEdits(read_back), 0
        #: Whether this process trains alone; whether all processes have agreed to end averaging at the next forward.
        self._alone, self._ends = True, False
        self._model = weakref.ref(model)
        #: d = z - x of this process's parameters or shards.
        self.offsets: dict[nn.Parameter, Tensor] = {}
        self.statistics = AveragedStatistics()
        #: Whether the parameters hold z; those that hold x nonetheless, because they were frozen at the switch.
        self.training = False
        self.resting: set[nn.Parameter] = set()
        #: Whether this model can be averaged: None until its first step.
        self.possible: bool | None = None
        self.included = Included()
        #: How the model was called since the last step.
        self.called = NOT_CALLED
        self.trains_in_eval = False
        #: Whether gradients were cleared since the last step; in how many steps in a row outputs were then computed
        #: without gradients first, and whether in this one.
        self.cleared, self.previews, self._previewed = False, 0, False
        #: Whether the whole model was ever frozen, and whether it was trained again after that (as in a GAN).
        self._was_frozen = self.alternates = False
        #: Whether parameters are sharded; how to list the tensors to update (shards, or real views of complex ones).
        self._sharded = False
        self._listed: Callable[[Iterable[Tensor]], list[Tensor]] = list
        #: Parameters whose offsets hold d - z, during their update.
        self.in_update: Sequence[nn.Parameter] = ()
        #: Parameters and offsets in lists; None once the offsets have changed.
        self._pairs: Pairs | None = None

    @property
    def model(self) -> nn.Module | None:
        """The model, while there is one."""
        return self._model()

    def watch(self, forwards: Forwards) -> None:
        """Switch weights at the model's forward passes from now on."""
        forwards.on_begin, forwards.on_preview = self.before_forward, self.before_preview
        forwards.on_frozen = self.before_frozen

    def before_frozen(self) -> None:
        """Switch to z although the whole model is frozen, if it alternates between frozen and trained as in a GAN.

        The other network is then trained against z. A frozen model that is never trained again, such as a teacher,
        keeps x.
        """
        self._was_frozen = True
        if self.alternates and not any(p.requires_grad for p in self.offsets):
            self.before_forward(frozen=True)

    def before_forward(self, frozen: bool = False) -> None:
        """Put z into the parameters before a forward pass with gradients.

        Not in evaluation mode, where users often omit ``no_grad``, unless the model has been trained in that mode.
        """
        model = self.model
        trains = model is not None and model.training
        if not frozen:
            self.called = max(self.called, IN_TRAINING if trains else IN_EVALUATION)
        self.statistics.before_forward(model, trains)
        if not self.training and model is not None and (trains or self.trains_in_eval):
            self._to_training(frozen)

    def before_preview(self) -> None:
        """Put z into the parameters before a forward pass without gradients too, if gradients come from its output.

        GradCache computes representations in that way. It is assumed if each of the last steps had such a pass, in
        training mode, after its gradients were cleared: an evaluation is usually in another mode, or elsewhere.
        """
        model = self.model
        if self.cleared and model is not None and model.training:
            self._previewed = True
            if self.previews >= PATIENCE and not self.training:
                self.before_forward()

    @torch.no_grad()
    def _to_training(self, frozen: bool = False) -> None:
        self.training = True
        self.edits.compare()
        if self._ends or (self._alone and self.edits.systematic):
            self._go_on_from_shown()
        if self._pairs is None or self._sharded or not self._pairs.unchanged():
            self._pair()
        assert self._pairs is not None
        self.resting = set() if frozen else self._pairs.frozen.copy()
        if moved := (self._waking() if self.resting else self.offsets):
            model, parameters = self.model, self._pairs.parameters if moved is self.offsets else list(moved)
            # A penalty may already have been computed from x. Keep its graph valid; its backward will read z.
            unseen, parts = _unsafe_preserve_version_counter(tuple(parameters)), self._listed(parameters)
            with resharded(model) if self._sharded and model is not None else unseen:
                torch._foreach_add_(parts, list(moved.values()))
        self.statistics.to_training()

    def _go_on_from_shown(self) -> None:
        """Stop averaging and continue training from x."""
        self.offsets, self.statistics.offsets, self.possible, self._ends, self._pairs = {}, {}, False, False, None

    def _pair(self) -> None:
        """List parameters and offsets, dropping those whose shape has changed."""
        for p in [p for p, d in self.offsets.items() if held(p).shape != d.shape]:
            del self.offsets[p]
        self._look_at_layout()
        self._follow()
        self._pairs = Pairs(self.offsets)

    def _look_at_layout(self) -> None:
        """Find out whether parameters are sharded or complex."""
        self._sharded = any_sharded(self.offsets)
        self._listed = pieces if self._sharded or any(map(torch.is_complex, self.offsets)) else list

    def _follow(self) -> None:
        """Convert the offsets to the parameters' current devices and dtypes."""
        for p, d in self.offsets.items():
            if d.device != p.device or d.dtype != p.dtype.to_real():
                self.offsets[p], self._pairs = d.to(p.device, p.dtype.to_real()), None

    def _waking(self) -> dict[nn.Parameter, Tensor]:
        """Return the offsets of parameters that are not resting."""
        return {p: d for p, d in self.offsets.items() if p not in self.resting}

    @torch.no_grad()
    def rest(self) -> None:
        """Put x into the parameters, also after a step that raised an error."""
        if self.in_update:
            self.after_update(self.in_update)
        self.statistics.find_shown()
        if self.training:
            self.training = False
            self._follow()
            if moved := (self._waking() if self.resting else self.offsets):
                self._let_go()
                torch._foreach_sub_(list(map(held, moved)), list(moved.values()))
            self.statistics.rest()

    def _let_go(self) -> None:
        """Free copies gathered from shards that are about to change."""
        if self._sharded and self.model is not None:
            reshard(self.model)

    # --- a step ---------------------------------------------------------------------------------------------------

    def enter_step(self) -> None:
        """Make sure that the parameters hold z, before processes agree on the step."""
        if self.possible and self.offsets and not self.training:
            self._to_training()

    @torch.no_grad()
    def begin_step(
        self,
        parameters: Sequence[nn.Parameter],
        trained: Container[nn.Parameter],
        t: int,
        agreed: RollCall | None = None,
    ) -> None:
        """Make sure that the parameters hold z, and find what the step will average; it may still be refused.

        Args:
            parameters: The parameters to average.
            trained: The parameters that the step may move (frozen ones may have stale gradients); with several
                processes, those with a gradient on any of them.
            t: The number of earlier steps.
            agreed: With several processes, what they have agreed on.
        """
        self._alone, pairs, weight = agreed is None, self._pairs, (POWER + 1) / (t + POWER + 1)
        usual = self._alone and self.possible and self.training and not self.resting
        usual = usual and all(p.grad is not None and p.requires_grad for p in parameters)
        if usual and pairs is not None and pairs.ids == [*map(id, parameters)]:  # the same as in the last step
            self.included, self._at_average = Included(True, pairs.parameters, pairs.offsets, True, weight), 0
        else:
            self.included = self._find_included(parameters, trained, weight, agreed)

    def _find_included(
        self,
        parameters: Sequence[nn.Parameter],
        trained: Container[nn.Parameter],
        weight: float,
        agreed: RollCall | None,
    ) -> Included:
        """Do the same when the model, its parameters or the processes may have changed since the last step."""
        wanted, alone = set(parameters), agreed is None
        given = {p for p in parameters if p in trained and not (alone and p.grad is None)}
        if not (wanted or self.offsets):
            return Included(self.possible)
        self.called = self.called if agreed is None else agreed.called
        if not (self.called != NOT_CALLED if self.possible is None else self.possible):
            return Included(False)
        if self.training if agreed is None else agreed.called != NOT_CALLED:
            self._at_average = 0
        elif self.possible and not wanted.isdisjoint(given):
            self._at_average += 1
        self._ends = self._at_average > PATIENCE or (agreed is not None and agreed.weights_edited)
        if not self.training:
            self._to_training()
            if self.possible is False:
                return Included(False)
        if gone := self.offsets.keys() - wanted:  # these continue from z, as do the statistics of their norms
            self.offsets, self._pairs = {p: d for p, d in self.offsets.items() if p in wanted}, None
            self.statistics.leave(gone)
        averaged = [p for p in parameters if p in given and p.dtype.to_real() in (torch.float32, torch.float64)]
        for p in averaged:
            if p not in self.offsets:
                self.offsets[p], self._pairs = torch.zeros_like(held(p)), None
            elif p in self.resting:  # thawed since the forward
                self.resting.discard(p)
                held(p).add_(self.offsets[p])
        self._look_at_layout()
        complete = len(averaged) == len(self.offsets)
        return Included(True, averaged, [self.offsets[p] for p in averaged], complete, weight)

    @torch.no_grad()
    def before_update(self, averaged: Sequence[nn.Parameter]) -> None:
        """Replace d by d - z, so that :meth:`after_update` can add the new z."""
        if averaged:
            self.in_update = averaged
            torch._foreach_sub_([self.offsets[p] for p in averaged], self._listed(averaged))

    @torch.no_grad()
    def after_update(
        self, averaged: Sequence[nn.Parameter], weight: float | Tensor = 0.0, ok: Tensor | None = None
    ) -> None:
        """Include the new z in the average.

        Args:
            averaged: As in :meth:`before_update`.
            weight: c.
            ok: 0 on the device if the step was skipped, else 1; None if the host knows.
        """
        if averaged:
            self.in_update = ()
            torch._foreach_add_(offsets := [self.offsets[p] for p in averaged], self._listed(averaged))
            remaining = 1 - weight if ok is None else 1 - weight * ok
            torch._foreach_mul_(offsets, remaining.to(offsets[0]) if isinstance(remaining, Tensor) else remaining)

    def put_back(self, offsets: Mapping[nn.Parameter, Tensor]) -> None:
        """Restore the offsets from before a step that was undone."""
        for p, d in self.offsets.items():
            d.copy_(offsets[p] if p in offsets else torch.zeros_like(d))

    @torch.no_grad()
    def end_step(self, done: bool | None, ok: Tensor | None, shown: bool = False) -> None:
        """Include the new running statistics in their average, and put x into the model.

        Args:
            done: Whether the step was taken: False if it was skipped, None if there was no gradient.
            ok: 0 on the device if the step was skipped, else 1; None if the host knows.
            shown: Whether the update has already left x in the parameters.
        """
        called, self.called = self.called, NOT_CALLED
        self.previews = self.previews + 1 if self._previewed else 0
        self.cleared = self._previewed = False
        if done:
            self.possible, self.alternates = self.included.possible, self.alternates or self._was_frozen
        if not self.offsets:  # not (or no longer) averaged: the modules keep their own statistics
            self.statistics.offsets, self.statistics.shown, self.training = {}, {}, False
            return
        self.trains_in_eval |= bool(done) and called == IN_EVALUATION
        if self.statistics.norms != {}:
            self.statistics.end_step(self.included.weight if done else 0.0, ok, self.offsets.keys(), self._sharded)
        if self._sharded:
            self._let_go()
        moved = self._waking() if self.resting else self.offsets
        if moved and not shown:
            torch._foreach_sub_(self._listed(moved), list(moved.values()))
        self.training = False
        if done and self.edits.due:
            self.edits.record(self.included.parameters)

    def adopt(
        self,
        offsets: dict[nn.Parameter, Tensor],
        statistics: dict[Place, Tensor],
        possible: bool | None,
        resting: set[nn.Parameter],
        *,
        trains_in_eval: bool,
        training: bool,
        alternates: bool,
        previews: bool,
    ) -> None:
        """Replace the state by that of a checkpoint."""
        self.offsets, self._pairs = offsets, None
        self.statistics.adopt(statistics, amid=training)
        self.possible, self.trains_in_eval, self.training = possible, trains_in_eval, training
        self.alternates, self.resting, self._was_frozen = alternates, resting, False
        self.previews, self.cleared, self._previewed = PATIENCE * previews, False, False
        self._sharded, self._ends, self._at_average = any_sharded(offsets), False, 0
        self.edits.forget()
