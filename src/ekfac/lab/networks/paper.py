"""The paper's four networks, parametrised by the width of the first layer, with or without batch-norm."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn


def autoencoder(width: int = 1000, batch_norm: bool = False) -> nn.Sequential:
    """Build 784-1000-500-250-30-250-500-1000-784, sigmoid, untied weights; the output is the pixels' logits.

    Weights are Xavier-uniform, biases zero; batch-norm precedes each hidden sigmoid. A smaller ``width`` shrinks the
    layers in proportion, but the code keeps 30 units (or the number of its neighbour's, if smaller).
    """
    hidden = [max(1, round(width * fraction)) for fraction in (1.0, 0.5, 0.25)]
    code = min(30, hidden[-1])
    return _sigmoid_net([784, *hidden, code, *reversed(hidden), 784], batch_norm)


def classifier(width: int = 50, batch_norm: bool = False) -> nn.Sequential:
    """Build 784-50-50-50-50-10: four sigmoid layers, Xavier-uniform weights, zero biases; the output is logits."""
    return _sigmoid_net([784, width, width, width, width, 10], batch_norm)


def deep(width: int = 50, batch_norm: bool = False) -> nn.Sequential:
    """Build 784, eight sigmoid layers of 50, 10: a deep plain network that starts on a plateau. Not from the paper."""
    return _sigmoid_net([784, *[width] * 8, 10], batch_norm)


def _sigmoid_net(sizes: list[int], batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (size_in, size_out) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(size_in, size_out)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers.append(linear)
        if index < len(sizes) - 2:
            layers += [nn.BatchNorm1d(size_out)] if batch_norm else []
            layers.append(nn.Sigmoid())
    return nn.Sequential(*layers)


def vgg11(width: int = 64, batch_norm: bool = False) -> nn.Sequential:
    """Build VGG11 for 32x32 images: eight 3x3 convolutions with biases, five poolings, a linear layer 512-10.

    He initialisation, zero biases; optionally batch-norm after each convolution.
    """
    layers: list[nn.Module] = []
    channels = 3
    for step in (1, "pool", 2, "pool", 4, 4, "pool", 8, 8, "pool", 8, 8, "pool"):
        if isinstance(step, str):
            layers.append(nn.MaxPool2d(2))
            continue
        layers.append(_normal(nn.Conv2d(channels, step * width, 3, padding=1), gain=2.0))
        channels = step * width
        layers += [nn.BatchNorm2d(channels)] if batch_norm else []
        layers.append(nn.ReLU())
    layers += [nn.Flatten(), _normal(nn.Linear(channels, 10), gain=2.0)]
    return nn.Sequential(*layers)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: the identity, or a 1x1 convolution if the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int, batch_norm: bool) -> None:
        super().__init__()
        last_gain = 2.0 if batch_norm else 0.2
        self.conv1 = _conv(channels_in, channels, 3, stride, batch_norm, gain=2.0)
        self.conv2 = _conv(channels, channels, 3, 1, batch_norm, gain=last_gain)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = _conv(channels_in, channels, 1, stride, batch_norm, gain=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(conv2(relu(conv1(x))) + shortcut(x))."""
        return torch.relu(self.conv2(torch.relu(self.conv1(x))) + self.shortcut(x))


def resnet34(width: int = 64, batch_norm: bool = False) -> nn.Sequential:
    """Build ResNet34 for 32x32 images: a 3x3 stem, 3, 4, 6, 3 blocks of widths 64 to 512, mean pooling, 512-10.

    Without batch-norm it is initialised as in the paper's appendix, with n a layer's fan-in: N(0, 2/n) after a ReLU;
    N(0, 1/n) if no activation directly precedes (stem, shortcuts, and the head, which follows the pooling);
    N(0, 0.2/n) for the last convolution of each block; zero biases. With batch-norm, convolutions have no bias, and the
    0.2 is 2, since the normalisation would undo it.
    """
    layers: list[nn.Module] = [_conv(3, width, 3, 1, batch_norm, gain=1.0), nn.ReLU()]
    channels = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(ResidualBlock(channels, width * 2**stage, stride, batch_norm))
            channels = width * 2**stage
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), _normal(nn.Linear(channels, 10), gain=1.0)]
    return nn.Sequential(*layers)


def _conv(channels_in: int, channels: int, kernel: int, stride: int, batch_norm: bool, gain: float) -> nn.Module:
    conv = nn.Conv2d(channels_in, channels, kernel, stride, padding=kernel // 2, bias=not batch_norm)
    _normal(conv, gain)
    return nn.Sequential(conv, nn.BatchNorm2d(channels)) if batch_norm else conv


def _normal(layer: nn.Conv2d | nn.Linear, gain: float) -> nn.Conv2d | nn.Linear:
    """Draw W ~ N(0, gain / n) with n the fan-in; set b = 0."""
    fan_in = layer.weight[0].numel()
    nn.init.normal_(layer.weight, std=math.sqrt(gain / fan_in))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
