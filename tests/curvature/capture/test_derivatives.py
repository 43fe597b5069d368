"""Losses with derivatives of the network inside: what is captured against gradients and products found another way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ekfac import EKFAC, KFAC, Batch, Refresh
from ekfac.curvature.blocks import find_blocks
from ekfac.curvature.capture.capture import Capture
from ekfac.curvature.layers.base import Call
from ekfac.curvature.layers.derivative import DerivativeLayer
from ekfac.curvature.statistics import factor_sums, positions

N = 6
Loss = Callable[[nn.Module, Tensor], Tensor]


class Residual(nn.Module):
    """A layer that is used twice beside a shortcut, so that gradients of its input come from several places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.inner(x))
        out: Tensor = self.out(torch.sin(self.inner(x)) + x)
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x)  # with weights: the fast kernels have no second derivative
        out: Tensor = self.out(torch.tanh(y)).sum(1)
        return out


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Sigmoid(), nn.Linear(3, 1))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Softplus(), nn.Conv2d(3, 4, 2, groups=1), nn.Tanh(),
        nn.ConvTranspose2d(4, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 1),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (dense, (4,)),
    "sequence": (dense, (3, 4)),
    "residual": (Residual, (4,)),
    "attention": (Attention, (3, 4)),
    "convolutional": (convolutional, (2, 5, 5)),
}


def input_gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    u = model(x)
    return u, torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """WGAN's gradient penalty beside its critic, of each example."""
    u, g = input_gradient(model, x)
    return u.flatten(1).sum(1) + 10 * (g.flatten(1).norm(dim=1) - 1).square()


def poisson(model: nn.Module, x: Tensor) -> Tensor:
    """The squared residual of an elliptic equation, of each example."""
    u, g = input_gradient(model, x)
    flat = g.flatten(1)
    laplacian = sum(
        torch.autograd.grad(flat[:, i].sum(), x, create_graph=True)[0].flatten(1)[:, i] for i in range(flat.shape[1])
    )
    return (laplacian + u.flatten(1).sum(1) ** 3 - 1).square()


def third(model: nn.Module, x: Tensor) -> Tensor:
    """A third derivative."""
    _, g = input_gradient(model, x)
    for _ in range(2):
        (g,) = torch.autograd.grad(g.sum(), x, create_graph=True)
    return g.flatten(1).sum(1).square()


def hessian_vector(model: nn.Module, x: Tensor) -> Tensor:
    """A derivative along a direction that depends on the network."""
    u, g = input_gradient(model, x)
    (h,) = torch.autograd.grad(g, x, g.tanh(), create_graph=True)
    return h.flatten(1).square().sum(1) + u.flatten(1).sum(1)


LOSSES: dict[str, Loss] = {"penalty": penalty, "poisson": poisson, "third": third, "hessian": hessian_vector}


def network(name: str) -> tuple[nn.Module, Tensor]:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    return build().double(), torch.randn(N, *shape, dtype=torch.float64).requires_grad_()


