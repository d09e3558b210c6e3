"""The one typed configuration of an engine, and the form in which a sidecar process receives it."""

from __future__ import annotations

import os
from typing import Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import force_setattr

from asyncengine import __version__
from asyncengine.errors import StartupError

Device = Literal["auto", "cuda", "cpu"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
SchedulingPolicy = Literal["fcfs", "priority", "shortest", "longest"]
ServiceClass = Literal["interactive", "background"]
"""interactive: somebody waits for each token. background: all of it is wanted, some time; it takes what is left."""
LoadFormat = Literal["auto", "dummy"]
ToolCallFormat = Literal["hermes", "llama3"]
ToolCallParserName = Literal["auto", "hermes", "llama3", "none"]
ReasoningParserName = Literal["auto", "think", "none"]
Role = Literal["tokenizer_proc", "gpu_runner", "detokenizer_proc", "api_worker"]
SIDECARS: tuple[Role, ...] = ("gpu_runner", "tokenizer_proc", "detokenizer_proc")
"""The roles without which no request goes on: while one of their places is empty, all wait."""

PAGE_SIZE = 16
"""Tokens in one KV-cache page."""
MAX_STOP_IDS = 16
"""Width of the device's stop-id table: a request's own stop_token_ids plus the model's end-of-sequence ids."""
MAX_BIAS_IDS = 300
"""Width of the device's logit-bias table, and so the tokens that a request may bias: OpenAI's limit."""
MAX_TOP_LOGPROBS = 20
"""Most likely tokens that a step reports of a row."""
DEFAULT_STEP_TOKENS_GPU = 2048
DEFAULT_STEP_TOKENS_CPU = 256
DEFAULT_QUEUE_TIMEOUT_SECONDS = 600.0
DEFAULT_REQUEST_TIMEOUT_SECONDS = 7200.0
GrammarJob = Literal["check", "match"]
API_WORKER_SHIFT = 56
"""A rid's top 8 bits name the API worker that minted it; the rest as in `wire.engine_pipes`."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine runs. Construction raises `StartupError` naming the field and what is allowed.

    model: a folder with config.json and safetensors, a .gguf file, a Hugging Face hub id, or "default" for the
        embedded SmolLM2-135M-Instruct.
    load_format: "dummy" takes random weights of the model's shapes, for measuring speed with a config.json alone.
    batch_invariant: the tokens and log-probabilities of a request are bitwise the same whatever runs beside it, however
        its prompt is cut into chunks, what of it is found in a cache, and if it is taken up again; steps take longer.
    max_model_len: context length in tokens; None takes the model's own, cut to what the KV cache can hold.
    max_num_seqs: rows that may run at once. max_num_batched_tokens: tokens computed in one step; None is 2048 on a GPU
        and 256 on a CPU (where longer steps would make every running stream wait), or max_num_seqs if that is more.
    kv_cache_tokens: KV-cache size in tokens; None sizes it from memory (`gpu_memory_utilization` of the GPU, or a
        quarter of free host memory on a CPU, at most what `max_num_seqs` full-length rows need).
    tool_call_parser, reasoning_parser: how the model writes its tool calls and its reasoning; "auto" is what its chat
        template shows.
    max_queued_requests, max_queued_tokens: requests, and tokens of their prompts, that may wait to be scheduled; each
        of n choices counts. What comes on top is refused at once. Background ones may be half of it. A request may have
        more tokens if no other waits, an interactive one if no other interactive one does.
    default_service_class: of requests that do not say. interactive_gap_ms, background_gap_ms: the longest step while a
        row of that class decodes, as far as chunks of prompts can be cut shorter: what its stream waits between two
        tokens. interactive_ttft_ms, background_ttft_ms: what its first token should not take longer than; both are what
        is counted as within target.
    kv_host_memory_gib: pinned host memory for the KV of prefixes that have no room on the device; 0 = none.
    session_pin_share: of the KV cache, and of its pages in host memory, what the sessions of one tenant may keep from
        being evicted.
    queue_timeout_seconds: a request of which nothing has come for so long since it arrived ends with an error;
        request_timeout_seconds: and so does one that is not complete. The HTTP server keeps these two.
    refuse_unknown_fields: whether it refuses a body with a field that it does not know, or ignores and reports that.
    max_crashes, crash_window_seconds: a sidecar that is lost is replaced and its work taken up again; so many losses
        within that time end the engine. 1 = the first does.
    hang_timeout_seconds: a sidecar that gives no sign of life for so long is killed, and so replaced; gpu_runner on a
        CPU, which computes a whole step between two, has ten times as long.
    """

    model: str = "default"
    served_model_name: str | None = None
    device: Device = "auto"
    dtype: DType = "auto"
    load_format: LoadFormat = "auto"
    batch_invariant: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_tokens: int | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_queued_requests: int = 4096
    max_queued_tokens: int = 16 * 2**20
    default_service_class: ServiceClass = "interactive"
    interactive_gap_ms: float = 50.0
    interactive_ttft_ms: float = 1000.0
    background_gap_ms: float = 500.0
    background_ttft_ms: float = 60000.0
    kv_host_memory_gib: float = 0.0
    session_pin_share: float = 0.25
    queue_timeout_seconds: float = DEFAULT_QUEUE_TIMEOUT_SECONDS
    request_timeout_seconds: float = DEFAULT_REQUEST_TIMEOUT_SECONDS
    refuse_unknown_fields: bool = False
    chat_template: str | None = None
    tool_call_parser: ToolCallParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    tokenizer_workers: int = 1
    detokenizer_workers: int = 1
    max_crashes: int = 3
    crash_window_seconds: float = 60.0
    hang_timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("model", "chat_template"):
            if isinstance(path := getattr(self, name), os.PathLike):
                force_setattr(self, name, os.fspath(path))
        for name in ("model", "served_model_name"):
            if getattr(self, name) == "":
                raise StartupError(f"{name} must not be empty")
        for name, kind in get_type_hints(EngineConfig).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise StartupError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                raise StartupError(f"{name}: {error}") from None
        for name, low, high in (
            ("max_model_len", 2, 2**24),
            ("max_num_seqs", 1, 8192),
            ("max_num_batched_tokens", 16, 2**20),
            ("kv_cache_tokens", 1, 2**40),
            ("max_queued_requests", 0, 2**20),
            ("max_queued_tokens", 0, 2**30),
            ("interactive_gap_ms", 1, 1e6),
            ("interactive_ttft_ms", 1, 1e9),
            ("background_gap_ms", 1, 1e6),
            ("background_ttft_ms", 1, 1e9),
            ("kv_host_memory_gib", 0, 2**20),
            ("session_pin_share", 0, 1),
            ("queue_timeout_seconds", 0.001, 1e6),
            ("request_timeout_seconds", 0.001, 1e7),
            ("tokenizer_workers", 1, 64),
            ("detokenizer_workers", 1, 64),
            ("max_crashes", 1, 10**6),
            ("crash_window_seconds", 0.1, 1e6),
            ("hang_timeout_seconds", 1, 1e6),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise StartupError(f"{name} must be from {low} to {high}, got {value}")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise StartupError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running row gets a token each step"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise StartupError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}"
            )

    def step_tokens(self, *, on_gpu: bool) -> int:
        """`max_num_batched_tokens`, or its default on such a device."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(DEFAULT_STEP_TOKENS_GPU if on_gpu else DEFAULT_STEP_TOKENS_CPU, self.max_num_seqs)


def runs_on_cpu(config: EngineConfig) -> bool:
    """Whether `config.device` is going to be the CPU on this machine."""
    return config.device == "cpu" or (config.device == "auto" and not os.path.exists("/dev/nvidiactl"))


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a key that callers of the HTTP server may show. tenant: whose it is. service_class: of requests
    that do not say, None for the engine's default; with "background" they may not say otherwise."""

    digest: bytes
    tenant: str
    service_class: ServiceClass | None = None


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How HTTP is served. console: whether / is a page for people. api_keys: those that callers must show one of.
    allowed_hosts: without keys, the names by which the server may be asked besides loopback ones and those of one
    label, as `host_names.read_allowed_hosts` gives them."""

    console: bool = True
    api_keys: tuple[ApiKey, ...] = ()
    allowed_hosts: tuple[str, ...] = ()


HTTP_DEFAULTS = HttpOptions()


class ApiWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that serve HTTP, where their parent does not: how many; the listening sockets that they share."""

    number: int = 0
    listen_fds: tuple[int, ...] = ()
    http: HttpOptions = HTTP_DEFAULTS


NO_API_WORKERS = ApiWorkers()


class SidecarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor hands a sidecar over its stdin: the engine's configuration and the sidecar's place in it.

    model_path: the model folder or .gguf file on this machine, already resolved. run_dir: the 0700 directory that
    holds the engine's ipc sockets. index: which of the role's workers this is. api_workers: told to those only.
    metrics_fd: inherited memory in which such a one counts (`asyncengine.metrics`), with what those before it have
    counted.
    life: how many were in its place before it and were lost. lives: the same of every other process that has been
    replaced, by `worker_key`. version: of asyncengine in the supervisor; read before all else (`wire.sidecar.Origin`).
    """

    engine: EngineConfig
    role: Role
    index: int
    model_path: str
    run_dir: str
    api_workers: ApiWorkers = NO_API_WORKERS
    metrics_fd: int | None = None
    life: int = 0
    lives: dict[str, int] = {}
    version: str = __version__


def worker_key(role: Role, index: int) -> str:
    """Names a process in `SidecarConfig.lives`."""
    return f"{role}.{index}"


class GrammarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What gpu_runner hands a grammar process over its stdin.

    run_dir: where the sockets are. job: what it is for. incarnation: tells it from the one that was there before it, in
    the name of its pipe and in what it says; from 1 on. eos_ids: the model's end-of-sequence tokens, at least one.
    mask_fd: inherited memory of masks, [num_slots, mask_words] int32, bit i of a slot's words is token i; -1 where it
    writes none. life, version: gpu_runner's.
    """

    model_path: str
    run_dir: str
    job: GrammarJob = "check"
    incarnation: int = 0
    eos_ids: tuple[int, ...]
    mask_fd: int = -1
    num_slots: int = 0
    mask_words: int = 0
    life: int = 0
    version: str = __version__
