"""Of very many rows, A and B take every so many-th: as many as their width needs, and without a bias."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ekfac.curvature.blocks import Block, find_blocks
from ekfac.curvature.layers.base import Call
from ekfac.curvature.statistics import ROWS, FactorSums, factor_sums, stride
from ekfac.optim.executor import Executor
from ekfac.optim.options import EngineOptions, Refresh
from ekfac.optim.statistics.samples import factor_sums as factor_sums_of_sample
from ekfac.optim.statistics.samples import factor_sums_by as taken_sums
from ekfac.optim.statistics.samples import group_samples, sample_of, sums_of_samples

MEMORY = 2**28


def linear(inputs: int = 3, outputs: int = 2) -> Block:
    (block,) = find_blocks(nn.Linear(inputs, outputs))
    return block


def sums(block: Block, x: Tensor, d: Tensor, sampled: bool) -> FactorSums:
    call = Call(block.layer, x, d)
    if sampled:  # as an optimizer takes them
        options = EngineOptions()
        return taken_sums(Executor(options, whole_steps=False), options, block, [call], len(x), replay=True)
    return factor_sums(block, [call], len(x), "expand", MEMORY)


def means(found: FactorSums, n: int) -> tuple[Tensor, Tensor]:
    return found.A / found.terms, found.B / n


@settings(max_examples=30)
@given(rows=st.integers(1, 300_000), inputs=st.sampled_from([1, 3, 2500]), outputs=st.sampled_from([1, 2, 3000]))
def test_the_stride_is_odd_and_leaves_enough_rows(rows: int, inputs: int, outputs: int) -> None:
    block = linear(inputs, outputs)
    x, d = torch.empty(rows, inputs, device="meta"), torch.empty(rows, outputs, device="meta")
    step = stride(block, [Call(block.layer, x, d)], rows)
    assert step % 2 == 1
    left = -(-rows // step)
    assert left >= min(rows, max(ROWS, 2 * (inputs + 1), 2 * outputs))
    assert step == 1 or left <= 3 * max(ROWS, 2 * (inputs + 1), 2 * outputs), "and not many more"


@pytest.mark.parametrize("rows", [1, 100, ROWS - 1, ROWS])
def test_up_to_so_many_rows_all_are_taken(rows: int) -> None:
    block = linear()
    x, d = torch.randn(rows, 3), torch.randn(rows, 2)
    whole, found = sums(block, x, d, sampled=False), sums(block, x, d, sampled=True)
    assert torch.equal(whole.A, found.A) and torch.equal(whole.B, found.B) and whole.terms == found.terms


@pytest.mark.parametrize("rows", [20 * ROWS, 20 * ROWS + 1, 33 * ROWS - 5])
def test_rows_that_are_all_alike_give_the_same_factors(rows: int) -> None:
    """The least that being without bias asks: what is left out is made up for, in A by its terms and in B by N."""
    block = linear()
    x, d = torch.tensor([1.0, -2.0, 3.0]).expand(rows, 3), torch.tensor([0.5, 4.0]).expand(rows, 2)
    found = sums(block, x, d, sampled=True)
    assert found.terms < rows
    for one, two in zip(means(sums(block, x, d, sampled=False), rows), means(found, rows), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("period", [2, 4, 6, 8, 10])
def test_rows_that_come_in_turns_are_all_met(period: int) -> None:
    """Two kinds that alternate, rows of a picture say: an even stride would see one of them only."""
    rows = 24 * ROWS
    block = linear()
    kind = (torch.arange(rows) % period < period // 2).float()[:, None]
    x, d = kind * torch.tensor([1.0, 0.0, 0.0]) + (1 - kind) * torch.tensor([0.0, 2.0, 0.0]), kind.expand(rows, 2)
    found = sums(block, x, d, sampled=True)
    assert found.terms < rows
    for one, two in zip(means(sums(block, x, d, sampled=False), rows), means(found, rows), strict=True):
        torch.testing.assert_close(one, two, rtol=0.05, atol=0.05)


def test_random_rows_give_factors_within_their_noise() -> None:
    """The error of a mean of a few thousand squares is about a fiftieth; five times that is allowed."""
    generator = torch.Generator().manual_seed(0)
    rows, block = 30 * ROWS, linear(5, 4)
    mix = torch.randn(5, 5, generator=generator)
    x, d = torch.randn(rows, 5, generator=generator) @ mix, torch.randn(rows, 4, generator=generator)
    whole, found = means(sums(block, x, d, False), rows), means(sums(block, x, d, True), rows)
    for one, two in zip(whole, found, strict=True):
        assert float((one - two).norm() / one.norm()) < 0.1


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wide", [False, True])
def test_half_precision_is_summed_as_it_was_multiplied(half: torch.dtype, bias: bool, wide: bool) -> None:
    """Autocast has turned the input into half precision: A is that of what the layer has multiplied."""
    (block,) = find_blocks(nn.Linear(5, 7, bias=bias))
    block.diagonal_B = wide
    torch.manual_seed(0)
    x, d = torch.randn(40, 3, 5), torch.randn(40, 3, 7).to(half)
    found = sums(block, x, d, sampled=True)
    expected = sums(block, x.to(half).double(), d.double(), sampled=False)
    assert found.A.dtype == found.B.dtype == torch.float32 and found.terms == expected.terms
    torch.testing.assert_close(found.A, expected.A.float(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found.B, expected.B.float(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wide", [False, True])
def test_layers_of_one_shape_are_summed_at_once(half: torch.dtype | None, bias: bool, wide: bool) -> None:
    """To the same sums as each by itself; one of another shape stays apart."""
    torch.manual_seed(0)
    options = EngineOptions()
    blocks = find_blocks(nn.Sequential(*(nn.Linear(5, 7, bias=bias) for _ in range(3)), nn.Linear(7, 5, bias=bias)))
    samples = {}
    for block in blocks:
        block.diagonal_B = wide
        x, d = torch.randn(20 * ROWS, block.layer.module.in_features), torch.randn(20 * ROWS, block.shape.out)
        call = Call(block.layer, x, d if half is None else d.to(half))
        samples[block] = [sample_of(options, block, [call], len(x))]
    executor = Executor(options, whole_steps=False)
    assert [len(of.blocks) for of in group_samples(options, samples)] == [3, 1]
    for block, found in sums_of_samples(executor, options, samples).items():
        expected = factor_sums_of_sample(options, block, samples[block][0])
        assert found.factors is not None and found.factors.terms == expected.terms
        torch.testing.assert_close(found.factors.A, expected.A, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(found.factors.B, expected.B, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [(), (3,), (2, 2)])
def test_of_batch_norm_some_examples_are_taken_with_the_statistics_of_all(
    training: bool, size: tuple[int, ...]
) -> None:
    """Every seventh of seven times the same 32 examples is each of them once."""
    torch.manual_seed(0)
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[len(size)]
    module = kind(4).train(training)
    module.running_mean.normal_()
    (block,) = find_blocks(module)
    x, d = (torch.randn(32, 4, *size).repeat(7, *(1 for _ in (4, *size))) for _ in range(2))
    sample = sample_of(EngineOptions(), block, [Call(block.layer, x, d)], len(x))
    assert sample.n == 32 and sample.scale_B == 7 and sample.step == 7
    found, whole = sums(block, x, d, sampled=True), sums(block, x, d, sampled=False)
    torch.testing.assert_close(found.A / found.terms, whole.A / whole.terms)
    torch.testing.assert_close(found.B, whole.B, rtol=1e-4, atol=1e-4)
    exact = EngineOptions(refresh=Refresh(deterministic=True))
    assert sample_of(exact, block, [Call(block.layer, x, d)], len(x)).n == len(x)
