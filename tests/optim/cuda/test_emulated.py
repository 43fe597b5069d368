"""Trainings with graphs on an emulated GPU are those without: whatever users do between steps, on several networks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ekfac
from ekfac.optim.cuda.executor import CudaExecutor
from ekfac.optim.cuda.nonfinite import PinnedAnswer
from ekfac.optim.executor import Executor
from emulated_cuda import emulated

pytestmark = [
    pytest.mark.over_a_second,
    pytest.mark.filterwarnings("error:cuda_graphs. .*recorded"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
Batch = tuple[Tensor, Tensor]
STEPS = 26
#: The default rule, which does not divide rounding by next to nothing where there is no gradient.
SMOOTH: dict[str, Any] = {"eps": 1e-4}


class MLP(nn.Module):
    """Some layers of one shape, one that is not always called, and a normalisation that no layer covers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.middle = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        for layer in list(self.middle)[: 2 if self.skips else 3]:
            x = torch.tanh(layer(x))
        return self.last(x)

    @staticmethod
    def batch(generator: torch.Generator, n: int) -> Batch:
        x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
        return x, torch.randint(4, (n,), generator=generator)


class CNN(nn.Sequential):
    """Convolutions with batch-norm."""

    def __init__(self) -> None:
        layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        super().__init__(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(36, 4))

    @staticmethod
    def batch(generator: torch.Generator, n: int) -> Batch:
        x = torch.randn(n, 2, 5, 5, generator=generator, dtype=torch.float64)
        return x, torch.randint(4, (n,), generator=generator)


