"""One network, its data and its optimizer, trained one epoch at a time.

No step waits for the device: the loss is summed there and read once per epoch, which is when divergence is detected.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ekfac.lab.config import DTYPES, TrainConfig
from ekfac.lab.data.datasets import Dataset, Split
from ekfac.lab.optimizers import build_optimizer
from ekfac.lab.registry import LabError, calling
from ekfac.lab.tasks import TASKS, build_network
from ekfac.lab.training.ranks import Ranks

EVALUATION_BATCH = 1000
# A loss this many times the initial one counts as divergence.
EXPLODED = 100.0


class Trainer:
    """A network, its data and its optimizer, trained epoch by epoch.

    Args:
        config: The run's settings, resolved.
        data: Its dataset, on the CPU.
        ranks: The processes that train together.
    """

    def __init__(self, config: TrainConfig, data: Dataset, ranks: Ranks | None = None) -> None:
        self.config = config
        self.task = TASKS.get(config.task)
        self.ranks = ranks or Ranks()
        self.ranks.check(given(config.batch_size))
        self.device = self.ranks.device(config.device)
        self.epoch = 0
        self.steps_done = 0
        self.seconds = 0.0
        self.initial_loss = math.nan
        self._untrained: dict[str, Any] | None = None
        # The number of steps taken in this epoch, the sum of their losses, and the start time.
        self.step_in_epoch, self._total, self._started = 0, 0.0, 0.0
        #: The mean loss of each batch in the last epoch, or since resuming within it; read once per epoch.
        self.step_losses: list[Tensor] = []
        if config.limit is not None:
            data = data.limited(config.limit)
        _check_data(config, data, self.task.input_shape)
        self.floors = {}
        if self.task.floor is not None:
            with calling(f"task {config.task}: floor(x)"):
                self.floors = {k: self.task.floor(split.x.double()).mean().item() for k, split in data.splits.items()}
        self.data = data.to(self.device, DTYPES[config.dtype])
        torch.manual_seed(config.seed)
        # Initialise on the CPU, so that the same seed gives the same weights on every device.
        built = build_network(config.task, given(config.width), config.batch_norm)
        self.model = built.to(self.device, DTYPES[config.dtype])
        self.optimizer = build_optimizer(config.optimizer, self.model, config.optimizer_options())
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        trained = self.ranks.wrapped(self.model)
        self._forward: Callable[[Tensor], Tensor] = torch.compile(trained) if config.compile else trained

    @property
    def parameters(self) -> int:
        """The number of trainable parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def _output(self, x: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        if self.config.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        half = self.config.dtype == "bfloat16"
        with (
            calling(f"task {self.config.task}: its network, on examples {x.dtype} of shape {tuple(x.shape)},"),
            torch.autocast(self.device.type, torch.bfloat16) if half else contextlib.nullcontext(),
        ):
            output = forward(x)
        return output.float() if half else output

    def losses(self, output: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each example.

        Raises:
            LabError: If the task's function fails, or returns anything else.
        """
        return self._by_example("losses(output, x, y)", self.task.losses, output, x, y)

    def _by_example(self, name: str, function: Callable[..., Any], *given: Tensor) -> Tensor:
        what = f"task {self.config.task}: {name}"
        with calling(what):
            found = function(*given)
        if not isinstance(found, Tensor) or found.shape != given[-1].shape[:1]:
            shown = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise LabError(f"{what} returned {shown}. Allowed: one number for each of the {len(given[-1])} examples")
        return found

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _sum(self) -> Tensor:
        return torch.zeros((), device=self.device, dtype=torch.float32 if self.device.type == "mps" else torch.float64)

    def train_epoch(self, on_step: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Train one epoch, evaluate, and return the record.

        The order of examples depends only on the seed and the epoch. An incomplete last batch is dropped, so that every
        step has the same number of examples.
        """
        x, y = self.data.train
        batch = given(self.config.batch_size)
        steps = len(x) // batch
        shuffle = torch.Generator().manual_seed((self.config.seed << 20) + self.epoch)
        order = torch.randperm(len(x), generator=shuffle).to(self.device)
        self.model.train()
        total, first = self._sum() + (0.0 if self.ranks.rank else self._total), self.step_in_epoch
        self.step_losses = []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._synchronize()
        self._started = time.perf_counter()
        try:
            for step in range(first, steps):
                self._set_lr(step / steps)
                index = self.ranks.part(order[step * batch : (step + 1) * batch])
                self._step(x[index], y[index], total)
                self.step_in_epoch, self._sum_so_far = step + 1, total
                if on_step is not None:
                    on_step(step + 1, steps)
        except (RuntimeError, LabError):
            # An optimizer may raise on non-finite numbers; then the run has diverged.
            if math.isfinite(total.item()):
                raise
        self._synchronize()
        seconds = time.perf_counter() - self._started
        total = self.ranks.sum(total)
        if self.ranks.size > 1:
            self.step_losses = list(self.ranks.sum(torch.stack(self.step_losses)))
        self.step_in_epoch, self._total = 0, 0.0
        self.epoch += 1
        self.steps_done += steps
        self.seconds += seconds
        rate = (steps - first) * batch / seconds
        return self._record(total.item() / steps, rate, _peak_memory(self.device))

    def _step(self, x: Tensor, y: Tensor, total: Tensor) -> None:
        """Take one step; add the batch's mean loss before it to the total.

        With several processes, each has a part of the batch. As gradients are averaged, each multiplies its part of the
        mean by the number of processes.
        """
        self.optimizer.zero_grad()
        losses, size = self.losses(self._output(x, self._forward), x, y), self.ranks.size
        if not losses.requires_grad:
            raise LabError(f"task {self.config.task}: its losses do not depend on the network's parameters")
        loss = losses.mean() if size == 1 else losses.sum() / given(self.config.batch_size)
        (loss if size == 1 else loss * size).backward()
        self.step_losses.append(loss.detach())
        total += self.step_losses[-1]
        self.optimizer.step()

    def start_from(self, record: Mapping[str, Any]) -> None:
        """Use the untrained network's losses from a run with the same start."""
        self._untrained = {name: value for name, value in record.items() if name.endswith(("_loss", "_accuracy"))}

    def initial_record(self) -> dict[str, Any]:
        """Evaluate the untrained network, unless its record is known."""
        record = self._record(None, None, _peak_memory(self.device), self._untrained)
        self.initial_loss = record["train_loss"] if record["train_loss"] is not None else math.nan
        return record

    def _record(
        self,
        mean_loss: float | None,
        images_per_second: float | None,
        peak_memory: int | None,
        known: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        record: dict[str, Any] = {
            "epoch": self.epoch,
            "step": self.steps_done,
            "seconds": self.seconds,
            "train_loss_mean": mean_loss,
        }
        for name, split in self.data.splits.items() if known is None else ():
            record[f"{name}_loss"], record[f"{name}_accuracy"] = self._evaluate(split)
        record.update(known or {})
        losses = [value for name, value in record.items() if "loss" in name and value is not None]
        record["diverged"] = not all(
            math.isfinite(loss) and not loss > EXPLODED * max(self.initial_loss, 1.0) for loss in losses
        )
        record["lr"] = float(self.optimizer.param_groups[0]["lr"])
        record["images_per_second"] = images_per_second
        record["peak_memory"] = peak_memory
        stats = getattr(self.optimizer, "stats", dict)
        record["optimizer"] = {name: float(value) for name, value in stats().items()}
        plain: dict[str, Any] = _without_nan(record)
        return plain

    @torch.no_grad()
    def _evaluate(self, split: Split) -> tuple[float, float | None]:
        """Return mean loss and accuracy over a whole split, in evaluation mode."""
        self.model.eval()
        self.ranks.share_buffers(self.model)
        loss, correct = self._sum(), self._sum()
        parts = (self.ranks.part(whole).split(EVALUATION_BATCH) for whole in (split.x, split.y))
        for x, y in zip(*parts, strict=True):
            output = self._output(x, self._forward if self.ranks.size == 1 else self.model)
            loss += self.losses(output, x, y).sum()
            if self.task.correct is not None:
                correct += self._by_example("correct(output, y)", self.task.correct, output, y).sum()
        loss, correct = self.ranks.sum(torch.stack([loss, correct])).unbind()
        accuracy = correct.item() / len(split.y) if self.task.correct is not None else None
        return loss.item() / len(split.y), accuracy

    def _set_lr(self, part: float) -> None:
        """Set the learning rate for the next step, at this fraction of the epoch, if there is a schedule."""
        if self.config.halve_every is None and not self.config.cosine:
            return
        factor = 1.0
        if self.config.halve_every is not None:
            factor = 0.5 ** (self.epoch // self.config.halve_every)
        if self.config.cosine:
            factor *= 0.5 + 0.5 * math.cos(math.pi * (self.epoch + part) / given(self.config.epochs))
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume, as plain data, also between two steps of an epoch."""
        inside = self.step_in_epoch > 0
        if inside:
            self._synchronize()
        return {
            "epoch": self.epoch,
            "steps_done": self.steps_done,
            "seconds": self.seconds + (time.perf_counter() - self._started if inside else 0.0),
            "step_in_epoch": self.step_in_epoch,
            "total": self.ranks.sum(self._sum_so_far).item() if inside else 0.0,
            "initial_loss": self.initial_loss,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        self.epoch, self.steps_done = state["epoch"], state["steps_done"]
        self.seconds, self.initial_loss = state["seconds"], state["initial_loss"]
        self.step_in_epoch, self._total = state.get("step_in_epoch", 0), state.get("total", 0.0)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and state["cuda_rng"]:
            torch.cuda.set_rng_state_all(state["cuda_rng"])

    def close(self) -> None:
        """Close the optimizer, which removes its hooks from the network."""
        close = getattr(self.optimizer, "close", None)
        if close is not None:
            close()


def _check_data(config: TrainConfig, data: Dataset, shape: tuple[int, ...]) -> None:
    for name, split in data.splits.items():
        found, where = tuple(split.x.shape[1:]), f"dataset {data.name}" + ("" if name == "train" else f", {name}:")
        if found != shape:
            raise LabError(f"task {config.task} takes examples of shape {shape}; {where} has {found}")
        if not len(split.x) == len(split.y) > 0:
            counts = f"{len(split.x)} examples and {len(split.y)} labels"
            raise LabError(f"dataset {data.name}, {name}: {counts}. Allowed: as many of each, at least one")
    if config.channels_last and len(shape) != 3:
        raise LabError(f"channels_last is for images; task {config.task} takes examples of shape {shape}")
    if len(data.train.x) < given(config.batch_size):
        raise LabError(f"batch_size {config.batch_size} is more than the {len(data.train.x)} training examples")


def given(value: Any) -> Any:
    """Return a setting of a resolved config, in which none is missing."""
    assert value is not None, "the config must be resolved"
    return value


def _peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes: on a GPU of this epoch's tensors, on a CPU of the process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return None


def _without_nan(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by ``None``."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
