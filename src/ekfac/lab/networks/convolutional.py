"""Convolutional networks of the suite: a ResNet, one with depthwise convolutions, a U-Net."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


def _conv(channels_in: int, channels: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, groups=groups, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch-norm and a shortcut: the identity, or a 1x1 convolution with batch-norm."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(channels_in, channels, stride=stride), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = _conv(channels, channels), nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(_conv(channels_in, channels, 1, stride), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(norm2(conv2(relu(norm1(conv1(x))))) + shortcut(x))."""
        return torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))) + self.shortcut(x))


def resnet18(width: int = 64, classes: int = 10) -> nn.Sequential:
    """Build ResNet18 with batch-norm for 32x32 images: a 3x3 stem, widths 64 to 512, torch's initialisation."""
    layers: list[nn.Module] = [_conv(3, width), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage, block in itertools.product(range(4), range(2)):
        stride = 2 if stage > 0 and block == 0 else 1
        layers.append(BasicBlock(channels, width * 2**stage, stride))
        channels = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class InvertedResidual(nn.Module):
    """A widening 1x1 convolution, a depthwise 3x3 one, a narrowing 1x1 one; added to x if shapes agree."""

    def __init__(self, channels_in: int, channels: int, stride: int, expansion: int = 4) -> None:
        super().__init__()
        hidden = expansion * channels_in
        self.body = nn.Sequential(
            *(_conv(channels_in, hidden, 1), nn.BatchNorm2d(hidden), nn.ReLU6()),
            *(_conv(hidden, hidden, 3, stride, groups=hidden), nn.BatchNorm2d(hidden), nn.ReLU6()),
            *(_conv(hidden, channels, 1), nn.BatchNorm2d(channels)),
        )
        self.added = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the body's output, plus x if shapes agree."""
        return x + self.body(x) if self.added else self.body(x)  # type: ignore[no-any-return]


def depthwise(width: int = 32, classes: int = 10) -> nn.Sequential:
    """Build a stem of 32 channels, five inverted residuals (32, 64, 64, 128, 128; 2nd and 4th stride 2), a head."""
    widths = [width * times for times in (1, 1, 2, 2, 4, 4)]
    blocks = [
        InvertedResidual(channels_in, channels, stride)
        for (channels_in, channels), stride in zip(itertools.pairwise(widths), (1, 2, 1, 2, 1), strict=True)
    ]
    stem = (_conv(1, width), nn.BatchNorm2d(width), nn.ReLU6())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


class UNet(nn.Module):
    """A U-Net of three scales with skip connections and group-norm; its output is added to its input."""

    def __init__(self, channels: int = 3, width: int = 48) -> None:
        super().__init__()
        self.down1, self.down2 = _double(channels, width), _double(width, 2 * width)
        self.bottom = _double(2 * width, 4 * width)
        self.up2, self.up1 = (nn.ConvTranspose2d(2 * k * width, k * width, 2, 2) for k in (2, 1))
        self.merge2, self.merge1 = _double(4 * width, 2 * width), _double(2 * width, width)
        self.out = nn.Conv2d(width, channels, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return x minus the noise that the network predicts; sides must be multiples of four."""
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.bottom(self.pool(b))
        b = self.merge2(torch.cat([self.up2(c), b], 1))
        a = self.merge1(torch.cat([self.up1(b), a], 1))
        return x + self.out(a)  # type: ignore[no-any-return]


def _double(channels_in: int, channels: int) -> nn.Sequential:
    groups = 8 if channels % 8 == 0 else 1
    layers: list[nn.Module] = []
    for size in (channels_in, channels):
        layers += [_conv(size, channels), nn.GroupNorm(groups, channels), nn.SiLU()]
    return nn.Sequential(*layers)
