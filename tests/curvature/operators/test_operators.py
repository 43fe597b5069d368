"""Every operation on every approximation equals the same on ``dense()``, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ekfac import Curvature, correlation, fisher, relative_error
from ekfac.curvature.operators.dense import RowsPart
from fisher_cases import Case, cases

APPROXIMATIONS = ("full", "block", "diagonal", "kfac", "ekfac")

approximation = pytest.mark.parametrize("approximation", APPROXIMATIONS)


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    assert got.shape == expected.shape, f"{got.shape}, not {expected.shape}"
    scale = max(1e-12, float(expected.abs().max())) if expected.numel() else 1.0
    error = float((got - expected).abs().max()) / scale if expected.numel() else 0.0
    assert error <= tolerance, f"off by {error:.3g}"


def function_of(dense: Tensor, f) -> Tensor:  # type: ignore[no-untyped-def]
    values, U = torch.linalg.eigh(dense)
    return (U * f(values.clamp(min=0))) @ U.T


@approximation
@settings(max_examples=10)
@given(
    case=cases(),
    estimate=st.sampled_from(["empirical", "exact"]),
    sua=st.booleans(),
    damping=st.sampled_from([0.02, 1.0]),
)
def test_algebra(approximation: str, case: Case, estimate: str, sua: bool, damping: float) -> None:
    G = fisher(case.model, case.data, case.loss, approximation=approximation, estimate=estimate, sua=sua)
    dense = G.dense()
    p = len(dense)
    eye = torch.eye(p, dtype=torch.float64)
    assert G.shape == dense.shape and G.dtype == torch.float64
    close(dense, dense.T)
    assert float(torch.linalg.eigvalsh(dense).min()) >= -1e-9 * float(dense.norm())

    v, stack = torch.randn(p, dtype=torch.float64), torch.randn(p, 3, dtype=torch.float64)
    inverse = torch.linalg.inv(dense + damping * eye)
    for x in (v, stack):
        close(G @ x, dense @ x)
        close(G.solve(x, damping), inverse @ x)
        close(G.unproject(G.project(x)), x)
        close(G.project(x).norm(dim=0), x.norm(dim=0))
    close(G.quadratic(v), v @ dense @ v)
    close(G.quadratic(stack), ((dense @ stack) * stack).sum(0))

    for scalar in (G.trace(), G.norm(), G.logdet(damping), G.quadratic(v)):
        assert scalar.dim() == 0
    close(G.trace(), dense.trace())
    close(G.norm(), dense.norm())
    close(G.logdet(damping), torch.logdet(dense + damping * eye))
    close(G.eigenvalues(), torch.linalg.eigvalsh(dense).clamp(min=0))
    close(G.diagonal(), dense.diagonal())

    for power in (-1.0, -0.5, 0.5, 2.0):
        H = G.power(power, damping)
        assert isinstance(H, Curvature)
        expected = function_of(dense, lambda s, power=power: (s + damping) ** power)
        close(H.dense(), expected)
        close(H @ v, expected @ v)
        close(H.trace(), expected.trace())
        close(H.norm(), expected.norm())
        close(H.diagonal(), expected.diagonal())
        close(H.solve(v, 0.1), torch.linalg.solve(expected + 0.1 * eye, v))
        close(H.unproject(H.project(v)), v)
    # Without damping, up to the square root's steepness at zero.
    close(G.power(0.5).dense() @ G.power(0.5).dense(), dense, 1e-6)


@approximation
@settings(max_examples=4)
@given(case=cases())
def test_coordinates_are_those_of_the_eigenvectors(approximation: str, case: Case) -> None:
    """U^T G U is diagonal with the spectrum on it: exactly so for the operator's own matrix."""
    G = fisher(case.model, case.data, case.loss, approximation=approximation)
    U = G.unproject(torch.eye(G.shape[0], dtype=torch.float64))
    values = torch.cat([s.flatten() for s in G.spectrum().values()])
    close(U.T @ G.dense() @ U, torch.diag(values))
    close(values.sort().values, G.eigenvalues())


@approximation
@settings(max_examples=4)
@given(case=cases())
def test_dicts_and_flat_vectors_agree(approximation: str, case: Case) -> None:
    G = fisher(case.model, case.data, case.loss, approximation=approximation)
    trained = dict(case.model.named_parameters())
    v = {name: torch.randn_like(p) for name, p in trained.items()}
    stack = {name: torch.randn(4, *p.shape, dtype=p.dtype) for name, p in trained.items()}
    flat, flats = G.flatten(v), G.flatten(stack)
    for got, expected in (
        (G @ v, G @ flat),
        (G.solve(v, 0.1), G.solve(flat, 0.1)),
        (G @ stack, (G @ flats.T).T),
        (G.solve(stack, 0.1), G.solve(flats.T, 0.1).T),
    ):
        assert list(got) == list(trained)
        assert all(got[name].shape[-p.dim() :] == p.shape for name, p in trained.items())
        close(G.flatten(got), expected)
    close(G.quadratic(v), G.quadratic(flat))
    close(G.quadratic(stack), G.quadratic(flats.T))
    for given_, flat_ in ((v, flat[:, None]), (stack, flats.T)):
        x = G.project(given_)
        assert list(x) == list(G.layers)
        lead = flat_.shape[1:] if given_ is stack else ()
        assert all(x[name].shape == (*lead, *s.shape) for name, s in G.spectrum().items())
        close(torch.cat([t.reshape(*lead, -1) for t in x.values()], -1).reshape(-1, G.shape[0]), G.project(flat_).T)
        back = G.unproject(x)
        assert all(torch.allclose(back[name], given_[name]) for name in back)


