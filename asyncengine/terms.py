"""On what terms a request is served: for whom, how soon, and whether its prefix is kept."""

from __future__ import annotations

import msgspec

from asyncengine.config import ServiceClass


class Terms(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """tenant: whose request it is, "" where callers are not told apart. session: names what its next request will begin
    with, "" for nothing: the prefix is kept for `session_ttl_seconds` after the answer has ended. Names of sessions are
    each tenant's own."""

    tenant: str = ""
    service_class: ServiceClass = "interactive"
    session: str = ""
    session_ttl_seconds: float = 0.0


DEFAULT_TERMS = Terms()
