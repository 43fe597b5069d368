"""Random small networks, and the batches that they take: compositions that nobody has named.

A network is a chain of stages, each a module from a tensor of one kind to one of another: "vector" [N, D], "sequence"
[N, T, D], "image" [N, C, *size]. Draws are Python's, so that a try has the same network on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CONVOLUTIONS: list[Any] = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
TRANSPOSED: list[Any] = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]


class Stage(nn.Module):
    """What is done with a tensor, by a function of the modules inside and the tensor."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(*self.inner, x)


class Wrapped(nn.Module):
    """A stage with what is done around it: a residual, a second call, checkpointing, an activation in place."""

    def __init__(self, inner: nn.Module, activation: str, residual: bool, calls: int, kept: str) -> None:
        super().__init__()
        self.inner = inner
        self.activation, self.residual, self.calls, self.kept = activation, residual, calls, kept

    def body(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            y = ACTIVATIONS[self.activation](self.inner(x))
            x = x + y if self.residual else y
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.kept and x.requires_grad:
            return checkpoint(self.body, x, use_reentrant=self.kept == "reentrant")
        return self.body(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "tanh in place": lambda x: x.tanh_(),
    "gelu": F.gelu,
    "softplus": F.softplus,
    "silu in place": lambda x: F.silu(x, inplace=True),
    "leaky in place": lambda x: F.leaky_relu(x, 0.3, inplace=True),
    "relu": torch.relu,
}


class Net(nn.Module):
    """Stages one after the other; those of ``skipped`` are left out. A free scale and shift may end it."""

    def __init__(self, stages: list[nn.Module], optional: set[int], free: bool) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.optional, self.skipped = optional, frozenset[int]()
        self.free = nn.Parameter(torch.ones(1)) if free else None

    def forward(self, x: Tensor) -> Tensor:
        for i, stage in enumerate(self.stages):
            if i not in self.skipped:
                x = stage(x)
        return x if self.free is None else x * self.free


@dataclass
class Drawn:
    """A network and what is known of it.

    Attributes:
        model: The network, in float64.
        batch: Draws so many inputs.
        what: The kinds of its stages.
        mixes: Whether examples meet inside, in batch-norm.
    """

    model: Net
    batch: Callable[[int], Tensor]
    what: list[str]
    mixes: bool
    optional: set[int] = field(default_factory=set)

    @property
    def balances(self) -> bool:
        """Whether an output layer shares an embedding's weight: their parts in A and B are balanced in every pass."""
        tables = {id(m.weight) for m in self.model.modules() if isinstance(m, nn.Embedding)}
        return any(id(getattr(m, "weight", None)) in tables for m in self.model.modules() if isinstance(m, nn.Linear))


Shape = tuple[int, ...]
Made = tuple[nn.Module, str, Shape]


class Maker:
    """Draws stages; remembers layers whose weights others may share."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.linears: list[nn.Linear] = []
        self.tokens: nn.Embedding | None = None
        self.mixes = False

    # --- layers ---------------------------------------------------------------------------------------------------

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        chance = self.chance
        layer = nn.Linear(inputs, outputs, bias=chance.random() < 0.7)
        same = [other for other in self.linears if other.weight.shape == layer.weight.shape]
        how = chance.random()
        if same and how < 0.2:
            other = chance.choice(same)
            layer.weight = other.weight
            if layer.bias is not None and other.bias is not None and chance.random() < 0.5:
                layer.bias = other.bias
        elif self.tokens is not None and self.tokens.weight.shape == layer.weight.shape and how < 0.5:
            layer.weight = self.tokens.weight
        elif how > 0.92:
            return nn.utils.parametrizations.weight_norm(layer)
        else:
            self.linears.append(layer)
        return layer

    def norm(self, kind: str, shape: Shape) -> nn.Module:
        """A norm for what is ``[N, *shape]``."""
        chance = self.chance
        width = shape[-1] if kind != "image" else shape[0]
        affine = {"elementwise_affine": True}
        choices: list[Callable[[], nn.Module]] = []
        if kind == "image":
            groups = chance.choice([g for g in range(1, width + 1) if width % g == 0])
            choices = [lambda: nn.GroupNorm(groups, width), lambda: nn.LayerNorm(shape, bias=chance.random() < 0.7)]
            if chance.random() < 0.5:
                choices = [lambda: [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][len(shape) - 2](width)]
        elif kind == "vector":
            choices = [lambda: nn.LayerNorm(width, bias=chance.random() < 0.7), lambda: nn.RMSNorm(width, **affine)]
            choices += [lambda: nn.GroupNorm(1, width), lambda: nn.BatchNorm1d(width)]
        else:
            choices = [lambda: nn.LayerNorm(width), lambda: nn.RMSNorm(width), lambda: nn.LayerNorm(shape)]
        found = chance.choice(choices)()
        self.mixes |= "BatchNorm" in type(found).__name__
        return found

    # --- stages of vectors ----------------------------------------------------------------------------------------

    def of_vector(self, shape: Shape) -> Made:
        chance, (d,) = self.chance, shape
        out = chance.randint(1, 5)
        kind = chance.choice(
            ["linear"] * 4 + ["norm", "bilinear", "cell", "sequence", "image", "heads", "mixed", "row"]
        )
        if kind == "norm" and d > 1:
            return self.norm("vector", shape), "norm", shape
        if kind == "bilinear":
            first = self.linear(d, chance.randint(1, 3))
            return Stage(_bilinear, first, nn.Bilinear(first.out_features, d, out, chance.random() < 0.7)), kind, (out,)
        if kind == "cell":
            cell = chance.choice([nn.LSTMCell, nn.GRUCell, nn.RNNCell])(d, out, chance.random() < 0.7)
            steps = chance.randint(1, 3)
            return Stage(lambda c, x: _cell_steps(c, x, steps), cell), kind, (out,)
        if kind == "sequence":
            t = chance.randint(1, 4)
            if chance.random() < 0.3:  # the same vector at every place, with stride 0
                return Stage(lambda layer, x: layer(x[:, None].expand(-1, t, -1)), self.linear(d, out)), kind, (t, out)
            return Stage(lambda layer, x: layer(x).unflatten(1, (t, out)), self.linear(d, t * out)), kind, (t, out)
        if kind == "image":
            size = self.size(chance.randint(1, 3), 2, 3)
            layer = self.linear(d, out * math.prod(size))
            return Stage(lambda layer, x: layer(x).unflatten(1, (out, *size)), layer), kind, (out, *size)
        if kind == "heads":  # two layers of one input, one of them on a part of it
            one, two = self.linear(d, out), self.linear(max(1, d // 2), out)
            return Stage(lambda a, b, x: a(x) + torch.sigmoid(b(x[:, : max(1, d // 2)])), one, two), kind, (out,)
        if kind == "mixed":  # two layers of equal shape, which are stepped together
            pair = [nn.Linear(d, out), nn.Linear(d, out)]
            return Stage(lambda a, b, x: a(x) * torch.sigmoid(b(x)), *pair), kind, (out,)
        if kind == "row" and d > 1:  # each number is a position of one column
            return Stage(lambda layer, x: layer(x[..., None]).flatten(1), self.linear(1, out)), kind, (d * out,)
        return self.linear(d, out), "linear", (out,)

    # --- stages of sequences --------------------------------------------------------------------------------------

    def of_sequence(self, shape: Shape) -> Made:
        chance, (t, d) = self.chance, shape
        out = chance.randint(1, 5)
        kinds = ["linear", "linear", "time first", "flat", "attention", "attention", "recurrent", "recurrent", "norm"]
        kinds += ["places", "convolution", "mean", "last", "strided", "each", "encoder", "crossed", "mixer", "pool"]
        kind = chance.choice(kinds)
        if kind == "norm" and d > 1:
            return self.norm("sequence", shape), kind, shape
        if kind == "time first":
            return Stage(lambda layer, x: layer(x.transpose(0, 1)).transpose(0, 1), self.linear(d, out)), kind, (t, out)
        if kind == "flat":
            layer = self.linear(d, out)
            return Stage(lambda layer, x: layer(x.flatten(0, 1)).unflatten(0, (len(x), t)), layer), kind, (t, out)
        if kind in ("attention", "crossed"):
            return *self.attention(kind, d, t), shape
        if kind == "encoder" and d > 1:  # what a norm makes of a single number is zero, but for rounding
            heads = chance.choice([h for h in (1, 2, 3) if d % h == 0])
            own = {"dropout": 0.0, "batch_first": True, "norm_first": chance.random() < 0.5}
            return nn.TransformerEncoderLayer(d, heads, out, activation=F.gelu, **own), kind, shape
        if kind == "recurrent":
            return self.recurrent(shape, out)
        if kind == "places":
            table = nn.Embedding(t, d)
            if chance.random() < 0.5:  # one lookup for all examples
                return Stage(lambda table, x: x + table(torch.arange(t)), table), "shared places", shape
            return Stage(lambda table, x: x + table(torch.arange(t).expand(len(x), t)), table), kind, shape
        if kind == "convolution":
            layer = nn.Conv1d(d, out, chance.randint(1, min(3, t)), padding=chance.randint(0, 1))
            after = t + 2 * layer.padding[0] - layer.kernel_size[0] + 1
            return Stage(lambda c, x: c(x.transpose(1, 2)).transpose(1, 2), layer), kind, (after, out)
        if kind == "mean":
            return Stage(lambda x: x.mean(1)), kind, (d,)
        if kind == "last":
            return Stage(lambda layer, x: layer(x[:, -1]), self.linear(d, out)), kind, (out,)
        if kind == "pool":  # over the places, by weights that a layer gives
            return Stage(_pooled, self.linear(d, 1)), kind, (d,)
        if kind == "strided" and t > 1:
            return Stage(lambda layer, x: layer(x[:, ::2]), self.linear(d, out)), kind, ((t + 1) // 2, out)
        if kind == "each":  # one call for every place, backwards
            layer = self.linear(d, out)
            return Stage(lambda f, x: torch.stack([f(x[:, i]) for i in reversed(range(t))], 1), layer), kind, (t, out)
        if kind == "mixer":  # over the places of every feature
            layer = self.linear(t, t)
            return Stage(lambda f, x: f(x.transpose(1, 2)).transpose(1, 2), layer), kind, shape
        return self.linear(d, out), "linear", (t, out)

    def attention(self, kind: str, d: int, t: int) -> tuple[nn.Module, str]:
        chance = self.chance
        heads = chance.choice([h for h in (1, 2, 3) if d % h == 0])
        options: dict[str, Any] = {"bias": chance.random() < 0.7, "batch_first": chance.random() < 0.5}
        width = d
        if kind == "crossed" and chance.random() < 0.5:
            width = chance.randint(1, 4)
            options |= {"kdim": width, "vdim": d}
        inner = nn.MultiheadAttention(d, heads, **options)
        causal = torch.ones(t, t).triu(1).bool() if chance.random() < 0.4 else None
        if kind == "attention":
            return Stage(lambda m, x: _attended(m, x, x, x, causal), inner), kind
        how = chance.choice(["key is value", "all differ", "query is key"]) if width == d else "all differ"
        return Stage(lambda m, f, x: _crossed(m, f, x, how, causal), inner, nn.Linear(d, width)), f"{kind}, {how}"

    def recurrent(self, shape: Shape, out: int) -> Made:
        chance, (t, d) = self.chance, shape
        options: dict[str, Any] = {"bias": chance.random() < 0.7, "batch_first": chance.random() < 0.5}
        options |= {"bidirectional": chance.random() < 0.3, "num_layers": chance.choice([1, 1, 2])}
        kind = chance.choice([nn.LSTM, nn.GRU, nn.RNN])
        if kind is nn.LSTM and out > 1 and chance.random() < 0.3:
            options["proj_size"] = chance.randint(1, out - 1)
        layer = kind(d, out, **options)
        width = (options.get("proj_size") or out) * (1 + options["bidirectional"])
        end = chance.random() < 0.3
        return Stage(lambda m, x: _recurred(m, x, end), layer), kind.__name__, (width,) if end else (t, width)

    # --- stages of images -----------------------------------------------------------------------------------------

    def size(self, dims: int, low: int, high: int) -> Shape:
        return tuple(self.chance.randint(low, high) for _ in range(dims))

    def of_image(self, shape: Shape) -> Made:
        chance, (c, *size) = self.chance, shape
        dims = len(size)
        kinds = ["convolution"] * 4 + ["transposed", "transposed", "norm", "flatten", "flatten", "sequence", "prelu"]
        kind = chance.choice(kinds)
        if kind == "norm" and c * math.prod(size) > 1:
            return self.norm("image", shape), kind, shape
        if kind == "prelu":
            return nn.PReLU(chance.choice([1, c])), kind, shape
        if kind == "sequence":
            return Stage(lambda x: x.flatten(2).transpose(1, 2)), kind, (math.prod(size), c)
        if kind == "flatten":
            out = chance.randint(1, 5)
            return Stage(lambda f, x: f(x.flatten(1)), self.linear(c * math.prod(size), out)), kind, (out,)
        return self.convolution(c, tuple(size), kind == "transposed", dims)

    def convolution(self, c: int, size: Shape, transposed: bool, dims: int) -> Made:
        chance = self.chance
        groups = chance.choice([g for g in range(1, c + 1) if c % g == 0])
        out = groups * chance.randint(1, max(1, 4 // groups))
        mode = chance.choice(["zeros", "zeros", "reflect", "replicate", "circular"]) if not transposed else "zeros"
        kernel, stride, padding, dilation = [], [], [], []
        for length in size:
            kernel.append(chance.randint(1, 3))
            dilation.append(chance.randint(1, 2))
            stride.append(chance.randint(1, 2))
            reach = dilation[-1] * (kernel[-1] - 1) + 1
            most = {"reflect": length - 1, "circular": length}.get(mode, 2)
            padding.append(chance.randint(0, min(2, most)))
            if not transposed and length + 2 * padding[-1] < reach:
                kernel[-1], dilation[-1] = 1, 1
            if transposed:
                padding[-1] = min(padding[-1], (stride[-1] * (length - 1) + reach - 1) // 2)
        given: dict[str, Any] = {"stride": tuple(stride), "dilation": tuple(dilation), "padding": tuple(padding)}
        named = {"groups": groups, "bias": chance.random() < 0.7}
        if transposed:
            given["output_padding"] = tuple(
                chance.randint(0, max(s, k) - 1) for s, k in zip(stride, dilation, strict=True)
            )
        else:
            named["padding_mode"] = mode
            if chance.random() < 0.2:
                given |= {"padding": "same", "stride": 1}
                if mode in ("reflect", "circular"):
                    named["padding_mode"] = "zeros"
        kinds = TRANSPOSED if transposed else CONVOLUTIONS
        layer = kinds[dims - 1](c, out, tuple(kernel), **given, **named)
        with torch.no_grad():
            after = layer(torch.zeros(1, c, *size)).shape[2:]
        what = f"{'transposed' if transposed else 'convolution'} {dims}d"
        if math.prod(after) * out > 200:
            return self.of_image((c, *size))
        if dims == 2 and not transposed and chance.random() < 0.2:
            last = torch.channels_last
            return Stage(lambda f, x: f(x.contiguous(memory_format=last)), layer), f"{what}, last", (out, *after)
        return layer, what, (out, *after)

    # --- the network ----------------------------------------------------------------------------------------------

    def start(self) -> tuple[list[nn.Module], str, Shape, Callable[[int], Tensor], list[str]]:
        """The input, and what makes vectors, a sequence or an image of it where it is tokens."""
        chance = self.chance
        kind = chance.choice(["vector", "sequence", "image", "tokens", "bag"])
        if kind in ("vector", "sequence", "image"):
            shape: Shape = {
                "vector": lambda: (chance.randint(1, 6),),
                "sequence": lambda: (chance.randint(1, 5), chance.randint(1, 5)),
                "image": lambda: (chance.randint(1, 4), *self.size(chance.choice([1, 2, 2, 3]), 2, 5)),
            }[kind]()
            if kind == "sequence" and chance.random() < 0.2:  # each second place of longer ones
                return [], kind, shape, lambda n: _normal(n, 2 * shape[0], shape[1])[:, ::2], ["strided input"]
            return [], kind, shape, lambda n: _normal(n, *shape), [kind]
        vocabulary, width, t = chance.randint(2, 7), chance.randint(1, 5), chance.randint(1, 5)
        padding = chance.choice([None, None, 0])

        def draw(n: int) -> Tensor:
            return torch.randint(vocabulary, (n, t))

        if kind == "bag":
            bag = nn.EmbeddingBag(vocabulary, width, mode=chance.choice(["sum", "mean"]), padding_idx=padding)
            return [bag], "vector", (width,), draw, [kind]
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=padding)
        return [self.tokens], "sequence", (t, width), draw, [kind]

    def network(self) -> Drawn:
        chance = self.chance
        stages, kind, shape, batch, what = self.start()
        optional: set[int] = set()
        for _ in range(chance.randint(1, 4)):
            stage, name, after = getattr(self, f"of_{kind}")(shape)
            same = after == shape
            kept = chance.choice(["", "", "", "", "reentrant", "other"])
            # What a stage without parameters returns may be a view of what it was given; autograd needs what a cell,
            # for example, returns.
            kept_as_is = not list(stage.parameters()) or name in ("cell", "norm", "bilinear", "pool", "heads", "mixed")
            choices = [a for a in ACTIVATIONS if not (kept_as_is and "in place" in a)]
            activation = "none" if not list(stage.parameters()) else chance.choice(choices)
            calls = 2 if same and chance.random() < 0.15 else 1
            wrapped: nn.Module = Wrapped(stage, activation, same and chance.random() < 0.4, calls, kept)
            if chance.random() < 0.2:
                wrapped = nn.Sequential(nn.Identity(), wrapped)
            if same and stages and chance.random() < 0.15:
                optional.add(len(stages))
            stages.append(wrapped)
            what.append(name)
            shape = after
            if len(shape) == 1:
                kind = "vector"
            elif name in ("sequence", "image"):
                kind = name
            if same and not any("BatchNorm" in type(m).__name__ for m in stage.modules()) and chance.random() < 0.1:
                stages.append(wrapped)  # once more
                what.append("again")
        if not any(p.requires_grad for stage in stages for p in stage.parameters()):
            stages.append(Stage(lambda f, x: f(x.flatten(1)), nn.Linear(math.prod(shape), 2)))
        model = Net(stages, optional, chance.random() < 0.15)
        return Drawn(fill(model), batch, what, self.mixes, optional)


def fill(model: Net) -> Net:
    """The model in float64, with weights of the usual size."""
    model = model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(
                torch.randn_like(p) / math.sqrt(max(1, p[0].numel())) if p.dim() > 1 else p + 0.3 * torch.randn_like(p)
            )
    return model


def freeze(model: nn.Module, chance: random.Random) -> None:
    """Freeze some parameters, not all."""
    parameters = list(model.parameters())
    for p in chance.sample(parameters, chance.randrange(len(parameters))):
        p.requires_grad_(False)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _bilinear(first: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    return layer(torch.tanh(first(x)), x)


def _cell_steps(cell: nn.Module, x: Tensor, steps: int) -> Tensor:
    state = None
    for i in range(steps):
        state = cell(x / (i + 1), state)
    return state[0] if isinstance(state, tuple) else state


def _pooled(layer: nn.Module, x: Tensor) -> Tensor:
    return (layer(x).softmax(1) * x).sum(1)


def _attended(m: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if not m.batch_first:
        first = {id(t): t.transpose(0, 1) for t in (q, k, v)}  # the same tensors stay the same
        q, k, v = (first[id(t)] for t in (q, k, v))
    out = m(q, k, v, attn_mask=mask, need_weights=False)[0]
    return out if m.batch_first else out.transpose(0, 1)


def _crossed(m: nn.MultiheadAttention, f: nn.Module, x: Tensor, how: str, mask: Tensor | None) -> Tensor:
    other = torch.tanh(f(x))
    if how == "key is value":
        return _attended(m, x, other, other, mask)
    if how == "query is key":
        return _attended(m, x, x, other, mask)
    return _attended(m, x, other, 2 * x, mask)


def _recurred(m: Any, x: Tensor, end: bool) -> Tensor:
    out, state = m(x if m.batch_first else x.transpose(0, 1))
    if end:
        out = out if m.batch_first else out.transpose(0, 1)
        last = (state[0] if isinstance(state, tuple) else state)[-1]
        return out[:, -1] + F.pad(last, (0, out.shape[-1] - last.shape[-1]))
    return out if m.batch_first else out.transpose(0, 1)
