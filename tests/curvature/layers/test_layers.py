"""Every kind of layer against the oracle.

Convolutions, SUA, shared weights, embeddings, norms, one-sided bases.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ekfac
from helpers import (
    LOSSES,
    assert_same_weights,
    backward,
    bases_of,
    batches_for,
    compare_with_oracle,
    jittered,
    make_pair,
    mean_loss,
    mlp,
    parameters_of,
)
from oracle import OracleEKFAC
from paper import EKFAC, KFAC

RULES: dict[str, dict[str, Any]] = {
    "per_example": {"scaling": "per_example"},
    "running": {"scaling": "running", "scaling_decay": 0.8},
    "kronecker": {"scaling": "kronecker"},
    "KFAC": {"optimizer": "KFAC"},
    "KFAC without pi": {"optimizer": "KFAC", "pi_correction": False},
}
#: torch's own parametrizations.
WAYS = nn.utils.parametrizations
COMMON: dict[str, Any] = {"lr": 0.1, "damping": 0.03, "refresh_every": 2, "factor_decay": 0.6}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


class Spread(nn.Module):
    """Weights every output differently, so that positions cannot be mistaken for one another."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return flat * torch.linspace(0.5, 1.5, flat.shape[1], dtype=x.dtype)


# ----------------------------------------------------------------------------------------------- convolutions


@st.composite
def convolutions(draw: st.DrawFn, transposed: bool = False) -> dict[str, Any]:
    dims = draw(st.integers(1, 3))
    high = 2 if dims == 3 else 3

    def each(low: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, most)) for _ in range(dims))

    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel, stride, dilation = each(1, high), each(1, 2), each(1, 2)
    options: dict[str, Any] = {"groups": groups, "dilation": dilation, "bias": draw(st.booleans())}
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    if transposed:
        padding = tuple(draw(st.integers(0, min(1, r - 1))) for r in reach)
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        options |= {"stride": stride, "padding": padding, "output_padding": extra}
        sizes = [2 + draw(st.integers(0, 2)) for _ in range(dims)]
        module = TRANSPOSED[dims](*channels, kernel, **options)
    else:
        kind = draw(st.sampled_from(["number", "number", "same", "valid"]))
        widest = [(r - 1 + 1) // 2 for r in reach]
        if kind == "same":
            stride = (1,) * dims
        padding = each(0, 2) if kind == "number" else kind
        options |= {"stride": stride, "padding": padding}
        options["padding_mode"] = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
        around = padding if kind == "number" else ([0] * dims if kind == "valid" else widest)
        room = [max(r - 2 * p if kind == "number" else r, p + 1, 1) for r, p in zip(reach, around, strict=True)]
        sizes = [r + draw(st.integers(0, 2)) for r in room]
        module = CONVOLUTIONS[dims](*channels, kernel, **options)
    return {
        "model": nn.Sequential(module, nn.Tanh(), Spread()),
        "shape": (channels[0], *sizes),
        "n": draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 999)),
    }


def check(problem: dict[str, Any], **options: Any) -> None:
    torch.manual_seed(problem["seed"])
    model = jittered(problem["model"])
    assume(all(size > 0 for size in model[0](torch.zeros(1, *problem["shape"], dtype=torch.float64)).shape))
    steps = batches_for(model, problem["shape"], n=problem["n"], steps=3, seed=problem["seed"])
    compare_with_oracle(model, LOSSES[options.get("loss_reduction", "mean")], steps, **{**COMMON, **options})


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=10)
@given(problem=convolutions())
def test_convolutions(rule: str, sharing: str, problem: dict[str, Any]) -> None:
    check(problem, sharing=sharing, **RULES[rule])


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=7)
@given(problem=convolutions(transposed=True))
def test_transposed_convolutions(rule: str, sharing: str, problem: dict[str, Any]) -> None:
    check(problem, sharing=sharing, **RULES[rule])


@pytest.mark.parametrize("damping_mode", ["plain", "factored", "relative"])
@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=5)
@given(problem=st.one_of(convolutions(), convolutions(transposed=True)), data=st.data())
def test_sua(rule: str, damping_mode: str, problem: dict[str, Any], data: st.DataObject) -> None:
    options = dict(RULES[rule])
    if "optimizer" not in options:
        options["damping_mode"] = damping_mode
        options["on_refresh"] = data.draw(st.sampled_from(["carry", "kronecker"]))
    if rule == "KFAC":  # a bias with pi: see the next test
        problem["model"][0].register_parameter("bias", None)
    check(problem, sua=True, **options)


