"""Complex parameters are trained as the pairs of real numbers that they are, in the identity basis."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ekfac
from ekfac import PAPER, StepSize
from ekfac.curvature.real import as_real
from ekfac.rules import RULES
from paper import KFAC_PAPER, NO_UPDATE

Batch = tuple[Tensor, Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:.* of the parameters have no Kronecker")


class Weights(nn.Module):
    """A complex weight and bias, or the real numbers that these are, under the same names."""

    def __init__(self, *shape: int, pairs: bool = False, dtype: torch.dtype = torch.complex128) -> None:
        super().__init__()
        weight = torch.randn(*shape, dtype=dtype) * shape[0] ** -0.5
        bias = torch.randn(shape[1], dtype=dtype) * 0.1
        self.weight = nn.Parameter(torch.view_as_real(weight).clone() if pairs else weight)
        self.bias = nn.Parameter(torch.view_as_real(bias).flatten() if pairs else bias)

    def complex_ones(self) -> tuple[Tensor, Tensor]:
        if self.weight.is_complex():
            return self.weight, self.bias
        return torch.view_as_complex(self.weight), torch.view_as_complex(self.bias.view(-1, 2))


class Spectral(Weights):
    """What a Fourier neural operator does: a matrix for each of some frequencies."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.complex_ones()
        h = torch.fft.rfft(x)[..., : weight.shape[-1]]
        return torch.fft.irfft(torch.einsum("bim,iom->bom", h, weight) + bias[:, None], n=x.shape[-1])


class Dense(Weights):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.complex_ones()
        return x @ weight + bias


class Network(nn.Module):
    """A spectral layer and a complex dense one, with a real layer before and one after."""

    def __init__(self, pairs: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 4, dtype=torch.float64)
        self.spectral = Spectral(4, 3, 2, pairs=pairs)
        self.dense = Dense(3, 3, pairs=pairs)
        self.last = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).unsqueeze(-1).expand(-1, -1, 6)
        x = torch.tanh(self.spectral(x * torch.arange(6.0)))
        return self.last(self.dense(torch.fft.fft(x)[..., 1]).abs())


def batches(steps: int) -> list[Batch]:
    chance = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"generator": chance, "dtype": torch.float64}
    return [(torch.randn(8, 5, **options), torch.randn(8, 2, **options)) for _ in range(steps)]


def backward(model: nn.Module, batch: Batch, clip: float | None = None) -> float:
    loss = (model(batch[0]) - batch[1]).square().sum(1).mean()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    return loss.item()


def numbers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: as_real(p.detach()).flatten().clone() for name, p in model.named_parameters()}


def assert_near(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    "nothing set": (ekfac.EKFAC, {}),
    "decay": (ekfac.EKFAC, {"lr": 0.01, "weight_decay": 0.1}),
    "total steps": (ekfac.EKFAC, {"total_steps": 12}),
    "bounded": (ekfac.EKFAC, {"lr": 0.01, "momentum": 0.5, "step_size": StepSize(max_change=0.05)}),
    "L2 and Nesterov": (
        ekfac.EKFAC,
        {**PAPER, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "decoupled_weight_decay": False},
    ),
    "KL clip": (ekfac.EKFAC, {**PAPER, "step_size": StepSize(decay_steps=None, kl_clip=1e-3)}),
    "maximize": (ekfac.EKFAC, {"lr": 1e-4, "maximize": True}),
    **{f"rule {rule}": (ekfac.EKFAC, {**PAPER, "damping": 0.1, "scaling": rule}) for rule in RULES},
    "KFAC": (ekfac.KFAC, {**KFAC_PAPER, "damping": 0.1}),
}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("method", METHODS)
def test_complex_numbers_are_trained_as_pairs(method: str, clip: float | None) -> None:
    """All rules and all that bounds a step give the same weights for complex parameters and for the pairs."""
    kind, options = METHODS[method]
    models = [Network(), Network(pairs=True)]
    optimizers = [kind(model, **options) for model in models]
    start = numbers_of(models[0])
    for batch in batches(8):
        for model, opt in zip(models, optimizers, strict=True):
            opt.zero_grad()
            backward(model, batch, clip)
            opt.step()
    one, other = map(numbers_of, models)
    assert_near(one, other)
    assert all(not torch.equal(one[name], start[name]) for name in start)


