"""What ``memory_limit`` promises, measured by the allocator's own events.

While A, B or s* of a layer are computed, temporary tensors take no more than the limit at any time. Not counted are the
captured tensors themselves and the sums (A and B, or s*; the running one and the one being made). One example at a time
is the least, so the limit is at least what a single example takes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from allocations import allocated
from ekfac.curvature import scaling, statistics
from ekfac.curvature.blocks import Block, find_blocks
from ekfac.curvature.eigenbasis import Basis
from ekfac.curvature.layers.base import Call
from paper import EKFAC
from zoo import GPT, token_loss

MIB = 2**20

LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "convolution": lambda: (nn.Conv2d(16, 32, 3, padding=1), torch.randn(48, 16, 16, 16)),
    "1 x 1 convolution": lambda: (nn.Conv2d(64, 64, 1), torch.randn(48, 64, 16, 16)),
    "few positions": lambda: (nn.Conv2d(64, 64, 3, stride=2), torch.randn(200, 64, 5, 5)),
    "depthwise": lambda: (nn.Conv2d(64, 64, 3, padding=1, groups=64), torch.randn(32, 64, 12, 12)),
    "groups": lambda: (nn.Conv2d(64, 64, 3, padding=1, groups=4), torch.randn(32, 64, 12, 12)),
    "one dimension": lambda: (nn.Conv1d(32, 48, 5, dilation=2), torch.randn(48, 32, 60)),
    "transposed": lambda: (nn.ConvTranspose2d(16, 16, 3, stride=2, padding=1), torch.randn(48, 16, 10, 10)),
    "long sequence": lambda: (nn.Linear(128, 256), torch.randn(48, 128, 128)),
    "short sequence": lambda: (nn.Linear(256, 256), torch.randn(400, 4, 256)),
    "vectors": lambda: (nn.Linear(512, 512), torch.randn(4096, 512)),
    "LayerNorm": lambda: (nn.LayerNorm(256), torch.randn(48, 64, 256)),
    "GroupNorm": lambda: (nn.GroupNorm(4, 32), torch.randn(64, 32, 16, 16)),
    "embedding": lambda: (nn.Embedding(1000, 64), torch.randint(1000, (64, 256))),
}


def captured(name: str, sua: bool = False) -> tuple[Block, Call, int]:
    module, x = LAYERS[name]()
    (block,) = find_blocks(module, sua=sua)
    with torch.no_grad():
        d = torch.randn_like(module(x))
    return block, Call(block.layer, x, d), len(x)


def some_basis(block: Block) -> Basis:
    s = block.shape
    sides = ((s.inputs, block.diagonal_A), (s.out, block.diagonal_B))
    U_A, U_B = (None if diagonal else torch.linalg.qr(torch.randn(s.groups, d, d))[0] for d, diagonal in sides)
    return Basis(s, U_A, U_B, torch.ones(s.groups, s.inputs), torch.ones(s.groups, s.out))


CASES = [(name, False) for name in LAYERS] + [(name, True) for name in LAYERS if "conv" in name or name == "transposed"]


@pytest.mark.parametrize("limit", [2 * MIB, 8 * MIB])
@pytest.mark.parametrize(("name", "sua"), CASES)
def test_second_moments_stay_under_the_limit(name: str, sua: bool, limit: int) -> None:
    block, call, n = captured(name, sua)
    basis = some_basis(block)
    whole, _, expected = allocated(lambda: statistics.scaling_sum(block, [call], n, basis, 2**40))
    peak, left, s = allocated(lambda: statistics.scaling_sum(block, [call], n, basis, limit))
    sums = 2 * s.numel() * s.element_size()
    assert peak - sums <= limit
    assert left <= sums // 2 + 64  # nothing stays behind but the result
    torch.testing.assert_close(s, expected, rtol=1e-3, atol=1e-5 * float(expected.max()))
    if limit == 2 * MIB:
        assert whole - sums > limit, "a case that fits anyway shows nothing"


@pytest.mark.parametrize("limit", [2 * MIB, 8 * MIB])
@pytest.mark.parametrize(("name", "sua"), CASES)
def test_factors_stay_under_the_limit(name: str, sua: bool, limit: int) -> None:
    block, call, n = captured(name, sua)
    _, _, expected = allocated(lambda: statistics.factor_sums(block, [call], n, "expand", 2**40))
    peak, _, found = allocated(lambda: statistics.factor_sums(block, [call], n, "expand", limit))
    assert peak - 2 * 4 * (found.A.numel() + found.B.numel()) <= limit
    assert found.terms == expected.terms
    for got, want in ((found.A, expected.A), (found.B, expected.B)):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("route", [scaling.by_gram, scaling.by_examples])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("positions", [1, 6, 50])
def test_each_route_stays_under_its_share(route: Callable[..., Tensor], groups: int, positions: int) -> None:
    """Whichever of the two is chosen, for convolutions and sequences alike."""
    limit = 4 * MIB
    n = 6000 // positions
    h, delta = torch.randn(n, positions, groups, 64), torch.randn(n, positions, groups, 48)
    peak, _, s = allocated(lambda: route(h, delta, limit))
    assert peak - 2 * s.numel() * 4 <= limit


def test_a_tied_weight_stays_under_the_limit_and_does_not_depend_on_it() -> None:
    """An embedding that an output layer shares: factors and s* are those of the whole batch, however it is split."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(500, 32, padding_idx=3)
            self.head = nn.Linear(32, 500, bias=True)
            self.head.weight = self.tokens.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.tokens(x)))

    torch.manual_seed(1)
    model = Tied()
    (block,) = (b for b in find_blocks(model) if len(b.uses) == 2)
    x = torch.randint(500, (24, 64))
    hidden = torch.randn(24, 64, 32)
    calls = [
        Call(block.uses[model.head], hidden, torch.randn(24, 64, 500) * 1e-3),
        Call(block.uses[model.tokens], x, torch.randn(24, 64, 32) * 1e-4 * torch.linspace(0.1, 9, 24)[:, None, None]),
    ]
    limit = 4 * MIB
    whole = statistics.factor_sums(block, calls, 24, "expand", 2**40)
    peak, _, split = allocated(lambda: statistics.factor_sums(block, calls, 24, "expand", limit))
    assert peak - 2 * 4 * (split.A.numel() + split.B.numel()) <= limit
    for got, want in ((split.A, whole.A), (split.B, whole.B)):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5 * float(want.abs().max()))
    basis = some_basis(block)
    expected = statistics.scaling_sum(block, calls, 24, basis, 2**40)
    peak, _, s = allocated(lambda: statistics.scaling_sum(block, calls, 24, basis, limit))
    assert peak - 2 * s.numel() * 4 <= limit
    torch.testing.assert_close(s, expected, rtol=1e-3, atol=1e-5 * float(expected.max()))


