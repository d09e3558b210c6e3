"""The numbers of a load, and their table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncengine.bench.records import Record
from asyncengine.config import EngineConfig, ServiceClass

PERCENTILES = (50, 90, 99)
CACHED_SHARE_TOLD = 0.005
"""Latencies with a larger share are not those of prompts that are new to the server."""


def summarize(records: Sequence[Record], goodput: tuple[float, float] | None = None) -> dict[str, Any]:
    """All the numbers, and under `classes` those of each class that requests named. goodput: the longest TTFT and TPOT
    of a request that counts as good, in ms."""
    seconds = max((record.end_s for record in records), default=0.0) or float("nan")
    good = [record for record in records if record.status == "ok"]
    late = [1e3 * (record.sent_s - record.due_s) for record in records if record.due_s is not None]
    summary: dict[str, Any] = {
        **_of(records, seconds),
        "failures": dict(Counter(record.status for record in records if record.status != "ok")),
        "failure_details": {record.status: record.detail for record in reversed(records) if record.detail},
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "prompt_tokens_per_s": sum(record.prompt_tokens for record in good) / seconds,
        "cached_prompt_share": cached_share(good),
        **({"late_ms": spread(late)} if late else {}),
    }
    if goodput is not None:
        summary["goodput"] = _within(records, goodput, seconds)
    if classes := sorted({record.service_class for record in records if record.service_class}, reverse=True):
        targets = class_targets()
        summary["classes"] = {}
        for name in classes:
            own = [record for record in records if record.service_class == name]
            summary["classes"][name] = _of(own, seconds) | {"within": _within(own, targets[name], seconds)}
    return summary


def cached_share(records: Sequence[Record]) -> float:
    """Of the tokens of all prompts, those that the server had from before."""
    return sum(record.cached_tokens for record in records) / max(1, sum(record.prompt_tokens for record in records))


def class_targets() -> dict[ServiceClass, tuple[float, float]]:
    """TTFT and TPOT in ms that the engine aims at where it is not told otherwise."""
    engine = EngineConfig()
    return {
        "interactive": (engine.interactive_ttft_ms, engine.interactive_gap_ms),
        "background": (engine.background_ttft_ms, engine.background_gap_ms),
    }


def _of(records: Sequence[Record], seconds: float) -> dict[str, Any]:
    good = [record for record in records if record.status == "ok"]
    output_tokens = sum(record.output_tokens for record in good)
    latencies = {
        "ttft_ms": [ttft_ms(record) for record in good],
        "tpot_ms": [tpot_ms(record) for record in good if record.output_tokens > 1],
        "itl_ms": [gap / 1e3 for record in good for gap in record.gaps_us],
        "e2e_ms": [1e3 * (record.end_s - record.sent_s) for record in good],
    }
    return {
        "requests": len(records),
        "ok": len(good),
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / seconds,
        **{name: spread(values) for name, values in latencies.items() if values},
    }


def _within(records: Sequence[Record], target: tuple[float, float], seconds: float) -> dict[str, float]:
    """met: how many were ok, and their TTFT and TPOT within the target."""
    met = sum(
        record.status == "ok"
        and ttft_ms(record) <= target[0]
        and (record.output_tokens < 2 or tpot_ms(record) <= target[1])
        for record in records
    )
    return {"ttft_ms": target[0], "tpot_ms": target[1], "met": met, "per_s": met / seconds}


def ttft_ms(record: Record) -> float:
    return 1e3 * ((record.end_s if record.first_s is None else record.first_s) - record.sent_s)


def tpot_ms(record: Record) -> float:
    return 1e3 * ((record.last_s or 0.0) - (record.first_s or 0.0)) / (record.output_tokens - 1)


def spread(values: Sequence[float]) -> dict[str, float]:
    marks = np.percentile(values, PERCENTILES)
    named = {f"p{percent}": float(mark) for percent, mark in zip(PERCENTILES, marks, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(np.max(values))}


def print_summary(summary: dict[str, Any]) -> None:
    print(f"{summary['ok']} of {summary['requests']} requests ok in {summary['seconds']:.2f} s")
    for status, count in sorted(summary["failures"].items()):
        detail = summary["failure_details"].get(status)
        print(f"  failed: {count:>6} x {status}{f', such as: {detail}' if detail else ''}")
    if not summary["ok"]:
        return
    print(
        f"{summary['requests_per_s']:,.2f} requests/s   {summary['output_tokens_per_s']:,.1f} output tokens/s   "
        f"{summary['prompt_tokens_per_s']:,.1f} prompt tokens/s"
    )
    if (share := summary["cached_prompt_share"]) >= CACHED_SHARE_TOLD:
        print(f"the server had {100 * share:.0f} % of the prompt tokens from before; another --seed sends new prompts")
    if goal := summary.get("goodput"):
        share = goal["met"] / max(1, summary["requests"])
        print(
            f"goodput {goal['per_s']:,.2f} requests/s: {100 * share:.1f} % had TTFT <= {goal['ttft_ms']:g} ms and "
            f"TPOT <= {goal['tpot_ms']:g} ms"
        )
    columns = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    print(f"{'ms':<12}" + "".join(f"{name:>11}" for name in columns))
    names = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "end to end", "late_ms": "late"}
    for key, name in names.items():
        if key in summary:
            print(f"{name:<12}" + "".join(f"{summary[key][column]:>11.2f}" for column in columns))
    print_classes(summary.get("classes", {}))
    if (share := summary.get("client_cpu_share", 0.0)) > 0.0:
        print(f"the busiest client process used {100 * share:.0f} % of a core")


def print_classes(classes: dict[str, dict[str, Any]]) -> None:
    """A line of each; nothing where requests named none."""
    if not classes:
        return
    latencies = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms"}
    heads = ("requests", *(part for name in latencies for part in (f"{name} p50", "p99")), "within %", "out tok/s")
    print(f"{'class, ms':<12}" + "".join(f"{head:>11}" for head in heads))
    for name, own in classes.items():
        spreads = (own.get(key, {}) for key in latencies.values())
        cells = [f"{each[mark]:.2f}" if each else "-" for each in spreads for mark in ("p50", "p99")]
        within = f"{100 * own['within']['met'] / own['requests']:.1f}"
        row = (str(own["requests"]), *cells, within, f"{own['output_tokens_per_s']:,.0f}")
        print(f"{name:<12}" + "".join(f"{cell:>11}" for cell in row))
