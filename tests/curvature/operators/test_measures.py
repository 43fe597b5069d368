"""Errors, distances of spectra and correlations, by every route, against dense matrices."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from allocations import allocated
from ekfac import correlation, fisher, relative_error, spectrum_distance
from ekfac.curvature.operators.dense import RowsPart
from fisher_cases import Case, cases

APPROXIMATIONS = ("full", "block", "diagonal", "kfac", "ekfac")


def dense_error(G: Tensor, H: Tensor) -> float:
    return float((G - H).norm() / G.norm())


@pytest.mark.over_a_second
@settings(max_examples=8)
@given(case=cases())
def test_errors_and_spectra_between_all_pairs(case: Case) -> None:
    operators = {a: fisher(case.model, case.data, case.loss, approximation=a) for a in APPROXIMATIONS}
    operators["power"] = operators["full"].power(0.5, 0.1)
    operators["exact ekfac"] = fisher(case.model, case.data, case.loss, estimate="exact")
    dense = {name: G.dense() for name, G in operators.items()}
    for one, two in itertools.product(operators, repeat=2):
        G, H = operators[one], operators[two]
        error = relative_error(G, H)
        assert error.dim() == 0
        assert abs(float(error) - dense_error(dense[one], dense[two])) < 2e-7, f"{one} against {two}"
        if "full" in (one, two) or "power" in (one, two):
            spectra = [G.eigenvalues(), H.eigenvalues()]
        else:
            # Block by block: each layer's spectrum sorted by itself.
            spectra = [
                torch.cat([X.restrict(layer).eigenvalues() for layer in operators["block"].layers]) for X in (G, H)
            ]
            for layer, distance in spectrum_distance(G, H, by_layer=True).items():
                own = [torch.linalg.eigvalsh(X.restrict(layer).dense()) for X in (G, H)]
                torch.testing.assert_close(distance, (own[0] - own[1]).norm(), atol=1e-10, rtol=1e-7)
            for layer, own_error in relative_error(G, H, by_layer=True).items():
                expected = dense_error(G.restrict(layer).dense(), H.restrict(layer).dense())
                assert abs(float(own_error) - expected) < 2e-7
        torch.testing.assert_close(spectrum_distance(G, H), (spectra[0] - spectra[1]).norm(), atol=1e-10, rtol=1e-7)


def test_the_full_matrix_is_never_formed() -> None:
    """12 gradients of 20,302 parameters: the matrix would take 1.6 GB, these take 2 MB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 2))
    data = [(torch.randn(12, 200), torch.randint(2, (12,)))]
    full = fisher(model, data, "categorical", approximation="full")
    (part,) = full.parts
    assert isinstance(part, RowsPart) and part.rows.shape == (12, 20_302)
    corrected = fisher(model, data, "categorical", approximation="ekfac")
    rows = part.rows.double()
    gram = rows @ rows.T
    assert abs(float(full.norm()) / float(gram.norm()) - 1) < 1e-5
    inner = (rows * (corrected.to(torch.float64) @ rows.T).T).sum()
    expected = ((gram.square().sum() - 2 * inner + corrected.norm().double() ** 2) / gram.square().sum()).sqrt()
    assert abs(float(relative_error(full, corrected)) - float(expected)) < 1e-5
    # Products and solves with it stay small too.
    v = torch.randn(20_302)
    solved = full.solve(v, 0.1)
    assert float((full @ solved + 0.1 * solved - v).norm() / v.norm()) < 1e-3


def test_measures_through_the_gram_matrix_take_little_memory() -> None:
    """A matrix of these 20,302 parameters would take 1.6 GB; the 12 gradients take 1 MB, and EKFAC's bases 0.3 MB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 2))
    data = [(torch.randn(12, 200), torch.randint(2, (12,)))]
    full = fisher(model, data, "categorical", approximation="full")
    others = [fisher(model, data, "categorical", approximation=a) for a in ("block", "diagonal", "kfac", "ekfac")]
    v = torch.randn(20_302)

    def everything() -> None:
        full.norm(), full.trace(), full.eigenvalues(), full.diagonal(), full.logdet(0.1), full.solve(v, 0.1)
        for other in others:
            relative_error(full, other), relative_error(other, full), spectrum_distance(full, other)

    assert allocated(everything)[0] < 64 * 2**20


@settings(max_examples=6)
@given(case=cases())
def test_correlation_in_parameter_space_and_in_the_basis(case: Case) -> None:
    full = fisher(case.model, case.data, case.loss, approximation="full")
    basis = fisher(case.model, case.data, case.loss, approximation="ekfac")
    dense = full.dense()
    places = torch.randperm(len(dense))[: len(dense) // 2]

    def normalised(M: Tensor) -> Tensor:
        size = M.diagonal().clamp(min=0).sqrt()
        return torch.where(torch.outer(size, size) > 0, M / torch.outer(size, size), 0.0)

    torch.testing.assert_close(correlation(full, places), normalised(dense[places][:, places]))
    torch.testing.assert_close(correlation(full, places.tolist()), correlation(full, places))
    U = basis.unproject(torch.eye(len(dense), dtype=torch.float64))
    turned = (U.T @ dense @ U)[places][:, places]
    live = turned.diagonal() > 1e-12 * turned.diagonal().max()
    got = correlation(full, places, basis)
    torch.testing.assert_close(got[live][:, live], normalised(turned)[live][:, live], atol=1e-6, rtol=1e-6)
    # The operator's own basis leaves nothing off the diagonal.
    own = correlation(basis, places, basis)
    close = own - torch.diag(own.diagonal())
    assert float(close[live][:, live].abs().max() if live.any() else 0) < 1e-6


@pytest.mark.rounding
def test_correlation_by_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    # Gradients of a softmax sum to zero, and what correlates in that direction of the basis is rounding.
    data = [(torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64))]
    full = fisher(model, data, "gaussian", approximation="full")
    basis = fisher(model, data, "gaussian", approximation="ekfac")
    named = correlation(full, {"2.weight": torch.tensor([0, 3]), "0.bias": torch.tensor([1])})
    torch.testing.assert_close(named, correlation(full, [8, 11, 7]))
    torch.testing.assert_close(correlation(full, {"2": torch.arange(6)}, basis), correlation(full, range(8, 14), basis))
    with pytest.raises(ValueError, match=r"unknown names: 0\.weight.*Known: 0, 2"):
        correlation(full, {"0.weight": torch.tensor([0])}, basis)
    with pytest.raises(ValueError, match="from 0 to 13"):
        correlation(full, [14])


def test_different_parameters_are_refused() -> None:
    data = [(torch.randn(4, 3), torch.randint(2, (4,)))]
    one = fisher(nn.Linear(3, 2), data, "categorical")
    two = fisher(nn.Linear(3, 2, bias=False), data, "categorical")
    for measure in (relative_error, spectrum_distance):
        with pytest.raises(ValueError, match="different parameters"):
            measure(one, two)
    full = fisher(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), data, "categorical", approximation="full")
    blocks = fisher(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), data, "categorical")
    with pytest.raises(ValueError, match="same blocks"):
        relative_error(full, blocks, by_layer=True)
