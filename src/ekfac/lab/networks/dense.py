"""Networks of linear layers, and one of LSTM layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn


def relu_autoencoder(widths: Sequence[int] = (1000, 500, 250, 30), pixels: int = 784) -> nn.Sequential:
    """Build 784-1000-500-250-30 and back, ReLU with a linear code; the output is the pixels' logits.

    Weights are Xavier-uniform, biases zero.
    """
    sizes = [pixels, *widths, *reversed(widths[:-1]), pixels]
    layers: list[nn.Module] = []
    for index, (size_in, size_out) in enumerate(itertools.pairwise(sizes)):
        linear = nn.Linear(size_in, size_out)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers.append(linear)
        if index not in (len(widths) - 1, len(sizes) - 2):  # the code, and the output
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def plain(inputs: int, width: int, layers: int, outputs: int) -> nn.Sequential:
    """Build linear layers with ReLU, without skips or norms, and a linear output; He-normal weights, zero biases."""
    found: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise([inputs, *[width] * layers, outputs]):
        linear = nn.Linear(size_in, size_out)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        found += [linear, nn.ReLU()]
    return nn.Sequential(*found[:-1])


def regressor(inputs: int, width: int, layers: int) -> nn.Sequential:
    """Build linear layers with SiLU and one output, with torch's default initialisation."""
    found: list[nn.Module] = []
    for size_in in [inputs, *[width] * (layers - 1)]:
        found += [nn.Linear(size_in, width), nn.SiLU()]
    return nn.Sequential(*found, nn.Linear(width, 1), nn.Flatten(0))


class LSTMModel(nn.Module):
    """An embedding, layers of LSTM, a linear layer: the logits of the next token at every position."""

    def __init__(self, vocabulary: int, embedding: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits; x is (examples, positions)."""
        return self.head(self.lstm(self.tokens(x))[0])  # type: ignore[no-any-return]
