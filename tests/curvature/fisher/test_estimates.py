"""Empirical, sampled and exact against the dense truth; and the theorem about deep linear networks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ekfac import fisher, relative_error
from ekfac.curvature.fisher.likelihoods import LIKELIHOODS, Categorical, covariance_column
from fisher_cases import Case, cases, dense_empirical, dense_exact, flat_gradients, negative_log_likelihood
from oracle import dense_fisher

DOUBLE = torch.float64


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    error = float((got - expected).norm() / expected.norm().clamp(min=1e-12))
    assert error <= tolerance, f"relative error {error:.3g}"


@settings(max_examples=16)
@given(case=cases())
def test_empirical_is_the_mean_over_the_labels_given(case: Case) -> None:
    expected = dense_empirical(case)
    G = fisher(case.model, case.data, case.loss, approximation="full")
    close(G.dense(), expected)
    diagonal = fisher(case.model, case.data, case.loss, approximation="diagonal")
    close(diagonal.diagonal(), expected.diagonal())


@pytest.mark.over_a_second
@settings(max_examples=16)
@given(case=cases())
def test_exact_is_the_expectation_over_all_labels(case: Case) -> None:
    expected = dense_exact(case)
    G = fisher(case.model, case.data, case.loss, approximation="full", estimate="exact")
    close(G.dense(), expected)
    diagonal = fisher(case.model, case.data, case.loss, approximation="diagonal", estimate="exact")
    close(diagonal.diagonal(), expected.diagonal())
    # Every layer's own block, and the trace, which EKFAC keeps exactly.
    block = fisher(case.model, case.data, case.loss, approximation="block", estimate="exact")
    for layer in block.layers:
        places = G.layout.places(block.restrict(layer).layout.names)
        close(block.restrict(layer).dense(), expected[places][:, places])
    corrected = fisher(case.model, case.data, case.loss, approximation="ekfac", estimate="exact")
    close(corrected.trace(), expected.trace())


@settings(max_examples=16)
@given(case=cases(), estimate=st.sampled_from(["empirical", "sampled", "exact"]), sua=st.booleans())
def test_scaling_is_the_diagonal_of_the_fisher_in_the_basis(case: Case, estimate: str, sua: bool) -> None:
    """s* = diag(U^T G U), and EKFAC is the best that its basis allows: never worse than KFAC."""
    full, kronecker, corrected = (
        fisher(case.model, case.data, case.loss, approximation=a, estimate=estimate, sua=sua)
        for a in ("block", "kfac", "ekfac")
    )
    U = corrected.unproject(torch.eye(full.shape[0], dtype=DOUBLE))
    s = torch.cat([x.flatten() for x in corrected.spectrum().values()])
    close(s, (U.T @ full.dense() @ U).diagonal())
    assert float(relative_error(full, corrected)) <= float(relative_error(full, kronecker)) + 1e-9


@given(p=st.lists(st.floats(-30, 30), min_size=2, max_size=6))
def test_a_square_root_with_one_column_less_than_classes(p: list[float]) -> None:
    log_p = torch.tensor(p, dtype=DOUBLE).log_softmax(0)
    columns = torch.stack([covariance_column(log_p, k) for k in range(len(p) - 1)], 1)
    expected = torch.diag(log_p.exp()) - torch.outer(log_p.exp(), log_p.exp())
    torch.testing.assert_close(columns @ columns.T, expected, rtol=1e-9, atol=1e-15)


def test_a_confident_network_keeps_its_digits() -> None:
    """p_1 p_2 of a class that has all but 1e-26 of the probability."""
    log_p = torch.tensor([60.0, 0.0], dtype=DOUBLE).log_softmax(0)
    column = covariance_column(log_p, 0)
    expected = torch.tensor(-30.0, dtype=DOUBLE).exp()
    torch.testing.assert_close(column, torch.stack([expected, -expected]), rtol=1e-12, atol=0)
    masked = covariance_column(torch.tensor([0.3, -torch.inf, 0.1, -torch.inf]).log_softmax(0), 2)
    assert bool(torch.isfinite(masked).all())


@pytest.mark.parametrize(
    ("loss", "outputs", "expected"), [("categorical", 4, 3), ("bernoulli", 4, 4), ("gaussian", 4, 4)]
)
def test_number_of_backward_passes(loss: str, outputs: int, expected: int) -> None:
    likelihood = LIKELIHOODS[loss]()
    assert len(list(likelihood.columns(torch.randn(5, outputs), None, 5))) == expected
    # Three independent terms an example: each by itself.
    assert len(list(likelihood.columns(torch.randn(5, 3, outputs), None, 5))) == 3 * expected


@pytest.mark.parametrize(("approximation", "sweeps"), [("kfac", 1), ("ekfac", 2), ("diagonal", 1)])
@pytest.mark.parametrize(
    ("loss", "estimate", "passes"),
    [("categorical", "exact", 4), ("bernoulli", "exact", 5), ("categorical", "empirical", 1)],
)
def test_backward_passes_through_the_network(
    approximation: str, sweeps: int, loss: str, estimate: str, passes: int
) -> None:
    """Five outputs, three batches: C - 1 passes for each batch of each sweep, and one over the first to look at it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1

    model[1].register_full_backward_hook(counted)
    targets = torch.randint(5, (6,)) if loss == "categorical" else torch.rand(6, 5)
    fisher(model, [(torch.randn(6, 3), targets)] * 3, loss, approximation=approximation, estimate=estimate)
    assert count == 3 * passes * sweeps + 1


