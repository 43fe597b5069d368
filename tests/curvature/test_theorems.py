"""What the paper proves, on random networks and data, against the dense Fisher of per-example gradients."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import half_square, jittered, mean_loss, mlp
from oracle import dense_fisher, find_layers, over_columns, per_example_gradients
from paper import EKFAC


@st.composite
def problems(draw: st.DrawFn) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(draw(st.integers(0, 9999)))
    n = draw(st.integers(1, 12))
    if draw(st.booleans()):
        widths = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
        middle = draw(st.lists(st.integers(1, 3), max_size=1))
        model, shape = mlp(*widths, bias=draw(st.booleans())), (*middle, widths[0])
    else:
        channels, kernel = draw(st.integers(1, 2)), draw(st.integers(1, 3))
        model = nn.Sequential(
            nn.Conv2d(channels, 3, kernel, stride=draw(st.integers(1, 2)), padding=1), nn.Tanh(), nn.Flatten()
        )
        shape = (channels, 3, 4)
    model = jittered(model)
    x = torch.randn(n, *shape, dtype=torch.float64)
    return model, x, torch.randn_like(model(x))


def after_one_step(
    model: nn.Module, x: Tensor, y: Tensor, **options: Any
) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Of every block: the dense Fisher [P, P], U [P, P], s, S_B x S_A and the packed gradients."""
    gradients = per_example_gradients(model, half_square, x, y)
    layers = find_layers(model)
    opt = EKFAC(model, scaling="per_example", scaling_decay=0.0, factor_decay=0.0, **options)
    mean_loss(model, (x, y)).backward()
    opt.step()
    opt.close()
    named, out = dict(model.named_parameters()), []
    for layer in layers:
        state = opt.state[named[layer.key]]
        packed = torch.stack([layer.pack({p: gradients[p][n] for p in layer.names}) for n in range(len(x))])
        u = torch.kron(state["U_B"][0].contiguous(), over_columns(layer, state["U_A"])[0].contiguous())
        kronecker = torch.outer(state["S_B"][0], state["S_A"][0]).reshape(-1)
        out.append((dense_fisher(packed[:, 0]), u, state["s"][0].reshape(-1), kronecker, packed[:, 0]))
    return out


@settings(max_examples=40)
@given(problem=problems(), sharing=st.sampled_from(["expand", "reduce"]))
def test_ekfac_is_never_further_from_the_fisher_than_kfac(
    problem: tuple[nn.Module, Tensor, Tensor], sharing: str
) -> None:
    for fisher, u, s, kronecker, _ in after_one_step(*problem, sharing=sharing):
        ekfac = (fisher - u @ torch.diag(s) @ u.T).norm()
        kfac = (fisher - u @ torch.diag(kronecker) @ u.T).norm()
        assert ekfac <= kfac + 1e-10 * fisher.norm()


@settings(max_examples=40)
@given(problem=problems(), sharing=st.sampled_from(["expand", "reduce"]))
def test_s_is_the_diagonal_of_the_rotated_fisher(problem: tuple[nn.Module, Tensor, Tensor], sharing: str) -> None:
    for fisher, u, s, _, gradients in after_one_step(*problem, sharing=sharing):
        torch.testing.assert_close(s, torch.diagonal(u.T @ fisher @ u), rtol=1e-9, atol=1e-12)
        # ... which is the second moment of the gradient's coordinates in the basis.
        coordinates = gradients.flatten(1) @ u
        torch.testing.assert_close(s, coordinates.square().mean(0), rtol=1e-9, atol=1e-12)


@settings(max_examples=20)
@given(seed=st.integers(0, 9999), n=st.integers(1, 12), width=st.integers(2, 6))
def test_in_the_exact_eigenbasis_eigenvalues_are_second_moments(seed: int, n: int, width: int) -> None:
    """One output: B is a number, A's basis turned by it is the Fisher's own where delta does not vary."""
    torch.manual_seed(seed)
    model = mlp(width, 1, bias=False)
    x = torch.randn(n, width, dtype=torch.float64)
    with torch.no_grad():  # every delta is one, so the Fisher is A itself and the basis is exact
        y = model(x) - 1
    ((fisher, u, s, kronecker, _),) = after_one_step(model, x, y)
    torch.testing.assert_close(u @ torch.diag(s) @ u.T, fisher, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(s, kronecker, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(s.sort()[0], torch.linalg.eigvalsh(fisher).clamp(min=0), rtol=1e-9, atol=1e-11)
