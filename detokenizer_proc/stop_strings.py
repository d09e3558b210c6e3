"""Finds stop strings in text that arrives in pieces, and holds back no character that cannot be part of one.

The search is an Aho-Corasick automaton (Aho and Corasick, 1975): one step per new character whatever the number and
length of the stop strings, and the state's depth is the number of characters to hold back. The stop string that is
complete first in the text wins, of several that end at the same character the first listed; so the result does not
depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """A request's stop strings (each at least one character), prepared. Immutable: rows may share one.

    States are the prefixes of the stop strings, 0 is the empty one. following: by character, the state that is one
    longer. fail: the longest proper suffix of the state that is a state. depth: the state's length. found: index of the
    stop string that is complete in the state, -1 for none. first: characters a stop string begins with.
    """

    __slots__ = ("depth", "fail", "first", "following", "found", "lengths")

    def __init__(self, stops: Sequence[str]) -> None:
        self.lengths = [len(stop) for stop in stops]
        self.following: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found = [-1]
        for index, stop in enumerate(stops):
            self._add(index, stop)
        self.first = frozenset(self.following[0])
        self.fail = [0] * len(self.following)
        self._link()

    def _add(self, index: int, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self.following[state]:
                self.following[state][char] = len(self.following)
                self.following.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(-1)
            state = self.following[state][char]
        if self.found[state] < 0:
            self.found[state] = index

    def _link(self) -> None:
        """Fill `fail` and let a state know the stop strings that are its suffixes, shorter states first."""
        queue = deque(self.following[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.following[state].items():
                self.fail[child] = self.step(self.fail[state], char)
                queue.append(child)
                complete = [index for index in (self.found[child], self.found[self.fail[child]]) if index >= 0]
                self.found[child] = min(complete, default=-1)

    def step(self, state: int, char: str) -> int:
        while state and char not in self.following[state]:
            state = self.fail[state]
        return self.following[state].get(char, 0)


class StopSearch:
    """One row's search. Once `hit` is set the text is over and nothing may be pushed."""

    __slots__ = ("_automaton", "_held", "_include", "_state", "hit")

    def __init__(self, automaton: StopAutomaton, *, include_stop: bool) -> None:
        """include_stop: whether the stop string found is part of the text."""
        self._automaton = automaton
        self._include = include_stop
        self._state = 0
        self._held = ""
        self.hit = -1
        """Index of the stop string found; -1 so far."""

    def push(self, text: str) -> str:
        """The characters that can now be shown; with a hit, the last of them."""
        automaton, state = self._automaton, self._state
        if not state and automaton.first.isdisjoint(text):
            return text
        following, fail, found = automaton.following, automaton.fail, automaton.found
        end = len(self._held)
        whole = self._held + text
        for char in text:
            end += 1
            # `StopAutomaton.step`, written out: this is the one loop that runs for every character
            while state and char not in following[state]:
                state = fail[state]
            state = following[state].get(char, 0)
            if found[state] >= 0:
                self.hit = found[state]
                self._held = ""
                return whole[: end if self._include else end - automaton.lengths[self.hit]]
        self._state = state
        shown = end - automaton.depth[state]
        self._held = whole[shown:]
        return whole[:shown]

    def flush(self) -> str:
        """What was held back; the text is over."""
        held, self._held, self._state = self._held, "", 0
        return held