class GPT(nn.Module):
    """A block of attention and one of two layers, whose head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.mT / 8**0.5).softmax(-1) @ v)
        return self.head(x + self.down(torch.tanh(self.up(x)))).flatten(0, 1)

    @staticmethod
    def batch(generator: torch.Generator, n: int) -> Batch:
        tokens = torch.randint(7, (n, 6), generator=generator)
        return tokens[:, :5], tokens[:, 1:].flatten()


MODELS: dict[str, Any] = {"mlp": MLP, "cnn": CNN, "gpt": GPT}


class Training:
    """A training of which a habit may change every step, with what it has shown."""

    def __init__(self, model: str, device: str, options: dict[str, Any], make: Any = ekfac.EKFAC) -> None:
        torch.manual_seed(0)
        self.model = MODELS[model]().double().to(device)
        self.device = device
        self.opt = make(self.model, **options)
        self.shown: list[Tensor] = []
        self.n = 16
        self.poisons = False
        #: What is done between backward and step.
        self.touch: Callable[[], object] = lambda: None
        self.parts = 1
        self.keeps_zeros = False

    def step(self, t: int) -> None:
        generator = torch.Generator().manual_seed(t)
        self.opt.zero_grad(set_to_none=not self.keeps_zeros)
        for _ in range(self.parts):
            x, y = (tensor.to(self.device) for tensor in self.model.batch(generator, self.n))
            (cross_entropy(self.model(x), y) / self.parts).backward()
        if self.poisons:
            next(self.model.parameters()).grad.view(-1)[0] = float("nan")
        self.touch()
        self.opt.step()
        self.look()

    def look(self) -> None:
        self.shown += [p.detach().cpu().flatten().clone() for p in [*self.model.parameters(), *self.model.buffers()]]

    @property
    def replays(self) -> int:
        return self.opt.engine.executor.step_graphs.replays


Habit = Callable[[Training, int], None]


def plain(training: Training, t: int) -> None:
    """Nothing."""


def sizes(training: Training, t: int) -> None:
    training.n = 16 if t % 3 else 12


def rates(training: Training, t: int) -> None:
    training.opt.param_groups[0]["lr"] = 1e-2 / (1 + t)
    training.opt.param_groups[0]["damping"] = 1e-2 / (1 + t)


def options(training: Training, t: int) -> None:
    if t in (9, 18):
        training.opt.param_groups[0]["weight_decay"] = 0.1 * t
        training.opt.param_groups[0]["betas"] = (0.9, 0.95) if t == 9 else (0.8, 0.9)


def clips(training: Training, t: int) -> None:
    clip = nn.utils.clip_grad_norm_
    training.touch = (lambda: clip(training.model.parameters(), 1e-2)) if t % 4 == 3 else lambda: None


def always_clips(training: Training, t: int) -> None:
    training.touch = lambda: nn.utils.clip_grad_norm_(training.model.parameters(), 1e-2)


def accumulates(training: Training, t: int) -> None:
    training.parts = 2 if t % 5 > 2 else 1


def poisons(training: Training, t: int) -> None:
    training.poisons = t in (6, 12, 13, 21)


def skips_a_layer(training: Training, t: int) -> None:
    training.model.skips = 9 <= t < 15 or t == 20


def freezes(training: Training, t: int) -> None:
    if t in (8, 16):
        next(training.model.parameters()).requires_grad_(t == 16)


def keeps_zeros(training: Training, t: int) -> None:
    training.keeps_zeros = t > 4


def new_group(training: Training, t: int) -> None:
    if t == 10:
        last = list(training.model.parameters())[-1]
        training.opt.param_groups[0]["params"] = [p for p in training.opt.param_groups[0]["params"] if p is not last]
        training.opt.add_param_group({"params": [last], "lr": 1e-2, "weight_decay": 0.0})


def loads(training: Training, t: int) -> None:
    if t == 9:
        training.saved = copy.deepcopy((training.opt.state_dict(), training.model.state_dict()))  # type: ignore[attr-defined]
    if t == 16:
        state, weights = training.saved  # type: ignore[attr-defined]
        training.opt.load_state_dict(state)
        training.model.load_state_dict(weights)


def evaluates(training: Training, t: int) -> None:
    if t % 3 == 2:
        training.model.eval()
        x, _ = training.model.batch(torch.Generator().manual_seed(99), 5)
        with torch.no_grad():
            training.shown.append(training.model(x.to(training.device)).cpu().flatten())
        training.model.train()


def asks(training: Training, t: int) -> None:
    if t % 4 == 1:
        stats = training.opt.stats()
        training.shown.append(torch.tensor([stats["steps"], stats["skipped_steps"], stats["warm_refreshes"]]))


def takes_statistics(training: Training, t: int) -> None:
    if t in (7, 8, 15):
        x, y = training.model.batch(torch.Generator().manual_seed(100 + t), 8)
        with training.opt.statistics():
            cross_entropy(training.model(x.to(training.device)), y.to(training.device)).backward()


HABITS: list[Habit] = [
    sizes, rates, options, clips, always_clips, accumulates, poisons, skips_a_layer, freezes, keeps_zeros, new_group,
    loads, evaluates, asks, takes_statistics,
]  # fmt: skip


def agree(
    model: str, habit: Habit, given: dict[str, Any] = SMOOTH, least: int = 5, steps: int = STEPS,
    make: Any = ekfac.EKFAC,
) -> None:  # fmt: skip
    """Train with graphs and without; everything that was seen in between must agree."""
    found = []
    with emulated():
        for graphs in (True, False):
            training = Training(model, "cuda", {"refresh_every": 8, **given, "cuda_graphs": graphs}, make)
            assert type(training.opt.engine.executor) is CudaExecutor
            for t in range(steps):
                habit(training, t)
                training.step(t)
            asks(training, 1)
            found.append(training)
    replayed, run = found
    assert replayed.replays >= least and run.replays == 0, replayed.replays
    assert len(replayed.shown) == len(run.shown)
    for index, (one, two) in enumerate(zip(replayed.shown, run.shown, strict=True)):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10, msg=lambda text, i=index: f"{i}: {text}")


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_the_default_on_an_mlp(habit: Habit) -> None:
    agree("mlp", habit, least=0 if habit is always_clips else 5)


@pytest.mark.parametrize("habit", [plain, sizes, poisons, evaluates, loads], ids=lambda habit: habit.__name__)
@pytest.mark.parametrize("model", ["cnn", "gpt"])
def test_the_default_on_other_networks(model: str, habit: Habit) -> None:
    agree(model, habit)


@pytest.mark.parametrize(
    "given",
    [
        {"scaling": "running"}, {"scaling": "per_example"}, {"scaling": "per_example", "scaling_decay": 0.9},
        {"scaling": "kronecker"}, {"scaling": "anchored", "pace": 0.1, "trust": 1.0}, {"scaling": "adam"},
        {"scaling": "rmsprop"}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3}, {"kl_clip": 1e-3},
        {"weight_decay": 0.1, "decoupled_weight_decay": False}, {"average": True, "lr": 1e-2},
        {"loss_reduction": "sum"}, {"factor_every": 3}, {"deterministic": True},
    ],
    ids=str,
)  # fmt: skip
def test_options_and_rules(given: dict[str, Any]) -> None:
    own = {"lr": 1e-3, "damping": 1e-2} if "scaling" in given else SMOOTH
    agree("mlp", poisons, {**own, **given})


@pytest.mark.parametrize("habit", [plain, poisons, rates], ids=lambda habit: habit.__name__)
def test_kfac(habit: Habit) -> None:
    agree("cnn", habit, {"lr": 1e-3, "damping": 1e-2}, make=ekfac.KFAC, least=0 if habit is rates else 5)


@pytest.mark.parametrize("rule", ["belief", "running", "per_example", "adam"])
def test_the_emulated_gpu_does_what_the_cpu_does(rule: str) -> None:
    """To rounding: the algorithm of the paper, with full solves at the same steps."""
    given = {"scaling": rule, "deterministic": True, "refresh_every": 8, "lr": 1e-3, "damping": 1e-2}
    given |= SMOOTH if rule == "belief" else {}
    on_cpu = Training("cnn", "cpu", given)
    assert type(on_cpu.opt.engine.executor) is Executor
    with emulated():
        on_gpu = Training("cnn", "cuda", given)
        for t in range(STEPS):
            for training in (on_cpu, on_gpu):
                sizes(training, t)
                training.step(t)
        assert on_gpu.replays >= 5
    for one, two in zip(on_cpu.shown, on_gpu.shown, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-9)


# --- streams, memory and waiting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_the_host_waits_in_no_later_step(model: str) -> None:
    with emulated() as device:
        training = Training(model, "cuda", {"refresh_every": 4})
        for t in range(20):
            training.step(t)
        shown = len(training.shown) // 20
        before = device.waits
        for t in range(20, 30):
            training.step(t)
        assert device.waits - before == 10 * shown, "but for those who look at the weights"


def test_a_rate_that_is_put_on_the_device_is_not_read() -> None:
    with emulated() as device:
        training = Training("mlp", "cuda", SMOOTH)
        training.look = lambda: None  # type: ignore[method-assign]
        for t in range(15):
            if t == 5:
                training.opt.param_groups[0]["lr"] = torch.tensor(1e-2, dtype=torch.float64, device="cuda")
            if t == 12:
                before = device.waits
            training.step(t)
        assert device.waits == before


def refreshing(steps: int, **given: Any) -> Training:
    """Train, to a step after which bases turn beside what comes next."""
    training = Training("mlp", "cuda", {"refresh_every": 4, **SMOOTH, **given})
    for t in range(steps):
        training.step(t)
    assert training.opt.engine.executor.side._under_way, "under way"
    return training


def test_what_an_optimizer_leaves_is_not_used_before_its_refresh_is_done() -> None:
    with emulated():
        training = refreshing(20)
        training.opt = training.model = None
        gc.collect()
        torch.zeros(3, device="cuda").add_(1)


def test_a_model_that_is_cast_waits_for_the_refresh() -> None:
    with emulated():
        training = refreshing(20)
        training.model.float()
        x, y = training.model.batch(torch.Generator().manual_seed(0), 8)
        for _ in range(3):
            training.opt.zero_grad()
            cross_entropy(training.model(x.cuda().float()), y.cuda()).backward()
            training.opt.step()


def test_a_scaler_that_comes_later_finds_all_steps_counted() -> None:
    with emulated():
        training = refreshing(20)
        training.poisons = True
        training.step(20)
        training.opt.attach_scaler(None)
        training.poisons = False
        training.step(21)
        assert training.opt.stats()["skipped_steps"] == 1 and training.opt.stats()["steps"] == 21


def test_a_default_device_changes_nothing() -> None:
    found = []
    with emulated():
        for device in ("cpu", "cuda"):
            with torch.device(device):
                training = refreshing(12)
                poisons(training, 12)
                training.step(12)
            found.append(training.shown)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_an_answer_is_awaited_on_the_device_that_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be the current one."""
    with emulated() as device:
        asked: list[Any] = []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda of=None: (asked.append(of), device.stream)[1])
        value = torch.ones(3, device="cuda")
        assert PinnedAnswer(value).ready(wait=True) and asked == [value.device]


