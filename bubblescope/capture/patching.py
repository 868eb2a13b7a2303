"""Reversible, guarded patches of other people's functions: the mechanism under every framework hook."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

log = logging.getLogger("bubblescope")

Before = Callable[..., Any]
After = Callable[[Any, Any], Any]
Abort = Callable[[Any], None]


@dataclass
class Hook:
    """One patched function. `hits`: calls measured; `own_ns`: time spent in our code around them."""

    label: str
    enabled: bool = True
    hits: int = 0
    own_ns: int = 0


@dataclass(frozen=True)
class _Patch:
    owner: Any
    name: str
    original: Any
    replacement: Any
    inherited: bool


@dataclass
class PatchSet:
    """All patches of one recorder.

    hooks: by label, those installed. refused: {label: why}, those that the installed version of a framework does
    not allow. warnings: every warning given, in order (they are written into the recording).
    """

    hooks: dict[str, Hook] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    _patches: list[_Patch] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def warn(self, message: str) -> None:
        """Tell the user once. By logging, not `warnings`: under ``-W error`` that would raise into the job."""
        if message not in self.warnings:
            self.warnings.append(message)
            log.warning("bubblescope: %s", message)

    def refuse(self, label: str, why: str) -> None:
        """Note that `label` cannot be hooked in this version of the framework."""
        self.refused[label] = why

    def hook(self, label: str) -> Hook:
        """The `Hook` of that label, made when new; several targets may share one."""
        return self.hooks.setdefault(label, Hook(label))

    def fail(self, hook: Hook, error: BaseException) -> None:
        """Our own code raised: that hook is over, the job never notices."""
        hook.enabled = False
        self.warn(f"hook {hook.label} failed and is off: {type(error).__name__}: {error}")

    def around(
        self,
        owner: Any,
        name: str,
        label: str,
        *,
        needs: Sequence[str],
        before: Before,
        after: After,
        abort: Abort | None = None,
        optional: Mapping[str, Any] | None = None,
    ) -> bool:
        """Replace ``owner.name`` by what `wrapped` makes; False when that is not possible (see `refused`)."""
        wrapper = self.wrapped(
            owner, name, label, needs=needs, before=before, after=after, abort=abort, optional=optional
        )
        if wrapper is None:
            return False
        self.replace(owner, name, wrapper)
        return True

    def wrapped(
        self,
        owner: Any,
        name: str,
        label: str,
        *,
        needs: Sequence[str],
        before: Before,
        after: After,
        abort: Abort | None = None,
        optional: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any] | None:
        """A measuring wrapper of ``owner.name``, not installed yet; None when the signature does not allow it.

        before: called with the values of `needs` and then of `optional`, taken from the call by name; returns a
        token, or None to leave this call alone. after: called with the token and the result; what it returns
        (unless None) replaces the result. abort: called with the token instead, when the original raised.
        An exception of the original passes through unchanged; one of ours disables the hook.
        """
        original = getattr(owner, name, None)
        if not callable(original):
            self.refuse(label, f"{_owner_name(owner)} has no {name}")
            return None
        arguments = _arguments(original, needs, optional or {})
        if arguments is None:
            self.refuse(label, f"{_owner_name(owner)}.{name} has no parameter {' or '.join(needs)}")
            return None
        return _wrapper(original, self.hook(label), self.fail, arguments, before, after, abort)

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Set ``owner.name``, remembering what was there."""
        inherited = name not in vars(owner)
        original = getattr(owner, name) if inherited else vars(owner)[name]
        setattr(owner, name, replacement)
        self._patches.append(_Patch(owner, name, original, replacement, inherited))

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Have `undo` called by `restore` (for hooks that a framework offers itself)."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Put every original back, newest first. Where someone patched over us, theirs stays, and our wrapper
        below it only passes through."""
        for hook in self.hooks.values():
            hook.enabled = False
        for undo in reversed(self._undo):
            undo()
        for patch in reversed(self._patches):
            if vars(patch.owner).get(patch.name) is not patch.replacement:
                continue
            if patch.inherited:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.original)
        self._undo.clear()
        self._patches.clear()


def _owner_name(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", None) or getattr(owner, "__name__", owner))


@dataclass(frozen=True)
class _Arguments:
    """How to read the wanted arguments from a call. wanted: (name, position, default). leading: how many of them
    are the function's first parameters in order, when all are (then a call by position needs no looking up)."""

    wanted: tuple[tuple[str, int, Any], ...]
    leading: int

    def pick(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        given = len(args)
        return [args[i] if i < given else kwargs.get(name, default) for name, i, default in self.wanted]


def _arguments(original: Callable[..., Any], needs: Sequence[str], optional: Mapping[str, Any]) -> _Arguments | None:
    """None when a needed argument is not in the signature."""
    parameters: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(TypeError, ValueError):  # builtins may have no signature
        parameters = inspect.signature(original).parameters
    if any(name not in parameters for name in needs):
        return None
    nowhere = 1 << 30
    wanted: list[tuple[str, int, Any]] = []
    for name in (*needs, *optional):
        parameter = parameters.get(name)
        if parameter is None:
            wanted.append((name, nowhere, optional[name]))
            continue
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        by_position = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        wanted.append((name, list(parameters).index(name) if by_position else nowhere, default))
    in_order = [i for _, i, _ in wanted] == list(range(len(wanted)))
    return _Arguments(tuple(wanted), len(wanted) if in_order else nowhere)


def _wrapper(
    original: Callable[..., Any],
    hook: Hook,
    fail: Callable[[Hook, BaseException], None],
    arguments: _Arguments,
    before: Before,
    after: After,
    abort: Abort | None,
) -> Callable[..., Any]:
    """One function rather than several small ones: it runs in every hook, mostly with cold caches, where each
    further Python frame costs a microsecond."""
    leading, pick = arguments.leading, arguments.pick
    clock = perf_counter_ns

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not hook.enabled:
            return original(*args, **kwargs)
        entered = clock()
        token = None
        try:
            token = before(*args[:leading]) if len(args) >= leading else before(*pick(args, kwargs))
        except Exception as error:  # whatever it is, it is ours, and must not reach the job
            fail(hook, error)
        if token is None:
            return original(*args, **kwargs)
        spent = clock() - entered
        try:
            result = original(*args, **kwargs)
        except BaseException:
            if abort is not None:
                abort(token)
            raise
        returned = clock()
        try:
            instead = after(token, result)
            hook.hits += 1
            hook.own_ns += spent + clock() - returned
        except Exception as error:  # as above
            fail(hook, error)
            return result
        return result if instead is None else instead

    return wrapper
