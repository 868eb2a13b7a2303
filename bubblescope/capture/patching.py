"""Reversible, guarded patches of other people's functions: the mechanism under every framework hook."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

log = logging.getLogger("bubblescope")

Before = Callable[..., Any]
After = Callable[[Any, Any], Any]
Abort = Callable[[Any], None]


@dataclass(slots=True)
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
    not allow. warnings: every warning given and every fault, in order (they are written into the recording).
    faults: how often our own code raised. missing: what the recording lacks because of it (keys, in order).
    """

    hooks: dict[str, Hook] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    faults: int = 0
    missing: dict[str, None] = field(default_factory=dict)
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
        self.fault(
            f"hook {hook.label} failed and is off, so what it records is missing from now on: "
            f"{type(error).__name__}: {error}",
            hook.label,
        )

    def fault(self, message: str, missing: str = "") -> None:
        """Our own code raised. The user is told of the first one; the others are counted, and recorded once each.
        missing: what the recording lacks for it, if it can be named."""
        self.faults += 1
        if missing:
            self.missing[missing] = None
        if self.faults == 1:
            self.warn(message)
        elif message not in self.warnings:
            self.warnings.append(message)

    def tell_faults(self) -> None:
        """At the end, when there were more than the one that was told: how many, and what the recording lacks."""
        if self.faults > 1:
            what = f"; the recording lacks, at least in part: {', '.join(self.missing)}" if self.missing else ""
            log.warning("bubblescope: %d faults of its own in all%s", self.faults, what)

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
        bound = self.bind(owner, name, label, needs, optional)
        return None if bound is None else _wrapper(bound, self.fail, before, after, abort)

    def bind(
        self, owner: Any, name: str, label: str, needs: Sequence[str], optional: Mapping[str, Any] | None = None
    ) -> Bound | None:
        """What a wrapper of ``owner.name`` needs to know; None when its signature does not allow one."""
        original = getattr(owner, name, None)
        if not callable(original):
            self.refuse(label, f"{_owner_name(owner)} has no {name}")
            return None
        arguments = _arguments(original, needs, optional or {})
        if arguments is None:
            self.refuse(label, f"{_owner_name(owner)}.{name} has no parameter {' or '.join(needs)}")
            return None
        return Bound(original, self.hook(label), arguments)

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
class Arguments:
    """How to read the wanted arguments from a call. wanted: (name, position, default).

    take: reads them from the tuple of arguments by position, when there are at least `enough`; it runs no Python
    code. `pick` reads them from any call.
    """

    wanted: tuple[tuple[str, int, Any], ...]
    enough: int
    take: Callable[[tuple[Any, ...]], tuple[Any, ...]]

    def pick(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        given = len(args)
        values = []
        for name, i, default in self.wanted:
            values.append(args[i] if i < given else kwargs.get(name, default))
        return values


@dataclass(frozen=True)
class Bound:
    """A function that can be wrapped, its hook, and how to read its calls."""

    original: Callable[..., Any]
    hook: Hook
    arguments: Arguments


def _arguments(original: Callable[..., Any], needs: Sequence[str], optional: Mapping[str, Any]) -> Arguments | None:
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
    places = [i for _, i, _ in wanted]
    return Arguments(tuple(wanted), 1 + max(places, default=-1), _taker(places))


def _taker(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What takes the items at these places.

    >>> _taker([0, 1])("abcd"), _taker([0, 3])("abcd"), _taker([2])("abcd"), _taker([])("abcd")
    ('ab', ('a', 'd'), 'c', '')
    """
    if places == list(range(len(places))):
        return operator.itemgetter(slice(len(places)))
    if len(places) == 1:  # by its place alone it would be bare
        return operator.itemgetter(slice(places[0], places[0] + 1))
    return operator.itemgetter(*places)


def _wrapper(
    bound: Bound,
    fail: Callable[[Hook, BaseException], None],
    before: Before,
    after: After,
    abort: Abort | None,
) -> Callable[..., Any]:
    """One function rather than several small ones: it runs in every hook, mostly with cold caches, where each
    further Python frame costs a microsecond."""
    original, hook = bound.original, bound.hook
    enough, take, pick = bound.arguments.enough, bound.arguments.take, bound.arguments.pick
    clock = perf_counter_ns

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not hook.enabled:
            return original(*args, **kwargs)
        entered = clock()
        token = None
        try:
            token = before(*(take(args) if len(args) >= enough else pick(args, kwargs)))
        except Exception as error:  # whatever it is, it is ours, and must not reach the job
            fail(hook, error)
        if token is None:
            return original(*args, **kwargs)
        spent = clock() - entered
        try:
            result = original(*args, **kwargs)
        except BaseException:
            try:
                if abort is not None:
                    abort(token)
            except Exception as error:  # ours; what the job gets is its own
                fail(hook, error)
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
