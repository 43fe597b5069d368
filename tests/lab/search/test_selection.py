"""Selection on made-up curves with known answers."""

import math
from collections.abc import Sequence

import pytest

from ekfac.cli.sweep import best_rows
from ekfac.lab.config import TrainConfig
from ekfac.lab.search.selection import (
    best_final,
    best_validation,
    by_method,
    curves,
    last,
    per_epoch,
    per_time,
    time_to_reach,
)
from ekfac.lab.training.runs import Run


def made_up(
    lr: float,
    losses: Sequence[float | None],
    seconds: float = 1.0,
    seed: int = 0,
    optimizer: str = "sgd",
    accuracies: Sequence[float] | None = None,
) -> Run:
    """A run with these training losses at epochs 0, 1, ...; None is where it diverged."""
    history = [
        {
            "epoch": epoch,
            "step": 10 * epoch,
            "seconds": seconds * epoch,
            "train_loss": loss,
            "validation_loss": None if loss is None else loss + 1,
            "validation_accuracy": None if accuracies is None else accuracies[epoch],
            "diverged": loss is None,
        }
        for epoch, loss in enumerate(losses)
    ]
    config = TrainConfig("autoencoder", optimizer, lr=lr, seed=seed, epochs=len(losses) - 1)
    return Run(config, history, "diverged" if None in losses else "finished", {"floor": {"train": 0.5}})


# At epoch 1 lr 0.1 leads, at 2 lr 0.2, at 3 lr 0.3; lr 0.4 is best of all at 1 and 2 and then diverges.
RACE = [
    made_up(0.1, [9, 5.0, 4.5, 4.0], seconds=4),
    made_up(0.2, [9, 6.0, 3.0, 2.9], seconds=1),
    made_up(0.3, [9, 7.0, 3.5, 1.0], seconds=8),
]
DIVERGED = made_up(0.4, [9, 2.0, 1.5, None], seconds=2)


def lrs(chosen: Sequence[object]) -> list[float]:
    return [curve.config.lr for curve in chosen]  # type: ignore[attr-defined]


def test_best_by_final_loss_never_takes_a_diverged_run() -> None:
    best = best_final(curves([*RACE, DIVERGED]))
    assert best is not None and best.config.lr == 0.3 and last(best) == 1.0
    assert best_final(curves([DIVERGED])) is None
    assert math.isinf(last(curves([DIVERGED])[0]))


def test_best_by_final_loss_never_takes_an_unfinished_run() -> None:
    early = made_up(0.5, [9, 0.1])
    early.status = "unfinished"
    best = best_final(curves([*RACE, early]))
    assert best is not None and best.config.lr == 0.3


def test_best_at_each_epoch() -> None:
    envelope = per_epoch(curves(RACE))
    assert list(envelope.x) == [0, 1, 2, 3]
    assert list(envelope.value) == [9, 5.0, 3.0, 1.0]
    assert lrs(envelope.chosen)[1:] == [0.1, 0.2, 0.3]


def test_a_run_counts_at_the_epochs_before_it_diverged_and_not_after() -> None:
    envelope = per_epoch(curves([*RACE, DIVERGED]))
    assert list(envelope.value) == [9, 2.0, 1.5, 1.0]
    assert lrs(envelope.chosen)[1:] == [0.4, 0.4, 0.3]


def test_best_at_each_time_budget() -> None:
    # Records at: lr 0.1: 4, 8, 12 s; lr 0.2: 1, 2, 3 s; lr 0.3: 8, 16, 24 s.
    envelope = per_time(curves(RACE), budgets=[0.5, 1, 2.5, 3, 15.9, 16, 24, 100])
    assert list(envelope.value) == [9, 6.0, 3.0, 2.9, 2.9, 2.9, 1.0, 1.0]
    assert lrs(envelope.chosen)[1:] == [0.2, 0.2, 0.2, 0.2, 0.2, 0.3, 0.3]


def test_budgets_are_the_times_of_all_records_unless_given() -> None:
    assert list(per_time(curves(RACE)).x) == [0, 1, 2, 3, 4, 8, 12, 16, 24]
    many = [made_up(0.1 + 0.001 * n, [9, 1, 1], seconds=1 + 0.37 * n) for n in range(600)]
    assert len(per_time(curves(many)).x) == 1000


def test_best_by_validation_takes_accuracy_where_there_is_one() -> None:
    high = made_up(0.1, [9, 8, 7], accuracies=[0.1, 0.9, 0.5])
    steady = made_up(0.2, [9, 2, 1], accuracies=[0.1, 0.6, 0.8])
    best = best_validation(curves([steady, high]))
    assert best is not None and best.config.lr == 0.1
    by_loss = best_validation(curves(RACE))
    assert by_loss is not None and by_loss.config.lr == 0.3
    assert best_validation([]) is None
    plateau = [made_up(lr, losses, accuracies=[0.1, 0.1, 0.1]) for lr, losses in ((0.1, [9, 8, 7]), (0.2, [9, 8, 6]))]
    tied = best_validation(curves(plateau))
    assert tied is not None and tied.config.lr == 0.2, "as accurate, and with a lower loss"


def test_seeds_are_one_setting_with_mean_and_spread() -> None:
    found = curves([made_up(0.1, [9, 4.0, 1.0], seed=1), made_up(0.1, [9, 2.0, 3.0], seed=0), made_up(0.2, [9, 1, 1])])
    assert [len(curve.runs) for curve in found] == [2, 1]
    both = found[0]
    assert [run.config.seed for run in both.runs] == [0, 1]
    assert list(both.mean("train_loss")) == [9, 3.0, 2.0]
    low, high = both.spread("train_loss")
    assert (list(low), list(high)) == ([9, 2.0, 1.0], [9, 4.0, 3.0])
    envelope = per_epoch([both])
    assert list(envelope.low) == [9, 2.0, 1.0] and list(envelope.high) == [9, 4.0, 3.0]


def test_a_setting_with_one_diverged_seed_has_no_finite_end() -> None:
    found = curves([made_up(0.1, [9, 4.0, 1.0]), made_up(0.1, [9, 2.0, None], seed=1)])
    assert best_final(found) is None and list(per_epoch(found).value) == [9, 3.0]


def test_curves_are_grouped_by_method() -> None:
    groups = by_method(curves([*RACE, made_up(0.1, [9, 1], optimizer="adam")]))
    assert {name: len(group) for name, group in groups.items()} == {"SGD": 3, "Adam": 1}


@pytest.mark.parametrize(("loss", "seconds"), [(9.0, 0.0), (7.5, 0.5), (6.0, 1.0), (4.5, 1.5), (2.9, 3.0), (1.0, None)])
def test_time_to_reach_a_loss_lies_between_records(loss: float, seconds: float | None) -> None:
    assert time_to_reach(curves([RACE[1]])[0], loss) == seconds


def test_no_setting_is_the_best_before_anyone_has_trained() -> None:
    """Budgets that end within everybody's first epoch, or where nobody has had one, are left out."""
    short = [made_up(0.1, [5.0, 3.0]), made_up(0.2, [5.0, 2.0], seconds=0.6)]
    assert [row["by"] for row in best_rows(short)] == ["final training loss", "validation", "epoch 1", "1 s"]
    long = [made_up(0.1, [5.0, *range(8, 0, -1)])]
    assert [row["by"] for row in best_rows(long)][-4:] == ["1 s", "2 s", "4 s", "8 s"]
    assert not [row for row in best_rows([made_up(0.1, [5.0])]) if row["by"].endswith(" s")]
