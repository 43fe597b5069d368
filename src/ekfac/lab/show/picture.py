"""Pictures for the pages: a light and a dark version, curves labelled at their ends, one colour per method."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy
import torch
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Transform

from ekfac.lab.show.looks import BLUE, BROWN, GREEN, GREY, ORANGE, PINK, PURPLE, RED, SKY

# matplotlib's C0 to C9 refer to these. They are lighter in the dark version, so pictures use "C0" rather than a colour.
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BROWN, GREY, PINK)
COLOURS = {
    "EKFAC": "C0",
    "Adam": "C1",
    "AdamW": "C1",
    "EKFAC-ra": "C2",
    "KFAC": "C3",
    "version 0.1": "C4",
    "Muon": "C5",
    "SOAP": "C6",
    "SGD": "C7",
    "diagonal": "C8",
}
# Background, foreground, and how far colours are moved towards white.
FORMS = {"": ("#ffffff", "#222222", 0.0), "-dark": ("#131416", "#dddddd", 0.2)}
# Where examples write their pictures and numbers; `make gallery` copies them into the pages.
GALLERY = Path("runs/gallery")


def save(draw: Callable[[Figure], None], file: str | Path, size: tuple[float, float] = (7.0, 3.6)) -> list[Path]:
    """Draw a picture in a light and a dark version: ``NAME.png`` and ``NAME-dark.png``."""
    place = Path(file)
    place.parent.mkdir(parents=True, exist_ok=True)
    files = []
    for suffix, (paper, ink, lighter) in FORMS.items():
        with matplotlib.rc_context(_settings(paper, ink, lighter)):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure)
            files.append(place.with_name(f"{place.stem}{suffix}{place.suffix}"))
            figure.savefig(files[-1], dpi=150, bbox_inches="tight")
    return files


def label_ends(axes: Axes, gap: float = 0.07, numbers: str = "", margin: bool = False) -> None:
    """Write each curve's label next to its last point, in its colour, shifting labels that would overlap.

    Args:
        axes: The panel, with its limits set.
        gap: Smallest distance between labels, as a fraction of the panel's height.
        numbers: Format of the last value, appended to the label; none by default.
        margin: Write all labels to the right of the panel, even of curves that end within it.
    """
    axes.get_xlim(), axes.get_ylim()  # reading the limits makes matplotlib compute automatic ones
    scale = axes.transData + axes.transAxes.inverted()
    below = -gap
    for y, x, text, colour in sorted(_ends(axes, scale, numbers)):
        below = max(y, below + gap)
        style: Any = {"color": colour, "transform": axes.transAxes, "va": "center", "fontweight": "bold"}
        axes.text((1.0 if margin else x) + 0.015, below, text, clip_on=False, **style)


def _ends(axes: Axes, scale: Transform, numbers: str) -> Iterator[tuple[float, float, str, str]]:
    """Yield height and position of each curve's end as fractions of the panel, with label and colour."""
    for line in axes.get_lines():
        name = str(line.get_label())
        if not name.startswith("_"):
            x, y = (float(numpy.asarray(values)[-1]) for values in line.get_data())
            right, up = scale.transform((x, y))
            yield float(up), float(right), f"{name}  {y:{numbers}}" if numbers else name, str(line.get_color())


def publish(
    name: str, draw: Callable[[Figure], None], numbers: Mapping[str, Any], size: tuple[float, float] = (7.0, 3.6)
) -> None:
    """Write an example's picture, in both versions, and its numbers to ``runs/gallery``."""
    files = save(draw, GALLERY / f"{name}.png", size)
    about = {"command": f"python examples/{name}.py", "torch": torch.__version__, "python": platform.python_version()}
    record = {**about, "processor": _processor(), "numbers": dict(numbers)}
    (GALLERY / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"picture: {files[0]}")


def _settings(paper: str, ink: str, lighter: float) -> Any:
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    colours = [_mixed(colour, lighter) for colour in PALETTE] + [ink]
    return {
        **dict.fromkeys(inked, ink),
        "axes.prop_cycle": cycler(color=colours),
        "axes.facecolor": paper,
        "figure.facecolor": paper,
        "savefig.facecolor": paper,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11.5,
        "axes.titlepad": 10,
        "font.size": 10.5,
        "lines.linewidth": 2.2,
    }


def _mixed(colour: str, share: float) -> str:
    """Move a colour towards white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)


def _processor() -> str:
    """Return the system's name of the processor."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
