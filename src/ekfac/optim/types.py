"""The data that the parts of an optimizer exchange: StepInputs, Rates, BlockState, BlockStep and Direction."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.layers.base import Call
from ekfac.optim.distributed.agreement import RollCall
from ekfac.optim.statistics.factored_gradient import Rows
from ekfac.optim.statistics.samples import Sample
from ekfac.optim.statistics.sums import BlockSums

#: The address of a tensor's data.
ADDRESS = operator.methodcaller("data_ptr")
#: A block's calls that are kept for the step: for each forward pass, the calls and the number of examples.
KeptCalls = list[tuple[list[Call], int]]


# --- from step to step --------------------------------------------------------------------------------------------


#: The value of ``near`` before any warm refresh.
UNKNOWN = -1
#: Entries that a block's state has in every checkpoint, with their defaults.
ALWAYS = {"near": UNKNOWN, "failed_refreshes": 0, "strayed": 0}


def without_empty(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without its empty entries, which torch's flattening of state dicts adds."""
    return {
        name: value
        for name, value in state.items()
        if not (value is None or (isinstance(value, dict) and not value) or (name == "near" and value == UNKNOWN))
    }


@dataclass(init=False, eq=False, repr=False, kw_only=True)
class BlockState(MutableMapping[str, Any]):
    """A block's state between steps. A checkpoint holds exactly these fields, under their names.

    Fields that have not been computed yet are unset. Torch sees a mapping of those that are set, like the state of any
    optimizer, plus :data:`ALWAYS`, so that checkpoints of all steps have the same names.

    Attributes:
        momentum_buffer: Momentum of the block's first parameter, as in torch's SGD.
        A: Running sum of h h^T. A and B divided by ``factor_weight`` are the Kronecker factors.
        B: Running sum of delta delta^T.
        factor_weight: Total weight of the batches in A and B.
        failed_refreshes: Number of consecutive solves that failed.
        near: Whether the last warm refresh brought the basis near the factors' eigenbasis; not yet in ``strayed``.
        strayed: Number of consecutive warm refreshes that did not.
    """

    momentum_buffer: Tensor
    A: Tensor
    B: Tensor
    factor_weight: Tensor
    near: bool
    failed_refreshes: int = 0
    strayed: int = 0

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        known = {f.name for f in fields(self)}
        self.__dict__.update({name: v for name, v in without_empty(values or {}).items() if name in known})

    def __getitem__(self, name: str) -> Any:
        known = self.__dict__
        return ALWAYS[name] if name in ALWAYS and name not in known else known[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "near" and value == UNKNOWN:
            return
        if name not in {f.name for f in fields(self)}:
            raise KeyError(f"{type(self).__name__} has no field {name!r}")
        self.__dict__[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self.__dict__ or name not in ALWAYS:
            del self.__dict__[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.__dict__, **ALWAYS} if self.__dict__ else ())

    def __len__(self) -> int:
        return len({**self.__dict__, **ALWAYS}) if self.__dict__ else 0

    def __contains__(self, name: object) -> bool:
        return name in self.__dict__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__dict__})"


@dataclass(init=False, eq=False, repr=False, kw_only=True)
class EigenState(BlockState):
    """The state of a rule in an eigenbasis. A rule with further tensors has a subclass of its own.

    Attributes:
        U_A: Eigenvectors of A; unset if A is kept diagonal.
        U_B: Eigenvectors of B.
        S_A: Eigenvalues of A.
        S_B: Eigenvalues of B.
        s: The scaling, ``[G, O, C]``.
        m: The running mean of the projected gradient.
        count: Number of steps in the averages, on the device.
        examples: The number of examples of the last step, on the device.
    """

    U_A: Tensor
    U_B: Tensor
    S_A: Tensor
    S_B: Tensor
    s: Tensor
    m: Tensor
    count: Tensor
    examples: Tensor


