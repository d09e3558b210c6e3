"""Which tokens' log-probabilities are shown, and with which text: exact cases, and any cut against the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detokenizer_proc.deltas import PendingDelta
from detokenizer_proc.logprob_columns import Entry
from detokenizer_proc.logprob_gate import LogprobGate
from detokenizer_proc.stop_strings import StopAutomaton, StopSearch

Shown = list[tuple[int, int]]
"""(token's number, its text offset)"""


class Row:
    """Texts of tokens, numbered from 0, go in; what is shown comes out."""

    def __init__(self, *stop: str, include_stop: bool = False) -> None:
        self.delta = PendingDelta(1, 0, 0, 0, None)
        search = StopSearch(StopAutomaton(stop), include_stop=include_stop) if stop else None
        self.gate = LogprobGate(search, self.delta)
        self._tokens = 0

    def push(self, text: str) -> tuple[str, Shown]:
        self.gate.stage(Entry([self._tokens], [-1.0], [b"x"]))
        self._tokens += 1
        return self.gate.push(text), self._shown()

    def end(self, text: str = "") -> tuple[str, Shown]:
        """As the worker ends a row, with `text` of the last token."""
        if text:
            self.gate.stage(Entry([self._tokens], [-1.0], [b"x"]))
        shown = self.gate.push(text)
        return shown + self.gate.flush(), self._shown()

    def _shown(self) -> Shown:
        shown, self.delta.logprobs = self.delta.logprobs, None
        return [] if shown is None else list(zip(shown.ids, shown.text_offsets, strict=True))


def test_an_entry_comes_with_its_tokens_text() -> None:
    row = Row()
    assert row.push("ab") == ("ab", [(0, 0)])
    assert row.push("c") == ("c", [(1, 2)])
    assert row.end() == ("", [])


def test_tokens_that_share_a_character_share_its_delta_and_its_offset() -> None:
    row = Row()
    assert row.push("a") == ("a", [(0, 0)])
    assert row.push("") == ("", [])
    assert row.push("") == ("", [])
    assert row.push("é!") == ("é!", [(1, 1), (2, 1), (3, 1)])
    assert row.push("b") == ("b", [(4, 3)])


def test_a_token_without_text_comes_with_the_next_text_or_the_end() -> None:
    row = Row()
    assert row.push("") == ("", [])
    assert row.push("a") == ("a", [(0, 0), (1, 0)])
    assert row.push("") == ("", [])
    assert row.end() == ("", [(2, 1)])


def test_held_text_holds_its_entries_until_it_is_known_to_be_no_stop_string() -> None:
    row = Row("END")
    assert row.push(" E") == (" ", [(0, 0)])
    assert row.push("N") == ("", [])
    assert row.push("d!") == ("ENd!", [(1, 2), (2, 3)])


@pytest.mark.parametrize(
    ("include_stop", "shown", "entries"), [(False, "", []), (True, "END", [(2, 3), (3, 4)])], ids=["cut", "included"]
)
def test_tokens_that_begin_at_or_after_a_cut_stop_string_are_dropped(
    include_stop: bool, shown: str, entries: Shown
) -> None:
    row = Row("END", include_stop=include_stop)
    row.push("ab")
    assert row.push("c") == ("c", [(1, 2)])
    assert row.push("E") == ("", [])
    assert row.push("ND and more") == (shown, entries)
    assert row.gate.hit == 0


def test_a_token_that_begins_before_the_stop_string_and_ends_in_it_is_kept() -> None:
    row = Row("END")
    assert row.push("a E") == ("a ", [(0, 0)])
    assert row.push("N") == ("", [])
    assert row.push("D") == ("", [])
    assert row.gate.hit == 0


def test_a_token_around_the_whole_stop_string_is_kept() -> None:
    row = Row("RS")
    assert row.push("qRSTq") == ("q", [(0, 0)])
    row = Row("qR")
    assert row.push("qRSTq") == ("", [])


def test_bytes_of_a_character_that_begins_a_stop_string_are_dropped_with_it() -> None:
    row = Row("é")
    assert row.push("") == ("", [])
    assert row.push("é") == ("", [])
    assert row.gate.hit == 0


def test_the_end_shows_what_was_held() -> None:
    row = Row("END")
    assert row.push("E") == ("", [])
    assert row.end("N") == ("EN", [(0, 0), (1, 1)])


def test_a_stop_string_that_the_last_token_completes_cuts_like_any_other() -> None:
    row = Row("END")
    assert row.push("x") == ("x", [(0, 0)])
    assert row.push("EN") == ("", [])
    assert row.end("D") == ("", [])


def test_a_last_token_that_is_not_shown_has_no_entry() -> None:
    row = Row()
    row.push("a")
    row.gate.stage(Entry([99], [-1.0], [b"x"]))
    row.gate.unstage()
    assert row.end() == ("", [])


@given(
    texts=st.lists(st.text("ab", max_size=3), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
    include_stop=st.booleans(),
)
def test_the_entries_are_those_of_the_tokens_that_begin_inside_the_text(
    texts: list[str], stop: list[str], include_stop: bool
) -> None:
    row = Row(*stop, include_stop=include_stop)
    shown, entries = "", []
    for text in texts:
        new_text, new_entries = row.push(text)
        shown += new_text
        entries += new_entries
        assert all(offset < len(shown) for _, offset in new_entries)
        if row.gate.hit >= 0:
            break
    else:
        new_text, new_entries = row.end()
        shown += new_text
        entries += new_entries
    starts = [len("".join(texts[:number])) for number in range(len(texts))]
    hit = row.gate.hit >= 0
    assert entries == [(number, start) for number, start in enumerate(starts) if start < len(shown) or not hit]
