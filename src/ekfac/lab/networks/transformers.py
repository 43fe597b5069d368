"""Two transformers with pre-norm blocks: a GPT with tied embeddings, and a ViT."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class SelfAttention(nn.Module):
    """Self-attention: one linear layer for queries, keys and values, one for the output; dropout after both."""

    def __init__(self, width: int, heads: int, bias: bool, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions; x is (examples, positions, width)."""
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=drop)
        mixed = self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return functional.dropout(mixed, self.dropout, self.training)


class Block(nn.Module):
    """Attention, then two linear layers with a GELU between them, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, bias: bool, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.attention = SelfAttention(width, heads, bias, causal, dropout)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what both parts add to it."""
        x = x + self.attention(self.norm1(x))
        added = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + functional.dropout(added, self.dropout, self.training)


class GPT(nn.Module):
    """nanoGPT's network: no biases, learned positions, the token embedding tied to the output layer.

    Weights are N(0, 0.02^2), those that end a branch N(0, 0.02^2 / (2 layers)).

    Args:
        vocabulary: Number of tokens.
        context: Longest input.
        width: Width of the residual stream.
        layers: Number of blocks.
        heads: Heads of attention.
        dropout: Fraction of activations that training sets to zero.
    """

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads, False, True, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.dropout = dropout
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                ends = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if ends else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next token at every position; x is (examples, positions)."""
        places = torch.arange(x.shape[1], device=x.device)
        x = functional.dropout(self.tokens(x) + self.positions(places), self.dropout, self.training)
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """A transformer over an image's patches: learned positions as a bare parameter, mean pooling, linear head."""

    def __init__(self, size: int, patch: int, width: int, layers: int, heads: int, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.blocks = nn.Sequential(*[Block(width, heads, True, False) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the classes; x is (examples, 3, size, size)."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))  # type: ignore[no-any-return]
