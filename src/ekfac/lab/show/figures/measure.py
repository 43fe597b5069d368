"""Common code of computed figures: a small network in training, and its per-example gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import ekfac
from ekfac.lab.data.datasets import Split, load_dataset
from ekfac.lab.show.figures.base import Request
from ekfac.lab.tasks import TASKS


class Subject:
    """A task's network, trained step by step by Adam while its curvature is measured.

    Args:
        task: The task's name.
        request: Sets the dataset.
        batch_size: Examples per step.
        lr: Adam's learning rate.
    """

    def __init__(self, task: str, request: Request, *, batch_size: int = 200, lr: float = 3e-3) -> None:
        self.task = TASKS.get(task)
        self.train = load_dataset(request.dataset, request.data_dir).train
        # The auto-encoder's target is its input; its loss is the likelihood of independent pixels.
        self.likelihood = "categorical" if self.task.correct is not None else "bernoulli"
        torch.manual_seed(0)
        self.model = self.task.build(self.task.width, False)
        self.batch_size = batch_size
        self._adam = torch.optim.Adam(self.model.parameters(), lr=lr)
        self._order = torch.Generator().manual_seed(0)

    def batch(self) -> Split:
        """Draw the next batch."""
        index = torch.randint(len(self.train.x), (self.batch_size,), generator=self._order)
        return Split(self.train.x[index], self.train.y[index])

    def backward(self, batch: Split) -> None:
        """Compute the batch's mean gradient in ``.grad``."""
        self._adam.zero_grad()
        self.task.losses(self.model(batch.x), batch.x, batch.y).mean().backward()

    def mean_gradient(self, layers: list[str]) -> Tensor:
        """Return the flat gradient of some layers after :meth:`backward`."""
        named = self.model.named_parameters()
        found = [p.grad.flatten() for name, p in named if p.grad is not None and name.rpartition(".")[0] in layers]
        return torch.cat(found)

    def update(self) -> None:
        """Take an optimizer step with ``.grad``."""
        self._adam.step()

    def steps(self, number: int) -> None:
        """Train for some steps."""
        for _ in range(number):
            self.backward(self.batch())
            self.update()

    def sample(self, examples: int) -> Split:
        """Return the first training examples, on which curvature is measured."""
        return Split(self.train.x[:examples], self.train.y[:examples])

    def layer(self, number: int) -> str:
        """Return the name of the n-th linear layer, counted from one."""
        names: list[str] = [name for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]
        return names[number - 1]

    def fisher(self, approximation: str, split: Split, layers: list[str]) -> ekfac.Curvature:
        """Return the empirical Fisher of some layers over some examples."""
        target = split.y if self.likelihood == "categorical" else split.x
        with self._only(layers):
            return ekfac.fisher(
                self.model, [(split.x, target)], self.likelihood, approximation=approximation, progress=False
            )

    @contextmanager
    def _only(self, layers: list[str]) -> Iterator[None]:
        """Restrict training to these layers, so that curvature is computed only for them."""
        frozen = [p for name, p in self.model.named_parameters() if name.rpartition(".")[0] not in layers]
        for p in frozen:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in frozen:
                p.requires_grad_(True)

    def gradients(self, layers: list[str], split: Split) -> Tensor:
        """Return the gradient of every example's loss with respect to some layers, [examples, parameters]."""
        named = {name: p.detach() for name, p in self.model.named_parameters()}
        chosen = {name: p for name, p in named.items() if name.rpartition(".")[0] in layers}

        def one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            output = functional_call(self.model, {**named, **parameters}, (x[None],))
            return self.task.losses(output, x[None], y[None]).sum()

        found = vmap(grad(one), in_dims=(None, 0, 0), chunk_size=256)(chosen, split.x, split.y)
        return torch.cat([found[name].flatten(1) for name in chosen], 1)


def second_moments(basis: ekfac.Curvature, gradients: Tensor) -> Tensor:
    """Return s*: the mean squares of gradients [examples, parameters] along the axes of an operator's eigenbasis."""
    return basis.project(gradients.mT).square().mean(1)


def flat_spectrum(operator: ekfac.Curvature) -> Tensor:
    """Return an operator's eigenvalues in the order of its basis's axes."""
    return torch.cat([values.flatten() for values in operator.spectrum().values()])