@dataclass(init=False, eq=False, repr=False, kw_only=True)
class InverseState(BlockState):
    """The state of KFAC.

    Attributes:
        inverse_A: The inverse of the damped A.
        inverse_B: The inverse of the damped B.
        inverse_extra: Under SUA, the inverse for the bias.
        added_A: What was added to A's diagonal, one number per group.
        added_B: What was added to B's diagonal.
        inverted_A: The A behind ``inverse_A``; kept once damping has changed.
        inverted_B: The B behind ``inverse_B``.
        inverted_at: The damping of the inverses.
        usual: A running mean of the gradient's squared length.
    """

    inverse_A: Tensor
    inverse_B: Tensor
    inverse_extra: Tensor
    added_A: Tensor
    added_B: Tensor
    inverted_A: Tensor
    inverted_B: Tensor
    inverted_at: float
    usual: Tensor


# --- one step -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupRates:
    """The hyper-parameters of one parameter group in one step: floats, or tensors in a CUDA graph (except beta_2)."""

    lr: float | Tensor
    damping: float | Tensor
    l2: float = 0.0
    maximize: bool = False
    betas: tuple[float | Tensor, float] | None = None
    #: Whether to compare the gradient with the last direction, for ``lr_fraction``.
    compares: bool = False


@dataclass(frozen=True)
class Rates:
    """The hyper-parameters of one step, by parameter group.

    Attributes:
        groups: One entry for each parameter group.
        group_of: The index of each trained parameter's group.
        fixed: Everything else that the update depends on; a CUDA graph is recorded for each value.
        averaged: Parameters whose running average includes this step.
        average_weight: The weight of the newest parameters in the average.
        called: How the model was called since the last step; set only if processes have yet to agree on it.
        weights_edited: In that case, whether this process saw weights change between steps.
        candidates: In that case, parameters whose average includes this step if any process has their gradient.
        keeps_gradients: Whether the update reads the gradients behind the directions.
        shows: Whether ``averaged`` are all parameters with an average, so that the update may swap the average in.
    """

    groups: list[GroupRates]
    group_of: Mapping[nn.Parameter, int]
    fixed: Hashable = None
    averaged: tuple[nn.Parameter, ...] = ()
    average_weight: float | Tensor = 0.0
    called: int | None = None
    weights_edited: bool = False
    candidates: tuple[nn.Parameter, ...] = ()
    keeps_gradients: bool = True
    shows: bool = False

    def of(self, parameter: nn.Parameter) -> GroupRates:
        """Return the hyper-parameters of a parameter's group; a block has those of its first parameter."""
        return self.groups[self.group_of[parameter]]


