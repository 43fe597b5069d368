"""One colour and marker per method, one line style per variant, for figures, reports and pages."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

# The palette of Okabe and Ito: distinguishable with every kind of colour-blindness, and in grey by lightness.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PINK = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#7F7F7F"
# Distinguishable from those by lightness too.
INDIGO, BROWN, PURPLE = "#332288", "#8C510A", "#AA3377"

FAMILIES = {
    "SGD": (GREY, "v"),
    "SGD + BN": (BLACK, "^"),
    "Adam": (ORANGE, "<"),
    "Adam + BN": (ORANGE, "D"),
    "KFAC": (RED, "s"),
    "EKFAC": (BLUE, "o"),
    "EKFAC-ra": (GREEN, "P"),
    "AdamW": (INDIGO, ">"),
    "AdamW + BN": (INDIGO, "H"),
    "Muon": (SKY, "*"),
    "Muon + BN": (SKY, "p"),
    "SOAP": (BROWN, "h"),
    "SOAP + BN": (BROWN, "d"),
    "EKFAC (defaults)": (PURPLE, "X"),
    "Schedule-Free": (GREEN, "P"),
    "EKFAC, cosine": (RED, "s"),
    "EKFAC(model)": (BLUE, "o"),
    # As older records call these two.
    "EKFAC (scheduled)": (RED, "s"),
    "EKFAC (nothing set)": (BLUE, "o"),
}
# With batch-norm they have the same colour and a solid line. AdamW often coincides with Adam, so its line has gaps.
_STYLES = {"Adam": 1, "Muon": 1, "SOAP": 1, "AdamW": 2, "AdamW + BN": 3}
_SPARE = [(PINK, "X"), (SKY, "*"), (GREY, "h"), (ORANGE, "p"), (BLUE, "d"), (RED, ">"), (PINK, "8"), (SKY, "x")]


@dataclass(frozen=True)
class Line:
    """The look of a curve: a colour, matplotlib's name of a marker, and the index of a line style."""

    color: str
    marker: str
    variant: int


def split(label: str) -> tuple[str, str]:
    """Split a label into its method and its variant: ``("EKFAC", " freq=50, batch 200")``."""
    family = re.sub(r"( freq=\d+|, batch \d+)+$", "", label)
    return family, label[len(family) :]


def lines(labels: Iterable[str]) -> dict[str, Line]:
    """Assign every label its look: the colour and marker of its method, the line style of its variant.

    ``EKFAC freq=50`` and ``EKFAC freq=1`` share the colour of EKFAC; ``EKFAC freq=50`` and ``KFAC freq=50`` share their
    line style.
    """
    found: dict[str, Line] = {}
    names = ordered(labels)
    variants = sorted({split(label)[1] for label in names} - {""}, key=_numbers)
    taken = {FAMILIES[family][1] for label in names if (family := split(label)[0]) in FAMILIES}
    spare = itertools.cycle([look for look in _SPARE if look[1] not in taken])
    known = dict(FAMILIES)
    for label in names:
        family, variant = split(label)
        if family not in known:
            known[family] = next(spare)
        number = variants.index(variant) if variant else _STYLES.get(family, 0)
        found[label] = Line(*known[family], number)
    return found


def ordered(labels: Iterable[str]) -> list[str]:
    """Return labels in the paper's order: baselines first, then KFAC, EKFAC, EKFAC-ra; within a method by number."""
    rank = {name: number for number, name in enumerate(FAMILIES)}

    def place(label: str) -> tuple[int, str, list[int]]:
        family, variant = split(label)
        return rank.get(family, len(rank)), family, _numbers(variant)

    return sorted(labels, key=place)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