@approximation
def test_samples_have_the_inverse_as_covariance(approximation: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    data = [(torch.randn(7, 2, dtype=torch.float64), torch.randint(2, (7,)))]
    G = fisher(model, data, "categorical", approximation=approximation)
    damping, scale, draws = 0.5, 20.0, 40_000
    expected = torch.linalg.inv(scale * G.dense() + damping * torch.eye(G.shape[0], dtype=torch.float64))
    samples = G.sample(draws, damping, scale, torch.Generator().manual_seed(0))
    assert all(samples[name].shape == (draws, *p.shape) for name, p in model.named_parameters())
    rows = G.flatten(samples)
    # The error of an entry of a sample covariance is sqrt((c_ij^2 + c_ii c_jj) / draws): five of these.
    sizes = expected.diagonal()
    bound = 5 * ((expected.square() + sizes[:, None] * sizes) / draws).sqrt()
    assert bool(((rows.T @ rows / draws - expected).abs() <= bound).all())
    assert bool((rows.mean(0).abs() <= 5 * (sizes / draws).sqrt()).all())
    again = G.sample(3, damping, scale, torch.Generator().manual_seed(0))
    more = G.sample(3, damping, scale, torch.Generator().manual_seed(0))
    assert all(torch.equal(again[name], more[name]) for name in again)
    alone = G.sample(damping=damping)
    assert all(alone[name].shape == p.shape for name, p in model.named_parameters())


@settings(max_examples=6)
@given(case=cases(), wanted=st.sampled_from(["full", "block"]))
def test_few_gradients_are_kept_as_they_are(case: Case, wanted: str) -> None:
    """Fewer gradients than parameters: rows and their Gram matrix; more: the matrix. Both are the same operator."""
    G = fisher(case.model, case.data, case.loss, approximation=wanted)
    n = sum(len(x) for x, _ in case.data)
    for part in G.parts:
        assert isinstance(part, RowsPart) == (n < part.numel)
        if isinstance(part, RowsPart):
            assert len(part.rows) == n


@settings(max_examples=6)
@given(case=cases())
def test_restricted_to_a_layer(case: Case) -> None:
    full, block, kronecker = (
        fisher(case.model, case.data, case.loss, approximation=a) for a in ("full", "block", "ekfac")
    )
    for layer in kronecker.layers:
        one, two, three = (G.restrict(layer) for G in (full, block, kronecker))
        close(one.dense(), two.dense())
        assert one.layout == two.layout == three.layout
        places = full.layout.places(one.layout.names)
        close(one.dense(), full.dense()[places][:, places])
        close(three.dense(), kronecker.dense()[places][:, places])
        close(full.power(0.5, 0.1).restrict(layer).dense(), full.power(0.5, 0.1).dense()[places][:, places])


@approximation
def test_autocast_changes_no_operator(approximation: str) -> None:
    """Each operator begins inside autocast, as a basis that is computed when first needed would keep its rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    data = [(torch.randn(20, 6), torch.randint(3, (20,))) for _ in range(2)]
    v = torch.randn(53)

    def all_of_it() -> list[Tensor]:
        G = fisher(model, data, "categorical", approximation=approximation)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            found = [G @ v, G.solve(v, 0.1), G.power(-0.5, 0.1) @ v, G.project(v), G.dense(), G.diagonal()]
            pair = [G.restrict("0").eigenvalues(), relative_error(G, G.power(2)), correlation(G, range(9), basis=G)]
            return [*found, *pair, G.sample(2, 0.1, generator=torch.Generator().manual_seed(0))["0.weight"]]

    half = True
    inside = all_of_it()
    half = False
    assert all(torch.equal(one, two) for one, two in zip(inside, all_of_it(), strict=True))


@approximation
def test_fisher_under_autocast(approximation: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    data = [(torch.randn(20, 6), torch.randint(3, (20,)))]
    with torch.autocast("cpu", torch.bfloat16):
        half = fisher(model, data, "categorical", approximation=approximation, estimate="exact")
    assert half.dtype == torch.float32
    whole = fisher(model, data, "categorical", approximation=approximation, estimate="exact")
    assert float(relative_error(whole, half)) < 0.02
