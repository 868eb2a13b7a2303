"""Byte repairs keep the meaning of what was whole, and count what was not."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bubblescope.ingest import jsonrepair

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_sound_json_is_left_as_it_is(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False).encode()
    counts: Counter[str] = Counter()
    assert jsonrepair.clean(text, counts) == text
    assert not counts


@given(JSON)
def test_the_end_of_a_value_is_its_end(value: object) -> None:
    text = json.dumps([value]).encode()
    assert jsonrepair.value_end(text + b', "more": [1, 2', 0) == len(text)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_survived(data: bytes) -> None:
    jsonrepair.clean(data, Counter())
    jsonrepair.value_end(data, 0)
    jsonrepair.split_events(data, jsonrepair.event_gap(data))


@pytest.mark.parametrize(
    ("broken", "meant"),
    [
        (b'{"dur": NaN}', {"dur": None}),
        (b'{"dur": -Infinity, "x": inf}', {"dur": None, "x": None}),
        (b'{"name": "NaN and inf"}', {"name": "NaN and inf"}),
        (b'{"file": "C:\\Users\\model.py"}', {"file": "C:\\Users\\model.py"}),
        (b'{"name": "tab\there"}', {"name": "tab\there"}),
        (b'{"name": "caf\xe9"}', {"name": "caf\ufffd"}),
        (b'{"name": "a\\"b\\\\"}', {"name": 'a"b\\'}),
    ],
)
def test_a_repair_gives_what_was_meant(broken: bytes, meant: object) -> None:
    assert json.loads(jsonrepair.clean(broken, Counter())) == meant


def test_every_name_that_is_no_utf_8_is_counted() -> None:
    counts: Counter[str] = Counter()
    text = b'{"a": "f\xff\xfe_gemm"}, {"b": "\xc3\xa9 \xef\xbf\xbd"}, {"c": "\xff"}'
    assert json.loads(b"[" + jsonrepair.clean(text, counts) + b"]")[2] == {"c": "\ufffd"}
    assert counts == {"bad UTF-8": 2}
