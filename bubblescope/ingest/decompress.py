"""A file of any kind of packing as a stream of plain bytes, keeping what a damaged one still holds."""

from __future__ import annotations

import codecs
import contextvars
import importlib
import queue
import re
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from bubblescope.errors import InputError
from bubblescope.ingest.options import beyond_limit
from bubblescope.ingest.parallel import advance
from bubblescope.model import Notice

BLOCK = 1 << 19
_PACKED = 1 << 16
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPED = tuple(bytes([0x50 + i]) + b"\x2a\x4d\x18" for i in range(16))
_OTHERS = {b"BZh": "bzip2", b"\xfd7zX": "xz", b"PK\x03\x04": "zip", b"7z\xbc\xaf": "7z", b"\x04\x22\x4d\x18": "lz4"}
_TAR, _TAR_AT = b"ustar", 257
_GZIP_LENGTH = 4
"""Bytes behind the checksum of a gzip member."""
_CHECKSUM = re.compile("incorrect (?:data|length) check|checksum")
"""In what zlib and zstd say when all could be unpacked and its checksum is another one."""
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def _isal() -> Any:
    """The fast inflater of the extra `fast`; None where it is not installed."""
    try:
        return importlib.import_module("isal.isal_zlib")
    except ImportError:
        return None


def open_binary(path: str) -> BinaryIO:
    """`path` (local, or any fsspec URL) for reading. Raises InputError when it cannot be opened, and for a pipe or a
    device, which may never end."""
    try:
        if "://" not in path:
            if Path(path).exists() and not Path(path).is_file():
                raise InputError(
                    "this is no file but a pipe, a device or a folder",
                    hint="give a file; write what a pipe carries into one first",
                    where=path,
                )
            return Path(path).open("rb")
        fsspec = importlib.import_module("fsspec")
        return cast(BinaryIO, fsspec.open(path, "rb").open())
    except (OSError, ImportError, ValueError) as error:
        raise InputError(
            f"the file cannot be opened ({error})", hint="check the path and the permissions", where=path
        ) from error


def blocks(path: str, max_bytes: int, notices: list[Notice]) -> Iterator[bytes]:
    """The plain bytes of `path` in blocks of half a MiB; packing is told by the first bytes, not by the name.

    A file that is cut or damaged gives what could be unpacked and appends a Notice. Raises InputError when
    more than `max_bytes` come out, or when the packing is not supported here. A text that begins with the mark of
    UTF-16 (as Windows' shells write it) comes out in UTF-8, and none with a mark.
    """
    with open_binary(path) as file:
        start = file.read(len(_ZSTD))
    if start.startswith(_GZIP):
        plain = _gunzip(path, notices) if _isal() is None else _gunzip_fast(path, notices)
    elif start.startswith(_ZSTD):
        plain = _unzstd(path, notices)
    else:
        _refuse_others(start, path)
        plain = _raw(path, BLOCK)
    yield from _as_utf8(_no_archive(_bounded(plain, path, max_bytes), path))


def _refuse_others(start: bytes, path: str) -> None:
    for begin, name in _OTHERS.items():
        if start.startswith(begin):
            raise InputError(
                f"the file is packed by {name}, which is not supported",
                hint="unpack it, or pack it with gzip or zstd",
                where=path,
            )


