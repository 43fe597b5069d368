"""When bases are renewed: often at first, then in turns; and again where one iteration was not enough."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ekfac
from ekfac.optim.executor import Readback
from ekfac.optim.methods.rules import PerExample
from ekfac.optim.statistics import schedule
from ekfac.optim.statistics.refresh import Renewal
from ekfac.optim.statistics.schedule import (
    BATCHES,
    DENSE,
    EARLY,
    LATER,
    SETTLED,
    START,
    TRIES,
    Intervals,
    early_steps,
)
from ekfac.optim.types import BlockStep, EigenState, GroupRates


def trained(steps: int, ask: bool = False, **options: object) -> ekfac.EKFAC:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    opt = ekfac.EKFAC(model, **options)
    for _ in range(steps):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(40, 6).double()), torch.randint(3, (40,)))
        loss.backward()
        opt.step()
        if ask:
            opt.stats()
    return opt


def refresh_warm(opt: ekfac.EKFAC, iterations: tuple[int, int], ok: Tensor | None = None) -> None:
    engine, block = opt.engine, opt.engine.partition.blocks[0]
    state = engine.partition.state(block)
    renewal = Renewal((block,), state, iterations, 1e-8)
    engine.method.warm_refresh([renewal], engine.refresher, ok)


def test_bases_turn_together_at_growing_intervals() -> None:
    steps = sorted(early_steps(20))
    assert steps[:EARLY] == list(range(EARLY)) and max(steps) < START
    gaps = [b - a for a, b in itertools.pairwise(steps[EARLY:])]
    assert all(abs(after - 1.15 * before) <= 2 for before, after in itertools.pairwise(gaps))
    opt = ekfac.EKFAC(nn.Linear(3, 2), refresh=ekfac.Refresh(deterministic=True))
    assert not opt.engine.schedule.due()[1]


@pytest.mark.parametrize("every", [3, 20])
def test_every_side_of_every_block_turns_once_in_an_interval(every: int) -> None:
    intervals = Intervals(every, deterministic=False)
    for blocks in (1, 4):
        for index in range(blocks):
            found = [intervals.warm_after(t, index, blocks) for t in range(100 * every, 101 * every)]
            assert [sum(side) for side in zip(*found, strict=True)] == [1, 1]


def test_the_interval_doubles_when_training_has_settled() -> None:
    intervals = Intervals(20, deterministic=False, later=LATER)
    taken = [t for t in range(260, 420) if intervals.takes_factors(t, None)]
    assert taken == [*range(260, 300, 5), *range(300, 420, 20)]
    for index in range(4):
        turned = [t for t in range(SETTLED, SETTLED + 160) if any(intervals.warm_after(t, index, 4))]
        assert len(turned) == 4 and {b - a for a, b in itertools.pairwise(turned)} == {40}
        assert sum(any(intervals.warm_after(t, index, 4)) for t in range(SETTLED - 80, SETTLED)) == 4


@pytest.mark.parametrize("fixed", [{"refresh_every": 20}, {"refresh": ekfac.Refresh(deterministic=True)}])
def test_an_interval_that_is_given_stays(fixed: dict[str, Any]) -> None:
    assert ekfac.EKFAC(nn.Linear(3, 2)).engine.schedule.intervals.later == LATER
    assert ekfac.EKFAC(nn.Linear(3, 2), **fixed).engine.schedule.intervals.later == 1


def test_a_basis_that_strays_is_turned_again_and_then_solved_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = trained(30, refresh_every=1000).stats()
    assert calm["refreshes"] == 2, "each block once, at the start"
    monkeypatch.setattr(schedule, "TOLERANCE", -1.0)
    opt = trained(30, refresh_every=1000)
    stats = opt.stats()
    assert stats["refreshes"] > calm["refreshes"]
    assert stats["warm_refreshes"] > calm["warm_refreshes"]
    assert stats["refreshes"] <= 2 + 2 * 30 / TRIES, "no more often than after so many tries"


def test_one_stray_turn_costs_no_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    opt = trained(12, refresh_every=1000)
    before = opt.stats()
    block = opt.engine.partition.blocks[0]
    opt.engine.schedule.pending.append(([block], Readback(torch.tensor([0.9]))))
    model = opt.model
    for _ in range(2):
        opt.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(40, 6).double()), torch.randint(3, (40,))).backward()
        opt.step()
    assert opt.stats()["refreshes"] == before["refreshes"]
    assert opt.stats()["warm_refreshes"] >= before["warm_refreshes"] + 1
    assert opt.state[block.key].strayed == 0


def test_s_star_is_taken_in_the_basis_that_it_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a step that solves for the basis because of what was heard since the last one."""
    monkeypatch.setattr(schedule, "TOLERANCE", -1.0)
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    opt = ekfac.EKFAC(model, scaling="per_example", refresh_every=1000)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    observe = PerExample.observe

    def spy(rule: PerExample, state: EigenState, step: BlockStep) -> None:
        assert step.s_star is not None
        seen.append((state.U_A[0].clone(), state.U_B[0].clone(), step.s_star[0].clone()))
        observe(rule, state, step)

    monkeypatch.setattr(PerExample, "observe", spy)
    for _ in range(20):
        x, y = torch.randn(40, 6).double(), torch.randint(3, (40,))
        opt.zero_grad()
        z = model(x)
        nn.functional.cross_entropy(z, y).backward()
        opt.step()
        h = torch.cat([x, torch.ones(40, 1).double()], 1)
        delta = z.detach().softmax(1) - nn.functional.one_hot(y, 3)
        U_A, U_B, s_star = seen[-1]
        expected = (delta @ U_B).square().T @ (h @ U_A).square() / 40
        torch.testing.assert_close(s_star, expected, rtol=1e-9, atol=1e-14)
    assert opt.stats()["refreshes"] > 2


