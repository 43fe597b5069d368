"""Studies that others have put trials into, or changed: left alone, and the search goes on."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import optuna
from optuna.trial import TrialState, create_trial

from ekfac.lab.config import TrainConfig
from ekfac.lab.registry import load_plugin
from ekfac.lab.search.sweep import Where, open_studies, state, sweep
from fuzz.harness import Broken, Fuzzer
from fuzz.junk import JSON, mutated

PLUGIN = str(Path(__file__).parents[1] / "lab" / "tiny_plugin.py")
PLAIN = tuple(value for value in JSON if value != 10**400)
MADE: dict[str, dict] = {}


def foreign(chance: random.Random, folder: Path) -> str:
    load_plugin(PLUGIN)
    where = Where.of(folder, f"journal:{folder / 'study.log'}")
    base = TrainConfig("tiny", "sgd", plugins=(PLUGIN,), device="cpu", epochs=1)
    mine = [TrainConfig.from_dict({**base.to_dict(), "lr": lr}).resolved() for lr in (0.1, 0.01)]
    other = TrainConfig.from_dict({**base.to_dict(), "lr": 0.3}).resolved()
    if not MADE:
        studies = sweep([other], where, name="first")
        MADE["attributes"] = copy.deepcopy(dict(studies["first"].all()[0].user_attrs))
    study = open_studies(where, ["study"])["study"].study
    if chance.random() < 0.5:
        sweep(mine[:1], where, name="study")
    kind = chance.choice(("bare", "changed", "changed", "changed", "running", "waiting"))
    states = {"bare": chance.choice((TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED)),
              "changed": chance.choice((TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)),
              "running": TrialState.RUNNING, "waiting": TrialState.WAITING}  # fmt: skip
    attributes = {}
    if kind in ("changed", "running", "waiting"):
        attributes, _ = mutated(MADE["attributes"], chance, PLAIN)
        attributes = attributes if isinstance(attributes, dict) else {"key": attributes}
    value = 1.0 if states[kind] == TrialState.COMPLETE else None
    study.add_trial(create_trial(state=states[kind], value=value, user_attrs=attributes))
    studies = sweep(mine, where, name="study")
    done = studies["study"]
    keys = {run.config.lr for run in done.runs()}
    if not {0.1, 0.01} <= keys:
        raise Broken(f"{kind}: the search has only {keys}, notes {done.notes}")
    done.failures()
    state([done])
    if sweep(mine, where, name="study")["study"].all(TrialState.WAITING):
        raise Broken(f"{kind}: something waits for ever")
    return kind


optuna.logging.set_verbosity(optuna.logging.ERROR)
FUZZERS = (Fuzzer("studies", "a foreign trial in a study is left alone", 150, foreign),)
