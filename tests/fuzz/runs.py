"""Run folders whose files are whole but wrong: report, watch and resume answer in one line, or work."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path

import torch

from ekfac import sealed
from ekfac.cli.main import run as command
from fuzz.files import run_files
from fuzz.harness import Broken, Fuzzer
from fuzz.junk import mutated


def answered(words: list[str]) -> tuple[int, str]:
    """Run ``ekfac`` in this process; any exception that comes through is a broken promise."""
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            code = command(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
    if code not in (0, 1, 2) and not (code == 3 and "--budget" in words):  # time has run out
        raise Broken(f"exit {code}")
    if code == 2:
        lines = [line for line in said.getvalue().splitlines() if line.strip()]
        if len(lines) != 1 or not lines[0].startswith("error: "):
            raise Broken(f"{len(lines)} lines: {said.getvalue()[-200:]!r}")
    return code, said.getvalue()


def encoded(data: object, chance: random.Random, plain: bool) -> bytes:
    """JSON as an older version, or a hand, would have written it; or with its checksum."""
    if not plain and isinstance(data, dict):
        data.pop("checksum", None)
        with contextlib.suppress(ValueError):
            return sealed.dumps(data)
    return (json.dumps(data) + "\n").encode()


def broken_folder(chance: random.Random, folder: Path) -> str:
    out = folder / "run"
    out.mkdir()
    plain = chance.random() < 0.6
    config = json.loads(run_files()["config.json"])
    records = [json.loads(line) for line in run_files()["metrics.jsonl"].splitlines()]
    for one in (config, *records):
        one.pop("checksum")
    if plain:
        config["format"] = 1
    what = chance.choice(("config", "metrics", "metrics", "checkpoint", "bytes", "missing", "folder"))
    if what == "config":
        config, _ = mutated(config, chance)
    elif what == "metrics":
        records, _ = mutated(records, chance)
    lines = records if isinstance(records, list) else [records]
    (out / "config.json").write_bytes(encoded(config, chance, plain))
    (out / "metrics.jsonl").write_bytes(b"".join(encoded(record, chance, plain) for record in lines))
    (out / "checkpoint.pt").write_bytes(run_files()["checkpoint.pt"])
    name = chance.choice(("config.json", "metrics.jsonl", "checkpoint.pt"))
    if what == "checkpoint":
        state = torch.load(out / "checkpoint.pt", weights_only=True)
        optimizer = state["trainer"].pop("optimizer")  # has a fuzzer of its own
        state, _ = mutated(state, chance)
        if isinstance(state, dict) and isinstance(state.get("trainer"), dict):
            state["trainer"]["optimizer"] = optimizer
        torch.save(state, out / "checkpoint.pt")
    elif what == "bytes":
        (out / name).write_bytes(chance.randbytes(chance.randrange(300)))
    elif what == "missing":
        (out / name).unlink()
    elif what == "folder":
        (out / name).unlink()
        (out / name).mkdir()
    which = chance.choice(("report", "watch", "resume")) if what != "checkpoint" else "resume"
    if which == "report":
        answered(["report", str(out), "--out", str(folder / "page.html")])
    elif which == "watch":
        answered(["watch", str(out)])
    else:
        answered(["train", "--resume", "--epochs", "2", "--out", str(out)])
    return f"{which} with {what}"


FUZZERS = (Fuzzer("runs", "a broken run folder: one line from report, watch and resume", 400, broken_folder),)