def test_products_on_a_gpu_ask_nothing_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ekfac.optim.executor.onednn_is_faster", lambda: pytest.fail("asked"))
    with emulated():
        training = Training("mlp", "cuda", {})
        with training.opt.engine.executor.fast_products(2**30):
            pass


def test_averages_that_change_places_are_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The offset of one parameter comes to lie where that of another was, as soon as that one is not averaged."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False)).double()
    opt = ekfac.EKFAC(model, params=[{"params": [model[0].weight]}, {"params": [model[2].weight], "lr": 1e-2}])
    monkeypatch.setattr(Tensor, "data_ptr", lambda t: id(t) if t.requires_grad else 0)
    seen: list[Any] = []
    run = opt.engine.step
    monkeypatch.setattr(opt.engine, "step", lambda rates, apply: (seen.append(rates.fixed), run(rates, apply))[1])
    groups = opt.param_groups
    for t in range(4):
        if t == 2:
            groups[0]["lr"], groups[1]["lr"], groups[1]["lr_named"] = 1e-2, opt.defaults["lr"], False
        opt.zero_grad()
        model(torch.randn(16, 6, dtype=torch.float64)).square().sum(1).mean().backward()
        opt.step()
    assert seen[0] == seen[1] != seen[2] == seen[3]


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_single_precision_is_recorded_too(model: str) -> None:
    """With what the kernels of the default rule do in their place."""
    losses = []
    with emulated():
        for graphs in (True, False):
            torch.manual_seed(0)
            network = MODELS[model]().cuda()
            opt = ekfac.EKFAC(network, cuda_graphs=graphs, refresh_every=8, **SMOOTH)
            for t in range(16):
                x, y = (tensor.cuda() for tensor in network.batch(torch.Generator().manual_seed(t % 4), 16))
                opt.zero_grad()
                loss = cross_entropy(network(x.float()), y)
                loss.backward()
                opt.step()
            assert opt.engine.executor.step_graphs.replays >= (10 if graphs else 0)
            losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
