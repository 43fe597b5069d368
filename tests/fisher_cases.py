"""Small networks with data for the tests of ``fisher``, and the dense truth by ``torch.func`` and plain loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from oracle import per_example_gradients


class Mixed(nn.Module):
    """Tokens, a norm layer, positions, and a parameter that belongs to no layer."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.embedding(tokens)) * self.scale).mean(1))


class Conv(nn.Module):
    def __init__(self, channels: int, groups: int, bias: bool, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, channels * groups, 2, padding=1, bias=bias)
        self.second = nn.Conv2d(channels * groups, groups, 2, stride=2, groups=groups)
        self.head = nn.Linear(4 * groups, classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        # In-place on purpose: what is captured must not change with it.
        return self.head(self.second(self.first(x).tanh_()).sigmoid_().flatten(1))


@dataclass(frozen=True)
class Case:
    model: nn.Module
    data: list[tuple[Tensor, Tensor]]
    loss: str

    @property
    def inputs(self) -> Tensor:
        return torch.cat([x for x, _ in self.data])

    @property
    def targets(self) -> Tensor:
        return torch.cat([y for _, y in self.data])


def labels_for(loss: str, output: Tensor) -> Tensor:
    if loss == "categorical":
        return torch.randint(output.shape[-1], output.shape[:-1])
    return torch.randn_like(output) if loss == "gaussian" else torch.rand_like(output).round()


@st.composite
def cases(draw: st.DrawFn, losses: tuple[str, ...] = ("categorical", "bernoulli", "gaussian")) -> Case:
    """A network of one of four kinds, two or three batches of unequal size, and a likelihood."""
    torch.manual_seed(draw(st.integers(0, 999)))
    kind = draw(st.sampled_from(["mlp", "convolution", "sequence", "mixed"]))
    outputs = draw(st.integers(2, 3))
    sizes = draw(st.sampled_from([(3, 4), (9, 2), (16, 8, 5)]))
    bias = draw(st.booleans())
    shape: tuple[int, ...]
    if kind == "mlp":
        d = draw(st.integers(2, 4))
        model = nn.Sequential(nn.Linear(d, 3, bias=bias), nn.Tanh(), nn.Linear(3, outputs))
        shape = (d,)
    elif kind == "convolution":
        model = Conv(draw(st.integers(1, 2)), draw(st.integers(1, 2)), bias, outputs)
        shape = (2, 3, 3)
    elif kind == "sequence":
        model = nn.Sequential(nn.Linear(2, 3, bias=bias), nn.Tanh(), nn.Linear(3, outputs))
        shape = (draw(st.integers(2, 3)), 2)
    else:
        model = Mixed(5, 3, outputs)
        shape = (4,)
    model = model.double()
    loss = draw(st.sampled_from(losses))
    data = []
    for n in sizes:
        x = torch.randint(5, (n, *shape)) if kind == "mixed" else torch.randn(n, *shape, dtype=torch.float64)
        data.append((x, labels_for(loss, model(x).detach())))
    return Case(model, data, loss)


def flat_gradients(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Rows [N, P], one gradient an example, parameters in their order."""
    gradients = per_example_gradients(model, loss, x, y)
    return torch.cat([gradients[name].flatten(1) for name, p in model.named_parameters() if p.requires_grad], 1)


def negative_log_likelihood(loss: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Of one example, summed over its terms."""

    def categorical(output: Tensor, target: Tensor) -> Tensor:
        return -output.log_softmax(-1).gather(-1, target[..., None]).sum()

    def bernoulli(output: Tensor, target: Tensor) -> Tensor:
        return -(target * nn.functional.logsigmoid(output) + (1 - target) * nn.functional.logsigmoid(-output)).sum()

    def gaussian(output: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (output - target).square().sum()

    return {"categorical": categorical, "bernoulli": bernoulli, "gaussian": gaussian}[loss]


def dense_empirical(case: Case) -> Tensor:
    rows = flat_gradients(case.model, negative_log_likelihood(case.loss), case.inputs, case.targets)
    return rows.T @ rows / len(rows)


def dense_exact(case: Case) -> Tensor:
    """The expectation over all labels of an example together, each weighted by its probability."""
    x = case.inputs
    output = case.model(x).detach()
    nll = negative_log_likelihood(case.loss)
    if case.loss == "gaussian":
        # E[(y - f)(y - f)^T] = 1: the sum over outputs of the Jacobian's outer products.
        columns = [nn.functional.one_hot(torch.tensor(i), output[0].numel()) for i in range(output[0].numel())]
        total = torch.zeros(())
        for column in columns:
            direction = column.reshape(output[0].shape).to(output)
            rows = flat_gradients(case.model, lambda o, _, d=direction: (o[0] * d).sum(), x, x)
            total = total + rows.T @ rows
        return total / len(x)
    choices = range(output.shape[-1]) if case.loss == "categorical" else range(2)
    terms = output[0].numel() // (output.shape[-1] if case.loss == "categorical" else 1)
    shape = output.shape[1:-1] if case.loss == "categorical" else output.shape[1:]
    total = torch.zeros(())
    for labels in itertools.product(choices, repeat=terms):
        y = torch.tensor(labels).reshape(shape).expand(len(x), *shape)
        y = y if case.loss == "categorical" else y.double()
        probability = torch.stack([(-nll(o, t)).exp() for o, t in zip(output, y, strict=True)])
        rows = flat_gradients(case.model, nll, x, y) * probability.sqrt()[:, None]
        total = total + rows.T @ rows
    return total / len(x)
