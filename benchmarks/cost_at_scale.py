"""What the default costs a rank on models of 7 and 70 billion parameters, by arithmetic: bytes, wire, time.

    python benchmarks/cost_at_scale.py [--models 7B 70B] [--ranks 8 64 1024] [--max-factor-dim 4096 8192] [--out FILE]

Nothing of that size is run. The models are built without memory (on the device "meta"), with the shapes of Llama 2;
blocks, bytes, owners and intervals are the library's own, for so many ranks; the bytes of a step are those that
tests/optim/distributed/test_sharded.py counts on 2 and 4 ranks. Times are put together from pieces that
were measured on one H200 and are read from results/bench/: solvers_h200.txt and turn_h200.txt.

Assumed:
 1. fully_shard over all ranks, pieces of parameters and gradients in float32, gathered in bfloat16 and averaged in
    float32: FSDP2 itself then sends 2 + 2 + 4 bytes a parameter and step.
 2. Every GPU sends 50 GB/s (400 Gb/s) when all do. Within a machine it is more.
 3. Beyond the widest size that was measured (2,048) a decomposition, a product and an iteration cost as d^3.
 4. Products run in float32, as fast as one of 2,048 x 2,048.
 5. No message and no refresh runs beside anything else. In fact A and B are sent beside the backward pass, and on a
    GPU refreshes run beside the next pass.
 6. In training: the first 300 steps, which take more batches into A and B, and refresh more often, are not counted.

With --out FILE.json the rows go there, and as a table to FILE.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ekfac.curvature.blocks import MAX_FACTOR_DIM, Block, find_blocks
from ekfac.optim.distributed.buckets import sizes
from ekfac.optim.distributed.owners import Owners
from ekfac.optim.distributed.processes import Processes
from ekfac.optim.methods.factory import eigen_methods
from ekfac.optim.statistics.schedule import INTERVAL, LATER, LATER_BATCHES, stretches
from ekfac.rules import RULES

RECORDS = Path(__file__).resolve().parents[1] / "results" / "bench"
#: Width, width of the feed-forward part, of keys and values, layers, vocabulary.
MODELS = {"7B": (4096, 11008, 4096, 32, 32000), "70B": (8192, 28672, 1024, 80, 32000)}
#: Bytes that a GPU sends in a second.
LINK = 50e9
#: What FSDP2 sends a parameter and step: gathered twice in bfloat16, averaged in float32.
FSDP = 2 + 2 + 4
#: The default after step 300.
REFRESH_EVERY = INTERVAL * LATER


class Layer(nn.Module):
    """The matrices and scales of one layer of Llama."""

    def __init__(self, width: int, inner: int, keys: int) -> None:
        super().__init__()
        sizes = {"q": (width, width), "k": (width, keys), "v": (width, keys), "o": (width, width),
                 "gate": (width, inner), "up": (width, inner), "down": (inner, width)}  # fmt: skip
        for name, (inputs, outputs) in sizes.items():
            self.add_module(name, nn.Linear(inputs, outputs, bias=False))
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])


def network(name: str) -> nn.Module:
    """A model of the shapes of Llama 2, without memory."""
    width, inner, keys, layers, vocabulary = MODELS[name]
    with torch.device("meta"):
        return nn.ModuleDict(
            {
                "embedding": nn.Embedding(vocabulary, width),
                "layers": nn.ModuleList(Layer(width, inner, keys) for _ in range(layers)),
                "norm": nn.RMSNorm(width),
                "head": nn.Linear(width, vocabulary, bias=False),
            }
        )


class SoMany(Processes):
    """A number of processes, none of which runs."""

    def __init__(self, count: int) -> None:
        super().__init__(None)
        object.__setattr__(self, "count", count)

    @property
    def size(self) -> int:
        return self.count  # type: ignore[attr-defined, no-any-return]


class Pieces:
    """Milliseconds that were measured on one H200, and what they say of other sizes."""

    def __init__(self, folder: Path = RECORDS) -> None:
        self.solvers = dict(_rows(folder / "solvers_h200.txt", "torch.float64"))
        single = dict(_rows(folder / "solvers_h200.txt", "torch.float32"))
        turns = dict(_rows(folder / "turn_h200.txt", "whole"))
        self.widest = max(self.solvers)
        self.product = single[self.widest]["mm"]
        # An iteration is a product and two passes of Cholesky QR; how much more it took as a whole, where it is known.
        known = max(turns)
        self.factor = turns[known]["whole"] / self._pieces(known)
        self.iteration = self.factor * self._pieces(self.widest)
        self.solve = self.solvers[self.widest]["eigh"]

    def _pieces(self, size: int) -> float:
        row = self.solvers[size]
        return row["mm"] + 2 * (row["mm"] + row["chol"] + row["trsm"])

    def scaled(self, milliseconds: float, size: int) -> float:
        """Seconds at another size, as d^3."""
        return milliseconds / 1e3 * (size / self.widest) ** 3

    def projection(self, products: float) -> float:
        """Seconds of so many multiplications."""
        return self.product / 1e3 * products / self.widest**3


def _rows(file: Path, marker: str) -> list[tuple[int, dict[str, float]]]:
    """Lines such as ``501 torch.float64 mm 0.019 chol 0.227 chol x4 0.582``, by their size."""
    found = []
    for line in file.read_text().splitlines():
        words = line.split()
        if len(words) > 2 and words[0].isdigit() and words[1] == marker:
            rest = words[2:] if "." in marker else words[1:]
            values: dict[str, float] = {}
            name: list[str] = []
            for word in rest:
                try:
                    values[" ".join(name)] = float(word)
                    name = []
                except ValueError:
                    name.append(word)
            found.append((int(words[0]), values))
    return found


@dataclass(frozen=True)
class Row:
    """What a model costs on so many ranks; bytes and seconds of the rank that has the most."""

    model: str
    parameters: int
    max_factor_dim: int
    ranks: int
    blocks: int
    state: float
    state_mean: float
    during_step: float
    fsdp_sent: float
    sent: float
    statistics_sent: float
    wire_seconds: float
    fsdp_wire_seconds: float
    projection_seconds: float
    refresh_seconds: float
    refresh_seconds_a_step: float


def cost(model: str, ranks: int, max_factor_dim: int, pieces: Pieces) -> Row:
    """Add up what the library would do."""
    blocks = find_blocks(network(model), max_factor_dim=max_factor_dim)
    method, elementwise = eigen_methods(RULES["belief"](), "spectral")

    def numbers(block: Block) -> int:
        return (method if block.covered else elementwise).numbers(block)

    owners = Owners(SoMany(ranks), numbers)
    owners.assign(blocks)
    of_rank: list[list[Block]] = [[] for _ in range(ranks)]
    for block in blocks:
        of_rank[owners.of(block)].append(block)
    parameters = sum(b.shape.numel for b in blocks)
    away = (ranks - 1) / ranks
    state = [4.0 * sum(map(numbers, mine)) for mine in of_rank]
    owned = [4.0 * sum(b.shape.numel for b in mine) for mine in of_rank]
    # Its pieces of gradient and parameter to the owners, and the pieces of what it owns to the others.
    sent = [away * (2 * 4 * parameters / ranks + own) for own in owned]
    # A reduction sends one half of A and B once from every rank, twice in an interval.
    factors = 4.0 * sum(sum(sizes(b)) for b in blocks if b.covered)
    statistics = away * factors * LATER_BATCHES / REFRESH_EVERY
    refresh, a_step, projection = zip(*(times(mine, pieces) for mine in of_rank), strict=True)
    own_wire = (max(sent) + statistics) / LINK
    return Row(
        model, parameters, max_factor_dim, ranks, len(blocks), max(state), sum(state) / ranks, 2 * max(owned),
        away * FSDP * parameters, max(sent), statistics, own_wire, away * FSDP * parameters / LINK,
        max(projection), max(refresh), max(a_step),
    )  # fmt: skip


def times(blocks: list[Block], pieces: Pieces) -> tuple[float, float, float]:
    """Seconds of one refresh of all these blocks, of refreshes as they fall on a step, and of a step's projections."""
    refresh = a_step = projection = 0.0
    for block in (b for b in blocks if b.covered):
        shape, (stretch_A, stretch_B) = block.shape, stretches(block, "cuda")
        sides = [(shape.inputs, block.diagonal_A, stretch_A), (shape.out, block.diagonal_B, stretch_B)]
        for width, diagonal, stretch in sides:
            if not diagonal and width > 1:
                once = shape.groups * pieces.scaled(pieces.iteration, width)
                refresh += once
                a_step += once / (REFRESH_EVERY * stretch)
                projection += pieces.projection(2.0 * shape.numel * width)  # there and back
    return refresh, a_step, projection


