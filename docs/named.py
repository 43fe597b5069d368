"""Numbers that pages take by a name: computed from records, or long to write as a path (see ``cite.py``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from cite import RESULTS, ROOT, load, pick

from ekfac.lab.search.selection import curves
from ekfac.lab.show.evidence import Record, suites, tables
from ekfac.lab.show.evidence.record import LOSS, at_end
from ekfac.lab.suite.results import Results, standing
from ekfac.lab.training.gather import find_runs

#: Networks that are timed eager and captured, in one record; the others are in an older one.
TIMED = {"gpt": "gpt29", "resnet18": "resnet18", "resnet34": "resnet34", "vits": "vit", "ae": "autoencoder"}
OPTIMIZERS = {
    "adamw": "AdamW (fused)",
    "ekfac": "EKFAC(model)",
    "adamw-captured": "AdamW, captured",
    "ekfac-captured": "EKFAC(model), graphed",
}


def speed(task: str, method: str, what: str) -> float:
    """Return milliseconds of late steps or those before, MiB, or the seconds of the first 300 steps."""
    if task in TIMED:
        rows = load(RESULTS / "bench/networks_h200.json")["rows"]
        wanted = TIMED[task], OPTIMIZERS[method]
        (times,) = [row for row in rows if (row["network"], row["optimizer"]) == wanted]
        parts = {"0-100": 100, "100-300": 200}
    else:
        times = pick(load(RESULTS / "step/speed/times.jsonl"), f"[0={task},1={method}].2")
        parts = {"0-20": 20, "20-100": 80, "100-300": 200}
    if what == "first_300":
        return sum(times[part] * steps for part, steps in parts.items()) / 1e3
    keys = {"ms": "300-400", "ms_300": "100-300", "peak": "peak_mib" if task in TIMED else "peak"}
    return float(times[keys.get(what, what)])


def slower(task: str, what: str = "ms", how: str = "") -> float:
    """Return how many times as much as AdamW EKFAC takes; ``how`` is ``"-captured"`` or nothing."""
    return speed(task, f"ekfac{how}", what) / speed(task, f"adamw{how}", what)


def share(mine: str, baseline: str, lowest: bool = False) -> float:
    """Return the time of one run to another's loss, as a share of what the other takes."""
    pair = [next(iter(curves(find_runs([*RESULTS.glob(each)])))) for each in (mine, baseline)]
    found = tables.ratio(*pair, goal=tables.lowest if lowest else tables.final)
    return float("nan") if found is None else found


def decayed(strength: float) -> float:
    """Return the mean accuracy of version 0.1's VGG11 with a weight decay."""
    files = RESULTS.glob("start/decay/vgg11-ekfac-default-*/config.json")
    those = [file for file in files if load(file)["config"]["options"]["weight_decay"] == strength]
    found = [float(load(file.with_name("metrics.jsonl"))[-1]["validation_accuracy"]) for file in those]
    return sum(found) / len(found)


@cache
def scale(model: str, widest: int, ranks: int, what: str) -> float:
    """Return what a rank keeps or sends, in GB, or computes, in ms a step, by ``benchmarks/cost_at_scale.py``."""
    where = f"[model={model},max_factor_dim={widest},ranks={ranks}]"
    row = pick(load(RESULTS / "bench/cost_at_scale.json")["rows"], where)
    return float(
        {
            "state": row["state"] / 1e9,
            "fsdp": row["fsdp_sent"] / 1e9,
            "ours": (row["sent"] + row["statistics_sent"]) / 1e9,
            "projections": row["projection_seconds"] * 1e3,
            "refreshes": row["refresh_seconds_a_step"] * 1e3,
        }[what]
    )


def mnist() -> dict[str, float]:
    """Return the auto-encoder's losses above their floor: ``mnist.BATCH.METHOD.mean``, ``.full``, ``.validation``."""
    measures = {"mean": LOSS, "full": "train_loss", "validation": "validation_loss"}
    record = Record(RESULTS)
    return {
        f"mnist.{size}.{name}.{short}": at_end(curve, measure)[0]
        for size in record.batch_sizes
        for name, curve in record.autoencoder(size).items()
        for short, measure in measures.items()
    }


def verdicts(verdict: str) -> float:
    """Count the claims of the paper with a verdict, in the table that is written from the record."""
    return (ROOT / "docs" / "claims.md").read_text().count(f"| {verdict} |")


@cache
def suite() -> Results:
    """Return the suite's results."""
    found = suites.results(Record(RESULTS))
    assert found is not None
    return found


def ended(task: str, method: str) -> float:
    """Return a method's final validation measure on a task of the suite: accuracy, or loss."""
    result = suite().table[task][method]
    return 1 - result.mean if result.accurate else result.mean


def counted(what: str) -> float:
    """Return on how many tasks the default is ahead of the best rival, or behind it, or how many there are."""
    found = standing(suite(), "ekfac")
    sets = {"ahead": found.ahead, "behind": found.behind, "tasks": [*found.ahead, *found.level, *found.behind]}
    return len(sets[what])


NAMED: dict[str, Callable[[], float]] = {
    f"{task}.{method}.{what}": partial(speed, task, method, what)
    for task in (*TIMED, "vit")
    for method in (OPTIMIZERS if task in TIMED else ("adamw", "ekfac"))
    for what in ("ms", "ms_300", "peak", "first_300")
}
NAMED |= {f"{task}.ratio": partial(slower, task) for task in (*TIMED, "vit")}
NAMED |= {f"{task}.{what}.ratio": partial(slower, task, what) for task in TIMED for what in ("first_300", "peak")}
NAMED |= {f"{task}.captured.ratio": partial(slower, task, how="-captured") for task in TIMED}
NAMED |= {
    f"suite.{task}.{method}": partial(ended, task, method) for task, row in suite().table.items() for method in row
}
NAMED |= {f"suite.{what}": partial(counted, what) for what in ("ahead", "behind", "tasks")}
NAMED |= {
    "vgg11.decay_6": partial(decayed, 6.0),
}
NAMED |= {
    f"earlier.{task}": partial(
        share,
        f"h200/earlier/2487c8998a39/{task}-ekfac-default-*",
        f"h200/earlier/2487c8998a39/{task}-adamw-*",
        lowest=True,
    )
    for task in ("classifier", "vgg11", "resnet34", "charlm")
}
NAMED |= {
    f"scale.{model}.{widest}.{ranks}.{what}": partial(scale, model, widest, ranks, what)
    for model, widest in (("7B", 4096), ("70B", 4096), ("70B", 8192))
    for ranks in (8, 64, 1024)
    for what in ("state", "fsdp", "ours", "projections", "refreshes")
}
NAMED |= {
    f"earlier.autoencoder.{size}": partial(
        share,
        f"mnist/finals/autoencoder-ekfac-ra-lr0.01-d0.001-b{size}-*",
        f"h200/earlier/8ea3835498c2/*adam-bn*-b{size}-*",
    )
    for size in (200, 500)
}
VERDICTS = {
    "reproduced": "**reproduced**",
    "partly": "**partly**",
    "not_reproduced": "**not reproduced**",
    "not_run": "not run yet",
}
NAMED |= {f"claims.{name}": partial(verdicts, verdict) for name, verdict in VERDICTS.items()}