def captured(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, tuple[Any, list[Call]]]:
    """All calls of every block, of one loss."""
    found: dict[str, tuple[Any, list[Call]]] = {}
    blocks = [b for b in find_blocks(model, model.parameters()) if b.covered]
    capture = Capture(
        model, lambda block, calls, n: found.__setitem__(block.name, (block, calls)), reaches_parameters=lambda b: False
    )
    capture.attach(blocks)
    value = loss()
    with capture.separate_statistics():
        value.backward()
    capture.close()
    return found


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", NETWORKS)
def test_positions_sum_to_each_examples_own_gradient(name: str, loss: str) -> None:
    model, x = network(name)
    found = captured(model, lambda: LOSSES[loss](model, x).sum())
    assert {p for b, _ in found.values() for p in b.parameters.values()} == set(model.parameters())
    own = []
    for i in range(N):
        one = x[i : i + 1].detach().requires_grad_()
        own.append(torch.autograd.grad(LOSSES[loss](model, one).sum(), list(model.parameters()), allow_unused=True))
    names = {p: place for place, p in enumerate(model.parameters())}
    for block, calls in found.values():
        (h, delta), *more = positions(block, calls, N, 2**28)
        assert not more
        G = torch.einsum("nsgo,nsgc->ngoc", delta, h)
        for i, gradients in enumerate(own):
            given = {r: gradients[names[p]] for r, p in block.parameters.items()}
            given = {r: torch.zeros_like(block.parameters[r]) if g is None else g for r, g in given.items()}
            torch.testing.assert_close(G[i], block.layer.stack(given), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("loss", LOSSES)
def test_s_star_is_the_mean_square_of_each_examples_gradient_in_the_basis(loss: str) -> None:
    model, x = network("dense")
    opt = EKFAC(model, scaling="per_example", scaling_decay=0.0, lr=0.0, refresh=Refresh(deterministic=True))
    LOSSES[loss](model, x).mean().backward()
    opt.step()
    for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
        state = opt.state[layer.weight]
        total = torch.zeros_like(state["s"][0])
        for i in range(N):
            one = x[i : i + 1].detach().requires_grad_()
            value = LOSSES[loss](model, one).sum()
            weight, bias = torch.autograd.grad(value, [layer.weight, layer.bias], allow_unused=True)
            bias = torch.zeros_like(layer.bias) if bias is None else bias
            G = torch.cat([weight, bias[:, None]], 1)
            total += (state["U_B"][0].T @ G @ state["U_A"][0]).square() / N
        torch.testing.assert_close(state["s"][0], total, rtol=1e-8, atol=1e-12)


# --- the factors against products that are written down one by one

#: Every product with a weight: the weight, what it was given, what came out, whether it was with the transpose.
Log = list[tuple[Tensor, Tensor, Tensor, bool, bool]]


def multiply(log: Log, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """A linear layer whose derivatives, of any order, are products by this function too."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ (weight if transposed else weight.T)

        @staticmethod
        def backward(ctx: Any, d: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            given = multiply(log, d, weight, None, not transposed)
            return given, (x.T @ d if transposed else d.T @ x)

    y = Product.apply(x, weight)
    if y.requires_grad:
        log.append((weight, x, y, transposed, bias is not None))
    return y if bias is None else y + bias


def test_factors_are_partial_traces_over_every_product_that_the_loss_makes() -> None:
    model, x = network("dense")
    assert isinstance(model, nn.Sequential)
    opt = KFAC(model, lr=0.0)
    poisson(model, x).mean().backward()
    opt.step()
    log: Log = []

    def written(x: Tensor) -> Tensor:
        for layer in model:
            x = multiply(log, x, layer.weight, layer.bias, False) if isinstance(layer, nn.Linear) else layer(x)
        return x

    class Written(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return written(x)

    loss = poisson(Written(), x).mean()
    products = list(log)
    arrived = torch.autograd.grad(loss, [y for _, _, y, _, _ in products], allow_unused=True)
    for layer in (m for m in model if isinstance(m, nn.Linear)):
        products_of: list[tuple[Tensor, Tensor, bool]] = []
        for (weight, given, _, transposed, biased), d in zip(products, arrived, strict=True):
            if weight is layer.weight and d is not None:
                h, delta = (d, given) if transposed else (given, d)
                ones = torch.full((N, 1), float(biased), dtype=h.dtype)
                products_of.append((torch.cat([h, ones], 1).detach(), N * delta.detach(), transposed))
        As = [h.T @ h / N for h, _, _ in products_of]
        Bs = [delta.T @ delta / N for _, delta, _ in products_of]
        fisher = sum((torch.einsum("ij,ab->aibj", A, B) for A, B in zip(As, Bs, strict=True)), torch.zeros(()))
        of_inputs = torch.einsum("aiaj->ij", fisher)
        of_outputs = torch.einsum("aibi->ab", fisher)
        own = [A.trace() for A, (_, _, transposed) in zip(As, products_of, strict=True) if not transposed]
        size = sum(own) / len(own)
        state = opt.state[layer.weight]
        found_A, found_B = (state[name][0] / state["factor_weight"] for name in ("A", "B"))
        torch.testing.assert_close(found_A, of_inputs * size / of_inputs.trace(), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(found_B, of_outputs / size, rtol=1e-8, atol=1e-10)


def test_a_product_that_has_nothing_to_do_with_the_gradient_does_not_count() -> None:
    """Two products of the same weight: what weighs in A is the other one's gradient, and the other way round."""
    model = nn.Sequential(nn.Linear(4, 3)).double()
    (block,) = find_blocks(model, model.parameters())
    first = block.layer
    calls = []
    for scale, layer in ((1.0, first), (1e-9, DerivativeLayer.after(first)), (1e3, DerivativeLayer.after(first))):
        h, delta = torch.randn(N, 4, dtype=torch.float64), torch.randn(N, 3, dtype=torch.float64)
        calls.append(Call(layer, scale * h, delta / max(scale, 1.0)))
    few = factor_sums(block, [calls[0], calls[2]], N, "expand", 2**28)
    all_three = factor_sums(block, calls, N, "expand", 2**28)
    torch.testing.assert_close(few.A, all_three.A, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(few.B, all_three.B, rtol=1e-12, atol=1e-12)


def test_no_gradient_at_all_leaves_the_factors_of_the_layers_own_input() -> None:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    (block,) = find_blocks(model, model.parameters())
    x, none = torch.randn(N, 4, dtype=torch.float64), torch.zeros(N, 3, dtype=torch.float64)
    calls = [Call(block.layer, x, none), Call(DerivativeLayer.after(block.layer), torch.zeros_like(x), none)]
    sums = factor_sums(block, calls, N, "expand", 2**28)
    h = torch.cat([x, torch.ones(N, 1, dtype=torch.float64)], 1)
    torch.testing.assert_close(sums.A[0], h.T @ h)
    assert not sums.B.any()


def test_a_last_layer_that_only_derivatives_reach_has_the_factors_of_its_product() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    block = next(b for b in find_blocks(model, model.parameters()) if b.name == "2")
    v, dy = torch.randn(N, 5).double(), torch.randn(N, 1).double()
    sums = factor_sums(block, [Call(DerivativeLayer.after(block.layer), v, dy)], N, "expand", 2**20)
    A, B = sums.A[0, :5, :5] / N, sums.B[0] / N
    product = torch.kron(v.T @ v / N, dy.T @ dy / N)
    torch.testing.assert_close(torch.kron(A, B), product)
    assert A.trace().item() == pytest.approx(block.shape.inputs)
    assert not sums.A[0, 5].any()


def test_a_loss_of_derivatives_alone_brings_factors_to_all_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    opt = EKFAC(model, lr=1e-3)
    for _ in range(3):
        opt.zero_grad()
        _, slope = input_gradient(model, torch.randn(N, 4).double().requires_grad_())
        (slope.square().sum(1) - 1).square().mean().backward()
        opt.step()
    factors = [state[side] for state in opt.state.values() for side in "AB" if side in state]
    assert len(factors) == 4
    assert all(bool(factor.isfinite().all()) and bool(factor.any()) for factor in factors)


@pytest.mark.parametrize("name", NETWORKS)
def test_factors_do_not_depend_on_how_much_memory_there_is(name: str) -> None:
    model, x = network(name)
    for block, calls in captured(model, lambda: poisson(model, x).sum()).values():
        whole, parts = (factor_sums(block, calls, N, "expand", memory) for memory in (2**28, 1))
        torch.testing.assert_close(whole.A, parts.A)
        torch.testing.assert_close(whole.B, parts.B)
        assert whole.terms == parts.terms


# --- training


@pytest.mark.parametrize("clip", [None, 1e9, 0.1])
@pytest.mark.parametrize("options", [{}, {"scaling": "per_example"}, {"scaling": "running"}, {"batch": Batch("sum")}])
def test_it_trains_as_it_comes(options: dict[str, Any], clip: float | None) -> None:
    model, x = network("dense")
    opt = EKFAC(model, lr=3e-3, **options)
    losses = []
    for _ in range(15):
        opt.zero_grad()
        each = poisson(model, x)
        loss = each.sum() if options.get("batch") else each.mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        losses.append(each.mean().item())
    assert not opt.engine.collector.fingerprints.unverified
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("loss", [poisson, penalty])
def test_hooks_are_away_between_statistics_and_change_nothing(loss: Callable[..., Tensor]) -> None:
    """Only layers can tell which examples count in such a loss; most rules need not know."""
    found, quiet = [], []
    for exact in (True, False):
        model, x = network("dense")
        opt = EKFAC(model)
        capture = opt.engine.collector.capture
        capture.exact_count |= exact
        count = 0
        for _ in range(60):
            opt.zero_grad()
            each = loss(model, x)
            count += capture.forwards.latest is not None and capture.forwards.latest.quiet
            each.mean().backward()
            opt.step()
        quiet.append(count)
        found.append([p.detach().clone() for p in model.parameters()])
        assert opt.stats()["steps"] == 60
    assert quiet[0] == 0 < 20 < quiet[1]
    assert all(map(torch.equal, *found))


def test_a_norm_between_them_is_refused_by_name() -> None:
    """A norm's backward pass uses its weight in a way that no hook sees."""
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1)).double()
    x = torch.randn(N, 4, dtype=torch.float64, requires_grad=True)
    opt = EKFAC(model, scaling="running")
    penalty(model, x).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"layer '1': its \.grad is not.*exclude=\['1'\].*statistics"):
        opt.step()
    opt.close()
    model.zero_grad()
    opt = EKFAC(model)  # which takes nothing but a basis from the calls
    penalty(model, x).mean().backward()
    with pytest.warns(RuntimeWarning, match="layer '1': its .grad is not only"):
        opt.step()


