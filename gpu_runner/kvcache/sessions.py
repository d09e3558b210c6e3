"""Prefixes that are kept between the requests of a session: while an agent's tool runs, while a person reads.

A session is known by its tenant and its name. It is what the last of its requests to end has left, whichever began
first: its tokens, to compare the next prompt with, and a pin on as much of their beginning as is cached and within the
tenant's quota. A pinned prefix is not evicted. A pin ends when the session does, or when it has to make room:

    - for a newer session of the same tenant, beyond the quota: those that end soonest lose theirs first;
    - for a request that finds no pages although nothing else runs (`give_way`), so that pins never stop the engine.

Where there is a host tier, a session has a second pin, on its copy there, within a quota of that tier's pages. Copies
are made in the background, so that pin grows with them (`copied`). A prefix that is pinned in host memory as far as it
is on the device comes back by a load, so on the device it gives way to any request that finds no pages.

What loses its pins stays in the trees as any cached prefix does, and its session's tokens stay known.

Nothing here is done per step: sessions that are over are looked for when pages are short, when their own next request
comes, and when somebody asks how many there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from asyncengine.terms import Terms
from gpu_runner.kvcache.pages import Int32, require
from gpu_runner.kvcache.pins import Pins, Session, ends_soonest
from gpu_runner.kvcache.radix import common_length

MAX_TTL_SECONDS = 86_400
"""A session that is asked to be kept for longer is kept for so long."""
MAX_SESSIONS = 4096
MAX_SESSIONS_PER_TENANT = 1024
MAX_TOKENS = 1 << 26
"""All sessions' tokens: 256 MiB. Beyond any of these the session that ends soonest is forgotten."""

UNKNOWN = (-1, 0)


