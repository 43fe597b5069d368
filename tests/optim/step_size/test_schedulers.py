"""lr and weight_decay mean what they mean in AdamW: an update is lr times a direction, whoever moves lr."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler

import ekfac
from ekfac.optim.optimizer import decay
from ekfac.optim.step_size.default_lr import default_lr, default_warmup, depth_of, width_of
from ekfac.optim.step_size.lr_schedule import make_lr_schedule
from helpers import assert_same_weights, backward, batches_for, compare_with_oracle, mean_loss, mlp, parameters_of

STEPS = 14


def after_warm_up(opt: Any) -> LRScheduler:
    rise = schedulers.LinearLR(opt, start_factor=0.1, total_iters=4)
    fall = schedulers.CosineAnnealingLR(opt, T_max=STEPS - 4)
    return schedulers.SequentialLR(opt, [rise, fall], milestones=[4])


SCHEDULERS: dict[str, Callable[[Any], LRScheduler]] = {
    "warm-up": lambda opt: schedulers.LambdaLR(opt, lambda t: min(1.0, (t + 1) / 5)),
    "cosine": lambda opt: schedulers.CosineAnnealingLR(opt, T_max=STEPS),
    "restarts": lambda opt: schedulers.CosineAnnealingWarmRestarts(opt, T_0=5),
    "one cycle": lambda opt: schedulers.OneCycleLR(opt, max_lr=0.02, total_steps=STEPS + 1),
    "cyclic": lambda opt: schedulers.CyclicLR(opt, base_lr=0.001, max_lr=0.01, step_size_up=4),
    "steps": lambda opt: schedulers.MultiStepLR(opt, milestones=[3, 7], gamma=0.3),
    "exponential": lambda opt: schedulers.ExponentialLR(opt, gamma=0.8),
    "sequence": after_warm_up,
    "chained": lambda opt: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(opt, factor=0.5, total_iters=3), schedulers.ExponentialLR(opt, gamma=0.9)]
    ),
    "plateau": lambda opt: schedulers.ReduceLROnPlateau(opt, factor=0.5, patience=1),
}
RULES: dict[str, dict[str, Any]] = {
    "belief": {},
    "decayed": {"weight_decay": 0.1},
    "adam": {"scaling": "adam"},
    "paper": {name: value for name, value in ekfac.PAPER.items() if name != "lr"},
}


def advance(scheduler: Any, loss: float) -> None:
    if isinstance(scheduler, schedulers.ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


def direction(opt: ekfac.EKFAC, batch: Any, options: dict[str, Any]) -> dict[str, Tensor]:
    """What the next step on a batch divides by its lr: by an optimizer that was told that its lr is 1."""
    model = copy.deepcopy(opt.model)
    twin = ekfac.EKFAC(model, **{**options, "lr": 1.0})
    twin.load_state_dict(copy.deepcopy(opt.state_dict()))
    for group in twin.param_groups:
        group["lr"] = 1.0
    before = parameters_of(model)
    backward(model, mean_loss, batch)
    twin.step()
    twin.close()
    return {name: before[name] - p for name, p in parameters_of(model).items()}


@pytest.mark.over_a_second
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *((name, "belief") for name in SCHEDULERS),
        *((name, rule) for name in ("one cycle", "sequence") for rule in RULES if rule != "belief"),
    ],
)
@pytest.mark.parametrize("given", [True, False], ids=["lr given", "nothing set"])
def test_every_update_is_what_the_scheduler_says_times_the_direction(name: str, rule: str, given: bool) -> None:
    if name == "plateau" and not given:
        pytest.skip("it leaves no trace before it acts: see the test of its own")
    model = mlp(4, 5, 3)
    options = dict(RULES[rule])
    opt = ekfac.EKFAC(model, **options, **({"lr": 0.005} if given else {}))
    scheduler = SCHEDULERS[name](opt)
    rates = set()
    for batch in batches_for(model, (4,), n=20, steps=STEPS):
        lr = float(opt.param_groups[0]["lr"])
        rates.add(lr)
        expected = direction(opt, batch, options)
        before = parameters_of(model)
        opt.zero_grad()
        backward(model, mean_loss, batch)
        opt.step()
        moved = {name: before[name] - p for name, p in parameters_of(model).items()}
        assert_same_weights(moved, {name: lr * d for name, d in expected.items()}, 1e-12, f"update at lr {lr}")
        advance(scheduler, 1.0)
    assert len(rates) > 2, "the scheduler moved it"


#: The default of a network as narrow as those here.
RATE = 0.02


def first_steps(model: nn.Module, opt: ekfac.EKFAC, steps: int = 8) -> list[Tensor]:
    """What the steps changed, as one vector each."""
    moved = []
    for batch in batches_for(model, (4,), n=20, steps=steps):
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        opt.zero_grad()
        backward(model, mean_loss, batch)
        opt.step()
        moved.append(nn.utils.parameters_to_vector(model.parameters()).detach() - before)
    return moved


def ratios(options: dict[str, Any], prepare: Callable[[ekfac.EKFAC], Any] = lambda opt: None) -> list[float]:
    """How many times as long as with a constant lr of 0.004 an update after t applied steps is."""
    found = []
    start = mlp(4, 5, 3)
    for t in range(6):
        lengths = []
        for own in ({"lr": 0.004, "weight_decay": 0.0}, {"weight_decay": 0.0, **options}):
            model = copy.deepcopy(start)
            opt = ekfac.EKFAC(model, **own)
            if own["weight_decay"] == 0.0 and own.get("lr") != 0.004:
                prepare(opt)
            for group in opt.param_groups[1:]:
                group["lr"] = 0.0
            opt.engine.schedule.applied_steps = t
            lengths.append(float(first_steps(model, opt, steps=1)[0].norm()))
        found.append(lengths[1] / lengths[0])
    return found


def test_nothing_set_has_a_warm_up_and_a_slow_fall_of_its_own() -> None:
    expected = [RATE / 0.004 * (t + 1) / 10 / (1 + t / 100) ** 0.5 for t in range(6)]
    assert ratios({"average": False}) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("width", "rate", "warmup"), [(8, 0.02, 10), (64, 0.02, 10), (256, 0.01, 29), (4096, 0.0025, 150)]
)
def test_the_rate_falls_and_the_warm_up_grows_with_the_width(width: int, rate: float, warmup: int) -> None:
    layers = nn.Linear(width, width, device="meta"), nn.Conv1d(width, 3, 5, device="meta")
    model = nn.Sequential(*layers, nn.LayerNorm(3, device="meta"))
    assert default_lr(width_of(model)) == pytest.approx(rate)
    assert default_warmup(width_of(model)) == warmup


def test_frozen_weights_count_as_width_and_what_is_no_matrix_does_not() -> None:
    lora = nn.ModuleList(
        [nn.Linear(4096, 4096, device="meta").requires_grad_(False), nn.Linear(4096, 8, device="meta")]
    )
    vector = nn.ParameterList([torch.zeros(5)])
    assert width_of(nn.ModuleList([lora, vector])) == pytest.approx(4096)
    assert default_lr(width_of(vector)) == RATE


def test_taps_count_as_width_where_nothing_is_normalised() -> None:
    plain = nn.Sequential(nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3))
    assert width_of(plain) == pytest.approx(9 * 32)
    assert width_of(nn.Sequential(*plain, nn.BatchNorm2d(8))) == pytest.approx(32)


def test_the_rate_falls_with_the_depth_where_nothing_is_normalised() -> None:
    layers = [nn.Linear(64, 64) for _ in range(32)]
    assert ekfac.EKFAC(nn.Sequential(*layers)).defaults["lr"] == pytest.approx(RATE / 2)
    assert ekfac.EKFAC(nn.Sequential(*layers, nn.LayerNorm(64))).defaults["lr"] == RATE
    assert ekfac.EKFAC(nn.Sequential(*layers[:8])).defaults["lr"] == RATE
    assert ekfac.EKFAC(nn.Sequential(*layers), lr=0.004).defaults["lr"] == 0.004


def rows(kind: str, n: int = 16, columns: int = 512) -> Tensor:
    """Rows of one, of a sixteenth, and of all columns."""
    torch.manual_seed(1)
    x = torch.zeros(n, columns).scatter_(1, torch.randint(columns, (n, 1)), 3.0)
    if kind == "bags":
        x = torch.zeros(n, columns).scatter_(1, torch.rand(n, columns).argsort(1)[:, : columns // 16], -0.1)
    return torch.randn(n, columns) if kind == "dense" else x


@pytest.mark.parametrize(("kind", "fan_in"), [("one-hot", 8), ("bags", 8 * 32), ("dense", 512)])
def test_inputs_that_are_mostly_zero_are_narrow_from_the_second_step_on(kind: str, fan_in: int) -> None:
    def steps(model: nn.Module, opt: ekfac.EKFAC, count: int) -> None:
        for _ in range(count):
            opt.zero_grad()
            model(torch.cat([rows(kind), torch.zeros(9, 512)])).square().sum().backward()  # padding does not count
            opt.step()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
    opt, twin = ekfac.EKFAC(model), copy.deepcopy(model)
    lr, first = opt.defaults["lr"], opt.lr_schedule
    assert first == make_lr_schedule("auto", None, default_warmup(width_of(model)))
    steps(model, opt, 2)
    width = math.exp((64 * math.log(fan_in) + math.log(64)) / 65)
    assert opt.lr_schedule.warmup == default_warmup(width)
    assert opt.lr_schedule.scale * lr == pytest.approx(default_lr(width))
    assert opt.lr_schedule.factor(500) == pytest.approx(first.factor(500) * default_lr(width) / lr)
    assert opt.defaults["lr"] == opt.param_groups[0]["lr"] == lr
    if kind == "dense":
        assert opt.lr_schedule == first
    resumed = ekfac.EKFAC(copy.deepcopy(model))
    resumed.load_state_dict(opt.state_dict())
    assert resumed.lr_schedule == opt.lr_schedule
    given = ekfac.EKFAC(twin, lr=0.004)
    schedule = given.lr_schedule
    steps(twin, given, 2)
    assert given.lr_schedule == schedule


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_torchs_sparse_tensors_are_inputs_like_dense_ones(layout: torch.layout) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, 8)).double()
    twin = copy.deepcopy(model)
    found = []
    for network, sparse in ((model, True), (twin, False)):
        opt = ekfac.EKFAC(network)
        for _ in range(4):
            x = rows("one-hot").double()
            opt.zero_grad()
            network(x.to_sparse(layout=layout) if sparse else x).square().sum(1).mean().backward()
            opt.step()
        found.append(opt.lr_schedule)
    assert found[0] == found[1] and found[0].scale > 2
    assert_same_weights(parameters_of(model), parameters_of(twin), 1e-9)


def test_products_in_derivatives_of_the_network_are_no_inputs() -> None:
    """The derivative in one of 100 dense inputs has a product with one column of the first layer's weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 64), nn.Tanh(), nn.Linear(64, 1))
    opt = ekfac.EKFAC(model)
    first = opt.lr_schedule
    for _ in range(2):
        x = torch.randn(8, 100, requires_grad=True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        curved = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(40)]
        opt.zero_grad()
        (y.square().mean() + torch.stack(curved).square().mean()).backward()
        opt.step()
    assert opt.engine.schedule.derivatives and opt.lr_schedule == first


