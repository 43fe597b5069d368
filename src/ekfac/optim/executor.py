"""Runs the work of a step eagerly and in order, on any device.

:mod:`ekfac.optim.cuda` runs the same work faster on a GPU, with the same results.
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

#: Products with fewer multiplications than this gain nothing from a faster library.
WIDE = 2**21


class Part(Protocol):
    """A block, or several."""

    @property
    def multiplications(self) -> int:
        """The multiplications in the largest matrix product of one block."""


T = TypeVar("T")
P = TypeVar("P", bound=Part)


class Readback:
    """A tensor that the host will read."""

    #: Whether the value may not have arrived yet.
    late = False

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def ready(self, wait: bool) -> bool:
        """Return whether the value has arrived; with ``wait``, block until it has."""
        return True


class Executor:
    """Runs everything immediately and in order.

    Args:
        options: The engine's options.
        whole_steps: Whether a step includes the update of the parameters.
    """

    #: Whether there are CUDA graphs and fused kernels to try.
    can_replay = False
    #: Whether to process captured tensors in the step, all at once, because launches cost more than the arithmetic.
    defers_statistics = False
    #: On the device, 0 if the last step was skipped, else 1; None if the host knows.
    last_mask: Tensor | None = None
    #: Whether the last update has left the weight average in the parameters.
    average_shown = False
    #: The largest magnitude of all gradients of a step, if the host knows it.
    largest_gradient = math.inf

    def __init__(self, options: EngineOptions, whole_steps: bool) -> None:
        self.options = options
        self.whole_steps = whole_steps
        self._exact = options.refresh.deterministic
        #: What the static buffers hold now, by the key of whoever filled them.
        self.static_samples: dict[Hashable, Any] = {}

    def replay(self, engine: Engine, inputs: StepInputs, rates: Rates, apply: Apply) -> bool:
        """Replay a recorded step; return False if the step has to be computed instead."""
        return False

    def prepare(self, method: Method[Any]) -> None:
        """Start slow preparations (compiling kernels) ahead of a method's first steps."""

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
        """Update parameters and their average in fused kernels; return False, having done nothing, if unsupported.

        Args:
            groups: The parameter groups.
            lrs: The lr of each group.
            steps: The step of each parameter that has one.
            inputs: The step's inputs.
            offsets: z - x of parameters whose average includes this step.
            weight: The weight of the newest parameters in the average.
            spared: Parameters that the default decay spares.
            shows: Leave the average in the parameters and set :attr:`average_shown`.
        """
        return False

    def static_buffers_for(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor] | None:
        """Return static buffers for copies of tensors that a replay will read; None if there is no room."""
        return None

    def method(self, method: Method[Any], block: Block) -> Method[Any]:
        """Return the fastest variant of a method for this block."""
        if block.multiplications < WIDE or self._exact:
            return method
        on_cpu = block.key.device.type == "cpu" and block.dtype == torch.float32
        return method.for_wide or method if on_cpu else method

    def parallel(self, function: Callable[[P], T], parts: Sequence[P]) -> list[T]:
        """Map a function over independent parts; return its results in order."""
        return [function(part) if part.multiplications < WIDE else self._wide(function, part) for part in parts]

    def _wide(self, function: Callable[[P], T], part: P) -> T:
        with self.fast_products(part.multiplications):
            return function(part)

    def fast_products(self, multiplications: int) -> AbstractContextManager[None]:
        """Run matrix products inside with the fastest library of equal precision for products of this size."""
        return by_onednn() if multiplications >= WIDE and not self._exact and onednn_is_faster() else nullcontext()

    def call(
        self,
        what: str,
        key: Hashable,
        function: Callable[..., tuple[Any, ...]],
        *tensors: Tensor,
        fixed: Sequence[Tensor] = (),
    ) -> tuple[Any, ...]:
        """Call a function of tensors; subclasses may record it as a CUDA graph and replay it.

        Args:
            what: What the function does, for a warning.
            key: Everything that it depends on besides the tensors.
            function: The function; what it returns besides tensors must be the same in every call.
            *tensors: Its arguments.
            fixed: Further tensors that it reads and writes in place.
        """
        return function(*tensors)

    def overlapped(self, device: torch.device, numbers: int) -> AbstractContextManager[None]:
        """Overlap the work inside, on tensors of this many numbers, with the next forward and backward pass."""
        return nullcontext()

    def join(self) -> None:
        """Make subsequent work wait for the overlapped work."""

    def settle(self) -> bool:
        """Join; return, once, whether the last step turned out to have been skipped."""
        return False

    def check_finite(self, sizes: list[Tensor], wait: bool) -> tuple[bool, Tensor | None]:
        """Return whether to continue with the step, and its mask ``ok`` (None if the step is known to be finite).

        Args:
            sizes: The largest magnitude of every gradient.
            wait: Synchronise to find out now.
        """
        kinds = {(size.device, size.dtype) for size in sizes}
        found = [torch.stack([s for s in sizes if (s.device, s.dtype) == kind]).tolist() for kind in kinds]
        numbers = list(itertools.chain.from_iterable(found))
        good = all(map(math.isfinite, numbers))
        self.largest_gradient = max(numbers, default=0.0) if good else math.inf
        return good, None

    def read_back(self, value: Tensor) -> Readback:
        """Return a handle by which the host can read a tensor later."""
        return Readback(value)

    def close(self) -> None:
        """Free all recorded graphs and buffers."""


def make_executor(options: EngineOptions, whole_steps: bool, parameters: Sequence[nn.Parameter]) -> Executor:
    """Return the executor for the parameters' device."""
    return Executor(options, whole_steps)
