"""Modules with several products inside, written out: attention, recurrent layers, bilinear layers, bags of embeddings.

For the oracle, from the formulas in torch's documentation. A whole's forward is replaced by a plain one, with loops
over time steps, which hands every product of the whole's own parameters to a ``tap``: (part, h, y) gives y, to which
the oracle has added zeros. h has all columns of the part, those of its biases too, and examples come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
WHOLES: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, *RECURRENT, *CELLS, nn.Bilinear, nn.EmbeddingBag)

Tap = Callable[[str, Tensor, Tensor], Tensor]


def parts(module: Any) -> dict[str, list[tuple[str, int]]]:
    """Return the parameters of every part with their numbers of columns, in the order of the columns."""
    if isinstance(module, nn.MultiheadAttention):
        width = module.embed_dim
        bias = [("in_proj_bias", 1)] if module.in_proj_bias is not None else []
        if module.in_proj_weight is not None:
            return {"in_proj": [("in_proj_weight", width), *bias]}
        widths = {"q_proj": width, "k_proj": module.kdim, "v_proj": module.vdim}
        found = {name: [(f"{name}_weight", columns)] for name, columns in widths.items()}
        return found | ({"in_proj_bias": bias} if bias else {})
    if isinstance(module, nn.Bilinear):
        own = [("weight", module.in1_features * module.in2_features), ("bias", 1)]
        return {"": [(name, columns) for name, columns in own if getattr(module, name) is not None]}
    if isinstance(module, nn.EmbeddingBag):
        return {"": [("weight", module.num_embeddings)]}
    found = {}
    for suffix in suffixes(module):
        sides = {side: [f"weight_{side}{suffix}", f"bias_{side}{suffix}"][: 1 + module.bias] for side in ("ih", "hh")}
        if isinstance(module, (nn.GRU, nn.GRUCell)):
            found |= {side + suffix: names for side, names in sides.items()}
        else:
            found[suffix] = sorted(sides["ih"] + sides["hh"], key=lambda name: (name[0] != "w", "hh" in name))
        if getattr(module, "proj_size", 0):
            found["hr" + suffix] = [f"weight_hr{suffix}"]
    return {
        part: [(name, getattr(module, name).shape[1] if name[0] == "w" else 1) for name in names]
        for part, names in found.items()
    }


def suffixes(module: Any) -> list[str]:
    """Return the endings of the parameters' names, one for each layer and direction."""
    if isinstance(module, CELLS):
        return [""]
    return [
        f"_l{layer}{way}" for layer in range(module.num_layers) for way in ("", "_reverse")[: 1 + module.bidirectional]
    ]


def plain_forward(module: Any, tap: Tap) -> Callable[..., Any]:
    """Return what stands for the forward of a whole."""
    if isinstance(module, nn.MultiheadAttention):
        return lambda *args, **kwargs: _attention(module, tap, *args, **kwargs)
    if isinstance(module, nn.Bilinear):
        return lambda one, two: _bilinear(module, tap, one, two)
    if isinstance(module, nn.EmbeddingBag):
        return lambda tokens: _bag(module, tap, tokens)
    if isinstance(module, CELLS):
        return lambda x, state=None: _cell(module, tap, x, state)
    return lambda x, state=None: _recurrent(module, tap, x, state)


def _ones(x: Tensor, count: int) -> Tensor:
    return torch.cat([x, x.new_ones(*x.shape[:-1], count)], -1)


def _bilinear(m: nn.Bilinear, tap: Tap, one: Tensor, two: Tensor) -> Tensor:
    products = torch.stack(
        [one[..., i] * two[..., j] for i in range(m.in1_features) for j in range(m.in2_features)], -1
    )
    y = products @ m.weight.flatten(1).T
    if m.bias is None:
        return tap("", products, y)
    return tap("", _ones(products, 1), y + m.bias)


def _bag(m: nn.EmbeddingBag, tap: Tap, tokens: Tensor) -> Tensor:
    live = torch.ones(tokens.shape, dtype=m.weight.dtype)
    if m.padding_idx is not None:
        live = (tokens != m.padding_idx).to(m.weight.dtype)
    h = F.one_hot(tokens, m.num_embeddings).to(m.weight.dtype) * live[..., None]
    vectors = tap("", h, h @ m.weight) * live[..., None]
    total = vectors.sum(1)
    return total if m.mode == "sum" else total / live.sum(1, keepdim=True).clamp(min=1)


