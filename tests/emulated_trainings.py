"""Small networks, and trainings of them in which users do what users do; for tests on an emulated GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ekfac
import paper

Batch = tuple[Tensor, Tensor]
STEPS = 18
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


class Turned(nn.Module):
    """A complex matrix and vector between real layers."""

    batch = staticmethod(MLP.batch)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(5, 4)
        self.turn = nn.Parameter(torch.randn(8, 5, dtype=torch.complex128) / 3)
        self.shift = nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((torch.tanh(self.first(x)).to(self.turn.dtype) @ self.turn + self.shift).abs())


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


MODELS: dict[str, Any] = {"mlp": MLP, "cnn": CNN, "gpt": GPT, "turned": Turned}


class Training:
    """A training of which a habit may change every step, with what it has shown."""

    def __init__(self, model: str, device: str, options: dict[str, Any], make: Any = ekfac.EKFAC) -> None:
        torch.manual_seed(0)
        self.model = MODELS[model]().double().to(device)
        self.device = device
        self.opt = make(self.model, **paper.grouped(options))
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
    if t in (8, 14):
        training.opt.param_groups[0]["weight_decay"] = 0.1 * t
        training.opt.param_groups[0]["betas"] = (0.9, 0.95) if t == 8 else (0.8, 0.9)


def clips(training: Training, t: int) -> None:
    clip = nn.utils.clip_grad_norm_
    training.touch = (lambda: clip(training.model.parameters(), 1e-2)) if t % 4 == 3 else lambda: None


def always_clips(training: Training, t: int) -> None:
    training.touch = lambda: nn.utils.clip_grad_norm_(training.model.parameters(), 1e-2)


def accumulates(training: Training, t: int) -> None:
    training.parts = 2 if t % 5 > 2 else 1


def poisons(training: Training, t: int) -> None:
    training.poisons = t in (6, 11, 12, 16)


def skips_a_layer(training: Training, t: int) -> None:
    training.model.skips = 8 <= t < 13 or t == 16


def freezes(training: Training, t: int) -> None:
    if t in (7, 13):
        next(training.model.parameters()).requires_grad_(t == 13)


def keeps_zeros(training: Training, t: int) -> None:
    training.keeps_zeros = t > 4


def new_group(training: Training, t: int) -> None:
    if t == 10:
        last = list(training.model.parameters())[-1]
        training.opt.param_groups[0]["params"] = [p for p in training.opt.param_groups[0]["params"] if p is not last]
        training.opt.add_param_group({"params": [last], "lr": 1e-2, "weight_decay": 0.0})


def loads(training: Training, t: int) -> None:
    if t == 8:
        training.saved = copy.deepcopy((training.opt.state_dict(), training.model.state_dict()))  # type: ignore[attr-defined]
    if t == 13:
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
    if t in (7, 8, 14):
        x, y = training.model.batch(torch.Generator().manual_seed(100 + t), 8)
        with training.opt.statistics():
            cross_entropy(training.model(x.to(training.device)), y.to(training.device)).backward()


def together(*habits: Habit) -> Habit:
    """Several at once."""

    def act(training: Training, t: int) -> None:
        for habit in habits:
            habit(training, t)

    act.__name__ = " and ".join(habit.__name__ for habit in habits)
    return act


HABITS: list[Habit] = [
    sizes, rates, options, clips, always_clips, accumulates, poisons, skips_a_layer, freezes, keeps_zeros, new_group,
    loads, evaluates, asks, takes_statistics,
]  # fmt: skip
