"""A few ptrace calls by ctypes, x86-64 Linux: stop one thread, have it make a call, let it go on as it was."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

_CONT, _GETREGS, _SETREGS, _DETACH, _SEIZE, _INTERRUPT = 7, 12, 13, 17, 0x4206, 0x4207
_GETSIGMASK, _SETSIGMASK, _SINGLESTEP = 0x420A, 0x420B, 9
_GETREGSET, _SETREGSET, _NT_X86_XSTATE = 0x4204, 0x4205, 0x202
_MOST_XSTATE = 1 << 16
_WALL = 0x40000000
_EVENT_STOP = 128
_RED_ZONE = 128
_NO_SYSCALL = 2**64 - 1
_SYS_MMAP = 9
_PROT_READ, _PROT_EXEC = 1, 4
_MAP_PRIVATE_ANONYMOUS = 0x22
_TRAPS = (signal.SIGTRAP, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)

NAMES = (
    "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi",
    "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs",
)
"""struct user_regs_struct, in order."""


class PtraceError(OSError):
    """The kernel did not allow it, or the thread did not do what it should; it goes on as it was."""


class TimedOut(PtraceError):
    """The call did not return in time; the thread was put back to where it was."""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Libc:
    def __init__(self) -> None:
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.restype = ctypes.c_long
        self._ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

    def __call__(self, request: int, pid: int, address: int = 0, data: object = None) -> None:
        if self._ptrace(request, pid, address, data) == -1:
            code = ctypes.get_errno()
            raise PtraceError(code, os.strerror(code))


class Stopped:
    """One thread, stopped while this exists. Use `stopped`."""

    def __init__(self, pid: int, timeout_s: float) -> None:
        self.pid = pid
        self._ends = time.monotonic() + timeout_s
        self._call = _Libc()
        self._later: list[int] = []
        self._call(_SEIZE, pid)
        try:
            self._interrupt()
            self.registers = self._get()
            self._vectors = self._get_vectors()
            self._mask = self._get_mask()
        except BaseException:
            self._let_go()
            raise

    # ---- what a caller asks for

    def mmap_code(self, size: int) -> int:
        """Address of new private memory in the process, readable and executable, which only we can fill."""
        address = self._system_call(_SYS_MMAP, 0, size, _PROT_READ | _PROT_EXEC, _MAP_PRIVATE_ANONYMOUS, _NO_SYSCALL, 0)
        if address > 2**64 - 4096:
            raise PtraceError(2**64 - address, f"mmap in the process failed: {os.strerror(2**64 - address)}")
        return address

    def write(self, address: int, data: bytes) -> None:
        with Path(f"/proc/{self.pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(address)
            memory.write(data)

    def call(self, function: int, first: int, second: int, trap: int) -> int:
        """function(first, second) on that thread; `trap` is where a breakpoint instruction lies.

        Its result, as a signed int. Raises TimedOut.
        """
        stack = ((self.registers["rsp"] - _RED_ZONE - 64) & ~15) - 8
        self.write(stack, struct.pack("<Q", trap))
        self._set({
            **self.registers,
            "rip": function, "rdi": first, "rsi": second, "rax": 0, "rsp": stack, "orig_rax": _NO_SYSCALL,
        })  # fmt: skip
        self._call(_CONT, self.pid)
        self._await_trap(trap + 1)
        return int(ctypes.c_int32(self._get()["rax"] & 0xFFFFFFFF).value)

    # ---- inside

    def _system_call(self, number: int, *arguments: int) -> int:
        names = ("rdi", "rsi", "rdx", "r10", "r8", "r9")
        at = self._syscall_instruction()
        values = dict(zip(names, arguments, strict=True))
        self._set({**self.registers, **values, "rip": at, "rax": number, "orig_rax": _NO_SYSCALL})
        self._call(_SINGLESTEP, self.pid)
        self._await_trap(at + 2)
        return self._get()["rax"]

    def _syscall_instruction(self) -> int:
        """Address of a `syscall` instruction in the kernel's own page (vdso), which every process has."""
        for line in Path(f"/proc/{self.pid}/maps").read_text(errors="replace").splitlines():
            if line.endswith("[vdso]"):
                start, _, end = line.split(maxsplit=1)[0].partition("-")
                with Path(f"/proc/{self.pid}/mem").open("rb", buffering=0) as memory:
                    memory.seek(int(start, 16))
                    at = memory.read(int(end, 16) - int(start, 16)).find(b"\x0f\x05")
                if at >= 0:
                    return int(start, 16) + at
        raise PtraceError(0, "the process has no vdso with a system call in it")

    def _await_trap(self, at: int) -> None:
        """Until the thread stops at `at`; other signals it gets meanwhile are given to it later."""
        while True:
            code, event = self._wait()
            if code == signal.SIGTRAP and not event and self._get()["rip"] == at:
                return
            if code in _TRAPS:
                raise PtraceError(0, f"the process stopped with signal {code} inside our call")
            if not event:
                self._later.append(code)
            self._call(_CONT, self.pid)

    def _interrupt(self) -> None:
        self._call(_INTERRUPT, self.pid)
        while True:
            code, event = self._wait()
            if event == _EVENT_STOP:
                return
            self._call(_CONT, self.pid, 0, code)  # a signal came first: the thread gets it, and stops after

    def _wait(self) -> tuple[int, int]:
        """(signal, ptrace event) of the next stop. Raises TimedOut; then the thread runs."""
        while True:
            pid, status = os.waitpid(self.pid, _WALL | os.WNOHANG)
            if pid:
                if not os.WIFSTOPPED(status):
                    raise PtraceError(3, "the process ended")
                return os.WSTOPSIG(status), status >> 16
            if time.monotonic() > self._ends:
                raise TimedOut(110, "the thread did not stop in time")
            time.sleep(0.0002)

    def _get(self) -> dict[str, int]:
        buffer = (ctypes.c_uint64 * len(NAMES))()
        self._call(_GETREGS, self.pid, 0, ctypes.cast(buffer, ctypes.c_void_p))
        return dict(zip(NAMES, buffer, strict=True))

    def _set(self, registers: dict[str, int]) -> None:
        buffer = (ctypes.c_uint64 * len(NAMES))(*(registers[name] for name in NAMES))
        self._call(_SETREGS, self.pid, 0, ctypes.cast(buffer, ctypes.c_void_p))

    def _get_mask(self) -> int:
        mask = ctypes.c_uint64()
        self._call(_GETSIGMASK, self.pid, 8, ctypes.cast(ctypes.byref(mask), ctypes.c_void_p))
        return mask.value

    def _get_vectors(self) -> ctypes.Array[ctypes.c_char]:
        """Floating-point and vector registers: a foreign call may use those that the thread was computing with."""
        buffer = ctypes.create_string_buffer(_MOST_XSTATE)
        vector = _IoVec(ctypes.addressof(buffer), _MOST_XSTATE)
        self._call(_GETREGSET, self.pid, _NT_X86_XSTATE, ctypes.cast(ctypes.byref(vector), ctypes.c_void_p))
        return ctypes.create_string_buffer(buffer.raw[: vector.length], vector.length)

    def _set_vectors(self) -> None:
        vector = _IoVec(ctypes.addressof(self._vectors), len(self._vectors))
        self._call(_SETREGSET, self.pid, _NT_X86_XSTATE, ctypes.cast(ctypes.byref(vector), ctypes.c_void_p))

    def set_mask(self, mask: int | None) -> None:
        """Which signals the thread blocks; None = those that it blocked itself."""
        value = ctypes.c_uint64(self._mask if mask is None else mask)
        self._call(_SETSIGMASK, self.pid, 8, ctypes.cast(ctypes.byref(value), ctypes.c_void_p))

    def release(self) -> None:
        """Put the thread back to where it was, and let it go."""
        try:
            self._put_back()
        except PtraceError:
            self._ends = time.monotonic() + 1.0  # it runs: our call has not come back
            self._interrupt()
            self._put_back()
        self._let_go()

    def _put_back(self) -> None:
        self._set_vectors()
        self._set(self.registers)
        self.set_mask(None)

    def _let_go(self) -> None:
        with contextlib.suppress(PtraceError):
            self._call(_DETACH, self.pid)
        for code in self._later:
            with contextlib.suppress(OSError):
                os.kill(self.pid, code)


ALL_BUT_TRAPS = 2**64 - 1 & ~sum(1 << (code - 1) for code in _TRAPS)


@contextlib.contextmanager
def stopped(pid: int, timeout_s: float) -> Iterator[Stopped]:
    """The main thread of `pid`, stopped; afterwards it goes on as it was. Our own signals wait meanwhile: a
    Ctrl-C between two of these calls would leave the thread with foreign registers.

    Raises PtraceError.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
    try:
        one = Stopped(pid, timeout_s)
        try:
            one.set_mask(ALL_BUT_TRAPS)
            yield one
        finally:
            one.release()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
