"""The numbers of a load, and their table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncengine.bench.records import Record

PERCENTILES = (50, 90, 99)


def summarize(records: Sequence[Record], goodput: tuple[float, float] | None = None) -> dict[str, Any]:
    """All the numbers. goodput: the longest TTFT and TPOT of a request that counts as good, in ms."""
    good = [record for record in records if record.status == "ok"]
    seconds = max((record.end_s for record in records), default=0.0) or float("nan")
    output_tokens = sum(record.output_tokens for record in good)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    latencies = {
        "ttft_ms": [ttft_ms(record) for record in good],
        "tpot_ms": [tpot_ms(record) for record in good if record.output_tokens > 1],
        "itl_ms": [gap / 1e3 for record in good for gap in record.gaps_us],
        "e2e_ms": [1e3 * (record.end_s - record.sent_s) for record in good],
        "late_ms": [1e3 * (record.sent_s - record.due_s) for record in records if record.due_s is not None],
    }
    summary: dict[str, Any] = {
        "requests": len(records),
        "ok": len(good),
        "failures": dict(Counter(record.status for record in records if record.status != "ok")),
        "failure_details": {record.status: record.detail for record in reversed(records) if record.detail},
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / seconds,
        "prompt_tokens_per_s": prompt_tokens / seconds,
        **{name: spread(values) for name, values in latencies.items() if values},
    }
    if goodput is not None:
        met = sum(
            ttft_ms(record) <= goodput[0] and (record.output_tokens < 2 or tpot_ms(record) <= goodput[1])
            for record in good
        )
        summary["goodput"] = {"ttft_ms": goodput[0], "tpot_ms": goodput[1], "met": met, "per_s": met / seconds}
    return summary


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
    if (share := summary.get("client_cpu_share", 0.0)) > 0.0:
        print(f"the busiest client process used {100 * share:.0f} % of a core")
