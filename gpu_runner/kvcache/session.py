"""What a session keeps, and how many pages the sessions of one tenant keep together."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from asyncengine.config import PAGE_SIZE
from gpu_runner.kvcache.node import Node
from gpu_runner.kvcache.pages import Int32
from gpu_runner.kvcache.radix import common_length

PAGE_BYTES = PAGE_SIZE * np.dtype(np.int32).itemsize


@dataclass(slots=True, eq=False)
class Session:
    """What the last request of a session left.

    token_bytes: its prompt and output. number: of all sessions that were ever kept, rising. ends_ns: when it is
    forgotten. node: ends the pinned prefix, the first `num_pages` pages of the tokens; None where nothing is pinned.
    """

    tenant: str
    name: str
    namespace: str
    token_bytes: bytes
    ends_ns: int
    number: int
    num_pages: int = 0
    node: Node | None = None

    @property
    def tokens(self) -> Int32:
        return np.frombuffer(self.token_bytes, np.int32)

    @property
    def order(self) -> tuple[int, int]:
        """Who ends sooner comes first."""
        return self.ends_ns, self.number

    def prefix(self, num_pages: int) -> tuple[str, bytes]:
        """What pages are found by in the prefix tree: two prefixes share those in which they are equal."""
        return self.namespace, self.token_bytes[: num_pages * PAGE_BYTES]


class PinnedPrefixes:
    """The pinned prefixes of one tenant's sessions. A page that several of them have counts once.

    They are in the order of their bytes, where none has more in common with a prefix than the two beside its place.
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self._sessions: list[Session] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions)

    def num_new(self, session: Session, num_pages: int) -> int:
        """How many of the first `num_pages` pages of a session that is not among these none of them has."""
        at = bisect_left(self._sessions, session.prefix(num_pages), key=_prefix)
        common = [
            min(num_pages, beside.num_pages, common_length(beside.tokens, session.tokens) // PAGE_SIZE)
            for beside in self._sessions[max(0, at - 1) : at + 1]
            if beside.namespace == session.namespace
        ]
        return num_pages - max(common, default=0)

    def add(self, session: Session) -> int:
        """Returns how many more pages there are."""
        num_new = self.num_new(session, session.num_pages)
        insort(self._sessions, session, key=_prefix)
        self.num_pages += num_new
        return num_new

    def remove(self, session: Session) -> int:
        """Returns how many fewer pages there are."""
        self._sessions.remove(session)
        num_gone = self.num_new(session, session.num_pages)
        self.num_pages -= num_gone
        return num_gone


def _prefix(session: Session) -> tuple[str, bytes]:
    return session.prefix(session.num_pages)