class Sessions:
    """All sessions of all tenants, and what of them is pinned."""

    def __init__(self, pins: Pins, *, host_pins: Pins | None = None, clock: Callable[[], int]) -> None:
        """pins: on the device; host_pins: in host memory, if there is such a tier. clock: in ns."""
        self._pins = pins
        self._host_pins = host_pins
        self._clock = clock
        self._last_number = 0
        self.start_over()

    def start_over(self) -> None:
        """Forget all sessions, and their pins with them: the trees have to start over too."""
        self._pins.start_over()
        if self._host_pins is not None:
            self._host_pins.start_over()
        self._tenants: dict[str, dict[str, Session]] = {}  # by tenant, and name; only tenants that have sessions
        self._ends: list[tuple[int, int, str, str]] = []  # heap of (ends_ns, number, tenant, name), outdated ones too
        self._num_sessions = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_sessions

    @property
    def num_pages(self) -> int:
        """Pages that are pinned on the device; one that two tenants have counts for both."""
        return self._pins.num_pages

    def compare(self, terms: Terms, namespace: str, prompt: Int32) -> tuple[int, int]:
        """How many tokens the session has, and how many of them `prompt` begins with: none where its namespace, and so
        the cache, is another. (-1, 0) if it is not known."""
        self.expire()
        session = self._find(terms.tenant, terms.session)
        if session is None:
            return UNKNOWN
        common = common_length(session.tokens, prompt) if session.namespace == namespace else 0
        return len(session.tokens), common

    def keep(self, terms: Terms, namespace: str, tokens: Int32) -> None:
        """A request of the session has ended, with `tokens`: they take the place of what the session had. With no time
        to live, it has nothing."""
        self.release(terms.tenant, terms.session)
        if not terms.session_ttl_seconds > 0:
            return
        ends_ns = self._clock() + round(1e9 * min(terms.session_ttl_seconds, MAX_TTL_SECONDS))
        self._last_number += 1
        session = Session(terms.tenant, terms.session, namespace, tokens.copy(), ends_ns, self._last_number)
        names = self._tenants.setdefault(session.tenant, {})
        names[session.name] = session
        self._num_sessions += 1
        self._num_tokens += len(tokens)
        self._push(session)
        self._pins.pin(session)
        if self._host_pins is not None:
            self._host_pins.pin(session)
        while len(names) > MAX_SESSIONS_PER_TENANT:
            self._forget(ends_soonest(names.values()))
        while self._num_sessions > MAX_SESSIONS or self._num_tokens > MAX_TOKENS:
            self._forget_first()

    def copied(self, tenant: str, name: str) -> None:
        """More of what the session had when its request ended is in host memory now, or will be soon."""
        session = self._find(tenant, name)
        if session is not None and self._host_pins is not None:
            self._host_pins.pin(session)

    def release(self, tenant: str, name: str) -> None:
        """Forget the session, and pin its prefix no longer; unknown ones are ignored."""
        session = self._find(tenant, name)
        if session is not None:
            self._forget(session)

    def expire(self) -> None:
        """Forget the sessions whose time is over."""
        ends = self._ends
        if not ends:
            return
        now = self._clock()
        while ends and ends[0][0] <= now:
            self._forget_first()

    def give_way(self, tenant: str | None, enough: Callable[[], bool], *, copied_only: bool = False) -> None:
        """Unpin on the device until `enough()`: first what is pinned in host memory as well, and unless `copied_only`
        the rest too. Of each what `tenant`, who needs the pages, has pinned, and only then what others have; of those
        the ones that end soonest first."""
        if enough():
            return
        pinned = [(not self._is_copied(session), session) for session in self._pins]
        if copied_only:
            pinned = [(lost, session) for lost, session in pinned if not lost]
        for _, session in sorted(pinned, key=lambda each: (each[0], each[1].tenant != tenant, each[1].order)):
            self._pins.unpin(session)
            if enough():
                return

    def check_integrity(self) -> None:
        """Recompute every invariant; raises `IntegrityError`."""
        sessions = {session for names in self._tenants.values() for session in names.values()}
        live = {number for _, number, tenant, name in self._ends if self._is_live(number, tenant, name)}
        require(len(sessions) == self._num_sessions <= MAX_SESSIONS, f"{len(sessions)} sessions, not {len(self)}")
        require({session.number for session in sessions} == live, "a session has no end")
        num_tokens = sum(len(session.tokens) for session in sessions)
        require(
            num_tokens == self._num_tokens <= MAX_TOKENS, f"{num_tokens} tokens of sessions, not {self._num_tokens}"
        )
        for tenant, names in self._tenants.items():
            require(0 < len(names) <= MAX_SESSIONS_PER_TENANT, f"a tenant has {len(names)} sessions")
            require(all((s.tenant, s.name) == (tenant, name) for name, s in names.items()), "a session is misnamed")
        self._pins.check_integrity(sessions)
        if self._host_pins is not None:
            self._host_pins.check_integrity(sessions)

    def _is_copied(self, session: Session) -> bool:
        """Whether as much of it is pinned in host memory as on the device."""
        return self._host_pins is not None and self._host_pins.length(session) >= self._pins.length(session)

    def _find(self, tenant: str, name: str) -> Session | None:
        return self._tenants.get(tenant, {}).get(name)

    def _is_live(self, number: int, tenant: str, name: str) -> bool:
        session = self._find(tenant, name)
        return session is not None and session.number == number

    def _push(self, session: Session) -> None:
        if len(self._ends) > 64 + 2 * self._num_sessions:
            self._ends = [end for end in self._ends if self._is_live(*end[1:])]
            heapq.heapify(self._ends)
        heapq.heappush(self._ends, (*session.order, session.tenant, session.name))

    def _forget_first(self) -> None:
        """Of all ends the first; of one that is outdated there is nothing to forget."""
        _, number, tenant, name = heapq.heappop(self._ends)
        if self._is_live(number, tenant, name):
            self.release(tenant, name)

    def _forget(self, session: Session) -> None:
        self._pins.unpin(session)
        if self._host_pins is not None:
            self._host_pins.unpin(session)
        names = self._tenants[session.tenant]
        del names[session.name]
        if not names:
            del self._tenants[session.tenant]
        self._num_sessions -= 1
        self._num_tokens -= len(session.tokens)
