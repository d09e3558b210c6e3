"""Prefixes that are kept between the requests of a session: while an agent's tool runs, while a person reads.

A session is known by its tenant and its name. It is what the last of its requests to end has left, whichever began
first: its tokens, to compare the next prompt with, and a pin on as much of their beginning as is cached and within the
tenant's quota. A pinned prefix is not evicted. A pin ends when the session does, or when it has to make room:

    - for a newer session of the same tenant, beyond the quota: those that end soonest lose theirs first;
    - for a request that finds no pages although nothing else runs (`give_way`), so that pins never stop the engine.

What loses its pin stays in the tree as any cached prefix does, and its session's tokens stay known.

Nothing here is done per step: sessions that are over are looked for when pages are short, when their own next request
comes, and when somebody asks how many there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from asyncengine.config import PAGE_SIZE
from asyncengine.terms import Terms
from gpu_runner.kvcache.node import Node, require
from gpu_runner.kvcache.pages import Int32
from gpu_runner.kvcache.radix import RadixTree, common_length

ALL_TENANTS_SHARE = 0.5
"""Of the KV cache, what the sessions of all tenants together may pin."""
MAX_TTL_SECONDS = 86_400
"""A session that is asked to be kept for longer is kept for so long."""
MAX_SESSIONS = 4096
MAX_SESSIONS_PER_TENANT = 1024
MAX_TOKENS = 1 << 26
"""All sessions' tokens: 256 MiB. Beyond any of these the session that ends soonest is forgotten."""

UNKNOWN = (-1, 0)


@dataclass(slots=True, eq=False)
class Session:
    """What the last request of a session left.

    tokens: its prompt and output. number: of all sessions that were ever kept, rising. ends_ns: when it is forgotten.
    node: ends the pinned prefix; None where nothing is pinned.
    """

    tenant: str
    name: str
    namespace: str
    tokens: Int32
    ends_ns: int
    number: int
    node: Node | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Who ends sooner comes first."""
        return self.ends_ns, self.number


class Sessions:
    """All sessions of all tenants over one prefix tree, of which it uses `match`, `pin`, `unpin` and
    `num_unpinned`."""

    def __init__(self, tree: RadixTree, *, num_pages: int, tenant_share: float, clock: Callable[[], int]) -> None:
        """num_pages: of the KV cache, tenant_share of which one tenant's sessions may pin. clock: in ns."""
        self.tenant_quota = int(tenant_share * num_pages)
        self.total_quota = int(ALL_TENANTS_SHARE * num_pages)
        self._tree = tree
        self._clock = clock
        self._last_number = 0
        self.start_over()

    def start_over(self) -> None:
        """Forget all sessions, and the pins with them: the tree has to start over too."""
        self.num_pages = 0  # pinned; one that two tenants have counts for both
        self._tenants: dict[str, _Tenant] = {}  # only those that have sessions
        self._ends: list[tuple[int, int, str, str]] = []  # heap of (ends_ns, number, tenant, name), outdated ones too
        self._num_sessions = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_sessions

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
        tenant = self._tenants.setdefault(session.tenant, _Tenant())
        tenant.by_name[session.name] = session
        self._num_sessions += 1
        self._num_tokens += len(tokens)
        self._push(session)
        self._pin(session, tenant)
        self._bound(tenant)

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

    def give_way(self, tenant: str, enough: Callable[[], bool]) -> None:
        """Unpin until `enough()`: what `tenant`, who needs the pages, has pinned, and only then what others have; of
        each those that end soonest first."""
        if enough():
            return
        pinned = [session for each in self._tenants.values() for session in each.pinned]
        for session in sorted(pinned, key=lambda session: (session.tenant != tenant, session.order)):
            self._unpin(session)
            if enough():
                return

    def check_integrity(self) -> None:
        """Recompute every invariant; raises `IntegrityError`."""
        sessions = [session for tenant in self._tenants.values() for session in tenant.by_name.values()]
        live = {number for _, number, tenant, name in self._ends if self._is_live(number, tenant, name)}
        require(len(sessions) == self._num_sessions <= MAX_SESSIONS, f"{len(sessions)} sessions, not {len(self)}")
        require({session.number for session in sessions} == live, "a session has no end")
        num_tokens = sum(len(session.tokens) for session in sessions)
        require(
            num_tokens == self._num_tokens <= MAX_TOKENS, f"{num_tokens} tokens of sessions, not {self._num_tokens}"
        )
        num_pages = sum(tenant.num_pages for tenant in self._tenants.values())
        require(num_pages == self.num_pages <= self.total_quota, f"{num_pages} pages pinned, not {self.num_pages}")
        for name, tenant in self._tenants.items():
            tenant.check_integrity(name, self.tenant_quota)

    def _find(self, tenant: str, name: str) -> Session | None:
        known = self._tenants.get(tenant)
        return None if known is None else known.by_name.get(name)

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

    def _bound(self, tenant: _Tenant) -> None:
        while len(tenant.by_name) > MAX_SESSIONS_PER_TENANT:
            self._forget(_ends_soonest(tenant.by_name.values()))
        while self._num_sessions > MAX_SESSIONS or self._num_tokens > MAX_TOKENS:
            self._forget_first()

    def _forget(self, session: Session) -> None:
        self._unpin(session)
        tenant = self._tenants[session.tenant]
        del tenant.by_name[session.name]
        if not tenant.by_name:
            del self._tenants[session.tenant]
        self._num_sessions -= 1
        self._num_tokens -= len(session.tokens)

    def _pin(self, session: Session, tenant: _Tenant) -> None:
        """Pin what is cached of the session's tokens, but no more than fits when no other session of the tenant has
        pins, and those lose them as far as it takes."""
        most = min(self.tenant_quota, self.total_quota - (self.num_pages - tenant.num_pages))
        node, pages = self._tree.match(session.namespace, session.tokens)
        tokens = session.tokens[: min(len(pages), most) * PAGE_SIZE]
        if not len(tokens):
            return
        if len(pages) > most:
            node = self._tree.match(session.namespace, tokens).node
        while tenant.num_pages + self._tree.num_unpinned(node, session.tenant) > most:
            self._unpin(_ends_soonest(tenant.pinned))
            node = self._tree.match(session.namespace, tokens).node  # an unlocked one may be gone
        num_new = self._tree.pin(node, session.tenant)
        session.node = node
        tenant.pinned.add(session)
        tenant.num_pages += num_new
        self.num_pages += num_new

    def _unpin(self, session: Session) -> None:
        if session.node is None:
            return
        tenant = self._tenants[session.tenant]
        num_gone = self._tree.unpin(session.node, session.tenant)
        session.node = None
        tenant.pinned.remove(session)
        tenant.num_pages -= num_gone
        self.num_pages -= num_gone