@settings(max_examples=8)
@given(problem=st.one_of(convolutions(), convolutions(transposed=True)))
def test_under_sua_a_bias_is_a_block_of_its_own_to_kfac_too(problem: dict[str, Any]) -> None:
    """A = [1] in its pi as well."""
    assume(problem["model"][0].bias is not None)
    check(problem, sua=True, **RULES["KFAC"])


def test_sua_keeps_one_small_factor_for_all_taps() -> None:
    model = jittered(nn.Sequential(nn.Conv2d(4, 6, 3), Spread()))
    opt, _ = compare_with_oracle(
        model, LOSSES["mean"], batches_for(model, (4, 5, 5), steps=2), **COMMON, sua=True, scaling="running"
    )
    state = opt.state[model[0].weight]
    assert state["A"].shape == (1, 4, 4) and state["B"].shape == (1, 6, 6)
    assert state["s"].numel() == sum(p.numel() for p in model[0].parameters())


@pytest.mark.parametrize("rule", RULES)
def test_depthwise_convolutions_are_one_block_a_channel(rule: str) -> None:
    model = jittered(nn.Sequential(nn.Conv2d(5, 10, 3, groups=5, padding=1), nn.Tanh(), nn.Conv2d(10, 2, 1), Spread()))
    opt, _ = compare_with_oracle(model, LOSSES["mean"], batches_for(model, (5, 3, 3), steps=4), **COMMON, **RULES[rule])
    assert opt.state[model[0].weight]["A"].shape == (5, 10, 10)


# --------------------------------------------------------------------------------------------- shared weights


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return x


class TiedPair(nn.Module):
    """Two Linear layers with one weight; their biases are one, two or none."""

    def __init__(self, biases: str) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(4, 4, bias=biases != "none") for _ in range(2))
        self.two.weight = self.one.weight
        if biases == "shared":
            self.two.bias = self.one.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class SiameseConvolution(nn.Module):
    """A convolution called at two resolutions: positions of both calls belong to the example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv(x).flatten(1), torch.tanh(self.conv(x[..., ::2, ::2])).flatten(1)], 1)


class Recurrent(nn.Module):
    """The same layers at every step of a sequence, written with layers that hooks can see."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            state = torch.tanh(self.inner(x[:, t]) + self.outer(state))
        return state


class NestedTwice(nn.Module):
    """A block that stands at two places of the network."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.first = self.second = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(x + self.first(x))


class PairOfInputs(nn.Module):
    """Both halves of a pair through one encoder, stacked: the encoder's leading dimension is 2 N."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(3, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        code = torch.tanh(self.encoder(x.flatten(0, 1)))
        return self.head(code.reshape(len(x), -1))


SHARED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a layer in a loop": (Loop, (4,)),
    "a layer in a loop over positions": (Loop, (3, 4)),
    "tied weights and biases": (lambda: TiedPair("shared"), (4,)),
    "tied weights, no biases": (lambda: TiedPair("none"), (4,)),
    "tied weights, two biases": (lambda: TiedPair("two"), (4,)),
    "a convolution at two resolutions": (SiameseConvolution, (2, 5, 5)),
    "a recurrent network of Linear layers": (Recurrent, (4, 3)),
    "a block at two places": (NestedTwice, (4,)),
    "stacked pairs": (PairOfInputs, (2, 3)),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SHARED)
def test_shared_weights(name: str, rule: str, sharing: str) -> None:
    build, shape = SHARED[name]
    model = jittered(build())
    steps = batches_for(model, shape, n=6, steps=4)
    compare_with_oracle(model, LOSSES["mean"], steps, sharing=sharing, **COMMON, **RULES[rule])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("rule", RULES)
