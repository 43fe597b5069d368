"""The lab's fixtures: data in the official formats, and settings that take a second."""

from lab.conftest import official, tiny

__all__ = ["official", "tiny"]
