"""Numbers in Prometheus's text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(msgspec.Struct, frozen=True):
    """labels: besides those that all samples have. suffix: of the family's name, as `_bucket`."""

    value: float
    labels: Mapping[str, str] = {}
    suffix: str = ""


class Family(msgspec.Struct, frozen=True):
    """A metric: all samples of one name. A counter's name ends in `_total`."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    samples: list[Sample]


def exposition(families: Iterable[Family], labels: Mapping[str, str]) -> bytes:
    """All `families`, each of whose samples has `labels`."""
    lines = []
    for family in families:
        lines.append(f"# HELP {family.name} {family.help}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for sample in family.samples:
            pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in {**labels, **sample.labels}.items())
            lines.append(f"{family.name}{sample.suffix}{{{pairs}}} {_number(sample.value)}")
    return ("\n".join(lines) + "\n").encode()


def histogram_samples(bounds: Iterable[float], counts: Iterable[int], total: float) -> list[Sample]:
    """counts: observations by bucket, one more than there are bounds; in the format each bucket holds those before."""
    samples, below = [], 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        below += count
        samples.append(Sample(below, {"le": _number(bound)}, "_bucket"))
    return [*samples, Sample(below, suffix="_count"), Sample(total, suffix="_sum")]


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
