"""Other people's libraries, as far as they are installed; see requirements-integrations.txt."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any


class Members(type):
    """Of a class that stands for another: any member is its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Placeholder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for torchvision, which timm imports for its transforms of images; its networks use nothing of it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        class Empty(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                made = Members(name, (), {})
                setattr(self, name, made)
                return made

        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def pytest_configure() -> None:
    """Let timm be imported without torchvision."""
    if importlib.util.find_spec("timm") is not None and importlib.util.find_spec("torchvision") is None:
        finder = Placeholder()
        sys.meta_path.append(finder)
        try:
            importlib.import_module("timm")
        finally:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
