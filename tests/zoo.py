"""Small networks of the kinds that people train, each with a task that it can learn in a few hundred steps.

The digits are the 5,000 real ones that the embedded dataset holds, halved to 14 x 14 pixels. The text is the
language reference that comes with Python itself (``pydoc_data.topics``), by characters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ekfac.lab.data.datasets import load_dataset

Batch = tuple[Tensor, Tensor]
CONTEXT = 32


# ------------------------------------------------------------------------------------------------ transformers


class Attention(nn.Module):
    """Self-attention from Linear projections, so that each of them is a layer of its own."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = (f(x).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(n, t, width))


class TransformerBlock(nn.Module):
    """Attention and a small MLP, each behind a norm and beside a skip."""

    def __init__(self, width: int, heads: int, causal: bool, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(width), norm(width)
        self.attention = Attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A decoder whose output layer shares the weight of its token embedding.

    Positions are looked up with indices of shape [N, T], one row an example; ``torch.arange(T)`` alone would have no
    dimension of examples.
    """

    def __init__(
        self, vocabulary: int, width: int = 32, heads: int = 2, blocks: int = 2, context: int = CONTEXT
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, True, nn.LayerNorm) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        nn.init.normal_(self.places.weight, std=width**-0.5)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device).expand(text.shape)
        return self.head(self.norm(self.blocks(self.tokens(text) + self.places(places))))


class ViT(nn.Module):
    """Patches, a learned position each (a bare parameter), transformer blocks with RMSNorm, the mean of all."""

    def __init__(self, width: int = 32, heads: int = 2, blocks: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=2)
        self.places = nn.Parameter(torch.randn(1, 36, width) * 0.1)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, False, nn.RMSNorm) for _ in range(blocks)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(patches)).mean(1))


# ------------------------------------------------------------------------------------------------ convolutions


class InvertedResidual(nn.Module):
    """MobileNet's block: widen by 1 x 1, one filter a channel, narrow by 1 x 1."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        wide = 3 * channels
        self.skip = stride == 1 and channels == out
        self.path = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, stride=stride, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.path(x) if self.skip else self.path(x)


def mobilenet(width: int = 12) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU6(inplace=True),
        InvertedResidual(width, width, 1),
        InvertedResidual(width, 2 * width, 2),
        InvertedResidual(2 * width, 2 * width, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


class UNet(nn.Module):
    """Down twice by strided convolutions, up twice by transposed ones, with skips and GroupNorm."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = self.stage(1, width)
        self.down_1 = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.stage_1 = self.stage(2 * width, 2 * width)
        self.down_2 = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1)
        self.bottom = self.stage(4 * width, 4 * width)
        self.up_2 = nn.ConvTranspose2d(4 * width, 2 * width, 3, stride=2, padding=1)
        self.stage_2 = self.stage(4 * width, 2 * width)
        self.up_1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Sequential(self.stage(2 * width, width), nn.Conv2d(width, 1, 1))

    @staticmethod
    def stage(channels: int, out: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.enter(x)
        middle = self.stage_1(self.down_1(fine))
        bottom = self.bottom(self.down_2(middle))
        middle = self.stage_2(torch.cat([self.up_2(bottom, output_size=middle.shape[-2:]), middle], 1))
        return self.leave(torch.cat([self.up_1(middle), fine], 1))


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn_1, self.bn_2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.skip = nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu(self.bn_1(self.conv_1(x)), inplace=True)
        return F.relu(self.bn_2(self.conv_2(inside)) + self.skip(x), inplace=True)


def resnet(width: int = 12) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 2 * width, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def small_cnn(width: int = 8) -> nn.Module:
    """Without norm layers: two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 10),
    )


# -------------------------------------------------------------------------------------------------------- tasks


@functools.cache
def digits(split: str) -> tuple[Tensor, Tensor]:
    """4,000 digits to train on and 1,000 held out: [N, 1, 14, 14], about zero mean and unit variance, and labels."""
    data = load_dataset("mnist-5k")
    scale = F.avg_pool2d(data.train.x.view(-1, 1, 28, 28), 2)
    x, y = data.splits[split]
    return (F.avg_pool2d(x.view(-1, 1, 28, 28), 2) - scale.mean()) / scale.std(), y


@functools.cache
def text(split: str) -> tuple[Tensor, int]:
    """The text as one long tensor of character numbers, its last tenth held out, and how many characters there are."""
    from pydoc_data.topics import topics

    joined = "\n".join(topics[name] for name in sorted(topics))
    alphabet = {c: i for i, c in enumerate(sorted(set(joined)))}
    stream = torch.tensor([alphabet[c] for c in joined])
    cut = len(stream) * 9 // 10
    return (stream[:cut] if split == "train" else stream[cut:]), len(alphabet)


def digit_batches(size: int, seed: int, split: str = "train") -> Iterator[Batch]:
    x, y = digits(split)
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(x), (size,), generator=generator)
        yield x[rows], y[rows]


def noisy_digit_batches(size: int, seed: int, split: str = "train") -> Iterator[Batch]:
    """Digits under noise of their own size, and the digits themselves."""
    generator = torch.Generator().manual_seed(seed + 1)
    for x, _ in digit_batches(size, seed, split):
        yield x + torch.randn(x.shape, generator=generator), x


def text_batches(size: int, seed: int, split: str = "train") -> Iterator[Batch]:
    stream, _ = text(split)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(stream) - CONTEXT - 1, (size, 1), generator=generator)
        piece = stream[starts + torch.arange(CONTEXT + 1)]
        yield piece[:, :-1], piece[:, 1:]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


@dataclass(frozen=True)
class Problem:
    """A network, its stream of batches (batch size, seed, split) and its loss (output, target)."""

    build: Callable[[], nn.Module]
    batches: Callable[..., Iterator[Batch]]
    loss: Callable[[Tensor, Tensor], Tensor]


PROBLEMS = {
    "gpt": Problem(lambda: GPT(text("train")[1]), text_batches, token_loss),
    "vit": Problem(ViT, digit_batches, F.cross_entropy),
    "mobilenet": Problem(mobilenet, digit_batches, F.cross_entropy),
    "unet": Problem(UNet, noisy_digit_batches, F.mse_loss),
    "resnet": Problem(resnet, digit_batches, F.cross_entropy),
    "cnn": Problem(small_cnn, digit_batches, F.cross_entropy),
}
