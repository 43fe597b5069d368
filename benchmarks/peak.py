"""The peak memory of a first step, beside what ekfac.summary says of it.

python benchmarks/peak.py --width 3000 --out results/reliability/peak.json
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path

import torch
from torch import nn

import ekfac
from ekfac.lab.training.runs import machine

MIB = 2**20


def resident() -> int:
    """Return the bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(width: int) -> dict[str, object]:
    """Take a step with a square linear layer; model and gradient are there before."""
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    x = torch.randn(32, width)
    model(x).square().mean().backward()
    told = ekfac.summary(model)
    before = resident()
    opt = ekfac.EKFAC(model)
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "width": width,
        "state_mib": told.bytes / MIB,
        "peak_mib": told.peak / MIB,
        "grew_mib": (after - before) / MIB,
        "command": f"python benchmarks/peak.py --width {width}",
        "threads": torch.get_num_threads(),
        "machine": machine()["processor"],
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=3000)
    parser.add_argument("--out", type=Path)
    values = parser.parse_args()
    text = json.dumps(measure(values.width), indent=1)
    print(text)
    if values.out is not None:
        values.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
