"""ekfac.doctor: measures what it says it does, on copies only; bad input is refused with a reason."""

import json
import math
import random
import shlex
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ekfac
from ekfac.cli import main as cli
from ekfac.curvature import statistics
from ekfac.curvature.blocks import find_blocks
from ekfac.diagnosis import doctor as diagnosis
from ekfac.diagnosis import probe as probe_module
from ekfac.diagnosis.probe import Prices, Probe, Trial, work_due
from ekfac.optim.statistics import refresh as refresh_module

QUICK = {"steps": 10, "trial_steps": 3}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int = 12, size: int = 16) -> list:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 3, generator=generator)
    x = torch.randn(count * size, 6, generator=generator)
    y = (x @ weight).argmax(1)
    return list(zip(x.split(size), y.split(size), strict=True))


def test_the_page_and_the_data_are_whole():
    found = ekfac.doctor(network(), batches(), F.cross_entropy, steps=50)
    assert found.last_loss < found.first_loss and found.steps == 50 and found.drift_steps == 10
    assert 0 < found.reduction_ratio < 2 and 0 < found.drift <= 1 and found.captured_bytes > 0
    assert found.noise_scale > 0 and found.works and set(found.settings) <= {"lr", "refresh_every"}
    page = str(found)
    for words in ("83 parameters, batches of 16", "noise scale", "actual over predicted", "drift of the basis"):
        assert words in page
    assert "to use: EKFAC(model" in page and "times Adam's" in page
    assert "the given lr and damping if they reach 80% of the best decrease of the loss; else, of all within 2%" in page
    assert "add at most 50% to a step; else the smallest at which they add at most 10%" in page
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [row["name"] for row in data["blocks"]] == ["0", "2"] and data["state_bytes"] == found.summary.bytes
    assert data["price_at"]["1"] == pytest.approx(found.prices.at(1)) and len(data["trials"]) >= 3
    best = min(data["trials"], key=lambda trial: trial["loss"])
    chosen = [t for t in found.trials if t.lr == found.settings.get("lr", found.trials[1].lr)]  # the given
    assert chosen[0].loss <= best["loss"] + diagnosis.KEPT * (found.first_loss - best["loss"]) + 1e-9


def test_model_gradients_hooks_and_random_numbers_are_left_alone():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)).eval()
    data = TensorDataset(torch.cat([x for x, _ in batches()]), torch.cat([y for _, y in batches()]))
    loader = DataLoader(data, 16, shuffle=True, generator=torch.Generator().manual_seed(3))
    model(data.tensors[0][:4]).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    expected = [torch.rand(3), random.random(), numpy.random.rand(), loader.generator.get_state()]
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    ekfac.doctor(model, loader, F.cross_entropy, **QUICK)
    now = [torch.rand(3), random.random(), numpy.random.rand(), loader.generator.get_state()]
    assert torch.equal(now[0], expected[0]) and now[1:3] == expected[1:3] and torch.equal(now[3], expected[3])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert not model.training and not any(module._forward_hooks for module in model.modules())


@pytest.fixture(scope="module")
def quick():
    """A quick diagnosis, and what it said on its way."""
    said = []
    return ekfac.doctor(network(), batches(), F.cross_entropy, **QUICK, say=said.append), said


def test_the_same_call_finds_the_same_settings(quick):
    one, two = quick[0], ekfac.doctor(network(), batches(), F.cross_entropy, **QUICK)
    assert one.trials == two.trials and one.noise_scale == two.noise_scale and one.drift == two.drift


def test_a_loss_per_example_is_its_mean(quick):
    def each(output, y):
        return F.cross_entropy(output, y, reduction="none")

    found = ekfac.doctor(network(), batches(), each, **QUICK)
    assert found.last_loss == pytest.approx(quick[0].last_loss, rel=1e-4)


@pytest.mark.parametrize("count", [1, 8])
def test_the_noise_scale_is_that_of_single_examples(count):
    # One number to learn: the gradient is 2 (w - y), of variance 4 and mean 2 (w - 0).
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    y = torch.randn(80_000, 1, generator=torch.Generator().manual_seed(0))
    data = list(zip(torch.ones_like(y).chunk(count), y.chunk(count), strict=True))
    probe = Probe(model, data, lambda o, t: (o - t).square().mean(), 50, {})
    # Two halves tell less than eight batches, but both tell it without bias.
    found = [probe.noise_scale(model)]
    if count == 1:
        for seed in range(40):
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
            probe.batches = Probe(model, [(data[0][0][order], data[0][1][order])], probe.loss_of, 1, {}).batches
            found.append(probe.noise_scale(model))
    assert sum(found) / len(found) == pytest.approx(4 / 1.0, rel=0.6 if count == 8 else 0.3)


