"""Schedule-Free AdamW against the published algorithm, written out, and against another implementation."""

import pytest
import torch

from ekfac.lab.schedule_free import ScheduleFreeAdamW


def gradient(y):
    """The gradient of a badly scaled quadratic."""
    return y * torch.arange(1, len(y) + 1, dtype=y.dtype) ** 2 - 1


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_is_the_published_algorithm(decay):
    """The paper's x, y and z kept apart, with Adam's correction of v as its authors' package has it, and warm-up."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
    optimizer = ScheduleFreeAdamW([p], lr=0.1, betas=(0.9, 0.99), weight_decay=decay)
    x = z = p.detach().clone()
    v, weights = torch.zeros_like(x), 0.0
    for t in range(1, 31):
        lr = 0.1 * min(1.0, t / 10)
        optimizer.param_groups[0]["lr"] = lr
        y = 0.1 * z + 0.9 * x
        assert torch.allclose(p, y, rtol=1e-12)
        g = gradient(y)
        p.grad = g.clone()
        optimizer.step()
        v = 0.99 * v + 0.01 * g**2
        z = z - lr * g / ((v / (1 - 0.99**t)).sqrt() + 1e-8) - lr * decay * y
        weights += lr**2  # it only grows here, so the largest so far is the present one
        c = lr**2 / weights
        x = (1 - c) * x + c * z
    optimizer.eval()
    assert torch.allclose(p, x, rtol=1e-10)
    with pytest.raises(RuntimeError, match="call train"):
        optimizer.step()
    optimizer.eval()  # a second time changes nothing
    optimizer.train()
    assert torch.allclose(p, 0.1 * z + 0.9 * x, rtol=1e-10)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_another_implementation_agrees(decay):
    package = pytest.importorskip("pytorch_optimizer")
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64)) for _ in range(2))
    mine = ScheduleFreeAdamW([ours], lr=0.05, betas=(0.9, 0.999), weight_decay=decay)
    other = package.ScheduleFreeAdamW([theirs], lr=0.05, betas=(0.9, 0.999), weight_decay=decay)
    other.train()
    for _ in range(20):
        for p, optimizer in ((ours, mine), (theirs, other)):
            p.grad = gradient(p.detach())
            optimizer.step()
    assert torch.allclose(ours, theirs, rtol=1e-6)
    mine.eval()
    other.eval()
    assert torch.allclose(ours, theirs, rtol=1e-6)


def test_the_authors_package_agrees():
    package = pytest.importorskip("schedulefree")
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64)) for _ in range(2))
    mine = ScheduleFreeAdamW([ours], lr=0.05, weight_decay=0.1)
    other = package.AdamWScheduleFree([theirs], lr=0.05, weight_decay=0.1)
    other.train()
    for _ in range(20):
        for p, optimizer in ((ours, mine), (theirs, other)):
            p.grad = gradient(p.detach())
            optimizer.step()
    assert torch.allclose(ours, theirs, rtol=1e-10)


@pytest.mark.parametrize("options", [{"betas": (0.0, 0.9)}, {"betas": (0.9, 1.0)}, {"lr": -1.0}, {"weight_decay": -1}])
def test_bad_values_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ScheduleFreeAdamW([torch.nn.Parameter(torch.zeros(2))], **options)


def test_parameters_without_gradients_are_left_alone():
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = ScheduleFreeAdamW([used, unused], lr=0.1)
    used.grad = torch.ones(2)
    optimizer.step()
    optimizer.eval()
    optimizer.train()
    assert torch.equal(unused, torch.ones(2)) and not torch.equal(used, torch.ones(2))
