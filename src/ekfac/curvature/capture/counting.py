"""How many examples a forward of the model has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

#: The user's own count: from the arguments of the model's forward to the number of its examples.
Count = Callable[..., int]


@dataclass(frozen=True)
class Counted:
    """The number of examples, from the model's arguments.

    Attributes:
        n: The number of examples; None where no argument tells, and the first layer that is reached has to.
        listed: How many tensors the list has in which the first tensor stands: that may be the number of examples too
            (a list of images), and is if it is what the first layer is given.
        dims: How many dimensions the tensor has that was counted by.
    """

    n: int | None
    listed: int | None = None
    dims: int | None = None


def count_examples(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dim: int) -> Counted:
    """Count by the first tensor that has the dimension of examples; a single number (a time, for example) has none.

    A packed sequence knows its number of examples.
    """
    single: Counted | None = None
    for value in (*args, *kwargs.values()):
        if isinstance(value, PackedSequence):
            return Counted(int(value.batch_sizes[0]))
        items = list(tensors(value))
        listed = len(items) if isinstance(value, list) and all(isinstance(item, Tensor) for item in value) else None
        for tensor in items:
            if tensor.dim() <= batch_dim:
                continue
            found = Counted(int(tensor.size(batch_dim)), listed, tensor.dim())
            if tensor.numel() != 1:
                return found
            single = single or found
    return single or Counted(None)


def tensors(value: Any) -> Iterator[Tensor]:
    """Return the tensors of nested arguments, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
