"""Calls back when the job has imported a module: how hooks find a framework without importing it themselves."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

log = logging.getLogger("bubblescope")

Callback = Callable[[], None]


def when_imported(name: str, callback: Callback) -> Callback:
    """Call `callback` once after module `name` was imported, at once when it is there. Returns what cancels it.

    An exception of the callback is logged and goes no further: the import is the job's.
    """
    if name in sys.modules:
        _call(name, callback)
        return lambda: None
    return _watcher.add(name, callback)


def _call(name: str, callback: Callback) -> None:
    try:
        callback()
    except Exception as error:  # ours, whatever it is; the job's import must not fail for it
        log.warning("bubblescope: %s is not hooked: %s: %s", name, type(error).__name__, error)


class _Watcher(importlib.abc.MetaPathFinder):
    """First on `sys.meta_path` while somebody waits; finds nothing itself, but wraps what the others find."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callback]] = {}
        self._busy = threading.local()

    def add(self, name: str, callback: Callback) -> Callback:
        self._waiting.setdefault(name, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

        def cancel() -> None:
            waiting = self._waiting.get(name, [])
            if callback in waiting:
                waiting.remove(callback)
            self._leave()

        return cancel

    def _leave(self) -> None:
        self._waiting = {name: callbacks for name, callbacks in self._waiting.items() if callbacks}
        if not self._waiting and self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._waiting or getattr(self._busy, "name", "") == fullname:
            return None
        self._busy.name = fullname
        try:
            for finder in list(sys.meta_path):
                spec = finder.find_spec(fullname, path, target) if finder is not self else None
                if spec is not None:
                    break
            else:
                return None
        finally:
            self._busy.name = ""
        if spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def imported(self, name: str) -> None:
        callbacks = self._waiting.pop(name, [])
        self._leave()
        for callback in callbacks:
            _call(name, callback)


class _Loader(importlib.abc.Loader):
    """The original loader, and a word to the watcher afterwards. The module keeps no trace of it."""

    def __init__(self, original: Any, watcher: _Watcher) -> None:
        self._original = original
        self._watcher = watcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._original.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        module.__loader__ = self._original
        self._original.exec_module(module)
        self._watcher.imported(module.__name__)


_watcher = _Watcher()
