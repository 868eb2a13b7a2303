"""Reversible, guarded patches of other people's functions: the mechanism under every framework hook."""

from __future__ import annotations

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
        pick = _picker(original, needs, optional or {})
        if pick is None:
            self.refuse(label, f"{_owner_name(owner)}.{name} has no parameter {' or '.join(needs)}")
            return None
        return _wrapper(original, self.hook(label), self.fail, pick, before, after, abort)

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


def _picker(
    original: Callable[..., Any], needs: Sequence[str], optional: Mapping[str, Any]
) -> Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Any]] | None:
    """How to read the wanted arguments from a call; None when a needed one is not in the signature."""
    try:
        parameters = inspect.signature(original).parameters
    except (TypeError, ValueError):
        return None if needs else (lambda args, kwargs: list(optional.values()))
    places = {name: index for index, name in enumerate(parameters)}
    if any(name not in places for name in needs):
        return None
    wanted: list[tuple[str, int, Any]] = []
    for name in (*needs, *optional):
        if name not in places:
            wanted.append((name, 1 << 30, optional[name]))
            continue
        default = parameters[name].default
        missing = default is inspect.Parameter.empty
        positional = parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY
        wanted.append((name, places[name] if positional else 1 << 30, None if missing else default))

    count = len(wanted)
    leading = [i for _, i, _ in wanted] == list(range(count))

    def pick(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        given = len(args)
        if leading and given >= count:
            return args[:count]
        return [args[i] if i < given else kwargs.get(name, default) for name, i, default in wanted]

    return pick


def _wrapper(
    original: Callable[..., Any],
    hook: Hook,
    fail: Callable[[Hook, BaseException], None],
    pick: Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Any]],
    before: Before,
    after: After,
    abort: Abort | None,
) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not hook.enabled:
            return original(*args, **kwargs)
        entered = perf_counter_ns()
        token = None
        try:
            token = before(*pick(args, kwargs))
        except Exception as error:  # whatever it is, it is ours, and must not reach the job
            fail(hook, error)
        if token is None:
            return original(*args, **kwargs)
        spent = perf_counter_ns() - entered
        try:
            result = original(*args, **kwargs)
        except BaseException:
            if abort is not None:
                abort(token)
            raise
        returned = perf_counter_ns()
        try:
            instead = after(token, result)
            hook.hits += 1
            hook.own_ns += spent + perf_counter_ns() - returned
        except Exception as error:  # as above
            fail(hook, error)
            return result
        return result if instead is None else instead

    return wrapper
