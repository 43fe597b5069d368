"""What the pages say of VGG11 and ResNet34: tables and verdicts from runs whose numbers are known."""

from dataclasses import replace

import numpy
import pytest

from ekfac.lab.config import TrainConfig
from ekfac.lab.search.ladder import SEARCHED
from ekfac.lab.show.evidence import network_tables, networks
from ekfac.lab.show.evidence.network_tables import runs_for
from ekfac.lab.show.evidence.record import MISSING
from ekfac.lab.show.figures import paper
from ekfac.lab.show.figures.measures import Measures
from ekfac.lab.show.report.content import about_planes, about_times, best_table, headline, planes, times
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


def test_a_report_keeps_a_search_apart_and_compares_what_was_cut_where_all_have_epochs() -> None:
    long, short = (
        made_up(replace(NET, optimizer=name), rate, epochs=n) for name, rate, n in (("kfac", 0.5, 4), ("ekfac", 0.4, 2))
    )
    lucky = made_up(replace(NET, optimizer="kfac", seed=1), 0.1, epochs=1)
    other = made_up(replace(NET, optimizer="ekfac-ra"), 0.1, epochs=4)  # not of the search
    groups = {group.name: group for group in grouped([*searched([long, short, lucky]), other])}
    search = groups["vgg11 on cifar10, a search by halving"]
    assert len(groups) == 2 and len(search.curves) == 2, "a seed that was cut is no setting"
    assert (
        headline(search) == "Lowest training loss after 2 epochs, the last that all methods have: EKFAC freq=500, 0.32."
    )
    table = best_table(search)
    place = table["heads"].index("epochs")
    assert [row[place]["text"] for row in table["rows"]] == ["4", "2"]
    assert [row[-1]["text"] for row in table["rows"]] == ["finished", "cut, of 4 epochs"]
    assert about_planes(search) == "Training loss after 2 epochs over learning rate and damping"
    tried = [
        made_up(replace(NET, optimizer="kfac", lr=lr, damping=d), 0.5, epochs=n)
        for lr, d, n in ((0.1, 1.0, 3), (1.0, 0.1, 1), (0.1, 0.1, 4))
    ]
    (group,) = grouped(searched(tried))
    (plane,) = planes(group)
    assert about_planes(group).startswith("Training loss after 1 epoch ") and plane["loss"] == [1.0, 1.0, 1.0]
    found = times(search)
    assert found is not None and found["without"] == "not in its epochs"


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
    assert "not there by then" in networks.by_time("vgg11", ("EKFAC-ra",))(fresh(worse))
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
    rows = network_tables.sizes(fresh(grown), "vgg11").splitlines()
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
    lines = network_tables.training(fresh(runs), "vgg11").splitlines()
    assert lines[0].split("|")[2:6] == [" 1 ", " 3 ", " **4** ", " epochs shown "]
    row = next(line for line in lines if line.startswith("| EKFAC-ra"))
    mean = (2 * 0.5**4 + 2 * 0.4**4) / 2
    assert f"{mean:.3f}"[:5] in row and row.split("|")[-2].strip() == "2" and "lr 0.1, damping 0.1" in row
    assert network_tables.training(fresh([]), "vgg11") == network_tables.accuracy(fresh([]), "vgg11") == MISSING
    best = next(
        line for line in network_tables.accuracy(fresh(runs), "vgg11").splitlines() if line.startswith("| KFAC")
    )
    assert "%" in best and best.split("|")[5].strip() == "4 of 4" and "nan" not in best


@pytest.mark.parametrize("name", ["vgg11", "resnet34"])
def test_nothing_recorded_says_so(name: str) -> None:
    assert network_tables.sizes(fresh([]), name) == MISSING


def searched(runs: list[Run], epochs: int = 4) -> list[Run]:
    for run in runs:
        run.about[SEARCHED] = epochs
    return runs


def diverged(optimizer: str) -> Run:
    run = made_up(replace(NET, optimizer=optimizer), 0.5, epochs=1)
    run.history[1]["diverged"], run.status = True, "diverged"
    return replace(run, config=replace(run.config, epochs=4))


def test_seeds_that_were_cut_before_others_win_nothing() -> None:
    whole = [made_up(replace(NET, optimizer=name), 0.8) for name in ("kfac", "ekfac", "ekfac-ra")]
    lucky = made_up(replace(NET, optimizer="kfac", seed=1), 0.1, epochs=2)
    kept = paper.of_one_length(searched([*whole, lucky]))
    assert len(kept) == 3 and lucky.config.seed not in {run.config.seed for run in kept}
    # A seed of the same length counts, and one that diverged is not hidden.
    other = made_up(replace(NET, optimizer="kfac", seed=1), 0.7)
    assert len(paper.of_one_length(searched([*whole, other]))) == 4
    lost = replace(diverged("kfac"), config=replace(NET, optimizer="kfac", seed=1, epochs=4))
    assert any(run.status == "diverged" for run in paper.of_one_length(searched([*whole, lost])))