@dataclass
class StepInputs:
    """What the backward passes have left for a step; from ``sizes`` on, what the step itself finds out, in this order.

    Attributes:
        gradients: ``.grad`` of the parameters that have one, as real numbers.
        calls: Calls that the step itself processes.
        sums: Statistics already summed over calls.
        n: The number of examples behind the gradient, or behind the last statistics if it comes from elsewhere.
        n_statistics: The number of examples behind the statistics.
        solves: Blocks whose bases are solved in full in this step.
        warm: Blocks whose bases are refreshed warm in this step, with the iterations for A and B.
        samples: Samples that the step itself sums, for blocks without an entry in ``sums``.
        batches: The number of batches over all processes; under tensor parallelism several processes share one.
        mean: The factor that makes gradients those of a mean over examples.
        weights: The tensors that the update changes if not the parameters themselves: real views of complex parameters,
            and the full tensors of sharded parameters that this process owns.
        sizes: The largest magnitude of every gradient; set by :meth:`GradientWatch.measure`, as the next two.
        left: The largest magnitude of every gradient as backward left it.
        touched: Parameters whose gradient was changed after backward.
        agreed: What all processes know about the step, if several take it together; set by :meth:`Replicas.begin`.
        ok: 0 on the device if the step is to be skipped, else 1; None if the host knows that it is not. Set by
            :meth:`Engine.check_finite`, as the next two.
        bad: True on the device where ``ok`` is 0.
        small: Whether the host knows that no projected gradient can come near the limits of its dtype.
        blocks: The blocks that the step changes; set by :meth:`Collector.collect`, once all sums are complete.
        rescaled: For each gradient changed since backward, the factor that restores what backward left, unless s is of
            changed gradients; set by :meth:`Collector.verify`.
    """

    gradients: dict[nn.Parameter, Tensor]
    calls: dict[Block, KeptCalls]
    sums: dict[Block, BlockSums]
    n: float | Tensor = 0.0
    n_statistics: float | Tensor = 0.0
    solves: set[Block] = field(default_factory=set)
    warm: dict[Block, tuple[int, int]] = field(default_factory=dict)
    samples: dict[Block, list[Sample]] = field(default_factory=dict)
    batches: int = 1
    mean: float | Tensor = 1.0
    weights: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    sizes: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    left: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    touched: list[nn.Parameter] = field(default_factory=list)
    agreed: RollCall | None = None
    ok: Tensor | None = None
    bad: Tensor | None = None
    small: bool = False
    blocks: list[Block] = field(default_factory=list)
    rescaled: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def masked(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or zeros if the step is skipped."""
        return tensor if self.bad is None else tensor.masked_fill(self.bad, 0.0)


@dataclass
class BlockStep:
    """One block's step: a method's inputs and intermediate results.

    Attributes:
        gradient: The gradient to precondition, ``[G, O, C]``, or its factors h and delta.
        n: The number of examples.
        rates: Damping and other hyper-parameters of the block's group.
        ok: 0 on the device if the step is to be skipped, else 1; None if the host knows that it is not.
        ratio: For a gradient that was rescaled as a whole, the factor that restores what backward left.
        left: The gradient as backward left it, if its parts were rescaled differently and the rule needs it.
        s_star: s* of the examples, for rules that need it.
        basis: The basis in use; None for a parameter that no layer covers.
        g: The gradient in the basis.
        seen: The gradient that updates the scaling, in the basis: as backward left it, or by Adam-like rules ``g``.
        damped: Adds damping to s.
        products: Inner products of g and the last direction, ``[2, 3]``, from rules that compare them.
        blocks: The number of blocks of one shape that are stacked along G.
        count: The number of steps in the averages, including this one; set by rules that count.
        eps: What is added to the square root of s; set by rules whose eps depends on the block.
        small: See :class:`StepInputs`.
    """

    gradient: Tensor | Rows
    n: float | Tensor
    rates: GroupRates
    ok: Tensor | None = None
    ratio: Tensor | None = None
    left: Tensor | None = None
    s_star: Tensor | None = None
    basis: Basis | None = None
    g: Tensor = field(init=False)
    seen: Tensor = field(init=False)
    damped: Callable[[Tensor], Tensor] = field(init=False)
    count: float | Tensor = field(init=False)
    eps: float | Tensor = field(init=False)
    products: Tensor | None = None
    blocks: int = 1
    small: bool = False


#: Cautious decay fades in over step entries (of size about 1) up to this, so that rounding cannot flip it near zero.
CLEAR = 1e-3


@dataclass(frozen=True)
class Direction:
    """A block's preconditioned gradient, and what the bounds on a step's length read.

    Attributes:
        block: The block.
        steps: The preconditioned gradient of each parameter that has a gradient; empty if another process updates them.
        gradient: The gradient that was preconditioned, ``[G, O, C]``; None if it was in factored form, or is not read.
        products: See :class:`BlockStep`.
    """

    block: Block
    steps: dict[nn.Parameter, Tensor]
    gradient: Tensor | None
    products: Tensor | None = None


def factors_of(state: BlockState) -> tuple[Tensor, Tensor]:
    """Return the current factors A and B."""
    weight = state.factor_weight.clamp(min=torch.finfo(state.A.dtype).tiny)
    A, B = state.A, state.B
    if weight.dim():  # several stacked blocks
        weight = weight.repeat_interleave(len(A) // len(weight))
        return A / weight.view(-1, *(1 for _ in A.shape[1:])), B / weight.view(-1, *(1 for _ in B.shape[1:]))
    return A / weight, B / weight


def as_scalar(value: float | Tensor, like: Tensor) -> float | Tensor:
    """Return a number, or a 0-dim tensor in the dtype and on the device of ``like``."""
    return value.to(like) if isinstance(value, Tensor) else float(value)
