"""Kinds that hooks alone do not see, exact against the oracle.

The oracle knows Linear, Embedding, convolutions and norms. So each kind here is compared with a *twin*: the same
function written out with ``nn.Linear`` layers, whose weights are the kind's own parameters put side by side.
"""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ekfac import summary
from helpers import assert_same_weights, jittered, parameters_of
from oracle import OracleEKFAC
from paper import EKFAC, KFAC

RULES: dict[str, dict[str, Any]] = {
    "per_example": {"scaling": "per_example"},
    "per_example, reduce": {"scaling": "per_example", "sharing": "reduce"},
    "running": {"scaling": "running", "scaling_decay": 0.8},
    "kronecker": {"scaling": "kronecker"},
    "KFAC": {"optimizer": "KFAC"},
}
COMMON: dict[str, Any] = {"lr": 0.1, "damping": 0.03, "refresh_every": 2, "factor_decay": 0.6}


@dataclass
class Twin:
    """A model of covered layers that computes the same function as another.

    Attributes:
        model: The twin.
        pack: From the other's parameters by name to the twin's.
        keys: From the parameter that the twin keeps a block's state under to the one that the other does.
    """

    model: nn.Module
    pack: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    keys: dict[str, str]


Inputs = tuple[Any, Tensor]


def compare(model: nn.Module, twin: Twin, batches: list[Inputs], n: int, rule: str, **options: Any) -> None:
    """Train the one by the optimizer and the other by the oracle; the weights must agree after every step."""
    chosen = COMMON | RULES[rule] | options
    kind = chosen.pop("optimizer", "EKFAC")
    twin.model.load_state_dict(twin.pack(parameters_of(model)), strict=False)

    def loss(m: nn.Module, batch: Inputs) -> Tensor:
        return 0.5 * (m(batch[0]) - batch[1]).square().sum() / n

    oracle_options = {"scaling": "inverse"} if kind == "KFAC" else {}
    oracle = OracleEKFAC(twin.model, loss, count=lambda batch: n, **chosen, **oracle_options)
    opt = (KFAC if kind == "KFAC" else EKFAC)(model, **chosen)
    assert not any(row.block == "diagonal" for row in opt.summary().rows), opt.summary()
    named = dict(model.named_parameters())
    for number, batch in enumerate(batches):
        opt.zero_grad()
        loss(model, batch).backward()
        opt.step()
        bases = None
        if kind == "EKFAC":
            states = {key: opt.state[named[twin.keys.get(key, key)]] for key in dict(twin.model.named_parameters())
                      if twin.keys.get(key, key) in named}  # fmt: skip
            bases = {key: (s.get("U_A"), s.get("U_B")) for key, s in states.items() if "S_A" in s}
        expected = oracle.step([batch], bases=bases)
        got = twin.pack(parameters_of(model))
        assert_same_weights({k: got[k] for k in expected}, expected, 1e-9, f"step {number + 1}")


def data(shape: tuple[int, ...], model: nn.Module, steps: int = 4) -> list[Inputs]:
    generator = torch.Generator().manual_seed(3)
    xs = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(steps)]
    with torch.no_grad():
        like = copy.deepcopy(model)(xs[0])
    return [(x, torch.randn(like.shape, dtype=torch.float64, generator=generator)) for x in xs]


# --------------------------------------------------------------------------------------------------- attention


