"""Packed files give their bytes; damaged ones give what they still hold, and say so."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from bubblescope.errors import InputError
from bubblescope.ingest import decompress
from bubblescope.ingest.decompress import BLOCK, blocks
from bubblescope.model import Notice

TEXT = b"".join(b'{"event": %d}\n' % i for i in range(50_000))


@pytest.fixture(autouse=True, params=["isal", "zlib"])
def inflater(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "zlib":
        monkeypatch.setattr(decompress, "_isal", lambda: None)


def zipped(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("rank0.json", data)
    return out.getvalue()


def unpack(path: Path, data: bytes, limit: int = 1 << 30) -> tuple[bytes, list[Notice]]:
    path.write_bytes(data)
    notices: list[Notice] = []
    return b"".join(blocks(str(path), limit, notices)), notices


def test_plain_bytes_pass_whatever_the_name_says(tmp_path: Path) -> None:
    assert unpack(tmp_path / "lies.json.gz", TEXT) == (TEXT, [])


def test_gzip_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    assert unpack(tmp_path / "plain-name.json", gzip.compress(TEXT)) == (TEXT, [])


def test_all_members_of_a_gzip_file_are_read(tmp_path: Path) -> None:
    third = len(TEXT) // 3
    packed = b"".join(gzip.compress(TEXT[i : i + third]) for i in range(0, len(TEXT), third))
    assert unpack(tmp_path / "many.gz", packed) == (TEXT, [])


def test_zero_padding_after_the_last_member_is_no_fault(tmp_path: Path) -> None:
    assert unpack(tmp_path / "padded.gz", gzip.compress(TEXT) + bytes(512)) == (TEXT, [])


def test_other_bytes_after_the_last_member_are_named(tmp_path: Path) -> None:
    plain, notices = unpack(tmp_path / "trailing.gz", gzip.compress(TEXT) + b"garbage")
    assert plain == TEXT
    assert [n.code for n in notices] == ["trailing-bytes"]


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_a_gzip_that_ends_early_gives_its_prefix(tmp_path: Path, keep: float) -> None:
    packed = gzip.compress(TEXT)
    plain, notices = unpack(tmp_path / "cut.gz", packed[: int(len(packed) * keep)])
    assert plain
    assert TEXT.startswith(plain)
    assert [n.code for n in notices] == ["file-truncated"]
    assert f"{len(plain):,}" in notices[0].message


def test_damage_inside_a_gzip_gives_what_stands_before_it(tmp_path: Path) -> None:
    """What stands behind it unpacks to something here; the checksum tells."""
    packed = bytearray(gzip.compress(TEXT))
    half = len(packed) // 2
    sound = zlib.decompressobj(wbits=31).decompress(bytes(packed[:half]))
    packed[half : half + 40] = b"\xff" * 40
    plain, notices = unpack(tmp_path / "bad.gz", bytes(packed))
    assert [n.code for n in notices] == ["checksum-wrong"]
    assert plain.startswith(sound)


@pytest.mark.parametrize("text", [TEXT[:100_000], TEXT], ids=["one block", "many"])
def test_a_wrong_checksum_costs_no_byte_and_is_all_that_is_said(tmp_path: Path, text: bytes) -> None:
    packed = bytearray(gzip.compress(text))
    packed[-8] ^= 1
    plain, notices = unpack(tmp_path / "crc.gz", bytes(packed))
    assert plain == text
    assert [n.code for n in notices] == ["checksum-wrong"]
    assert f"{len(text):,} bytes" in notices[0].message
    assert "not read" not in notices[0].message


def test_what_stands_behind_a_wrong_checksum_is_named(tmp_path: Path) -> None:
    first, second = bytearray(gzip.compress(TEXT)), gzip.compress(TEXT)
    first[-8] ^= 1
    plain, notices = unpack(tmp_path / "members.gz", bytes(first) + second)
    assert plain == TEXT
    assert f"{len(second) + 4:,} packed bytes behind them are not read" in notices[0].message


def test_all_that_unpacks_before_damage_is_kept(tmp_path: Path) -> None:
    """To the last byte, also of the block of the file in which the damage is."""
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress(TEXT) + packer.flush(zlib.Z_FULL_FLUSH) + b"\xff" * 40
    plain, notices = unpack(tmp_path / "bad.gz", packed)
    assert plain == TEXT
    assert [n.code for n in notices] == ["file-truncated"]


def test_a_bomb_stops_at_the_limit_with_a_clear_error(tmp_path: Path) -> None:
    bomb = zlib.compressobj(9, wbits=31)
    packed = b"".join([bomb.compress(bytes(1 << 20)) for _ in range(64)]) + bomb.flush()
    with pytest.raises(InputError, match="unpacks to more than 8,000,000 bytes"):
        unpack(tmp_path / "bomb.gz", packed, limit=8_000_000)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-8"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_byte_order_mark_tells_the_encoding_and_goes(
    tmp_path: Path, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    """Characters of four bytes lie across the borders of blocks too."""
    text = "a" + "\N{ROCKET}é" * 700_000
    assert unpack(tmp_path / "wide.json", pack(("\N{BYTE ORDER MARK}" + text).encode(encoding))) == (text.encode(), [])


def test_a_member_whose_output_fills_a_block_exactly_is_whole(tmp_path: Path) -> None:
    plain = bytes(BLOCK)
    assert unpack(tmp_path / "full.gz", gzip.compress(plain) + gzip.compress(TEXT)) == (plain + TEXT, [])


@pytest.mark.parametrize(("pack", "name"), [(bz2.compress, "bzip2"), (lzma.compress, "xz"), (zipped, "zip")])
def test_a_packing_that_is_not_supported_is_named(tmp_path: Path, pack: Callable[[bytes], bytes], name: str) -> None:
    with pytest.raises(InputError, match=f"packed by {name}, which is not supported"):
        unpack(tmp_path / "rank0.json.x", pack(TEXT))


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be opened"):
        list(blocks(str(tmp_path / "none.json"), 1, []))


class TestZstd:
    @pytest.fixture
    def pack(self):  # type: ignore[no-untyped-def]
        try:
            from compression import zstd  # type: ignore[import-not-found]
        except ImportError:
            zstd = pytest.importorskip("backports.zstd", reason="the zstd extra is not installed")
        return zstd.compress

    def test_frames_are_read_to_the_end(self, tmp_path: Path, pack) -> None:  # type: ignore[no-untyped-def]
        half = len(TEXT) // 2
        assert unpack(tmp_path / "two.zst", pack(TEXT[:half]) + pack(TEXT[half:])) == (TEXT, [])

    def test_a_cut_frame_gives_its_prefix(self, tmp_path: Path, pack) -> None:  # type: ignore[no-untyped-def]
        plain, notices = unpack(tmp_path / "cut.zst", pack(TEXT)[:-20])
        assert TEXT.startswith(plain)
        assert [n.code for n in notices] == ["file-truncated"]

    def test_what_unpacks_before_damage_is_kept(self, tmp_path: Path, pack) -> None:  # type: ignore[no-untyped-def]
        first = pack(TEXT)
        plain, notices = unpack(tmp_path / "bad.zst", first + pack(TEXT)[:6] + b"\xff" * 40)
        assert plain == TEXT
        assert [n.code for n in notices] == ["file-truncated"]

    def test_a_wrong_checksum_costs_no_byte(self, tmp_path: Path, pack) -> None:  # type: ignore[no-untyped-def]
        packed = bytearray(pack(TEXT, options={201: 1}))
        packed[-1] ^= 1
        plain, notices = unpack(tmp_path / "sum.zst", bytes(packed))
        assert plain == TEXT
        assert [n.code for n in notices] == ["checksum-wrong"]

    def test_frames_that_hold_no_data_are_passed_over(self, tmp_path: Path, pack) -> None:  # type: ignore[no-untyped-def]
        nothing = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"index"
        assert unpack(tmp_path / "seek.zst", pack(TEXT) + nothing + pack(TEXT) + nothing) == (TEXT + TEXT, [])

    def test_other_bytes_after_the_last_frame_are_named(self, tmp_path: Path, pack) -> None:  # type: ignore[no-untyped-def]
        plain, notices = unpack(tmp_path / "trailing.zst", pack(TEXT) + b"garbage")
        assert plain == TEXT
        assert [n.code for n in notices] == ["trailing-bytes"]
