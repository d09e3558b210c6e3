"""What a frame costs to make and to read, by batch size.

    python scripts/bench_wire.py [--json FILE]

Times one step's frame from numpy columns to bytes (`.tobytes()`, Struct, msgpack) and back to numpy columns
(`np.frombuffer`), for `StepFrame` (gpu_runner to detokenizer) and `Deltas` (detokenizer to API process), and what its
reader pays to find that its columns agree. Beside them, what the same step costs as one Struct per request. Exits 1 if
a frame of 1024 rows costs 3 times one of 64 or more, its check not counted: that looks at each row's end of text.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from asyncengine.wire.answers import Deltas
from asyncengine.wire.checks import check
from asyncengine.wire.frames import StepFrame

BATCHES = (1, 64, 512, 1024)
MAX_RATIO = 3.0
"""Allowed cost of a frame of 1024 rows over one of 64."""
REPEATS = 301
SECONDS_PER_SAMPLE = 100e-6
BYTES_OF_TEXT = 5
"""Of one token's text."""

COLUMNAR = ("StepFrame", "Deltas")
PER_REQUEST = "one Struct per request"


class RowUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One row of a step, for comparison."""

    slot: int
    gen: int
    token: int
    finish: int


class RowUpdates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    step: int
    rows: list[RowUpdate]


class Cost(msgspec.Struct, frozen=True):
    """Median microseconds of one frame, and its size."""

    frame: str
    batch: int
    encode_us: float
    decode_us: float
    check_us: float
    size_bytes: int

    @property
    def both_us(self) -> float:
        return self.encode_us + self.decode_us


def step_frame_cost(batch: int) -> Cost:
    slots = np.arange(batch, dtype=np.int32)
    gens = np.ones(batch, np.int32)
    tokens = np.full(batch, 40_000, np.int32)
    finish = np.zeros(batch, np.uint8)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(StepFrame)

    def encode() -> bytes:
        return encoder.encode(StepFrame(9, slots.tobytes(), gens.tobytes(), tokens.tobytes(), finish.tobytes()))

    data = encode()

    def decode() -> None:
        frame = decoder.decode(data)
        for column in (frame.slots, frame.gens, frame.tokens):
            np.frombuffer(column, np.int32)
        np.frombuffer(frame.finish, np.uint8)

    return Cost("StepFrame", batch, median_us(encode), median_us(decode), checking_us(decoder.decode(data)), len(data))


def deltas_cost(batch: int) -> Cost:
    rids = np.arange(batch, dtype=np.uint64)
    text = b"a" * BYTES_OF_TEXT * batch
    text_ends = np.arange(1, batch + 1, dtype=np.int32) * BYTES_OF_TEXT
    ids = np.full(batch, 40_000, np.int32)
    ids_ends = np.arange(1, batch + 1, dtype=np.int32)
    finish = np.zeros(batch, np.uint8)
    stop_reason = np.full(batch, -1, np.int32)
    prompt_tokens = np.full(batch, 500, np.int32)
    cached_tokens = np.full(batch, 128, np.int32)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Deltas)

    def encode() -> bytes:
        return encoder.encode(
            Deltas(
                rids.tobytes(),
                text,
                text_ends.tobytes(),
                ids.tobytes(),
                ids_ends.tobytes(),
                finish.tobytes(),
                stop_reason.tobytes(),
                prompt_tokens.tobytes(),
                cached_tokens.tobytes(),
            )
        )

    data = encode()

    def decode() -> None:
        frame = decoder.decode(data)
        np.frombuffer(frame.rids, np.uint64)
        np.frombuffer(frame.finish, np.uint8)
        for column in (
            frame.text_ends,
            frame.ids,
            frame.ids_ends,
            frame.stop_reason,
            frame.prompt_tokens,
            frame.cached_tokens,
        ):
            np.frombuffer(column, np.int32)

    return Cost("Deltas", batch, median_us(encode), median_us(decode), checking_us(decoder.decode(data)), len(data))


def per_request_cost(batch: int) -> Cost:
    slots = np.arange(batch, dtype=np.int32)
    gens = np.ones(batch, np.int32)
    tokens = np.full(batch, 40_000, np.int32)
    finish = np.zeros(batch, np.uint8)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RowUpdates)

    def encode() -> bytes:
        columns = zip(slots.tolist(), gens.tolist(), tokens.tolist(), finish.tolist(), strict=True)
        return encoder.encode(RowUpdates(9, [RowUpdate(*row) for row in columns]))

    data = encode()
    return Cost(PER_REQUEST, batch, median_us(encode), median_us(lambda: decoder.decode(data)), 0.0, len(data))


def checking_us(message: msgspec.Struct) -> float:
    return median_us(lambda: check(message))


def median_us(call: Callable[[], object]) -> float:
    """Median over `REPEATS` samples, each long enough to time, of one call's microseconds."""
    started = time.perf_counter()
    call()
    loops = max(1, int(SECONDS_PER_SAMPLE / (time.perf_counter() - started)))
    samples = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(loops):
            call()
        samples.append((time.perf_counter() - started) / loops)
    return statistics.median(samples) * 1e6


def ratios(costs: list[Cost]) -> dict[str, float]:
    """By frame, the cost of 1024 rows over that of 64."""
    both = {(cost.frame, cost.batch): cost.both_us for cost in costs}
    return {frame: both[frame, 1024] / both[frame, 64] for frame in (*COLUMNAR, PER_REQUEST)}


def print_table(costs: list[Cost]) -> None:
    print(f"{'frame':<24}{'batch':>6}{'encode us':>11}{'decode us':>11}{'both us':>9}{'check us':>10}{'bytes':>8}")
    for cost in costs:
        print(
            f"{cost.frame:<24}{cost.batch:>6}{cost.encode_us:>11.2f}{cost.decode_us:>11.2f}"
            f"{cost.both_us:>9.2f}{cost.check_us:>10.2f}{cost.size_bytes:>8}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the costs and ratios here")
    arguments = parser.parse_args()

    costs = [measure(batch) for measure in (step_frame_cost, deltas_cost, per_request_cost) for batch in BATCHES]
    ratio = ratios(costs)
    print_table(costs)
    for frame, value in ratio.items():
        print(f"{frame}: 1024 rows cost {value:.2f} times 64 rows")
    if arguments.json:
        arguments.json.write_bytes(
            msgspec.json.format(msgspec.json.encode({"costs": costs, "ratio_1024_to_64": ratio}), indent=2) + b"\n"
        )
    slow = [frame for frame in COLUMNAR if ratio[frame] >= MAX_RATIO]
    if slow:
        print(f"too slow: {', '.join(slow)} must cost under {MAX_RATIO:g} times", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