# --- gradients of gradients of the parameters


def adapted_loss(model: nn.Module, steps: int) -> Tensor:
    """MAML: the loss of five examples, with weights that seven others have changed."""
    torch.manual_seed(1)
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.randn(12, 1, dtype=torch.float64)
    fast = dict(model.named_parameters())
    for _ in range(steps):
        inner = F.mse_loss(torch.func.functional_call(model, fast, (x[5:],)), y[5:])
        gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
    return F.mse_loss(torch.func.functional_call(model, fast, (x[:5],)), y[:5])


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("scaling", ["belief", "per_example"])
def test_an_inner_batch_is_not_counted(scaling: str, steps: int) -> None:
    model, _ = network("dense")
    opt = EKFAC(model, scaling=scaling, lr=1e-3)
    adapted_loss(model, steps).backward()
    assert opt.engine.collector.capture.examples == 5
    assert opt.engine.collector.capture.by_outputs is False  # layers are watched at every step from now on
    before = model[0].weight.detach().clone()  # type: ignore[index]
    opt.step()
    assert not opt.engine.collector.fingerprints.unverified
    assert not torch.equal(before, model[0].weight)  # type: ignore[index]


@pytest.mark.parametrize("scaling", ["belief", "per_example"])
def test_a_penalty_on_the_parameters_gradients_counts_its_own_batch(scaling: str) -> None:
    model, x = network("dense")
    opt = EKFAC(model, scaling=scaling)
    for _ in range(2):
        opt.zero_grad()
        for part in (x[:4].detach(), x[4:].detach()):  # accumulated
            loss = model(part).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            (loss + 0.1 * sum(g.square().sum() for g in gradients)).backward()
        opt.step()
        assert opt.engine.collector.capture.examples == 0
    assert not opt.engine.collector.fingerprints.unverified
    assert opt.stats()["steps"] == 2


