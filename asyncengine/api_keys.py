"""The keys that callers of the HTTP server must show: where they come from, and the only form in which they are kept.

Never an option of the command line, which every user of the machine can read.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from asyncengine.errors import StartupError

API_KEY_VARIABLE = "ASYNCENGINE_API_KEY"
_KEY = re.compile(r"[!-~]{8,512}")


def read_api_keys(path: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The keys in the file at `path`, one a line, and the one in the environment; none of both is no access control.

    Raises `StartupError`, which never shows a key.
    """
    keys: list[tuple[str, str]] = []
    if path is not None:
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise StartupError(f"cannot read the API keys in {path}: {reason}") from None
        keys = [(line.strip(), f"line {number} of {path}") for number, line in enumerate(lines, 1) if line.strip()]
        if not keys:
            raise StartupError(f"{path} holds no API key; write one on each line")
    if given := environ.get(API_KEY_VARIABLE):
        keys.append((given, API_KEY_VARIABLE))
    for key, where in keys:
        if not _KEY.fullmatch(key):
            raise StartupError(f"the API key in {where} must have 8 to 512 printable ASCII characters and no space")
    return tuple(key for key, _ in keys)


def digest_of(key: str) -> bytes:
    """What is kept of a key: enough to know it again. Digests have one length, so comparing them tells none."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_known(key: str, digests: Sequence[bytes]) -> bool:
    """Whether `key` is one of those that `digests` are of, in a time that depends on their number only."""
    shown = digest_of(key)
    return sum(hmac.compare_digest(shown, digest) for digest in digests) > 0
