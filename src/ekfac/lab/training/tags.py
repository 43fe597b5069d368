"""Tags and a note on a run, in a separate file of its folder, so that the record itself is never changed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ekfac import sealed
from ekfac.lab.registry import LabError

FILE = "tags.json"
_TAG = re.compile(r"[\w.:+-]+")


@dataclass(frozen=True)
class Tags:
    """The tags and the note of a run.

    Attributes:
        tags: Short words to find it by.
        note: A sentence.
    """

    tags: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        for tag in self.tags:
            if not _TAG.fullmatch(tag):
                raise LabError(f"a tag is one word of letters, digits and ._:+-, not {tag!r}")

    def over(self, before: Tags) -> Tags:
        """Merge with earlier ones: all tags, and this note if there is one."""
        return Tags((*before.tags, *self.tags), self.note or before.note)


def read_tags(folder: Path) -> Tags:
    """Return a run's tags and note, empty if there are none.

    Raises:
        LabError: If the file is broken.
    """
    file = folder / FILE
    if not file.exists():
        return Tags()
    try:
        data, _ = sealed.loads(file.read_bytes())
        tags, note = data["tags"], data["note"]
        if not isinstance(note, str) or not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
            raise ValueError("tags must be a list of words, and note a text")
        return Tags(tuple(tags), note)
    except (OSError, ValueError, LookupError, TypeError, LabError) as error:
        raise LabError(f"{file} cannot be read: {error}") from error


def write_tags(folder: Path, tags: Tags) -> None:
    """Write tags and note on a run.

    Raises:
        LabError: If the folder holds no run.
    """
    if not (folder / "config.json").exists():
        raise LabError(f"{folder} holds no run: there is no config.json")
    content = {"tags": sorted(set(tags.tags)), "note": tags.note}
    sealed.write(folder / FILE, sealed.dumps(content, indent=2))