def test_one_example_has_no_noise_scale_and_pure_noise_an_infinite_one():
    probe = Probe(nn.Linear(1, 1), [(torch.ones(1, 1), torch.ones(1, 1))], F.mse_loss, 50, {})
    assert probe.noise_scale(probe.model) is None
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    opposite = [(torch.ones(2, 1), torch.full((2, 1), sign)) for sign in (1.0, -1.0)]
    assert Probe(model, opposite, F.mse_loss, 50, {}).noise_scale(model) == math.inf
    assert "more examples than were read" in diagnosis._examples(math.inf)


def test_a_tiny_step_falls_as_the_quadratic_model_says():
    model = network().double()
    data = [(x.double(), y) for x, y in batches()]
    found = Probe(model, data, F.cross_entropy, 10, {"lr": 1e-7}).course(10, 2)
    assert found.actual / found.predicted == pytest.approx(1, abs=1e-3)


def test_the_prediction_is_slope_and_half_the_bend():
    probe = Probe(network().double(), [(x.double(), y) for x, y in batches()], F.cross_entropy, 10, {"lr": 0.3})
    optimizer, twin = probe.optimizer(), probe.optimizer()
    actual, predicted = probe._checked_step(optimizer, 0)
    before = torch.nn.utils.parameters_to_vector(twin.model.parameters()).detach().clone()
    probe.step(twin, twin.model, 0)
    g = torch.cat([p.grad.flatten() for p in twin.model.parameters()])
    d = torch.nn.utils.parameters_to_vector(twin.model.parameters()).detach() - before
    assert predicted == pytest.approx(float(-g @ d - d @ (twin.curvature() @ d) / 2))
    with torch.no_grad(), twin.paused():
        x, y = probe.batches[0].args[0], probe.batches[0].target
        fall = F.cross_entropy(probe.model(x), y) - F.cross_entropy(twin.model(x), y)
    assert actual == pytest.approx(fall.item())


def test_the_interval_is_the_shortest_that_is_affordable():
    assert diagnosis._interval(Prices(1.0, 2.0, 2.0, 12.0)) == 50  # 2.2 <= 1.1 x 2
    assert diagnosis._interval(Prices(1.0, 2.0, 1.8, 1.9)) == 1
    assert diagnosis._interval(Prices(1.0, 1.0, 1.0, 1e6)) == 500
    assert diagnosis._interval(Prices(1.0, 2.0, 2.0, 12.0), given=20) == 20  # 2.5 <= 1.5 x 2
    assert diagnosis._interval(Prices(1.0, 2.0, 2.0, 12.0), given=5) == 50


def test_a_price_has_its_share_of_statistics_and_of_renewals():
    assert Prices(1.0, 2.0, 2.0, 12.0).at(5) == 4.0
    prices = Prices(1.0, 2.0, 6.0, 16.0)
    assert prices.at(1) == 16.0  # both at every step
    assert prices.at(8) == 2 + 4 / 2 + 10 / 8  # statistics four times in an interval
    assert Prices(1.0, 2.0, 6.0, 16.0, factor_every=1).at(100) == 2 + 4 + 10 / 100
    assert Prices(1.0, 2.0, 6.0, 16.0, wide=0.5).at(100) == 2 + 4 / 25 + 5 / 100
    every = [prices.at(interval) for interval in diagnosis.INTERVALS]
    assert every == sorted(every, reverse=True) and len(set(every)) == len(every)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_steps_that_are_timed_do_what_their_price_is_for(deterministic, monkeypatch):
    """By a clock that counts: 1 for a step, 10 for a layer's statistics, 1,000 for a side that is renewed."""
    now = [0.0]
    monkeypatch.setattr(probe_module.time, "perf_counter", lambda: now[0])

    def charged(function, price):
        def charge(*arguments, **more):
            now[0] += price
            return function(*arguments, **more)

        return charge

    solver = "eigh_with_fallback" if deterministic else "orthogonal_iteration"
    monkeypatch.setattr(refresh_module, solver, charged(getattr(refresh_module, solver), 1000))
    monkeypatch.setattr(statistics, "factor_sums", charged(statistics.factor_sums, 10))
    probe = Probe(network(), batches(), F.cross_entropy, 10, {"deterministic": deterministic})
    monkeypatch.setattr(probe, "step", charged(probe.step, 1))
    prices = probe.prices()
    assert (prices.adam, prices.plain, prices.statistics, prices.renewing) == (1, 1, 1 + 20, 1 + 20 + 4000)
    assert prices.wide == 1 and prices.at(8) == 1 + 20 / 2 + 4000 / 8


