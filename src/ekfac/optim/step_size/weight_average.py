"""The running average of the weights, which the model holds between steps.

It goes with the built-in schedule of lr (:mod:`ekfac.optim.step_size.lr_schedule`), and has the effect of an lr that
decays to zero, but needs no known end of training.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ekfac.optim.distributed.shards import any_sharded, held, reshard, resharded
from ekfac.optim.executor import Readback
from ekfac.optim.step_size.pairs import Pairs, pieces
from ekfac.optim.step_size.running_statistics import (
    STATISTICS,
    VARIANCE,
    Buffers,
    Place,
    batches_of,
    buffers_at,
    norms_of,
)
from ekfac.optim.step_size.weight_edits import WeightEdits
from ekfac.optim.types import Shared

#: k: the weights after step t count as t^k, so the average covers about the last ninth of training so far.
POWER = 8
#: Averaging ends after this many consecutive steps whose gradients did not come from the model's forward.
PATIENCE = 3
#: How a model was called since the last step, if at all.
NOT_CALLED, IN_EVALUATION, IN_TRAINING = range(3)

#: Which average owns the statistics of each norm: several optimizers may train parts of one model.
_TAKEN_BY: weakref.WeakKeyDictionary[nn.Module, weakref.ref[WeightAverage]] = weakref.WeakKeyDictionary()


class WeightAverage:
    r"""Trains weights z, and puts their running average x into the model between steps.

    .. math:: x \leftarrow x + c_t (z - x), \quad c_t = (k + 1) / (t + k + 1)

    The parameters hold x from the end of a step until the model's next forward pass with gradients, so x is what you
    evaluate, save and export. From then until the end of the next step they hold z, at which gradients are computed.
    The state is d = z - x, so user code that changes the weights in between changes both. A frozen parameter holds x
    throughout; its d is kept until it is unfrozen.

    Some things are not averaged: models trained by other methods than their forward, since those give no moment to
    switch to z; models whose weights user code changes repeatedly (see :class:`WeightEdits`); and parameters in half
    precision.

    Running statistics of batch-norm belong to the weights that they were computed with, so x has its own: the average
    of the batches' statistics, with the same weights c. The modules' own, which start at 0 and 1 and lag by about ten
    batches, belong to z. Norms whose weights are trained but not averaged keep their own.

    If parameters are sharded, each rank averages its shards. Gathered copies are freed before the shards change.

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
        #: d = z - x of this process's parameters or shards, and of running statistics by module and name.
        self.offsets: dict[nn.Parameter, Tensor] = {}
        self.statistics: dict[Place, Tensor] = {}
        #: Whether the parameters hold z; those that hold x nonetheless, because they were frozen at the switch.
        self.training = False
        self.resting: set[nn.Parameter] = set()
        #: Whether this model can be averaged: None until its first step.
        self.possible: bool | None = None
        #: For the current step: the value of :attr:`possible` after it, the parameters whose average includes it, their
        #: offsets, whether these are all, and c.
        self._possible_now: bool | None = None
        self.averaged: list[nn.Parameter] = []
        self.in_step: list[Tensor] = []
        self.takes_all = False
        self.weight = 0.0
        #: How the model was called since the last step.
        self.called = NOT_CALLED
        self.trains_in_eval = False
        #: Whether the whole model was ever frozen, and whether it was trained again after that (as in a GAN).
        self._was_frozen = self.alternates = False
        #: Whether parameters are sharded; how to list the tensors to update (shards, or real views of complex ones).
        self._sharded = False
        self._listed: Callable[[Iterable[Tensor]], list[Tensor]] = list
        #: Parameters whose offsets hold d - z, during their update.
        self.in_update: Sequence[nn.Parameter] = ()
        #: x of the running statistics while their modules hold z.
        self.shown: dict[Place, Tensor] = {}
        self._pairs: Pairs | None = None
        self._buffers: list[Buffers] = []
        #: The places of :attr:`_buffers`, in two orders.
        self._places: tuple[list[Place], ...] = ()
        #: Modules with running statistics and the batches each had seen at the first forward; after the first step also
        #: the batches per forward. Reading these counters makes the host wait, so it is done only once.
        self._norms: dict[nn.Module, int] | None = None
        self._calls: dict[nn.Module, int] | None = None
        #: Forward passes in training mode since the last step.
        self._forwards = 0
        #: Whether the state was loaded from a checkpoint made between forward and step: it then holds z' - x instead of
        #: z - x, from which x has to be recovered.
        self._found_amid = False

    @property
    def model(self) -> nn.Module | None:
        """The model, while there is one."""
        return self._model()

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
        self._forwards += trains
        self._find_shown()
        if self._norms is None:
            self._norms = {module: batches_of(module) for module in norms_of(model)}
        if not self.training and model is not None and (trains or self.trains_in_eval):
            self._to_training(frozen)

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
        places = [place for place in self.statistics if place[0].training]
        if places:
            self.shown = {}
            for buffers in self._buffers_at(places):
                buffers.to_training()
                self.shown |= buffers.shown

    def _go_on_from_shown(self) -> None:
        """Stop averaging and continue training from x."""
        self.offsets, self.statistics, self.possible, self._ends, self._pairs = {}, {}, False, False, None

    def _pair(self) -> None:
        """List parameters and offsets, dropping those whose shape has changed."""
        for p in [p for p, d in self.offsets.items() if held(p).shape != d.shape]:
            del self.offsets[p]
        self._sharded = any_sharded(self.offsets)
        self._listed = pieces if self._sharded or any(map(torch.is_complex, self.offsets)) else list
        self._follow()
        self._pairs = Pairs(self.offsets)

    def _buffers_at(self, places: list[Place]) -> list[Buffers]:
        if places not in self._places or not all(buffers.unchanged() for buffers in self._buffers):
            self._buffers = buffers_at(places, self.statistics)
            self._places = places, [place for buffers in self._buffers for place in buffers.places]
        return self._buffers

    def _find_shown(self) -> None:
        if self._found_amid:
            self._found_amid = False
            self.shown = {(m, name): getattr(m, name) - d for (m, name), d in self.statistics.items() if m.training}

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
        self._find_shown()
        if self.training:
            self.training = False
            self._follow()
            if moved := (self._waking() if self.resting else self.offsets):
                self._let_go()
                torch._foreach_sub_(list(map(held, moved)), list(moved.values()))
            if self.shown:
                torch._foreach_copy_([getattr(module, name) for module, name in self.shown], list(self.shown.values()))
            self.shown = {}

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
        self, parameters: Sequence[nn.Parameter], trained: Container[nn.Parameter], t: int, shared: Shared | None = None
    ) -> None:
        """Make sure that the parameters hold z, and find what the step will average; it may still be refused.

        Args:
            parameters: The parameters to average.
            trained: The parameters that the step may move; frozen ones may have stale gradients.
            t: The number of earlier steps.
            shared: With several processes, what they have agreed on.
        """
        self._possible_now, self._alone, pairs = self.possible, shared is None, self._pairs
        usual = self._alone and self.possible and self.training and not self.resting
        usual = usual and all(p.grad is not None and p.requires_grad for p in parameters)
        if usual and pairs is not None and pairs.ids == [*map(id, parameters)]:  # the same as in the last step
            self.averaged, self.in_step, self.takes_all = pairs.parameters, pairs.offsets, True
            self.weight, self._at_average = (POWER + 1) / (t + POWER + 1), 0
        else:
            self._find_averaged(parameters, trained, t, shared)

    def _find_averaged(
        self, parameters: Sequence[nn.Parameter], trained: Container[nn.Parameter], t: int, shared: Shared | None
    ) -> None:
        """Do the same when the model, its parameters or the processes may have changed since the last step."""
        wanted = set(parameters)
        given = shared.gradients if shared else {p for p in parameters if p.grad is not None and p in trained}
        self.averaged, self.in_step, self.takes_all, self.weight = [], [], False, 0.0
        if not (wanted or self.offsets):
            return
        self.called = self.called if shared is None else shared.called
        self._possible_now = self.called != NOT_CALLED if self.possible is None else self.possible
        if not self._possible_now:
            return
        if self.training if shared is None else shared.called != NOT_CALLED:
            self._at_average = 0
        elif self.possible and not wanted.isdisjoint(given):
            self._at_average += 1
        self._ends = self._at_average > PATIENCE or (shared is not None and shared.weights_edited)
        if not self.training:
            self._to_training()
            if self.possible is False:
                self._possible_now = False
                return
        if gone := self.offsets.keys() - wanted:  # these continue from z, as do the statistics of their norms
            self.offsets, self._pairs = {p: d for p, d in self.offsets.items() if p in wanted}, None
            for norm in {m for m, _ in self.statistics if not gone.isdisjoint(m.parameters(recurse=False))}:
                self.leave(norm)
        self.averaged = [p for p in parameters if p in given and p.dtype.to_real() in (torch.float32, torch.float64)]
        self.weight = (POWER + 1) / (t + POWER + 1)
        for p in self.averaged:
            if p not in self.offsets:
                self.offsets[p], self._pairs = torch.zeros_like(held(p)), None
            elif p in self.resting:  # thawed since the forward
                self.resting.discard(p)
                held(p).add_(self.offsets[p])
        self.in_step = [self.offsets[p] for p in self.averaged]
        self.takes_all = len(self.averaged) == len(self.offsets)
        self._sharded = shared is not None and any_sharded(self.offsets)
        self._listed = pieces if self._sharded or any(map(torch.is_complex, self.offsets)) else list

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
        """Include the new running statistics in their average, d <- (1 - c) (z - x), and put x into the model.

        Args:
            done: Whether the step was taken: False if it was skipped, None if there was no gradient.
            ok: 0 on the device if the step was skipped, else 1; None if the host knows.
            shown: Whether the update has already left x in the parameters.
        """
        called, self.called = self.called, NOT_CALLED
        if done:
            self.possible, self.alternates = self._possible_now, self.alternates or self._was_frozen
        if not self.offsets:  # not (or no longer) averaged: the modules keep their own statistics
            self.statistics, self.shown, self.training = {}, {}, False
            return
        self.trains_in_eval |= bool(done) and called == IN_EVALUATION
        forwards, self._forwards = self._forwards, 0
        norms = self._norms or {}
        if self._calls is None:
            seen = {module: batches_of(module) - before for module, before in norms.items()}
            self._calls = {module: max(1, batches // max(1, forwards)) for module, batches in seen.items()}
        if norms and len(self.shown) < len(STATISTICS) * sum([module.training for module in norms]):
            taken = [m for m in norms if m.training and (m, VARIANCE) not in self.statistics and self._takes(m)]
            new = [(m, name) for m in taken for name in STATISTICS]
            self.statistics.update((place, torch.zeros_like(getattr(*place))) for place in new)
        if self.shown:
            for buffers in self._buffers_at(list(self.shown)):
                if any(map(operator.is_not, buffers.shown.values(), [self.shown[place] for place in buffers.places])):
                    buffers.find_shown(self.shown)
                buffers.average(forwards, self._calls, self.weight if done else 0.0, ok)
            self.shown = {}
        if self._sharded:
            self._let_go()
        moved = self._waking() if self.resting else self.offsets
        if moved and not shown:
            torch._foreach_sub_(self._listed(moved), list(moved.values()))
        self.training = False
        if done and self.edits.due:
            self.edits.record(self.averaged)

    def _takes(self, norm: nn.Module) -> bool:
        """Return whether to average a norm's statistics: if its weights are averaged, or else unless others do."""
        own = [] if self._sharded else [p for p in norm.parameters(recurse=False) if p.requires_grad]
        other = _TAKEN_BY.get(norm, lambda: None)()
        others = other is not None and other is not self and (norm, VARIANCE) in other.statistics
        if self.offsets.keys().isdisjoint(own) if own else others:
            return False
        if other is not None and others:
            other.leave(norm)
        _TAKEN_BY[norm] = weakref.ref(self)
        return True

    def leave(self, norm: nn.Module) -> None:
        """Stop averaging a norm's statistics."""
        for name in STATISTICS:
            self.statistics.pop((norm, name), None)
            self.shown.pop((norm, name), None)

    def adopt(
        self,
        offsets: dict[nn.Parameter, Tensor],
        statistics: dict[Place, Tensor],
        possible: bool | None,
        trains_in_eval: bool,
        training: bool,
        alternates: bool,
        resting: set[nn.Parameter],
    ) -> None:
        """Replace the state by that of a checkpoint."""
        self.offsets, self.statistics, self.shown, self._found_amid = offsets, statistics, {}, training
        self._pairs, self._buffers, self._places = None, [], ()
        self.possible, self.trains_in_eval, self.training = possible, trains_in_eval, training
        self.alternates, self.resting, self._was_frozen = alternates, resting, False
        self._sharded, self._ends, self._at_average = any_sharded(offsets), False, 0
        self.edits.forget()
