"""The oracle against itself.

Two independent ways to each quantity must agree before anything is compared with it.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oracle import (
    OracleEKFAC,
    carried,
    dense_fisher,
    eigenbasis,
    eigenvalues_in,
    eigenvalues_over_columns,
    example_gradients,
    factors,
    find_layers,
    kfac_inverse,
    observe,
    over_columns,
    per_example_gradients,
    receptive_fields,
    second_moment,
)


class OneHotTokens(nn.Module):
    """Token ids out of real numbers, so that an embedding can stand first in a model of real inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() * 10).long() % 5


class Mean(nn.Module):
    """The mean over all dimensions between the first and the last."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1, -2).mean(1)


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)), (3,)),
    "linear 3-D": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), Mean()), (5, 3)),
    "linear 4-D": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), Mean()), (2, 3, 3)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 6, 3, stride=2, groups=2), nn.Flatten()), (4, 7)),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)), nn.Flatten()),
        (2, 6, 5),
    ),
    "conv2d same, reflect": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect"), nn.Flatten()),
        (2, 5, 4),
    ),
    "conv2d depthwise": (lambda: nn.Sequential(nn.Conv2d(4, 8, 2, groups=4), nn.Flatten()), (4, 3, 3)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 2, 2, padding=1, bias=False), nn.Flatten()), (2, 2, 3, 2)),
    "transposed 1d": (
        lambda: nn.Sequential(
            nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2),
            nn.Flatten(),
        ),
        (4, 4),
    ),
    "transposed 2d": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, (2, 3), stride=(2, 1), padding=(0, 1)), nn.Flatten()),
        (2, 3, 4),
    ),
    "transposed 3d": (
        lambda: nn.Sequential(nn.ConvTranspose3d(2, 2, 2, stride=2), nn.Flatten()),
        (2, 2, 1, 2),
    ),
    "embedding": (lambda: nn.Sequential(OneHotTokens(), nn.Embedding(5, 3, padding_idx=2), Mean()), (4,)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm((2, 3)), nn.Flatten()), (4, 2, 3)),
    "rms norm": (lambda: nn.Sequential(nn.RMSNorm(3), nn.Flatten()), (4, 3)),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten()), (4, 3, 2)),
    "batch norm, evaluating": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()).eval(), (3, 2, 2)),
}


def jittered(model: nn.Module) -> nn.Module:
    """Every parameter moved off its special starting value, in float64."""
    model = model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model


def problem(name: str, n: int = 6) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = jittered(build())
    x = torch.randn(n, *shape, dtype=torch.float64)
    with torch.no_grad():
        y = torch.randn_like(model(x))
    return model, x, y


def half_square(output: Tensor, target: Tensor) -> Tensor:
    """Squared error, summed over an example's outputs, averaged over examples."""
    return 0.5 * (output - target).square().sum() / len(output)


def batch_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return half_square(model(batch[0]), batch[1])


@pytest.mark.parametrize("sua", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_h_and_delta_give_the_gradients_of_torch_func(name: str, sua: bool) -> None:
    model, x, y = problem(name)
    layers = find_layers(model, sua=sua)
    seen = observe(model, batch_loss, [(x, y)], layers)
    by_func = per_example_gradients(model, half_square, x, y)
    for parameter, g in by_func.items():
        torch.testing.assert_close(g.mean(0), seen.gradients[parameter], rtol=1e-10, atol=1e-12)
    for layer in layers:
        g = example_gradients(*seen.calls[layer.key])
        for n in range(len(x)):
            expected = {p: by_func[p][n] for p in layer.names}
            torch.testing.assert_close(g[n], layer.pack(expected), rtol=1e-10, atol=1e-12)
            for p, back in layer.unpack(g[n], expected).items():
                torch.testing.assert_close(back, expected[p], rtol=1e-10, atol=1e-12)


def test_receptive_fields_of_a_plain_convolution_are_torchs_unfold() -> None:
    conv = nn.Conv2d(3, 4, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2)).double()
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    unfolded = F.unfold(x, (2, 3), dilation=(1, 2), padding=(1, 2), stride=(2, 1)).transpose(1, 2)
    torch.testing.assert_close(receptive_fields(conv, x).flatten(2), unfolded, rtol=0, atol=0)


