"""The suite's configuration: what is wrong is refused with its place; what is right means what it says."""

import copy
import json
import re
from pathlib import Path

import pytest

from ekfac.lab.registry import LabError
from ekfac.lab.suite import config
from ekfac.lab.suite.jobs import factor, make_job, rates
from lab.suite.cases import TINY, tiny

WRONG = [
    (("seeds",), [], "seeds must be one or more distinct integers"),
    (("seeds",), [0, 0], "seeds must be one or more distinct"),
    (("seeds",), [0.5], "seeds must be"),
    (("evaluations",), 1, "evaluations must be an integer of at least 2, not 1"),
    (("every_rate",), "yes", "every_rate must be true or false"),
    (("colour",), "red", "no entry 'colour'"),
    (("target",), {"method": "adam"}, "target: method: unknown 'adam'; known: ekfac, adamw"),
    (("target",), {"schedule": "linear"}, "target: schedule: unknown 'linear'"),
    (("target",), {"within": -1}, "target: within must be a number of at least 0, not -1"),
    (("methods",), {}, "names no method"),
    (("methods",), [], "methods must be an object"),
    (("methods", "adamw"), 3, "method adamw must be a JSON object"),
    (("methods", "adamw", "lr"), [], "method adamw: lr must be a list of positive numbers"),
    (("methods", "adamw", "lr"), [0.1, -0.1], "lr must be a list of positive numbers"),
    (("methods", "adamw", "lr"), [0.1, 0.1], "holds a number twice"),
    (("methods", "adamw", "lr_factors"), [1], "either lr or lr_factors"),
    (("methods", "adamw", "optimizer"), "adamx", "method adamw: unknown optimizer 'adamx'"),
    (("methods", "adamw", "options"), {"damping": 1}, "adamw has no option 'damping'"),
    (("methods", "adamw", "schedules"), ["linear"], "method adamw: schedules: unknown 'linear'"),
    (("methods", "adamw", "decay"), -1, "decay must be a number of at least 0"),
    (("tasks",), {}, "names no task"),
    (("tasks", "tabular", "epochs"), 3, "either steps or epochs"),
    (("tasks", "tabular", "steps"), 0, "steps must be an integer of at least 1, not 0"),
    (("tasks", "tabular", "task"), "nothing", "unknown task 'nothing'; known: relu-autoencoder"),
    (("tasks", "tabular", "settings"), {"depth": 3}, "no setting 'depth'; it has: width"),
    (("tasks", "tabular", "settings"), {"width": "wide"}, "setting width must be of type int, not 'wide'"),
    (("tasks", "tabular", "settings"), {"width": True}, "setting width must be of type int"),
    (("tasks", "tabular", "settings"), {"width": 8.5}, "setting width must be of type int"),
    (("tasks", "tabular", "take"), "first", "take: unknown 'first'; known: last, best"),
    (("tasks", "tabular", "methods"), {"adam": {}}, "methods: unknown 'adam'"),
    (("tasks", "tabular", "methods"), {"ekfac": {"lr": [1]}}, "has lr_factors"),
    (("tasks", "tabular", "methods"), {"adamw": {"momentum": 1}}, "no entry 'momentum'"),
    (("tasks", "tabular", "quick"), {"clip": 1}, "quick has no entry 'clip'"),
    (("tasks", "tabular", "warmup"), -1, "warmup must be an integer of at least 0"),
    (("tasks", "tabular", "weight_decay"), "0.1", "weight_decay must be a number"),
    (("tasks", "tabular", "weight_decay"), float("nan"), "weight_decay must be a number"),
]


@pytest.mark.parametrize(("place", "value", "message"), WRONG, ids=lambda item: str(item)[:40])
def test_wrong_entries_are_refused_with_their_place(place, value, message):
    data = tiny()
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(LabError, match=message.replace("(", "\\(")):
        config.parse(data)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"suite"'])
