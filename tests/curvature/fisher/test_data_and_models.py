"""Batches of every form, models of every kind, and that a model is left as it was found."""

from __future__ import annotations

import copy
import doctest
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ekfac.curvature.fisher as module_under_test
from allocations import allocated
from ekfac import fisher
from ekfac.curvature.fisher import passes as sweep
from fisher_cases import flat_gradients, negative_log_likelihood

DOUBLE = torch.float64


def mlp(d: int = 3, classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(d, 5), nn.Tanh(), nn.Linear(5, classes)).double()


def batches(n: int = 3, size: int = 6, d: int = 3, classes: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(size, d, dtype=DOUBLE), torch.randint(classes, (size,))) for _ in range(n)]


def truth(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    rows = flat_gradients(model, negative_log_likelihood("categorical"), x, y)
    return rows.T @ rows / len(rows)


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    error = float((got - expected).norm() / expected.norm())
    assert error <= tolerance, f"relative error {error:.3g}"


# --- batches ----------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    logits: Tensor


class Named(nn.Module):
    """Takes keywords and gives an object with logits, as language models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, scale: Tensor) -> Output:
        return Output(self.inner(x * scale[:, None]))


torch.utils._pytree.register_dataclass(Output, serialized_type_name="test.fisher.Output")


@pytest.mark.parametrize("approximation", ["full", "diagonal", "ekfac"])
def test_forms_of_batches(approximation: str) -> None:
    inner, data = mlp(), batches()
    model = Named(inner)
    ones = torch.ones(6, dtype=DOUBLE)
    reference = fisher(inner, data, "categorical", approximation=approximation).dense()
    forms: list[list[Any]] = [
        [{"x": x, "scale": ones, "labels": y} for x, y in data],
        [({"x": x, "scale": ones}, y) for x, y in data],
        [((x, ones), y) for x, y in data],
        [(x, ones, y) for x, y in data],
        [[x, ones, y] for x, y in data],
    ]
    for form in forms:
        close(fisher(model, form, "categorical", approximation=approximation).dense(), reference)
    # Cut otherwise, and by a loader.
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5, shuffle=True)
    close(fisher(inner, loader, "categorical", approximation=approximation).dense(), reference)


@pytest.mark.parametrize("approximation", ["full", "block", "diagonal", "kfac"])
def test_an_iterator_is_enough_for_one_pass(approximation: str) -> None:
    model, data = mlp(), batches()
    once = fisher(model, iter(data), "categorical", approximation=approximation)
    close(once.dense(), fisher(model, data, "categorical", approximation=approximation).dense())
    assert once.examples == 18


def test_losses_as_functions() -> None:
    model, data = mlp(), batches()
    expected = fisher(model, data, "categorical", approximation="full").dense()
    for loss in (
        F.cross_entropy,
        lambda o, t: F.cross_entropy(o, t, reduction="none"),
        lambda o, t: F.nll_loss(o.log_softmax(-1), t),
        nn.CrossEntropyLoss(reduction="none"),
    ):
        close(fisher(model, data, loss, approximation="full").dense(), expected)
    # Any output and any target that the function understands.
    double = [(x, {"a": y, "weights": torch.ones(6)}) for x, y in data]

    def weighted(o: Tensor, t: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(o, t["a"], reduction="none") * t["weights"]

    close(fisher(model, double, weighted, approximation="full").dense(), expected)


def test_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    model, data = mlp(), batches()
    fisher(model, data, "categorical", progress=True)
    shown = capsys.readouterr().err
    assert "pass 1 of 2, batch 1 of 3" in shown and "pass 2 of 2, batch 3 of 3" in shown
    assert shown.endswith("\r")
    fisher(model, data, "categorical", progress=False)
    fisher(model, data, "categorical")  # no terminal, and it does not take long
    assert capsys.readouterr().err == ""


@pytest.mark.over_a_second
@pytest.mark.parametrize("approximation", ["diagonal", "kfac", "ekfac"])
def test_memory_does_not_grow_with_the_data(approximation: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 10))
    x, y = torch.randn(4000, 60), torch.randint(10, (4000,))

    def peak(n: int) -> int:
        parts = list(zip(x[:n].split(100), y[:n].split(100), strict=True))
        return allocated(lambda: fisher(model, parts, "categorical", approximation=approximation, estimate="exact"))[0]

    peak(200)
    assert peak(4000) <= 1.05 * peak(400)


class Repeated(nn.Module):
    """Convolutions, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(2, 3, 2)
        self.shared = nn.Linear(9, 9)
        self.head = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.convolution(x).tanh().flatten(1)
        return self.head(self.shared(self.shared(h).tanh()).tanh())


@pytest.mark.parametrize("approximation", ["kfac", "ekfac"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("memory", [0, 2_000, 4_000, 16_000])
def test_little_memory_gives_the_same_matrix(
    approximation: str, sharing: str, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that cannot wait for one another are handed on in groups: more of them where a batch is large."""
    torch.manual_seed(0)
    model = Repeated().double()
    sizes = (30, 2, 9)
    data = [(torch.randn(n, 2, 4, dtype=DOUBLE) * n, torch.randint(4, (n,))) for n in sizes]

    def dense() -> Tensor:
        return fisher(
            model, data, "categorical", approximation=approximation, estimate="exact", sharing=sharing
        ).dense()

    expected = dense()
    monkeypatch.setitem(sweep.MEMORY, "cpu", memory)
    close(dense(), expected)


# --- models -----------------------------------------------------------------------------------------------------------


def test_a_model_is_left_as_it_was_found() -> None:
    model = nn.Sequential(
        nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten(), nn.Linear(4, 3)
    ).double()
    model.train()
    model[3].eval()
    model[5].bias.requires_grad_(False)
    model(torch.randn(5, 1, 3, dtype=DOUBLE)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    data = [(torch.randn(6, 1, 3, dtype=DOUBLE), torch.randint(3, (6,))) for _ in range(2)]
    for approximation in ("full", "block", "diagonal", "kfac", "ekfac"):
        with torch.no_grad():  # it turns gradients on for itself
            G = fisher(model, data, "categorical", approximation=approximation, estimate="exact")
        assert "5.bias" not in G.layout.names
        close(G.trace(), G.dense().trace())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert [m.training for m in model] == [True, True, True, False, True, True]
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    for name, p in model.named_parameters():
        assert (p.grad is None) == (gradients[name] is None)
        assert p.grad is None or torch.equal(p.grad, gradients[name])


def test_evaluation_mode_makes_it_deterministic() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    data = batches()
    one, two = (fisher(model, data, "categorical").dense() for _ in range(2))
    assert torch.equal(one, two)
    close(fisher(model, data, "categorical", approximation="full").dense(), truth(model.eval(), data))


class Twice(nn.Module):
    """A layer called twice, and an embedding tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.hidden = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        return self.head(self.hidden(torch.tanh(self.hidden(h))).mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.one_hot(tokens, 4).to(self.head.weight)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(F.one_hot(tokens, 4).to(self.head.weight))[0][:, -1])


class Branching(nn.Module):
    """What it does depends on the data's values: nothing that vmap could trace."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens).mean(1) * self.gain
        return self.head(torch.where(h > 0, h, -h) if bool((tokens >= 0).all()) else h)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.hidden = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.head = nn.Linear(3, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens).mean(1)
        return self.head(checkpoint(self.hidden, h, use_reentrant=False))


class Sloped(nn.Module):
    """A PReLU, of whose slope torch's nested vmap makes a wrong gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.act = nn.PReLU(3)
        self.head = nn.Linear(3, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.act(self.embedding(tokens).transpose(1, 2)).mean(2))


@pytest.mark.filterwarnings("ignore:torch.func.vmap cannot trace:RuntimeWarning")
@pytest.mark.parametrize("make", [Twice, Attention, Recurrent, Branching, Checkpointed, Sloped])
@pytest.mark.parametrize("estimate", ["empirical", "exact"])
def test_any_module(make: type[nn.Module], estimate: str) -> None:
    """The full matrix, whatever route it took, against backward passes of one example at a time."""
    torch.manual_seed(0)
    model = make().double()
    tokens, labels = torch.randint(4, (9, 3)), torch.randint(5, (9,))
    data = [(tokens[:5], labels[:5]), (tokens[5:], labels[5:])]
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = torch.zeros(())
    for x, y in zip(tokens, labels, strict=True):
        output = model(x[None])[0]
        p = output.softmax(-1).detach()
        for label in range(5) if estimate == "exact" else [int(y)]:
            gradients = torch.autograd.grad(-output.log_softmax(-1)[label], parameters, retain_graph=True)
            row = torch.cat([g.flatten() for g in gradients])
            expected = expected + torch.outer(row, row) * (p[label] if estimate == "exact" else 1.0)
    expected = expected / 9
    full = fisher(model, data, "categorical", approximation="full", estimate=estimate)
    close(full.dense(), expected)
    diagonal = fisher(model, data, "categorical", approximation="diagonal", estimate=estimate)
    close(diagonal.diagonal(), expected.diagonal())
    # s* is the diagonal of that matrix in EKFAC's basis, also where calls or ties have to be added up.
    corrected = fisher(model, data, "categorical", approximation="ekfac", estimate=estimate)
    U = corrected.unproject(torch.eye(len(expected), dtype=DOUBLE))
    s = torch.cat([values.flatten() for values in corrected.spectrum().values()])
    close(s, (U.T @ expected @ U).diagonal())


def test_vmap_that_fails_is_reported() -> None:
    model = Branching().double()
    with pytest.warns(RuntimeWarning, match="one example at a time"):
        fisher(model, [(torch.randint(4, (3, 2)), torch.randint(5, (3,)))], "categorical", approximation="full")


def test_a_loss_goes_where_the_copy_of_the_model_goes() -> None:
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss(weight=torch.rand(4), reduction="none")
    model, data = mlp().float(), [(x.float(), y) for x, y in batches()]
    G = fisher(model, data, loss, approximation="diagonal", dtype=DOUBLE)
    close(fisher(model, data, loss, approximation="diagonal").diagonal().double(), G.diagonal(), 1e-4)
    assert loss.weight is not None and loss.weight.dtype == torch.float32


class Elsewhere(nn.Module):
    """The first layer's weight also enters the output directly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) + self.first.weight.sum(1)


def test_a_weight_used_outside_its_layer() -> None:
    model, data = Elsewhere().double(), batches()
    with pytest.raises(RuntimeError, match=r"layer 'first'.*used\s+elsewhere.*exclude=\['first'\]"):
        fisher(model, data, "categorical")
    G = fisher(model, data, "categorical", exclude="first")
    full = truth(model, data)
    close(G.diagonal()[:16], full.diagonal()[:16])
    assert G.layers == ("first.weight", "first.bias", "second")
    close(fisher(model, data, "categorical", approximation="full").dense(), full)


class NeverCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.first.weight, self.first.bias)


def test_layers_that_are_never_called() -> None:
    model, data = NeverCalled().double(), batches()
    with pytest.warns(RuntimeWarning, match="never called, so they get their diagonal: first"):
        G = fisher(model, data, "categorical")
    full = truth(model, data)
    close(G.diagonal(), full.diagonal())
    assert G.layers == ("first.weight", "first.bias", "unused")
    assert float(G.restrict("unused").norm()) == 0


def test_examples_that_meet_have_no_fisher() -> None:
    model = nn.Sequential(
        nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2, track_running_stats=False), nn.Flatten(), nn.Linear(4, 4)
    ).double()
    data = [(x[:, None], y) for x, y in batches()]
    with pytest.raises(ValueError, match="examples interact within the model"):
        fisher(model, data, "categorical", approximation="full")


@pytest.mark.parametrize("approximation", ["kfac", "ekfac"])
def test_include_exclude_and_wide_sides(approximation: str) -> None:
    model, data = mlp(), batches()
    full = truth(model, data)
    one = fisher(model, data, "categorical", approximation=approximation, include="2")
    assert one.layers == ("0.weight", "0.bias", "2")
    close(one.diagonal()[:20], full.diagonal()[:20])
    both = fisher(model, data, "categorical", approximation=approximation)
    close(one.restrict("2").dense(), both.restrict("2").dense())
    wide = fisher(model, data, "categorical", approximation=approximation, max_factor_dim=4)
    (first, second) = wide.parts
    assert first.basis.U_A is not None and first.basis.U_B is None  # type: ignore[attr-defined]
    assert second.basis.U_A is None and second.basis.U_B is not None  # type: ignore[attr-defined]
    if approximation == "ekfac":
        close(wide.trace(), full.trace())


def test_the_example_in_the_docstring() -> None:
    assert doctest.testmod(module_under_test).failed == 0
