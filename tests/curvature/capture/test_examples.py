"""What an example is: not asked where factors are sums over positions, refused by name where it must be known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import ekfac
from ekfac.curvature.blocks import find_blocks
from ekfac.curvature.capture.capture import Capture
from ekfac.curvature.statistics import factor_sums
from helpers import compare_with_oracle, jittered
from paper import EKFAC

COMMON: dict[str, Any] = {"lr": 0.1, "damping": 0.03, "refresh_every": 2, "factor_decay": 0.6}
RULES: dict[str, dict[str, Any]] = {
    "running": {"scaling": "running", "scaling_decay": 0.8},
    "kronecker": {"scaling": "kronecker"},
    "KFAC": {"optimizer": "KFAC"},
}


class Places(nn.Module):
    """Position embeddings that all examples share."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape
        self.places, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        return self.head(torch.tanh(x + self.places(at if self.shape == "T" else at[None])))


class Masked(nn.Module):
    """A head that sees the tokens under a mask alone, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.norm = nn.Linear(4, 4), nn.Linear(4, 3), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        chosen = torch.zeros(h.shape[:2], dtype=torch.bool)
        chosen.view(-1)[::3] = True
        out = torch.zeros(*h.shape[:2], 3, dtype=h.dtype)
        out[chosen] = self.head(torch.tanh(h[chosen]))
        return out + self.norm(h)[..., :3]


class Experts(nn.Module):
    """Experts that get tokens as they come; one of them gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 4)
        to = (flat[:, 0] > 0.2).long()
        out = flat.new_zeros(len(flat), 3)
        for i, expert in enumerate(self.experts):
            out = out.index_add(0, (to == i).nonzero()[:, 0], expert(flat[to == i]))
        return out.reshape(*x.shape[:-1], 3)


class Regions(nn.Module):
    """A convolution on as many regions as are found."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(5, 3, 2, padding=1), nn.Conv1d(3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(torch.cat([h, h[:2]])).flatten(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "positions [T]": lambda: Places("T"),
    "positions [1, T]": lambda: Places("1, T"),
    "masked tokens": Masked,
    "experts": Experts,
    "regions": Regions,
}


def loss(model: nn.Module, batch: tuple[Tensor, int]) -> Tensor:
    out = model(batch[0])
    return 0.5 * (out - torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).square().sum() / len(batch[0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(7, 7, 7), (7, 5, 3, 1)])
def test_rows_of_no_example_are_summed_as_they_are(name: str, rule: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = jittered(MODELS[name]())
    steps = [[(torch.randn(n, 5, 4, dtype=torch.float64), n)] for n in sizes]
    compare_with_oracle(model, loss, steps, **COMMON, **RULES[rule])


@pytest.mark.parametrize("options", [{"scaling": "per_example"}, {"scaling": "running", "sharing": "reduce"}])
@pytest.mark.parametrize(("name", "layer"), [
    ("positions [T]", "places"), ("positions [1, T]", "places"), ("masked tokens", "head"), ("experts", "experts.0"),
    ("regions", "second"),
])  # fmt: skip
def test_rules_that_need_examples_refuse_by_name_before_anything_changes(
    name: str, layer: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    model = MODELS[name]().double()
    with EKFAC(model, lr=0.1, **options), pytest.raises(ValueError, match=rf"layer '{layer}': its input has shape"):
        model(torch.randn(7, 5, 4, dtype=torch.float64))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("n", [2, 4, 8])
def test_positions_are_not_taken_for_examples_where_there_are_as_many(n: int) -> None:
    """Eight positions, two, four or eight examples: the shape alone would allow it."""
    model = Places("T").double()
    with EKFAC(model, lr=0.1, scaling="per_example"), pytest.raises(ValueError, match=r"'places'.*position indices"):
        model(torch.randn(n, 8, 4, dtype=torch.float64))


def test_time_first_and_a_pooled_head() -> None:
    """A model of sequences [T, N, D] whose head sees [N, D], and one that is given [N, T, D], are the same."""

    class Pooled(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.body, self.head, self.dim = nn.Linear(4, 7), nn.Linear(7, 3), dim

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x)).mean(self.dim))

    torch.manual_seed(0)
    first, second = Pooled(1).double(), Pooled(0).double()
    second.load_state_dict(first.state_dict())
    options = {**COMMON, "scaling": "per_example"}
    opts = EKFAC(first, **options), EKFAC(second, batch_dim=1, **options)
    for _ in range(3):
        x = torch.randn(7, 5, 4, dtype=torch.float64)  # N is the width that the head reads, too
        for model, opt, given in ((first, opts[0], x), (second, opts[1], x.transpose(0, 1))):
            opt.zero_grad()
            model(given).square().sum(1).mean().backward()
            opt.step()
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


# --------------------------------------------------------------------------------------------------- counting


@dataclasses.dataclass
class Graph:
    nodes: Tensor

    @property
    def number(self) -> int:
        return len(self.nodes) // 2


class Anything(nn.Module):
    """Takes whatever it is given, and brings it before its layer as ``read`` says."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(3, 2), read

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.layer(input=self.read(*args, **kwargs))


