"""What passes between the parts of an optimizer: a step's inputs, its rates, a block's state, step and direction."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.curvature.blocks import Block
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.layers.base import Call
from ekfac.optim.statistics.factored_gradient import Rows
from ekfac.optim.statistics.samples import Sample
from ekfac.optim.statistics.sums import BlockSums

#: Where a tensor lies.
ADDRESS = operator.methodcaller("data_ptr")
#: Calls of a block that are kept for the step, by forward pass, each with its number of examples.
KeptCalls = list[tuple[list[Call], int]]


# --- from step to step --------------------------------------------------------------------------------------------


#: Stands for ``near`` where there was no warm refresh.
UNKNOWN = -1
#: What a block's state has in a checkpoint even where nothing was noted.
ALWAYS = {"near": UNKNOWN, "failed_refreshes": 0, "strayed": 0}


def filled(state: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a state, perhaps one that torch has flattened, has only the name of."""
    return {
        name: value
        for name, value in state.items()
        if not (value is None or (isinstance(value, dict) and not value) or (name == "near" and value == UNKNOWN))
    }


@dataclass(init=False, eq=False, repr=False, kw_only=True)
class BlockState(MutableMapping[str, Any]):
    """What is kept of a block from step to step. A checkpoint holds these fields, under their names, and no others.

    A field that has not been computed yet is not there. To torch it is a mapping of those that are, like the state of
    any optimizer; with those of :data:`ALWAYS`, so that checkpoints of all steps have the same names.

    Attributes:
        momentum_buffer: The momentum of the block's first parameter, as torch's SGD has it.
        A: Running sum of h h^T; with ``B``, divided by ``factor_weight``, the Kronecker factors.
        B: Running sum of delta delta^T.
        factor_weight: The weight of what A and B have taken in.
        failed_refreshes: How many solves in a row have failed.
        near: Whether the last warm refresh has brought the basis near the factors' own; not counted yet.
        strayed: How many warm refreshes in a row have not.
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
        self.__dict__.update({name: v for name, v in filled(values or {}).items() if name in known})

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
    """What a rule keeps in an eigenbasis. A rule with further tensors has a subclass of its own.

    Attributes:
        U_A: Eigenvectors of A; not there where A is kept diagonal.
        U_B: Eigenvectors of B.
        S_A: Eigenvalues of A.
        S_B: Eigenvalues of B.
        s: The scaling, ``[G, O, C]``.
        m: The running mean of the projected gradient.
        count: How many steps the averages have taken in, on the device.
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
    """What KFAC keeps.

    Attributes:
        inverse_A: The inverse of the damped A.
        inverse_B: The inverse of the damped B.
        inverse_extra: Under SUA, that of the bias.
        added_A: What was added to A's diagonal, one number a group.
        added_B: What was added to B's.
        inverted_A: A as it was inverted, kept once damping has changed.
        inverted_B: B as it was inverted.
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
    """The numbers of one parameter group in one step: floats, or in a CUDA graph tensors (all but beta_2)."""

    lr: float | Tensor
    damping: float | Tensor
    l2: float = 0.0
    maximize: bool = False
    betas: tuple[float | Tensor, float] | None = None
    #: Whether somebody reads how far gradients agree with the last direction.
    compares: bool = False


@dataclass(frozen=True)
class Rates:
    """The numbers of one step, by parameter group.

    Attributes:
        groups: One for each parameter group.
        group_of: The place of each trained parameter's group.
        fixed: What else the update depends on: steps that differ in it are different steps.
        averaged: Parameters whose average takes the step in.
        average_weight: The weight of the newest ones in it.
        called: How the model was called since the last step, where processes have yet to agree on it.
        mended: There, whether this one has found that somebody changes weights between steps.
        candidates: There, the parameters whose average takes the step in if any process has their gradient.
        keeps_gradients: Whether the update reads what was preconditioned.
        shows: Whether ``averaged`` are all that have an average, so that the update may show it.
    """

    groups: list[GroupRates]
    group_of: Mapping[nn.Parameter, int]
    fixed: Hashable = None
    averaged: tuple[nn.Parameter, ...] = ()
    average_weight: float | Tensor = 0.0
    called: int | None = None
    mended: bool = False
    candidates: tuple[nn.Parameter, ...] = ()
    keeps_gradients: bool = True
    shows: bool = False

    def of(self, parameter: nn.Parameter) -> GroupRates:
        """Return the numbers of a parameter's group; those of a block are its first parameter's."""
        return self.groups[self.group_of[parameter]]


@dataclass(frozen=True)
class Shared:
    """What all processes know of a step that they take together.

    Attributes:
        gradients: The parameters of which any of them has a gradient.
        called: How the model was called, by the one that has come furthest.
        mended: Whether any has found that somebody changes weights between steps.
    """

    gradients: Collection[nn.Parameter]
    called: int
    mended: bool = False


@dataclass
class StepInputs:
    """What the backward passes have left for a step.

    Attributes:
        gradients: ``.grad`` of the parameters that have one, as real numbers.
        calls: Calls that are taken in the step itself.
        sums: What was summed over calls.
        n: The number of examples behind the gradient, or behind the last statistics if it comes from elsewhere.
        n_statistics: The number of examples behind the statistics.
        rescaled: What each gradient that was touched since backward must be multiplied by to be as it was left.
        unknown: Layers of which nothing is known yet, and whose gradient is zero.
        blocks: The blocks that the step changes; found when all gradients and sums are there.
        solves: Blocks whose bases are solved for in full before they are used.
        warm: Blocks whose bases are refreshed, warm, before they are used, and the iterations of their two sides.
        processes: How many processes train together.
        batches: How many batches they have: under tensor parallel several share one.
        mean: What gradients are multiplied by to be those of a mean over examples.
        samples: Samples whose sums are taken in the step itself; of blocks that have none in ``sums``.
        sizes: The largest magnitude of every gradient.
        left: The same as backward left it.
        touched: Parameters whose gradient was changed since.
        ok: 0 on the device in a step that must change nothing; None where that is known not to be so.
        bad: True on the device where ``ok`` is 0.
        weights: What a step changes, where that is not the parameter itself: of complex ones the real numbers, and the
            whole of sharded ones that this process owns.
        called: How the model was called since the last step, by whichever process has come furthest.
        mended: Whether any process has found that somebody changes weights between steps.
        unseen: Covered blocks of which no process has statistics, where several take the step.
        small: Whether the host knows that no projected gradient can come near the limits of its dtype.
    """

    gradients: dict[nn.Parameter, Tensor]
    calls: dict[Block, KeptCalls]
    sums: dict[Block, BlockSums]
    n: float | Tensor = 0.0
    n_statistics: float | Tensor = 0.0
    solves: set[Block] = field(default_factory=set)
    warm: dict[Block, tuple[int, int]] = field(default_factory=dict)
    processes: int = 1
    batches: int = 1
    mean: float | Tensor = 1.0
    samples: dict[Block, list[Sample]] = field(default_factory=dict)
    sizes: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    left: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    touched: list[nn.Parameter] = field(default_factory=list)
    rescaled: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    unknown: set[Block] = field(default_factory=set)
    blocks: list[Block] = field(default_factory=list)
    ok: Tensor | None = None
    bad: Tensor | None = None
    weights: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    called: int = 0
    mended: bool = False
    unseen: set[Block] = field(default_factory=set)
    small: bool = False

    def masked(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or zeros in a step that must change nothing."""
        return tensor if self.bad is None else tensor.masked_fill(self.bad, 0.0)