def _attention(
    m: nn.MultiheadAttention, tap: Tap, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    assert not others.get("need_weights") and others.get("key_padding_mask") is None
    assert m.bias_k is None and not m.add_zero_attn
    width, first = m.embed_dim, m.batch_first
    same_key, same_value = query is key, key is value
    q, k, v = (t if first else t.transpose(0, 1) for t in (query, key, value))
    if m.in_proj_weight is not None:

        def project(x: Tensor) -> Tensor:
            y = x @ m.in_proj_weight.T
            return tap("in_proj", x, y) if m.in_proj_bias is None else tap("in_proj", _ones(x, 1), y + m.in_proj_bias)

        if same_value and same_key:
            q, k, v = project(q).split(width, -1)
        elif same_value:
            both = project(k)
            q, k, v = project(q)[..., :width], both[..., width : 2 * width], both[..., 2 * width :]
        else:
            q, k, v = (project(x)[..., i * width : (i + 1) * width] for i, x in enumerate((q, k, v)))
    else:
        bias = m.in_proj_bias

        def separate(i: int, name: str, x: Tensor) -> Tensor:
            y = tap(name, x, x @ getattr(m, f"{name}_weight").T)
            if bias is None:
                return y
            # The joint bias sees all three outputs, one after the other.
            shift = tap("in_proj_bias", x.new_ones(*x.shape[:-1], 1), bias.expand(*x.shape[:-1], -1))
            return y + shift[..., i * width : (i + 1) * width]

        q, k, v = (
            separate(i, name, x)
            for i, (name, x) in enumerate(zip(("q_proj", "k_proj", "v_proj"), (q, k, v), strict=True))
        )
    n, heads, each = len(q), m.num_heads, width // m.num_heads
    q, k, v = (x.reshape(n, -1, heads, each).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / math.sqrt(each)
    if attn_mask is not None:
        scores = scores.masked_fill(attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, -1, width)
    out: Tensor = m.out_proj(mixed)
    return (out if first else out.transpose(0, 1)), None


def _one_step(m: Any, tap: Tap, suffix: str, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    h, biases = state[0], int(m.bias)

    def product(side: str, of: Tensor) -> Tensor:
        y = of @ getattr(m, f"weight_{side}{suffix}").T
        return y + getattr(m, f"bias_{side}{suffix}") if biases else y

    if isinstance(m, (nn.GRU, nn.GRUCell)):
        by_x, by_h = (
            tap("ih" + suffix, _ones(x, biases), product("ih", x)),
            tap("hh" + suffix, _ones(h, biases), product("hh", h)),
        )
        size = m.hidden_size
        reset = torch.sigmoid(by_x[:, :size] + by_h[:, :size])
        keep = torch.sigmoid(by_x[:, size : 2 * size] + by_h[:, size : 2 * size])
        new = torch.tanh(by_x[:, 2 * size :] + reset * by_h[:, 2 * size :])
        return ((1 - keep) * new + keep * h,)
    gates = tap(suffix, _ones(torch.cat([x, h], -1), 2 * biases), product("ih", x) + product("hh", h))
    if isinstance(m, (nn.RNN, nn.RNNCell)):
        return (gates.tanh() if m.nonlinearity == "tanh" else gates.clamp(min=0),)
    size = m.hidden_size
    i, f, g, o = (gates[:, k * size : (k + 1) * size] for k in range(4))
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    if getattr(m, "proj_size", 0):
        h = tap("hr" + suffix, h, h @ getattr(m, f"weight_hr{suffix}").T)
    return h, c


def _widths(m: Any) -> Iterator[int]:
    yield getattr(m, "proj_size", 0) or m.hidden_size
    if isinstance(m, (nn.LSTM, nn.LSTMCell)):
        yield m.hidden_size


def _cell(m: Any, tap: Tap, x: Tensor, state: Any) -> Any:
    lstm = isinstance(m, nn.LSTMCell)
    if state is None:
        state = tuple(x.new_zeros(len(x), width) for width in _widths(m))
    new = _one_step(m, tap, "", x, state if lstm else state if isinstance(state, tuple) else (state,))
    return new if lstm else new[0]


def _recurrent(m: Any, tap: Tap, x: Tensor, state: Any) -> Any:
    x = x if m.batch_first else x.transpose(0, 1)
    n, ways = len(x), 1 + m.bidirectional
    states = None if state is None else (state if isinstance(state, tuple) else (state,))
    ends = []
    for layer in range(m.num_layers):
        outputs = []
        for way in range(ways):
            at = layer * ways + way
            now = tuple(x.new_zeros(n, w) for w in _widths(m)) if states is None else tuple(s[at] for s in states)
            found: dict[int, Tensor] = {}
            for time in reversed(range(x.shape[1])) if way else range(x.shape[1]):
                now = _one_step(m, tap, suffixes(m)[at], x[:, time], now)
                found[time] = now[0]
            outputs.append(torch.stack([found[time] for time in range(x.shape[1])], 1))
            ends.append(now)
        x = torch.cat(outputs, -1)
    last = tuple(torch.stack(s) for s in zip(*ends, strict=True))
    return x if m.batch_first else x.transpose(0, 1), last if isinstance(m, nn.LSTM) else last[0]
