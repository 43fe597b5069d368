"""Command lines: whatever is typed, the answer is a result or one line, never a traceback."""

from __future__ import annotations

import random
from pathlib import Path

from ekfac import EKFAC
from ekfac.lab.optimizers import OPTIMIZERS
from fuzz.harness import Fuzzer
from fuzz.runs import answered

VALUES = (
    *("abc", "", "0", "1", "-1", "1e-3", "1e999", "nan", "inf", "true", "none", "[1, 2]", "{}", "'x'", "()", "(0.9,)"),
    *("10**9", "9" * 400, "1e400", "\x00", "é", "a=b", "0.9", "spectral", "[[[[", "None", "0.0", "__import__('os')"),
)
SMALL = ["--width", "4", "--limit", "50", "--batch-size", "25", "--epochs", "1", "--device", "cpu"]
FLAGS = (
    *("--optimizer", "--lr", "--damping", "--damping-mode", "--refresh-every", "--width", "--limit", "--batch-size"),
    *("--epochs", "--seed", "--device", "--dtype", "--dataset", "--halve-every", "--data-dir", "--plugin"),
)
PLANS = (
    *("[]", "{}", "[1]", '[{"task": 1}]', '[{"task": "classifier", "lr": "x"}]', "[", "\x00", "[" * 100_000),
    '[{"task": "classifier", "plugins": ["os.path", "x.py"]}]',
)


def option_names() -> list[str]:
    import inspect

    return [name for name in inspect.signature(EKFAC.__init__).parameters if name not in ("self", "model")]


def train(chance: random.Random, folder: Path) -> str:
    words = ["train", chance.choice(("classifier", "classifier", "classifier", "nothing", ""))]
    words += ["--optimizer", chance.choice([*OPTIMIZERS, *OPTIMIZERS, "nothing"]), *SMALL]
    for _ in range(chance.randrange(1, 3)):
        kind = chance.random()
        if kind < 0.6:
            name = chance.choice([*option_names(), "lr", "lr", "betas", "momentum", "nothing", "params", "foreach"])
            words += ["--set", f"{name}={chance.choice(VALUES)}"]
        elif kind < 0.9:
            words += [chance.choice(FLAGS), chance.choice(VALUES)]
        else:
            words.append(
                chance.choice(("--resume", "--overwrite", "--sua", "--cosine", "--json", "--nothing", "extra"))
            )
    if chance.random() < 0.3:
        words += ["--out", chance.choice((str(folder / "run"), "/proc/nothing", "", "/dev/null", str(folder)))]
    code, _ = answered(words)
    return f"train, exit {code}"


def others(chance: random.Random, folder: Path) -> str:
    plan = folder / "plan.json"
    plan.write_text(chance.choice(PLANS))
    value = chance.choice(VALUES)
    words = chance.choice(
        (
            ["sweep", "--plan", str(plan), "--out", str(folder / "out")],
            ["sweep", "classifier", "--lr", value, "--out", str(folder / "out"), "--write-plan", str(folder / "p")],
            ["sweep", "--take-in", str(folder / value.replace("\x00", "")), "--out", str(folder / "out")],
            ["sweep", "classifier", "--set", f"lr={value}", "--write-plan", str(folder / "p")],
            ["sweep", "classifier", "--storage", value, "--out", str(folder / "out"), "--lr", "0.1", "--random", "-1"],
            ["summary", value],
            ["summary", "classifier", "--width", value],
            ["report", value],
            ["report", str(folder), "--out", value],
            ["figure", value, "--out", str(folder)],
            ["data", "verify", value],
            ["watch", str(folder), "--every", value],
            ["watch", value],
            ["demo", "--seconds", chance.choice(("abc", "0", "-1", "nan"))],
            [value],
        )
    )
    code, _ = answered(list(words))
    return f"{words[0][:8]}, exit {code}"


FUZZERS = (
    Fuzzer("train", "ekfac train: a result or one line", 400, train),
    Fuzzer("commands", "the other commands: a result or one line", 300, others),
)
