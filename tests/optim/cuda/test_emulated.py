"""Trainings with graphs on an emulated GPU are those without: whatever users do between steps, on several networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import ekfac
import paper
from ekfac.optim.cuda.executor import CudaExecutor
from ekfac.optim.cuda.replay import Replays
from ekfac.optim.executor import Executor
from emulated_cuda import emulated
from emulated_trainings import (
    HABITS,
    MODELS,
    SMOOTH,
    STEPS,
    Habit,
    Training,
    accumulates,
    always_clips,
    asks,
    clips,
    evaluates,
    freezes,
    keeps_zeros,
    loads,
    new_group,
    options,
    plain,
    poisons,
    rates,
    sizes,
    skips_a_layer,
    takes_statistics,
    together,
)  # fmt: skip

pytestmark = [
    pytest.mark.over_a_second,
    pytest.mark.filterwarnings("error:cuda_graphs. .*recorded"),
]


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


def some(habits: list[Habit], together: list[Habit]) -> Any:
    """Habits together, and each by itself where slow tests are asked for."""
    return pytest.mark.parametrize(
        "habit",
        [*together, *(pytest.param(habit, marks=pytest.mark.slow) for habit in habits if habit not in together)],
        ids=lambda habit: habit.__name__,
    )


@some(
    HABITS,
    [
        always_clips,
        together(skips_a_layer, freezes),
        together(sizes, evaluates, asks, options, new_group),
        together(rates, takes_statistics, keeps_zeros, loads),
        together(clips, accumulates),
    ],
)
def test_the_default_on_an_mlp(habit: Habit) -> None:
    agree("mlp", habit)


@some([plain, sizes, poisons, evaluates, loads], [together(sizes, evaluates), together(poisons, loads)])
def test_the_default_on_a_cnn(habit: Habit) -> None:
    agree("cnn", habit)


@some([plain, sizes, evaluates, loads], [])
def test_the_default_on_a_gpt(habit: Habit) -> None:
    agree("gpt", habit)


@pytest.mark.filterwarnings("ignore:.* of the parameters have no Kronecker")
@some([plain, poisons, loads], [together(poisons, loads)])
def test_the_default_on_complex_parameters(habit: Habit) -> None:
    agree("turned", habit)


def test_the_default_on_a_transformer() -> None:
    agree("gpt", poisons)


@pytest.mark.parametrize(
    "given",
    [
        {"scaling": "running"}, {"scaling": "per_example", "scaling_decay": 0.9}, {"scaling": "kronecker"},
        {"scaling": "adam"}, {"deterministic": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3, "kl_clip": 1e-3, "loss_reduction": "sum"},
        *(
            pytest.param(given, marks=pytest.mark.slow)
            for given in (
                {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3}, {"kl_clip": 1e-3}, {"loss_reduction": "sum"},
                {"scaling": "per_example"}, {"scaling": "anchored", "pace": 0.1, "trust": 1.0}, {"scaling": "rmsprop"},
                {"weight_decay": 0.1, "decoupled_weight_decay": False}, {"average": True, "lr": 1e-2},
                {"factor_every": 3},
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_options_and_rules(given: dict[str, Any]) -> None:
    own = {"lr": 1e-3, "damping": 1e-2} if "scaling" in given else SMOOTH
    # Steps with each example's scalings are of more kinds, each of which is seen a few times before it is recorded.
    agree("mlp", poisons, {**own, **given}, steps=40 if given.get("scaling") == "per_example" else STEPS)


@some([plain, sizes], [sizes])
def test_statistics_and_refreshes_are_replayed_apart(habit: Habit, monkeypatch: pytest.MonkeyPatch) -> None:
    """By graphs of their own, which share their places."""
    replayed: list[str] = []
    call = Replays.__call__

    def counted(self: Replays, key: Any, *given: Any, **options: Any) -> Any:
        found = call(self, key, *given, **options)
        replayed.extend([self.what] if self._graphs else [])
        return found

    monkeypatch.setattr(Replays, "__call__", counted)
    agree("cnn", habit, {**SMOOTH, "factor_every": 1, "refresh_every": 2})
    assert replayed.count("taking statistics") > 10 and replayed.count("a refresh") > 1


@pytest.mark.parametrize("scaling", ["belief", "per_example"])
def test_a_preconditioner_before_another_optimizer(scaling: str) -> None:
    """Which has no whole steps that could be replayed: refreshes alone."""
    found = []
    with emulated():
        for graphs in (True, False):
            torch.manual_seed(0)
            model = MODELS["cnn"]().double().cuda()
            pre = ekfac.Preconditioner(
                model, scaling=scaling, refresh_every=4, damping=1e-2, numerics=ekfac.Numerics(cuda_graphs=graphs)
            )
            sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
            for t in range(24):
                x, y = (tensor.cuda() for tensor in model.batch(torch.Generator().manual_seed(t), 16))
                pre.zero_grad()
                cross_entropy(model(x), y).backward()
                if t == 13:
                    model[0].weight.grad[0] = float("inf")
                pre.step()
                sgd.step()
            assert pre.stats()["skipped_steps"] == 1
            found.append([p.detach().cpu() for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-9)


@some([plain, poisons, rates], [poisons, rates])
def test_kfac(habit: Habit) -> None:
    agree("cnn", habit, {"lr": 1e-3, "damping": 1e-2}, make=ekfac.KFAC, least=0 if habit is rates else 5)


@pytest.mark.parametrize(
    "rule", ["belief", "per_example", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("running", "adam"))]
)
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


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_single_precision_is_recorded_too(model: str) -> None:
    """With what the kernels of the default rule do in their place."""
    losses = []
    with emulated():
        for graphs in (True, False):
            torch.manual_seed(0)
            network = MODELS[model]().cuda()
            opt = ekfac.EKFAC(network, **paper.grouped({"cuda_graphs": graphs, "refresh_every": 8, **SMOOTH}))
            for t in range(16):
                x, y = (tensor.cuda() for tensor in network.batch(torch.Generator().manual_seed(t % 4), 16))
                opt.zero_grad()
                loss = cross_entropy(network(x.float()), y)
                loss.backward()
                opt.step()
            assert opt.engine.executor.step_graphs.replays >= (10 if graphs else 0)
            losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_update_leaves_the_average_in_the_parameters(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In replayed steps and in others, in those that change nothing, and where some layer has no gradient."""
    found, plain = [], CudaExecutor.update
    with emulated():
        for shows in (True, False):
            if not shows:
                monkeypatch.setattr(CudaExecutor, "update", lambda self, *given: plain(self, *given[:-1], False))
            training = Training(model, "cuda", {"refresh_every": 8, **SMOOTH})
            training.model.float()
            told = []
            for t in range(STEPS):
                together(poisons, *([skips_a_layer] if model == "mlp" else []))(training, t)
                generator = torch.Generator().manual_seed(t)
                x, y = training.model.batch(generator, 16)
                training.opt.zero_grad()
                cross_entropy(training.model(x.float().cuda()), y.cuda()).backward()
                if training.poisons:
                    next(training.model.parameters()).grad.view(-1)[0] = float("nan")
                training.opt.step()
                training.look()
                told.append(training.opt.engine.executor.average_shown)
            assert training.replays > 3
            assert sum(told) >= 10 if shows else not any(told)
            found.append(training)
    for one, two in zip(found[0].shown, found[1].shown, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def test_damping_learns_from_the_weights_that_are_trained_and_not_from_their_average() -> None:
    learnt = {}
    with emulated():
        for device in ("cpu", "cuda"):
            torch.manual_seed(0)
            model: Any = MODELS["mlp"]().to(device)
            damping, averaged = ekfac.AdaptiveDamping(start=1e-1, every=1), ekfac.StepSize(average=True)
            opt = ekfac.EKFAC(model, lr=0.05, scaling="running", damping=damping, step_size=averaged)
            x, y = (t.to(device) for t in model.batch(torch.Generator().manual_seed(0), 32))

            def closure(model: Any = model, opt: Any = opt, x: Any = x, y: Any = y) -> Any:
                opt.zero_grad()
                loss = cross_entropy(model(x.float()), y)
                loss.backward()
                return loss

            learnt[device] = []
            for _ in range(12):
                opt.step(closure)
                learnt[device].append(opt.stats()["reduction_ratio"])
    assert learnt["cuda"] == pytest.approx(learnt["cpu"], rel=1e-2)
