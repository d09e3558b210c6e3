"""Start-up from a model on disk: a tiny Llama with random weights, written as a Hugging Face folder."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_harness import NEVER, Prefill, Rig, Row, naive_greedy
from safetensors.torch import save_file

from asyncengine.config import EngineConfig
from asyncengine.errors import StartupError
from asyncengine.wire.reports import RunnerInfo
from gpu_runner.device import build
from gpu_runner.device.build import build_executor
from gpu_runner.device.target import check_capability, choose_device, choose_dtype
from gpu_runner.models.registry import load_model, read_model_config

PROMPT = [5, 17, 80, 3, 3, 41, 9, 66, 12, 30, 2, 77, 50, 8, 21, 94, 33, 60, 7, 19]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.4

    tensors = {
        "model.embed_tokens.weight": rand(97, 32),
        "model.norm.weight": 1 + rand(32),
        "lm_head.weight": rand(97, 32),
    }
    for layer in range(2):
        shapes = {
            "self_attn.q_proj": (64, 32),
            "self_attn.k_proj": (32, 32),
            "self_attn.v_proj": (32, 32),
            "self_attn.o_proj": (32, 64),
            "mlp.gate_proj": (48, 32),
            "mlp.up_proj": (48, 32),
            "mlp.down_proj": (32, 48),
            "input_layernorm": (32,),
            "post_attention_layernorm": (32,),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = rand(*shape) + (1 if len(shape) == 1 else 0)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def no_progress(phase: str, done: int, total: int) -> None:
    pass


def test_a_model_from_disk_generates_what_a_full_recompute_does(model_path: str) -> None:
    reports: list[tuple[str, int, int]] = []
    config = EngineConfig(
        model=model_path, device="cpu", dtype="float32", kv_cache_tokens=400, max_num_seqs=4, max_model_len=200
    )
    executor = build_executor(config, model_path, lambda *report: reports.append(report), num_slots=6)
    assert (executor.num_slots, executor.num_pages, executor.max_model_len) == (6, 26, 200)
    assert executor.model_config.eos_ids == (1,)
    assert isinstance(executor.info, RunnerInfo)
    assert executor.info.dtype == "float32"
    assert executor.info.kv_cache_bytes == executor.info.memory.kv_cache_bytes == 26 * 8192
    memory = executor.info.memory
    assert memory.used_bytes == memory.weight_bytes + memory.kv_cache_bytes < memory.limit_bytes == memory.total_bytes
    assert executor.info.num_graphs == executor.info.num_kernels == 0
    weights = [report for report in reports if report[0] == "loading weights"]
    assert weights[-1][1] == weights[-1][2] > 0

    where = torch.device("cpu")
    decoder = load_model(model_path, device=where, dtype=torch.float32, progress=lambda done, total: None)
    rig = Rig(executor=executor, kv_cache=torch.empty(0), decoder=decoder, device=where)
    assert rig.generate(PROMPT, 20, row=Row(), slot=5) == naive_greedy(decoder, PROMPT, 20, where)
    executor.close()


@pytest.mark.gpu
def test_a_gpus_kv_cache_takes_the_asked_share_of_its_memory(model_path: str) -> None:
    # The tiny model's pages are small, so the share must be too for their count to stay within reason.
    config = EngineConfig(model=model_path, gpu_memory_utilization=0.02, max_num_seqs=8)
    executor = build_executor(config, model_path, no_progress, num_slots=16)
    total = torch.cuda.mem_get_info()[1]
    memory = executor.info.memory
    parts = (memory.weight_bytes, memory.workspace_bytes, memory.context_bytes, memory.graph_bytes)
    assert 0.01 * total < memory.used_bytes <= memory.limit_bytes == int(0.02 * total)
    assert memory.used_bytes - sum(parts) == executor.info.kv_cache_bytes == memory.kv_cache_bytes > 0
    assert (executor.max_model_len, executor.info.dtype) == (256, "bfloat16")
    rig = Rig(executor=executor, kv_cache=torch.empty(0), decoder=None, device=torch.device("cuda"))
    assert len(rig.generate(PROMPT, 20, row=Row(temperature=1.0, top_p=0.9, seed=1))) == 20
    executor.close()


NEIGHBOUR = """
import sys, torch
held = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
print("holds 8 GiB", flush=True)
sys.stdin.readline()
del held
torch.cuda.empty_cache()
print("has freed them", flush=True)
sys.stdin.readline()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("moment", ["loading weights", "measuring graphs", "capturing graphs"])
def test_a_neighbour_that_frees_its_memory_meanwhile_neither_ends_the_start_nor_breaks_the_limit(
    model_path: str, moment: str
) -> None:
    free, total = torch.cuda.mem_get_info()
    if total - free - torch.cuda.memory_reserved() > 2 << 30:
        pytest.skip("other processes use this GPU")
    config = EngineConfig(model=model_path, gpu_memory_utilization=0.06, max_num_seqs=8)
    with subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as neighbour:
        assert neighbour.stdin is not None
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "holds 8 GiB\n"
        told: list[str] = []

        def progress(phase: str, done: int, total: int) -> None:
            if phase == moment and not told:
                print(file=neighbour.stdin, flush=True)
                told.append(neighbour.stdout.readline())  # type: ignore[union-attr]

        executor = build_executor(config, model_path, progress, num_slots=16)
        neighbour.stdin.close()
    assert told == ["has freed them\n"]
    free, total = torch.cuda.mem_get_info()
    memory = executor.info.memory
    assert memory.kv_cache_bytes > 0
    assert total - free <= memory.used_bytes <= memory.limit_bytes == int(0.06 * total)
    executor.close()


