"""Benchmarks and profilers that drive an engine of their own, on a CPU and with a made-up profiler."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_step
import profile_gaps
import pytest
import step_engine
from bench_kv_transfer import WAYS, CopyingEngine, measure_beside, measure_copies
from bench_sampling import WAYS as SAMPLING_WAYS
from bench_sampling import allow_all_but
from bench_sampling import measure as measure_sampling
from bench_step import choose_longer, longest_context, measure_serving
from lanes.gaps import Gap, Interval, analyse, merged, overlaps, step_gaps
from step_engine import ClosedLoop, Engine, end_rows, start_rows
from torch.autograd import DeviceType

from asyncengine.config import PAGE_SIZE, EngineConfig

# -------------------------------------------------------------------------------------------------------- idle gaps


def test_overlapping_and_touching_intervals_merge() -> None:
    intervals = [Interval(5, 6), Interval(0, 2), Interval(1, 1.5), Interval(2, 3), Interval(8, 9)]
    assert merged(intervals) == [Interval(0, 3), Interval(5, 6), Interval(8, 9)]


def test_a_gap_lies_between_the_last_kernel_of_a_step_and_the_first_of_the_next() -> None:
    kernels = [Interval(1, 4), Interval(3, 9), Interval(5, 6), Interval(12, 20), Interval(19, 23), Interval(22, 30)]
    # a step's upload may begin while the step before still computes; kernels of two steps may overlap
    assert step_gaps(kernels, [0, 8, 21]) == [Gap(0, 9, 12), Gap(1, 22, 22)]
    assert step_gaps(kernels, [0, 8, 40, 50]) == [Gap(0, 9, 12)], "a step without kernels has no gap"


def test_the_host_is_found_in_a_gap() -> None:
    phases = [Interval(0, 4, "plan"), Interval(4, 11, "launch"), Interval(14, 15, "wait"), Interval(16, 17, "wait")]
    assert overlaps(Gap(0, 3, 20), phases) == {"plan": 1, "launch": 7, "wait": 2, "other": 7}
    assert overlaps(Gap(0, 5, 6), phases) == {"launch": 1}


def test_a_report_of_made_up_steps_is_exact() -> None:
    begins = [0.0, 100.0, 200.0, 300.0]
    kernels = [Interval(begin + 10, begin + 50, "a") for begin in begins]
    kernels += [Interval(begin + 50, begin + 90, "b") for begin in begins]
    kernels += [Interval(140, 150, "a")]  # runs beside another
    report = analyse(kernels, begins, [Interval(85, 105, "launch")])
    assert (report.steps, report.step_us, report.busy_us, report.busy_share) == (3, 100, 80, 0.8)
    assert report.kernels_per_step == pytest.approx(7 / 3)
    assert report.idle == {"p50": 20, "p99": 20, "max": 20}
    assert report.kernels == [("a", pytest.approx(130 / 3), pytest.approx(4 / 3)), ("b", 40, 1)]
    assert report.longest[0] == (Gap(0, 90, 110), {"launch": 15, "other": 5})


# ------------------------------------------------------------------------- the profiled loop, with a made-up profiler


class MadeUpProfiler:
    """Steps of 100 us: three kernels, in every second one four, and a copy that is none; before them, the host's wait
    for the GPU."""

    STEPS = 20

    def __init__(self, activities: Sequence[object]) -> None:
        pass

    def __enter__(self) -> MadeUpProfiler:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def events(self) -> Iterator[SimpleNamespace]:
        yield made_up_event(DeviceType.CPU, "cudaDeviceSynchronize", 0, 10)
        yield made_up_event(DeviceType.CPU, "cudaGraphLaunch", 50, 60)
        for step in range(self.STEPS):
            begin = 100 * (step + 1)
            fetched = 2 * (step % 2)
            if fetched:
                yield made_up_event(DeviceType.CUDA, "_fetch_kernel", begin + 4, begin + 6)
            yield made_up_event(DeviceType.CUDA, "step_meta_kernel", begin + 4 + fetched, begin + 8)
            yield made_up_event(DeviceType.CUDA, "forward", begin + 8, begin + 60)
            yield made_up_event(DeviceType.CUDA, "sample", begin + 60, begin + 94)
            yield made_up_event(DeviceType.CUDA, "Memcpy DtoH (Device -> Pinned)", begin + 94, begin + 96)
        yield made_up_event(DeviceType.CPU, "cudaDeviceSynchronize", 9000, 9001)


def made_up_event(device: DeviceType, name: str, begin: float, end: float) -> SimpleNamespace:
    span = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(device_type=device, name=name, time_range=span, is_user_annotation=False)


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    shapes: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    return tmp_path


def test_the_loop_is_profiled_and_goes_on_unmarked(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile_gaps, "profile", MadeUpProfiler)
    monkeypatch.setattr(profile_gaps.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(profile_gaps.torch.cuda, "get_device_name", lambda: "a made-up GPU")
    engine = Engine(tiny_model, EngineConfig(device="cpu", load_format="dummy", max_num_seqs=4, kv_cache_tokens=4096))
    monkeypatch.setattr(profile_gaps, "Engine", lambda model, config: engine)
    results = profile_gaps.profile_model(tiny_model, [1, 3], Namespace(context=8, steps=10, serving=None))
    for result, batch in zip(results, (1, 3), strict=True):
        assert (result["batch"], result["step_us"], result["busy_us"], result["busy_share"]) == (batch, 100, 90, 0.9)
        fetched = 5 / 9  # of nine steps
        assert result["kernels_per_step"] == pytest.approx(3 + fetched)
        assert result["idle_us"] == {"p50": 10, "p99": 10, "max": 10}
        kernels: dict[str, tuple[float, float]] = {"forward": (52, 1), "sample": (34, 1)}
        kernels |= {"step_meta_kernel": (4 - 2 * fetched, 1), "_fetch_kernel": (2 * fetched, fetched)}
        assert [name for name, *_ in result["kernels"]] == list(kernels)
        for name, *found in result["kernels"]:
            assert found == pytest.approx(kernels[name])
        assert sum(result["longest_gaps_us"][0]["host"].values()) == pytest.approx(10)
    assert not {"launch", "collect"} & set(vars(engine.executor))
    output = capsys.readouterr().out
    assert "batch 3: GPU busy 90.0 % under the profiler (90.0 of 100.0 us a step)" in output
    assert "gap of 10.0 us" in output


def test_without_a_gpu_the_profiler_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["profile_gaps.py"])
    monkeypatch.setattr(profile_gaps.torch.cuda, "is_available", lambda: False)
    assert profile_gaps.main() == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_closed_loop_replaces_each_request_that_ends(tiny_model: Path) -> None:
    engine = Engine(tiny_model, EngineConfig(device="cpu", load_format="dummy", max_num_seqs=4, kv_cache_tokens=4096))
    loop = ClosedLoop(engine, 4, 8, 12)
    prompts = tokens = 0
    for _ in range(60):
        plan = loop.turn()
        assert len(engine.scheduler.rids()) == 4
        if plan is not None:
            prompts += len(plan.prefill_tokens)
            tokens += int(plan.row_samples.sum())
    loop.end()
    assert not engine.scheduler.has_work
    assert not engine.in_flight
    assert prompts % 8 == 0
    assert 4 + 4 * 60 // (12 + 3) <= prompts // 8 <= 4 + 4 * 60 // 12  # an end is known two steps later
    row = measure_serving(engine, 4, 8, 12)
    assert row["tokens_per_s"] * row["ms"] / 1e3 == pytest.approx(tokens / 59, abs=0.5)
    assert 0 < row["share_with_prompts"] * 8 <= row["prompt_tokens_per_step"]
    engine.executor.close()


def test_steps_are_timed_again_with_as_much_more_context_as_fits(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_step, "WARM_STEPS", 2)
    sizes = "--batches 2 --steps 4 --prefill 1x8 --max-num-batched-tokens 16 --max-model-len 464 --kv-cache-tokens 1024"

    def run(context: int) -> dict[str, Any]:
        out = tiny_model / "out.json"
        flags = f"--device cpu {sizes} --context {context}".split()
        monkeypatch.setattr(sys, "argv", ["bench_step.py", str(tiny_model), *flags, "--json", str(out)])
        bench_step.main()
        [result] = json.loads(out.read_text())
        return dict(result)

    longest = longest_context(464, steps=4)
    assert longest == 464 - 400 - 4 + 2 + 2, "a row is that long when half of its steps are measured"
    result = run(40)
    # prompts are of whole tokens, and the second row is a step behind the first
    assert result["decode"][0]["context"] == pytest.approx(40, abs=0.5)
    assert result["longer"]["context"] == pytest.approx(longest, abs=0.5)
    assert run(longest)["longer"] is None
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(longest + 1)
    output = capsys.readouterr()
    assert "--context 65 is not from 1 to 64, what --max-model-len 464 has room for with --steps 4" in output.err
    assert output.out == "", "no model has been loaded"


def test_the_longer_context_leaves_half_of_the_cache_and_of_a_step_free(tiny_model: Path) -> None:
    config = EngineConfig(
        device="cpu",
        load_format="dummy",
        max_num_seqs=32,
        max_num_batched_tokens=32,
        max_model_len=1024,
        kv_cache_tokens=4096 - PAGE_SIZE,
    )
    engine = Engine(tiny_model, config)
    executor = engine.executor  # with the dummy page 4096 tokens

    def choice(batches: list[int], context: int) -> tuple[int, int] | None:
        return choose_longer(executor, batches, context, steps=20)

    assert choice([1, 4, 32], 16) == (4, 64)
    assert choice([1, 16, 32], 32) == (16, 128)
    assert choice([1, 16, 32], 33) == (1, 132)
    assert choice([16, 32], 33) == (16, 128), "less than four times, but it fits"
    assert choice([16, 32], 109) is None, "19 tokens more, and 20 steps"
    assert choice([32], 16) is None
    executor.close()


def test_rows_that_never_decode_all_at_once_are_told(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_engine, "SPARE_STEPS", 5)
    config = EngineConfig(
        device="cpu", load_format="dummy", max_num_seqs=4, max_num_batched_tokens=16, kv_cache_tokens=512
    )
    engine = Engine(tiny_model, config)
    with pytest.raises(SystemExit, match="4 rows with prompts of 60 tokens never decode all at once"):
        start_rows(engine, 4, 60, 1)
    assert start_rows(engine, 4, 12, 1) == 14.5
    end_rows(engine, 4)
    engine.executor.close()


# ------------------------------------------------------------------------------------------------- copies of pages


def test_copies_of_pages_are_timed_alone_and_beside_steps(tiny_model: Path) -> None:
    config = EngineConfig(
        device="cpu", load_format="dummy", max_num_seqs=2, kv_cache_tokens=2048, kv_host_memory_gib=0.001
    )
    engine = CopyingEngine(tiny_model, config, most_pages=3)
    alone = [measure_copies(engine, way, 2, repeats=1) for way in WAYS]
    assert [(row["way"], row["gb_per_s"] > 0) for row in alone] == [(way, True) for way in WAYS]
    beside = measure_beside(engine, 2, context=24, steps=2)
    assert [(row["way"], row["gb_per_s"] > 0) for row in beside] == [("none", False), *((way, True) for way in WAYS)]
    assert beside[0]["slower"] == 0
    engine.executor.close()
    with pytest.raises(SystemExit, match="3000 pages each way are more than"):
        CopyingEngine(tiny_model, config, most_pages=3000)


def test_every_way_of_choosing_tokens_is_timed_beside_greedy_rows(tiny_model: Path) -> None:
    config = EngineConfig(load_format="dummy", device="cpu", max_num_seqs=4, max_model_len=512, kv_cache_tokens=2048)
    engine = Engine(tiny_model, config)
    allow_all_but(engine, engine.executor.model_config.eos_ids)
    for way in SAMPLING_WAYS:
        total, row = measure_sampling(engine, 4, context=24, steps=2, way=way, rows=2)
        assert total > row > 0, way
    engine.executor.close()
