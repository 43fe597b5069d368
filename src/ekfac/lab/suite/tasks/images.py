"""Tasks on images: two auto-encoders, six classifiers, a denoising network."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ekfac.lab.data.datasets import Dataset, Split, load_dataset
from ekfac.lab.networks import convolutional, dense, paper, transformers
from ekfac.lab.registry import LabError
from ekfac.lab.suite.tasks.base import TASKS, Context, Examples
from ekfac.lab.tasks import label_correct, label_cross_entropy, pixel_cross_entropy, pixel_entropy


@functools.lru_cache(maxsize=3)
def _dataset(name: str, data_dir: Path, device: torch.device) -> Dataset:
    return load_dataset(name, data_dir).to(device, torch.float32)


def _splits(name: str, context: Context, examples: int | None) -> tuple[Split, Split]:
    """Return a dataset's training and validation examples, at most ``examples`` of each."""
    if examples is not None and examples < 1:
        raise LabError(f"examples must be at least 1, not {examples}")
    found = _dataset(name, context.data_dir, context.device).splits
    train, validation = (Split(x[:examples], y[:examples]) for x, y in (found["train"], found["validation"]))
    return train, validation


def _scaled(number: int, scale: float) -> int:
    if not scale > 0:
        raise LabError(f"scale must be positive, not {scale}")
    return max(1, round(number * scale))


def _seeded(context: Context) -> None:
    # On the CPU, so that a network is initialised equally on every device.
    torch.manual_seed(context.seed)


def _classifier(
    model: nn.Module, context: Context, splits: tuple[Split, Split], batch_size: int, bf16: bool, augment: bool = False
) -> Examples:
    return Examples(
        model,
        context,
        *splits,
        label_cross_entropy,
        batch_size,
        correct=label_correct,
        prepare=crop_and_flip if augment else None,
        bf16=bf16,
    )


def crop_and_flip(x: Tensor, chance: torch.Generator) -> Tensor:
    """Flip half of the images, pad all by an eighth of their side, and crop them to their size at random."""
    n, _, _, size = x.shape
    pad = size // 8
    flip = torch.rand(n, generator=chance, device=x.device) < 0.5
    x = functional.pad(torch.where(flip[:, None, None, None], x.flip(3), x), (pad,) * 4)
    top, left = torch.randint(0, 2 * pad + 1, (2, n, 1), generator=chance, device=x.device) + torch.arange(
        size, device=x.device
    )
    rows = torch.arange(n, device=x.device)[:, None, None]
    # Advanced indices separated by a slice put their dimensions first: (n, size, size, channels).
    return x[rows, :, top[:, :, None], left[:, None, :]].permute(0, 3, 1, 2).contiguous()


def relu_autoencoder(
    context: Context, scale: float = 1.0, batch_size: int = 200, examples: int | None = None
) -> Examples:
    """Set up the auto-encoder 784-1000-500-250-30-… with ReLU on Fashion-MNIST; the loss sums over pixels."""
    splits = _splits("fashion-mnist", context, examples)
    _seeded(context)
    model = dense.relu_autoencoder([_scaled(width, scale) for width in (1000, 500, 250, 30)])
    return Examples(model, context, *splits, pixel_cross_entropy, batch_size, floor=pixel_entropy)


def paper_autoencoder(
    context: Context, width: int = 1000, batch_size: int = 200, examples: int | None = None
) -> Examples:
    """Set up the paper's auto-encoder with sigmoids on MNIST."""
    splits = _splits("mnist", context, examples)
    _seeded(context)
    model = paper.autoencoder(width)
    return Examples(model, context, *splits, pixel_cross_entropy, batch_size, floor=pixel_entropy)


def classifier(context: Context, width: int = 50, batch_size: int = 200, examples: int | None = None) -> Examples:
    """Set up 784-50-50-50-50-10 with sigmoids on MNIST."""
    splits = _splits("mnist", context, examples)
    _seeded(context)
    return _classifier(paper.classifier(width), context, splits, batch_size, bf16=False)


