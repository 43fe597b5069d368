"""What processes agree on before a step: the model, the step number, which gradients exist, and whether to step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ekfac.curvature.real import as_real
from ekfac.optim.distributed.processes import Processes

#: Parameters are compared before every COMPARE_EVERY-th step.
COMPARE_EVERY = 100
#: Encodes a warm refresh with unknown outcome.
UNKNOWN = 2.0

REMEDY = (
    "Processes that share statistics train replicas of one model. If they have different models, as in a pipeline, "
    "pass process_group=None, or the group of the ranks with this model"
)


def digest(value: Any) -> float:
    """Hash plain data to a number of 48 bits, which float64 represents exactly."""
    return float(int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:6], "big"))


def same_everywhere(processes: Processes, number: float, device: torch.device) -> bool:
    """Return whether a number is the same on all processes."""
    least, negative = processes.minimum(torch.tensor([number, -number], dtype=torch.float64, device=device)).tolist()
    return bool(least == -negative)


def structure_of(names: Mapping[nn.Parameter, str], offered: Iterable[nn.Parameter]) -> list[tuple[str, Any]]:
    """Return names, shapes and dtypes of the parameters that an optimizer was given."""
    chosen = set(offered)
    return [(name, (tuple(p.shape), str(p.dtype))) for p, name in names.items() if p in chosen]


def check_structure(processes: Processes, structure: list[tuple[str, Any]], device: torch.device) -> None:
    """Raise, on all processes, if their models differ."""
    if same_everywhere(processes, digest(structure), device):
        return
    everyone = processes.gather(structure)
    first = dict(everyone[0])
    for rank, other in enumerate(everyone):
        theirs = dict(other)
        for name in [*first, *theirs]:
            if first.get(name) != theirs.get(name):
                shown = [f"{what[0]} {what[1]}" if (what := of.get(name)) else "none" for of in (first, theirs)]
                raise RuntimeError(
                    f"process_group: models differ between ranks. Parameter '{name}': {shown[0]} on rank 0, {shown[1]} "
                    f"on rank {rank}. {REMEDY}"
                )
    raise RuntimeError(f"process_group: models differ between ranks in the order of their parameters. {REMEDY}")


def compare_parameters(processes: Processes, parameters: Mapping[str, Tensor]) -> None:
    """Raise, on all processes, if a parameter differs between them; the error names the first such parameter."""
    if not parameters:
        return
    device = next(iter(parameters.values())).device
    sums = torch.stack([checksum(p).to(device) for p in parameters.values()])
    least, inverted = processes.minimum(torch.stack([sums, ~sums])).tolist()
    for name, one, other in zip(parameters, least, inverted, strict=True):
        if one != ~other:
            raise RuntimeError(
                f"parameter '{name}' differs between ranks. Start all of them from the same weights (by "
                "DistributedDataParallel or a common seed), and make any change to weights on all ranks. " + REMEDY
            )


def checksum(parameter: Tensor) -> Tensor:
    """Sum a tensor's bits as integers, which wrap around, so that the order of summation does not matter."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    numbers = as_real(parameter.detach())
    return numbers.view(integers[numbers.element_size()]).sum(dtype=torch.int64)


@dataclass(frozen=True)
class Report:
    """What one process knows about a step before taking it. Lists have one entry per parameter.

    Attributes:
        failed: Whether it has an error.
        at: Plain data that must be the same on all processes, such as the step number.
        finite: Whether its gradients are finite.
        examples: Whether it has captured examples.
        called: How the model was called since the last step.
        weights_edited: Whether it saw weights change between steps.
        sent: The number of buckets it sent during the backward pass.
        passes: The number of backward passes that brought statistics.
        gradients: Whether it has a gradient.
        touched: Whether it has changed the gradient after backward.
        near: The outcome of the last warm refresh of the block whose key the parameter is; None if unknown.
        seen: Whether it has statistics of that block.
        places: The position of that block in the order of arrival of statistics.
        largest: Numbers to take the maximum of; not NaN if gradients are finite.
    """

    failed: bool
    at: Any
    finite: bool
    examples: bool
    called: int
    weights_edited: bool
    sent: int
    passes: int
    gradients: list[bool]
    touched: list[bool]
    near: list[bool | None]
    seen: list[bool]
    places: list[float]
    largest: list[float]


@dataclass(frozen=True)
class RollCall:
    """What all processes know about a step once they have exchanged their reports.

    Attributes:
        failed: The first rank with an error; the number of ranks if there is none.
        diverged: Whether ranks are at different steps or train different parameters.
        finite: Whether all gradients are finite.
        examples: Whether any rank has captured examples.
        called: How the model was called, the maximum over ranks.
        weights_edited: Whether any rank saw weights change between steps.
        sent: The number of buckets sent during the backward pass, the maximum over ranks.
        passes: The number of backward passes that brought statistics, the maximum over ranks.
        holders: The first rank with a gradient; None if there is none.
        complete: Whether all ranks have a gradient.
        touched: Whether any rank changed the gradient after backward.
        near: The outcome of the last warm refresh of the parameter's block; None if unknown.
        seen: Whether any rank has statistics of the block whose key the parameter is.
        places: The position of these in the order of arrival, the maximum over ranks.
        largest: The maximum over ranks of numbers from their shards.
    """

    failed: int
    diverged: bool
    finite: bool
    examples: bool
    called: int
    weights_edited: bool
    sent: int
    passes: int
    holders: list[int | None]
    complete: list[bool]
    touched: list[bool]
    near: list[bool | None]
    seen: list[bool]
    places: list[float]
    largest: list[float]


def roll_call(processes: Processes, device: torch.device, mine: Report) -> RollCall:
    """Exchange what each process knows about its step, in a single reduction for which the host waits.

    Args:
        processes: The processes.
        device: The device of the reduction.
        mine: This process's report.
    """
    rank, size, at, count = processes.rank, processes.size, digest(mine.at), len(mine.gradients)
    holders = [rank if there else size for there in mine.gradients]
    near = [UNKNOWN if n is None else n for n in mine.near]
    largest = mine.largest if mine.finite else [0.0] * len(mine.largest)
    # Numbers of which all need the minimum, and numbers of which all need the maximum: the negated minimum of -x.
    low = [rank if mine.failed else size, at, mine.finite, *holders, *mine.gradients, *near]
    high = [at, mine.examples, mine.called, mine.weights_edited, mine.sent, mine.passes]
    high += [*mine.touched, *mine.seen, *mine.places, *largest]
    numbers = torch.tensor([*map(float, low), *(-float(x) for x in high)], dtype=torch.float64, device=device)
    found = processes.minimum(numbers).tolist()
    failed, least_at, finite, *lowest = found[: len(low)]
    most_at, examples, called, weights_edited, sent, passes, *highest = (-x for x in found[len(low) :])
    holders, complete, near = (lowest[i * count : (i + 1) * count] for i in range(3))
    touched, seen, places = (highest[i * count : (i + 1) * count] for i in range(3))
    return RollCall(
        failed=int(failed),
        diverged=least_at != most_at,
        finite=bool(finite),
        examples=bool(examples),
        called=int(called),
        weights_edited=bool(weights_edited),
        sent=int(sent),
        passes=int(passes),
        holders=[int(h) if h < size else None for h in holders],
        complete=[bool(c) for c in complete],
        touched=[bool(t) for t in touched],
        near=[None if n == UNKNOWN else bool(n) for n in near],
        seen=[bool(s) for s in seen],
        places=places,
        largest=highest[3 * count :],
    )