def test_activation_checkpointing_counts_once(rule: str, sharing: str, use_reentrant: bool) -> None:
    """The layers run twice, in the forward and again inside backward; the examples are the same ones."""

    class Checkpointed(nn.Module):
        def __init__(self, on: bool) -> None:
            super().__init__()
            self.on, self.start, self.end = on, nn.Linear(3, 4), nn.Linear(4, 2)
            self.middle = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.start(x))
            for _ in range(2):
                x = checkpoint(self.middle, x, use_reentrant=use_reentrant) if self.on else self.middle(x)
            return self.end(x)

    model, plain = Checkpointed(True).double(), Checkpointed(False).double()
    plain.load_state_dict(model.state_dict())
    compare_with_oracle(
        model,
        LOSSES["mean"],
        batches_for(plain, (3,), steps=5),
        oracle_model=plain,
        sharing=sharing,
        **COMMON,
        **RULES[rule],
    )


@pytest.mark.parametrize("rule", RULES)
def test_checkpointed_micro_batches(rule: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    class Plain(Whole):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    steps = [[(x[:3], y[:3]), (x[3:], y[3:])] for ((x, y),) in batches_for(model, (3,), steps=4)]
    compare_with_oracle(Whole(), LOSSES["mean"], steps, oracle_model=copy.deepcopy(Plain()), **COMMON, **RULES[rule])


# -------------------------------------------------------------------------------------- embeddings and norms


def token_batches(vocabulary: int, length: int, out: tuple[int, ...], n: int = 6, steps: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    return [
        [
            (
                torch.randint(vocabulary, (n, length), generator=generator),
                torch.randn(n, *out, dtype=torch.float64, generator=generator),
            )
        ]
        for _ in range(steps)
    ]


@pytest.mark.parametrize("padding_idx", [None, 0, 3])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("rule", RULES)
def test_embedding(rule: str, sharing: str, padding_idx: int | None) -> None:
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=padding_idx), nn.Linear(4, 3)).double()
    start = model[0].weight.detach().clone()
    opt, _ = compare_with_oracle(
        model, LOSSES["mean"], token_batches(7, 5, (5, 3)), sharing=sharing, **COMMON, **RULES[rule]
    )
    state = opt.state[model[0].weight]
    assert state["A"].shape == (1, 7) and state["B"].shape == (1, 4, 4), "no V x V matrix"
    if padding_idx is not None:
        assert torch.equal(model[0].weight[padding_idx], start[padding_idx])


