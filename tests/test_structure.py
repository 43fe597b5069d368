"""The plan of the code: imports go one way, no file is long, and a step does not wander through the house."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import ekfac

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent / "src"
FILES = sorted((ROOT / "ekfac").rglob("*.py"))
#: Each room may import from itself and from those before it.
ROOMS = ("checks", "sealed", "curvature", "optim", "rules", "diagnosis", "lab", "cli", "__main__")

#: What a function's docstring may begin with: the imperative of a verb. A new verb is added here.
VERBS = """
Acquire Adapt Add Adopt Agree Append Apply Arrange Assign Attach Average Begin Bound Bring Broadcast Build Call Capture
Change Check Choose Claim Clamp Clear Clip Close Combine Compare Compile Complete Compute Concatenate Connect Construct
Convert Copy Count Create Cut Decompose Describe Detect Determine Discard Discount Divide Do Download Draw Drop Encode
End Estimate Evaluate Exchange Exit Expand Extract Fill Find Flip Flush Forget Format Free Gather Give Go Group Guess
Hand Handle Hash Hold Import Include Initialise Invert Iterate Join Judge Keep Label Launch Lay Learn Leave Let Limit
List Load Lock Log Look Make Map Measure Merge Mix Move Multiply Mute Name Note Notify Open Overlap Pack Pair Parse
Pass Pause Plan Pop Precondition Predict Prepare Print Process Project Put Queue Raise Read Recompute Record Recover
Refresh Refuse Register Release Remember Remove Rename Repeat Replace Replay Report Reproduce Require Rescale Reserve
Reset Reshape Reshard Restore Restrict Resume Return Rotate Round Run Save Say Scale Search Select Send Set Settle
Share Shorten Show Skip Solve Sort Split Square Stack Start Step Stop Store Strip Submit Sum Summarise Switch
Synchronise Tabulate Take Tell Test Time Track Train Transform Try Turn Undo Unpack Unscale Update Use View Wait Watch
Wrap Write Yield
"""


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def imports_in(nodes: list[ast.stmt]) -> Iterator[str]:
    """What is imported while the program runs, within functions too: all but what only a type checker sees."""
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_in(node.orelse)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else str(node.module)
        else:
            for field in ("body", "orelse", "finalbody"):
                yield from imports_in([n for n in getattr(node, field, []) if isinstance(n, ast.stmt)])
            for handler in getattr(node, "handlers", []):
                yield from imports_in(handler.body)


def graph() -> dict[str, set[str]]:
    found = {name: set(imports_in(ast.parse(file.read_text()).body)) for name, file in MODULES.items()}
    return {name: {n for n in imported if n in MODULES and n != "ekfac"} for name, imported in found.items()}


def room_of(module: str) -> int:
    return ROOMS.index(module.split(".")[1])


def test_imports_go_one_way() -> None:
    for module, imported in graph().items():
        for other in imported if module != "ekfac" else ():
            assert room_of(other) <= room_of(module), f"{module} imports {other}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    edges, done, under_way = graph(), set(), []

    def visit(module: str) -> None:
        assert module not in under_way, " -> ".join([*under_way[under_way.index(module) :], module])
        if module in done:
            return
        under_way.append(module)
        for other in sorted(edges[module]):
            visit(other)
        under_way.pop()
        done.add(module)

    for module in sorted(edges):
        visit(module)


@pytest.mark.parametrize("file", FILES, ids=lambda file: module_of(file))
def test_no_file_is_long(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 400


#: Where the code of these lies, there lie its tests.
MIRRORED = ("curvature", "optim", "diagnosis", "lab", "cli")


def folders(root: Path, pattern: str) -> set[str]:
    """Those of the mirrored folders under a root that hold such files; a room within a room counts with it."""
    found = {file.parent.relative_to(root).parts for room in MIRRORED for file in (root / room).rglob(pattern)}
    return {"/".join(parts[:2]) for parts in found}


def test_tests_lie_where_the_source_lies() -> None:
    source, tests = folders(ROOT / "ekfac", "[!_]*.py"), folders(TESTS, "test_*.py")
    assert source - tests == set(), "rooms without tests"
    assert tests - source == set(), "tests of a room that is not there"
    assert {"optim", "optim/methods", "lab/search", "curvature/layers"} <= tests


def test_tests_that_pages_name_are_there() -> None:
    top = TESTS.parent
    pages = [*(top / "docs").rglob("*.md"), *top.glob("*.md"), *(top / "benchmarks").glob("*.py")]
    named = {name for page in pages for name in re.findall(r"tests/[\w/]+(?:\.py)?", page.read_text())}
    assert len(named) > 8
    assert [name for name in sorted(named) if not (top / name).exists()] == []


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings of functions with their lines; a property is a thing, and named as one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found is not None and not any("property" in ast.unparse(d) for d in node.decorator_list):
                yield node.lineno, found


def imperative(docstring: str) -> bool:
    first, second, *_ = [word.strip(",;:.") for word in docstring.split()] + ["", ""]
    return first in VERBS.split() and second != "of"  # "Sum of" is a thing


@pytest.mark.parametrize("file", FILES, ids=lambda file: module_of(file))
def test_docstrings_are_in_the_imperative(file: Path) -> None:
    wrong = [
        f"{file}:{line}: {text.splitlines()[0]}" for line, text in docstrings(file.read_text()) if not imperative(text)
    ]
    assert not wrong, "begin with a verb in the imperative, or add it to VERBS:\n" + "\n".join(wrong)


def test_what_is_no_imperative_is_noticed() -> None:
    assert (
        imperative("Return x.") and imperative("Wait: it is inverted later.") and imperative("Raise, if it is wrong.")
    )
    assert not any(map(imperative, ["Returns x.", "The sum.", "Sum of x.", "Whether it is so.", "g / s", "..."]))
    source = 'class A:\n    @property\n    def x(self):\n        "The x."\n    async def y(self):\n        "The y."'
    assert list(docstrings(source)) == [(5, "The y.")]


def functions_of_a_step(number: int) -> set[tuple[str, str]]:
    """The library's functions that a step of the default calls on three layers, with their files."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
    x, y = torch.randn(64, 20), torch.randint(5, (64,))
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<"):
            seen.add((code.co_filename, f"{code.co_name}:{code.co_firstlineno}"))

    with ekfac.EKFAC(model) as opt:
        for step in range(number + 1):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            sys.setprofile(note if step == number else None)
            try:
                opt.step()
            finally:
                sys.setprofile(None)
    return seen


@pytest.mark.parametrize(("step", "functions", "files"), [(26, 60, 15), (25, 70, 16)], ids=["plain", "statistics"])
def test_a_step_passes_few_functions_in_few_files(step: int, functions: int, files: int) -> None:
    """Before the code was rearranged a plain step passed 106 in 28. Step 25 takes a batch into A and B."""
    seen = functions_of_a_step(step)
    assert 20 < len(seen) <= functions
    assert len({file for file, _ in seen}) <= files


def test_a_step_settles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ekfac.optim.engine import Engine

    calls: list[Engine] = []
    settle = Engine.settle

    def counting(engine: Engine, wait: bool = False) -> bool:
        calls.append(engine)
        return settle(engine, wait)

    monkeypatch.setattr(Engine, "settle", counting)
    functions_of_a_step(9)
    assert len(calls) == 10
