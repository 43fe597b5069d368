"""What every test shares: GPU tests are skipped, with the reason, where there is no GPU."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch sees none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
