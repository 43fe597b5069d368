"""The paper's claims compared with our results: a verdict by an explicit rule, and the numbers behind it.

Each function returns ``verdict | numbers``, two cells of the page's table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy

from ekfac.lab.search.selection import Curve
from ekfac.lab.show.evidence.record import LOSS, MISSING, Record, at_end, chosen, lost, write
from ekfac.lab.show.evidence.tables import DEFAULTS, adamw, lowest, ratio, relative
from ekfac.lab.show.figures.sensitivity import NEAR, grids

# The paper's amortised methods, and its baselines.
OURS = ("EKFAC freq=50", "EKFAC-ra freq=50")
RIVALS = ("KFAC freq=50", "Adam + BN", "SGD + BN")
UNKNOWN = f"{MISSING} | "


def verdict(held: Iterable[bool]) -> str:
    """Return whether a claim holds in all of its cases, in some, or in none."""
    found = list(held)
    return "**reproduced**" if all(found) else "**partly**" if any(found) else "**not reproduced**"


def by_epoch(record: Record) -> str:
    """Check that EKFAC and EKFAC-ra end below amortised KFAC, Adam and SGD at every batch size."""
    return _ends(record, LOSS, lambda mine, rivals: mine < min(rivals))


def validation(record: Record) -> str:
    """Check that both, at their best training loss, validate within 1.05 times the best of KFAC, Adam and SGD."""
    return _ends(record, "validation_loss", lambda mine, rivals: mine <= 1.05 * min(rivals))


def _ends(record: Record, quantity: str, holds: Callable[[float, list[float]], bool]) -> str:
    held, words = [], []
    for size in record.batch_sizes:
        best = _present(record.autoencoder(size), (*OURS, *RIVALS))
        rivals = [at_end(best[name], quantity)[0] for name in RIVALS if name in best]
        mine = {name: at_end(best[name], quantity) for name in OURS if name in best}
        if not rivals or not mine:
            continue
        gone = _present(lost(record.mnist_at(size)), OURS)
        held += [holds(value, rivals) for value, _ in mine.values()] + [False for _ in gone]
        texts = [f"{name.split(' freq')[0]} {write(*at_end(curve, quantity))}" for name, curve in best.items()]
        texts += [f"{name.split(' freq')[0]} {reason}" for name, reason in gone.items()]
        words.append(f"batch {size}: " + ", ".join(texts))
    return f"{verdict(held)} | {'; '.join(words)}" if held else UNKNOWN


def by_time(record: Record) -> str:
    """Check that EKFAC-ra reaches each rival's final loss in less time than the rival, at every batch size."""
    held, words = [], []
    for size in record.batch_sizes:
        best = {name: curve.timed for name, curve in record.autoencoder(size).items()}
        mine = best.get(OURS[1])
        for name in RIVALS:
            rival = best.get(name)
            if mine is None or rival is None:
                continue
            fraction = ratio(mine, rival)
            held.append(fraction is not None and fraction < 1)
            text = "never there" if fraction is None else f"{write(fraction)} of its time"
            words.append(f"batch {size}, {name.split(' freq')[0]}: {text}")
    return f"{verdict(held)} | {'; '.join(words)}" if held else UNKNOWN


def error(record: Record) -> str:
    """Check that EKFAC's error is below KFAC's wherever measured, and grows less between two refreshes."""
    found = record.measures.get("error")
    if found is None:
        return UNKNOWN
    kfac, ours = (numpy.array(found["error"][name]) for name in ("KFAC", "EKFAC"))
    steps = numpy.array(found["steps"])
    late = steps % found["renewed_every"] == found["renewed_every"] - (steps[1] - steps[0])
    fresh = (steps % found["renewed_every"] == 0)[: len(steps)]
    growth = [float(each[late].mean() - each[fresh].mean()) for each in (kfac, ours)]
    text = (
        f"mean error {write(float(ours.mean()))} against KFAC's {write(float(kfac.mean()))}; "
        f"right after a refresh {write(float(ours[fresh].mean()))} against {write(float(kfac[fresh].mean()))}, "
        f"just before the next {write(float(ours[late].mean()))} against {write(float(kfac[late].mean()))}"
    )
    return f"{verdict([bool((ours <= kfac).all()), growth[1] < growth[0]])} | {text}"


def spectrum(record: Record) -> str:
    """Check that EKFAC's and EKFAC-ra's spectra, in the first basis, are nearer to the true one 9 times in 10."""
    found = record.measures.get("frequency")
    if found is None:
        return UNKNOWN
    # Skip the start, where the basis is fresh and there is nothing to compare.
    kfac = numpy.array(relative(found, "KFAC")[1:])
    held, words = [], []
    for name in ("EKFAC", "EKFAC-ra"):
        ours = numpy.array(relative(found, name)[1:])
        nearer = float((ours < kfac).mean())
        held.append(nearer >= 0.9)
        words.append(f"{name} nearer at {nearer:.0%} of the steps, median distance {write(float(numpy.median(ours)))}")
    words.append(f"KFAC {write(float(numpy.median(kfac)))} of the true spectrum's norm")
    return f"{verdict(held)} | {'; '.join(words)}"


def correlation(record: Record) -> str:
    """Check that the mean absolute correlation off the diagonal falls to a third or less."""
    found = record.measures.get("correlation")
    if found is None:
        return UNKNOWN
    before, after = found["parameter_space"], found["eigenbasis"]
    return f"{verdict([after <= before / 3])} | {write(before)} before, {write(after)} in the basis"


