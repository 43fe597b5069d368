"""What every test shares: a fixed seed, one hypothesis profile, and GPU tests that skip, with the reason."""

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
