"""What whoever computes masks has to know of constrained rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from asyncengine.sampling import Structured
from gpu_runner.schedule.plan import Int32


def _none() -> Int32:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class OpenedRow:
    """A row that begins a text within a structure: `tokens` is what it has of it."""

    slot: int
    gen: int
    structured: Structured
    tokens: Int32


@dataclass(frozen=True, slots=True)
class MaskWork:
    """Rows whose next mask is wanted: those that begin, and those that got a token, [R] each."""

    opened: tuple[OpenedRow, ...] = ()
    slots: Int32 = field(default_factory=_none)
    gens: Int32 = field(default_factory=_none)
    tokens: Int32 = field(default_factory=_none)
