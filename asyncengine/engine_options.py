"""`EngineConfig` as command-line options: one per field, whose type and default it has."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from asyncengine.config import DEFAULT_STEP_TOKENS_CPU, DEFAULT_STEP_TOKENS_GPU, EngineConfig


class Option(NamedTuple):
    """help: without the default, which is the field's own unless `default` says it in words. unit: of a value that is
    no choice among a few."""

    help: str
    unit: str | None = None
    default: str = "%(default)s"


OPTIONS: Mapping[str, Option] = {
    "device": Option("where the model runs; auto = a GPU if there is one"),
    "dtype": Option("of weights and KV cache; auto = bfloat16 on a GPU, float32 on a CPU"),
    "load_format": Option("dummy = random weights of the shapes in config.json"),
    "batch_invariant": Option(
        "the same tokens and log-probabilities of a request, bit for bit, whatever runs beside it; steps take longer",
        default="off",
    ),
    "max_model_len": Option(
        "context length, prompt and answer together", "TOKENS", "the model's own, or what the KV cache holds"
    ),
    "max_num_seqs": Option("requests running at once; each of n choices counts", "REQUESTS"),
    "max_num_batched_tokens": Option(
        "tokens computed in one step",
        "TOKENS",
        f"{DEFAULT_STEP_TOKENS_GPU} on a GPU, {DEFAULT_STEP_TOKENS_CPU} on a CPU, --max-num-seqs if that is more",
    ),
    "gpu_memory_utilization": Option("how much of the GPU's memory to use, from 0 to 1", "SHARE"),
    "kv_cache_tokens": Option("size of the KV cache", "TOKENS", "what memory leaves room for"),
    "enable_prefix_caching": Option("reuse the computed pages of equal prompt prefixes", default="on"),
    "served_model_name": Option("what clients call the model", "NAME", "MODEL, of a file its name without .gguf"),
    "scheduling_policy": Option("which waiting request is next"),
    "max_queued_requests": Option(
        "requests that may wait to be scheduled, background ones up to half of it; on top of that clients get a 429 at "
        "once; each of n choices counts",
        "REQUESTS",
    ),
    "max_queued_tokens": Option("the same of the tokens of their prompts", "TOKENS"),
    "default_service_class": Option(
        "of requests that do not say; background requests take what interactive ones leave, and are the first to wait"
    ),
    "interactive_gap_ms": Option(
        "between two tokens of an interactive request; chunks of prompts are cut so that steps keep to it", "MS"
    ),
    "interactive_ttft_ms": Option(
        "to the first token of an interactive request; what is later counts as late on /metrics, nothing else", "MS"
    ),
    "background_gap_ms": Option("as --interactive-gap-ms, of background requests where no interactive one runs", "MS"),
    "background_ttft_ms": Option("as --interactive-ttft-ms, of background requests", "MS"),
    "kv_host_memory_gib": Option(
        "pinned host memory for copies of KV, to load what the device has given up; 0 = none", "GIB"
    ),
    "session_pin_share": Option(
        "of the KV cache, what the sessions of one tenant may keep, from 0 to 1; those of all tenants may keep half",
        "SHARE",
    ),
    "queue_timeout_seconds": Option("a request that gets no first token for so long ends with a 503", "SECONDS"),
    "request_timeout_seconds": Option("a request that is not complete after so long ends with an error", "SECONDS"),
    "refuse_unknown_fields": Option(
        "a body with a field that nobody knows is a 400; without it such a field is named in the answer's "
        "x-ignored-fields header",
        default="off",
    ),
    "chat_template": Option("a Jinja file for chats", "FILE", "the model's own template"),
    "tool_call_parser": Option("how the model writes tool calls; auto = as its chat template shows"),
    "reasoning_parser": Option("how the model writes its reasoning; auto = as its chat template shows"),
    "tokenizer_workers": Option("processes that tokenize prompts, from 1 to 64", "N"),
    "detokenizer_workers": Option("processes that make text of tokens, from 1 to 64", "N"),
    "max_crashes": Option(
        "so many lost processes within --crash-window-seconds end the engine; fewer are replaced, and all requests "
        "go on but those on the connections of a lost API worker",
        "N",
    ),
    "crash_window_seconds": Option("the time in which lost processes are counted", "SECONDS"),
    "hang_timeout_seconds": Option(
        "a process that gives no sign of life for so long is killed and replaced; gpu_runner on a CPU has ten times as "
        "long",
        "SECONDS",
    ),
}
"""In the order of --help; without `model`, which is no flag."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """One option per field of `EngineConfig`, under its name."""
    default, types = EngineConfig(), get_type_hints(EngineConfig)
    parser.add_argument(
        "model",
        nargs="?",
        default=default.model,
        metavar="MODEL",
        help="a folder with config.json and safetensors, a .gguf file, or a Hugging Face id (default: the embedded "
        "SmolLM2-135M-Instruct)",
    )
    engine = parser.add_argument_group("engine")
    for name, option in OPTIONS.items():
        engine.add_argument(
            "--" + name.replace("_", "-"),
            default=getattr(default, name),
            help=f"{option.help} (default: {option.default})",
            **_reading(types[name], option.unit),
        )


def _reading(field: Any, unit: str | None) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if field is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(field) is Literal:
        return {"choices": get_args(field)}
    (kind,) = set(get_args(field) or (field,)) - {NoneType}
    return {"type": kind, "metavar": unit}


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration the options describe; raises `StartupError`."""
    return EngineConfig(**{name: getattr(args, name) for name in EngineConfig.__struct_fields__})