def test_whole_steps_with_a_small_limit_are_the_same_steps() -> None:
    def losses(limit: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(2), nn.Linear(16, 6), nn.Flatten()
        ).double()
        opt = EKFAC(model, lr=0.1, scaling="per_example", refresh_every=2, memory_limit=limit, damping=0.1)
        found = []
        for _ in range(5):
            opt.zero_grad()
            loss = model(torch.randn(9, 1, 6, 6, dtype=torch.float64)).square().sum(1).mean()
            loss.backward()
            opt.step()
            found.append(loss.item())
        return found

    assert losses(1) == pytest.approx(losses(2**30), rel=1e-9)


# -------------------------------------------------------------------------------------------- wide output layers


def wide_model(classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, classes))


def one_step(classes: int, max_factor_dim: int | None, scaling: str) -> tuple[EKFAC, int]:
    """The optimizer after a step, and the peak of what the step allocated."""
    model = wide_model(classes)
    opt = EKFAC(model, lr=0.1, max_factor_dim=max_factor_dim, scaling=scaling, memory_limit=2**25, refresh_every=5)
    x, y = torch.randn(32, 16), torch.randint(classes, (32,))
    nn.functional.cross_entropy(model(x), y).backward()
    peak, _, _ = allocated(opt.step)
    return opt, peak