def frequency(record: Record) -> str:
    """Check that EKFAC's and EKFAC-ra's loss grows less than KFAC's from an interval of 50 to the longest.

    If none is longer than 50, it is from the second longest.
    """
    best = chosen(record.frequency)
    intervals = sorted({int(name.split("freq=")[1]) for name in best if "freq=" in name})
    if len(intervals) < 2:
        return UNKNOWN
    rarest = intervals[-1]
    usual = 50 if 50 in intervals[:-1] else intervals[-2]
    grown = {}
    for name in ("KFAC", "EKFAC", "EKFAC-ra"):
        pair = [best.get(f"{name} freq={every}") for every in (usual, rarest)]
        if pair[0] is not None and pair[1] is not None:
            grown[name] = at_end(pair[1])[0] / at_end(pair[0])[0]
    if len(grown) < 3:
        return UNKNOWN
    words = ", ".join(f"{name} {write(value)}" for name, value in grown.items())
    held = [grown[name] < grown["KFAC"] for name in ("EKFAC", "EKFAC-ra")]
    return f"{verdict(held)} | loss above floor, every {rarest} over every {usual}: {words}"


def sensitivity(record: Record) -> str:
    """Check that fewer than half of the settings around the best of a method of the paper end near it."""
    planes, lines = grids(record.grid)
    own = _present(planes, ("KFAC freq=50", *OURS))
    if not own:
        return UNKNOWN
    words = ", ".join(f"{name} {one.near} of {one.tried}" for name, one in {**planes, **lines}.items())
    return (
        f"{verdict(2 * one.near < one.tried for one in own.values())} | settings within {NEAR:g}x of the best: {words}"
    )


def alike(record: Record) -> str:
    """Check that KFAC and EKFAC validate within a twentieth of each other, at every batch size."""
    held, words = [], []
    for size in record.batch_sizes:
        best = _present(record.autoencoder(size), (RIVALS[0], OURS[0]))
        if len(best) == 2:
            kfac, ours = (at_end(curve, "validation_loss") for curve in best.values())
            held.append(max(kfac[0], ours[0]) <= 1.05 * min(kfac[0], ours[0]))
            words.append(f"batch {size}: KFAC {write(*kfac)}, EKFAC {write(*ours)}")
    return f"{verdict(held)} | validation loss above floor, {'; '.join(words)}" if held else UNKNOWN


def burden(record: Record) -> str:
    """Return the time of an epoch of KFAC and of EKFAC-ra; the paper does not quantify "slightly"."""
    words = []
    for size in record.batch_sizes:
        found = [_epoch(record.autoencoder(size).get(name)) for name in (RIVALS[0], OURS[1])]
        if found[0] is not None and found[1] is not None:
            words.append(f"batch {size}: KFAC {write(found[0])}, EKFAC-ra {write(found[1])}")
    return f"not judged | seconds an epoch, {'; '.join(words)}" if words else UNKNOWN


def every_update_is_dear(record: Record) -> str:
    """Check that an epoch of KFAC takes at least twice as long with an inverse at every update as at every 50th."""
    best = chosen(record.frequency)
    often, seldom = (_epoch(best.get(f"KFAC freq={every}")) for every in (1, 50))
    if often is None or seldom is None:
        return UNKNOWN
    words = f"seconds an epoch: every update {write(often)}, every 50 {write(seldom)}"
    return f"{verdict([often >= 2 * seldom])} | {words}"


def _epoch(curve: Curve | None) -> float | None:
    """Return the seconds of an epoch, if the setting was timed."""
    timed = None if curve is None else curve.timed
    return None if timed is None else float(timed.mean("seconds")[-1] / timed.mean("epoch")[-1])


def defaults(record: Record) -> str:
    """Describe in how many tasks the unchanged defaults end below every tuned rival, and where they validate best."""
    fittest, healthiest, surest, soonest, tasks, timed = 0, 0, 0, 0, 0, 0
    for task in record.tasks:
        best = chosen(record.runs(f"comparison/{task}"))
        mine, rivals = best.pop(DEFAULTS, None), list(best.values())
        if mine is None or not rivals:
            continue
        tasks += 1
        fittest += at_end(mine)[0] < min(at_end(rival)[0] for rival in rivals)
        healthiest += _score(mine) > max(map(_score, rivals))
        surest += _validation_loss(mine) < min(map(_validation_loss, rivals))
        baseline = adamw(best)
        if baseline is not None and baseline.timed is not None and mine.timed is not None:
            timed += 1
            fraction = ratio(mine.timed, baseline.timed, goal=lowest)
            soonest += fraction is not None and fraction < 1
    if not tasks:
        return MISSING
    return (
        f"With no setting chosen, it ends with the lowest training loss on {fittest} of {tasks} tasks, and with the "
        f"best validation accuracy on {healthiest} of {tasks} (the best validation loss on {surest}). It reaches "
        f"AdamW's lowest training loss before AdamW on {soonest} of {timed}."
    )


def _score(curve: Curve) -> float:
    """Return a setting's final validation score, by accuracy if there is one."""
    accuracy = at_end(curve, "validation_accuracy")[0]
    return accuracy if accuracy > 0 else -_validation_loss(curve)


def _validation_loss(curve: Curve) -> float:
    return at_end(curve, "validation_loss")[0]


def _present(best: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: best[name] for name in names if name in best}
