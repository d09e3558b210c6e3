"""On what terms clients ask: with keys of several tenants, in both classes, and in sessions, some of them released.

No answer may depend on any of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

CLASSES = ("interactive", "background")
SESSIONS = tuple(f"chaos-{number}" for number in range(6))
"""So few that requests meet in them; each tenant has its own."""
SESSION_SHARE, RELEASE_SHARE = 0.5, 0.4
"""Of all requests, and of those with a session: others let theirs lapse."""
MIN_TTL_SECONDS, MAX_TTL_SECONDS = 0.05, 3.0
MAX_RELEASE_SECONDS = 2.0


@dataclass(frozen=True)
class Key:
    """options: what the line of the key file says behind the key. classes: which it may ask for."""

    text: str
    options: str = ""
    classes: tuple[str, ...] = CLASSES

    @property
    def line(self) -> str:
        return f"{self.text} {self.options}".rstrip()


OPERATOR = Key("chaos-key-of-its-own")
BACKGROUND_ONLY = Key("chaos-key-of-ant-at-night", "tenant=ant class=background", ("background",))
KEYS = (
    OPERATOR,
    Key("chaos-key-of-ant", "tenant=ant"),
    BACKGROUND_ONLY,
    Key("chaos-key-of-bee", "tenant=bee class=interactive"),
)


@dataclass(frozen=True)
class Terms:
    """session: fields of the body, empty for none. release_after: seconds from the request's sending at which its
    session is released."""

    key: Key = OPERATOR
    service_class: str | None = None
    session: dict[str, Any] = field(default_factory=dict)
    release_after: float | None = None

    def fields(self, *, session: bool) -> dict[str, Any]:
        """Of a request's body. session: whether it may have one."""
        return {"service_class": self.service_class} | (self.session if session else {})


def draw_terms(rng: random.Random) -> Terms:
    key = rng.choice(KEYS)
    service_class = rng.choice((None, *key.classes))
    if rng.random() >= SESSION_SHARE:
        return Terms(key, service_class)
    session = {"session": rng.choice(SESSIONS), "session_ttl_seconds": rng.uniform(MIN_TTL_SECONDS, MAX_TTL_SECONDS)}
    released = rng.random() < RELEASE_SHARE
    return Terms(key, service_class, session, rng.uniform(0, MAX_RELEASE_SECONDS) if released else None)
