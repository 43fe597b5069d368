"""Small configurations and made-up records for the tests of the suite."""

import copy
from typing import Any

import numpy

from lab.conftest import cifar_bytes, idx

TINY: dict[str, Any] = {
    "seeds": [0, 1],
    "evaluations": 4,
    "methods": {
        "ekfac": {
            "label": "EKFAC (nothing set)",
            "optimizer": "ekfac-default",
            "lr_factors": [1, 3],
            "fixed": True,
            "schedules": ["own"],
            "ours": True,
        },
        "adamw": {"label": "AdamW", "lr": [0.001, 0.01, 0.03], "decay": 1},
        "schedule-free": {"label": "Schedule-Free", "lr": [0.003, 0.03, 0.01], "schedules": ["constant"], "decay": 1},
    },
    "tasks": {
        "tabular": {
            "label": "table",
            "steps": 20,
            "warmup": 2,
            "weight_decay": 0.01,
            "settings": {"width": 8, "layers": 2, "examples": 400, "batch_size": 50},
        }
    },
}


def tiny(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(TINY), **changes}


def record(key: str, values: list[float], **more: Any) -> dict[str, Any]:
    """Return a record with these validation losses at steps 0, 10, 20, ..."""
    history = [
        {"step": 10 * n, "seconds": 1.0 * n, "train_loss": value, "validation_loss": value}
        for n, value in enumerate(values)
    ]
    found = {"key": key, "status": "finished", "measure": "loss", "steps": 10 * (len(values) - 1), "history": history}
    versions = {"torch": "0", "source": "0"}
    return {**found, "timed": True, "wall": 1.0, "versions": versions, "machine": {"gpu": "none"}, **more}


def write_data(official) -> Any:
    """Write small files in the official layout of every dataset of the suite; return the folder."""
    random = numpy.random.default_rng(0)
    for name in ("mnist", "fashion-mnist"):
        raw = {}
        for role, count in (("train", 60), ("test", 20)):
            raw[f"{role}_images"] = idx(random.integers(0, 256, (count, 28, 28)))
            raw[f"{role}_labels"] = idx(numpy.arange(count) % 10)
        official(name, raw, ".gz", name)
    official("cifar10", cifar_bytes(), ".xz", "cifar10")
    words = "".join(map(chr, 97 + random.integers(0, 26, 4000))).encode()
    official("shakespeare", {"all": words}, "", "text")
    return official("bpe", {"all": random.integers(0, 8192, 4000).astype("<u2").tobytes()}, ".xz", "text")