@pytest.mark.parametrize("scaling", ["running", "per_example", "kronecker"])
def test_a_side_wider_than_max_factor_dim_is_kept_diagonal(scaling: str) -> None:
    opt, _ = one_step(3000, 1024, scaling)
    state = opt.state[opt.model[2].weight]
    assert "U_B" not in state and state["B"].shape == (1, 3000) and state["S_B"].shape == (1, 3000)
    assert state["U_A"].shape == (1, 33, 33)
    assert opt.state[opt.model[0].weight]["U_B"].shape == (1, 32, 32)
    row = next(r for r in opt.summary().rows if r.name == "2")
    assert "B diagonal" in row.block and row.B == "3000"


@pytest.mark.parametrize("scaling", ["running", "per_example"])
def test_fifty_thousand_classes_train_in_the_memory_of_a_few_gradients(scaling: str) -> None:
    """A full B would be 10 GB. The layer's own gradient is 6.6 MB; a step takes less than 100 MB."""
    opt, peak = one_step(50_000, 4096, scaling)
    numbers = sum(t.numel() for s in opt.state.values() for t in s.values() if isinstance(t, Tensor))
    assert numbers < 3 * 50_000 * 33
    assert peak < 100 * MIB
    model, losses = opt.model, []
    x, y = torch.randn(32, 16), torch.randint(50_000, (32,))
    for _ in range(8):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.over_a_second
def test_a_tied_vocabulary_of_fifty_thousand_trains_in_reasonable_memory() -> None:
    """AdamW's step takes 74 MB here; the embedding's own numbers are 6 MB."""
    vocabulary = 50_000
    model = GPT(vocabulary, context=16)
    opt = EKFAC(model, lr=0.03, max_factor_dim=4096, scaling="per_example", refresh_every=5, kl_clip=0.01)
    x, y = torch.randint(vocabulary, (8, 16)), torch.randint(vocabulary, (8, 16))
    losses: list[float] = []

    def step() -> None:
        opt.zero_grad()
        loss = token_loss(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())

    peak, _, _ = allocated(step)
    assert peak < 160 * MIB
    for _ in range(3):
        step()
    assert losses[-1] < losses[0]


# -------------------------------------------------------------------------------------------- captured tensors


@pytest.mark.parametrize("scaling", ["running", "per_example"])
def test_holding_on_to_the_loss_holds_on_to_no_input(scaling: str) -> None:
    """The usual loop keeps ``loss`` until the next one is there; autograd has freed its tensors by then."""
    model = nn.Sequential(nn.Linear(8, 1000), nn.ReLU(), nn.Linear(1000, 8))
    opt = EKFAC(model, lr=1e-3, scaling=scaling, refresh_every=100)
    kept: list[Tensor] = []

    def step() -> None:
        opt.zero_grad()
        loss = model(torch.randn(500, 8)).square().sum(1).mean()
        loss.backward()
        opt.step()
        kept.append(loss)

    step()
    _, left, _ = allocated(step)
    assert left < 500 * 1000 * 4  # less than one hidden activation


def test_stats_tell_how_much_was_captured() -> None:
    def captured_bytes(dtype: torch.dtype, **options: object) -> float:
        model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5)).to(dtype)
        opt = EKFAC(model, lr=1e-3, **options)
        for _ in range(3):
            opt.zero_grad()
            model(torch.randn(16, 10, dtype=dtype)).float().square().sum(1).mean().backward()
            opt.step()
        return opt.stats()["captured_bytes"]

    inputs, gradients = 16 * (10 + 20), 16 * (20 + 5)
    assert captured_bytes(torch.float32) == 4 * inputs
    assert captured_bytes(torch.bfloat16) == 2 * inputs
    # Algorithm 1 itself: a step that refreshes needs the batch again in the new basis.
    assert captured_bytes(torch.float32, scaling="per_example", refresh_every=1) == 4 * (inputs + gradients)


def test_a_tensor_that_several_layers_read_counts_once() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(10, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(x)
            return self.one(x) + self.two(x) + self.three(x)

    opt = EKFAC(Heads())
    opt.model(torch.randn(16, 10)).square().mean().backward()
    opt.step()
    assert opt.stats()["captured_bytes"] == 4 * 16 * 10
