"""A task that takes milliseconds, for tests of the search: logistic regression on made-up points.

``EKFAC_TEST_LOG`` names a file that gets a line whenever a network is built; ``EKFAC_TEST_SLEEP`` slows every step.
So that no test hangs on who is faster: ``EKFAC_TEST_HOLD``, "2,20", has the second network of a process wait at its
20th loss until somebody ends the process, and ``EKFAC_TEST_MEET`` names a folder in which two processes wait for each
other before they train their first network.
"""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from ekfac.lab import Dataset, Split, Task, label_correct, label_cross_entropy, register_dataset, register_task

#: How many networks this process has trained, as others are built to look at options, and how many losses of the last
#: it has computed.
_count = {"networks": 0, "losses": 0}


def _data(folder: object) -> Dataset:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    return Dataset("tiny", {"train": Split(x[:40], y[:40]), "validation": Split(x[40:], y[40:])})


def _build(width: int, batch_norm: bool) -> nn.Module:
    log = os.environ.get("EKFAC_TEST_LOG")
    if log:
        with open(log, "a") as stream:
            stream.write("built\n")
    _count["losses"] = 0
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def _losses(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    time.sleep(float(os.environ.get("EKFAC_TEST_SLEEP", "0")))
    _count["networks"] += not _count["losses"]
    _count["losses"] += 1
    if "EKFAC_TEST_MEET" in os.environ:
        place = Path(os.environ["EKFAC_TEST_MEET"])
        (place / f"{os.getpid()}.here").touch()
        while len(list(place.glob("*.here"))) < 2:
            time.sleep(0.01)
    if os.environ.get("EKFAC_TEST_HOLD") == f"{_count['networks']},{_count['losses']}":
        time.sleep(600)
    return label_cross_entropy(output, x, y)


register_dataset("tiny", _data)
register_task("tiny", Task(_build, _losses, "tiny", (4,), width=3, batch_size=10, epochs=2, correct=label_correct))
