"""Both exact routes to s*, whole and in chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ekfac.curvature import scaling


@settings(max_examples=20)
@given(
    n=st.integers(1, 5),
    s=st.integers(1, 9),
    g=st.integers(1, 3),
    o=st.integers(1, 4),
    c=st.integers(1, 5),
    memory=st.sampled_from([1, 500, 10**9]),
    seed=st.integers(0, 99),
)
def test_both_routes_sum_over_positions_then_square(
    n: int, s: int, g: int, o: int, c: int, memory: int, seed: int
) -> None:
    torch.manual_seed(seed)
    h, delta = (torch.randn(n, s, g, k, dtype=torch.float64) for k in (c, o))
    expected = torch.zeros(g, o, c, dtype=torch.float64)
    for example in range(n):
        gradient = torch.zeros(g, o, c, dtype=torch.float64)
        for position in range(s):
            gradient += delta[example, position].unsqueeze(-1) * h[example, position].unsqueeze(-2)
        expected += gradient.square()
    for route in (scaling.by_gram, scaling.by_examples):
        torch.testing.assert_close(route(h, delta, memory), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 7, 64])
@pytest.mark.parametrize("memory", [1, 10, 33, 10**6])
def test_chunks_cover_everything_once_and_fit(n: int, memory: int) -> None:
    pieces = scaling.chunks(n, 10, memory)
    assert [i for start, stop in pieces for i in range(start, stop)] == list(range(n))
    assert all((stop - start) * 10 <= max(memory, 10) for start, stop in pieces)