def test_a_preconditioner_replaces_complex_gradients_in_place() -> None:
    models = [Network(), Network(pairs=True)]
    pres = [ekfac.Preconditioner(model, **{**NO_UPDATE, "damping": 0.1}) for model in models]
    for batch in batches(3):
        for model, pre in zip(models, pres, strict=True):
            pre.zero_grad()
            backward(model, batch)
            before = {p: (p.grad, p.grad.clone()) for p in model.parameters()}
            pre.step()
            for p, (grad, old) in before.items():
                assert p.grad is grad and not torch.equal(grad, old)
    one, other = ({n: as_real(p.grad).flatten() for n, p in model.named_parameters()} for model in models)
    assert_near(one, other)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_rule_adam_is_torchs_adamw(decay: float) -> None:
    model, twin = Network(), Network()
    for part in (model, twin):
        part.first.requires_grad_(False)
        part.last.requires_grad_(False)
    torchs = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=0.01, weight_decay=decay)
    opt = ekfac.EKFAC(model, scaling="adam", lr=0.01, betas=(0.9, 0.999), weight_decay=decay)
    for batch in batches(8):
        for part, o in ((model, opt), (twin, torchs)):
            o.zero_grad()
            backward(part, batch)
            o.step()
    assert_near(numbers_of(model), numbers_of(twin))


def test_adaptive_damping_sees_complex_steps() -> None:
    models = [Network(), Network(pairs=True)]
    damping = ekfac.AdaptiveDamping(start=1.0)
    optimizers = [ekfac.EKFAC(m, **{**PAPER, "damping": damping, "momentum": 0.5}) for m in models]
    for batch in batches(8):
        for model, opt in zip(models, optimizers, strict=True):

            def closure(model: nn.Module = model, opt: Any = opt, batch: Batch = batch) -> float:
                opt.zero_grad()
                return backward(model, batch)

            opt.step(closure)
    assert_near(*map(numbers_of, models))
    assert optimizers[0].stats()["damping"] == pytest.approx(optimizers[1].stats()["damping"])


def test_the_model_shows_the_average_of_complex_weights() -> None:
    model, twin = Network(), Network()
    opt = ekfac.EKFAC(model, weight_decay=0.0)
    plain = ekfac.EKFAC(twin, weight_decay=0.0, step_size=StepSize(average=False))
    x: dict[str, Tensor] = {}
    for t, batch in enumerate(batches(12)):
        for part, o in ((model, opt), (twin, plain)):
            o.zero_grad()
            backward(part, batch)
            o.step()
        c, z = 9 / (t + 9), numbers_of(twin)
        x = {n: z[n] if t == 0 else x[n] + c * (z[n] - x[n]) for n in z}
        assert_near(numbers_of(model), x)
    assert not torch.allclose(numbers_of(model)["spectral.weight"], z["spectral.weight"], rtol=1e-4)


