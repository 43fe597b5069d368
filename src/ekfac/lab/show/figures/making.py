"""Makes figures: gathers what each needs, draws it, and writes it as SVG and PNG."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from ekfac.lab.config import TrainConfig
from ekfac.lab.labels import key
from ekfac.lab.registry import LabError
from ekfac.lab.search import plan
from ekfac.lab.search.space import unique
from ekfac.lab.show.figures import paper, style
from ekfac.lab.show.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.show.figures.measures import Measures
from ekfac.lab.training.runs import Run

FORMATS = ("svg", "png")


@dataclass(frozen=True)
class Made:
    """A figure's files (or the reason for leaving it out), and what it lacks compared with the paper's."""

    name: str
    files: tuple[Path, ...] = ()
    reason: str = ""
    lacks: tuple[str, ...] = ()


def make(
    names: Sequence[str],
    out: str | Path,
    *,
    runs: Sequence[Run] = (),
    grid: Sequence[Run] = (),
    quick: bool = False,
    small: bool = False,
    dataset: str = "mnist-5k",
    data_dir: str | Path | None = None,
    measures: str | Path | None = None,
    measured: Sequence[str | Path] = (),
    formats: Sequence[str] = FORMATS,
    suffix: str = "",
    workers: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> list[Made]:
    """Make figures.

    Args:
        names: Names of figures, or ``["all"]``, which skips figures without runs.
        out: Folder for the files, and for the small runs of ``quick``.
        runs: Recorded runs.
        grid: Further runs, for a figure that shows the sensitivity to settings.
        quick: Make small runs for the figures that need some, and compute the others on less data.
        small: Whether the given runs are such small ones; figures then say so, and measure on less data too.
        dataset: Dataset of the figures that are computed.
        data_dir: Folder of the data files.
        measures: File that stores measurements; existing ones are not repeated.
        measured: Further files of measurements, which are only read.
        formats: File formats to write.
        suffix: A suffix for the files' names.
        workers: The number of parallel small runs.
        say: Called with lines of progress.

    Raises:
        LabError: If a name is unknown, or a figure requested by name has no runs.
    """
    everything = list(names) == ["all"]
    specs = {name: FIGURES.get(name) for name in (FIGURES if everything else names)}
    needing = [name for name, spec in specs.items() if spec.quick is not None]
    if quick and runs:
        raise LabError("quick makes its own runs: pass run folders or quick, not both")
    found = {name: [run for run in runs if specs[name].takes(run)] for name in needing}
    missing = [name for name in needing if not (found[name] or quick or specs[name].alone)]
    if missing and not everything:
        raise LabError(f"figure {missing[0]} needs runs, and none fits: pass --runs DIR, or --quick to make some")
    kept = Measures(measures, measured, say)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    if measures is not None:
        # Before measuring anything that could not be stored.
        Path(measures).parent.mkdir(parents=True, exist_ok=True)
    if quick:
        found = _quick_runs({name: specs[name] for name in needing}, folder / "quick-runs", data_dir, workers, say)
    made = []
    for name, spec in specs.items():
        if name in missing:
            made.append(Made(name, reason="no run is for it"))
            continue
        say(f"drawing {name}")
        shown = found.get(name, ())
        missing_parts = [] if quick else paper.lacks(name, shown)
        request = Request(shown, quick or small, dataset, data_dir, kept, grid, missing_parts)
        try:
            with _drawable(name, kept):
                files = draw_to(folder / f"{name}{suffix}", spec, request, formats)
            made.append(Made(name, files, lacks=tuple(request.lacks)))
        except LabError as error:
            if not everything:
                raise
            made.append(Made(name, reason=str(error)))
    return made


@contextmanager
def _drawable(name: str, kept: Measures) -> Iterator[None]:
    """Turn errors from stored numbers that do not fit the figure into a LabError."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
        if name not in kept.read:
            raise
        shown = (str(error).splitlines() or [type(error).__name__])[0]
        raise LabError(f"{kept.read[name]}: {name} cannot be drawn from its values: {shown}") from error


def draw_to(stem: Path, spec: FigureSpec, request: Request, formats: Sequence[str] = FORMATS) -> tuple[Path, ...]:
    """Draw one figure and write it in every format."""
    with style.styled():
        figure = spec.draw(request)
        absent = [part for part in request.lacks if paper.SHORTER not in part]  # short curves are visible anyway
        if absent:
            _say_what_is_missing(figure, absent)
        files = tuple(stem.with_name(f"{stem.name}.{kind}") for kind in formats)
        for file in files:
            # Without a date, the same picture gives the same file.
            figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _say_what_is_missing(figure: Figure, lacks: Sequence[str]) -> None:
    """Add what a figure lacks to its title, in a few lines."""
    width = round(13 * figure.get_figwidth())
    text = textwrap.shorten("; ".join(part.split(": dataset")[0] for part in lacks), 3 * width, placeholder=" ...")
    before = figure.get_suptitle()
    figure.suptitle("\n".join([before, *textwrap.wrap(f"missing: {text}", width)]))


def _quick_runs(
    specs: dict[str, FigureSpec], out: Path, data_dir: str | Path | None, workers: int, say: Callable[[str], None]
) -> dict[str, list[Run]]:
    wanted: dict[str, list[TrainConfig]] = {
        name: [config.resolved() for config in spec.quick()] for name, spec in specs.items() if spec.quick is not None
    }
    configs = unique([config for group in wanted.values() for config in group])
    done: dict[str, Run] = {}

    def on_outcome(outcome: plan.Outcome) -> None:
        if outcome.run is None:
            raise LabError(f"a run for the figures failed: {outcome.error}")
        done[key(outcome.config)] = outcome.run
        say(plan.tell(outcome, len(done), len(configs)))

    plan.run_all(configs, out, workers=workers, data_dir=data_dir, on_outcome=on_outcome)
    return {name: [done[key(config)] for config in group] for name, group in wanted.items()}