class Attention(nn.Module):
    """Self-attention, or attention to something else, with a layer before and after."""

    def __init__(self, cross: str, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.cross, self.batch_first = cross, batch_first
        self.first = nn.Linear(4, 6)
        self.inner = nn.MultiheadAttention(6, 2, batch_first=batch_first, **options)
        self.last = nn.Linear(6, 2)

    def sources(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.tanh(self.first(x))
        memory = torch.cat([x.flip(1), x[:, :2] * 0.5], 1)
        q, k, v = {"self": (x, x, x), "cross": (x, memory, memory), "three": (x, memory, memory.sin())}[self.cross]
        vdim = getattr(self.inner, "vdim", 6)
        return q, k, v[..., :vdim]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sources(x)
        if self.cross == "self":
            k = v = q
        if not self.batch_first:
            out = self.inner(*(t.transpose(0, 1) for t in (q, k, v)))[0] if self.cross == "three" else self.turned(q, k)
            return self.last(out.transpose(0, 1))
        if self.cross == "three":
            return self.last(self.inner(q, k, v, need_weights=False)[0])
        return self.last(self.inner(q, k, k, need_weights=True)[0])

    def turned(self, q: Tensor, k: Tensor) -> Tensor:
        q_t = q.transpose(0, 1)
        k_t = q_t if k is q else k.transpose(0, 1)
        return self.inner(q_t, k_t, k_t, need_weights=False)[0]


class WrittenOut(Attention):
    """The same with Linear layers; rows of a packed projection that a call does not use meet no gradient."""

    def __init__(self, cross: str, batch_first: bool, packed: bool, bias: bool, vdim: int) -> None:
        super().__init__(cross, batch_first, vdim=vdim)
        del self.inner
        self.cross, self.packed = cross, packed
        self.inner = nn.Module()
        self.inner.vdim = vdim
        if packed:
            self.projection = nn.Linear(6, 18, bias=bias)
        else:
            self.q, self.k, self.v = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), nn.Linear(vdim, 6, False)
            self.shift = nn.Linear(1, 18, bias=False)
        self.out = nn.Linear(6, 6, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sources(x)
        if self.packed and self.cross == "self":
            q, k, v = self.projection(q).chunk(3, -1)
        elif self.packed and self.cross == "cross":
            q, (k, v) = self.projection(q)[..., :6], self.projection(k)[..., 6:].chunk(2, -1)
        elif self.packed:
            q, k, v = (self.projection(t)[..., 6 * i : 6 * i + 6] for i, t in enumerate((q, k, v)))
        else:
            one = q.new_ones(1)
            q, k, v = (
                layer(t) + self.shift(one.expand(*t.shape[:-1], 1))[..., 6 * i : 6 * i + 6]
                for i, (layer, t) in enumerate(((self.q, q), (self.k, k), (self.v, v)))
            )
        heads = [t.unflatten(-1, (2, 3)).transpose(1, 2) for t in (q, k, v)]
        mixed = torch.softmax(heads[0] @ heads[1].mT / 3**0.5, -1) @ heads[2]
        return self.last(self.out(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("cross", "options"), [
    ("self", {}), ("self", {"bias": False}), ("cross", {}), ("three", {}), ("three", {"vdim": 5}),
    ("three", {"vdim": 5, "bias": False}),
])  # fmt: skip
def test_attention(cross: str, options: dict[str, Any], batch_first: bool, rule: str) -> None:
    if "vdim" in options and "reduce" in rule:
        pytest.skip("adding a vector to all keys changes nothing, so the sum over keys that makes B is zero")
    torch.manual_seed(0)
    bias, vdim = options.get("bias", True), options.get("vdim", 6)
    packed = vdim == 6
    model = jittered(Attention(cross, batch_first, **options))
    other = WrittenOut(cross, batch_first, packed, bias, vdim).double()

    def pack(p: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name: t for name, t in p.items() if not name.startswith("inner")}
        if packed:
            found["projection.weight"] = p["inner.in_proj_weight"]
        else:
            found |= {f"{k}.weight": p[f"inner.{k}_proj_weight"] for k in "qkv"}
        if bias:
            found["projection.bias" if packed else "shift.weight"] = (
                p["inner.in_proj_bias"] if packed else p["inner.in_proj_bias"][:, None]
            )
            found["out.bias"] = p["inner.out_proj.bias"]
        elif not packed:
            found["shift.weight"] = torch.zeros(18, 1, dtype=torch.float64)
        return found | {"out.weight": p["inner.out_proj.weight"]}

    keys = {
        "projection.weight": "inner.in_proj_weight", "out.weight": "inner.out_proj.weight",
        "shift.weight": "inner.in_proj_bias", **{f"{k}.weight": f"inner.{k}_proj_weight" for k in "qkv"},
    }  # fmt: skip
    if not bias and not packed:
        other.shift.weight.requires_grad_(False)
    compare(model, Twin(other, pack, keys), data((7, 3, 4), model), 7, rule)


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_layer_is_covered_whole_and_not_by_chance(training: bool) -> None:
    """Its gradient passes through what was captured, in evaluation mode too, where torch has a fast path."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), 2),
                          nn.Linear(8, 3)).double().train(training)  # fmt: skip
    opt = EKFAC(model, lr=0.01, damping=0.1)
    assert "100.0 %" in str(opt.summary())
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(5, 4, 8, dtype=torch.float64)).square().mean().backward()
        opt.step()
    with torch.no_grad():
        assert torch.isfinite(model(torch.randn(2, 4, 8, dtype=torch.float64))).all()


def test_an_error_within_attention_leaves_nothing_behind() -> None:
    model = Attention("self", True).double()
    with EKFAC(model, lr=0.1):
        with pytest.raises((RuntimeError, AssertionError)):
            model.inner(*(torch.randn(2, 3, 5, dtype=torch.float64),) * 3)
        assert torch._C._len_torch_function_stack() == 0


# --------------------------------------------------------------------------------------------------- recurrent


class Recurrent(nn.Module):
    """A recurrent layer of which outputs and last states are used."""

    def __init__(self, kind: type[nn.Module], given: bool, **options: Any) -> None:
        super().__init__()
        self.inner = kind(3, 4, **options)
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        m = self.inner
        x_in = x if m.batch_first else x.transpose(0, 1)
        directions = 2 if m.bidirectional else 1
        state = None
        if self.given:
            widths = [getattr(m, "proj_size", 0) or 4] + ([4] if isinstance(m, nn.LSTM) else [])
            made = [0.1 * torch.linspace(-1, 1, m.num_layers * directions * len(x) * w, dtype=x.dtype)
                    .reshape(m.num_layers * directions, len(x), w) for w in widths]  # fmt: skip
            state = tuple(made) if len(made) > 1 else made[0]
        out, last = m(x_in, state)
        out = out if m.batch_first else out.transpose(0, 1)
        last = torch.cat([t.transpose(0, 1).flatten(1) for t in (last if isinstance(last, tuple) else (last,))], 1)
        return torch.cat([out.flatten(1), last.sin()], 1)


class Unrolled(nn.Module):
    """The same, step by step with Linear layers, from torch's documentation of the cells."""

    def __init__(self, like: Recurrent) -> None:
        super().__init__()
        m = like.inner
        self.__dict__["like"], self.given = m, like.given  # not as a submodule
        self.layers = nn.ModuleDict()
        for name, weight in m.named_parameters():
            which, _, suffix = name.removeprefix("weight_").partition("_")
            if name.startswith("weight") and isinstance(m, nn.GRU):
                self.layers[which + "_" + suffix] = nn.Linear(weight.shape[1], len(weight), m.bias)
            elif name.startswith("weight_ih"):
                width = weight.shape[1] + getattr(m, f"weight_hh_{suffix}").shape[1]
                self.layers[suffix] = nn.Linear(width + 2 * m.bias, len(weight), bias=False)
            elif name.startswith("weight_hr"):
                self.layers["hr_" + suffix] = nn.Linear(weight.shape[1], len(weight), bias=False)

    def pack(self, p: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found, m = {}, self.like
        for name in self.layers:
            of = {k: p.get(f"inner.{k}_{name}") for k in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
            if isinstance(m, nn.GRU) or name.startswith("hr"):
                found[f"layers.{name}.weight"] = p[f"inner.weight_{name}"]
                if m.bias and not name.startswith("hr"):
                    found[f"layers.{name}.bias"] = p[f"inner.bias_{name}"]
            else:
                parts = [of["weight_ih"], of["weight_hh"]]
                parts += [of["bias_ih"][:, None], of["bias_hh"][:, None]] if m.bias else []
                found[f"layers.{name}.weight"] = torch.cat(parts, 1)
        return found

    def keys(self) -> dict[str, str]:
        return {f"layers.{name}.weight": f"inner.weight_{name}" if isinstance(self.like, nn.GRU) or "hr" in name
                else f"inner.weight_ih_{name}" for name in self.layers}  # fmt: skip

    def cell(self, suffix: str, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        m, h = self.like, state[0]
        if isinstance(m, nn.GRU):
            i_r, i_z, i_n = self.layers["ih_" + suffix](x).chunk(3, -1)
            h_r, h_z, h_n = self.layers["hh_" + suffix](h).chunk(3, -1)
            r, z = torch.sigmoid(i_r + h_r), torch.sigmoid(i_z + h_z)
            return ((1 - z) * torch.tanh(i_n + r * h_n) + z * h,)
        columns = torch.cat([x, h, x.new_ones(len(x), 2 * m.bias)], 1)
        gates = self.layers[suffix](columns)
        if isinstance(m, nn.RNN):
            return (gates.relu() if m.nonlinearity == "relu" else gates.tanh(),)
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (self.layers["hr_" + suffix](h) if m.proj_size else h), c

    def forward(self, x: Tensor) -> Tensor:
        m = self.like
        directions = 2 if m.bidirectional else 1
        widths = [getattr(m, "proj_size", 0) or 4] + ([4] if isinstance(m, nn.LSTM) else [])
        count = m.num_layers * directions
        starts = [0.1 * torch.linspace(-1, 1, count * len(x) * w, dtype=x.dtype).reshape(count, len(x), w)
                  if self.given else x.new_zeros(count, len(x), w) for w in widths]  # fmt: skip
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(m.num_layers):
            sides = []
            for direction in range(directions):
                state = tuple(s[layer * directions + direction] for s in starts)
                steps = list(range(x.shape[1]))[:: -1 if direction else 1]
                outs: dict[int, Tensor] = {}
                for t in steps:
                    state = self.cell(f"l{layer}{'_reverse' if direction else ''}", x[:, t], state)
                    outs[t] = state[0]
                ends.append(state)
                sides.append(torch.stack([outs[t] for t in range(x.shape[1])], 1))
            x = torch.cat(sides, -1)
        last = torch.cat([torch.stack(s, 1).flatten(1) for s in zip(*ends, strict=True)], 1)
        return torch.cat([x.flatten(1), last.sin()], 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("kind", "options"), [
    (nn.LSTM, {"batch_first": True}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "bias": False}),
    (nn.LSTM, {"num_layers": 2, "proj_size": 2, "batch_first": True}),
    (nn.GRU, {"batch_first": True}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.RNN, {}),
    (nn.RNN, {"nonlinearity": "relu", "num_layers": 2, "batch_first": True}),
])  # fmt: skip
@pytest.mark.parametrize("given", [False, True])
def test_recurrent(kind: type[nn.Module], options: dict[str, Any], given: bool, rule: str) -> None:
    torch.manual_seed(0)
    model = jittered(Recurrent(kind, given, **options))
    twin = Unrolled(model).double()
    batches = data((6, 3, 3), model, steps=3)
    compare(model, Twin(twin, twin.pack, twin.keys()), batches, 6, rule)


# ----------------------------------------------------------------------------- kinds that are a Linear in disguise


class Conv1D(nn.Module):
    """As in transformers: the weight is stored as (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class ScaledEmbedding(nn.Embedding):
    """As in Gemma and BART."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 3.0


class Doubled(nn.Linear):
    def forward(self, x: Tensor, gain: float = 2.0) -> Tensor:
        return gain * super().forward(x)


class Falcons(nn.Linear):
    """Falcon's linear layer: its product is not torch's function."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Disguised(nn.Module):
    """Each kind between two layers; ``kind`` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(3, 4), nn.Linear(5, 2)
        self.inner: nn.Module = {
            "conv1d": lambda: Conv1D(5, 4), "own forward": lambda: Doubled(4, 5), "own product": lambda: Falcons(4, 5),
            "bilinear": lambda: nn.Bilinear(4, 4, 5),
            "bilinear without bias": lambda: nn.Bilinear(4, 4, 5, bias=False), "lstm cell": lambda: nn.LSTMCell(4, 5),
            "gru cell": lambda: nn.GRUCell(4, 5), "rnn cell": lambda: nn.RNNCell(4, 5),
        }[kind]()  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if "bilinear" in self.kind:
            return self.last(self.inner(h, input2=h.cos()))
        if "cell" in self.kind:
            state, out = None, []
            for t in range(x.shape[1]):
                state = self.inner(h[:, t], state)
                out.append(state[0] if isinstance(state, tuple) else state)
            return self.last(torch.stack(out, 1))
        return self.last(self.inner(h))


class Plain(Disguised):
    """The same with Linear layers alone."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        del self.inner
        columns = {"conv1d": 4, "own forward": 4, "own product": 4, "bilinear": 16, "bilinear without bias": 16,
                   "lstm cell": 11, "rnn cell": 11, "gru cell": 4}[kind]  # fmt: skip
        rows = {"lstm cell": 20, "gru cell": 15}.get(kind, 5)
        self.a = nn.Linear(columns, rows, bias=kind in ("conv1d", "own forward", "own product", "bilinear", "gru cell"))
        if kind == "gru cell":
            self.b = nn.Linear(5, 15)

    def cell(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "gru cell":
            (i_r, i_z, i_n), (h_r, h_z, h_n) = self.a(x).chunk(3, -1), self.b(h).chunk(3, -1)
            z = torch.sigmoid(i_z + h_z)
            return (1 - z) * torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n) + z * h, c
        gates = self.a(torch.cat([x, h, x.new_ones(len(x), 2)], 1))
        if self.kind == "rnn cell":
            return gates.tanh(), c
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if "bilinear" in self.kind:
            return self.last(self.a((h[..., :, None] * h.cos()[..., None, :]).flatten(-2)))
        if "cell" in self.kind:
            state = c = h.new_zeros(len(x), 5)
            out = []
            for t in range(x.shape[1]):
                state, c = self.cell(h[:, t], state, c)
                out.append(state)
            return self.last(torch.stack(out, 1))
        return self.last(self.a(h) * (2.0 if self.kind == "own forward" else 1.0))


def pack_plain(kind: str, p: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {name: t for name, t in p.items() if not name.startswith("inner")}
    own = {name.removeprefix("inner."): t for name, t in p.items() if name.startswith("inner")}
    if kind == "gru cell":
        return found | {"a.weight": own["weight_ih"], "a.bias": own["bias_ih"], "b.weight": own["weight_hh"],
                        "b.bias": own["bias_hh"]}  # fmt: skip
    if "cell" in kind:
        columns = [own["weight_ih"], own["weight_hh"], own["bias_ih"][:, None], own["bias_hh"][:, None]]
        return found | {"a.weight": torch.cat(columns, 1)}
    weight = own["weight"].T if kind == "conv1d" else own["weight"].flatten(1)
    return found | {"a.weight": weight} | ({"a.bias": own["bias"]} if "bias" in own else {})


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "kind",
    ["conv1d", "own forward", "own product", "bilinear", "bilinear without bias", "lstm cell", "gru cell", "rnn cell"],
)
def test_a_linear_layer_in_disguise(kind: str, rule: str) -> None:
    torch.manual_seed(0)
    model, twin = jittered(Disguised(kind)), Plain(kind).double()
    keys = {"a.weight": "inner.weight_ih" if "cell" in kind else "inner.weight", "b.weight": "inner.weight_hh"}
    compare(model, Twin(twin, lambda p: pack_plain(kind, p), keys), data((7, 3, 3), model), 7, rule)


class Bag(nn.Module):
    """A bag of tokens; its twin looks them up one by one."""

    def __init__(self, mode: str, plain: bool, padding_idx: int | None) -> None:
        super().__init__()
        self.mode, self.plain, self.padding_idx = mode, plain, padding_idx
        kind = nn.Embedding if plain else nn.EmbeddingBag
        options = {} if plain else {"mode": mode}
        self.bag, self.last = kind(6, 4, padding_idx=padding_idx, **options), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.plain:
            return self.last(self.bag(tokens))
        live = torch.ones(tokens.shape, dtype=torch.float64)
        if self.padding_idx is not None:
            live = live * (tokens != self.padding_idx)
        found = (self.bag(tokens) * live[..., None]).sum(1)
        return self.last(found / live.sum(1, keepdim=True).clamp(min=1) if self.mode == "mean" else found)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_tokens(mode: str, padding_idx: int | None, rule: str) -> None:
    torch.manual_seed(0)
    model, twin = jittered(Bag(mode, False, padding_idx)), Bag(mode, True, padding_idx).double()
    batches = [(torch.randint(0, 6, (7, 5)), torch.randn(7, 2, dtype=torch.float64)) for _ in range(4)]
    compare(model, Twin(twin, dict, {}), batches, 7, rule)


@pytest.mark.parametrize("last_offset", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_bags_of_unequal_sizes(last_offset: bool, weighted: bool) -> None:
    """They are the bags of equal sizes that are padded; only sums over positions are defined."""
    torch.manual_seed(0)
    mode = "sum" if weighted else "mean"
    bag = nn.EmbeddingBag(6, 4, mode=mode, include_last_offset=last_offset, dtype=torch.float64)
    opt = EKFAC(nn.Sequential(bag), lr=0.1, damping=0.1)
    tokens, offsets = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 2, 3] + [6] * last_offset)
    weights = torch.linspace(1, 2, 6, dtype=torch.float64) if weighted else None
    out = bag(tokens, offsets, per_sample_weights=weights)
    out.sin().sum().backward()
    assert opt.engine.collector.capture.examples == 3
    d = torch.cos(out.detach())[[0, 0, 1, 2, 2, 2]]
    share = weights if weighted else torch.tensor([1 / 2, 1 / 2, 1, 1 / 3, 1 / 3, 1 / 3], dtype=torch.float64)
    opt.step()  # which compares the gradient with what was captured
    state = opt.state[bag.weight]
    rows = 3 * d * share[:, None]
    torch.testing.assert_close(state["B"][0] / state["factor_weight"], rows.T @ rows / 3)
    torch.testing.assert_close(
        state["A"][0] / state["factor_weight"], torch.bincount(tokens, minlength=6).to(torch.float64) / 6
    )


class LlamaLike(nn.Module):
    def __init__(self, width: int, one: bool = False) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.one = nn.Parameter(torch.ones(width)), 1e-6, one

    def forward(self, hidden_states: Tensor) -> Tensor:
        normal = hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight if self.one else self.weight) * normal


class LlamaLikeRMSNorm(LlamaLike):
    pass


class NotAnRMSNorm(LlamaLike):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("one", [False, True])
def test_norms_of_other_libraries(one: bool, rule: str) -> None:
    torch.manual_seed(0)
    model = jittered(nn.Sequential(nn.Linear(3, 4), LlamaLikeRMSNorm(4, one), nn.Linear(4, 2)))
    twin = nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4, eps=1e-6), nn.Linear(4, 2)).double()

    def pack(p: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: t + one if name == "1.weight" else t for name, t in p.items()}

    compare(model, Twin(twin, pack, {}), data((7, 3, 3), model), 7, rule)


def test_a_norm_that_is_none_is_left_alone() -> None:
    (row,) = summary(NotAnRMSNorm(4)).rows
    assert row.block == "diagonal" and "NotAnRMSNorm" in row.why


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rule", ["running", "per_example", "KFAC"])
def test_a_scaled_embedding_tied_to_the_output(rule: str, bias: bool) -> None:
    class Tied(nn.Module):
        def __init__(self, scaled: bool) -> None:
            super().__init__()
            self.tokens = ScaledEmbedding(6, 4) if scaled else nn.Embedding(6, 4)
            self.scaled, self.head = scaled, nn.Linear(4, 6, bias=bias)
            self.head.weight = self.tokens.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.tokens(x) * (1.0 if self.scaled else 3.0)))

    torch.manual_seed(0)
    model, twin = jittered(Tied(True)), Tied(False).double()
    batches = [(torch.randint(0, 6, (7, 3)), torch.randn(7, 3, 6, dtype=torch.float64)) for _ in range(4)]
    compare(model, Twin(twin, dict, {}), batches, 7, rule)


# ------------------------------------------------------------------------------------------------------- experts


class FusedExperts(nn.Module):
    """A stack of matrices, used one by one, by torch's grouped product, or as a batch."""

    def __init__(self, how: str, turned: bool) -> None:
        super().__init__()
        self.how, self.is_transposed = how, turned
        self.up = nn.Parameter(torch.randn(3, 4, 8) if turned else torch.randn(3, 8, 4))

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        up = self.up if self.is_transposed else self.up.mT
        order = to.argsort(stable=True)
        rows = x[order]
        ends = torch.bincount(to, minlength=3).cumsum(0)
        if self.how == "batch":
            return x.new_zeros(len(x), 8).index_copy(0, order, torch.bmm(rows.reshape(3, -1, 4), up).reshape(-1, 8))
        if self.how == "grouped":
            out = torch._grouped_mm(rows, up, offs=ends.int())
        else:
            starts = [0, *ends.tolist()]
            out = torch.cat([
                F.linear(rows[a:b], up[e].T) if self.how == "linear" else rows[a:b] @ up[e]
                for e, (a, b) in enumerate(itertools.pairwise(starts))
            ])  # fmt: skip
        return x.new_zeros(len(x), 8).index_copy(0, order, out)


class Mixture(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, to = given
        return self.inner(x.reshape(-1, 4), to).reshape(*x.shape[:-1], 8).sin()


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 8)
        for e, layer in enumerate(self.layers):
            out = out.index_copy(0, (to == e).nonzero()[:, 0], layer(x[to == e]))
        return out


@pytest.mark.parametrize("rule", ["running", "kronecker", "KFAC"])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("how", ["linear", "matmul", "grouped", "batch"])
def test_fused_experts_are_as_many_linear_layers(how: str, turned: bool, rule: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if how == "grouped" else torch.float64  # all that torch's grouped product knows
    model, twin = Mixture(FusedExperts(how, turned)).to(dtype), Mixture(Separate()).to(dtype)
    chosen = COMMON | RULES[rule]
    kind = KFAC if chosen.pop("optimizer", "") == "KFAC" else EKFAC
    with torch.no_grad():
        for e, layer in enumerate(twin.inner.layers):
            layer.weight.copy_(model.inner.up[e].T if turned else model.inner.up[e])
    opts = kind(model, **chosen), kind(twin, **chosen)
    assert [row.block for row in opts[0].summary().rows] == ["kronecker 4 x 8, 3 groups"]
    for _ in range(4):
        x = torch.randn(6, 12, 4, dtype=dtype)
        to = torch.arange(72) % 3
        if how != "batch":
            to[36:] = torch.randint(0, 3, (36,))  # enough for all, so that no eigenvalue is zero
        to = to[torch.randperm(72)]
        for m, opt in zip((model, twin), opts, strict=True):
            opt.zero_grad()
            m((x, to)).square().sum((1, 2)).mean().backward()
            opt.step()
        for e, layer in enumerate(twin.inner.layers):
            own = model.inner.up[e].T if turned else model.inner.up[e]
            tolerance = 1e-3 if how == "grouped" else 1e-9
            torch.testing.assert_close(own, layer.weight, rtol=tolerance, atol=tolerance)


def test_experts_have_no_examples() -> None:
    model = Mixture(FusedExperts("linear", False)).double()
    with EKFAC(model, lr=0.1, scaling="per_example"), pytest.raises(ValueError, match=r"layer 'inner.up'.*exclude="):
        model((torch.randn(6, 4, 4, dtype=torch.float64), torch.arange(24) % 3))


def weight_norm(module: nn.Module, name: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has another by now
        return nn.utils.weight_norm(module, name)


class DroppedState(nn.Module):
    """Drops weights of the state, as AWD-LSTM does: what the module multiplies with is set anew in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(3, 4)
        self.raw = nn.Parameter(self.inner._parameters.pop("weight_hh_l0").detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        self.inner.weight_hh_l0 = F.dropout(self.raw, 0.01)
        return self.inner(x)[0]


@pytest.mark.parametrize(
    ("build", "shape", "reason"),
    [
        (lambda: nn.LSTM(3, 4, num_layers=2, dropout=0.1), (5, 2, 3), "LSTM has .* dropout between its layers"),
        (lambda: nn.GRU(3, 4, num_layers=3, dropout=0.5), (5, 2, 3), "GRU has .* dropout between its layers"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), (5, 3), "a parametrization computes"),
        (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 4)), (5, 3), "a parametrization computes"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 2)), (5, 3, 6), "a parametrization computes"),
        (lambda: weight_norm(nn.LSTM(3, 4), "weight_hh_l0"), (5, 2, 3), "LSTM has derived weights"),
        (lambda: nn.utils.parametrizations.orthogonal(nn.RNN(3, 4), "weight_hh_l0"), (5, 2, 3), "RNN has derived"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.GRU(3, 4), "weight_ih_l0"), (5, 2, 3), "GRU has derived"),
        (lambda: DroppedState(), (5, 2, 3), "GRU has derived weights"),
    ],
)
def test_what_has_no_block_says_why_and_is_trained(build: Any, shape: tuple[int, ...], reason: str) -> None:
    torch.manual_seed(0)
    module = build()
    opt, x = EKFAC(module, lr=1e-2), torch.randn(*shape)
    uncovered = [row for row in opt.summary().rows if row.block.startswith("diagonal")]
    assert uncovered
    assert re.search(reason, str(opt.summary()))

    def loss() -> Tensor:
        out = module(x)
        out = out[0] if isinstance(out, tuple) else out
        return (out - 1).square().mean()

    before = loss().item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # low coverage is told
        for _ in range(15):
            opt.zero_grad()
            loss().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            opt.step()
    assert loss().item() < before


def test_a_one_layer_lstm_with_dropout_is_covered() -> None:
    """torch applies none behind the last layer."""
    assert all("diagonal" not in row.block for row in EKFAC(nn.LSTM(3, 4)).summary().rows)
