"""The four networks: shapes, numbers of parameters, initial variances, batch-norm where it belongs."""

import itertools

import pytest
import torch
from torch import nn

from ekfac.lab.networks import paper as networks
from ekfac.lab.networks.paper import ResidualBlock
from ekfac.lab.tasks import TASKS, pixel_cross_entropy, pixel_entropy

BUILDERS = {name: getattr(networks, name) for name in ("autoencoder", "classifier", "vgg11", "resnet34")}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def of_kind(model: nn.Module, kind: type) -> list:
    return [module for module in model.modules() if isinstance(module, kind)]


@pytest.mark.parametrize(
    ("name", "parameters", "with_batch_norm"),
    [
        # Sums of (in + 1) * out, worked out by hand; batch-norm adds two numbers a unit.
        ("autoencoder", 2_837_314, 2_837_314 + 2 * (1000 + 500 + 250 + 30 + 250 + 500 + 1000)),
        ("classifier", 47_410, 47_410 + 2 * 200),
        ("vgg11", 9_225_610, 9_225_610 + 2 * (64 + 128 + 256 + 256 + 4 * 512)),
        # With batch-norm, biases of convolutions are dropped: 21,282,122 is the usual count for 32x32 images.
        ("resnet34", 21_273_610, 21_282_122),
    ],
)
def test_number_of_parameters(name, parameters, with_batch_norm):
    assert count(BUILDERS[name]()) == parameters
    assert count(BUILDERS[name](batch_norm=True)) == with_batch_norm


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    ("name", "width", "outputs"),
    [
        ("autoencoder", 1000, 784),
        ("autoencoder", 16, 784),
        ("autoencoder", 1, 784),
        ("classifier", 3, 10),
        ("vgg11", 8, 10),
        ("resnet34", 8, 10),
    ],
)
def test_shapes(name, width, outputs, batch_norm):
    model = BUILDERS[name](width, batch_norm)
    assert model(torch.rand(4, *TASKS.get(name).input_shape)).shape == (4, outputs)
    assert bool(of_kind(model, nn.BatchNorm1d) + of_kind(model, nn.BatchNorm2d)) == batch_norm


def test_autoencoder_layers_and_its_code():
    def sizes(width):
        return [layer.out_features for layer in of_kind(networks.autoencoder(width), nn.Linear)]

    assert sizes(1000) == [1000, 500, 250, 30, 250, 500, 1000, 784]
    assert sizes(200) == [200, 100, 50, 30, 50, 100, 200, 784]
    assert sizes(40) == [40, 20, 10, 10, 10, 20, 40, 784]


def test_batch_norm_stands_before_each_hidden_sigmoid():
    for name in ("autoencoder", "classifier"):
        layers = list(BUILDERS[name](20, batch_norm=True))
        for before, after in itertools.pairwise(layers):
            assert isinstance(after, nn.Sigmoid) == isinstance(before, nn.BatchNorm1d)
        assert isinstance(layers[-1], nn.Linear)


def test_xavier_uniform_weights_and_zero_biases():
    for linear in of_kind(networks.autoencoder(), nn.Linear):
        bound = (6 / (linear.in_features + linear.out_features)) ** 0.5
        assert linear.weight.abs().max() <= bound
        assert linear.weight.var().item() == pytest.approx(bound**2 / 3, rel=0.1)
        assert not linear.bias.any()


def variance_times_fan_in(layer: nn.Module) -> float:
    return layer.weight.var().item() * layer.weight[0].numel()


def test_vgg11_starts_as_he_says():
    model = networks.vgg11()
    for layer in of_kind(model, nn.Conv2d) + of_kind(model, nn.Linear):
        assert variance_times_fan_in(layer) == pytest.approx(2, rel=0.12)
        assert not layer.bias.any()


def test_resnet34_starts_as_the_appendix_says():
    model = networks.resnet34()
    blocks = of_kind(model, ResidualBlock)
    assert len(blocks) == 16 and len(of_kind(model, nn.Conv2d)) == 1 + 32 + 3
    for block in blocks:
        assert variance_times_fan_in(block.conv1) == pytest.approx(2, rel=0.1)
        assert variance_times_fan_in(block.conv2) == pytest.approx(0.2, rel=0.1)
        if isinstance(block.shortcut, nn.Conv2d):
            assert variance_times_fan_in(block.shortcut) == pytest.approx(1, rel=0.1)
    assert variance_times_fan_in(model[0]) == pytest.approx(1, rel=0.15)
    assert variance_times_fan_in(model[-1]) == pytest.approx(1, rel=0.1)
    assert all(not layer.bias.any() for layer in of_kind(model, nn.Conv2d) + of_kind(model, nn.Linear))
    widths = [block.conv1.out_channels for block in blocks]
    assert widths == [64] * 3 + [128] * 4 + [256] * 6 + [512] * 3


def test_the_signal_passes_through_resnet34_without_batch_norm():
    torch.manual_seed(0)
    with torch.no_grad():
        output = networks.resnet34()(torch.randn(16, 3, 32, 32))
    assert 0.1 < output.std() < 10


def test_the_floor_is_the_least_loss_of_the_pixels():
    x = torch.rand(5, 784, dtype=torch.float64)
    x[0, :3] = torch.tensor([0.0, 1.0, 0.5])
    best = pixel_cross_entropy(torch.logit(x, 1e-12), x, x)
    assert torch.allclose(best, pixel_entropy(x), atol=1e-6)
    assert (pixel_cross_entropy(torch.logit(x, 1e-12) + 0.3, x, x) > pixel_entropy(x)).all()
