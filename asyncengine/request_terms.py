"""The terms that a caller may ask for, and what comes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypedDict, get_args

from asyncengine.config import EngineConfig, ServiceClass
from asyncengine.errors import InvalidRequestError
from asyncengine.terms import Terms

MAX_NAME_CHARS = 128
"""Of a session, and of a tenant."""
MAX_SESSION_SECONDS = 3600.0
DEFAULT_SESSION_SECONDS = 300.0
REQUEST_NAME = r"^[A-Za-z0-9._:-]{1,128}$(?!\n)"
"""What a client may call a request over HTTP."""


class AskedTerms(TypedDict, total=False):
    """What is left out, or None, is the engine's to choose.

    service_class: "interactive" or "background", by default the engine's `default_service_class`. session: names what
    the next request of this session will begin with, in 1 to 128 characters: the prefix is kept for
    `session_ttl_seconds` (above 0 and at most 3600, by default 300) after the answer has ended.
    """

    service_class: ServiceClass | None
    session: str | None
    session_ttl_seconds: float | None


class TenantTerms(AskedTerms, total=False):
    """tenant: whom the request is for, "" where callers are not told apart. Tenants share the engine by tokens, and
    never each other's cached prefixes, sessions or names of requests."""

    tenant: str


class Target(NamedTuple):
    """What a request must keep to, to count as within target: the time to its first token, and between two of them."""

    ttft_seconds: float
    gap_seconds: float


def resolve_terms(asked: TenantTerms, *, default_class: ServiceClass) -> Terms:
    """Raises `InvalidRequestError`, and TypeError for a name that is none of them."""
    check_names(asked, TenantTerms)
    service_class = asked.get("service_class") or default_class
    if service_class not in get_args(ServiceClass):
        raise InvalidRequestError(
            f"service_class must be one of {', '.join(get_args(ServiceClass))}; got {service_class!r}",
            param="service_class",
        )
    tenant = asked.get("tenant", "")
    if tenant:
        _check_name("tenant", tenant)
    session, seconds = asked.get("session"), asked.get("session_ttl_seconds")
    if session is None:
        if seconds is not None:
            raise InvalidRequestError("session_ttl_seconds is only allowed with session", param="session_ttl_seconds")
        return Terms(tenant, service_class)
    check_session(session)
    if seconds is None:
        seconds = DEFAULT_SESSION_SECONDS
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_SESSION_SECONDS:
        raise InvalidRequestError(
            f"session_ttl_seconds must be above 0 and at most {MAX_SESSION_SECONDS:g}, got {seconds!r}",
            param="session_ttl_seconds",
        )
    return Terms(tenant, service_class, session, float(seconds))


def check_names(asked: Mapping[str, object], known: type[AskedTerms]) -> None:
    """Raises TypeError, as any function does that is called with a keyword it does not have: what is meant for
    `SamplingParams`, say, must not be passed over."""
    for name in asked:
        if name not in known.__annotations__:
            raise TypeError(
                f"got an unexpected keyword argument {name!r}; there are {', '.join(known.__annotations__)}"
            )


def check_session(session: str) -> None:
    """Raises `InvalidRequestError` for what is no session's name."""
    _check_name("session", session)


def cache_namespace(tenant: str, salt: str) -> str:
    """Whose cached prefixes a request may share: those of the same tenant with the same salt, and no other's, since
    how soon an answer begins tells whether its prompt was cached."""
    return f"{len(tenant)}:{tenant}{salt}" if tenant or salt else ""


def targets_of(config: EngineConfig) -> dict[ServiceClass, Target]:
    return {
        "interactive": Target(config.interactive_ttft_ms / 1e3, config.interactive_gap_ms / 1e3),
        "background": Target(config.background_ttft_ms / 1e3, config.background_gap_ms / 1e3),
    }


def _check_name(what: str, name: str) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
        raise InvalidRequestError(f"{what} must be a text of 1 to {MAX_NAME_CHARS} characters", param=what)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{what} holds half a surrogate pair; text must be valid Unicode", code="invalid_unicode", param=what
        ) from None