def test_the_width_is_that_of_the_first_step_that_was_taken() -> None:
    """Not of a step that was skipped, nor of one before a checkpoint of the beginning was loaded."""

    def step(model: nn.Module, opt: ekfac.EKFAC, x: Tensor) -> None:
        opt.zero_grad()
        model(x).square().sum().backward()
        opt.step()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, 8))
    opt, start = ekfac.EKFAC(model), copy.deepcopy(model.state_dict())
    saved, first = opt.state_dict(), opt.lr_schedule
    step(model, opt, torch.full((16, 512), math.nan))
    assert opt.lr_schedule == first
    step(model, opt, rows("dense"))
    assert opt.lr_schedule == first
    opt.load_state_dict(saved)
    model.load_state_dict(start)
    step(model, opt, rows("one-hot"))
    assert opt.lr_schedule.scale > 2


def test_a_checkpoint_without_a_width_or_with_a_wrong_one() -> None:
    model = mlp(4, 5, 3)
    opt = ekfac.EKFAC(model)
    saved = opt.state_dict()
    for wrong in ({"scale": 0.0, "warmup": 10}, {"scale": 1.0, "warmup": 0.5}, {"scale": 1.0}, 3):
        with pytest.raises(ValueError, match="lr_schedule"):
            opt.load_state_dict({**saved, "ekfac": {**saved["ekfac"], "lr_schedule": wrong}})
    opt.lr_schedule = replace(opt.lr_schedule, scale=2.0)
    del saved["ekfac"]["lr_schedule"]
    opt.load_state_dict(saved)
    assert opt.lr_schedule.scale == 1
    given = ekfac.EKFAC(model, lr=opt.defaults["lr"])
    warmup = opt.lr_schedule.warmup
    opt.load_state_dict(given.state_dict())  # which has no warm-up of its own to pass on
    assert opt.lr_schedule.warmup == warmup > 0