def test_wide_sides_are_priced_as_rarely_as_they_are_renewed():
    wide = nn.Linear(1131, 2, bias=False)  # 1,131 columns, on a CPU: (1,131 / 400)^2 = 8 intervals
    assert work_due(find_blocks(wide)) == pytest.approx(1 / 8, rel=1e-6)
    assert work_due(find_blocks(network())) == 1
    assert work_due(find_blocks(nn.Linear(5000, 2, bias=False), max_factor_dim=4096)) == 1  # kept diagonal
    assert work_due([]) == 1


def test_of_equal_trials_the_careful_one_is_chosen():
    trials = [Trial(0.1, 0.1, 1.0), Trial(0.1, 1.0, 1.01), Trial(0.01, 1.0, 1.01), Trial(0.01, 9.0, 1.5)]
    assert diagnosis._chosen(trials, first=2.0) == trials[2]
    assert diagnosis._chosen([Trial(1, 1, math.inf), Trial(1, 2, 3.0)], first=2.0).damping == 2


def test_what_was_given_is_kept_where_it_does_nearly_as_well():
    trials = [Trial(0.1, 0.1, 1.0), Trial(0.2, 0.1, 1.15)]
    assert diagnosis._chosen(trials, first=2.0, given=(0.2, 0.1)) == trials[1]
    assert diagnosis._chosen(trials, first=1.5, given=(0.2, 0.1)) == trials[0]


@pytest.mark.parametrize(
    ("options", "settings", "call"),
    [
        ({}, {"lr": 0.01, "damping": 1e-8, "refresh_every": 50}, "EKFAC(model, lr=0.01, refresh_every=50)"),
        (
            {"sua": True},
            {"lr": 0.03, "damping": 1e-8, "refresh_every": 20},
            "EKFAC(model, coverage=ekfac.Coverage(sua=True), lr=0.03, refresh_every=20)",
        ),
        (ekfac.PAPER, {"lr": 0.01, "damping": 1e-3, "refresh_every": 50}, "EKFAC(model, **ekfac.PAPER)"),
        (
            {**ekfac.PAPER, "sua": True},
            {"lr": 0.03, "damping": 1e-3, "refresh_every": 50},
            'EKFAC(model, **ekfac.PAPER | {"lr": 0.03, "coverage": ekfac.Coverage(sua=True)})',
        ),
    ],
)
def test_the_call_to_use_makes_the_optimizer_that_was_tried(options, settings, call):
    assert diagnosis._call(dict(options), settings) == call
    made = eval(call, {"EKFAC": ekfac.EKFAC, "ekfac": ekfac, "model": network()})
    group = made.param_groups[0]
    assert (group["lr"], group["damping"]) == (settings["lr"], settings["damping"])
    assert made.engine.schedule.intervals.every == settings["refresh_every"]
    assert made.engine.options.refresh == options.get("refresh", ekfac.Refresh())
    made.close()


def test_the_grid_goes_on_where_its_best_is_on_the_edge():
    found = ekfac.doctor(network(), batches(), F.cross_entropy, **QUICK, lr=1e-4)
    assert len(found.trials) > 3 and found.settings["lr"] > 4e-4


@pytest.mark.parametrize(("options", "dampings"), [({}, 1), ({"scaling": "running"}, 3)], ids=str)
def test_damping_is_varied_for_rules_that_read_it(options, dampings):
    found = ekfac.doctor(network(), batches(), F.cross_entropy, **QUICK, **options)
    tried = {trial.damping for trial in found.trials}
    assert len(tried) == 1 if dampings == 1 else len(tried) >= dampings


def test_what_does_well_as_given_is_left_as_it_is(monkeypatch):
    """A rate that is named would be constant; the default one has a course."""
    monkeypatch.setattr(diagnosis, "KEPT", 1.0)
    monkeypatch.setattr(diagnosis, "BEARABLE", 1e9)
    found = ekfac.doctor(network(), batches(), F.cross_entropy, **QUICK)
    assert found.works and found.settings == {} and "to use: EKFAC(model)\n" in str(found)


def test_nothing_is_recommended_where_nothing_helps():
    found = ekfac.doctor(network(), batches(), F.cross_entropy, **QUICK, lr=1e6, trust=None, pace=None)
    assert found.settings == {} and "no setting lowered the loss" in found.notes[0]
    assert "to use" not in str(found)
    json.dumps(found.to_dict(), allow_nan=False)


def test_many_blocks_are_counted_instead_of_listed():
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(12)], nn.LayerNorm(6), nn.Linear(6, 3))
    page = str(ekfac.doctor(model, batches(), F.cross_entropy, **QUICK))
    assert "14 blocks: 13 kronecker, 1 exact" in page


