"""The claims of the paper, or of a page, about each figure, and how they are judged from runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ekfac.lab.search.selection import Curve
from ekfac.lab.show.evidence import claims as judged
from ekfac.lab.show.evidence import networks
from ekfac.lab.show.evidence.record import Record, chosen, write
from ekfac.lab.show.evidence.tables import DEFAULTS
from ekfac.lab.show.figures.measures import Measures
from ekfac.lab.show.looks import split
from ekfac.lab.training.runs import Run

Judge = Callable[["Fresh"], str]


@dataclass(frozen=True)
class Claim:
    """A sentence and its rule: ``judge`` returns ``verdict | numbers``."""

    text: str
    judge: Judge


class Fresh(Record):
    """New runs with the interface of a record, so that the pages' claims can be judged from them."""

    def __init__(self, runs: Sequence[Run], measures: Measures, folder: str | Path = ".") -> None:
        super().__init__(folder)
        over = [run for run in runs if run.status in ("finished", "diverged")]
        self.all = over
        # Replaces what a record reads from its folders.
        own = [run for run in over if run.config.task == "autoencoder"]
        self.__dict__.update(mnist=own, frequency=own, grid=own, cifar=over, measures=measures)


def _ends(record: Fresh, task: str) -> dict[str, Curve]:
    """Return each method's best curve on a task, by the method's name without its interval."""
    best = chosen(run for run in record.all if run.config.task == task)
    return {split(name)[0]: curve for name, curve in best.items()}


def _defaults_ahead(record: Fresh) -> str:
    """Judge that the unchanged defaults train below every rival at its recorded setting."""
    held, words = [], []
    for task in dict.fromkeys(run.config.task for run in record.all):
        best = _ends(record, task)
        mine = best.pop(DEFAULTS, None)
        if mine is None or not best:
            continue
        end = float(mine.mean("train_loss")[-1])
        held += [end < float(curve.mean("train_loss")[-1]) for curve in best.values()]
        others = ", ".join(f"{name} {write(float(curve.mean('train_loss')[-1]))}" for name, curve in best.items())
        words.append(f"{task}: defaults {write(end)}, {others}")
    return f"{judged.verdict(held)} | {'; '.join(words)}" if held else judged.UNKNOWN


_RA, _BOTH = ("EKFAC-ra",), ("EKFAC", "EKFAC-ra")
CLAIMS: dict[str, tuple[Claim, ...]] = {
    "correlation": (Claim("Gradients are largely decorrelated in the basis", judged.correlation),),
    "error": (Claim("EKFAC drifts from the Fisher far less quickly than amortised KFAC", judged.error),),
    "autoencoder": (
        Claim("By epoch, EKFAC and EKFAC-ra train below amortised KFAC, Adam and SGD", judged.by_epoch),
        Claim("In wall-clock time EKFAC-ra is ahead", judged.by_time),
        Claim("Validation stays very good (4c)", judged.validation),
        Claim("KFAC and EKFAC validate alike (4c)", judged.alike),
        Claim("An update of EKFAC-ra costs slightly more than KFAC's", judged.burden),
    ),
    "frequency": (
        Claim("EKFAC keeps its performance better than KFAC as refreshes become rarer", judged.frequency),
        Claim("Its spectrum and EKFAC-ra's stay closer to the true one", judged.spectrum),
        Claim("KFAC that inverts at every update takes far longer", judged.every_update_is_dear),
    ),
    "vgg11": (
        Claim("By epoch, EKFAC trains below KFAC and SGD (6a)", networks.by_epoch("vgg11", _BOTH)),
        Claim("The best EKFAC is usually below the best KFAC, for any epoch", networks.usually("vgg11", _BOTH)),
        Claim("This is also true for any time", networks.usually("vgg11", _BOTH, x="times")),
        Claim("No one setting of EKFAC is below KFAC at all epochs", networks.no_setting_below_all("vgg11", _BOTH)),
        Claim("EKFAC-ra improves on the baselines in time (6b)", networks.by_time("vgg11", _RA)),
        Claim("EKFAC generalises as well (6c)", networks.validation("vgg11", _BOTH)),
    ),
    "resnet34": (
        Claim("By epoch, EKFAC-ra trains below KFAC and SGD (7a)", networks.by_epoch("resnet34", _RA)),
        Claim("The best EKFAC-ra is usually below the best KFAC, for any epoch", networks.usually("resnet34", _RA)),
        Claim("This is also true for any time", networks.usually("resnet34", _RA, x="times")),
        Claim("No one setting of EKFAC-ra is below KFAC at all epochs", networks.no_setting_below_all("resnet34", _RA)),
        Claim("EKFAC-ra is ahead in time (7b)", networks.by_time("resnet34", _RA)),
        Claim("EKFAC-ra generalises as well (7c)", networks.validation("resnet34", _RA)),
    ),
    "batch-size": (
        Claim("On VGG11 the gain over KFAC grows with the batch", networks.gain_over_sizes("vgg11", grows=True)),
        Claim("KFAC at batch 200 catches up with EKFAC in time, not EKFAC-ra", networks.small_batches_catch_up),
        Claim("On VGG11 the gain of EKFAC is none in time, over all batch sizes", networks.no_gain_in_time),
        Claim("On ResNet34 the gain is there at every batch size", networks.gain_over_sizes("resnet34", grows=False)),
    ),
    "schedule": tuple(
        Claim(f"With a schedule, EKFAC-ra is still ahead {words} on {name}", judge(task, _RA, scheduled=True))
        for task, name in (("vgg11", "VGG11"), ("resnet34", "ResNet34"))
        for words, judge in (("by epoch", networks.by_epoch), ("in time", networks.by_time))
    ),
    "sensitivity": (Claim("Learning rate and damping must be chosen with care (4d)", judged.sensitivity),),
    "comparison": (Claim("The defaults train below every tuned rival", _defaults_ahead),),
}


# Where in the paper the claims of a figure are made; our own tables are not included.
WHERE = {
    "correlation": "Fig. 3, left",
    "error": "Fig. 3, right",
    "autoencoder": "Fig. 4",
    "sensitivity": "Fig. 4",
    "frequency": "Fig. 5",
    "vgg11": "Fig. 6",
    "resnet34": "Fig. 7",
    "batch-size": "appendix D.1",
    "schedule": "appendix D.2",
}


def every_claim(record: Record) -> Iterator[tuple[str, str, tuple[str, str]]]:
    """Yield every claim of the paper that runs can judge: its place, its text, its verdict with numbers."""
    fresh = Fresh(record.cifar, record.measures, record.folder)
    fresh.__dict__.update(mnist=record.mnist, frequency=record.frequency, grid=record.grid)
    for name, where in WHERE.items():
        for claim in CLAIMS[name]:
            yield where, claim.text, _two(claim.judge(fresh))
        if name == "frequency":
            text = "KFAC that inverts at every update is below the amortised one, by epoch"
            yield where, text, _two(networks.every_step(record))
    text = "Damping on both factors' eigenvalues optimizes better than on s alone"
    yield "appendix C", text, _two(networks.factored_damping(record))
    yield "appendix B", "ResNet34 without batch-norm needs a careful initialisation", _two(judged.UNKNOWN)


def _two(answer: str) -> tuple[str, str]:
    verdict, _, numbers = answer.partition(" | ")
    return verdict, numbers
