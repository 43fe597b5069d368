"""The suite's tasks: what they are made of, and that each trains."""

import itertools
import math

import pytest
import torch

from ekfac.lab.data import text
from ekfac.lab.data.datasets import load_dataset
from ekfac.lab.networks import convolutional, dense, transformers
from ekfac.lab.optimizers import build_optimizer
from ekfac.lab.registry import LabError
from ekfac.lab.suite.tasks import TASKS, Context, images, sequences
from ekfac.lab.suite.training import averaged, spare_vectors
from lab.suite.cases import write_data

SMALL = {
    "relu-autoencoder": {"scale": 0.02, "batch_size": 20},
    "autoencoder": {"width": 20, "batch_size": 20},
    "classifier": {"width": 8, "batch_size": 20},
    "deep-plain": {"width": 8, "batch_size": 20},
    "vgg11": {"width": 2, "batch_size": 20, "bf16": False},
    "resnet18": {"width": 2, "batch_size": 20, "bf16": False},
    "depthwise": {"width": 2, "batch_size": 20},
    "vit": {"width": 8, "layers": 1, "heads": 2, "batch_size": 20, "bf16": True},
    "unet": {"width": 4, "batch_size": 20, "bf16": False},
    "gpt": {"width": 8, "layers": 1, "heads": 2, "length": 16, "batch_size": 4, "evaluated": 8, "bf16": False},
    "shakespeare": {"width": 8, "layers": 1, "heads": 2, "length": 16, "batch_size": 4, "evaluated": 8, "bf16": True},
    "lstm": {"width": 8, "embedding": 4, "length": 16, "batch_size": 4, "evaluated": 8},
    "tabular": {"width": 8, "batch_size": 20, "examples": 100},
}


def build(name, place, seed=0, **more):
    context = Context(place, torch.device("cpu"), seed)
    return TASKS.get(name)(context, **{**SMALL[name], **more})


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_trains_and_is_measured(name, official):
    problem = build(name, write_data(official))
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=1e-3)
    start = problem.evaluate()
    for batch in itertools.islice(problem.batches(0), 2):
        optimizer.zero_grad()
        problem.loss(batch).backward()
        optimizer.step()
    found = problem.evaluate()
    assert problem.model.training and found.keys() == start.keys() and found["train_loss"] != start["train_loss"]
    assert all(math.isfinite(value) for value in found.values())
    assert ("validation_accuracy" in found) == (problem.measure == "accuracy")
    assert all(p.grad is not None for p in problem.model.parameters())


@pytest.mark.parametrize("name", ["unet", "resnet18", "shakespeare", "tabular"])
def test_a_seed_decides_network_and_batches(name, official):
    place = write_data(official)
    one, same, other = build(name, place, 0), build(name, place, 0), build(name, place, 1)
    weights = [next(iter(p.model.parameters())).detach().clone() for p in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    for _ in range(2):
        firsts = [next(problem.batches(problem.seed)) for problem in (one, same, other)]
        firsts = [batch[0] if isinstance(batch, tuple) else batch for batch in firsts]
        assert torch.equal(firsts[0], firsts[1]) and not torch.equal(firsts[0], firsts[2])
    # What is measured on is the same for every seed.
    other.model.load_state_dict(one.model.state_dict())
    assert other.evaluate() == one.evaluate()


def test_an_epoch_shows_every_example_once(official):
    problem = build("classifier", write_data(official))
    assert problem.epoch == 3
    seen = torch.cat([x for x, _ in itertools.islice(problem.batches(0), 3)])
    assert torch.equal(seen.sum(1).sort().values, problem.train.x.sum(1).sort().values)


def test_losses_of_auto_encoders_are_above_the_entropy_of_the_pixels(official):
    problem = build("autoencoder", write_data(official))
    x = problem.measured["validation"].x
    logits = torch.logit(x.clamp(1e-6, 1 - 1e-6))
    problem.model = torch.nn.Module()
    problem.model.forward = lambda given: torch.logit(given.clamp(1e-6, 1 - 1e-6))
    assert logits.shape == x.shape
    assert problem.evaluate()["validation_loss"] == pytest.approx(0, abs=0.05)


def test_crops_and_flips_are_pieces_of_the_padded_images():
    x = torch.randn(12, 3, 16, 16)
    found = images.crop_and_flip(x, torch.Generator().manual_seed(3))
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    flips = set()
    for image, whole in zip(found, padded, strict=True):
        places = [
            (flip, top, left)
            for flip in (False, True)
            for top, left in itertools.product(range(5), repeat=2)
            if torch.equal(image, (whole.flip(2) if flip else whole)[:, top : top + 16, left : left + 16])
        ]
        assert len(places) == 1
        flips.add(places[0])
    assert len({flip for flip, *_ in flips}) == 2 and len(flips) > 6


def test_evaluated_windows_cover_the_stream(official):
    problem = build("lstm", write_data(official), evaluated=10_000)
    starts = problem.starts["validation"]
    assert len(starts) == (len(problem.streams["validation"]) - 1) // 16
    assert starts[0] == 0 and starts[-1] == len(problem.streams["validation"]) - 17
    batch = torch.tensor([0, 5])
    window = problem.streams["train"][:22]
    logits = problem.model(torch.stack([window[:16], window[5:21]]))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.cat([window[1:17], window[6:22]]))
    assert problem.loss(batch).item() == pytest.approx(expected.item())


def test_batches_reach_the_last_window(official):
    problem = build("lstm", write_data(official))
    starts = torch.cat(list(itertools.islice(problem.batches(0), 8000)))
    assert starts.min() == 0 and starts.max() == len(problem.streams["train"]) - 17


