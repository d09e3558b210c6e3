"""The keys that callers of the HTTP server must show: where they come from, and the only form in which they are kept.

Never an option of the command line, which every user of the machine can read.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

from asyncengine.config import ApiKey, ServiceClass
from asyncengine.errors import StartupError

API_KEY_VARIABLE = "ASYNCENGINE_API_KEY"
_KEY = re.compile(r"[!-~]{8,512}")
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


def read_api_keys(path: str | None, environ: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """The keys in the file at `path`, and the one in the environment; none of both is no access control.

    A line of the file is a key, behind which there may be whose it is and the class of its requests:

        KEY [tenant=NAME] [class=interactive|background]

    Keys with the same name belong to one tenant, one without a name to a tenant of its own. Raises `StartupError`,
    which never shows a key.
    """
    keys: dict[bytes, ApiKey] = {}
    if path is not None:
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise StartupError(f"cannot read the API keys in {path}: {reason}") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                key = _read_line(line, f"line {number} of {path}")
                if key.digest in keys:
                    raise StartupError(f"the API key in line {number} of {path} is there twice")
                keys[key.digest] = key
        if not keys:
            raise StartupError(f"{path} holds no API key; write one on each line")
    if given := environ.get(API_KEY_VARIABLE):
        key = _make_key(given, API_KEY_VARIABLE)
        keys.setdefault(key.digest, key)
    return tuple(keys.values())


def digest_of(key: str) -> bytes:
    """What is kept of a key: enough to know it again. Digests have one length, so comparing them tells none."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def known_key(shown: str, keys: Sequence[ApiKey]) -> ApiKey | None:
    """Which of `keys` it is that is shown, in a time that depends on their number only."""
    digest = digest_of(shown)
    found = [key for key in keys if hmac.compare_digest(digest, key.digest)]
    return found[0] if found else None


def _read_line(line: str, where: str) -> ApiKey:
    text, *options = line.split()
    key, given = _make_key(text, where), dict[str, Any]()
    for option in options:
        name, _, value = option.partition("=")
        if name == "tenant" and _TENANT.fullmatch(value):
            given["tenant"] = value
        elif name == "class" and value in get_args(ServiceClass):
            given["service_class"] = value
        else:
            raise StartupError(
                f"behind the API key in {where} there may be tenant=NAME, up to 64 of A-Z a-z 0-9 . _ and -, and "
                f"class={' or class='.join(get_args(ServiceClass))}, and nothing else"
            )
    return ApiKey(**{"digest": key.digest, "tenant": key.tenant} | given)


def _make_key(text: str, where: str) -> ApiKey:
    """A key alone. Its tenant's name is made of another digest than the one that is kept."""
    if not _KEY.fullmatch(text):
        raise StartupError(f"the API key in {where} must have 8 to 512 printable ASCII characters and no space")
    digest = digest_of(text)
    return ApiKey(digest=digest, tenant=f"key-{sha256(b'tenant' + digest).hexdigest()[:12]}")
