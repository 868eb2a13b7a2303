"""A text has one index, for good."""

from __future__ import annotations

import copy
import pickle

from hypothesis import given
from hypothesis import strategies as st

from bubblescope.model import Names


def test_index_zero_is_the_empty_text() -> None:
    assert Names()[0] == ""
    assert Names().intern("") == 0


@given(st.lists(st.text()))
def test_every_text_is_found_again_under_its_index_and_stored_once(texts: list[str]) -> None:
    names = Names()
    indices = [names.intern(t) for t in texts]
    assert names.lookup(indices) == texts
    assert len(names) == len({*texts, ""})


@given(st.lists(st.text()), st.lists(st.text()))
def test_a_mapping_to_another_table_keeps_every_text(mine: list[str], theirs: list[str]) -> None:
    source, target = Names.of(mine), Names.of(theirs)
    mapping = source.mapping_to(target)
    assert [target[int(i)] for i in mapping] == source.texts


def test_a_copy_that_crossed_a_process_boundary_still_knows_its_texts() -> None:
    names = Names.of(["a", "b"])
    for again in (pickle.loads(pickle.dumps(names)), copy.deepcopy(names)):  # noqa: S301 (our own bytes)
        assert again.intern("b") == names.intern("b")
        assert again.intern("new") == 3
    assert len(names) == 3
