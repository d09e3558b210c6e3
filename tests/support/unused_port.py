"""A port for a server whose port must be known before it starts."""

from __future__ import annotations

import os
import socket

FIRST, COUNT = 10_000, 20_000
"""Below those that a system gives, as it is set up usually, to whoever asks for any: nobody else is given one of these
between the look and the use."""


def unused_port() -> int:
    """A free TCP port of 127.0.0.1, another one in each process."""
    for step in range(COUNT):
        port = FIRST + (os.getpid() * 7 + step) % COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")