def test_biases_are_not_decayed_by_default() -> None:
    """A complex vector is a vector, though its pairs make a matrix."""
    ends = []
    for decay in ({}, {"params": "no decay"}):
        model = Network()
        groups = [{"params": [model.dense.bias], **({"weight_decay": 0.0} if decay else {})}]
        with ekfac.EKFAC(model, params=groups) as opt:
            for batch in batches(4):
                opt.zero_grad()
                backward(model, batch)
                opt.step()
        ends.append(model.dense.bias.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize("kind", [ekfac.EKFAC, ekfac.KFAC, ekfac.Preconditioner])
def test_state_comes_back_exactly(kind: Any) -> None:
    options = {"damping": 0.1} if kind is ekfac.Preconditioner else {"momentum": 0.5} if kind is ekfac.KFAC else {}
    model = Network()
    opt, steps = kind(model, **options), batches(8)

    def train(model: nn.Module, opt: Any, batch: Batch) -> None:
        opt.zero_grad()
        backward(model, batch)
        opt.step()
        if kind is ekfac.Preconditioner:
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad

    for batch in steps[:4]:
        train(model, opt, batch)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = Network()
    twin.load_state_dict(saved["model"])
    other = kind(twin, **options)
    other.load_state_dict(saved["opt"])
    third = copy.deepcopy(opt)
    for batch in steps[4:]:
        for part, o in ((model, opt), (twin, other), (third.model, third)):
            train(part, o, batch)
    for part in (twin, third.model):
        for name, value in numbers_of(model).items():
            assert torch.equal(value, numbers_of(part)[name]), name


@pytest.mark.parametrize("entry", ["offset", "s", "momentum"])
@pytest.mark.parametrize("change", ["complex", "shape", "NaN"])
def test_state_that_cannot_be_is_refused_before_anything_changes(entry: str, change: str) -> None:
    model = Network()
    opt = ekfac.EKFAC(model, momentum=0.5)
    backward(model, batches(1)[0])
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    place = {
        "offset": (saved["ekfac"]["average"]["offsets"], "spectral.weight"),
        "s": (saved["state"][2], "s"),
        "momentum": (saved["state"][2], "momentum_buffer"),
    }[entry]
    value = place[0][place[1]]
    assert not value.is_complex()
    wrong = {"complex": torch.view_as_complex(value.reshape(-1, 2)), "shape": value[..., :1], "NaN": value * torch.nan}
    place[0][place[1]] = wrong[change]
    before, weights = copy.deepcopy(opt.state_dict()), numbers_of(model)
    with pytest.raises(ValueError, match=r"spectral\.weight"):
        opt.load_state_dict(saved)
    assert all(torch.equal(value, numbers_of(model)[name]) for name, value in weights.items())
    after = opt.state_dict()
    assert all(torch.equal(before["state"][2][n], after["state"][2][n]) for n in ("s", "m", "momentum_buffer"))


def test_layers_with_complex_weights_have_no_basis() -> None:
    layers = nn.ModuleList(
        [
            nn.Linear(4, 6, dtype=torch.complex64),
            nn.Conv1d(1, 2, 3, dtype=torch.complex64),
            nn.Embedding(5, 6, dtype=torch.complex64),
            nn.Linear(3, 2),
        ]
    )
    rows = {row.name: row for row in ekfac.summary(layers).rows}
    complex_ones = {name: row for name, row in rows.items() if name != "3"}
    assert complex_ones.keys() == {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight"}
    assert all(row.why == "complex, no basis" for row in complex_ones.values())
    assert rows["0.weight"].numbers == 48 and rows["3"].block.startswith("kronecker")
    assert "diagonal (complex, no basis)" in str(ekfac.summary(layers))
    planned = {b.row.name: b.A for b in ekfac.plan(layers).blocks}
    assert planned["0.weight"] == "complex, no basis"
    with pytest.raises(ValueError, match=r"0\.weight"):
        ekfac.EKFAC(layers, coverage=ekfac.Coverage(unsupported="error"))


def test_the_usual_warning_tells_of_low_coverage() -> None:
    model = nn.Linear(4, 3, dtype=torch.complex64)
    opt = ekfac.EKFAC(model)
    model(torch.randn(8, 4, dtype=torch.complex64)).abs().sum().backward()
    with pytest.warns(UserWarning, match=r"100 % of the parameters .* weight \(24: complex, no basis\)"):
        opt.step()


class Conjugate(nn.Module):
    def __init__(self, weight: Tensor, conjugates: bool) -> None:
        super().__init__()
        self.weight, self.conjugates = nn.Parameter(weight), conjugates

    def forward(self, n: Tensor) -> Tensor:
        return (self.weight.conj() if self.conjugates else self.weight).abs().sum() * n


def test_gradients_that_torch_leaves_conjugated() -> None:
    """AdamW of torch 2.13 fails on these."""
    weight = torch.randn(5, dtype=torch.complex128)
    ends = []
    for conjugates in (True, False):
        model = Conjugate(weight.clone(), conjugates)
        opt = ekfac.EKFAC(model, lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(2)).sum().backward()
            opt.step()
        ends.append(model.weight.detach())
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(ends[0], weight)


def test_what_curvature_is_not_defined_for_is_refused_by_name() -> None:
    model, data = Network(), batches(6)
    opt = ekfac.EKFAC(model)
    backward(model, data[0])
    opt.step()
    conjugated = nn.ParameterList([nn.Parameter(torch.randn(3, dtype=torch.complex64).conj())])
    for refused, words in (
        (lambda: ekfac.fisher(model, data, "gaussian"), r"fisher\(\): parameter 'spectral.weight' is complex"),
        (lambda: opt.curvature(), r"curvature\(\): parameter 'spectral.weight' is complex"),
        (lambda: ekfac.doctor(model, data, F.mse_loss), r"doctor\(\): parameter 'spectral.weight' is complex"),
        (lambda: ekfac.EKFAC(conjugated), "parameter '0' is the conjugate of another tensor"),
    ):
        with pytest.raises(ValueError, match=words):
            refused()


class Operator(nn.Module):
    """A small Fourier neural operator."""

    def __init__(self, width: int = 12, modes: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.lift = nn.Conv1d(2, width, 1)
        self.spectral = nn.ModuleList(
            [Spectral(width, width, modes, dtype=torch.complex64) for _ in range(depth)],
        )
        self.skips = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(depth)])
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for spectral, skip in zip(self.spectral, self.skips, strict=True):
            x = F.gelu(spectral(x) + skip(x))
        return self.head(x)


def heat(seed: int, n: int = 16, points: int = 32) -> Batch:
    """A wave, and what a moving medium and diffusion make of it."""
    chance = torch.Generator().manual_seed(seed)
    k, z = torch.arange(1, 5).float(), torch.arange(points) / points
    sizes, phases = torch.randn(n, 4, generator=chance) / k, 6.28 * torch.rand(n, 4, generator=chance)
    u = (sizes[:, :, None] * torch.sin(6.28319 * k[:, None] * z + phases[:, :, None])).sum(1)
    waves = torch.arange(points // 2 + 1).float()
    v = torch.fft.irfft(torch.fft.rfft(u) * torch.exp(-0.05 * waves**2 + 0.5j * waves), n=points)
    return torch.stack([u, z.expand(n, points)], 1), (v + 0.3 * v**2)[:, None]


@pytest.mark.over_a_second
def test_a_fourier_neural_operator_learns_faster_than_by_adamw() -> None:
    def end(make: Any) -> float:
        torch.manual_seed(0)
        model = Operator()
        opt = make(model)
        for t in range(80):
            opt.zero_grad()
            x, y = heat(t)
            F.mse_loss(model(x), y).backward()
            opt.step()
        with torch.no_grad():
            return sum(F.mse_loss(model(x), y).item() for x, y in map(heat, range(1000, 1004)))

    rates = (0.001, 0.003, 0.01)
    best = min(end(lambda m, lr=lr: torch.optim.AdamW(m.parameters(), lr=lr)) for lr in rates)
    assert end(ekfac.EKFAC) < 0.8 * best


def test_complex_gradients_that_the_last_step_used_are_known() -> None:
    model = Network()
    opt = ekfac.EKFAC(model)
    for one in batches(2):
        opt.zero_grad()
        backward(model, one)
        opt.step()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(RuntimeWarning, match="gradients that the last step used"):
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