def counted(model: nn.Module, run: Callable[[nn.Module], Tensor], **options: Any) -> int:
    """How many examples a backward pass brings."""
    with EKFAC(model, lr=0.1, **options) as opt:
        run(model).sum().backward()
        found = opt.engine.collector.capture.examples
        opt.step()
        return found


X = torch.randn(6, 3)


@pytest.mark.parametrize(("expected", "read", "args", "kwargs", "options"), [
    (6, lambda x: x, (X,), {}, {}),
    (6, lambda x: x, (), {"x": X}, {}),
    (6, lambda t, x: x + t, (torch.tensor(0.5), X), {}, {}),
    (6, lambda t, x: x + t, (torch.tensor([0.5]), X), {}, {}),
    (6, lambda t, x: x + t, (torch.tensor([[0.5]]),), {"x": X}, {}),
    (1, lambda t: t.expand(1, 3), (torch.ones(1, 1),), {}, {}),
    (6, lambda t, x: x + t[:, None], (torch.ones(6), X), {}, {}),
    (6, lambda g: g.nodes, (Graph(X),), {}, {}),
    (3, lambda g: g.nodes, (Graph(X),), {}, {"count": lambda g: g.number}),
    (2, lambda images: torch.stack([i.flatten()[:3] for i in images]), ([torch.ones(3, 4, 4)] * 2,), {}, {}),
    (6, lambda pair: pair[0] + pair[1], ([X, X],), {}, {}),
    (6, lambda pair: pair[0] + pair[1], ((X, X),), {}, {}),
    (4, lambda x: x.transpose(0, 1), (torch.ones(5, 4, 3),), {}, {"batch_dim": 1}),
    (3, lambda s: s.data, (pack_sequence([X[:3], X[:2], X[:1]]),), {}, {}),
])  # fmt: skip
def test_examples_are_counted(
    expected: int, read: Callable[..., Tensor], args: Any, kwargs: Any, options: dict[str, Any]
) -> None:
    assert counted(Anything(read), lambda model: model(*args, **kwargs), **options) == expected


