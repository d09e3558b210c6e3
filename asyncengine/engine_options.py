"""`EngineConfig` as command-line options."""

from __future__ import annotations

import argparse
from typing import get_args

from asyncengine.config import (
    DEFAULT_STEP_TOKENS_CPU,
    DEFAULT_STEP_TOKENS_GPU,
    Device,
    DType,
    EngineConfig,
    LoadFormat,
    ReasoningParserName,
    SchedulingPolicy,
    ToolCallParserName,
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """One option per field of `EngineConfig`, under the names people know."""
    default = EngineConfig()
    parser.add_argument(
        "model",
        nargs="?",
        default=default.model,
        metavar="MODEL",
        help="a folder with config.json and safetensors, a .gguf file, or a Hugging Face id (default: the embedded "
        "SmolLM2-135M-Instruct)",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--device",
        choices=get_args(Device),
        default=default.device,
        help="where the model runs; auto = a GPU if there is one (default: %(default)s)",
    )
    engine.add_argument(
        "--dtype",
        choices=get_args(DType),
        default=default.dtype,
        help="of weights and KV cache; auto = bfloat16 on a GPU, float32 on a CPU (default: %(default)s)",
    )
    engine.add_argument(
        "--load-format",
        choices=get_args(LoadFormat),
        default=default.load_format,
        help="dummy = random weights of the shapes in config.json (default: %(default)s)",
    )
    engine.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="context length, prompt and answer together (default: the model's own, or what the KV cache holds)",
    )
    engine.add_argument(
        "--max-num-seqs",
        type=int,
        default=default.max_num_seqs,
        metavar="REQUESTS",
        help="requests running at once; each of n choices counts (default: %(default)s)",
    )
    engine.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=default.max_num_batched_tokens,
        metavar="TOKENS",
        help=f"tokens computed in one step (default: {DEFAULT_STEP_TOKENS_GPU} on a GPU, {DEFAULT_STEP_TOKENS_CPU} on "
        "a CPU, --max-num-seqs if that is more)",
    )
    engine.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=default.gpu_memory_utilization,
        metavar="SHARE",
        help="how much of the GPU's memory to use, from 0 to 1 (default: %(default)s)",
    )
    engine.add_argument(
        "--kv-cache-tokens",
        type=int,
        metavar="TOKENS",
        help="size of the KV cache (default: what memory leaves room for)",
    )
    engine.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=default.enable_prefix_caching,
        help="reuse the computed pages of equal prompt prefixes (default: on)",
    )
    engine.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what clients call the model (default: MODEL, of a file its name without .gguf)",
    )
    engine.add_argument(
        "--scheduling-policy",
        choices=get_args(SchedulingPolicy),
        default=default.scheduling_policy,
        help="which waiting request is next (default: %(default)s)",
    )
    engine.add_argument(
        "--max-queued-requests",
        type=int,
        default=default.max_queued_requests,
        metavar="REQUESTS",
        help="requests that may wait to be scheduled, on top of which clients get a 429 at once; each of n choices "
        "counts (default: %(default)s)",
    )
    engine.add_argument(
        "--max-queued-tokens",
        type=int,
        default=default.max_queued_tokens,
        metavar="TOKENS",
        help="the same of the tokens of their prompts (default: %(default)s)",
    )
    engine.add_argument(
        "--queue-timeout-seconds",
        type=float,
        default=default.queue_timeout_seconds,
        metavar="SECONDS",
        help="a request that gets no first token for so long ends with a 503 (default: %(default)s)",
    )
    engine.add_argument(
        "--request-timeout-seconds",
        type=float,
        default=default.request_timeout_seconds,
        metavar="SECONDS",
        help="a request that is not complete after so long ends with an error (default: %(default)s)",
    )
    engine.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file for chats (default: the model's own template)"
    )
    engine.add_argument(
        "--tool-call-parser",
        choices=get_args(ToolCallParserName),
        default=default.tool_call_parser,
        help="how the model writes tool calls; auto = as its chat template shows (default: %(default)s)",
    )
    engine.add_argument(
        "--reasoning-parser",
        choices=get_args(ReasoningParserName),
        default=default.reasoning_parser,
        help="how the model writes its reasoning; auto = as its chat template shows (default: %(default)s)",
    )
    engine.add_argument(
        "--tokenizer-workers",
        type=int,
        default=default.tokenizer_workers,
        metavar="N",
        help="processes that tokenize prompts, from 1 to 64 (default: %(default)s)",
    )
    engine.add_argument(
        "--detokenizer-workers",
        type=int,
        default=default.detokenizer_workers,
        metavar="N",
        help="processes that make text of tokens, from 1 to 64 (default: %(default)s)",
    )
    engine.add_argument(
        "--max-crashes",
        type=int,
        default=default.max_crashes,
        metavar="N",
        help="so many lost processes within --crash-window-seconds end the engine; fewer are replaced, and their "
        "requests go on (default: %(default)s)",
    )
    engine.add_argument(
        "--crash-window-seconds",
        type=float,
        default=default.crash_window_seconds,
        metavar="SECONDS",
        help="the time in which lost processes are counted (default: %(default)s)",
    )
    engine.add_argument(
        "--hang-timeout-seconds",
        type=float,
        default=default.hang_timeout_seconds,
        metavar="SECONDS",
        help="a process that gives no sign of life for so long is killed and replaced; gpu_runner on a CPU has ten "
        "times as long (default: %(default)s)",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration the options describe; raises `StartupError`."""
    return EngineConfig(**{name: getattr(args, name) for name in EngineConfig.__struct_fields__})