def deep_plain(
    context: Context, width: int = 256, layers: int = 24, batch_size: int = 256, examples: int | None = None
) -> Examples:
    """Set up a network of 24 linear layers with ReLU, without skips or norms, on Fashion-MNIST."""
    splits = _splits("fashion-mnist", context, examples)
    _seeded(context)
    return _classifier(dense.plain(784, width, layers, 10), context, splits, batch_size, bf16=False)


def vgg11(
    context: Context, width: int = 64, batch_size: int = 250, examples: int | None = None, bf16: bool = True
) -> Examples:
    """Set up VGG11 without batch-norm on 15,000 images of CIFAR-10, no augmentation."""
    splits = _splits("cifar10-20k", context, examples)
    _seeded(context)
    return _classifier(paper.vgg11(width), context, splits, batch_size, bf16)


def resnet18(
    context: Context, width: int = 64, batch_size: int = 256, examples: int | None = None, bf16: bool = True
) -> Examples:
    """Set up ResNet18 with batch-norm on 15,000 images of CIFAR-10, random crops and flips."""
    splits = _splits("cifar10-20k", context, examples)
    _seeded(context)
    return _classifier(convolutional.resnet18(width), context, splits, batch_size, bf16, augment=True)


def depthwise(
    context: Context, width: int = 32, batch_size: int = 256, examples: int | None = None, bf16: bool = False
) -> Examples:
    """Set up inverted residuals with depthwise convolutions and batch-norm on Fashion-MNIST."""
    splits = [
        Split(((x - 0.286) / 0.353).view(-1, 1, 28, 28), y) for x, y in _splits("fashion-mnist", context, examples)
    ]
    _seeded(context)
    return _classifier(convolutional.depthwise(width), context, (splits[0], splits[1]), batch_size, bf16)


def vit(
    context: Context,
    width: int = 192,
    layers: int = 6,
    heads: int = 3,
    batch_size: int = 256,
    examples: int | None = None,
    bf16: bool = True,
) -> Examples:
    """Set up a vision transformer on 15,000 images of CIFAR-10 in patches of 4 x 4, random crops and flips."""
    _check_heads(width, heads)
    splits = _splits("cifar10-20k", context, examples)
    _seeded(context)
    model = transformers.ViT(32, 4, width, layers, heads)
    return _classifier(model, context, splits, batch_size, bf16, augment=True)


def _check_heads(width: int, heads: int) -> None:
    if heads < 1 or width % heads:
        raise LabError(f"heads must divide the width {width}; {heads} do not")


def unet(
    context: Context,
    width: int = 48,
    noise: float = 0.5,
    batch_size: int = 128,
    examples: int | None = None,
    bf16: bool = True,
) -> Examples:
    """Set up a U-Net that removes Gaussian noise, of half the pixels' standard deviation, from CIFAR-10's images."""
    (clean, _), (held, _) = _splits("cifar10-20k", context, examples)

    def noisy(x: Tensor, chance: torch.Generator) -> Tensor:
        return x + noise * torch.randn(x.shape, generator=chance, device=x.device)

    # The same noise in every evaluation.
    fixed = torch.Generator(context.device).manual_seed(7)
    measured = clean[: len(held)]
    seen, validation = Split(noisy(measured, fixed), measured), Split(noisy(held, fixed), held)
    _seeded(context)
    model = convolutional.UNet(3, width)
    return Examples(
        model, context, Split(clean, clean), validation, squared_error, batch_size, prepare=noisy, seen=seen, bf16=bf16
    )


def squared_error(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return each example's mean squared error."""
    return (output - y).square().flatten(1).mean(1)


TASKS.add("relu-autoencoder", relu_autoencoder)
TASKS.add("autoencoder", paper_autoencoder)
TASKS.add("classifier", classifier)
TASKS.add("deep-plain", deep_plain)
TASKS.add("vgg11", vgg11)
TASKS.add("resnet18", resnet18)
TASKS.add("depthwise", depthwise)
TASKS.add("vit", vit)
TASKS.add("unet", unet)
