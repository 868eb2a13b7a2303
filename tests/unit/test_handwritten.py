"""Files that people write are read whole or refused, whatever their line ends and however long they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from bubblescope.errors import BubblescopeError
from bubblescope.ingest import handwritten, layertimes, usernames
from bubblescope.replay import schedule_csv


def test_byte_order_mark_and_line_ends_make_no_difference(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert handwritten.text(tmp_path / "x") == "a\nb\nc\n"


def test_a_file_may_have_as_many_bytes_as_said_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert handwritten.text(tmp_path / "x", most=5) == "12345"
    with pytest.raises(OSError, match="File too large"):
        handwritten.text(tmp_path / "x", most=4)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero here")
@pytest.mark.parametrize("read", [usernames.load, layertimes.read, schedule_csv.load_csv])
def test_a_device_without_end_is_refused(read: object) -> None:
    assert callable(read)
    with pytest.raises(BubblescopeError, match="cannot be read: File too large, in /dev/zero"):
        read("/dev/zero")