def test_a_hessian_by_backward_counts_its_batch_once() -> None:
    model, x = network("dense")
    opt = EKFAC(model)
    for _ in range(2):
        opt.zero_grad()
        model(x.detach()).square().mean().backward(create_graph=True)
        gradients = [p.grad for p in model.parameters()]
        with opt.paused():
            torch.autograd.grad(gradients, list(model.parameters()), [torch.randn_like(g) for g in gradients])
        assert opt.engine.collector.capture.examples == N
        opt.step()
        assert not opt.engine.collector.fingerprints.unverified


def test_what_a_derivative_has_made_goes_with_its_graph() -> None:
    model, x = network("dense")
    opt = EKFAC(model)
    kept: list[weakref.ref[Any]] = []

    def mark(tensor: Tensor) -> None:
        token = nn.Module()
        kept.append(weakref.ref(token))
        tensor.register_hook(lambda g, token=token: None)

    for step in range(3):
        opt.zero_grad()
        u, g = input_gradient(model, x)
        mark(u)
        mark(g)
        value = (u.square().sum() + g.square().sum()) / N
        if step:  # the first is dropped before its backward pass
            value.backward()
            opt.step()
        del value, u, g
    assert all(ref() is None for ref in kept)
    assert opt.engine.collector.capture.held.now == 0


def test_the_model_and_the_optimizer_go_at_once() -> None:
    """Without a collection: what stands for a layer in derivatives must not hold that layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    opt = EKFAC(model)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            x = torch.randn(5, 3, requires_grad=True)
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            opt.zero_grad()
            slope.square().mean().backward()
            opt.step()
        refs = [weakref.ref(opt), *map(weakref.ref, model.parameters())]
        del model, opt, x, slope
        assert not any(ref() is not None for ref in refs)
    finally:
        gc.enable()