def test_embedding_of_single_tokens() -> None:
    """One token an example, an input of shape [N]."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    steps = [[(x.squeeze(1), y)] for ((x, y),) in token_batches(5, 1, (2,), n=9)]
    for rule in RULES.values():
        compare_with_oracle(jittered(model), LOSSES["mean"], steps, **COMMON, **rule)


class TinyLanguageModel(nn.Module):
    """The embedding's weight is the output layer's."""

    def __init__(self, bias: bool, padding_idx: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, padding_idx=padding_idx)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(x))))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("rule", RULES)
def test_embedding_tied_to_the_output(rule: str, sharing: str, padding_idx: int | None, bias: bool) -> None:
    """Both uses of the weight are summed before they are squared."""
    model = jittered(TinyLanguageModel(bias, padding_idx))
    steps = token_batches(6, 3, (3, 6), n=5)
    options = {**COMMON, "lr": 0.02, "damping": 0.1, **RULES[rule]}
    compare_with_oracle(model, LOSSES["mean"], steps, sharing=sharing, **options)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("scaling", ["running", "per_example", "kronecker"])
def test_a_tied_embedding_does_not_mind_the_scale_of_the_loss(scaling: str, scale: float) -> None:
    ends = []
    for factor in (1.0, scale):
        torch.manual_seed(3)
        model = jittered(TinyLanguageModel(False, None))
        opt = EKFAC(model, lr=0.02 * factor, damping=0.5, damping_mode="relative", refresh_every=3, scaling=scaling)
        for (batch,) in token_batches(6, 3, (3, 6), n=5, steps=8):
            opt.zero_grad()
            (factor * mean_loss(model, batch)).backward()
            opt.step()
        ends.append(parameters_of(model))
    assert_same_weights(*ends, 1e-7)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(4), (4,)),
    "LayerNorm over positions": (lambda: nn.LayerNorm(4), (3, 4)),
    "LayerNorm over two dimensions": (lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    "LayerNorm without shift": (lambda: nn.LayerNorm(4, bias=False), (3, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (3, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 3)),
    "GroupNorm of images": (lambda: nn.GroupNorm(2, 4), (4, 3, 2)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "BatchNorm1d over positions": (lambda: nn.BatchNorm1d(4), (4, 3)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (4, 2, 3)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2), (2, 2, 2, 1)),
    "BatchNorm without running statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (4, 3)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, rule: str, training: bool) -> None:
    build, shape = NORMS[name]
    model = jittered(nn.Sequential(build(), nn.Tanh(), Spread())).train(training)
    compare_with_oracle(model, LOSSES["mean"], batches_for(model, shape, n=7, steps=4), **COMMON, **RULES[rule])


@pytest.mark.parametrize("only", ["weight", "bias"])
@pytest.mark.parametrize("build", [lambda: nn.LayerNorm(4), lambda: nn.Linear(4, 3), lambda: nn.Conv1d(4, 3, 1)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sua", [False, True])
def test_half_frozen_layers(build: Callable[[], nn.Module], only: str, rule: str, sua: bool) -> None:
    """Only the weight or only the bias trains."""
    model = jittered(nn.Sequential(build(), nn.Tanh(), Spread()))
    for name, p in model[0].named_parameters():
        p.requires_grad_(name == only)
    shape = (4, 5) if isinstance(model[0], nn.Conv1d) else (5, 4)
    compare_with_oracle(model, LOSSES["mean"], batches_for(model, shape, steps=4), sua=sua, **COMMON, **RULES[rule])


# ------------------------------------------------------------------------------------------- one-sided bases


@pytest.mark.parametrize("limit", [1, 3, 4, 6, 100])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_max_factor_dim(limit: int, rule: str, sharing: str) -> None:
    model = jittered(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    steps = batches_for(model, (2, 5), steps=4)
    opt, _ = compare_with_oracle(
        model, LOSSES["mean"], steps, max_factor_dim=limit, sharing=sharing, **COMMON, **RULES[rule]
    )
    state = opt.state[model[0].weight]
    assert state["A"].shape == ((1, 6) if limit < 6 else (1, 6, 6))
    assert state["B"].shape == ((1, 4) if limit < 4 else (1, 4, 4))


def test_a_wide_output_keeps_no_wide_matrix() -> None:
    """50,000 outputs: with a limit the state stays of the size of the weights."""
    torch.manual_seed(0)
    model = nn.Linear(8, 50_000)
    opt = EKFAC(model, lr=0.01, max_factor_dim=1000)
    for _ in range(2):
        opt.zero_grad()
        F.cross_entropy(model(torch.randn(4, 8)), torch.randint(50_000, (4,))).backward()
        opt.step()
    numbers = sum(v.numel() for s in opt.state.values() for v in s.values() if isinstance(v, Tensor))
    assert numbers < 4 * sum(p.numel() for p in model.parameters())


# ------------------------------------------------------------------------- what is covered, and changes to it


@pytest.mark.parametrize("chosen", [{"exclude": ["2"]}, {"include": ["0", "4"]}, {"exclude": "[2]"}])
@pytest.mark.parametrize("rule", ["running", "per_example", "KFAC"])
def test_excluded_layers_are_diagonal(rule: str, chosen: dict[str, Any]) -> None:
    model = mlp(3, 4, 4, 2)
    options = {**COMMON, **RULES[rule]}
    kind = KFAC if options.pop("optimizer", "EKFAC") == "KFAC" else EKFAC
    inverse = {"scaling": "inverse"} if kind is KFAC else {}
    oracle = OracleEKFAC(copy.deepcopy(model), mean_loss, exclude=["2"], **{**options, **inverse})
    opt = kind(model, **options, **chosen)
    for micro_batches in batches_for(model, (3,), steps=4):
        opt.zero_grad()
        backward(model, mean_loss, micro_batches)
        opt.step()
        bases = None if kind is KFAC else bases_of(opt, model)
        assert_same_weights(parameters_of(model), oracle.step(micro_batches, bases=bases), 1e-9)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("what", ["0", "2", "0.bias"])
def test_freezing_and_unfreezing_in_mid_training(what: str, rule: str) -> None:
    """A frozen parameter stands still; the rest trains as without it; unfrozen, its layer is where it was."""

    model = mlp(3, 4, 3, 2)
    opt, oracle = make_pair(model, LOSSES["mean"], **COMMON, **RULES[rule])
    for number, micro_batches in enumerate(batches_for(model, (3,), n=9, steps=10)):
        if number in (3, 7):
            for net in (model, oracle.model):
                for name, p in net.named_parameters():
                    if name == what or name.startswith(what + "."):
                        p.requires_grad_(number == 7)
                        p.grad = None
        before = parameters_of(model)
        opt.zero_grad()
        backward(model, LOSSES["mean"], micro_batches)
        opt.step()
        bases = None if oracle.scaling == "inverse" else bases_of(opt, model)
        expected = oracle.step(micro_batches, bases=bases)
        got = parameters_of(model)
        assert_same_weights({k: got[k] for k in expected}, expected, 1e-9, f"step {number + 1}")
        for name in got.keys() - expected.keys():
            assert torch.equal(got[name], before[name])


@pytest.mark.parametrize("rule", ["running", "per_example", "KFAC"])
def test_add_param_group(rule: str) -> None:
    """Parameters outside the groups are not trained until a group brings them in, with its own options."""

    model = mlp(3, 4, 2)
    options = {**COMMON, **RULES[rule]}
    kind = KFAC if options.pop("optimizer", "EKFAC") == "KFAC" else EKFAC
    opt = kind(model, params=[{"params": model[2].parameters()}], **options)
    oracle_options = {**options, **({"scaling": "inverse"} if kind is KFAC else {})}
    oracle = OracleEKFAC(
        copy.deepcopy(model),
        mean_loss,
        trained=["2.weight", "2.bias"],
        per_parameter={n: {"lr": 0.02} for n in ("0.weight", "0.bias")},
        **oracle_options,
    )
    start = parameters_of(model)
    for number, micro_batches in enumerate(batches_for(model, (3,), steps=7)):
        if number == 3:
            assert torch.equal(model[0].weight, start["0.weight"])
            opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
            oracle.trained = None
        opt.zero_grad()
        model.zero_grad()
        backward(model, mean_loss, micro_batches)
        opt.step()
        expected = oracle.step(micro_batches, bases=None if kind is KFAC else bases_of(opt, model))
        got = parameters_of(model)
        assert_same_weights({k: got[k] for k in expected}, expected, 1e-9, f"step {number + 1}")


# --------------------------------------------------------------------------------------- layers without blocks


class Sequence(nn.Module):
    """Layers whose call cannot be computed again, or whose weight is not the parameter that is trained."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "lstm with dropout":
            self.inner: nn.Module = nn.LSTM(4, 4, num_layers=2, dropout=1e-9, batch_first=True)
        elif kind == "weight norm":
            self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False))
        else:
            self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4, bias=False)).eval()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return self.head(out[0] if isinstance(out, tuple) else out)


