"""Language models, and a regression on a synthetic table."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ekfac.lab.data import text
from ekfac.lab.data.datasets import Split
from ekfac.lab.data.text import Corpus
from ekfac.lab.networks import dense, transformers
from ekfac.lab.registry import LabError
from ekfac.lab.suite.tasks.base import TASKS, Context, Examples, Windows


@functools.lru_cache(maxsize=2)
def _corpus(read: Callable[[Path], Corpus], data_dir: Path) -> Corpus:
    return read(data_dir)


def _gpt(
    context: Context,
    corpus: Corpus,
    width: int,
    layers: int,
    heads: int,
    length: int,
    batch_size: int,
    dropout: float,
    evaluated: int,
    bf16: bool,
) -> Windows:
    if heads < 1 or width % heads:
        raise LabError(f"heads must divide the width {width}; {heads} do not")
    torch.manual_seed(context.seed)
    model = transformers.GPT(corpus.vocabulary, length, width, layers, heads, dropout)
    return Windows(model, context, corpus, length, batch_size, evaluated, bf16)


def gpt(
    context: Context,
    width: int = 512,
    layers: int = 8,
    heads: int = 8,
    length: int = 256,
    batch_size: int = 64,
    vocabulary: int = text.BPE_VOCABULARY,
    evaluated: int = 1280,
    bf16: bool = True,
) -> Windows:
    """Set up a GPT of 8 layers of 512 on 8,192 BPE tokens; with a smaller vocabulary, tokens are folded onto it."""
    corpus = _corpus(text.bpe, context.data_dir)
    if not 1 < vocabulary <= corpus.vocabulary:
        raise LabError(f"vocabulary must be from 2 to {corpus.vocabulary}, not {vocabulary}")
    if vocabulary < corpus.vocabulary:
        corpus = Corpus(corpus.train % vocabulary, corpus.validation % vocabulary, vocabulary)
    return _gpt(context, corpus, width, layers, heads, length, batch_size, 0.0, evaluated, bf16)


def shakespeare(
    context: Context,
    width: int = 384,
    layers: int = 6,
    heads: int = 6,
    length: int = 256,
    batch_size: int = 64,
    dropout: float = 0.2,
    evaluated: int = 1280,
    bf16: bool = True,
) -> Windows:
    """Set up nanoGPT's character-level Shakespeare."""
    corpus = _corpus(text.shakespeare, context.data_dir)
    return _gpt(context, corpus, width, layers, heads, length, batch_size, dropout, evaluated, bf16)


def lstm(
    context: Context,
    width: int = 512,
    layers: int = 2,
    embedding: int = 128,
    length: int = 128,
    batch_size: int = 64,
    evaluated: int = 1280,
) -> Windows:
    """Set up two layers of LSTM on the characters of Shakespeare."""
    corpus = _corpus(text.shakespeare, context.data_dir)
    torch.manual_seed(context.seed)
    model = dense.LSTMModel(corpus.vocabulary, embedding, width, layers)
    return Windows(model, context, corpus, length, batch_size, evaluated, bf16=False)


FEATURES = 12


def made_table(rows: int) -> tuple[Tensor, Tensor]:
    """Return a table of correlated features of different scales and distributions, and the targets.

    Targets have interactions, a step, a periodic part and heteroscedastic noise, the difficulties of tables of houses
    and incomes. They have mean zero and variance one, of which 0.2^2 is noise. The table is computed in float64 from a
    fixed seed, so it is the same everywhere up to rounding.
    """
    chance = torch.Generator().manual_seed(2018)
    mix = torch.randn(FEATURES, FEATURES, generator=chance, dtype=torch.float64) / math.sqrt(FEATURES)
    z = torch.randn(rows, FEATURES, generator=chance, dtype=torch.float64)
    z = 0.7 * z + 0.7 * z @ mix
    u = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    signal = 10 * torch.sin(math.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2 + 10 * u[:, 3] + 5 * u[:, 4]
    signal += 4 * (z[:, 5] * z[:, 6]).tanh() + 3 * (z[:, 7] > 0.5) * u[:, 8] + 2 * torch.sin(4 * z[:, 9])
    signal = (signal - signal.mean()) / signal.std()
    level = 0.2 * (0.5 + u[:, 10]) / (0.25 + 1 / 3 + 0.25) ** 0.5
    y = signal + level * torch.randn(rows, generator=chance, dtype=torch.float64)
    x = z.clone()
    x[:, ::3] = x[:, ::3].exp()  # long tails, as of incomes and distances
    x[:, 1::3] = u[:, 1::3]
    x = (x - x.mean(0)) / x.std(0)
    return x.float(), ((y - y.mean()) / y.std()).float()


def tabular(
    context: Context, width: int = 256, layers: int = 4, batch_size: int = 256, examples: int = 20_000
) -> Examples:
    """Set up a regression on a synthetic table of 12 features, 20,000 training and 5,000 validation rows."""
    if examples < 1:
        raise LabError(f"examples must be at least 1, not {examples}")
    x, y = (part.to(context.device) for part in made_table(25_000))
    if examples > 20_000:
        raise LabError(f"examples must be at most 20000, not {examples}")
    torch.manual_seed(context.seed)
    model = dense.regressor(FEATURES, width, layers)
    train, validation = Split(x[:examples], y[:examples]), Split(x[20_000:], y[20_000:])
    return Examples(model, context, train, validation, squared_distance, batch_size)


def squared_distance(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return each example's squared error."""
    return (output - y).square()


TASKS.add("gpt", gpt)
TASKS.add("shakespeare", shakespeare)
TASKS.add("lstm", lstm)
TASKS.add("tabular", tabular)