def test_mappings_and_batches_without_a_target():
    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, features):
            return self.inner(features)

    keyed = [{"features": x, "labels": y} for x, y in batches()]
    assert ekfac.doctor(Keyed(), keyed, F.cross_entropy, **QUICK).batch_size == 16
    alone = [x for x, _ in batches()]
    assert ekfac.doctor(network(), alone, lambda output: output.square().mean(), **QUICK).batch_size == 16


BAD = [
    ({"loader": []}, ValueError, "the loader is empty"),
    ({"loader": [3]}, TypeError, "a batch is a int"),
    ({"loss": lambda o, y: o}, ValueError, r"one number, .* or one for each of the 16 examples; .* shape \(16, 3\)"),
    ({"loss": lambda o, y: o.sum(0)}, ValueError, r"shape \(3,\)"),
    ({"loss": lambda o, y: o.sum().item()}, ValueError, "must return a tensor of floating-point numbers"),
    ({"loss": lambda o, y: torch.zeros(())}, ValueError, "does not depend on the model's parameters"),
    ({"loss": lambda o, y: o.sum() * math.nan}, ValueError, "the loss is nan before the first step"),
    ({"loss": None}, ValueError, "loss=None must be a function"),
    ({"model": nn.Tanh()}, ValueError, "no parameters to train"),
    ({"steps": 4}, ValueError, "steps=4 must be a whole number >= 5"),
    ({"trial_steps": 0}, ValueError, "trial_steps=0"),
    ({"loss_reduction": "sum"}, ValueError, "means over the examples"),
    ({"damping": lambda step: 1.0}, ValueError, "must be a number, not a function"),
    ({"damping": -1.0}, ValueError, "damping=-1.0"),
    ({"no_such": 1}, TypeError, "no_such"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD, ids=lambda value: str(value)[:30])
def test_bad_input_is_refused_with_a_reason(changes, kind, message):
    given = {"model": network(), "loader": batches(), "loss": F.cross_entropy, **QUICK, **changes}
    with pytest.raises(kind, match=message):
        ekfac.doctor(**given)


def test_the_command_prints_a_page_or_json(capsys):
    plugin = str(Path(__file__).parents[1] / "lab" / "tiny_plugin.py")
    words = ["doctor", "tiny", "--plugin", plugin, "--steps", "10", "--trial-steps", "3"]
    assert cli.run(words) == 0
    assert "tiny by ekfac-default: 23 parameters, batches of 10; 10 probe steps" in capsys.readouterr().out
    assert cli.run([*words, "--width", "2", "--batch-size", "20", "--set", "momentum=0.5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["task"] == "tiny" and data["batch_size"] == 20 and data["steps"] == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gan"], "unknown task 'gan'"),
        (["classifier", "--optimizer", "adam"], "doctor examines EKFAC"),
        (["classifier", "--steps", "2"], "steps=2 must be a whole number >= 5"),
        (["classifier", "--limit", "9999"], "limit 9999 is more than"),
        (["classifier", "--set", "no_such=1"], "no_such"),
        (["charlm", "--batch-norm"], "no variant with batch-norm"),
    ],
)
def test_a_bad_command_is_one_line(words, message, capsys):
    assert cli.run(["doctor", *words]) == 2
    answer = capsys.readouterr()
    assert message in answer.err and answer.err.count("\n") == 1


def test_it_is_imported_when_it_is_asked_for():
    code = (
        "import sys, ekfac\n"
        "assert 'ekfac.diagnosis.doctor' not in sys.modules\n"
        "assert callable(ekfac.doctor)\n"
        "from ekfac.diagnosis.doctor import Diagnosis\n"
        "assert callable(ekfac.doctor) and not hasattr(ekfac, 'nurse')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_says_what_it_does_from_the_start_and_ends_with_lines_to_paste(quick, capsys):
    found, said = quick
    assert said[0] == "reading batches" and said[-1] == "timing steps"
    assert sum(line.startswith("short run") for line in said) == len(found.trials)
    plugin = str(Path(__file__).parents[1] / "lab" / "tiny_plugin.py")
    assert cli.run(["doctor", "tiny", "--plugin", plugin, "--steps", "10", "--trial-steps", "3"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[:2] == ["loading data", "reading batches"]
    *_, train_line, python_line = shown.out.strip().splitlines()
    assert train_line.strip().startswith("ekfac train tiny") and "--lr" in train_line
    assert python_line.strip().startswith("opt = ekfac.EKFAC(model")
    assert cli.run([*shlex.split(train_line)[1:], "--epochs", "1", "--device", "cpu"]) == 0
    eval(python_line.split("=", 1)[1].strip(), {"ekfac": ekfac, "model": network()}).close()