def test_receptive_fields_of_a_transposed_convolution_by_an_explicit_loop() -> None:
    stride, padding, dilation, kernel = 3, 1, 2, 3
    conv = nn.ConvTranspose1d(
        2, 1, kernel, stride=stride, padding=padding, dilation=dilation, output_padding=1
    ).double()
    x = torch.randn(1, 2, 4, dtype=torch.float64)
    length = conv(x).shape[-1]
    expected = torch.zeros(length, 2, kernel, dtype=torch.float64)
    for position in range(length):
        for tap in range(kernel):
            source = position + padding - tap * dilation
            if source % stride == 0 and 0 <= source // stride < x.shape[-1]:
                expected[position, :, tap] = x[0, :, source // stride]
    torch.testing.assert_close(receptive_fields(conv, x)[0, :, 0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_micro_batches_are_one_batch(reduction: str) -> None:
    model, x, y = problem("linear 3-D")
    layers = find_layers(model)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        total = 0.5 * (model(batch[0]) - batch[1]).square().sum()
        return total / len(x) if reduction == "mean" else total

    whole = observe(model, loss, [(x, y)], layers, loss_reduction=reduction)
    parts = observe(model, loss, [(x[:2], y[:2]), (x[2:], y[2:])], layers, loss_reduction=reduction)
    mean = observe(model, batch_loss, [(x, y)], layers)
    for layer in layers:
        for one, two, three in zip(whole.calls[layer.key], parts.calls[layer.key], mean.calls[layer.key], strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(one, three, rtol=1e-12, atol=1e-14)
        for name in layer.names:
            torch.testing.assert_close(whole.gradients[name], parts.gradients[name], rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(whole.gradients[name], mean.gradients[name], rtol=1e-12, atol=1e-14)


def test_calls_of_a_layer_are_positions_of_the_same_example() -> None:
    torch.manual_seed(1)
    inner = nn.Linear(3, 3)
    model = nn.Sequential(inner, nn.Tanh(), inner, nn.Tanh(), inner).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    (layer,) = find_layers(model)
    seen = observe(model, batch_loss, [(x, y)], [layer])
    h, delta = seen.calls[layer.key]
    assert h.shape == (5, 3, 1, 4)
    by_func = per_example_gradients(model, half_square, x, y)
    packed = torch.stack([layer.pack({k: v[n] for k, v in by_func.items()}) for n in range(5)])
    torch.testing.assert_close(example_gradients(h, delta), packed, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "sharing", "sua"),
    [(name, sharing, False) for name in MODELS for sharing in ("expand", "reduce")]
    + [(name, "expand", True) for name in MODELS if "conv" in name or "transposed" in name],
)
def test_second_moment_is_the_diagonal_of_the_rotated_dense_fisher(name: str, sharing: str, sua: bool) -> None:
    model, x, y = problem(name)
    layers = find_layers(model, sua=sua)
    seen = observe(model, batch_loss, [(x, y)], layers)
    by_func = per_example_gradients(model, half_square, x, y)
    for layer in layers:
        h, delta = seen.calls[layer.key]
        a, b = factors(h, delta, layer, sharing)
        u_a, u_b = eigenbasis(a, False), eigenbasis(b, False)
        columns = over_columns(layer, u_a)
        s = second_moment(h, delta, columns, u_b)
        kronecker = eigenvalues_in(b, u_b).unsqueeze(-1) * eigenvalues_over_columns(
            layer, eigenvalues_in(a, u_a)
        ).unsqueeze(-2)
        packed = torch.stack([layer.pack({p: by_func[p][n] for p in layer.names}) for n in range(len(x))])
        for group in range(a.shape[0]):
            fisher = dense_fisher(packed[:, group])
            u = torch.kron(u_b[group].contiguous(), columns[group].contiguous())
            diagonal = torch.diagonal(u.T @ fisher @ u)
            torch.testing.assert_close(s[group].reshape(-1), diagonal, rtol=1e-9, atol=1e-12)
            ekfac = u @ torch.diag(s[group].reshape(-1)) @ u.T
            kfac = u @ torch.diag(kronecker[group].reshape(-1)) @ u.T
            # A norm layer's block is exact, so both errors are rounding there.
            assert (fisher - ekfac).norm() <= (fisher - kfac).norm() + 1e-12 * fisher.norm()


def test_expand_and_reduce_are_the_papers_factors_at_one_position() -> None:
    model, x, y = problem("linear")
    for layer in find_layers(model):
        h, delta = observe(model, batch_loss, [(x, y)], [layer]).calls[layer.key]
        for expand, reduce in zip(factors(h, delta, layer), factors(h, delta, layer, "reduce"), strict=True):
            torch.testing.assert_close(expand, reduce, rtol=1e-12, atol=1e-14)


def test_the_block_of_a_norm_layer_is_its_exact_fisher() -> None:
    model, x, y = problem("group norm")
    (layer,) = find_layers(model)
    a, b = factors(*observe(model, batch_loss, [(x, y)], [layer]).calls[layer.key], layer)
    by_func = per_example_gradients(model, half_square, x, y)
    for unit in range(4):
        pair = torch.stack([by_func["0.weight"][:, unit], by_func["0.bias"][:, unit]], 1)
        torch.testing.assert_close(b[unit], dense_fisher(pair), rtol=1e-10, atol=1e-12)
    assert (a == 1).all()


def test_carrying_is_the_product_of_squared_rotations() -> None:
    torch.manual_seed(2)
    bases = [torch.linalg.qr(torch.randn(1, k, k, dtype=torch.float64))[0] for k in (3, 4, 3, 4)]
    s = torch.rand(1, 4, 3, dtype=torch.float64)
    r_a, r_b = bases[2].mT @ bases[0], bases[3].mT @ bases[1]
    expected = r_b.square() @ s @ r_a.square().mT
    torch.testing.assert_close(carried(s, (bases[0], bases[1]), (bases[2], bases[3])), expected, rtol=1e-10, atol=1e-12)


def test_the_inverse_form_is_the_factored_damping_in_the_eigenbasis() -> None:
    torch.manual_seed(3)
    a, b = (torch.randn(1, k, 9, dtype=torch.float64) for k in (3, 4))
    a, b, g = a @ a.mT / 9, b @ b.mT / 9, torch.randn(1, 4, 3, dtype=torch.float64)
    u_a, u_b, eps = eigenbasis(a, False), eigenbasis(b, False), 1e-2
    s_a, s_b = eigenvalues_in(a, u_a).unsqueeze(-2), eigenvalues_in(b, u_b).unsqueeze(-1)
    ratio = (u_b.mT @ g @ u_a) / ((s_b + eps**0.5) * (s_a + eps**0.5))
    expected = u_b @ ratio @ u_a.mT
    torch.testing.assert_close(kfac_inverse(g, a, b, eps, False), expected, rtol=1e-10, atol=1e-12)


def test_one_step_of_algorithm_1_written_out() -> None:
    """A single Linear layer without bias, squared error, N = 8.

    Everything from the paper, in plain matrices.
    """
    torch.manual_seed(4)
    w, x, y = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 3), (8, 3), (8, 2)))
    delta = x @ w.T - y
    a, b, g = x.T @ x / 8, delta.T @ delta / 8, delta.T @ x / 8
    u_a, u_b = torch.linalg.eigh(a)[1], torch.linalg.eigh(b)[1]
    s = (delta @ u_b).square().T @ (x @ u_a).square() / 8
    expected = w - 0.1 * u_b @ ((u_b.T @ g @ u_a) / (s + 1e-2)) @ u_a.T

    model = nn.Linear(3, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(w)
    oracle = OracleEKFAC(model, batch_loss, lr=0.1, scaling="per_example", damping=1e-2)
    torch.testing.assert_close(oracle.step([(x, y)])["weight"], expected, rtol=1e-12, atol=1e-13)


def test_momentum_and_weight_decay_are_torchs() -> None:
    """The oracle's update of a parameter whose direction is known (g / g^2 + eps) against torch.optim.SGD."""
    for nesterov in (False, True):
        torch.manual_seed(5)

        class Scale(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.free = nn.Parameter(torch.randn(4, dtype=torch.float64))

            def forward(self, x: Tensor) -> Tensor:
                return x * self.free

        model, twin = Scale(), Scale()
        twin.load_state_dict(model.state_dict())
        oracle = OracleEKFAC(model, batch_loss, lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.1, damping=0.5)
        sgd = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)
        s = None
        for _ in range(4):
            x, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
            oracle.step([(x, y)])
            sgd.zero_grad()
            batch_loss(twin, (x, y)).backward()
            g = twin.free.grad
            assert g is not None
            s = 3 * g.square() if s is None else 0.95 * s + 0.05 * 3 * g.square()
            twin.free.grad = g / (s + 0.5)
            with torch.no_grad():
                twin.free.mul_(1 - 0.1 * 0.1)
            sgd.step()
        torch.testing.assert_close(model.free, twin.free, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("scaling", "torchs"),
    [
        ("adam", lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), eps=1e-6)),
        ("rmsprop", lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9, eps=1e-6)),
        ("adagrad", lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6)),
    ],
)
def test_adaptive_rules_in_the_identity_basis_are_torchs(scaling: str, torchs: Callable[..., Any]) -> None:
    model, x, y = problem("linear")
    twin = copy.deepcopy(model)
    options = {"lr": 0.1, "betas": (0.8, 0.9), "alpha": 0.9, "eps": 1e-6, "refresh_every": 2}
    oracle = OracleEKFAC(model, batch_loss, scaling=scaling, basis="identity", **options)
    opt = torchs(twin.parameters())
    for step in range(5):
        batch = (x + step, y)
        opt.zero_grad()
        batch_loss(twin, batch).backward()
        opt.step()
        oracle.step([batch])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-11)


def test_adaptive_moments_turn_with_the_basis() -> None:
    """A basis that changes at every step leaves the first moment as it is in parameter space."""
    model, x, y = problem("linear")
    oracle = OracleEKFAC(model, batch_loss, lr=0.0, scaling="adam", betas=(0.5, 0.9), refresh_every=1)
    mean: dict[str, Tensor] = {}
    for step in range(4):
        batch = (x * (step + 1), y)
        oracle.step([batch])
        for layer in find_layers(model):
            g = layer.pack(observe(model, batch_loss, [batch], [layer]).gradients)
            mean[layer.key] = 0.5 * mean.get(layer.key, torch.zeros_like(g)) + 0.5 * g
            state = oracle.blocks[layer.key]
            assert state.u_a is not None and state.u_b is not None and state.m is not None
            torch.testing.assert_close(state.u_b @ state.m @ state.u_a.mT, mean[layer.key], rtol=1e-9, atol=1e-11)
