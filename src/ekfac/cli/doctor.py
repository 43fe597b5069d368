"""The command ``ekfac doctor``: probe steps on a task, and recommended settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import typer
from rich.console import Console
from torch import Tensor

import ekfac
from ekfac.diagnosis.doctor import Diagnosis
from ekfac.lab.boundary import interruptible
from ekfac.lab.config import TrainConfig, parse_options
from ekfac.lab.data.datasets import load_dataset
from ekfac.lab.optimizers import EKFAC, OPTIMIZERS
from ekfac.lab.registry import LabError, load_plugin
from ekfac.lab.show import display
from ekfac.lab.tasks import TASKS
from ekfac.lab.training.trainer import Trainer, given

_SET = typer.Option([], "--set", metavar="NAME=VALUE", help="Any option of EKFAC.")
_PLUGIN = typer.Option([], "--plugin", help="Your file or module that registers tasks, datasets or optimizers.")


def examine(
    config: TrainConfig,
    steps: int,
    trial_steps: int,
    data_dir: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Diagnosis:
    """Try EKFAC on a task and return what :func:`ekfac.doctor` found.

    Args:
        config: The task, its data and the options of EKFAC to start from.
        steps: The number of probe steps.
        trial_steps: The number of steps in each short run.
        data_dir: Folder of the official data files.
        say: Called with a line about each stage.

    Raises:
        LabError: If a setting or the data are wrong, or the optimizer is not EKFAC.
    """
    config = config.resolved()
    if OPTIMIZERS.get(config.optimizer).build is not EKFAC:
        raise LabError(f"doctor examines EKFAC (ekfac, ekfac-ra, ekfac-default), not {config.optimizer}")
    # The trainer needs an optimizer; SGD is a placeholder that puts no hooks on the network.
    same = {name: getattr(config, name) for name in ("dataset", "width", "limit", "batch_size", "batch_norm", "seed")}
    plain = TrainConfig(config.task, "sgd", **same, device=config.device, dtype=config.dtype, plugins=config.plugins)
    trainer = Trainer(plain.resolved(), load_dataset(given(config.dataset), data_dir))
    try:
        return ekfac.doctor(
            trainer.model,
            _batches(trainer, steps),
            _loss(trainer),
            steps=steps,
            trial_steps=trial_steps,
            say=say,
            **config.optimizer_options(),
        )
    except (TypeError, ValueError) as error:
        raise LabError(f"doctor: {error}") from error


def _batches(trainer: Trainer, steps: int) -> list[Any]:
    """Return the first batches of the first epoch; everything the loss needs is in their target."""
    x, y = trainer.data.train
    size = given(trainer.config.batch_size)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(trainer.config.seed)).to(x.device)
    chosen = [order[i * size : (i + 1) * size] for i in range(min(steps, len(x) // size))]
    return [(x[index], (x[index], y[index])) for index in chosen]


def _loss(trainer: Trainer) -> Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]:
    return lambda output, target: trainer.losses(output, *target)


def doctor(
    task: str = typer.Argument(help=f"One of: {', '.join(TASKS)}, or a plugin's."),
    optimizer: str = typer.Option("ekfac-default", help="ekfac-default, ekfac-ra or ekfac: what to start from."),
    steps: int = typer.Option(50, help="Probe steps."),
    trial_steps: int = typer.Option(30, help="Steps of each of the short runs that settings are chosen from."),
    lr: float | None = typer.Option(None, help="Learning rate in the middle of the grid."),
    damping: float | None = typer.Option(None, help="Damping in the middle of the grid."),
    sua: bool | None = typer.Option(None, help="Spatially uncorrelated approximation of convolutions."),
    dataset: str | None = typer.Option(None, help="Dataset, by name [default: the task's]."),
    width: int | None = typer.Option(None, help="Width of the first layer."),
    limit: int | None = typer.Option(None, help="Use only this many examples."),
    batch_size: int | None = typer.Option(None, help="Examples a step [default: the task's]."),
    batch_norm: bool = typer.Option(False, help="With batch-norm."),
    seed: int = typer.Option(0, help="Seed of the initial weights and of the order of examples."),
    device: str = typer.Option("auto", help="cpu, cuda, ... or auto."),
    set: list[str] = _SET,
    plugin: list[str] = _PLUGIN,
    data_dir: str | None = typer.Option(None, help="Folder of the data files."),
    json: bool = typer.Option(False, "--json", help="Print the result as JSON and nothing else."),
) -> None:
    """Try EKFAC on a task for about fifty steps: coverage, gradient noise, cost per step, recommended settings."""
    for where in plugin:
        load_plugin(where)
    config = TrainConfig(
        task=task,
        optimizer=optimizer,
        batch_norm=batch_norm,
        dataset=dataset,
        width=width,
        limit=limit,
        batch_size=batch_size,
        lr=lr,
        damping=damping,
        sua=sua,
        seed=seed,
        device=device,
        options=parse_options(set),
        plugins=tuple(plugin),
    )
    console = Console()
    with interruptible("nothing was written"):
        if json:
            found = examine(config, steps, trial_steps, data_dir)
        elif console.is_terminal:
            with console.status("loading data") as status:
                found = examine(config, steps, trial_steps, data_dir, status.update)
        else:
            console.print("loading data", highlight=False)
            found = examine(config, steps, trial_steps, data_dir, lambda line: console.print(line, highlight=False))
    if json:
        display.show_json({"task": task, "optimizer": optimizer, **found.to_dict()})
        return
    print(f"{task} by {optimizer}: {found}")
    if found.works:
        print(f"\nto paste:\n  {train_line(config, found.settings)}\n  {found.python_line()}")


def train_line(config: TrainConfig, settings: Mapping[str, float | int]) -> str:
    """Return the ``ekfac train`` command with the recommended settings."""
    rounded = {name: float(f"{v:.2g}") if isinstance(v, float) else v for name, v in settings.items()}
    return replace(config, **rounded).command()  # type: ignore[arg-type]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(epilog="Examples:\n\n`ekfac doctor classifier`\n\n`ekfac doctor vgg11 --width 16 --sua --json`")(doctor)
