"""Small networks in float64, with streams of batches that are the same to the last bit on every machine.

Weights and data come from Python's own generator, whose ``random`` is the same everywhere, and not from torch's. There
are more examples than columns, no bias before a norm and no bias after one, so that no eigenvalue of a factor is null
or repeated: the bases are defined up to sign, to which results are indifferent.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


def uniform(seed: str, *shape: int) -> Tensor:
    """Numbers of zero mean and unit variance."""
    generator = random.Random(seed)
    numbers = [(2 * generator.random() - 1) * math.sqrt(3) for _ in range(math.prod(shape))]
    return torch.tensor(numbers, dtype=torch.float64).reshape(shape)


def fill(model: nn.Module) -> nn.Module:
    """The model in float64, with weights of the usual size; biases and norms are moved off zero and one."""
    model = model.double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.copy_(uniform(name, *p.shape) / math.sqrt(p[0].numel()))
            else:
                p.copy_(uniform(name, *p.shape) * 0.2 + name.endswith("weight"))
    return model


# ------------------------------------------------------------------------------------------------------- networks


class Transformer(nn.Module):
    """Embeddings of tokens and places, attention of two heads, a norm, a small MLP, a head."""

    def __init__(self, vocabulary: int = 7, length: int = 5, width: int = 6) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        self.key = nn.Linear(width, width, bias=False)  # softmax would not see a bias
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 10, bias=False), nn.Linear(10, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        n, t = text.shape
        x = self.tokens(text) + self.places(torch.arange(t).expand(n, t))
        q, k, v = (f(x).view(n, t, 2, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(n, t, -1))
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self, vocabulary: int = 7, width: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.tokens(text))))


class Recurrent(nn.Module):
    """One linear layer for all places of a sequence ``[N, T, 3]``, whose calls are positions of one example."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(9, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 6)
        for one in x.unbind(1):
            state = torch.tanh(self.cell(torch.cat([one, state], 1)))
        return self.head(state)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4))


def batch_second() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4))


def conv() -> nn.Module:
    """On 6 x 6 pixels, where no two taps of the first layer read the same ones: their means would be equal."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 4, 2, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, bias=False),
        nn.BatchNorm2d(5),
        nn.PReLU(5),
        nn.Flatten(),
        nn.Linear(20, 6, bias=False),
        nn.BatchNorm1d(6),
        nn.Tanh(),
        nn.Linear(6, 3),
    )


def transposed() -> nn.Module:
    """On 7 positions: round 6 of them the taps would stand alike, and eigenvalues of A come in equal pairs."""
    return nn.Sequential(
        nn.Conv1d(3, 5, 3, dilation=2, padding=2, padding_mode="circular"),
        nn.GroupNorm(1, 5),
        nn.SiLU(),
        nn.ConvTranspose1d(5, 2, 3, stride=2, bias=False),
    )


# ----------------------------------------------------------------------------------------------------------- data


def numbers(shape: tuple[int, ...], out: int) -> Callable[[str, int], Batch]:
    """Inputs of a shape, and a smooth function of them with some noise."""

    def batch(seed: str, n: int) -> Batch:
        x = uniform(f"x {seed}", n, *shape)
        teacher = uniform(f"teacher {shape}", math.prod(shape), out) / math.sqrt(math.prod(shape))
        return x, torch.tanh(2 * x.flatten(1) @ teacher) + 0.1 * uniform(f"y {seed}", n, out)

    return batch


def tokens(length: int, vocabulary: int = 7) -> Callable[[str, int], Batch]:
    """Tokens, and one-hot sums of neighbours."""

    def batch(seed: str, n: int) -> Batch:
        generator = random.Random(f"tokens {seed}")
        x = torch.tensor([[generator.randrange(vocabulary) for _ in range(length)] for _ in range(n)])
        return x, F.one_hot((x + x.roll(1, 1)) % vocabulary, vocabulary).double()

    return batch


def sequences_first(seed: str, n: int) -> Batch:
    """Sequences ``[T, N, 3]``, whose second dimension counts examples."""
    x, y = numbers((4, 3), 12)(seed, n)
    return x.transpose(0, 1).contiguous(), y.reshape(n, 4, 3).transpose(0, 1).contiguous()


def signals(seed: str, n: int) -> Batch:
    x, y = numbers((3, 7), 30)(seed, n)
    return x, y.reshape(n, 2, 15)


@dataclass(frozen=True)
class Network:
    """How a network is made, and its batches by seed and number of examples."""

    build: Callable[[], nn.Module]
    batch: Callable[[str, int], Batch]


NETWORKS = {
    "mlp": Network(mlp, numbers((6,), 4)),
    "wide": Network(wide, numbers((20,), 4)),
    "conv": Network(conv, numbers((2, 6, 6), 3)),
    "batchnorm": Network(batchnorm, numbers((2, 4, 4), 3)),
    "transposed": Network(transposed, signals),
    "transformer": Network(Transformer, tokens(5)),
    "tied": Network(Tied, tokens(4)),
    "recurrent": Network(Recurrent, numbers((4, 3), 3)),
    "batch second": Network(batch_second, sequences_first),
}


def build(network: str) -> nn.Module:
    return fill(NETWORKS[network].build())


@functools.cache
def batch(network: str, seed: str, n: int) -> Batch:
    return NETWORKS[network].batch(seed, n)
