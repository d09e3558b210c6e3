"""What /metrics shows: the engine's gauges and its requests' totals under the names that operators know.

A metric that means what vLLM's means has vLLM's name, prefix included, so that its dashboards and alerts work as they
are; all others begin with `asyncengine:`. As there, `n` choices of a prompt count as `n` requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from asyncengine.api.exposition import Family, Sample, exposition, histogram_samples
from asyncengine.config import Role
from asyncengine.engine_info import Health
from asyncengine.metrics import FINISH_REASONS, SERVICE_CLASSES, Totals

_GAUGES = (
    ("vllm:num_requests_running", "running", "Requests in the running batch."),
    ("vllm:num_requests_waiting", "waiting", "Requests that gpu_runner has and that do not run."),
    ("asyncengine:kv_cache_pages", "total_pages", "Pages of the KV cache."),
    ("asyncengine:kv_cache_free_pages", "free_pages", "Pages that hold nothing."),
    ("asyncengine:kv_cache_cached_pages", "cached_pages", "Pages that hold prefixes which nobody uses now."),
    ("asyncengine:host_us_per_step", "host_us_per_step", "Microseconds of the GPU process's own work a step."),
)
_COUNTERS = (
    ("vllm:num_preemptions_total", "preemptions", "Times that a running request had to give up its pages."),
    ("vllm:prefix_cache_queries_total", "prefix_query_tokens", "Tokens looked for in the prefix cache."),
    ("vllm:prefix_cache_hits_total", "prefix_hit_tokens", "Tokens found in the prefix cache."),
    ("asyncengine:steps_total", "steps", "Steps launched."),
    ("asyncengine:prefill_tokens_total", "prefill_tokens", "Prompt tokens computed, not found in the prefix cache."),
)
_ALWAYS_GAUGES = (
    ("asyncengine:host_kv_cache_pages", "host_pages_total", "Pages of the KV cache's part in host memory."),
    ("asyncengine:host_kv_cache_used_pages", "host_pages_used", "Pages of that part that hold something."),
    ("asyncengine:session_pinned_pages", "pinned_pages", "Pages that are kept for sessions."),
    ("asyncengine:host_session_pinned_pages", "host_pages_pinned", "Pages in host memory that are kept for sessions."),
)
_ALWAYS_COUNTERS = (
    ("asyncengine:host_kv_cache_hit_tokens_total", "host_hit_tokens", "Tokens found in host memory."),
    ("asyncengine:kv_pages_loaded_total", "kv_loads", "Pages copied from host memory to the device."),
    ("asyncengine:kv_pages_stored_total", "kv_stores", "Pages copied from the device to host memory."),
    (
        "asyncengine:kv_cache_repairs_total",
        "cache_repairs",
        "Times that the KV cache started over: faults in its bookkeeping.",
    ),
    (
        "asyncengine:convicted_requests_total",
        "convicted_requests",
        "Requests ended because they crash the GPU process.",
    ),
)
"""Of what an engine need not have: 0 where it says nothing of it."""
_TOTALS = (
    ("vllm:prompt_tokens_total", "prompt_tokens", "Prompt tokens of the requests that have begun to answer."),
    ("vllm:generation_tokens_total", "generation_tokens", "Tokens generated."),
)
_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "time_to_first_token", "From a request's arrival to its first token."),
    ("vllm:inter_token_latency_seconds", "inter_token_latency", "Between a request's tokens, as they arrive."),
    ("vllm:time_per_output_token_seconds", "inter_token_latency", "The same under its former name."),
    (
        "vllm:request_time_per_output_token_seconds",
        "time_per_output_token",
        "A request's mean time between tokens.",
    ),
    ("vllm:e2e_request_latency_seconds", "e2e_latency", "From a request's arrival to its end."),
    ("asyncengine:request_tokenize_time_seconds", "tokenize_time", "From a request's arrival to its tokens' way out."),
    ("vllm:request_queue_time_seconds", "queue_time", "A request's time before it is first scheduled."),
    ("vllm:request_prefill_time_seconds", "prefill_time", "From a request's first step to its first token."),
    ("vllm:request_decode_time_seconds", "decode_time", "From a request's first token to its last."),
    ("vllm:request_inference_time_seconds", "inference_time", "From a request's first step to its last token."),
    ("vllm:request_prompt_tokens", "prompt_length", "Prompt tokens of a request."),
    ("vllm:request_generation_tokens", "output_length", "Tokens generated for a request."),
    ("vllm:request_params_n", "choices", "n of a prompt's request."),
)


def metrics_text(*, model: str, health: Health, gauges: Mapping[str, int], totals: Totals) -> bytes:
    """The whole page. gauges: as `AsyncEngine.gauges` gives them; what is not among them is left out."""
    families = [*_from_gauges(gauges), *_from_totals(totals), _up(health)]
    return exposition(families, {"model_name": model, "engine": "0"})


def _from_gauges(gauges: Mapping[str, int]) -> Iterator[Family]:
    for name, key, text in _GAUGES:
        if key in gauges:
            yield Family(name, "gauge", text, [Sample(gauges[key])])
    for name, key, text in _COUNTERS:
        if key in gauges:
            yield Family(name, "counter", text, [Sample(gauges[key])])
    for name, key, text in _ALWAYS_GAUGES:
        yield Family(name, "gauge", text, [Sample(gauges.get(key, 0))])
    for name, key, text in _ALWAYS_COUNTERS:
        yield Family(name, "counter", text, [Sample(gauges.get(key, 0))])
    text = "How far off the latest steps' predicted times were, as a share of the measured ones; 0 is not at all."
    error = gauges.get("step_time_error_permille", 0) / 1000
    yield Family("asyncengine:step_time_error_ratio", "gauge", text, [Sample(error)])
    if total := gauges.get("total_pages"):
        used = 1 - (gauges["free_pages"] + gauges["cached_pages"]) / total
        yield Family("vllm:kv_cache_usage_perc", "gauge", "Share of the KV cache in use; 1 is all.", [Sample(used)])
    restarts = [
        Sample(gauges[f"{role}_restarts"], {"role": role}) for role in get_args(Role) if f"{role}_restarts" in gauges
    ]
    if restarts:
        text = "Processes that were lost and have been replaced."
        yield Family("asyncengine:sidecar_restarts_total", "counter", text, restarts)
    if "gpu_busy_permille" in gauges:
        text = "Share of the time with work in which the device worked; 1 is all."
        yield Family("asyncengine:gpu_busy_ratio", "gauge", text, [Sample(gauges["gpu_busy_permille"] / 1000)])
    if "waiting_background" in gauges:
        background = gauges["waiting_background"]
        text = "Requests that wait, by class."
        samples = [
            Sample(gauges["waiting"] - background, {"service_class": "interactive"}),
            Sample(background, {"service_class": "background"}),
        ]
        yield Family("asyncengine:num_requests_waiting_by_class", "gauge", text, samples)
    if "waiting_for_pages" in gauges:
        short_of_pages = gauges["waiting_for_pages"]
        text = "Requests that wait, by what the first of them lacks: pages of the KV cache, or anything else."
        samples = [
            Sample(short_of_pages, {"reason": "kv"}),
            Sample(gauges["waiting"] - short_of_pages, {"reason": "other"}),
        ]
        yield Family("asyncengine:num_requests_waiting_by_reason", "gauge", text, samples)


def _from_totals(totals: Totals) -> Iterator[Family]:
    for name, key, text in _TOTALS:
        yield Family(name, "counter", text, [Sample(totals.counters[key])])
    seconds = Sample(totals.counters["gc_pause_ns"] / 1e9)
    text = "Time in which API processes stood still to collect garbage."
    yield Family("asyncengine:api_gc_pause_seconds_total", "counter", text, [seconds])
    ends = [Sample(totals.counters[f"finished_{reason}"], {"finished_reason": reason}) for reason in FINISH_REASONS]
    yield Family("vllm:request_success_total", "counter", "Requests that have ended, by the reason.", ends)
    text = "Requests that have answered to an end of their own, by class."
    measured = [Sample(totals.counters[f"measured_{name}"], {"service_class": name}) for name in SERVICE_CLASSES]
    yield Family("asyncengine:requests_measured_total", "counter", text, measured)
    text = "Those of them that kept to a target of their class: ttft, or gap, which is their mean time between tokens."
    within = [
        Sample(totals.counters[f"within_{target}_{name}"], {"service_class": name, "target": target})
        for name in SERVICE_CLASSES
        for target in ("ttft", "gap")
    ]
    yield Family("asyncengine:requests_within_target_total", "counter", text, within)
    text = "Tokens by the tenant that they were computed for: of prompts, as they begin to be answered, and of answers."
    tenants = [
        Sample(count, {"tenant": tenant, "kind": kind})
        for tenant, tokens in sorted(totals.tenants.items())
        for kind, count in tokens._asdict().items()
    ]
    yield Family("asyncengine:tenant_tokens_total", "counter", text, tenants)
    for name, key, text in _HISTOGRAMS:
        values = totals.histograms[key]
        yield Family(name, "histogram", text, histogram_samples(values.bounds, values.counts, values.total))


def _up(health: Health) -> Family:
    return Family("asyncengine:ready", "gauge", "1 while requests are served.", [Sample(health.state == "ready")])
