"""Files that somebody wrote, edited or cut short: settings, plans, suites, databases of studies, pickles with code."""

from __future__ import annotations

import functools
import json
import pickle
import random
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import yaml

from ekfac import Curvature, sealed
from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import load_plugin
from ekfac.lab.search.sweep import Where, sweep
from ekfac.lab.training.runs import RunFolder
from fuzz.files import damaged, operator_files, run_files
from fuzz.harness import Broken, Fuzzer
from fuzz.junk import mutated
from fuzz.runs import answered, encoded
from fuzz.studies import PLUGIN
from lab.suite.cases import TINY

ODD = (
    *(b"", b"\x00", b"\xff\xfe", b"[" * 100_000, b"{" * 5000, b"null", b"1", b'"x"', b"- " * 3000, b"2020-99-99"),
    *(b"a: &a [*a]", b"lr: !!python/object/apply:os.system ['true']", b"? [1, 2]\n: 3", b"<<: 3", b"lr: .nan", b"="),
    *(b"lr: 1\nlr: 2", b"1: 2", b"lr: !!binary x", b"lr: !!set {a}", b"lr: !!float x", b"lr: 10e", b"lr: 2020-13-45"),
    b"\xef\xbb\xbflr: 1",
)
SETTINGS: dict[str, Any] = {
    "task": "classifier", "optimizer": "ekfac-ra", "width": 4, "limit": 50, "batch_size": 25, "epochs": 1,
    "device": "cpu", "lr": 0.01, "options": {"refresh_every": 5}, "seed": 1,
}  # fmt: skip
SUITE = {**TINY, "methods": {"adamw": TINY["methods"]["adamw"]}}


def changed(data: Any, content: bytes, chance: random.Random, write: Any) -> tuple[bytes, str]:
    """Return a file with one place changed: in its meaning, in its bytes, or all of it."""
    kind = chance.random()
    if kind < 0.5:
        found, how = mutated(data, chance)
        return write(found), how.split()[0]
    if kind < 0.8:
        return damaged(content, chance)
    return chance.choice(ODD), "odd"


def settings(chance: random.Random, folder: Path) -> str:
    write = functools.partial(yaml.safe_dump, allow_unicode=True, encoding="utf-8")
    content, how = changed(SETTINGS, write(SETTINGS), chance, write)
    file = folder / "settings.yaml"
    file.write_bytes(content)
    words = ["classifier", "--width", "4", "--limit", "50", "--batch-size", "25", "--epochs", "1", "--device", "cpu"]
    code, _ = answered(["train", *words, "--config", str(file)])
    return f"{how} in settings, exit {code}"


def plan(chance: random.Random, folder: Path) -> str:
    rows = [{**SETTINGS, "lr": lr} for lr in (0.1, 0.01)]
    content, how = changed(rows, json.dumps(rows).encode(), chance, lambda data: json.dumps(data).encode())
    (folder / "plan.json").write_bytes(content)
    answered(
        ["sweep", "--plan", str(folder / "plan.json"), "--out", str(folder / "out"), "--write-plan", str(folder / "p")]
    )
    return f"{how} in a plan"


