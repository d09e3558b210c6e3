"""Names of hosts, as `Host` and `Origin` headers and --allowed-host have them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from asyncengine.errors import StartupError

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\s\[\]:/?#@*,]+)(?P<port>:[0-9]*)?")


def host_name(host: str) -> str | None:
    """The name in `NAME`, `NAME:PORT` or `[ADDRESS]:PORT`, in the one form in which names are compared; None where
    there is none."""
    match = _HOST.fullmatch(host)
    return None if match is None else _normal(match["name"])


def is_loopback(name: str) -> bool:
    """Whether no other machine is called so. 0.0.0.0 leads to a machine's own servers, too, and is what many type."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def read_allowed_hosts(given: Iterable[str]) -> tuple[str, ...]:
    """The values of --allowed-host, as `host_name` gives them. Raises `StartupError`."""
    names = []
    for text in given:
        match = _HOST.fullmatch(f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text)
        if match is None or match["port"] is not None:
            raise StartupError(f"--allowed-host must be a name or an address, without a scheme and a port, got {text}")
        names.append(_normal(match["name"]))
    return tuple(names)


def _normal(name: str) -> str:
    name = name.strip("[]").lower().removesuffix(".")
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name