@pytest.mark.parametrize("loss", ["categorical", "bernoulli", "gaussian"])
def test_sampled_converges_at_the_monte_carlo_rate(loss: str) -> None:
    """E ||G_k - G||^2 = V / k: measured at two k over many seeds, against V from the labels themselves."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    x = torch.randn(3, 2, dtype=DOUBLE)
    case = Case(model, [(x, torch.zeros(3, dtype=torch.long))], loss)
    exact = dense_exact(case)

    def mean_square_error(draws: int, seeds: int) -> float:
        errors = []
        for seed in range(seeds):
            G = fisher(model, case.data, loss, approximation="full", estimate="sampled", draws=draws, seed=seed)
            errors.append(float((G.dense() - exact).square().sum()))
        return sum(errors) / seeds

    few, many = mean_square_error(4, 60), mean_square_error(64, 60)
    assert 0.5 < 4 * few / (64 * many) < 2.0, f"V is {4 * few:.3g} at 4 draws and {64 * many:.3g} at 64"
    if loss == "categorical":
        nll = negative_log_likelihood(loss)
        probabilities = model(x).softmax(-1).detach()
        variance = 0.0
        for n, label in itertools.product(range(3), range(2)):
            row = flat_gradients(model, nll, x[n : n + 1], torch.tensor([label]))[0]
            own = sum(
                probabilities[n, c] * dense_fisher(flat_gradients(model, nll, x[n : n + 1], torch.tensor([c])))
                for c in range(2)
            )
            variance += float(probabilities[n, label] * (torch.outer(row, row) - own).square().sum()) / 9
        assert 0.6 < 64 * many / variance < 1.6


@pytest.mark.parametrize("approximation", ["full", "ekfac"])
def test_sampling_is_deterministic(approximation: str) -> None:
    model = nn.Linear(3, 4).double()
    data = [torch.randn(5, 3, dtype=DOUBLE) for _ in range(2)]  # no labels are needed
    one, two, three = (
        fisher(model, data, "categorical", approximation=approximation, estimate="sampled", seed=seed).dense()
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, two) and not torch.equal(one, three)


@settings(max_examples=8)
@given(
    widths=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    bias=st.booleans(),
    approximation=st.sampled_from(["kfac", "ekfac"]),
    seed=st.integers(0, 99),
)
def test_deep_linear_networks_are_exact(widths: list[int], bias: bool, approximation: str, seed: int) -> None:
    """Gaussian likelihood, linear layers: delta does not depend on h, so A x B is the block itself."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(widths))).double()
    data = [torch.randn(n, widths[0], dtype=DOUBLE) for n in (4, 7)]
    exact = fisher(model, data, "gaussian", approximation="block", estimate="exact")
    factored = fisher(model, data, "gaussian", approximation=approximation, estimate="exact")
    close(factored.dense(), exact.dense())