@pytest.mark.parametrize("kind", ["lstm with dropout", "weight norm", "spectral norm"])
@pytest.mark.parametrize("rule", ["running", "per_example", "KFAC"])
def test_layers_that_cannot_be_read_are_diagonal_and_say_why(kind: str, rule: str) -> None:
    model = Sequence(kind).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.warns(UserWarning, match=r"% of the parameters have no Kronecker or exact block.*inner"):
        opt: Any = compare_with_oracle(
            model,
            LOSSES["mean"],
            batches_for(model, (3, 4), steps=4),
            oracle_model=copy.deepcopy(model),
            **COMMON,
            **RULES[rule],
        )[0]
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name
    for line in str(opt.summary()).splitlines():
        if "inner" in line:
            assert "diagonal (" in line, line


NORMED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "weight norm": (lambda: WAYS.weight_norm(nn.Linear(4, 4)), (3, 4)),
    "weight norm, no bias": (lambda: WAYS.weight_norm(nn.Linear(4, 4, bias=False)), (3, 4)),
    "weight norm of columns": (lambda: WAYS.weight_norm(nn.Linear(4, 4), dim=1), (3, 4)),
    "spectral norm": (lambda: WAYS.spectral_norm(nn.Linear(4, 4)).eval(), (3, 4)),
    "convolution": (lambda: WAYS.weight_norm(nn.Conv1d(4, 4, 2, padding="same")), (4, 3)),
    "transposed convolution": (lambda: WAYS.spectral_norm(nn.ConvTranspose1d(4, 4, 1)).eval(), (4, 3)),
}


