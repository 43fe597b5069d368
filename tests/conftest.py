"""What every test shares: a fixed seed, one hypothesis profile, and tests that skip, with the reason.

With torch, numpy, pytest and hypothesis alone, as on a machine that is lent for its GPU, files that need more are left
out: ``python -m pytest -m gpu tests`` runs there.
"""

import contextlib
import gc
import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples on every machine and every run: a failure in CI is a failure here.
settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    max_examples=8,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.differing_executors],
)
# More shapes, for whoever changes the maths: pytest --hypothesis-profile=thorough
settings.register_profile("thorough", parent=settings.get_profile("fixed"), derandomize=False, max_examples=200)
settings.load_profile("fixed")

# What the extra "lab" brings, and what imports it.
EXTRAS = ("matplotlib", "optuna", "rich", "typer", "yaml", "PIL")
NEEDS = re.compile(
    rf"^(from|import) ({'|'.join(EXTRAS)}|fuzz|cite|ekfac\.cli|ekfac\.lab\.show|ekfac\.lab\.search\.(sweep|study)"
    r"|lab\.show|ekfac\.lab\.suite\.(page|pictures))\b",
    re.MULTILINE,
)


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


MISSING = [name for name in EXTRAS if not _there(name)]


def pytest_report_header() -> list[str]:
    return [f"without {', '.join(MISSING)}: files that need ekfac[lab] are not collected"] if MISSING else []


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    python = collection_path.is_file() and collection_path.suffix == ".py"
    return True if MISSING and python and NEEDS.search(collection_path.read_text()) else None


if hasattr(os, "SCHED_BATCH"):
    # Gloo's thread spins while another holds its lock. As a batch job, like all that is started from here, it does not
    # push that other off its core when data comes: ranks that outnumber the cores take half the time.
    with contextlib.suppress(OSError):  # where it is forbidden they are slower
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if not torch.cuda.is_available():
    # For a device that may come later torch notes the stack of whoever sets a seed: half a millisecond each time.
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        kind.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch sees none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected out of every garbage collection: it takes a third of a second each."""
    leave_out_of_collections()


def leave_out_of_collections() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture
def quick_collections() -> None:
    """For tests that collect: what others have imported or kept since is left out too, and for good."""
    leave_out_of_collections()
