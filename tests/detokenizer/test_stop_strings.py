"""The stop string search against a one-shot reference, whatever the pieces in which the text arrives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from detokenizer_proc.stop_strings import StopAutomaton, StopSearch


def reference(text: str, stops: list[str], *, include: bool) -> tuple[str, int]:
    """The shown text and the index found (-1: none): of all matches the one that ends first, then the first listed."""
    matches = [(text.find(stop) + len(stop), index) for index, stop in enumerate(stops) if stop in text]
    if not matches:
        return text, -1
    end, index = min(matches)
    return text[: end if include else end - len(stops[index])], index


def searched(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], int]:
    """What each piece let through, the flush last; it ends with the hit."""
    search = StopSearch(StopAutomaton(stops), include_stop=include)
    shown = []
    for piece in pieces:
        shown.append(search.push(piece))
        if search.hit >= 0:
            return shown, search.hit
    return [*shown, search.flush()], search.hit


def cut(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(min(border, len(text)) for border in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


TEXTS = st.text(alphabet="abc", max_size=24)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=8), include=st.booleans())
@example(text="abcd", stops=["abcd", "bc"], cuts=[], include=False)
@example(text="abc", stops=["bc", "abc"], cuts=[1], include=False)
def test_the_result_is_the_references_for_any_pieces(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    shown, hit = searched(cut(text, cuts), stops, include=include)
    assert ("".join(shown), hit) == reference(text, stops, include=include)


@given(text=TEXTS, stops=STOPS)
def test_exactly_the_longest_tail_that_begins_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    search = StopSearch(StopAutomaton(stops), include_stop=False)
    shown = ""
    for end, char in enumerate(text, start=1):
        shown += search.push(char)
        if search.hit >= 0:
            return
        prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((prefix for prefix in prefixes if text[:end].endswith(prefix)), key=len)
        assert shown + held == text[:end]


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "hit"),
    [
        (["E", "N", "D", "."], ["END."], ["", "", "", ""], 0),
        (["EN", "X"], ["END."], ["", "ENX", ""], -1),
        (["qRSTq"], ["RS"], ["q"], 0),
        (["h", "i", " ", "there"], ["\n####################"], ["h", "i", " ", "there", ""], -1),
        (["one\n", "#", "x"], ["\n##"], ["one", "", "\n#x", ""], -1),
        (["aab", "aac"], ["aaac", "aabaac"], ["", ""], 1),
        (["EN"], ["END"], ["", "EN"], -1),
        (["x", "yz"], ["yz", "yz"], ["x", ""], 0),
    ],
)
def test_only_text_that_may_become_a_stop_string_waits(
    pieces: list[str], stops: list[str], shown: list[str], hit: int
) -> None:
    assert searched(pieces, stops) == (shown, hit)


def test_an_included_stop_string_ends_the_text() -> None:
    assert searched(["say EN", "D. more"], ["END."], include=True) == (["say ", "END."], 0)


def test_the_search_of_a_long_text_takes_a_bounded_number_of_steps_a_character(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    automaton = StopAutomaton(["a" * 511 + "b"] * 16)
    lookups = 0

    class Counting(dict[str, int]):
        def __contains__(self, key: object) -> bool:
            nonlocal lookups
            lookups += 1
            return super().__contains__(key)

    monkeypatch.setattr(automaton, "following", [Counting(children) for children in automaton.following])
    search = StopSearch(automaton, include_stop=False)
    for _ in range(2000):
        search.push("a")
    search.push("c")
    assert lookups < 3 * 2000
