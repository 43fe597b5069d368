"""Numbers live once: what a page says of a measurement is what the record says."""

import importlib.util
import re
from pathlib import Path

import cite
import pytest

recorded = pytest.mark.skipif(not cite.RESULTS.is_dir(), reason="recorded runs come with the repository alone")


@recorded
@pytest.mark.parametrize("name", cite.PAGES)
def test_marked_numbers_are_those_of_the_record(name):
    text = (cite.ROOT / name).read_text()
    shown = cite.MARKER.findall(text)
    assert text.count("<!-- n:") == text.count("<!-- /n -->") == len(shown), "a marker is not closed"
    wrong = [(what, number, cite.cited(what, number)) for what, number in shown if cite.cited(what, number) != number]
    assert wrong == [], "make figures"


@pytest.mark.parametrize("name", cite.PAGES)
def test_no_measured_number_is_typed(name):
    assert list(cite.loose((cite.ROOT / name).read_text(), cite.ALLOWED.get(name, set()))) == []


@recorded
@pytest.mark.parametrize("name", cite.LINKED)
def test_what_is_not_marked_is_in_a_record_that_the_page_links_to(name, tmp_path):
    page = cite.ROOT / name
    assert cite.unlinked(page, cite.ALLOWED[name]) == []
    other = tmp_path / "docs" / "page.md"
    other.parent.mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "run.txt").write_text("1.234")
    other.write_text("1.23 and 1.3 ([run](../results/run.txt))")
    assert cite.unlinked(other, set()) == ["1.3"]


@pytest.mark.parametrize("name", cite.ALLOWED)
def test_what_is_allowed_is_there(name):
    text = (cite.ROOT / name).read_text()
    assert [number for number in cite.ALLOWED[name] if number not in cite.loose(text, set())] == []


@pytest.mark.parametrize("name", cite.PAGES)
def test_no_line_starts_with_a_marker(name):
    """A comment at the start of a line begins a block of HTML, in which Markdown is not read."""
    assert re.findall(r"^\s*(?:[-*] +)?<!-- n: .*$", (cite.ROOT / name).read_text(), re.MULTILINE) == []


def test_what_counts_as_measured():
    text = "12 layers, 3 ms, 7 % and 4,362 MiB, two 4s, `lr=0.3`, 1.5x, [0.9](a-2.5.md), v1.2, 2.75 "
    text += "<!-- n: a.b .1f -->9.9<!-- /n -->"
    assert list(cite.loose(text, {"2.75"})) == ["3", "7", "4,362", "1.5", "0.9"]
    text = "0.62 of it, 0.63 not\n<!-- begin t -->\n| 0.618 |\n<!-- end t -->\n"
    assert list(cite.loose(text, set())) == ["0.63"], "what a table on the page says may be said again"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.json").write_text('{"x": {"y z": [1, 2.345]}}')
    (tmp_path / "b.json").write_text('{"x": {"y z": [1, 3.345]}}')
    rows = ['["gpt", {"ms": 1.0, "lr": 0.1}]', '["gpt", {"ms": 2.0}]', '["vit", {"ms": 12345.6}]']
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "log.txt").write_text("took 0.8351 of 1,234 s")
    monkeypatch.setattr(cite, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("a.json:x.y z.1 .1f", "2.3"),
        ("[ab].json:x.y z.1 .2f", "2.85"),
        ("rows.jsonl:[0=gpt].1.ms .0f", "2"),
        ("rows.jsonl:[0=gpt,1.lr=0.1].1.ms .0f", "1"),
        ("rows.jsonl:-1.1.ms ,.0f", "12,346"),
        ("a.json:x.y z.0 .1%", "100.0 %"),
    ],
)
def test_a_path_is_followed_and_written(results, what, shown):
    page = f"a <!-- n: {what} -->old<!-- /n --> b"
    assert cite.fill(page) == page.replace("old", shown) == cite.fill(cite.fill(page))


def test_plain_text_is_searched_to_the_digits_shown(results):
    for shown in ("0.84", "0.835", "83.5", "1,234"):
        assert cite.cited("in log.txt", shown) == shown
    for wrong in ("0.83", "1,235"):
        with pytest.raises(LookupError, match=re.escape(wrong)):
            cite.cited("in log.txt", wrong)


@recorded
def test_every_name_has_a_number():
    from named import NAMED

    assert [name for name in NAMED if not cite.value(name) > 0] == []


@recorded
def test_the_table_of_networks_is_that_of_the_record():
    """What tests/integrations/page.py makes of results/integrations.jsonl is what docs/works.md shows."""
    spec = importlib.util.spec_from_file_location("page", cite.ROOT / "tests" / "integrations" / "page.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    shown = (cite.ROOT / "docs" / "works.md").read_text().split(page.BEGIN)[1].split(page.END)[0]
    assert shown == page.table((cite.RESULTS / "integrations.jsonl").read_text()), "make test-integrations"