@pytest.mark.parametrize("kind", NORMED)
@pytest.mark.parametrize("scaling", ["belief", "adam", "rmsprop", "adagrad"])
def test_weights_that_a_norm_makes_are_trained_in_the_basis_of_their_layers_calls(kind: str, scaling: str) -> None:
    """Rules that take no more than a basis from the calls; the gradient is that of what is trained."""
    torch.manual_seed(0)
    build, shape = NORMED[kind]
    model = nn.Sequential(nn.Linear(shape[-1], shape[-1]), nn.Tanh(), build(), nn.Flatten(), nn.Linear(12, 2)).double()
    steps = batches_for(model, shape, n=40, steps=5)
    own: dict[str, Any] = {"betas": (0.95, 0.95), "weight_decay": 0.0} if scaling == "belief" else {}
    own |= {"scaling": scaling, "eps": 1e-5, "lr": 0.01, "refresh_every": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # the weight is not said to be used elsewhere
        opt, _ = compare_with_oracle(model, LOSSES["mean"], steps, tolerance=1e-8, **own)
    (row,) = [row for row in opt.summary().rows if row.name == "2"]
    assert row.block.startswith("kronecker") and "computed from it" in row.block


@pytest.mark.parametrize("kind", ["weight norm", "spectral norm"])
def test_a_basis_helps_weights_that_a_norm_makes(kind: str) -> None:
    def after(steps: int, seed: int, **coverage: Any) -> float:
        torch.manual_seed(seed)
        norm = getattr(WAYS, kind.replace(" ", "_"))
        layers = [norm(nn.Linear(24, 24)), norm(nn.Linear(24, 6)), norm(nn.Linear(6, 24)), nn.Linear(24, 24)]
        model = nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1])
        opt = ekfac.EKFAC(model, total_steps=steps, coverage=ekfac.Coverage(**coverage))
        mix, losses = torch.randn(4, 24), []
        for _ in range(steps):
            x = (torch.randn(32, 4) @ mix).tanh()
            opt.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        return sum(losses[-20:])

    found, without = (sum(after(150, seed, **own) for seed in range(3)) for own in ({}, {"exclude": ["0", "2", "4"]}))
    assert found < 0.92 * without


# ------------------------------------------------------- gradients that do not pass through the layers' calls


def weight_used_directly(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Part of the gradient reaches the weight past the layer, as in an auto-encoder tied through F.linear."""
    return F.linear(torch.tanh(F.linear(model(x), model[2].weight.T)), model[2].weight).square().mean()


@pytest.mark.parametrize("loss", [weight_used_directly])
@pytest.mark.parametrize("kind", ["EKFAC", "EKFAC-ra", "KFAC"])
def test_a_gradient_that_the_layers_did_not_see_is_an_error(loss: Callable[..., Tensor], kind: str) -> None:
    torch.manual_seed(1)
    model = mlp(3, 6, 2)
    opt = (
        KFAC(model, lr=0.1)
        if kind == "KFAC"
        else EKFAC(model, lr=0.1, scaling="per_example" if kind == "EKFAC" else "running")
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)

    def train() -> None:
        for _ in range(3):
            opt.zero_grad()
            loss(model, x, y).backward()
            opt.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError) as caught:
            train()
    message = str(caught.value)
    assert "'0'" in message or "'2'" in message, message
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


def test_autograd_grad_of_the_input_while_paused_is_fine() -> None:
    """An adversarial example, made with capture paused, then trained on."""

    model = mlp(3, 4, 2)
    opt, oracle = make_pair(model, LOSSES["mean"], **COMMON)
    for ((x, y),) in batches_for(model, (3,), steps=4):
        opt.zero_grad()
        x = x.clone().requires_grad_()
        with opt.paused():
            (slope,) = torch.autograd.grad(mean_loss(model, (x, y)), x)
        moved = (x + 0.1 * slope.sign()).detach()
        mean_loss(model, (moved, y)).backward()
        opt.step()
        expected = oracle.step([(moved, y)], bases=bases_of(opt, model))
        assert_same_weights(parameters_of(model), expected, 1e-9)
