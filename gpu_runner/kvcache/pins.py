"""What sessions have pinned in one tree of cached prefixes: on the device, or in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from asyncengine.config import PAGE_SIZE
from gpu_runner.kvcache.node import Node
from gpu_runner.kvcache.pages import Int32, require
from gpu_runner.kvcache.radix import RadixTree

ALL_TENANTS_SHARE = 0.5
"""Of the tree's pages, what the sessions of all tenants together may pin."""


@dataclass(slots=True, eq=False)
class Session:
    """What the last request of a session left.

    tokens: its prompt and output. number: of all sessions that were ever kept, rising. ends_ns: when it is forgotten.
    """

    tenant: str
    name: str
    namespace: str
    tokens: Int32
    ends_ns: int
    number: int

    @property
    def order(self) -> tuple[int, int]:
        """Who ends sooner comes first."""
        return self.ends_ns, self.number


class _Pin:
    """A pinned prefix: the node that ends it, and its pages when it was pinned, of which none has gone since."""

    __slots__ = ("node", "num_pages")

    def __init__(self, node: Node, num_pages: int) -> None:
        self.node = node
        self.num_pages = num_pages


class _Tenant:
    """One tenant's pins: on `num_pages` different pages."""

    def __init__(self) -> None:
        self.pins: dict[Session, _Pin] = {}
        self.num_pages = 0


class Pins:
    """Prefixes of sessions that are not evicted, over one tree, of which it uses `match`, `pin`, `unpin` and
    `num_unpinned`.

    No tenant has more pages pinned than its quota, nor all of them together more than theirs: of one that would, the
    sessions that end soonest lose their pins.
    """

    def __init__(self, tree: RadixTree, *, num_pages: int, tenant_share: float) -> None:
        """num_pages: of the tree's pool, tenant_share of which one tenant's sessions may pin."""
        self.tenant_quota = int(tenant_share * num_pages)
        self.total_quota = int(ALL_TENANTS_SHARE * num_pages)
        self._tree = tree
        self.start_over()

    def start_over(self) -> None:
        """Forget all pins: the tree has to start over too."""
        self.num_pages = 0  # pinned; one that two tenants have counts for both
        self._tenants: dict[str, _Tenant] = {}  # only those that have pins

    def __iter__(self) -> Iterator[Session]:
        """The sessions that have pins."""
        for tenant in self._tenants.values():
            yield from tenant.pins

    def length(self, session: Session) -> int:
        """Pages of the session that are pinned."""
        tenant = self._tenants.get(session.tenant)
        pin = None if tenant is None else tenant.pins.get(session)
        return 0 if pin is None else pin.num_pages

    def pin(self, session: Session) -> None:
        """Pin what is cached now of the session's tokens, but no more than fits when no other session of the tenant has
        pins, and those lose them as far as it takes."""
        self.unpin(session)
        tenant = self._tenants.get(session.tenant) or _Tenant()
        most = min(self.tenant_quota, self.total_quota - (self.num_pages - tenant.num_pages))
        node, pages = self._tree.match(session.namespace, session.tokens)
        tokens = session.tokens[: min(len(pages), most) * PAGE_SIZE]
        if not len(tokens):
            return
        if len(pages) > most:
            node = self._tree.match(session.namespace, tokens).node
        while tenant.num_pages + self._tree.num_unpinned(node, session.tenant) > most:
            self.unpin(ends_soonest(tenant.pins))
            node = self._tree.match(session.namespace, tokens).node  # an unlocked one may be gone
        num_new = self._tree.pin(node, session.tenant)
        self._tenants[session.tenant] = tenant
        tenant.pins[session] = _Pin(node, len(tokens) // PAGE_SIZE)
        tenant.num_pages += num_new
        self.num_pages += num_new

    def unpin(self, session: Session) -> None:
        """What loses its pin stays in the tree as any cached prefix does. Sessions without are ignored."""
        tenant = self._tenants.get(session.tenant)
        pin = None if tenant is None else tenant.pins.pop(session, None)
        if tenant is None or pin is None:
            return
        num_gone = self._tree.unpin(pin.node, session.tenant)
        tenant.num_pages -= num_gone
        self.num_pages -= num_gone
        if not tenant.pins:
            del self._tenants[session.tenant]

    def check_integrity(self, known: set[Session]) -> None:
        """Recompute every invariant; raises `IntegrityError`. known: sessions, of which alone there may be pins."""
        require(known.issuperset(self), "a session that is not known has pins")
        num_pages = sum(tenant.num_pages for tenant in self._tenants.values())
        require(num_pages == self.num_pages <= self.total_quota, f"{num_pages} pages pinned, not {self.num_pages}")
        for name, tenant in self._tenants.items():
            require(len(tenant.pins) > 0, "a tenant without pins is kept")
            pages: set[int] = set()
            for session, pin in tenant.pins.items():
                tokens, own = _path(pin.node)
                require(session.tenant == name, "a session's pin is another tenant's")
                require(len(own) == pin.num_pages > 0, f"{len(own)} pages of a session are pinned, not {pin.num_pages}")
                require(np.array_equal(tokens, session.tokens[: len(tokens)]), "a session has another's prefix pinned")
                pages.update(own)
            pinned = len(pages)
            require(pinned == tenant.num_pages <= self.tenant_quota, f"{pinned} pages pinned, not {tenant.num_pages}")


def ends_soonest(sessions: Iterable[Session]) -> Session:
    return min(sessions, key=lambda session: session.order)


def _path(node: Node) -> tuple[Int32, list[int]]:
    """Tokens and pages from the start of what is cached to the end of `node`, which must be held."""
    path = node.path()
    require(all(part.lock_count > 0 for part in path), "a pinned node may be evicted")
    return np.concatenate([part.tokens for part in path]), np.concatenate([part.pages for part in path]).tolist()
