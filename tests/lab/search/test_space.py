"""The settings of the paper's search."""

import math
from dataclasses import replace

import pytest

from ekfac.lab import LabError
from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import describe, key, method
from ekfac.lab.search.space import DECADES, Space, settings


def test_the_papers_search_has_its_grid_first_then_twenty_points_around_each() -> None:
    found = settings(TrainConfig("autoencoder", "ekfac-ra"), Space())
    grid, around = found[:32], found[32:]
    assert {(c.lr, c.damping, c.batch_size) for c in grid} == {
        (lr, damping, size) for lr in DECADES for damping in DECADES for size in (200, 500)
    }
    assert len(around) == 20 * 32
    for number, config in enumerate(around):
        centre = grid[number % 32]
        assert config.batch_size == centre.batch_size
        for name in ("lr", "damping"):
            ratio = getattr(config, name) / getattr(centre, name)
            assert 10**-0.5 * 0.999 <= ratio <= 10**0.5 * 1.001


def test_random_points_are_log_uniform() -> None:
    found = settings(TrainConfig("classifier", "sgd"), Space(lrs=(1e-2,), random_points=2000))[1:]
    places = [math.log10(config.lr / 1e-2) for config in found if config.lr is not None]
    quarters = [sum(-0.5 + 0.25 * q <= place < -0.25 + 0.25 * q for place in places) for q in range(4)]
    assert all(abs(count - 500) < 80 for count in quarters)


def test_the_same_search_is_the_same_list_and_another_draw_is_not() -> None:
    base = TrainConfig("classifier", "kfac")
    first, again, other = (settings(base, Space(random_points=2, draw=draw)) for draw in (1, 1, 2))
    assert [key(c) for c in first] == [key(c) for c in again]
    assert [key(c) for c in first[:16]] == [key(c) for c in other[:16]]
    assert not {key(c) for c in first[16:]} & {key(c) for c in other[16:]}


def test_an_optimizer_without_damping_is_searched_over_its_learning_rate_alone() -> None:
    found = settings(TrainConfig("classifier", "adam"), Space(random_points=1, seeds=(0, 1)))
    assert len(found) == 2 * (4 + 4) and {c.damping for c in found} == {None} and {c.seed for c in found} == {0, 1}


def test_damping_that_is_asked_for_is_not_left_out() -> None:
    found = settings(TrainConfig("classifier", "adam"), Space(lrs=(0.1,), dampings=(0.5,), random_points=0))
    assert [config.damping for config in found] == [0.5]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Space(dampings=()), "damping needs at least one value"),
        (Space(lrs=()), "lr needs at least one value"),
        (Space(random_points=-1), "random must be 0 or more"),
        (Space(reach=1.0), "reach must be more than 1"),
        (Space(lrs=(-1.0,)), "lr must be a positive number"),
    ],
)
def test_bad_searches_are_refused(space: Space, message: str) -> None:
    with pytest.raises(LabError, match=message):
        settings(TrainConfig("classifier", "kfac"), space)


def test_names_say_what_differs_and_keys_are_one_a_setting() -> None:
    config = TrainConfig("autoencoder", "ekfac-ra", lr=0.01, damping=1e-3, refresh_every=50).resolved()
    assert method(config) == "EKFAC-ra freq=50"
    assert method(TrainConfig("autoencoder", "sgd", batch_norm=True)) == "SGD + BN"
    assert describe(config) == "lr 0.01, damping 0.001, batch 200"
    clipped = TrainConfig("autoencoder", "ekfac-ra", lr=0.01, damping=1e-3, options={"kl_clip": 0.1}).resolved()
    assert describe(clipped) == "lr 0.01, damping 0.001, batch 200, kl_clip 0.1"
    elsewhere = replace(TrainConfig("classifier", "sgd", lr=0.1).resolved(), task="of a plugin")
    assert describe(elsewhere) == "lr 0.1, batch 200", "a task that is not loaded here has the optimizer's defaults"
    assert key(config).startswith("autoencoder-ekfac-ra-lr0.01-d0.001-b200-s0-")
    spelled = TrainConfig("autoencoder", "ekfac-ra", lr=0.01, damping=1e-3, refresh_every=50, batch_size=200).resolved()
    other = TrainConfig("autoencoder", "ekfac-ra", lr=0.01, damping=1e-3, refresh_every=51).resolved()
    assert key(config) == key(spelled) != key(other)