def test_methods_are_compared_at_the_last_epoch_that_they_have_in_common() -> None:
    runs = [made_up(replace(NET, optimizer=name), rate) for name, rate in (("kfac", 0.5), ("ekfac-ra", 0.6))]
    short = made_up(replace(NET, optimizer="ekfac"), 0.4, epochs=2)
    words = networks.by_epoch("vgg11", ("EKFAC", "EKFAC-ra"))(fresh(searched([*runs, short])))
    assert words == (
        "**partly** | training loss after 2 epochs: EKFAC 0.320, KFAC 0.500; after 4 epochs: EKFAC-ra 0.259, KFAC 0.125"
    )
    # KFAC validates better after four epochs than EKFAC after two, and not after two.
    judge = networks.validation("vgg11", ("EKFAC",))
    assert judge(fresh(searched([*runs, short]))).startswith(
        "**reproduced** | best validation accuracy within 2 epochs"
    )
    lines = network_tables.training(fresh(searched([*runs, short])), "vgg11").splitlines()
    assert "**2**" in lines[0] and [row.split("|")[6].strip() for row in lines[2:]] == ["4", "2", "4"]


def test_in_time_a_run_is_held_against_what_a_rival_has_when_the_first_ends() -> None:
    slow, fast = (replace(NET, optimizer=name) for name in ("kfac", "ekfac-ra"))
    # EKFAC-ra ends after 4 s at 2 * 0.6^4; by then KFAC has one epoch. That KFAC is lower later counts for nothing.
    runs = [made_up(slow, 0.5, seconds=3.0), made_up(fast, 0.6, seconds=1.0)]
    words = networks.by_time("vgg11", ("EKFAC-ra",))(fresh(runs))
    assert words == "**reproduced** | EKFAC-ra at the loss of KFAC after 4.00 s: 0.667 of its time"
    assert answer(networks.usually("vgg11", ("EKFAC-ra",), x="times"), runs) == "**reproduced**"


def test_no_one_setting_below_all() -> None:
    kfac = [made_up(replace(NET, optimizer="kfac"), 0.5)]
    judge = networks.no_setting_below_all("vgg11", ("EKFAC-ra",))
    assert answer(judge, [*kfac, made_up(replace(NET, optimizer="ekfac-ra"), 0.4)]) == "**not reproduced**"
    assert answer(judge, [*kfac, made_up(replace(NET, optimizer="ekfac-ra"), 0.6)]) == "**reproduced**"
    assert answer(judge, kfac) == MISSING


def test_a_table_says_what_diverged_and_whether_a_best_is_at_an_edge() -> None:
    best = [
        made_up(replace(NET, optimizer="kfac", lr=lr), rate) for lr, rate in ((0.1, 0.3), (0.32, 0.5), (0.032, 0.5))
    ]
    rows = network_tables.training(fresh([*best, diverged("ekfac-ra")]), "vgg11").splitlines()
    assert "2 of 4" in rows[2] and rows[3].startswith("| EKFAC-ra | diverged in epoch 1 |")
    assert "diverged in epoch 1" in network_tables.accuracy(fresh([*best, diverged("ekfac-ra")]), "vgg11")
    assert paper.lacks("resnet34", [made_up(replace(NET, optimizer="kfac"), 0.5), diverged("ekfac-ra")]) == [
        "SGD + BN",
        "EKFAC-ra freq=500, which diverged",
    ]


def test_a_search_that_was_cut_lacks_epochs_and_seeds() -> None:
    runs = searched([made_up(replace(NET, optimizer=name), 0.5) for name in ("kfac", "ekfac", "ekfac-ra")], 9)
    assert paper.lacks("batch-size", runs)[-2:] == ["epochs 5 to 9", "a second and a third seed"]
    # One batch size is no figure of batch sizes.
    assert runs_for(fresh(runs), "batch-size") == [] and len(runs_for(fresh(runs), "vgg11")) == 3
    two = [*runs, *searched([made_up(replace(NET, optimizer="kfac", batch_size=200), 0.5)], 9)]
    assert len(runs_for(fresh(two), "batch-size")) == 4


def test_the_gain_in_time_is_judged_over_all_batch_sizes() -> None:
    grown = [
        made_up(replace(NET, optimizer=name, batch_size=size), rate)
        for size in (200, 500)
        for name, rate in (("kfac", 0.5), ("ekfac", 0.6))
    ]
    assert answer(networks.no_gain_in_time, grown) == "**reproduced**"
    assert answer(networks.no_gain_in_time, grown[:2]) == MISSING
