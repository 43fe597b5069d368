"""The arithmetic of the report, on numbers made by hand."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekfac.lab.suite import config, profile
from ekfac.lab.suite.page import shown
from ekfac.lab.suite.records import Records
from ekfac.lab.suite.results import Results, standing, summarise
from ekfac.lab.suite.selection import fill, rose, values, worth
from lab.suite.cases import record, tiny

INF = math.inf


def test_ratios_fractions_and_scores_by_hand():
    reached = {"a": [10, 20, INF, 40], "b": [20, 10, INF, INF], "c": [40, 80, INF, 10]}
    found = profile.ratios(reached)
    assert found == {"a": [1, 2, INF, 4], "b": [2, 1, INF, INF], "c": [4, 8, INF, 1]}
    assert [profile.fraction(found["a"], r) for r in (1, 1.9, 2, 4)] == [0.25, 0.25, 0.5, 0.75]
    assert [profile.fraction(found["b"], r) for r in (1, 2, 1e9)] == [0.25, 0.5, 0.5]
    assert [profile.fraction(found["c"], r) for r in (1, 4, 8)] == [0.25, 0.5, 0.75]
    # The area under the steps from 1 to 4, over 3: a is at 1/4 up to 2, then at 1/2.
    assert profile.score(found["a"]) == pytest.approx((1 * 0.25 + 2 * 0.5) / 3)
    assert profile.score(found["b"]) == pytest.approx((1 * 0.25 + 2 * 0.5) / 3)
    assert profile.score(found["c"]) == pytest.approx(0.25)


@given(st.lists(st.floats(1, 20) | st.just(INF), min_size=1, max_size=8))
def test_the_score_is_the_profiles_mean_height(found):
    ends = sorted({1.0, profile.MOST, *(r for r in found if r <= profile.MOST)})
    area = sum((b - a) * profile.fraction(found, a) for a, b in itertools.pairwise(ends))
    assert profile.score(found) == pytest.approx(area / (profile.MOST - 1))


def test_the_first_place_at_or_below_the_target():
    assert profile.first_at([10, 20, 30], [3.0, 2.0, 2.5], 2.0) == 20
    assert profile.first_at([10, 20, 30], [3.0, 2.0, 2.5], 1.9) == INF


def test_what_a_run_is_worth():
    run = record("x", [5.0, 3.0, 1.0, 2.0])
    assert worth(run, "last") == 2.0 and worth(run, "best") == 1.0
    # The start does not count, however good it is.
    assert worth(record("x", [0.5, 3.0, 2.0]), "best") == 2.0
    assert worth({**run, "status": "diverged"}, "best") == INF
    accurate = record("x", [5.0, 3.0], measure="accuracy")
    for entry, accuracy in zip(accurate["history"], (0.1, 0.75), strict=True):
        entry["validation_accuracy"] = accuracy
    assert values(accurate) == pytest.approx([0.9, 0.25])


def test_a_run_rose_if_it_ends_above_its_loss_after_a_tenth():
    middle = [2.0] * 17
    # Twenty evaluations after the start: the second is the one after a tenth.
    assert rose(record("x", [9.0, 8.0, 3.0, *middle, 3.5]))
    assert not rose(record("x", [9.0, 2.0, 3.0, *middle, 2.5]))
    assert not rose(record("x", [9.0, 8.0, 3.0, *middle, 3.0]))
    assert rose({**record("x", [1.0, 0.5]), "status": "diverged"})


def results(measured, **changes):
    """Return the cosine set of a suite of one task whose runs have these curves, by method, rate and seed."""
    suite = config.parse(tiny(**changes))
    runs = {}
    for cell in fill(suite, {}):
        for rate, jobs in cell.jobs.items():
            for seed, job in jobs.items():
                curve = measured.get((cell.method.name, rate, seed))
                if curve is not None and cell.schedule in ("own", "cosine", cell.method.schedules[0]):
                    runs[job.key] = record(job.key, curve, method=cell.method.name)
    return suite, runs


class Held(Records):
    """Records that are in no folder."""

    def __init__(self, runs):
        self.runs, self.timed, self.failed = runs, runs, {}


MEASURED = {
    ("ekfac", 1.0, 0): [9, 2.0, 1.5],
    ("ekfac", 1.0, 1): [9, 1.9, 1.7],
    ("ekfac", 3.0, 0): [9, 1.0, 0.1],
    ("ekfac", 3.0, 1): [9, 1.0, 0.1],
    ("adamw", 0.001, 0): [9, 6.0, 5.0],
    ("adamw", 0.01, 0): [9, 4.0, 2.0],
    ("adamw", 0.01, 1): [9, 4.0, 2.4],
    ("adamw", 0.03, 0): [9, 4.0, 3.0],
    ("schedule-free", 0.003, 0): [9, 3.0, 1.6],
    ("schedule-free", 0.003, 1): [9, 3.0, 1.6],
    ("schedule-free", 0.03, 0): [9, 5.0, 5.0],
    ("schedule-free", 0.01, 0): [9, 5.0, 4.0],
}


def test_table_targets_and_steps_by_hand():
    suite, runs = results(MEASURED)
    found = Results(suite, Held(runs), "cosine")
    row = found.table["tabular"]
    adamw, ekfac, free = row["adamw"], row["ekfac"], row["schedule-free"]
    assert (adamw.rate, adamw.edge, adamw.made) == (0.01, False, 4)
    assert adamw.mean == pytest.approx(2.2) and adamw.error == pytest.approx(0.2)
    assert shown(adamw) == "2.200 ± 0.200"
    # A fixed method counts at its first rate, however good the others are.
    assert (ekfac.rate, ekfac.edge, ekfac.made) == (1.0, False, 4) and ekfac.mean == pytest.approx(1.6)
    assert (free.rate, free.edge) == (0.003, True)
    assert found.targets == {"tabular": pytest.approx(2.2 * 1.01)}
    tasks, steps = found.steps()
    assert tasks == ["tabular"]
    # AdamW reaches it with one seed of two: the median of 20 and never is never.
    assert steps == {"ekfac": [10], "adamw": [INF], "schedule-free": [20]}
    assert found.seconds()[1] == {"ekfac": [1.0], "adamw": [2.0], "schedule-free": [2.0]}


def test_standing_against_the_best_rival():
    suite, runs = results(MEASURED)
    found = standing(Results(suite, Held(runs), "cosine"), "ekfac")
    # Level with Schedule-Free's 1.6 (which has no spread), ahead of AdamW.
    assert (found.ahead, found.level, found.behind, found.worst) == ([], ["tabular"], [], [])
    worse = {**MEASURED, ("ekfac", 1.0, 0): [9, 8, 7], ("ekfac", 1.0, 1): [9, 8, 7]}
    suite, runs = results(worse)
    found = standing(Results(suite, Held(runs), "cosine"), "ekfac")
    assert (found.ahead, found.level, found.behind, found.worst) == ([], [], ["tabular"], ["tabular"])


def test_a_method_is_not_shown_before_all_of_its_rates_are_run():
    suite, runs = results({key: value for key, value in MEASURED.items() if key != ("adamw", 0.03, 0)})
    found = Results(suite, Held(runs), "cosine")
    assert set(found.table["tabular"]) == {"ekfac", "schedule-free"} and not found.targets
    assert found.steps() == ([], {"ekfac": [], "schedule-free": []})


def test_with_every_rate_the_mean_over_seeds_decides():
    curves = {("adamw", rate, seed): [9, 9, value] for (rate, seed), value in {
        (0.001, 0): 5.0, (0.001, 1): 5.0, (0.01, 0): 1.0, (0.01, 1): 4.0, (0.03, 0): 2.0, (0.03, 1): 2.0,
    }.items()}  # fmt: skip
    for every, rate in ((True, 0.03), (False, 0.01)):
        suite, runs = results(curves, every_rate=every)
        (cell,) = (c for c in fill(suite, runs) if (c.method.name, c.schedule) == ("adamw", "cosine"))
        assert cell.chosen(every, 0) == rate
        result = summarise(cell, suite)
        assert result is not None and result.rate == rate


def test_where_every_rate_diverged_the_lowest_is_shown_as_diverged():
    suite, runs = results({("adamw", rate, 0): [9, 9, 9] for rate in (0.001, 0.01, 0.03)})
    runs = {key: {**run, "status": "diverged"} for key, run in runs.items()}
    (cell,) = (c for c in fill(suite, runs) if (c.method.name, c.schedule) == ("adamw", "cosine"))
    result = summarise(cell, suite)
    assert result is not None and (result.rate, result.mean, result.diverged, result.risen) == (0.001, INF, 3, 3)