@dataclass
class BlockStep:
    """One block's step: what a method is given, and what it has made of it so far.

    Attributes:
        gradient: What is preconditioned, ``[G, O, C]``, or the rows that it is the product of.
        n: The number of examples.
        rates: Damping and other numbers of the block's group.
        ok: 0 on the device in a step that must change nothing; None where that is known not to be so.
        ratio: What a gradient that was rescaled as a whole must be multiplied by to be as backward left it.
        left: The gradient as backward left it, where its parts were not rescaled alike.
        s_star: s* of the examples, for rules that need it.
        basis: The basis in use; None for a parameter that no layer covers.
        g: The gradient in the basis.
        seen: The gradient in the basis as backward left it; the scaling is fed with that.
        damped: Adds damping to s.
        products: What tells how far g agrees with the last direction, ``[2, 3]``, of rules that compare them.
        blocks: How many blocks of one shape are stacked in the tensors, along G.
        count: How many steps the averages have taken in, with this one; of rules that count them.
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
    products: Tensor | None = None
    blocks: int = 1
    small: bool = False


#: Coordinates of a step, of about 1, below which they do not fully decide: rounding is not to where they say nothing.
CLEAR = 1e-3


@dataclass(frozen=True)
class Direction:
    """A block's preconditioned gradient, and what the parts that bound a step's length read.

    Attributes:
        block: The block.
        steps: The preconditioned gradient of each of its parameters that has a gradient; none where another process
            updates them.
        gradient: What was preconditioned, ``[G, O, C]``; None where rows stood in its place, or nobody reads it.
        products: See :class:`BlockStep`.
    """

    block: Block
    steps: dict[nn.Parameter, Tensor]
    gradient: Tensor | None
    products: Tensor | None = None


def factors_of(state: BlockState) -> tuple[Tensor, Tensor]:
    """Return A and B as they stand."""
    weight = state.factor_weight.clamp(min=torch.finfo(state.A.dtype).tiny)
    A, B = state.A, state.B
    if weight.dim():  # of several blocks that are stacked
        weight = weight.repeat_interleave(len(A) // len(weight))
        return A / weight.view(-1, *(1 for _ in A.shape[1:])), B / weight.view(-1, *(1 for _ in B.shape[1:]))
    return A / weight, B / weight


def as_scalar(value: float | Tensor, like: Tensor) -> float | Tensor:
    """Return a number, or a 0-dim tensor in the dtype and on the device of ``like``."""
    return value.to(like) if isinstance(value, Tensor) else float(value)
