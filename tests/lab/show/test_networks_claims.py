"""What the pages say of VGG11 and ResNet34: tables and verdicts from runs whose numbers are known."""

from dataclasses import replace

import numpy
import pytest

from ekfac.lab.config import TrainConfig
from ekfac.lab.search.ladder import SEARCHED
from ekfac.lab.show.evidence import networks
from ekfac.lab.show.evidence.record import MISSING
from ekfac.lab.show.figures import paper
from ekfac.lab.show.figures.measures import Measures
from ekfac.lab.show.report.content import about_times
from ekfac.lab.show.report.groups import grouped, leader
from ekfac.lab.show.reproduce.claims import Fresh
from ekfac.lab.training.paces import PACED
from ekfac.lab.training.runs import Run
from lab.show.test_figures import made_up

NET = TrainConfig("vgg11", dataset="cifar10", lr=0.1, damping=0.1, batch_size=500, refresh_every=500)
RATES = {"kfac": 0.7, "ekfac": 0.6, "ekfac-ra": 0.5}


def fresh(runs: list[Run]) -> Fresh:
    return Fresh(runs, Measures())


def network(**more: object) -> list[Run]:
    return [made_up(replace(NET, optimizer=name, **more), rate) for name, rate in RATES.items()]


def answer(judge: networks.Judge, runs: list[Run]) -> str:
    return judge(fresh(runs)).partition(" | ")[0]


def test_runs_of_a_halving_count_at_the_epochs_that_they_have() -> None:
    finals = [made_up(replace(NET, optimizer=name), 0.8, epochs=4) for name in RATES]
    tried = made_up(replace(NET, optimizer="kfac", lr=0.5), 0.1, epochs=2)
    cut = made_up(replace(NET, optimizer="sgd"), 0.8, epochs=3)
    for run in (*finals, tried, cut):
        run.about[SEARCHED] = 4
    kept = paper.of_one_length([*finals, tried, cut])
    assert [run.config.epochs for run in kept] == [4, 4, 4, 2, 3]
    own = networks.groups(kept, "vgg11")
    envelope = networks.per_epoch(own["KFAC"])
    assert numpy.allclose(envelope.value, [2, 0.2, 0.02, 2 * 0.8**3, 2 * 0.8**4])
    # Where most methods were cut, all are.
    short = [made_up(run.config, 0.8, epochs=3) for run in finals[:2]]
    for run in short:
        run.about[SEARCHED] = 4
    assert [run.config.epochs for run in paper.of_one_length([*short, finals[2]])] == [3, 3, 3]


def test_a_report_has_a_search_in_one_section_and_says_whose_seconds_it_shows() -> None:
    runs = [made_up(replace(NET, optimizer="kfac", lr=lr), 0.5, epochs=n) for lr, n in ((0.1, 4), (0.5, 1))]
    for run in runs:
        run.about |= {SEARCHED: 4, PACED: True}
    (group,) = grouped(runs)
    best = leader(group.curves)
    assert best is not None and best.config.lr == 0.1 and "went side by side" in about_times(group)


def test_claims_hold_by_epoch_by_time_and_on_validation_or_do_not() -> None:
    runs = network()
    for judge in (
        networks.by_epoch("vgg11", ("EKFAC", "EKFAC-ra")),
        networks.usually("vgg11", ("EKFAC", "EKFAC-ra")),
        networks.by_time("vgg11", ("EKFAC-ra",)),
        networks.validation("vgg11", ("EKFAC-ra",)),
    ):
        assert answer(judge, runs) == "**reproduced**"
        assert answer(judge, runs[:1]) == answer(judge, []) == MISSING
    worse = [*runs[:2], made_up(replace(NET, optimizer="ekfac-ra"), 0.9)]
    assert answer(networks.by_epoch("vgg11", ("EKFAC", "EKFAC-ra")), worse) == "**partly**"
    assert answer(networks.by_time("vgg11", ("EKFAC-ra",)), worse) == "**not reproduced**"
    assert "never there" in networks.by_time("vgg11", ("EKFAC-ra",))(fresh(worse))
    assert answer(networks.validation("vgg11", ("EKFAC-ra",)), worse) == "**not reproduced**"
    # A schedule is another experiment.
    assert answer(networks.by_epoch("vgg11", ("EKFAC-ra",), scheduled=True), runs) == MISSING
    assert answer(networks.by_epoch("vgg11", ("EKFAC-ra",), scheduled=True), network(halve_every=2)) == "**reproduced**"


def test_gains_are_judged_by_batch_size() -> None:
    grown = [
        made_up(replace(NET, optimizer=name, batch_size=size), rate)
        for size, ours in ((200, 0.65), (500, 0.6), (1000, 0.5))
        for name, rate in (("kfac", 0.7), ("ekfac", ours), ("ekfac-ra", ours))
    ]
    assert answer(networks.gain_over_sizes("vgg11", grows=True), grown) == "**reproduced**"
    assert answer(networks.gain_over_sizes("vgg11", grows=False), grown) == "**reproduced**"
    shrunk = [replace(run, config=replace(run.config, batch_size=1200 - run.config.batch_size)) for run in grown]
    assert answer(networks.gain_over_sizes("vgg11", grows=True), shrunk) == "**not reproduced**"
    rows = networks.sizes(fresh(grown), "vgg11").splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["200", "500", "1000"]
    assert answer(networks.small_batches_catch_up, grown) == "**partly**", "it is behind both"


def test_the_appendix_damping_is_judged_apart_from_all_else() -> None:
    plain = made_up(replace(NET, optimizer="ekfac-ra", damping_mode="plain"), 0.55)
    good = made_up(replace(NET, optimizer="ekfac-ra", damping_mode="factored"), 0.5)
    assert answer(networks.factored_damping, [plain, good]) == "**reproduced**"
    assert answer(networks.factored_damping, [good]) == MISSING
    assert len(networks.groups([plain, good], "vgg11")["EKFAC-ra"]) == 1


def test_the_tables_have_the_runs_numbers() -> None:
    runs = [*network(), made_up(replace(NET, optimizer="ekfac-ra", seed=1), 0.4)]
    lines = networks.training(fresh(runs), "vgg11").splitlines()
    assert lines[0].split("|")[2:6] == [" 1 ", " 2 ", " 3 ", " 4 "]
    row = next(line for line in lines if line.startswith("| EKFAC-ra"))
    mean = (2 * 0.5**4 + 2 * 0.4**4) / 2
    assert f"{mean:.3f}"[:5] in row and row.split("|")[-2].strip() == "2" and "lr 0.1, damping 0.1" in row
    assert networks.training(fresh([]), "vgg11") == networks.accuracy(fresh([]), "vgg11") == MISSING
    best = next(line for line in networks.accuracy(fresh(runs), "vgg11").splitlines() if line.startswith("| KFAC"))
    assert "%" in best and best.split("|")[5].strip() == "4"


@pytest.mark.parametrize("name", ["vgg11", "resnet34"])
def test_nothing_recorded_says_so(name: str) -> None:
    assert networks.sizes(fresh([]), name) == MISSING
