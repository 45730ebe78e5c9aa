"""Replace functions and classes of an engine as it imports them, so that only what it serves is imported."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _Imports(MetaPathFinder):
    """Finds the modules of `actions` by the other finders, and runs their actions once they have been executed."""

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[ModuleType], None]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        action = self.actions.get(name)
        if action is None:
            return None
        found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_imports = _Imports()


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Run `action` on a module: now if it has been imported, else after its import, which fails if `action` raises.

    The first action of a module counts: engines load plug-ins again.
    """
    if name in _imports.actions:
        return
    _imports.actions[name] = action
    if _imports not in sys.meta_path:
        sys.meta_path.insert(0, _imports)
    if name in sys.modules:
        action(sys.modules[name])


def exists(name: str) -> bool:
    """True if a module of an engine is there; imports the engine's top package and none between."""
    top, *packages, module = name.split(".")
    folders = [Path(folder).joinpath(*packages) for folder in importlib.import_module(top).__path__]
    files = (file for folder in folders for file in (folder / f"{module}.py", folder / module / "__init__.py"))
    return name in sys.modules or any(file.is_file() for file in files)


def replace(module: ModuleType, name: str, ours: Any) -> None:
    """Set an attribute of a module, there and where modules of the same engine have imported it."""
    original, engine = getattr(module, name), module.__name__.partition(".")[0]
    for loaded in [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == engine]:
        for alias in [a for a, value in list(vars(loaded).items()) if value is original]:
            setattr(loaded, alias, ours)


def announced(function: Callable[..., Any], say: Callable[[], None]) -> Callable[..., Any]:
    """Return `function`, whose first call also calls `say`."""
    said = False

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        nonlocal said
        if not said:
            said = True
            say()
        return function(*args, **options)

    return call


def version(engine: str) -> str:
    """The engine's version, or "of an unknown version" for one that is not installed as a distribution."""
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