def test_a_cpus_kv_cache_is_at_most_what_full_rows_need(model_path: str) -> None:
    config = EngineConfig(model=model_path, device="cpu", max_num_seqs=3)
    executor = build_executor(config, model_path, no_progress, num_slots=4)
    assert (executor.num_pages, executor.max_model_len) == (3 * 16 + 1, 256)
    executor.close()


def test_a_context_the_model_cannot_have_is_refused_before_its_weights_are_read(model_path: str) -> None:
    phases: list[str] = []
    with pytest.raises(StartupError, match="max_model_len 300 is beyond the 256 positions"):
        build_executor(
            EngineConfig(model=model_path, device="cpu", max_model_len=300),
            model_path,
            lambda phase, done, total: phases.append(phase),
            num_slots=4,
        )
    assert phases == []


def test_a_pool_that_holds_no_request_of_the_asked_length_is_refused(model_path: str) -> None:
    with pytest.raises(StartupError, match="max_model_len 256 does not fit the KV cache, which holds 112 tokens"):
        build_executor(
            EngineConfig(model=model_path, device="cpu", max_model_len=256, kv_cache_tokens=112),
            model_path,
            no_progress,
            num_slots=4,
        )


def test_a_full_batch_of_every_kind_of_sampling_runs(model_path: str) -> None:
    config = EngineConfig(
        model=model_path, device="cpu", max_num_seqs=16, kv_cache_tokens=1024, max_num_batched_tokens=512
    )
    executor = build_executor(config, model_path, no_progress, num_slots=16)
    rig = Rig(executor=executor, kv_cache=torch.empty(0), decoder=None, device=torch.device("cpu"))
    rows = {slot: Row(temperature=slot % 3 / 2, top_k=slot % 4, top_p=1 - slot / 32, seed=slot) for slot in range(16)}
    first = rig.run(
        rig.plan(
            prefill=[Prefill(slot, 0, PROMPT) for slot in rows],
            start=rows,
            pages=[(slot, index, 1 + 4 * slot + index) for slot in rows for index in range(3)],
        )
    )
    later = rig.decode_pipelined(dict.fromkeys(rows, 20), 4)
    assert first.tokens.max() < NEVER
    assert (first.tokens >= 0).all()
    assert (np.array(list(later.values())) >= 0).all()
    executor.close()


def test_cuda_without_a_gpu_is_refused_and_auto_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match="device is cuda, but torch finds no NVIDIA GPU"):
        choose_device(EngineConfig(device="cuda"))
    assert (
        choose_device(EngineConfig(device="auto")) == choose_device(EngineConfig(device="cpu")) == torch.device("cpu")
    )


def test_auto_picks_a_gpu_and_the_dtype_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert choose_device(EngineConfig()) == choose_device(EngineConfig(device="cuda")) == gpu
    assert choose_device(EngineConfig(device="cpu")) == cpu
    assert choose_dtype(EngineConfig(), gpu) is torch.bfloat16
    assert choose_dtype(EngineConfig(), cpu) is torch.float32
    assert choose_dtype(EngineConfig(dtype="float16"), cpu) is torch.float16


def test_a_gpu_older_than_hopper_is_refused_with_both_numbers() -> None:
    check_capability((9, 0))
    check_capability((10, 0))
    with pytest.raises(StartupError, match=r"8\.6.*9\.0"):
        check_capability((8, 6))


def test_a_cpu_whose_products_depend_on_a_rows_place_is_refused_where_they_must_not(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "rows_are_alike", lambda weight: len(weight) != 97)  # the head's
    config = EngineConfig(model=model_path, device="cpu", kv_cache_tokens=256, batch_invariant=True)
    with pytest.raises(StartupError, match="batch_invariant is not supported on this CPU"):
        build_executor(config, model_path, no_progress, num_slots=6)


def test_a_gpus_model_with_rows_that_no_tile_takes_is_refused_where_there_must_be_one(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(build, "read_model_config", lambda path: replace(read_model_config(path), intermediate_size=44))
    with pytest.raises(StartupError, match=r"batch_invariant is not supported .*: rows of 44 values of 2 bytes"):
        build_executor(
            EngineConfig(model=model_path, dtype="bfloat16", batch_invariant=True), model_path, no_progress, num_slots=6
        )