@functools.cache
def suite_files() -> dict[str, bytes]:
    """The files of a small suite, made once."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "suite.json").write_text(json.dumps(SUITE))
        code, said = answered(["suite", "run", f"{place}/suite.json", "--out", f"{place}/out", "--device", "cpu"])
        if code:
            raise Broken(said)
        return {name: (Path(place) / "out" / name).read_bytes() for name in ("config.json", "results.jsonl")}


def suite(chance: random.Random, folder: Path) -> str:
    if chance.random() < 0.4:
        content, how = changed(SUITE, json.dumps(SUITE).encode(), chance, lambda data: json.dumps(data).encode())
        (folder / "suite.json").write_bytes(content)
        suite_file, out = str(folder / "suite.json"), str(folder / "out")
        code, _ = answered(["suite", "run", suite_file, "--out", out, "--device", "cpu", "--budget", "1s"])
        return f"{how} in a suite, exit {code}"
    for name, content in suite_files().items():
        (folder / name).write_bytes(content)
    name = chance.choice(list(suite_files()))
    lines = suite_files()[name].splitlines() if name == "results.jsonl" else [suite_files()[name]]
    at, plain = chance.randrange(len(lines)), chance.random() < 0.5
    data = json.loads(lines[at])
    data.pop("checksum")
    lines[at], how = changed(data, lines[at], chance, lambda found: encoded(found, chance, plain).rstrip(b"\n"))
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    code, _ = answered(["suite", "report", str(folder)])
    return f"{how} in the suite's {name}, exit {code}"


@functools.cache
def databases() -> dict[str, bytes]:
    """A study with two trials in SQLite, and as a journal."""
    load_plugin(PLUGIN)
    base = TrainConfig("tiny", "sgd", plugins=(PLUGIN,), device="cpu", epochs=1).to_dict()
    configs = [TrainConfig.from_dict({**base, "lr": lr}).resolved() for lr in (0.1, 0.01)]
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for name, url in (("study.db", f"sqlite:///{place}/study.db"), ("study.log", f"journal:{place}/study.log")):
            sweep(configs, Where.of(f"{place}/out", url))
            found[name] = (Path(place) / name).read_bytes()
    return found


def database(chance: random.Random, folder: Path) -> str:
    name = chance.choice(list(databases()))
    content = databases()[name]
    kind = chance.choice(("bytes", "bytes", "cut", "zeros", "page", "text", "empty", "folder"))
    at = chance.randrange(len(content))
    if kind == "bytes":
        content = bytearray(content)
        for _ in range(chance.choice((1, 20, 400))):
            content[chance.randrange(len(content))] = chance.randrange(256)
    elif kind == "cut":
        content = content[:at]
    elif kind == "zeros":
        content = content[:at] + bytes(min(4096, len(content) - at)) + content[at + 4096 :]
    elif kind == "page":
        start = at // 4096 * 4096
        content = content[:start] + chance.randbytes(4096) + content[start + 4096 :]
    elif kind == "text":
        content = b"this is no database\n" * 20
    elif kind == "empty":
        content = b""
    if kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(bytes(content))
    url = f"sqlite:///{folder}/study.db" if name == "study.db" else f"journal:{folder}/study.log"
    words = [
        "sweep",
        "tiny",
        "--plugin",
        PLUGIN,
        "--optimizer",
        "sgd",
        "--lr",
        "0.1,0.03",
        "--random",
        "0",
        "--epochs",
        "1",
    ]
    answered([*words, "--out", str(folder / "out"), "--storage", url])
    return f"{kind} of {name}"


@functools.cache
def measures() -> bytes:
    """What a figure has measured, made once."""
    with tempfile.TemporaryDirectory() as place:
        code, said = answered(["figure", "rescaling", "--quick", "--measures", f"{place}/m.json", "--out", place])
        if code:
            raise Broken(said)
        return (Path(place) / "m.json").read_bytes()


def beside(chance: random.Random, folder: Path) -> str:
    """Small files beside a run, or beside many: tags, paces, a reproduction's plan, measures."""
    run = folder / "run"
    run.mkdir()
    for name, content in run_files().items():
        (run / name).write_bytes(content)
    kind = {"label": "x", "task": "classifier"}
    reproduced = {"name": "autoencoder", "level": "quick", "configs": [SETTINGS], "seconds": 3, "why": "x"}
    contents = {
        "run/tags.json": sealed.dumps({"tags": ["good"], "note": "a note"}),
        "paces.json": sealed.dumps({"paces": [{"kind": kind, "step": 0.1, "renewal": 0.2, "every": 3}]}),
        "plan.json": sealed.dumps(reproduced),
        "measures.json": measures(),
        "run/.lock": json.dumps({"pid": 1, "host": "x", "since": "2020"}).encode(),
    }
    name = chance.choice(list(contents))
    data = json.loads(contents[name])
    data.pop("checksum", None)
    plain = chance.random() < 0.5
    content, how = changed(data, contents[name], chance, lambda found: encoded(found, chance, plain))
    (folder / name).write_bytes(content)
    page = ["--out", f"{folder}/page.html"]
    commands: dict[str, list[list[str]]] = {
        "run/tags.json": [
            ["ls", f"{folder}"],
            ["tag", f"{run}", "b"],
            ["note", f"{run}", "b"],
            ["report", f"{run}", *page],
        ],
        "paces.json": [["report", f"{folder}", *page], ["ls", f"{folder}"]],
        "plan.json": [["reproduce", "autoencoder", "--judge", "--out", f"{folder}"]],
        "measures.json": [["figure", "rescaling", "--quick", "--measures", f"{folder}/{name}", "--out", f"{folder}/f"]],
        "run/.lock": [["train", "--resume", "--epochs", "2", "--out", f"{run}"]],
    }
    code, _ = answered(chance.choice(commands[name]))
    return f"{how} in {name}, exit {code}"


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.trace), "w")


