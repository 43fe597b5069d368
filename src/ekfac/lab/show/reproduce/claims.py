"""What the paper, or a page, claims of each figure, and how it is judged from runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ekfac.lab.search.selection import Curve, by_method, curves, per_epoch, time_to_reach
from ekfac.lab.show.evidence import claims as judged
from ekfac.lab.show.evidence.record import Record, chosen, write
from ekfac.lab.show.evidence.tables import DEFAULTS
from ekfac.lab.show.figures.measures import Measures
from ekfac.lab.show.figures.paper import of_one_length
from ekfac.lab.show.looks import split
from ekfac.lab.training.runs import Run

Judge = Callable[["Fresh"], str]


@dataclass(frozen=True)
class Claim:
    """A sentence and its rule: ``judge`` returns ``verdict | numbers``."""

    text: str
    judge: Judge


class Fresh(Record):
    """Runs that were just made, in the form that the claims of the pages are judged by."""

    def __init__(self, runs: Sequence[Run], measures: Measures, folder: str | Path = ".") -> None:
        super().__init__(folder)
        over = [run for run in runs if run.status in ("finished", "diverged")]
        self.all = over
        # In place of what the record reads from its folders.
        own = [run for run in over if run.config.task == "autoencoder"]
        self.__dict__.update(mnist=own, frequency=own, grid=own, measures=measures)


def _ends(record: Fresh, task: str) -> dict[str, Curve]:
    """Return each method's best curve on a task, by the method's name without its interval."""
    best = chosen(run for run in record.all if run.config.task == task)
    return {split(name)[0]: curve for name, curve in best.items()}


def _by_epoch(task: str, ours: Sequence[str], rivals: Sequence[str]) -> Judge:
    """Judge that ours, at the best setting for the last epoch, train below each rival."""

    def judge(record: Fresh) -> str:
        found = curves(of_one_length(run for run in record.all if run.config.task == task))
        ends = {split(n)[0]: per_epoch(group) for n, group in by_method(found).items()}
        last = {name: float(one.value[-1]) for name, one in ends.items() if len(one.value)}
        pairs = [(mine, rival) for mine in ours for rival in rivals if mine in last and rival in last]
        if not pairs:
            return judged.UNKNOWN
        held = [last[mine] < last[rival] for mine, rival in pairs]
        words = ", ".join(f"{name} {write(last[name])}" for name in (*ours, *rivals) if name in last)
        return f"{judged.verdict(held)} | training loss at the end: {words}"

    return judge


def _by_time(task: str, ours: str, rivals: Sequence[str]) -> Judge:
    """Judge that ours is where each rival ends in less time."""

    def judge(record: Fresh) -> str:
        best = {name: curve.timed for name, curve in _ends(record, task).items()}
        mine, held, words = best.get(ours), [], []
        for name in rivals:
            rival = best.get(name)
            if mine is None or rival is None:
                continue
            loss = float(rival.mean("train_loss")[-1])
            spent, own = time_to_reach(mine, loss), time_to_reach(rival, loss)
            held.append(spent is not None and own is not None and spent < own)
            words.append(
                f"{name}: " + ("never there" if spent is None or not own else f"{write(spent / own)} of its time")
            )
        return f"{judged.verdict(held)} | {'; '.join(words)}" if held else judged.UNKNOWN

    return judge


def _gain_over_sizes(task: str, grows: bool) -> Judge:
    """Judge how EKFAC's gain over KFAC (the quotient of their last losses) goes with the batch size."""

    def judge(record: Fresh) -> str:
        own = [run for run in record.all if run.config.task == task]
        gains = {}
        for size in sorted({run.config.batch_size or 0 for run in own}):
            best = {split(n)[0]: c for n, c in chosen(run for run in own if run.config.batch_size == size).items()}
            ours = best.get("EKFAC") or best.get("EKFAC-ra")
            if ours is not None and "KFAC" in best:
                ends = [float(curve.mean("train_loss")[-1]) for curve in (best["KFAC"], ours)]
                gains[size] = ends[0] / ends[1]
        if len(gains) < 2:
            return judged.UNKNOWN
        values = list(gains.values())
        held = [b > a for a, b in itertools.pairwise(values)] if grows else [gain > 1 for gain in values]
        words = ", ".join(f"batch {size}: {write(gain)}" for size, gain in gains.items())
        return f"{judged.verdict(held)} | KFAC's last loss over EKFAC's: {words}"

    return judge


def _defaults_ahead(record: Fresh) -> str:
    """Judge that the untouched defaults train below every rival at its recorded setting."""
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


_BASELINES = ("KFAC", "SGD", "SGD + BN")
CLAIMS: dict[str, tuple[Claim, ...]] = {
    "correlation": (Claim("Gradients are largely decorrelated in the basis", judged.correlation),),
    "error": (Claim("EKFAC drifts from the Fisher far less quickly than amortised KFAC", judged.error),),
    "autoencoder": (
        Claim("By epoch, EKFAC and EKFAC-ra train below amortised KFAC, Adam and SGD", judged.by_epoch),
        Claim("In wall-clock time EKFAC-ra is ahead", judged.by_time),
        Claim("Validation stays very good", judged.validation),
    ),
    "frequency": (
        Claim("EKFAC keeps its performance better than KFAC as renewals become rarer", judged.frequency),
        Claim("Its spectrum and EKFAC-ra's stay closer to the true one", judged.spectrum),
    ),
    "vgg11": (
        Claim("By epoch, EKFAC trains below KFAC and SGD", _by_epoch("vgg11", ("EKFAC", "EKFAC-ra"), _BASELINES)),
        Claim("EKFAC-ra improves on the baselines in time", _by_time("vgg11", "EKFAC-ra", _BASELINES)),
    ),
    "resnet34": (
        Claim("By epoch, EKFAC-ra trains below KFAC and SGD", _by_epoch("resnet34", ("EKFAC-ra",), _BASELINES)),
        Claim("EKFAC-ra is ahead in time", _by_time("resnet34", "EKFAC-ra", _BASELINES)),
    ),
    "batch-size": (
        Claim("On VGG11 EKFAC's gain over KFAC grows with the batch", _gain_over_sizes("vgg11", grows=True)),
        Claim("On ResNet34 it is there at every batch size", _gain_over_sizes("resnet34", grows=False)),
    ),
    "schedule": (
        Claim(
            "With a schedule EKFAC-ra still trains below the others on VGG11",
            _by_epoch("vgg11", ("EKFAC-ra",), _BASELINES),
        ),
        Claim("And on ResNet34", _by_epoch("resnet34", ("EKFAC-ra",), _BASELINES)),
    ),
    "sensitivity": (Claim("The plane of learning rate and damping is shown", judged.sensitivity),),
    "comparison": (Claim("The defaults train below every tuned rival", _defaults_ahead),),
}
