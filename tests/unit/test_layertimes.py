"""Per-layer times from a file: read as written, refused with the row and the rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bubblescope.errors import InputError
from bubblescope.ingest import layertimes
from bubblescope.model.layers import LayerTime

CSV = "name,forward_s,backward_s,bytes,pinned\nemb,0.1,0.2,7,first\nl0,1,2,,\nl1,1.5,3,9,\nhead,0.3,0.4,,last\n"
LAYERS = [
    LayerTime("emb", 0.1, 0.2, bytes=7, pinned="first"),
    LayerTime("l0", 1.0, 2.0),
    LayerTime("l1", 1.5, 3.0, bytes=9),
    LayerTime("head", 0.3, 0.4, pinned="last"),
]


def written(folder: Path, text: str) -> Path:
    path = folder / "layers"
    path.write_text(text)
    return path


def test_csv_and_json_say_the_same(tmp_path: Path) -> None:
    rows = [{"name": x.name, "forward_s": x.forward_s, "backward_s": x.backward_s, "bytes": x.bytes,
             "pinned": x.pinned} for x in LAYERS]  # fmt: skip
    for text in (CSV, "\ufeff" + CSV, json.dumps(rows), json.dumps({"layers": rows})):
        assert layertimes.read(written(tmp_path, text)) == LAYERS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no layer"),
        ("[]", "no layer"),
        ("{}", "no list"),
        ("[1]", "layer 1: is not an object"),
        ("[", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("name,forward_s\na,1\n", "layer 1: backward_s is None"),
        ("name,forward_s,backward_s\na,1,2\nb,-1,2\n", "layer 2: forward_s"),
        ("name,forward_s,backward_s\na,nan,2\n", "forward_s"),
        ('[{"forward_s": true, "backward_s": 1}]', "forward_s"),
        ("name,forward_s,backward_s,pinned\na,1,2,middle\n", "first or last"),
        ("name,forward_s,backward_s,pinned\na,1,2,\nb,1,2,first\n", "must come first"),
        ("name,forward_s,backward_s,pinned\na,1,2,first\n", "every layer is pinned"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_row(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said) as caught:
        layertimes.read(written(tmp_path, text))
    assert "layers" in str(caught.value)


def test_a_file_that_is_not_there_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        layertimes.read(tmp_path / "nothing")
