"""A small transformer that predicts the next character, made of layers that every optimizer of the lab supports."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ekfac.lab.data.text import VOCABULARY
from ekfac.lab.registry import LabError

CONTEXT = 128


class Attention(nn.Module):
    """Causal self-attention: one linear layer for queries, keys and values, one for the output."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with those before it; x is (examples, positions, width)."""
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(n, t, width))  # type: ignore[no-any-return]


class TransformerBlock(nn.Module):
    """Attention, then two linear layers, each after a norm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what both parts add to it."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class CharacterModel(nn.Module):
    """Embeddings of characters and positions, blocks, a norm and a linear layer; the output is logits."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[TransformerBlock(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(VOCABULARY))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next character at every position; x is (examples, positions)."""
        # Positions are looked up for every example, so that they have per-example gradients too.
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)
        return self.head(self.norm(self.blocks(self.characters(x) + self.positions(places))))  # type: ignore[no-any-return]


def charlm(width: int = 128, batch_norm: bool = False, layers: int = 4, context: int = CONTEXT) -> CharacterModel:
    """Build a pre-norm transformer of four layers and four heads (fewer if they do not divide the width), untied.

    Weights are N(0, 0.02^2), those that end a residual branch N(0, 0.02^2 / (2 layers)), biases zero, as in GPT-2.

    Raises:
        LabError: If batch-norm is requested.
    """
    if batch_norm:
        raise LabError("charlm has layer-norm, and no variant with batch-norm")
    model = CharacterModel(width, layers, math.gcd(width, 4), context)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            ends = name.endswith(("attention.out.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if ends else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


def character_cross_entropy(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return each example's cross-entropy of the next character, averaged over positions."""
    return functional.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


def character_correct(output: Tensor, y: Tensor) -> Tensor:
    """Return each example's fraction of positions at which the next character is the most likely one."""
    return (output.argmax(2) == y).double().mean(1)
