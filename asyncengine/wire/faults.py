"""What a log may say of a fault: where it was and of what kind. The texts of exceptions may repeat part of a prompt, an
answer or a key, and are left out wherever a process has such."""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType
from typing import Any, TextIO


def fault_text(error: BaseException) -> str:
    """The traceback of `error`, and of what it came from, with each exception's type in the place of its text."""
    parts: list[str] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        parts.append("".join([*traceback.format_tb(link.__traceback__), type(link).__name__]))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\nwhich came of\n".join(parts)


def fault_place(error: BaseException) -> str:
    """The same in a few words."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"


def print_fault(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A `sys.excepthook`."""
    print(fault_text(error), file=sys.stderr)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        others, record.exc_text = record.exc_text, None  # as another handler's formatter has it
        try:
            return super().format(record)
        finally:
            record.exc_text = others

    def formatException(self, ei: Any) -> str:
        return fault_text(ei[1]) if ei[1] is not None else ""


def log_faults_without_texts(stream: TextIO | None = None) -> logging.Handler:
    """From now on, log warnings and what is worse to `stream`, stderr by default, as Python does where nobody has
    configured anything, but for the texts of exceptions. Whoever sent a request may have chosen them."""
    handler = logging.StreamHandler(stream)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_Formatter())
    logging.getLogger().addHandler(handler)
    return handler