def test_networks_have_the_sizes_of_their_models():
    def count(model):
        return sum(p.numel() for p in model.parameters())

    with torch.device("meta"):
        assert count(convolutional.resnet18()) == 11_173_962  # as for CIFAR-10 everywhere
        nano = transformers.GPT(65, 256, 384, 6, 6, 0.2)
        assert round((count(nano) - 256 * 384) / 1e6, 2) == 10.65  # as nanoGPT prints
        big = transformers.GPT(8192, 256, 512, 8, 8, 0.0)
        assert big.head.weight is big.tokens.weight
        assert count(big) == 8192 * 512 + 256 * 512 + 8 * (12 * 512**2 + 2 * 512) + 512
        assert [m.out_channels for m in convolutional.depthwise().modules() if isinstance(m, torch.nn.Conv2d)][::3] == [
            32, 32, 64, 64, 128, 128,
        ]  # fmt: skip
    sizes = [m.out_features for m in dense.relu_autoencoder() if isinstance(m, torch.nn.Linear)]
    assert sizes == [1000, 500, 250, 30, 250, 500, 1000, 784]
    assert sum(isinstance(m, torch.nn.ReLU) for m in dense.relu_autoencoder()) == 6  # not on the code


def test_gpt_starts_as_nanogpt_does():
    torch.manual_seed(0)
    model = transformers.GPT(65, 64, 128, 8, 4, 0.0)
    for name, p in model.named_parameters():
        expected = 0.02 / 4 if name.endswith(("attention.out.weight", "down.weight")) else 0.02
        assert (p.ndim == 1 and torch.equal(p, torch.ones_like(p))) or p.std().item() == pytest.approx(
            expected, rel=0.05
        )
    x = torch.randint(65, (4, 64))
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), torch.randint(65, (256,)))
    assert loss.item() == pytest.approx(math.log(65), rel=0.02)
    changed = x.clone()
    changed[:, 40:] = 0
    assert torch.allclose(model(x)[:, :40], model(changed)[:, :40], atol=1e-5)  # causal


def test_the_made_table_is_fixed_and_can_be_learnt_but_not_by_a_line():
    x, y = sequences.made_table(25_000)
    again = sequences.made_table(25_000)
    assert torch.equal(x, again[0]) and torch.equal(y, again[1])
    assert x.mean(0).abs().max() < 1e-4 and (x.std(0) - 1).abs().max() < 1e-3 and y.std() == pytest.approx(1, abs=1e-3)
    ones = torch.cat([x, torch.ones(len(x), 1)], 1)
    line = ones @ torch.linalg.lstsq(ones, y[:, None]).solution
    assert 0.2 < (line[:, 0] - y).square().mean() < 0.9


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("classifier", {"batch_size": 61}, "batch_size must be from 1 to the 60"),
        ("classifier", {"examples": 0}, "examples must be at least 1"),
        ("relu-autoencoder", {"scale": 0.0}, "scale must be positive"),
        ("vit", {"heads": 3}, "heads must divide the width 8"),
        ("gpt", {"heads": 3}, "heads must divide the width 8"),
        ("gpt", {"vocabulary": 9000}, "vocabulary must be from 2 to 8192"),
        ("lstm", {"length": 4000}, "length must be from 1 to"),
        ("tabular", {"examples": 30_000}, "examples must be at most 20000"),
    ],
)
def test_settings_that_cannot_be_are_refused(name, settings, message, official):
    with pytest.raises(LabError, match=message):
        build(name, write_data(official), **settings)


def test_corpora_and_images_are_read_as_they_are_written(official):
    place = write_data(official)
    corpus = text.shakespeare(place)
    assert corpus.vocabulary == 26 and len(corpus.train) == 3600 and len(corpus.validation) == 400
    pieces = text.bpe(place)
    assert pieces.vocabulary == 8192 and len(pieces.train) == 3600 and int(pieces.train.max()) > 255
    small = load_dataset("cifar10-20k", place)
    assert len(small.splits["train"].x) == 150 and len(small.splits["validation"].x) == 50
    assert small.splits["train"].x.mean() == pytest.approx(0, abs=1e-4)
    # Files of the same names: each dataset finds its own.
    mnist, fashion = (load_dataset(name, place).train.x for name in ("mnist", "fashion-mnist"))
    assert mnist.shape == fashion.shape and not torch.equal(mnist, fashion)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "schedule-free", "ekfac-default"])
def test_only_matrices_decay_where_vectors_are_spared(name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    optimizer = build_optimizer(name, model, {"weight_decay": 0.1})
    spare_vectors(optimizer)
    shapes = {decay: set() for decay in (0.0, 0.1)}
    for group in optimizer.param_groups:
        shapes[group["weight_decay"]] |= {p.ndim for p in group["params"]}
    assert shapes == {0.0: {1}, 0.1: {2}}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6
    model(torch.randn(8, 4)).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    getattr(optimizer, "close", lambda: None)()


def test_what_is_measured_of_schedule_free_is_the_average_with_batch_norm_to_match(official):
    problem = build("resnet18", write_data(official))
    optimizer = build_optimizer("schedule-free", problem.model, {"lr": 0.1})
    for batch in itertools.islice(problem.batches(0), 3):
        optimizer.zero_grad()
        problem.loss(batch).backward()
        optimizer.step()
    weight = next(iter(problem.model.parameters()))
    norm = next(m for m in problem.model.modules() if isinstance(m, torch.nn.BatchNorm2d))
    training, statistics = weight.detach().clone(), norm.running_mean.clone()
    with averaged(problem, optimizer):
        assert torch.equal(weight, optimizer.state[weight]["x"]) and not torch.equal(weight, training)
        assert not torch.equal(norm.running_mean, statistics)
    assert torch.allclose(weight, training, atol=1e-6)
