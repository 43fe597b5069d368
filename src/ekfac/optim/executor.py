"""How the parts of a step are run: one after the other, on any device.

:mod:`ekfac.optim.cuda` runs the same parts faster on a GPU, with the same results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ekfac.curvature.blocks import Block
from ekfac.curvature.factors import by_onednn, onednn_is_faster
from ekfac.optim.options import EngineOptions

if TYPE_CHECKING:
    from ekfac.optim.engine import Apply, Engine
    from ekfac.optim.methods.base import Method
    from ekfac.optim.types import Rates, StepInputs

#: Products of fewer multiplications are not worth another way than the usual one.
WIDE = 2**21


class Part(Protocol):
    """A block, or several."""

    @property
    def multiplications(self) -> int:
        """How many the largest products of one of them take."""


T = TypeVar("T")
P = TypeVar("P", bound=Part)


class Answer:
    """A tensor that the host will read."""

    #: Whether it may not be there yet.
    late = False

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def ready(self, wait: bool) -> bool:
        """Tell whether it is there; with ``wait``, make sure that it is."""
        return True


class Executor:
    """Runs everything at once and in order.

    Args:
        options: The engine's options.
        whole_steps: Whether the optimizer hands over its steps whole, with the update of the parameters.
    """

    #: Whether it can replay what it has run before.
    can_replay = False
    #: Whether there are places for what backward leaves.
    keeps = False
    #: Whether it is better taken in by the step than when it comes, as every call costs more than what it computes.
    waits = False
    #: 1 on the device, or 0 if the last step changed nothing; None where that is known.
    last_mask: Tensor | None = None
    #: Whether the last update has left the average in the parameters.
    shown = False
    #: The largest magnitude of all gradients of a step, where the host knows it.
    largest = math.inf

    def __init__(self, options: EngineOptions, whole_steps: bool) -> None:
        self.options = options
        self.whole_steps = whole_steps
        self._exact = options.refresh.deterministic
        #: What is at places now; whoever puts it there knows it by a key.
        self.kept: dict[Hashable, Any] = {}

    def replay(self, engine: Engine, inputs: StepInputs, rates: Rates, apply: Apply) -> bool:
        """Do a whole step by replaying an earlier one; False where it has to be computed."""
        return False

    def prepare(self, method: Method[Any]) -> None:
        """Begin what the first steps of a method would else wait for."""

    def update(
        self,
        groups: Sequence[Mapping[str, Any]],
        lrs: Sequence[float | Tensor],
        steps: Mapping[nn.Parameter, Tensor],
        inputs: StepInputs,
        offsets: Mapping[nn.Parameter, Tensor],
        weight: float | Tensor,
        spared: Container[Tensor],
        shows: bool,
    ) -> bool:
        """Update parameters and their average in one go; False, and nothing done, where that is not possible.

        Args:
            groups: The parameter groups.
            lrs: Their rates.
            steps: The step of each parameter that has one.
            inputs: The inputs.
            offsets: z - x of parameters whose average takes the step in.
            weight: What the newest weights count in it.
            spared: The parameters that a default decay leaves alone.
            shows: Leave the average in the parameters; :attr:`shown` tells that it was done.
        """
        return False

    def places_of(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor] | None:
        """Return places, of these dtypes, where a replay will find copies of tensors; None where there is no room."""
        return None

    def method(self, method: Method[Any], block: Block) -> Method[Any]:
        """Return what does the same as a method for a block like this one, faster where that is possible."""
        if block.multiplications < WIDE or self._exact:
            return method
        on_cpu = block.key.device.type == "cpu" and block.dtype == torch.float32
        return method.for_wide or method if on_cpu else method

    def parallel(self, function: Callable[[P], T], parts: Sequence[P]) -> list[T]:
        """Call a function of each part, which do not depend on each other; returns what it returns, in their order."""
        return [function(part) if part.multiplications < WIDE else self._wide(function, part) for part in parts]

    def _wide(self, function: Callable[[P], T], part: P) -> T:
        with self.fast_products(part.multiplications):
            return function(part)

    def fast_products(self, multiplications: int) -> AbstractContextManager[None]:
        """Have the fastest library that is as precise do the products inside, of so many multiplications."""
        return by_onednn() if multiplications >= WIDE and not self._exact and onednn_is_faster() else nullcontext()

    def call(
        self,
        what: str,
        key: Hashable,
        function: Callable[..., tuple[Any, ...]],
        *tensors: Tensor,
        fixed: Sequence[Tensor] = (),
    ) -> tuple[Any, ...]:
        """Call a function of tensors that returns tensors, and what does not change from call to call.

        Args:
            what: What it does, for a warning.
            key: All that it depends on besides the tensors.
            function: The function.
            *tensors: Its arguments.
            fixed: Other tensors that it reads and writes, where they are.
        """
        return function(*tensors)

    def beside(self, device: torch.device, numbers: int) -> AbstractContextManager[None]:
        """Run what is launched inside, on so many numbers, beside the next forward and backward pass."""
        return nullcontext()

    def join(self) -> None:
        """Have what follows wait for what runs beside."""

    def settle(self) -> bool:
        """Do so, and tell whether the last step is now known to have changed nothing; once."""
        return False

    def check_finite(self, sizes: list[Tensor], wait: bool) -> tuple[bool, Tensor | None]:
        """Tell whether to go on, and with which mask (None where the step is known to be good).

        Args:
            sizes: The largest magnitude of every gradient.
            wait: Find out now, not in the course of the step.
        """
        kinds = {(size.device, size.dtype) for size in sizes}
        found = [torch.stack([s for s in sizes if (s.device, s.dtype) == kind]).tolist() for kind in kinds]
        numbers = list(itertools.chain.from_iterable(found))
        good = all(map(math.isfinite, numbers))
        self.largest = max(numbers, default=0.0) if good else math.inf
        return good, None

    def answer(self, value: Tensor) -> Answer:
        """Have the host read a tensor later."""
        return Answer(value)

    def close(self) -> None:
        """Let go of everything that is kept to be replayed."""


def make_executor(options: EngineOptions, whole_steps: bool, parameters: Sequence[nn.Parameter]) -> Executor:
    """Return the executor for parameters where they are."""
    return Executor(options, whole_steps)