def test_what_is_heard_counts_between_steps_whenever_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "TOLERANCE", -1.0)
    quiet, asked = trained(25, refresh_every=7), trained(25, ask=True, refresh_every=7)
    assert quiet.stats()["refreshes"] == asked.stats()["refreshes"] > 2
    for p, q in zip(quiet.model.parameters(), asked.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_new_basis_keeps_the_place_of_the_count_that_a_captured_step_holds() -> None:
    rule, state = PerExample(decay=0.9), EigenState()
    step = BlockStep(torch.ones(1, 3, 2), 1.0, GroupRates(1.0, 1.0), s_star=torch.ones(1, 3, 2))
    for _ in range(2):
        rule.start(state, torch.ones(1, 3, 2))
        place = state.count.data_ptr()
        rule.observe(state, step)
        assert float(state.count) == 1 and state.count.data_ptr() == place
    rule.start(state, torch.ones(1, 3, 2))
    assert float(state.count) == 0 and state.count.data_ptr() == place


@pytest.mark.parametrize(("every", "given", "then", "later"), [(50, None, 12, 25), (4, None, 1, 2), (50, 3, 3, 3)])
def test_the_factors_take_in_every_batch_of_the_start(every: int, given: int | None, then: int, later: int) -> None:
    opt = ekfac.EKFAC(nn.Linear(3, 2), refresh_every=every, factor_every=given)
    block = opt.engine.partition.blocks[0]

    def taken(start: int) -> list[bool]:
        found = []
        for step in range(start, start + 12):
            opt.engine.schedule.applied_steps = step
            found.append(opt.engine.schedule.takes_factors(block))
        return found

    opt.state[block.key] = EigenState({"S_A": torch.ones(1, 4), "A": torch.ones(1, 4, 4)})  # its first basis is there
    assert taken(240) == [step % then == 0 for step in range(240, 252)]
    assert taken(1200) == [step % later == 0 for step in range(1200, 1212)]
    if given is None:
        assert all(taken(0))


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 41])
@pytest.mark.parametrize("deterministic", [False, True])
def test_four_batches_in_an_interval(interval: int, deterministic: bool) -> None:
    intervals, first = Intervals(BATCHES * interval, deterministic), -(-DENSE // interval) * interval
    assert sum(intervals.takes_factors(step, None) for step in range(first, first + interval)) == 1
    twice = 1 if deterministic else 2  # once training has settled, every other of them
    assert sum(intervals.takes_factors(step, None) for step in range(1000 * interval, (1000 + twice) * interval)) == 1
    assert intervals.takes_factors(DENSE - 1, None)
    assert [intervals.takes_factors(step, 3) for step in range(300, 306)] == [True, False, False] * 2


def taken_after_the_start(train: Callable[[ekfac.EKFAC, nn.Sequential, int], None], steps: int) -> dict[str, list[int]]:
    """Train a network of four layers; in which of the steps from START on each layer's A and B took in the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(6, 6), nn.Tanh())]).double()
    opt = ekfac.EKFAC(model, lr=1e-3, refresh_every=16)
    for step in range(12):
        train(opt, model, step)
    opt.engine.schedule.applied_steps = START
    taken: dict[str, list[int]] = {"0": [], "2": [], "4": [], "6": []}
    for step in range(START, START + steps):
        before = {b.name: opt.state[b.key]["A"].clone() for b in opt.engine.partition.blocks if b.covered}
        train(opt, model, step)
        for block in opt.engine.partition.blocks:
            if block.covered and block.name in before and not opt.state[block.key]["A"].equal(before[block.name]):
                taken[block.name].append(step)
    return taken


def plain_step(opt: ekfac.EKFAC, model: nn.Sequential, step: int) -> None:
    opt.zero_grad()
    model(torch.randn(16, 6).double()).square().sum(1).mean().backward()
    opt.step()


def test_all_layers_take_in_the_same_batches() -> None:
    taken = taken_after_the_start(plain_step, 16)
    assert taken == {str(2 * i): list(range(START, START + 16, 4)) for i in range(4)}


def test_sides_that_are_kept_diagonal_say_nothing_of_how_near_the_basis_is() -> None:
    torch.manual_seed(0)
    model = nn.Embedding(7, 3).double()
    opt = ekfac.EKFAC(model)
    model(torch.randint(7, (16,))).square().sum(1).mean().backward()
    opt.step()
    engine = opt.engine
    turned, (block,) = engine.schedule.warm_refreshes, engine.partition.blocks
    for iterations, answers in (((1, 0), False), ((0, 1), True), ((1, 1), True)):
        refresh_warm(opt, iterations)
        engine.schedule.poll(wait=False)
        assert (opt.state[block.key].__dict__.pop("near", None) is not None) == answers
    assert engine.schedule.warm_refreshes == turned + 3
    assert opt.stats()["residual_drift"] >= 0


@pytest.mark.parametrize("ok", [0.0, 1.0])
def test_a_turn_of_a_step_that_changes_nothing_does_not_count(ok: float) -> None:
    opt = trained(3)
    engine = opt.engine
    engine.schedule.poll(wait=False)
    turned, U = engine.schedule.warm_refreshes, opt.state[engine.partition.blocks[0].key]["U_A"].clone()
    refresh_warm(opt, (1, 1), torch.tensor(ok, dtype=torch.float64))
    engine.schedule.poll(wait=False)
    assert engine.schedule.warm_refreshes - turned == ok
    assert torch.equal(opt.state[engine.partition.blocks[0].key]["U_A"], U) == (ok == 0)


def test_a_wide_layer_keeps_its_interval_after_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "WIDE_SIDE", 8)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 16), nn.Linear(16, 2, bias=False))
    opt = ekfac.EKFAC(model, refresh_every=50)
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(8, 4)).square().sum(1).mean().backward()
        opt.step()
    opt.engine.schedule.applied_steps = 2 * START + 49
    state = opt.state_dict()
    again = ekfac.EKFAC(model, refresh_every=50)
    again.load_state_dict(state)
    due = {block.name: iterations for block, iterations in again.engine.schedule.advance()}
    assert due == {"0": (1, 1), "1": (1, 0), "2": (0, 1)}  # every 200th step for what is twice as wide
