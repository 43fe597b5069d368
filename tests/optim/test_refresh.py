"""When bases are renewed: often at first, then in turns; and again where one iteration was not enough."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import ekfac
from ekfac.optim import refresh
from ekfac.optim.refresh import EARLY, START, Schedule, early_steps
from ekfac.optim.rules import PerExample


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


def test_bases_turn_together_at_growing_intervals() -> None:
    steps = sorted(early_steps(20))
    assert steps[:EARLY] == list(range(EARLY)) and max(steps) < START
    gaps = [b - a for a, b in itertools.pairwise(steps[EARLY:])]
    assert all(abs(after - 1.15 * before) <= 2 for before, after in itertools.pairwise(gaps))
    assert not any(Schedule(20, deterministic=True).turns_within(t) for t in range(START))


@pytest.mark.parametrize("every", [3, 20])
def test_every_side_of_every_block_turns_once_in_an_interval(every: int) -> None:
    schedule = Schedule(every, deterministic=False)
    for blocks in (1, 4):
        for index in range(blocks):
            found = [schedule.turns_after(t, index, blocks) for t in range(100 * every, 101 * every)]
            assert [sum(side) for side in zip(*found, strict=True)] == [1, 1]


def test_a_basis_that_strays_is_turned_again_and_then_solved_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = trained(30, refresh_every=1000).stats()
    assert calm["refreshes"] == 2, "each block once, at the start"
    monkeypatch.setattr(refresh, "TOLERANCE", -1.0)
    opt = trained(30, refresh_every=1000)
    stats = opt.stats()
    assert stats["refreshes"] > calm["refreshes"]
    assert stats["warm_refreshes"] > calm["warm_refreshes"]
    assert stats["refreshes"] <= 2 + 2 * 30 / refresh.TRIES, "no more often than after so many tries"


def test_one_stray_turn_costs_no_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    opt = trained(12, refresh_every=1000)
    before = opt.stats()
    block = opt.engine.blocks[0]
    opt.engine.refresher._pending.append((block, torch.tensor(0.9), None))
    model = opt.model
    for _ in range(2):
        opt.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(40, 6).double()), torch.randint(3, (40,))).backward()
        opt.step()
    assert opt.stats()["refreshes"] == before["refreshes"]
    assert opt.stats()["warm_refreshes"] >= before["warm_refreshes"] + 1
    assert "strayed" not in opt.state[block.key]


def test_s_star_is_taken_in_the_basis_that_it_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a step that solves for the basis because of what was heard since the last one."""
    monkeypatch.setattr(refresh, "TOLERANCE", -1.0)
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    opt = ekfac.EKFAC(model, scaling="per_example", refresh_every=1000)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    rule = opt.engine.method.rule
    observe = rule.observe

    def spy(state: dict[str, Tensor], g: Tensor, n: float, s_star: Tensor, ok: Tensor | None) -> None:
        seen.append((state["U_A"][0].clone(), state["U_B"][0].clone(), s_star[0].clone()))
        observe(state, g, n, s_star, ok)

    monkeypatch.setattr(rule, "observe", spy)
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
    monkeypatch.setattr(refresh, "TOLERANCE", -1.0)
    quiet, asked = trained(25, refresh_every=7), trained(25, ask=True, refresh_every=7)
    assert quiet.stats()["refreshes"] == asked.stats()["refreshes"] > 2
    for p, q in zip(quiet.model.parameters(), asked.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_new_basis_keeps_the_place_of_the_count_that_a_captured_step_holds() -> None:
    rule, state = PerExample(0.9), {}
    for _ in range(2):
        rule.start(state, torch.ones(1, 3, 2))
        place = state["count"].data_ptr()
        rule.observe(state, torch.ones(1, 3, 2), 1.0, torch.ones(1, 3, 2), None)
        assert float(state["count"]) == 1 and state["count"].data_ptr() == place
    rule.start(state, torch.ones(1, 3, 2))
    assert float(state["count"]) == 0 and state["count"].data_ptr() == place


@pytest.mark.parametrize(("every", "given", "later"), [(50, None, 4), (8, None, 1), (50, 3, 3)])
def test_the_factors_take_in_every_batch_of_the_start(every: int, given: int | None, later: int) -> None:
    opt = ekfac.EKFAC(nn.Linear(3, 2), refresh_every=every, factor_every=given)
    block = opt.engine.blocks[0]

    def taken(start: int) -> list[bool]:
        found = []
        for step in range(start, start + 12):
            opt.engine.applied_steps = step
            found.append(opt.engine.wants_factors(block))
        return found

    opt.engine.state[block.key] = {"S_A": 0, "A": 0}  # its first basis is there
    assert taken(1200) == [step % later == 0 for step in range(1200, 1212)]
    if given is None:
        assert all(taken(100))


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 41])
def test_no_step_takes_the_factors_of_all_layers(interval: int) -> None:
    schedule, plain = Schedule(50, deterministic=False), Schedule(50, deterministic=True)
    blocks = range(10)
    for index in blocks:
        assert sum(schedule.takes_factors(step, index, interval) for step in range(1000, 1000 + interval)) == 1
        assert plain.takes_factors(0, index, interval)
    at_once = [sum(schedule.takes_factors(step, index, interval) for index in blocks) for step in range(interval)]
    assert max(at_once) <= -(-len(blocks) // min(4, interval))


def test_a_captured_step_is_known_by_whether_the_factors_see_its_batch() -> None:
    """Calls are kept for rules that need s*, or for their rows, in steps that leave A and B alone too."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30).double()
    opt = ekfac.EKFAC(model, scaling="per_example", factor_every=3)
    known: dict[bool, set[object]] = {True: set(), False: set()}
    for step in range(20):
        opt.zero_grad()
        model(torch.randn(4, 40).double()).square().sum(1).mean().backward()
        block = opt.engine.blocks[0]
        if step > 10 and not opt.engine._renews(block):
            assert opt.engine.stash, "projected by rows"
            known[step % 3 == 0].add(opt._graphs._signature())
        opt.step()
    assert len(known[True]) == len(known[False]) == 1
    assert known[True] != known[False]
