"""Steps of two versions of the package on one process, in turns: the default and the paper's rules, eager.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before/src src [--device cuda] [--turns 20] [--passes] [--out FILE.json]

Each version runs in a process of its own. All start at once; one at a time has its turn. The ratio is the median over
turns of after / before, by the wall clock on a GPU and by CPU time on a CPU. With --passes only the forward and the
backward pass are timed, in which hooks are called; the steps between them are taken all the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "running": {"scaling": "running", "lr": 1e-3, "damping": 1e-3},
    "per_example": {"scaling": "per_example", "lr": 1e-3, "damping": 1e-3},
    "kfac": {"lr": 1e-2, "damping": 0.1},
}
NETWORKS = {"layers": 50, "convolutions": 50, "autoencoder": 20, "deep": 50}


def train(network: str, rule: str, device: str, passes: bool) -> None:
    """Take as many steps as each line of the input says, and print the seconds of one."""
    import torch
    from torch import nn

    import ekfac

    torch.manual_seed(0)
    widths = {"layers": (64, 128, 128, 10), "autoencoder": (784, 1000, 500, 250, 30, 250, 500, 1000, 784)}
    widths["deep"] = (32,) * 25
    if network == "convolutions":
        layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4608, 10)]
        x = torch.randn(64, 3, 16, 16)
    else:
        sizes = widths[network]
        pairs = itertools.pairwise(sizes)
        layers = [m for a, b in pairs for m in (nn.Linear(a, b), nn.Tanh())]
        x = torch.randn(200, sizes[0])
    model, x = nn.Sequential(*layers).to(device), x.to(device)
    kind: Any = ekfac.KFAC if rule == "kfac" else ekfac.EKFAC
    opt = kind(model, **RULES[rule])
    print(ekfac.__file__, flush=True)
    clock = time.process_time if device == "cpu" else time.perf_counter
    wait = (lambda: None) if device == "cpu" else torch.cuda.synchronize
    for line in sys.stdin:
        begun, inside = clock(), 0.0
        for _ in range(int(line)):
            opt.zero_grad()
            entered = clock()
            model(x).square().mean().backward()
            if passes:
                wait()
                inside += clock() - entered
            opt.step()
        wait()
        print((inside if passes else clock() - begun) / int(line), flush=True)


def start(source: Path, network: str, rule: str, device: str, passes: bool) -> subprocess.Popen[str]:
    """Start one version."""
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    words = [sys.executable, "-P", __file__, "--worker", network, rule, device, *["passes"] * passes]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def check_source(process: subprocess.Popen[str], source: Path) -> None:
    """Wait until a version has started, and raise if it is another one.

    Raises:
        RuntimeError: If it did not start, or imported the package from elsewhere.
    """
    assert process.stdout is not None
    used = process.stdout.readline()
    if not used.startswith(str(source.resolve())):
        raise RuntimeError(f"{source}: {used.strip() or 'could not be started'} was used in its place")


def turn(process: subprocess.Popen[str], steps: int) -> float:
    """Let one version take some steps; returns the seconds of one."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    """Measure, print and record."""
    if sys.argv[1:2] == ["--worker"]:
        network, rule, device, *passes = sys.argv[2:]
        train(network, rule, device, bool(passes))
        return
    parse = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parse.add_argument("before", type=Path)
    parse.add_argument("after", type=Path)
    parse.add_argument("--device", default="cpu")
    parse.add_argument("--turns", type=int, default=20)
    parse.add_argument("--warm-up", type=int, default=310)
    parse.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parse.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parse.add_argument("--passes", action="store_true", help="time forward and backward alone")
    parse.add_argument("--out", type=Path)
    given = parse.parse_args()
    sources, kinds = (given.before, given.after), list(itertools.product(given.networks, given.rules))
    started = {kind: [start(source, *kind, given.device, given.passes) for source in sources] for kind in kinds}
    rows = []
    for versions in started.values():
        for version, source in zip(versions, sources, strict=True):
            check_source(version, source)
    for (network, rule), versions in started.items():
        for version in versions:
            turn(version, given.warm_up)
        times = [[turn(v, NETWORKS[network]) for v in versions] for _ in range(given.turns)]
        for version in versions:
            version.communicate()
        before, after = (statistics.median(t[i] for t in times) * 1e3 for i in (0, 1))
        ratio = statistics.median(b / a for a, b in times)
        rows.append({"network": network, "rule": rule, "before_ms": before, "after_ms": after, "ratio": ratio})
        print(json.dumps(rows[-1]), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps({"device": given.device, "turns": given.turns, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
