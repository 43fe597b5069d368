"""How often statistics are taken and bases renewed: tasks of the suite at full length under several constants.

    python results/step/schedule_trials.py DATA OUT SECONDS    (several at once share the jobs)
"""
import json, os, sys, time, warnings

warnings.simplefilter("ignore")
sys.path.insert(0, "src")
from pathlib import Path

import torch
from ekfac.lab.suite.config import load
from ekfac.lab.suite.jobs import make_job
from ekfac.lab.suite.training import OutOfTime, train
from ekfac.optim.statistics import schedule

VARIANTS = {
    "today": {},
    "two batches": {"BATCHES": 2},
    "two batches, short start": {"BATCHES": 2, "EARLY": 5, "GROWTH": 1.3, "DENSE": 10},
    "two batches, decay 0.9": {"BATCHES": 2, "factor_decay": 0.9},
    "decay 0.975": {"factor_decay": 0.975},
}
TASKS = ("gpt", "resnet18", "vit", "autoencoder")
PLAN = [(v, t, "ekfac", "own", 1.0) for t in TASKS for v in VARIANTS if v != "decay 0.975"]
PLAN += [("today", t, "ekfac-own-decay", "cosine", 0.006) for t in TASKS[:3]]
if os.environ.get("SECOND"):  # with kappa 0.005 and batch-norm's statistics averaged batch by batch
    PLAN = [("today", "gpt", "ekfac", "own", 1.0), ("decay 0.975", "gpt", "ekfac", "own", 1.0)]
    PLAN += [(v, "relu-autoencoder", "ekfac", "own", 1.0) for v in ("today", "decay 0.975")]
if os.environ.get("THIRD"):
    PLAN = [(v, t, "ekfac", "own", 1.0) for t in ("resnet18", "vit") for v in ("today", "decay 0.975")]
START = {name: getattr(schedule, name) for name in ("BATCHES", "EARLY", "GROWTH", "DENSE")}


def main(data, out, seconds):
    end, out = time.time() + float(seconds), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    suite = load("suite")
    for variant, task, method, how, rate in PLAN:
        name = "-".join([variant, task, method]).replace(" ", "_").replace(",", "")
        try:
            os.close(os.open(out / f"{name}.claim", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        for key, value in {**START, **{k: v for k, v in VARIANTS[variant].items() if k in START}}.items():
            setattr(schedule, key, value)
        schedule.early_steps.cache_clear()
        job = make_job(suite, suite.tasks[task], suite.methods["ekfac"], how, rate, 0)
        options = job.settings["options"]
        if how == "cosine":
            job.settings["lr_factor"] = 1.0
            options["lr"] = rate
        if "factor_decay" in VARIANTS[variant]:
            options["factor_decay"] = VARIANTS[variant]["factor_decay"]
        try:
            record = train(job, Path(data), torch.device("cuda"), end)
        except OutOfTime:
            return
        except Exception as error:
            record = {"failed": repr(error)[:300], "history": [{}]}
        row = {"variant": variant, "task": task, "method": method, "schedule": how, "rate": rate, **record}
        with open(out / f"{name}.json", "w") as file:
            json.dump(row, file)
        last = record["history"][-1]
        print(variant, task, method, {k: round(v, 4) for k, v in last.items() if isinstance(v, float)}, record.get("failed", ""), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
