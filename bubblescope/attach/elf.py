"""Where a function of another process's interpreter is: ELF symbol tables and /proc/PID/maps, read only."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_MOST_SYMBOLS = 1 << 20
_PT_LOAD = 1
_SHT_DYNSYM = 11


class NotFound(ValueError):
    """No such symbol there, or not a file that we can read as ELF."""


@dataclass(frozen=True)
class Mapping:
    """One line of /proc/PID/maps."""

    start: int
    end: int
    permissions: str
    offset: int
    path: str


def mappings(pid: int) -> list[Mapping]:
    """Memory map of a process. Raises OSError."""
    return [m for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines() if (m := _mapping(line))]


def _mapping(line: str) -> Mapping | None:
    parts = line.split(maxsplit=5)
    if len(parts) < 5:
        return None
    start, _, end = parts[0].partition("-")
    path = parts[5] if len(parts) == 6 else ""
    return Mapping(int(start, 16), int(end, 16), parts[1], int(parts[2], 16), path)


def functions(path: Path, names: Sequence[str]) -> dict[str, int]:
    """Virtual addresses that the file itself gives to these exported functions.

    Raises NotFound when one of them is not exported, OSError when the file cannot be read.
    """
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise NotFound(f"{path} is not a 64-bit little-endian ELF file")
    wanted = {name.encode() for name in names}
    found = {name.decode(): value for name, value in _symbols(data) if name in wanted and value}
    missing = [name for name in names if name not in found]
    if missing:
        raise NotFound(f"{path} does not export {', '.join(missing)}")
    return found


def _symbols(data: bytes) -> Iterator[tuple[bytes, int]]:
    """(name, value) of the dynamic symbol table."""
    try:
        table, strings = _dynamic_tables(data)
        for at in range(table.start, table.stop, 24):
            name, _info, _other, section, value, _size = struct.unpack_from("<IBBHQQ", data, at)
            if section:
                start = strings + name
                yield data[start : data.index(b"\0", start)], value
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise NotFound(f"damaged ELF file: {error}") from None


def _dynamic_tables(data: bytes) -> tuple[range, int]:
    """(bytes of .dynsym, offset of its string table)."""
    sections_at, size, count = struct.unpack_from("<Q", data, 0x28)[0], *struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, sections_at + i * size) for i in range(count)]
    for section in sections:
        if section[1] == _SHT_DYNSYM:
            length = min(section[5], _MOST_SYMBOLS * 24)
            return range(section[4], section[4] + length - 23), sections[section[6]][4]
    raise NotFound("no dynamic symbol table: a static or stripped file")


def load_address(path: Path) -> int:
    """Page-aligned virtual address of the first loaded segment, as the file has it. Raises NotFound, OSError."""
    with path.open("rb") as file:
        head = file.read(4096)
    try:
        table, size, count = struct.unpack_from("<Q", head, 0x20)[0], *struct.unpack_from("<HH", head, 0x36)
        for i in range(count):
            kind, _flags, _offset, address = struct.unpack_from("<IIQQ", head, table + i * size)
            if kind == _PT_LOAD:
                return int(address & ~0xFFF)
    except (struct.error, OverflowError) as error:
        raise NotFound(f"damaged ELF file: {error}") from None
    raise NotFound(f"{path} has no loaded segment")


def locate(pid: int, names: Sequence[str]) -> dict[str, int]:
    """Addresses in process `pid` of these functions of its interpreter, from libpython or the executable.

    Raises NotFound with the reason, OSError when the process cannot be looked at.
    """
    maps = mappings(pid)
    executable = str(Path(f"/proc/{pid}/exe").readlink())
    first: dict[str, Mapping] = {}
    for one in maps:
        if one.offset == 0 and one.path.startswith("/"):
            first.setdefault(one.path, one)
    candidates = [p for p in first if Path(p).name.startswith("libpython3.")] + [p for p in first if p == executable]
    reasons = []
    for path in candidates:
        file = Path(f"/proc/{pid}/root{path}")
        try:
            base = first[path].start - load_address(file)
            return {name: base + value for name, value in functions(file, names).items()}
        except (NotFound, OSError) as error:
            reasons.append(str(error))
    raise NotFound("; ".join(reasons) or "no Python interpreter is mapped there")
