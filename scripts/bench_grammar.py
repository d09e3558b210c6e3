"""What structured output costs a step: of the loop's time, and until the masks are there.

    python scripts/bench_grammar.py [--tokenizer FOLDER] [--rows 1,8,64,256] [--steps 60]

Rows of JSON by a schema run through the real scheduler and a real grammar process; in place of a device, a token is
drawn from each row's mask. Times are medians, in microseconds a step:

    loop     plan, commit, ask for masks, hear of them: what gpu_runner's thread is busy with, and of it for each row
    without  the same for as many rows without a structure
    masks    from asking until all masks are there, in which the loop is free
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import NamedTuple

import numpy as np

from asyncengine.config import GrammarConfig
from asyncengine.model_files import resolve_model
from asyncengine.sampling import SamplingParams, Structured
from asyncengine.tokenizer_file import load_tokenizer
from asyncengine.wire.pipes import Pipes, make_run_dir
from asyncengine.wire.requests import Generate
from gpu_runner.device.token_masks import TokenMasks
from gpu_runner.grammar.gate import GrammarGate
from gpu_runner.schedule.plan import StepPlan, StepResult
from gpu_runner.schedule.scheduler import Scheduler

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["small", "medium", "large"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
MAX_LEN = 2048
EOS = 2


class Times(NamedTuple):
    loop: float
    masks: float


class Bench:
    """One gpu_runner without a device."""

    def __init__(self, model_path: str, pipes: Pipes, run_dir: str, rows: int) -> None:
        vocab = load_tokenizer(model_path).vocab_size
        self.rows = rows
        self.scheduler = Scheduler(
            num_pages=rows * 64 + 1,
            max_model_len=MAX_LEN,
            max_num_seqs=rows,
            max_num_batched_tokens=max(rows, 512),
            eos_ids=(EOS,),
        )
        slots = self.scheduler.slots.num_slots
        self.masks = TokenMasks(num_slots=slots, vocab=vocab, pinned=False)
        config = GrammarConfig(
            model_path=model_path,
            run_dir=run_dir,
            eos_ids=(EOS,),
            mask_fd=self.masks.fd,
            num_slots=slots,
            mask_words=self.masks.words,
        )
        self.gate = GrammarGate(pipes=pipes, rows=self.scheduler.masked_rows, config=config)
        self.random = np.random.default_rng(0)

    def admit(self, structured: Structured | None) -> None:
        prompt = np.arange(3, 8, dtype=np.int32)
        params = SamplingParams(structured=structured, ignore_eos=structured is None)
        if structured is not None:
            self.gate.submit(Generate(0, prompt.tobytes(), params, 1000, b"", ""))
            while not (settled := self.gate.take_settled()):
                self.gate.poll()
                time.sleep(0.001)
            if settled[0][2] is not None:
                raise settled[0][2]
        for rid in range(self.rows):
            self.scheduler.add(rid=rid, prompt=prompt, params=params, max_tokens=1000)

    def drain(self) -> None:
        for rid in range(self.rows):
            self.scheduler.abort(rid)

    def step(self) -> Times | None:
        """None for one that is not a decode step of all rows."""
        begin = time.perf_counter()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        result = None if plan is None else self._draw(plan)
        drawn = time.perf_counter()
        if plan is not None and result is not None:
            self.scheduler.commit(plan, result)
        self.gate.ask()
        asked = time.perf_counter()
        heard = 0.0
        while self.scheduler.masked_rows.waiting:
            if self.gate.receiver.wait(1):
                before = time.perf_counter()
                self.gate.poll()
                heard += time.perf_counter() - before
        masks = time.perf_counter() - asked
        if plan is None or plan.num_decode_rows < self.rows:
            return None
        return Times(loop=planned - begin + asked - drawn + heard, masks=masks)

    def _draw(self, plan: StepPlan) -> StepResult:
        tokens = np.full(plan.num_rows, -1, np.int32)
        for row in np.flatnonzero(plan.row_samples):
            slot = plan.row_slot[row]
            tokens[row] = 7
            if self.scheduler.slots.constrained[slot]:
                bits = np.unpackbits(self.masks.array[slot].view(np.uint8), bitorder="little")
                tokens[row] = self.random.choice(np.flatnonzero(bits))
        return StepResult(plan.step, tokens, np.zeros(plan.num_rows, np.uint8))


def measure(bench: Bench, structured: Structured | None, steps: int) -> Times:
    bench.admit(structured)
    times = [taken for taken in (bench.step() for _ in range(steps + 8)) if taken is not None]
    bench.drain()
    return Times(*(1e6 * statistics.median(column) for column in zip(*times, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", metavar="FOLDER", help="a folder with tokenizer.json; the embedded model's")
    parser.add_argument("--rows", default="1,8,64,256", help="comma-separated batch sizes")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    path = args.tokenizer or str(resolve_model("default").path)
    structured = Structured("json_schema", json.dumps(SCHEMA))
    print("rows   loop  (a row)  without   masks  (a row)")
    for rows in (int(text) for text in args.rows.split(",")):
        run_dir = make_run_dir()
        pipes = Pipes(run_dir)
        bench = Bench(path, pipes, str(run_dir), rows)
        without = measure(bench, None, args.steps)
        bound = measure(bench, structured, args.steps)
        bench.gate.close()
        pipes.close()
        for file in run_dir.iterdir():
            file.unlink()
        run_dir.rmdir()
        each = (bound.loop - without.loop) / rows
        print(
            f"{rows:4d} {bound.loop:6.0f} {each:8.1f} {without.loop:8.0f} {bound.masks:7.0f} {bound.masks / rows:8.1f}"
        )


if __name__ == "__main__":
    main()