class _Tenant:
    """One tenant's sessions, and those of them that have pins: on `num_pages` different pages."""

    def __init__(self) -> None:
        self.by_name: dict[str, Session] = {}
        self.pinned: set[Session] = set()
        self.num_pages = 0

    def check_integrity(self, tenant: str, quota: int) -> None:
        require(0 < len(self.by_name) <= MAX_SESSIONS_PER_TENANT, f"a tenant has {len(self.by_name)} sessions")
        require(all((s.tenant, s.name) == (tenant, name) for name, s in self.by_name.items()), "a session is misnamed")
        pinned = {session for session in self.by_name.values() if session.node is not None}
        require(pinned == self.pinned, "a session that is not known has pins")
        pages: set[int] = set()
        for session in pinned:
            tokens, own = _path(session.node)
            require(len(own) > 0, "a session has nothing pinned")
            require(np.array_equal(tokens, session.tokens[: len(tokens)]), "a session has another's prefix pinned")
            pages.update(own)
        require(len(pages) == self.num_pages <= quota, f"{len(pages)} pages pinned, not {self.num_pages}")


def _ends_soonest(sessions: Iterable[Session]) -> Session:
    return min(sessions, key=lambda session: session.order)


def _path(node: Node | None) -> tuple[Int32, list[int]]:
    """Tokens and pages from the start of what is cached to the end of `node`, which must be held."""
    tokens: list[Int32] = []
    pages: list[Int32] = []
    while node is not None:
        require(node.lock_count > 0, "a pinned node may be evicted")
        tokens.append(node.tokens)
        pages.append(node.pages)
        node = node.parent
    return np.concatenate(tokens[::-1]), np.concatenate(pages[::-1]).tolist()