def _no_archive(plain: Iterator[bytes], path: str) -> Iterator[bytes]:
    first = next(plain, b"")
    if first[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        raise InputError(
            "the file is a tar archive, which is not read", hint="unpack it, and give the folder", where=path
        )
    yield first
    yield from plain


def ahead(blocks: Iterator[bytes], depth: int = 4) -> Iterator[bytes]:
    """The same blocks, made in a thread of their own up to `depth` in advance: unpacking lets the interpreter go."""
    ready: queue.Queue[bytes | BaseException | None] = queue.Queue(depth)
    stopped = threading.Event()
    context = contextvars.copy_context()  # `advance` works there too
    thread = threading.Thread(target=context.run, args=(_fill, blocks, ready, stopped), daemon=True)
    thread.start()
    try:
        while (block := ready.get()) is not None:
            if isinstance(block, BaseException):
                raise block
            yield block
    finally:
        stopped.set()
        while thread.is_alive():
            while not ready.empty():
                ready.get_nowait()
            thread.join(0.01)


def _fill(blocks: Iterator[bytes], ready: queue.Queue[bytes | BaseException | None], stopped: threading.Event) -> None:
    try:
        for block in blocks:
            if stopped.is_set():
                return
            ready.put(block)
        ready.put(None)
    except BaseException as error:  # whatever it is, it belongs to the thread that asked for the blocks
        ready.put(error)


def _raw(path: str, size: int) -> Iterator[bytes]:
    with open_binary(path) as file:
        while block := file.read(size):
            advance(len(block))
            yield block


def _bounded(plain: Iterator[bytes], path: str, max_bytes: int) -> Iterator[bytes]:
    done = 0
    for block in plain:
        done += len(block)
        if done > max_bytes:
            raise beyond_limit(f"the file unpacks to more than {max_bytes:,} bytes", "bytes", path)
        yield block


def _as_utf8(plain: Iterator[bytes]) -> Iterator[bytes]:
    first = next(plain, b"")
    encoding = _UTF16.get(first[:2])
    if encoding is None:
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from plain
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    yield decoder.decode(first[2:]).encode("utf-8", "replace")
    for block in plain:
        yield decoder.decode(block).encode("utf-8", "replace")


def _gunzip_fast(path: str, notices: list[Notice]) -> Iterator[bytes]:
    """As `_gunzip`, by isal. What it refuses is unpacked again by `_gunzip`, which knows what to keep of it."""
    isal_zlib = _isal()
    done, at = 0, 0
    with open_binary(path) as file:
        try:
            reader = isal_zlib._GzipReader(file, _PACKED)
            while block := reader.read(BLOCK):
                done += len(block)
                advance(file.tell() - at)
                at = file.tell()
                yield block
            return
        except (OSError, EOFError, zlib.error, isal_zlib.error):
            pass
    yield from _after(_gunzip(path, notices), done)


def _after(plain: Iterator[bytes], skip: int) -> Iterator[bytes]:
    """The blocks without their first `skip` bytes."""
    for block in plain:
        if skip < len(block):
            yield block[skip:]
        skip = max(0, skip - len(block))


def _gunzip(path: str, notices: list[Notice]) -> Iterator[bytes]:
    """All members of a gzip file."""
    return _members(path, _Inflater, (_GZIP,), zlib.error, "gzip", notices)


def _unzstd(path: str, notices: list[Notice]) -> Iterator[bytes]:
    """All frames of a zstd file."""
    zstd = _zstd_module(path)
    return _members(path, zstd.ZstdDecompressor, (_ZSTD, *_ZSTD_SKIPPED), zstd.ZstdError, "zstd", notices)


def _members(
    path: str,
    unpacker: Any,
    begins: tuple[bytes, ...],
    error_kind: Any,
    kind: str,
    notices: list[Notice],
    fine: int | None = None,
) -> Iterator[bytes]:
    """The plain bytes of one packed stream after another; zero bytes after the last of them are ignored.

    unpacker: makes what `bz2.BZ2Decompressor` is for its format. begins: what a member begins with. fine: the block of
    the file in which an unpacker that is given all of it fails, and keeps what it had unpacked of it.
    """
    member, inside, out = unpacker(), False, 0
    pieces = _pieces(path, fine)
    for number, block in pieces:
        data = block
        while data or (inside and not member.needs_input):
            if not inside and not data.startswith(tuple(start[: len(data)] for start in begins)):
                if data.strip(b"\0"):
                    notices.append(Notice("trailing-bytes", f"{len(data):,} bytes after the {kind} data", path))
                return
            inside = True
            try:
                plain = member.decompress(data, BLOCK)
            except error_kind as error:
                if fine is None:
                    yield from _after(_members(path, unpacker, begins, error_kind, kind, notices, number), out)
                elif _CHECKSUM.search(str(error)):
                    notices.append(_unsure(path, out, kind, sum(len(piece) for _, piece in pieces)))
                else:
                    notices.append(_cut(path, out, f"damaged {kind} data ({error})"))
                return
            out += len(plain)
            if plain:
                yield plain
            data = b""
            if member.eof:
                data = member.unused_data
                member, inside = unpacker(), False
    if inside:
        notices.append(_cut(path, out, f"the {kind} stream ends early"))


def _pieces(path: str, fine: int | None) -> Iterator[tuple[int, bytes]]:
    """The file in numbered blocks; the block `fine` byte by byte."""
    for number, block in enumerate(_raw(path, _PACKED)):
        size = 1 if number == fine else len(block)
        yield from ((number, block[i : i + size]) for i in range(0, len(block), size))


class _Inflater:
    """zlib's decompressor of one gzip member, with the interface of `bz2.BZ2Decompressor` (zlib's own: Python 3.12)."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)
        self.needs_input = True

    def decompress(self, data: bytes, most: int) -> bytes:
        plain = self._zlib.decompress(self._zlib.unconsumed_tail + data, most)
        self.needs_input = not self._zlib.unconsumed_tail and len(plain) < most
        return plain

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data


def _zstd_module(path: str) -> Any:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise InputError(
        "this Python cannot unpack .zst files",
        hint="pip install 'bubblescope[zstd]', or unpack it first: zstd -d FILE",
        where=path,
    )


def _unsure(path: str, out: int, kind: str, left: int) -> Notice:
    message = (
        f"the checksum of the {kind} data is wrong: {out:,} bytes could be unpacked and are used, but they may not all "
        "be what was written"
    )
    if left > _GZIP_LENGTH:
        message += f"; {left:,} packed bytes behind them are not read"
    return Notice("checksum-wrong", message, path)


def _cut(path: str, out: int, why: str) -> Notice:
    kept = f"{out:,} bytes could be unpacked and are used" if out else "nothing of it could be unpacked"
    return Notice("file-truncated", f"{why}; {kept}", path)
