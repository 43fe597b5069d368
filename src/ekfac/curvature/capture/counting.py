"""Counts the examples of a forward from the model's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

#: A user's function from the arguments of the model's forward to the number of examples.
Count = Callable[..., int]


@dataclass(frozen=True)
class Counted:
    """The number of examples, from the model's arguments.

    Attributes:
        n: The number of examples; None if no argument shows it, and the first covered layer has to.
        listed: If the first tensor is in a list, the length of that list. It is taken as the number of examples (as in
            a list of images) if the first layer's input confirms it.
        dims: The number of dimensions of the tensor that set n.
    """

    n: int | None
    listed: int | None = None
    dims: int | None = None


def count_examples(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_dim: int) -> Counted:
    """Read the number of examples off the first tensor with a batch dimension, preferring those of several elements.

    A single number (a time, for example) has no batch dimension; a packed sequence knows its number of examples.
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
