"""The interface of a task of the suite: a network, its batches, its loss and its measures."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ekfac.lab.data.datasets import Split
from ekfac.lab.data.text import Corpus
from ekfac.lab.registry import LabError, Registry


@dataclass(frozen=True)
class Context:
    """A task's data folder, device and seed."""

    data_dir: Path
    device: torch.device
    seed: int


class Problem(abc.ABC):
    """A network to train, with its data.

    Attributes:
        model: The network, on its device, in its initial state.
        measure: The validation measure: ``"loss"`` or ``"accuracy"``.
        epoch: Steps in one pass over the training data; ``None`` if there are no passes.
    """

    def __init__(self, model: nn.Module, context: Context, bf16: bool, measure: str, epoch: int | None) -> None:
        self.model, self.measure, self.epoch = model.to(context.device), measure, epoch
        self.device, self.seed, self.bf16 = context.device, context.seed, bf16

    @abc.abstractmethod
    def batches(self, seed: int) -> Iterator[Any]:
        """Yield batches without end, the same for the same seed."""

    @abc.abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""

    @abc.abstractmethod
    def _measures(self) -> dict[str, float]:
        """Return the measures of the network, which is in evaluation mode."""

    def evaluate(self) -> dict[str, float]:
        """Return ``train_loss``, ``validation_loss`` and, if there is one, ``validation_accuracy``."""
        was = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return self._measures()
        finally:
            self.model.train(was)

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's output in the weights' precision, computed in bf16 if the task uses it."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            output: Tensor = self.model(x)
        return output if output.dtype == torch.float64 else output.float()


Losses = Callable[[Tensor, Tensor, Tensor], Tensor]
Prepare = Callable[[Tensor, torch.Generator], Tensor]
CHUNK = 2500


class Examples(Problem):
    """Independent examples: batches are drawn without replacement, pass after pass.

    Args:
        model: The network.
        context: Device and seed.
        train: Training examples.
        validation: Validation examples.
        losses: ``losses(output, x, y)`` returns one loss per example.
        batch_size: Examples per step; an incomplete last batch of a pass is dropped.
        correct: ``correct(output, y)`` returns which examples are right; the measure is then accuracy.
        floor: ``floor(x)`` returns the smallest possible loss of each example, which is subtracted from losses.
        prepare: Augments a training batch at random: crops, flips, noise.
        seen: Examples for the training loss; ``train`` by default.
        bf16: Whether the network runs in bf16.
    """

    def __init__(
        self,
        model: nn.Module,
        context: Context,
        train: Split,
        validation: Split,
        losses: Losses,
        batch_size: int,
        *,
        correct: Callable[[Tensor, Tensor], Tensor] | None = None,
        floor: Callable[[Tensor], Tensor] | None = None,
        prepare: Prepare | None = None,
        seen: Split | None = None,
        bf16: bool = False,
    ) -> None:
        if not 1 <= batch_size <= len(train.x):
            raise LabError(f"batch_size must be from 1 to the {len(train.x)} training examples, not {batch_size}")
        measure = "loss" if correct is None else "accuracy"
        super().__init__(model, context, bf16, measure, len(train.x) // batch_size)
        self.train, self.losses, self.correct, self.prepare = train, losses, correct, prepare
        self.batch_size = batch_size
        self.measured = {"train": seen or train, "validation": validation}
        self.floors = {
            name: 0.0 if floor is None else floor(split.x).double().mean().item()
            for name, split in self.measured.items()
        }

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.Generator().manual_seed(seed + 1000)
        change = torch.Generator(self.device).manual_seed(seed + 2000)
        while True:
            places = torch.randperm(len(self.train.x), generator=order).to(self.device)
            for batch in places.split(self.batch_size)[: self.epoch]:
                x, y = self.train.x[batch], self.train.y[batch]
                yield (x if self.prepare is None else self.prepare(x, change)), y

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return self.losses(self.forward(x), x, y).mean()

    def _measures(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, split in self.measured.items():
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            right = torch.zeros_like(total)
            for x, y in zip(split.x.split(CHUNK), split.y.split(CHUNK), strict=True):
                output = self.forward(x)
                total += self.losses(output, x, y).double().sum()
                if self.correct is not None:
                    right += self.correct(output, y).sum()
            found[f"{name}_loss"] = total.item() / len(split.x) - self.floors[name]
            if self.correct is not None:
                found[f"{name}_accuracy"] = right.item() / len(split.x)
        return found


class Windows(Problem):
    """Random windows of a stream of tokens; each token is predicted from those before it in its window.

    Args:
        model: The network.
        context: Device and seed.
        corpus: The tokens.
        length: Tokens per window.
        batch_size: Windows per step.
        evaluated: The number of evenly spaced windows for each measure, or fewer so that they do not overlap.
        bf16: Whether the network runs in bf16.
    """

    def __init__(
        self,
        model: nn.Module,
        context: Context,
        corpus: Corpus,
        length: int,
        batch_size: int,
        evaluated: int,
        bf16: bool,
    ) -> None:
        super().__init__(model, context, bf16, "loss", None)
        self.length, self.batch_size = length, batch_size
        self.streams = {"train": corpus.train.to(context.device), "validation": corpus.validation.to(context.device)}
        shortest = min(map(len, self.streams.values()))
        if not 1 <= length < shortest:
            raise LabError(
                f"length must be from 1 to {shortest - 1}, the shorter stream's tokens less one, not {length}"
            )
        self.starts = {name: self._spread(len(stream), evaluated) for name, stream in self.streams.items()}

    def _spread(self, tokens: int, most: int) -> Tensor:
        count = min(most, (tokens - 1) // self.length)
        last = tokens - 1 - self.length
        return torch.linspace(0, last, count, dtype=torch.float64).long().to(self.device)

    def batches(self, seed: int) -> Iterator[Tensor]:
        chance = torch.Generator(self.device).manual_seed(seed + 1000)
        most = len(self.streams["train"]) - self.length
        while True:
            yield torch.randint(most, (self.batch_size,), generator=chance, device=self.device)

    def _cross_entropy(self, stream: Tensor, starts: Tensor) -> Tensor:
        window = stream[starts[:, None] + torch.arange(self.length + 1, device=self.device)]
        return functional.cross_entropy(self.forward(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())

    def loss(self, batch: Tensor) -> Tensor:
        return self._cross_entropy(self.streams["train"], batch)

    def _measures(self) -> dict[str, float]:
        found = {}
        for name, stream in self.streams.items():
            parts = self.starts[name].split(self.batch_size)
            total = sum(self._cross_entropy(stream, part).item() * len(part) for part in parts)
            found[f"{name}_loss"] = total / len(self.starts[name])
        return found


TASKS: Registry[Callable[..., Problem]] = Registry("task of the suite")