class Autoencoder(nn.Module):
    """Is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 2), nn.Linear(2, 3)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.encoder(x))

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


@pytest.mark.parametrize("scaling", ["running", "per_example"])
@pytest.mark.parametrize("how", ["parts", "batch", "batch and parts", "batch and forward"])
def test_a_model_that_is_not_called_itself_trains_as_one_that_is(how: str, scaling: str) -> None:
    torch.manual_seed(0)
    models = [Autoencoder().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    opts = [EKFAC(m, **COMMON, scaling=scaling) for m in models]
    for step in range(4):
        x = torch.randn(6 + step, 3, dtype=torch.float64)
        for model, opt, other in zip(models, opts, (False, True), strict=True):
            opt.zero_grad()
            for part in x.split(4):  # accumulated: two batches, of unequal sizes
                if not other:
                    out = model(part)
                elif how == "parts":
                    out = model.decode(model.encode(part))
                else:
                    with opt.batch(len(part)):
                        out = model(part) if how == "batch and forward" else model.decode(model.encode(part))
                (0.5 * (out - part).square().sum() / len(x)).backward()
            assert opt.engine.collector.capture.examples == len(x)
            opt.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_bad_counts_are_refused() -> None:
    model = Anything(lambda x: x)
    for n in (0, -1, 2.5, True, None):
        with EKFAC(model, lr=0.1) as opt, pytest.raises(ValueError, match="n="), opt.batch(n):
            pass
    with EKFAC(model, lr=0.1) as opt, pytest.raises(RuntimeError, match="within"), opt.batch(2), opt.batch(2):
        pass
    with EKFAC(model, lr=0.1, count=lambda x: None), pytest.raises(ValueError, match="count= returned None"):
        model(X)


def test_a_vector_is_a_batch_of_one() -> None:
    class Query(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.project, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x * self.project(self.query))

    assert counted(Query(), lambda model: model(X)) == 6
    assert counted(Query(), lambda model: model(X[:4])) == 4  # as many as the query has numbers
    assert counted(nn.Linear(3, 2), lambda model: model(X[0])) == 1


# ----------------------------------------------------------------------------------------- packed sequences


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("sorted_", [True, False])
def test_packed_sequences_have_the_factors_of_each_sequence_by_itself(kind: type[nn.Module], sorted_: bool) -> None:
    torch.manual_seed(0)
    model = kind(3, 4, num_layers=2, bidirectional=True).double()
    blocks = find_blocks(model)
    lengths = torch.tensor([5, 4, 2] if sorted_ else [2, 5, 4])
    x = torch.randn(3, 5, 3, dtype=torch.float64)
    state = torch.randn(4, 3, 4, dtype=torch.float64)
    found: list[dict[str, Any]] = []

    def receive(block: Any, calls: Any, n: int) -> None:
        sums = factor_sums(block, calls, n, "expand", 2**20)
        old = found[-1].get(block.name, (0, 0, 0))
        found[-1][block.name] = (old[0] + sums.A, old[1] + sums.terms, old[2] + sums.B)

    capture = Capture(model, receive)
    capture.attach(blocks)

    def run(x: Any, h: Tensor) -> None:
        out, last = model(x, (h, 0.5 * h) if kind is nn.LSTM else h)
        out = out.data if not isinstance(out, Tensor) else out
        ends = last if isinstance(last, tuple) else (last,)
        (out.sin().sum() + sum((i + 1) * e.cos().sum() for i, e in enumerate(ends))).backward()
        capture.finish()
        capture.drop()

    found.append({})
    run(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=sorted_), state)
    found.append({})
    for i, length in enumerate(lengths.tolist()):
        run(x[i, :length, None], state[:, i : i + 1].contiguous())
    capture.close()
    assert found[0].keys() == found[1].keys() == {b.name for b in blocks}
    for name, one in found[0].items():
        for a, b in zip(one, found[1][name], strict=True):
            torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-10, atol=1e-12)


# --------------------------------------------------------------------------------------------- other kinds


@pytest.mark.parametrize("training", [True, False])
def test_hooks_of_seen_modules_leave_with_the_optimizer(training: bool) -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).train(training)
    opt = EKFAC(model, lr=0.1)
    opt.close()
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert F.linear is torch.nn.functional.linear


class Ragged(nn.Module):
    """Sequences of unlike lengths as one nested tensor, or as the rows that it has."""

    def __init__(self, layout: torch.layout | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.layout = nn.Linear(3, 5), nn.Linear(5, 2), layout

    def forward(self, rows: list[Tensor]) -> Tensor:
        if self.layout is None:
            return self.last(torch.relu(self.first(torch.cat(rows))))
        x = torch.nested.as_nested_tensor(rows, layout=self.layout)
        return torch.cat(self.last(torch.relu(self.first(x))).unbind())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_their_rows(layout: torch.layout) -> None:
    ends = []
    for model in (Ragged(layout).double(), Ragged(None).double()):
        opt = ekfac.EKFAC(model, lr=0.01, refresh_every=2)
        for step in range(5):
            chance = torch.Generator().manual_seed(step)
            rows = [torch.randn(n, 3, generator=chance, dtype=torch.float64) for n in (2, 4, 1, 3)]
            opt.zero_grad()
            with opt.batch(4):
                model(rows).square().mean().backward()
            opt.step()
        ends.append([p.detach() for p in model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    head, nested = nn.Linear(3, 1).double(), torch.nested.as_nested_tensor(rows, layout=layout)
    opt = ekfac.EKFAC(head)
    sum(part.sum() for part in head(nested).unbind()).backward()
    opt.step()
    assert opt.stats()["steps"] == 1
    model = Ragged(layout).double()
    opt = EKFAC(model, scaling="per_example")
    with pytest.raises(ValueError, match="layer 'first'"):
        model(rows).square().mean().backward()


class Unbatched(nn.Module):
    """A network that takes one example, without a dimension that counts them, or with one."""

    def __init__(self, *layers: nn.Module, batched: bool) -> None:
        super().__init__()
        self.layers, self.batched = nn.Sequential(*layers).double(), batched

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0] if self.batched else self.layers(x)


@pytest.mark.parametrize("rule", ["belief", "per_example"])
@pytest.mark.parametrize("kind", ["vector", "normed", "image", "transposed"])
def test_one_example_without_a_batch_is_a_batch_of_one(kind: str, rule: str) -> None:
    makes: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
        "vector": (lambda: [nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)], (6,)),
        "normed": (lambda: [nn.LayerNorm(6), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)], (6,)),
        "image": (lambda: [nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Conv2d(4, 2, 2)], (3, 4, 4)),
        "transposed": (lambda: [nn.ConvTranspose1d(4, 3, 2, stride=2), nn.Tanh(), nn.Conv1d(3, 2, 3)], (4, 4)),
    }
    make, shape = makes[kind]
    ends = []
    for batched in (True, False):
        torch.manual_seed(0)
        model = Unbatched(*make(), batched=batched)
        options: dict[str, Any] = {"lr": 0.01} if rule == "belief" else {**ekfac.PAPER, "scaling": rule}
        opt = ekfac.EKFAC(model, **{**options, "refresh_every": 2})
        for step in range(5):
            x = torch.randn(*shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            opt.zero_grad()
            model(x[None] if batched else x).square().sum().backward()
            opt.step()
        ends.append([p.detach() for p in model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