def pickled(chance: random.Random, folder: Path) -> str:
    """Checkpoints and operators that carry code: it does not run, and the answer is one line."""
    trace, out = folder / "trace", folder / "run"
    out.mkdir()
    for name, content in run_files().items():
        (out / name).write_bytes(content)
    how = chance.choice(("whole", "inside", "bare pickle", "old format", "swapped", "operator", "seal"))
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    if how == "whole":
        torch.save(Trap(trace), out / "checkpoint.pt")
    elif how in ("inside", "seal"):
        where = chance.choice((state, state["trainer"], state["trainer"]["optimizer"]))
        where[chance.choice([*where, "x"])] = Trap(trace)
        if how == "seal":  # with a checksum that is right
            RunFolder(out).save(state)
        else:
            torch.save(state, out / "checkpoint.pt")
    elif how == "bare pickle":
        (out / "checkpoint.pt").write_bytes(pickle.dumps(Trap(trace), chance.randrange(6)))
    elif how == "old format":
        torch.save({**state, "x": Trap(trace)}, out / "checkpoint.pt", _use_new_zipfile_serialization=False)
    elif how == "swapped":
        with zipfile.ZipFile(out / "checkpoint.pt") as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(out / "checkpoint.pt", "w") as archive:
            for name, content in parts.items():
                archive.writestr(name, pickle.dumps(Trap(trace)) if name.endswith("data.pkl") else content)
    else:
        file = folder / "G.safetensors"
        content = pickle.dumps(Trap(trace))
        file.write_bytes(chance.choice((content, len(content).to_bytes(8, "little") + content)))
        kind = chance.choice(list(operator_files()))
        if chance.random() < 0.5:  # of a version to come, or of nobody
            size = int.from_bytes(operator_files()[kind][:8], "little")
            header = json.loads(operator_files()[kind][8 : 8 + size])
            header["__metadata__"].pop("checksum", None)
            name = chance.choice(list(header["__metadata__"]))
            header["__metadata__"][name] = chance.choice(("99", "", "x", "[", "null", "{}"))
            text = json.dumps(header).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + operator_files()[kind][8 + size :])
        try:
            Curvature.load(file)
        except ValueError as error:
            if str(file) not in str(error):
                raise Broken(f"the error does not name the file: {error}") from error
        if trace.exists():
            raise Broken("an operator's file ran code")
        return "operator"
    code, _ = answered(["train", "--resume", "--epochs", "2", "--out", str(out)])
    if trace.exists():
        raise Broken(f"{how}: a checkpoint ran code")
    if code != 2:
        raise Broken(f"{how}: exit {code}")
    return how


FUZZERS = (
    Fuzzer("settings", "settings in YAML, edited or cut: a result or one line", 300, settings),
    Fuzzer("plans", "the same for plans", 300, plan),
    Fuzzer("suites", "the same for suites and their records", 300, suite),
    Fuzzer("databases", "a study whose database is damaged: a result or one line", 150, database),
    Fuzzer("beside", "tags, paces, measures and other small files: a result or one line", 300, beside),
    Fuzzer("pickles", "code in a checkpoint or operator never runs", 150, pickled),
)