def test_a_file_that_is_no_object_is_refused(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(LabError, match=r"x\.json"):
        config.load(tmp_path / "x.json")


def test_reading_leaves_the_data_alone():
    data = copy.deepcopy(TINY)
    config.parse(data)
    config.parse(data, quick=True)
    assert data == TINY


@pytest.mark.parametrize("name", config.builtin())
@pytest.mark.parametrize("quick", [False, True])
def test_the_librarys_own_configurations_are_right_and_fair(name, quick):
    suite = config.load(name, quick)
    tuned = [method for method in suite.methods.values() if not method.fixed]
    for task in suite.tasks.values():
        assert len({len(rates(task, method)) for method in tuned}) == 1  # the same number of learning rates
        for method in suite.methods.values():
            listed = rates(task, method)
            assert method.fixed or list(listed) == sorted(listed)
    assert suite.target.method in suite.methods and any(method.ours for method in tuned)


def test_the_suite_has_the_tasks_and_methods_of_its_issue():
    suite = config.load("suite")
    assert len(suite.tasks) >= 12 and len(suite.seeds) == 3
    assert {"ekfac", "ekfac-scheduled", "adamw", "sgd", "muon", "soap", "schedule-free"} == set(suite.methods)
    nothing = suite.methods["ekfac"]
    for task in suite.tasks.values():
        for rate in (1.0, 3.0):
            job = make_job(suite, task, nothing, "own", rate, 0)
            assert job.settings["options"] == {} and job.settings["lr_factor"] == rate
            assert job.settings["optimizer"] == "ekfac-default"
    nano = make_job(suite, suite.tasks["shakespeare"], suite.methods["adamw"], "cosine", 0.001, 0)
    assert nano.settings["options"] == {"betas": [0.9, 0.99], "weight_decay": 0.1, "lr": 0.001}
    assert (nano.settings["steps"], nano.settings["warmup"], nano.settings["clip"]) == (5000, 100, 1.0)
    assert nano.settings["settings"] == {} and not nano.settings["decay_vectors"]
    # nanoGPT's README: 1e-3 after 100 steps of warm-up, 1e-4 at the end of 5,000.
    lr = [0.001 * factor("cosine", step, 5000, 100, nano.settings["end"]) for step in range(5000)]
    assert (
        max(lr) == lr[100] == 0.001
        and lr[-1] == pytest.approx(1e-4, rel=1e-3)
        and lr == [*lr[:100], *sorted(lr[100:], reverse=True)]
    )


def test_the_page_has_every_task_and_its_length():
    text = (Path(__file__).resolve().parents[3] / "docs" / "suite.md").read_text()
    shown = dict(re.findall(r"^\| `([\w-]+)` \|.*\| ([\d,]+ (?:epochs|steps)) of", text, re.M))
    suite = config.load("suite")
    assert shown == {
        name: f"{task.epochs:g} epochs" if task.steps is None else f"{task.steps:,} steps"
        for name, task in suite.tasks.items()
    }


def test_schedules():
    assert [factor("cosine", step, 6, 2, 0.0) for step in range(6)] == pytest.approx(
        [1 / 3, 2 / 3, 1.0, 0.5 + 0.25 * 2**0.5, 0.5, 0.5 - 0.25 * 2**0.5]
    )
    assert [factor("constant", step, 6, 2, 0.0) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert [factor("own", step, 6, 2, 0.0) for step in range(3)] == [1.0, 1.0, 1.0]


def test_keys_tell_runs_apart_and_do_not_hang_on_the_order_of_entries():
    suite = config.parse(tiny())
    task, method = suite.tasks["tabular"], suite.methods["adamw"]
    job = make_job(suite, task, method, "cosine", 0.01, 0)
    turned = config.parse(json.loads(json.dumps(dict(reversed(tiny().items())))))
    assert make_job(turned, turned.tasks["tabular"], turned.methods["adamw"], "cosine", 0.01, 0).key == job.key
    data = tiny()
    data["tasks"]["tabular"]["weight_decay"] = 0.02
    other = config.parse(data)
    keys = {
        job.key,
        make_job(suite, task, method, "constant", 0.01, 0).key,
        make_job(suite, task, method, "cosine", 0.02, 0).key,
        make_job(suite, task, method, "cosine", 0.01, 1).key,
        make_job(other, other.tasks["tabular"], other.methods["adamw"], "cosine", 0.01, 0).key,
    }
    assert len(keys) == 5


def test_the_quick_form_is_smaller_in_every_task():
    full, quick = config.load("suite"), config.load("suite", quick=True)
    for name, task in full.tasks.items():
        small = quick.tasks[name]
        assert small.steps is not None and small.steps <= 100 and small.settings != task.settings
    assert all(len(method.lr) <= 2 and len(method.schedules) == 1 for method in quick.methods.values())