def table(rows: list[Row], pieces: Pieces, command: str) -> str:
    """The rows as Markdown."""
    lines = [
        f"`{command}`", "",
        f"An iteration at {pieces.widest:,}: {pieces.iteration:.1f} ms ({pieces.factor:.2f} times its measured pieces, "
        f"as at 1,001); a product in float32: {pieces.product:.2f} ms.", "",
        "| model | sides up to | ranks | state GB, fullest (mean) | whole for a step GB | FSDP2 sends GB | ours GB | "
        "A and B GB | wire ms (FSDP2's) | projections ms | refreshes a step ms | all bases once ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for r in rows:
        lines.append(
            f"| {r.model} | {r.max_factor_dim:,} | {r.ranks:,} | {r.state / 1e9:.2f} ({r.state_mean / 1e9:.2f}) | "
            f"{r.during_step / 1e9:.2f} | {r.fsdp_sent / 1e9:.1f} | {r.sent / 1e9:.2f} | "
            f"{r.statistics_sent / 1e9:.2f} | {r.wire_seconds * 1e3:.0f} ({r.fsdp_wire_seconds * 1e3:.0f}) | "
            f"{r.projection_seconds * 1e3:.0f} | {r.refresh_seconds_a_step * 1e3:.1f} | {r.refresh_seconds * 1e3:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Print the table; with --out, write it too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 1024])
    parser.add_argument("--max-factor-dim", nargs="+", type=int, default=[MAX_FACTOR_DIM, 2 * MAX_FACTOR_DIM])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if any(n < 2 for n in given.ranks):
        parser.error(f"--ranks {min(given.ranks)}: must be at least 2")
    pieces = Pieces()
    rows: list[Row] = []
    for model in given.models:
        for limit in given.max_factor_dim:
            new = [cost(model, ranks, limit, pieces) for ranks in given.ranks]
            if not any(old.model == model and old.state_mean == new[0].state_mean for old in rows):  # nothing changes
                rows += new
    command = shlex.join(["python", "benchmarks/cost_at_scale.py", *(sys.argv[1:] if arguments is None else arguments)])
    text = table(rows, pieces, command)
    print(text)
    if given.out is not None:
        record: dict[str, Any] = {"command": command, "rows": [asdict(row) for row in rows]}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        given.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