def test_layers_that_may_be_side_by_side_lookups_and_frozen_ones_are_no_depth() -> None:
    def expert() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    experts, heads = nn.ModuleList(expert() for _ in range(16)), nn.ModuleDict({"a": nn.Linear(4, 1), "b": expert()})
    tables = nn.Sequential(*[nn.Embedding(3, 4) for _ in range(9)])
    frozen = nn.Sequential(*[nn.Linear(4, 4) for _ in range(9)]).requires_grad_(False)
    model = nn.Sequential(tables, frozen, nn.Conv1d(4, 4, 1), nn.LSTM(4, 4), experts, heads)
    assert depth_of(model) == 1 + 1 + 2 + 2
    assert depth_of(nn.Flatten()) == 1


def test_a_known_end_adds_a_fall_to_zero_over_the_last_fifth() -> None:
    def expected(total: int, warmup: int) -> list[float]:
        ends = [min(1.0, (total - t) / (0.2 * total)) if t < total else 0.0 for t in range(6)]
        return [5 * min(1, (t + 1) / warmup) / (1 + t / 100) ** 0.5 * end for t, end in enumerate(ends)]

    for total, warmup in ((200, 10), (20, 2), (6, 1), (3, 1)):
        known = ratios({"total_steps": total, "step_size": ekfac.StepSize(average=False)})
        assert known == pytest.approx(expected(total, warmup), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("derivatives", [False, True])
def test_before_its_last_fifth_a_known_end_changes_nothing_but_a_long_warm_up(derivatives: bool) -> None:
    unknown, known = make_lr_schedule("auto", None, 32), make_lr_schedule("auto", 1000, 32)
    ends = {0: 1.0, 500: 1.0, 800: 1.0, 850: 0.75, 900: 0.5, 999: 0.005, 1000: 0.0, 2000: 0.0}
    for t, end in ends.items():
        assert known.factor(t, derivatives) == pytest.approx(end * unknown.factor(t, derivatives), rel=1e-9)
    assert make_lr_schedule("auto", 100, 32).factor(0, derivatives) == pytest.approx(
        3.2 * unknown.factor(0, derivatives)
    )
    assert make_lr_schedule("auto", 1, 32).factor(0, derivatives) == pytest.approx(32 * unknown.factor(0, derivatives))


def test_a_known_end_and_a_rate_or_no_decay_is_a_warm_up_and_a_cosine() -> None:
    expected = [min(1, (t + 1) / 2) * (1 + math.cos(math.pi * t / 20)) / 2 for t in range(6)]
    no_decay = ekfac.StepSize(decay_steps=None)
    assert ratios({"total_steps": 20, "step_size": no_decay}) == pytest.approx([5 * e for e in expected], rel=1e-9)
    assert ratios({"total_steps": 20, "lr": 0.008}) == pytest.approx([2 * e for e in expected], rel=1e-9)
    assert ratios({"total_steps": 3, "lr": 0.008})[3:] == pytest.approx([0.0] * 3, abs=1e-15)


def test_a_group_that_names_its_rate_falls_to_a_known_end_along_a_cosine() -> None:
    model = mlp(4, 5, 3)
    own, rest = list(model[0].parameters()), list(model[2].parameters())
    opt = ekfac.EKFAC(model, params=[{"params": own, "lr": 0.008}, {"params": rest}], total_steps=20)
    first_steps(model, opt, steps=18)
    rates = [group.lr for group in opt._rates().groups]
    cosine = 0.008 * (1 + math.cos(math.pi * 0.9)) / 2
    assert rates == pytest.approx([cosine, RATE / (1 + 18 / 100) ** 0.5 * 0.5])
    assert set(opt.average.offsets) == set(rest)


@pytest.mark.parametrize("who", ["argument", "group", "written", "scheduler", "anneal=None"])
def test_a_rate_that_somebody_names_is_that_rate(who: str) -> None:
    def prepare(opt: ekfac.EKFAC) -> None:
        if who == "written":
            opt.param_groups[0]["lr"] = 0.002
        if who == "scheduler":
            schedulers.ConstantLR(opt, factor=0.5)

    options: dict[str, Any] = {"lr": 0.002} if who == "argument" else {"anneal": None} if who == "anneal=None" else {}
    if who == "group":
        start = mlp(4, 5, 3)
        moved = []
        for lr in (0.004, 0.002):
            model = copy.deepcopy(start)
            opt = ekfac.EKFAC(model, params=[{"params": list(model.parameters()), "lr": lr}], weight_decay=0.0)
            moved.append(first_steps(model, opt, steps=1)[0])
        model = copy.deepcopy(start)
        moved.append(first_steps(model, ekfac.EKFAC(model, lr=0.004, weight_decay=0.0), steps=1)[0])
        torch.testing.assert_close(moved[0], moved[2], rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(moved[1], moved[2] / 2, rtol=1e-9, atol=1e-15)
        return
    usual = {"anneal=None": RATE / 0.004, "scheduler": 0.5 * RATE / 0.004}
    assert ratios(options, prepare) == pytest.approx([usual.get(who, 0.5)] * 6, rel=1e-9)


def test_a_plateau_takes_over_a_rate_that_nobody_named_when_it_acts() -> None:
    model = mlp(4, 5, 3)
    opt = ekfac.EKFAC(model, weight_decay=0.0)
    scheduler = schedulers.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    scheduler.step(1.0)
    scheduler.step(2.0)
    assert opt.param_groups[0]["lr"] == RATE / 2
    batch = batches_for(model, (4,), n=20, steps=1)[0]
    expected = direction(opt, batch, {"weight_decay": 0.0})
    before = parameters_of(model)
    backward(model, mean_loss, batch)
    opt.step()
    moved = {name: before[name] - p for name, p in parameters_of(model).items()}
    assert_same_weights(moved, {name: RATE / 2 * d for name, d in expected.items()}, 1e-12)


@pytest.mark.parametrize("scaling", ["belief", "adam"])
@pytest.mark.parametrize("name", ["one cycle", "cyclic"])
def test_cyclic_schedulers_move_beta_1_and_no_momentum_comes_on_top(scaling: str, name: str) -> None:
    """Against the oracle, which is told the betas that the scheduler writes."""
    probe = ekfac.EKFAC(nn.Linear(2, 2), lr=0.005)
    scheduler = SCHEDULERS[name](probe)
    rates, betas = [], []
    for _ in range(STEPS):
        rates.append(probe.param_groups[0]["lr"])
        betas.append(probe.param_groups[0]["betas"])
        probe.step()
        scheduler.step()
    assert len({b[0] for b in betas}) > 3 and {b[1] for b in betas} == {0.95}

    class Scheduled(ekfac.EKFAC):
        """Is scheduled from its first step on."""

        def __init__(self, model: nn.Module, **options: Any) -> None:
            super().__init__(model, **{**ekfac.PAPER, **options, "lr": 0.005, "betas": (0.95, 0.95)})
            self.scheduler = SCHEDULERS[name](self)

        def step(self, closure: Any = None) -> Any:
            done = super().step(closure)
            self.scheduler.step()
            return done

    model = mlp(4, 5, 3)
    opt, _ = compare_with_oracle(
        model, mean_loss, batches_for(model, (4,), n=40, steps=STEPS), tolerance=1e-8, optimizer=Scheduled,
        scaling=scaling, eps=1e-5, weight_decay=0.1, refresh_every=5,
        oracle_options={"lr": lambda t: rates[t], "betas": lambda t: betas[t]},
    )  # fmt: skip
    assert opt.param_groups[0]["momentum"] == 0
    assert not any("momentum_buffer" in opt.state[p] for p in model.parameters())


ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6}


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("name", ["none", *(n for n in SCHEDULERS if n != "plateau")])
def test_in_the_identity_basis_adam_and_decay_are_torchs_adamw(name: str, weight_decay: float) -> None:
    model = nn.Sequential(mlp(4, 5, 3), nn.PReLU(3).double())
    twin = copy.deepcopy(model)
    opt = ekfac.EKFAC(model, basis="identity", scaling="adam", weight_decay=weight_decay, **ADAMW)
    theirs = torch.optim.AdamW(twin.parameters(), weight_decay=weight_decay, **ADAMW)
    both = [] if name == "none" else [SCHEDULERS[name](opt), SCHEDULERS[name](theirs)]
    for batch in batches_for(model, (4,), n=20, steps=STEPS):
        for net, optimizer in ((model, opt), (twin, theirs)):
            optimizer.zero_grad()
            backward(net, mean_loss, batch)
            optimizer.step()
        for scheduler in both:
            scheduler.step()
        assert_same_weights(parameters_of(model), parameters_of(twin), 1e-12)


def test_decay_per_group_is_torchs_and_the_defaults_spares_vectors() -> None:
    model = mlp(4, 5, 3)
    twin = copy.deepcopy(model)

    def groups(net: nn.Sequential) -> list[dict[str, Any]]:
        return [{"params": list(net[0].parameters()), "weight_decay": 0.5}, {"params": list(net[2].parameters())}]

    opt = ekfac.EKFAC(model, params=groups(model), basis="identity", scaling="adam", weight_decay=0.1, **ADAMW)
    theirs = torch.optim.AdamW(groups(twin), weight_decay=0.1, **ADAMW)
    for batch in batches_for(model, (4,), n=20, steps=5):
        for net, optimizer in ((model, opt), (twin, theirs)):
            optimizer.zero_grad()
            backward(net, mean_loss, batch)
            optimizer.step()
    assert_same_weights(parameters_of(model), parameters_of(twin), 1e-12)

    spared = mlp(4, 5, 3)
    bare, before = copy.deepcopy(spared), parameters_of(spared)
    batch = batches_for(spared, (4,), n=8, steps=1)[0]
    for net, options in ((spared, {}), (bare, {"weight_decay": 0.0})):
        opt = ekfac.EKFAC(net, lr=0.1, **options)
        backward(net, mean_loss, batch)
        opt.step()
    for (name, p), q in zip(parameters_of(spared).items(), parameters_of(bare).values(), strict=True):
        smaller = (before[name] * (before[name] - q) > 0) & (p.dim() > 1)  # by its step in any case
        torch.testing.assert_close(p, q - 0.1 * 0.3 * before[name] * smaller, rtol=1e-12, atol=1e-14)
        assert p.dim() < 2 or 0 < int(smaller.sum()) < smaller.numel()


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_decay_only_where_somebody_asks_for_it(tied: bool) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.table = nn.Linear(4, 7, bias=False), nn.Embedding(7, 4)
            self.inner = nn.Linear(4, 4)
            if tied:
                self.table.weight = self.head.weight

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(self.inner(self.table(x)).tanh())
            return found

    ends = {}
    torch.manual_seed(0)
    words = Words().double()
    for label, decays in {"default": {}, "none": {"weight_decay": 0.0}, "asked for": {"weight_decay": 0.3}}.items():
        model = copy.deepcopy(words)
        opt = ekfac.EKFAC(model, lr=0.1, **decays)
        model(torch.arange(6)).square().mean().backward()
        opt.step()
        ends[label] = parameters_of(model)
    tables = {"head.weight"} if tied else {"table.weight"}
    for name, p in ends["default"].items():
        spared = name in tables or p.dim() < 2
        assert torch.equal(p, ends["none"][name]) == spared, name
        assert not torch.equal(p, ends["asked for"][name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("amount", [0.25, torch.tensor(0.25, dtype=torch.float64)], ids=["number", "tensor"])
def test_cautious_decay_shrinks_what_the_step_shrinks(dtype: torch.dtype, amount: float | Tensor) -> None:
    weights = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0, 0.0]], dtype=dtype)
    steps, bias = torch.tensor([[1.0, -1.0, -1.0, 1.0, 0.0, 1.0]]), torch.ones(2, dtype=dtype)
    decay([weights], [steps], amount, cautious=True)
    assert weights.tolist() == [[1.5, -1.5, 2.0, -2.0, 2.0, 0.0]]
    decay([weights, bias], [steps, torch.ones(2)], amount, cautious=False)
    assert weights.tolist() == [[1.125, -1.125, 1.5, -1.5, 1.5, 0.0]] and bias.tolist() == [0.75, 0.75]
