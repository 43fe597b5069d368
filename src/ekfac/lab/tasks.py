"""Tasks by name: a network, its loss, its data, and settings that are known to work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ekfac.lab.networks import charlm
from ekfac.lab.networks import paper as networks
from ekfac.lab.registry import LabError, Registry, calling


@dataclass(frozen=True)
class Task:
    """A network, its loss and its data.

    Attributes:
        build: ``build(width, batch_norm)`` returns the network with its initial weights.
        losses: ``losses(output, x, y)`` returns one loss per example; training minimises their mean.
        dataset: Name of the default dataset.
        input_shape: Shape of one example.
        width: Width of the network's first layer in the paper.
        batch_size: Examples per step, unless ``settings`` or the user sets it.
        epochs: Passes over the training data.
        correct: ``correct(output, y)`` returns for each example whether it is right, or which fraction of it is;
            ``None`` if there is no accuracy.
        floor: ``floor(x)`` returns the smallest possible loss of each example; ``None`` if that is zero.
        settings: Good options for optimizers on this task, by their name; the user's take precedence.
        about: One line for listings.
    """

    build: Callable[[int, bool], nn.Module]
    losses: Callable[[Tensor, Tensor, Tensor], Tensor]
    dataset: str
    input_shape: tuple[int, ...]
    width: int
    batch_size: int = 200
    epochs: int = 20
    correct: Callable[[Tensor, Tensor], Tensor] | None = None
    floor: Callable[[Tensor], Tensor] | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    about: str = ""


TASKS: Registry[Task] = Registry("task", plugins=True)


def register_task(name: str, task: Task) -> Task:
    """Register a task for every command of the lab."""
    return TASKS.add(name, task)


def build_network(name: str, width: int | None = None, batch_norm: bool = False) -> nn.Module:
    """Build a task's network, by default of the task's own width.

    Raises:
        LabError: If the task is unknown, or a plugin's function fails or builds something else.
    """
    task = TASKS.get(name)
    with calling(f"task {name}: build(width, batch_norm)"):
        built: Any = task.build(width or task.width, batch_norm)
    if not isinstance(built, nn.Module):
        raise LabError(f"task {name}: build(width, batch_norm) returned a {type(built).__name__}, not an nn.Module")
    return built


def pixel_cross_entropy(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return each image's sum over pixels of the cross-entropy between pixel and sigmoid(output)."""
    return functional.binary_cross_entropy_with_logits(output, x, reduction="none").sum(1)


def pixel_entropy(x: Tensor) -> Tensor:
    """Return each image's entropy summed over pixels: the floor of :func:`pixel_cross_entropy`."""
    return -(torch.xlogy(x, x) + torch.xlogy(1 - x, 1 - x)).sum(1)


def label_cross_entropy(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return each example's cross-entropy between its label and softmax(output)."""
    return functional.cross_entropy(output, y, reduction="none")


def label_correct(output: Tensor, y: Tensor) -> Tensor:
    """Return for each example whether its label has the largest output."""
    return output.argmax(1) == y


register_task(
    "autoencoder",
    Task(
        build=networks.autoencoder,
        losses=pixel_cross_entropy,
        floor=pixel_entropy,
        dataset="mnist-5k",
        input_shape=(784,),
        width=1000,
        # Restarting s at every early refresh lets EKFAC-ra leave the start, where N g^2 is far too large, much earlier.
        settings={"ekfac-ra": {"lr": 0.03, "damping": 1e-3, "refresh_every": 10, "on_refresh": "kronecker"}},
        about="deep auto-encoder of digits, 784-1000-500-250-30 and back",
    ),
)
register_task(
    "classifier",
    Task(
        build=networks.classifier,
        losses=label_cross_entropy,
        correct=label_correct,
        dataset="mnist-5k",
        input_shape=(784,),
        width=50,
        about="digits, four sigmoid layers of 50",
    ),
)
register_task(
    "deep",
    Task(
        build=networks.deep,
        losses=label_cross_entropy,
        correct=label_correct,
        dataset="mnist-5k",
        input_shape=(784,),
        width=50,
        batch_size=500,
        about="digits, eight sigmoid layers of 50 without normalisation: hard to optimize (the demo's)",
    ),
)
# The paper trains its CIFAR-10 networks with the spatially uncorrelated approximation and the appendix's damping, and
# the baselines at batch size 200.
_CONVOLUTIONAL: dict[str, dict[str, Any]] = {
    "sgd": {"batch_size": 200},
    "adam": {"batch_size": 200},
    "kfac": {"sua": True, "refresh_every": 100},
    "ekfac": {"sua": True, "damping_mode": "factored", "damping": 1e-2, "refresh_every": 100},
    "ekfac-ra": {"sua": True, "damping_mode": "factored", "damping": 1e-1, "kl_clip": 1e-2, "refresh_every": 100},
}
register_task(
    "vgg11",
    Task(
        build=networks.vgg11,
        losses=label_cross_entropy,
        correct=label_correct,
        dataset="cifar10",
        input_shape=(3, 32, 32),
        width=64,
        batch_size=500,
        settings=_CONVOLUTIONAL,
        about="VGG11 on CIFAR-10",
    ),
)
register_task(
    "resnet34",
    Task(
        build=networks.resnet34,
        losses=label_cross_entropy,
        correct=label_correct,
        dataset="cifar10",
        input_shape=(3, 32, 32),
        width=64,
        batch_size=500,
        settings=_CONVOLUTIONAL,
        about="ResNet34 on CIFAR-10",
    ),
)
register_task(
    "charlm",
    Task(
        build=charlm.charlm,
        losses=charlm.character_cross_entropy,
        correct=charlm.character_correct,
        dataset="stdlib",
        input_shape=(charlm.CONTEXT,),
        width=128,
        batch_size=64,
        epochs=10,
        about="transformer on the characters of Python's own library",
    ),
)
