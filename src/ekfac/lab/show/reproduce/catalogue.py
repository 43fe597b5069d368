"""What can be reproduced: every figure of the paper, and the tables of this project's pages.

An experiment has up to four levels: ``full`` is the paper's search; ``grid`` only its grid; ``known`` each method at
the setting found by a recorded search, for as long as in the paper; and ``quick`` the small runs of ``--quick``. Given
a budget, those on CIFAR-10 are searched by successive halving: :mod:`ekfac.lab.search.cifar`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import Registry
from ekfac.lab.search import cifar, space
from ekfac.lab.search.known import COMPARED, KNOWN, autoencoder_search, network
from ekfac.lab.show.figures import FIGURES
from ekfac.lab.show.reproduce.claims import CLAIMS, Claim

LEVELS = ("full", "grid", "known", "quick")


@dataclass(frozen=True)
class Experiment:
    """One figure of the paper, or one table of ours.

    Attributes:
        figure: The figure to draw.
        where: Where it appears, in the paper or on a page.
        claims: The claims about it, each with the rule by which it is judged.
        dataset: The dataset for what is computed without runs.
        known: Each method at a setting that is known to work; ``None`` if no run is needed.
        search: The methods that the paper searches over, as settings.
    """

    figure: str
    where: str
    claims: tuple[Claim, ...] = ()
    dataset: str = "mnist"
    known: Callable[[], list[TrainConfig]] | None = None
    search: Callable[[], list[TrainConfig]] | None = None

    @property
    def halving(self) -> bool:
        """Whether its settings are searched by successive halving, given a budget."""
        return self.figure in cifar.NAMES

    @property
    def levels(self) -> tuple[str, ...]:
        """The available levels, the most thorough first; none if nothing is trained."""
        quick = FIGURES.get(self.figure).quick
        there = {"full": self.search, "grid": self.search, "known": self.known, "quick": quick if self.known else None}
        return tuple(level for level in LEVELS if there[level] is not None)

    def settings(self, level: str) -> list[TrainConfig]:
        """Return the runs of a level, resolved."""
        quick = FIGURES.get(self.figure).quick
        if level == "quick" and quick is not None:
            found: Iterable[TrainConfig] = quick()
        elif level == "known" and self.known is not None:
            found = self.known()
        else:
            found = _searched(self.search() if self.search else [], space.RANDOM_POINTS if level == "full" else 0)
        return space.unique([config.resolved() for config in found])


def _searched(bases: Sequence[TrainConfig], random_points: int) -> list[TrainConfig]:
    """Return the paper's grid around every method, and random points around it."""
    found: list[TrainConfig] = []
    for base in bases:
        sizes = () if base.batch_size is None else (base.batch_size,)
        found += space.settings(base, space.Space(batch_sizes=sizes, random_points=random_points))
    return found


EXPERIMENTS: Registry[Experiment] = Registry("experiment")
for _name, _experiment in {
    "rescaling": Experiment("rescaling", "Fig. 1"),
    "convolution": Experiment("convolution", "appendix, a diagram"),
    "correlation": Experiment("correlation", "Fig. 3, left"),
    "error": Experiment("error", "Fig. 3, right"),
    "autoencoder": Experiment("autoencoder", "Fig. 4; mnist.md", search=autoencoder_search),
    "frequency": Experiment("frequency", "Fig. 5; mnist.md"),
    "vgg11": Experiment("vgg11", "Fig. 6", dataset="cifar10", search=network("vgg11")),
    "resnet34": Experiment("resnet34", "Fig. 7", dataset="cifar10", search=network("resnet34")),
    "batch-size": Experiment("batch-size", "appendix", dataset="cifar10"),
    "schedule": Experiment("schedule", "appendix", dataset="cifar10"),
    "sensitivity": Experiment("sensitivity", "Fig. 4d; mnist.md"),
    **{f"comparison-{task}": Experiment("comparison", "comparison.md") for task in COMPARED},
}.items():
    _claims = CLAIMS.get(_experiment.figure, ())
    EXPERIMENTS.add(_name, replace(_experiment, claims=_claims, known=KNOWN.get(_name)))