def test_reductions_of_torch_losses() -> None:
    """l_n is N times the example's share of the loss: tokens are averaged where torch averages them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    x, y = torch.randn(6, 5, 2, dtype=DOUBLE), torch.randint(4, (6, 5))
    y[0, :3] = -100

    class ClassesFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).movedim(-1, 1)

    outer = ClassesFirst()
    live = int((y != -100).sum())
    for estimate in ("empirical", "exact", "sampled"):
        summed = fisher(outer, [(x, y)], nn.CrossEntropyLoss(reduction="sum"), approximation="full", estimate=estimate)
        mean = fisher(outer, [(x, y)], nn.CrossEntropyLoss(), approximation="full", estimate=estimate)
        close(mean.dense(), summed.dense() * (6 / live) ** 2)
        named = fisher(model, [(x, y)], "categorical", approximation="full", estimate=estimate)
        close(summed.dense(), named.dense())
    # The empirical one is also what the loss as a plain function gives.
    function = fisher(
        outer, [(x, y)], lambda o, t: nn.functional.cross_entropy(o, t), approximation="full", estimate="empirical"
    )
    close(fisher(outer, [(x, y)], nn.CrossEntropyLoss(), approximation="full").dense(), function.dense())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["cross entropy", "weighted", "binary", "square"])
def test_torch_losses_and_functions_agree(kind: str, reduction: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    x = torch.randn(6, 3, dtype=DOUBLE)
    labels, values = torch.randint(4, (6,)), torch.rand(6, 4, dtype=DOUBLE)
    loss: nn.Module
    target: Tensor
    if kind == "cross entropy":
        loss, target = nn.CrossEntropyLoss(reduction=reduction), labels
    elif kind == "weighted":
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=DOUBLE), reduction=reduction)
        target = labels
    elif kind == "binary":
        loss, target = nn.BCEWithLogitsLoss(reduction=reduction), values.round()
    else:
        loss, target = nn.MSELoss(reduction=reduction), values
    got = fisher(model, [(x, target)], loss, approximation="full").dense()

    def per_example(output: Tensor, target: Tensor) -> Tensor:
        losses = type(loss)(**({"weight": loss.weight} if kind == "weighted" else {}), reduction="none")(output, target)
        whole = losses.flatten(1).sum(1) if losses.dim() > 1 else losses
        if reduction == "mean" and kind == "weighted":
            return whole * len(whole) / loss.weight[target].sum()
        return whole / losses[0].numel() if reduction == "mean" else whole

    close(got, fisher(model, [(x, target)], per_example, approximation="full").dense())
    if kind != "weighted":
        assert float(fisher(model, [(x, target)], loss, approximation="full", estimate="exact").trace()) > 0


def test_flattened_sequences_and_class_probabilities() -> None:
    """Outputs of k N rows are k terms an example; soft labels are a mixture."""
    torch.manual_seed(0)
    inner = nn.Linear(2, 3).double()

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).flatten(0, 1)

    x = torch.randn(4, 5, 2, dtype=DOUBLE)
    for estimate in ("exact", "sampled"):
        flat = fisher(Flat(), [x], "categorical", approximation="full", estimate=estimate)
        close(flat.dense(), fisher(inner, [x], "categorical", approximation="full", estimate=estimate).dense())
        corrected = fisher(Flat(), [x], "categorical", approximation="ekfac", estimate=estimate)
        close(corrected.trace(), flat.trace())
    q = torch.rand(4, 3, dtype=DOUBLE).softmax(-1)
    soft = fisher(inner, [(x[:, 0], q)], "categorical", approximation="full")
    f = inner(x[:, 0]).detach()
    rows = flat_gradients(inner, lambda o, t: -(o.log_softmax(-1) * t).sum(), x[:, 0], q)
    close(soft.dense(), rows.T @ rows / len(f))
    assert Categorical().live_terms(f, q) is None
