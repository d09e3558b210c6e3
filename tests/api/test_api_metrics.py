"""The page that Prometheus reads, by the format's own parser."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import msgspec
import pytest
from api_server import COMPLETIONS, Server
from fake_backend import MODEL, FakeBackend
from prometheus_client.parser import text_string_to_metric_families

from asyncengine.api.exposition import Family, Sample, exposition, histogram_samples
from asyncengine.api.metric_families import _COUNTERS, _GAUGES, metrics_text
from asyncengine.engine_info import Health
from asyncengine.tenant_table import TenantTokens

LABELS = {"model_name": MODEL, "engine": "0"}


async def scrape(server: Server) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> values by labels other than those all have."""
    async with server.session.get(server.url + "/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await response.text()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert {name: sample.labels[name] for name in LABELS} == LABELS
            own = tuple(value for name, value in sample.labels.items() if name not in LABELS)
            assert own not in found.setdefault(sample.name, {})
            found[sample.name][own] = sample.value
    return found


async def test_gauges_and_totals_have_the_names_that_operators_know(server: Server, backend: FakeBackend) -> None:
    backend.gauges = lambda: {  # type: ignore[method-assign]
        "running": 2,
        "waiting": 5,
        "waiting_background": 2,
        "waiting_for_pages": 4,
        "total_pages": 100,
        "free_pages": 60,
        "cached_pages": 15,
        "preemptions": 9,
        "prefix_query_tokens": 64,
        "prefix_hit_tokens": 48,
        "gpu_busy_permille": 985,
        "host_us_per_step": 76,
        "gpu_runner_restarts": 2,
        "tokenizer_proc_restarts": 0,
        "detokenizer_proc_restarts": 1,
        "host_pages_total": 50,
        "host_pages_used": 20,
        "host_pages_pinned": 6,
        "host_hit_tokens": 160,
        "kv_loads": 12,
        "kv_stores": 34,
        "pinned_pages": 5,
        "cache_repairs": 1,
        "convicted_requests": 3,
        "step_time_error_permille": 125,
    }
    page = await scrape(server)
    for name, value in {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 5,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:num_preemptions_total": 9,
        "vllm:prefix_cache_queries_total": 64,
        "vllm:prefix_cache_hits_total": 48,
        "vllm:prompt_tokens_total": 7,
        "vllm:generation_tokens_total": 7,
        "asyncengine:gpu_busy_ratio": 0.985,
        "asyncengine:host_us_per_step": 76,
        "asyncengine:ready": 1,
        "asyncengine:host_kv_cache_pages": 50,
        "asyncengine:host_kv_cache_used_pages": 20,
        "asyncengine:host_kv_cache_hit_tokens_total": 160,
        "asyncengine:kv_pages_loaded_total": 12,
        "asyncengine:kv_pages_stored_total": 34,
        "asyncengine:session_pinned_pages": 5,
        "asyncengine:host_session_pinned_pages": 6,
        "asyncengine:kv_cache_repairs_total": 1,
        "asyncengine:convicted_requests_total": 3,
        "asyncengine:step_time_error_ratio": 0.125,
    }.items():
        assert page[name] == {(): pytest.approx(value)}, name
    assert page["vllm:request_success_total"] == {("stop",): 7, ("length",): 7, ("abort",): 7, ("error",): 7}
    restarts = {("gpu_runner",): 2, ("tokenizer_proc",): 0, ("detokenizer_proc",): 1}
    assert page["asyncengine:sidecar_restarts_total"] == restarts
    assert page["asyncengine:num_requests_waiting_by_class"] == {("interactive",): 3, ("background",): 2}
    assert page["asyncengine:num_requests_waiting_by_reason"] == {("kv",): 4, ("other",): 1}
    for name in (
        *("time_to_first_token", "inter_token_latency", "time_per_output_token", "e2e_request_latency"),
        *("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time"),
    ):
        assert page[f"vllm:{name}_seconds_bucket"]["+Inf",] == page[f"vllm:{name}_seconds_count"][()] == 0


async def test_targets_are_counted_by_class_and_tokens_by_tenant(server: Server, backend: FakeBackend) -> None:
    totals = backend.totals()
    counters = totals.counters | {"measured_background": 9, "within_ttft_background": 8, "within_gap_background": 6}
    tenants = {"a": TenantTokens(10, 20), "key-0a47ebfb49dd": TenantTokens(0, 3)}
    backend.totals = lambda: msgspec.structs.replace(totals, counters=counters, tenants=tenants)  # type: ignore[method-assign]
    page = await scrape(server)
    assert page["asyncengine:requests_measured_total"] == {("interactive",): 7, ("background",): 9}
    assert page["asyncengine:requests_within_target_total"] == {
        ("interactive", "ttft"): 7,
        ("interactive", "gap"): 7,
        ("background", "ttft"): 8,
        ("background", "gap"): 6,
    }
    assert page["asyncengine:tenant_tokens_total"] == {
        ("a", "prompt"): 10,
        ("a", "output"): 20,
        ("key-0a47ebfb49dd", "prompt"): 0,
        ("key-0a47ebfb49dd", "output"): 3,
    }


async def test_an_engine_that_is_not_ready_says_so_and_has_its_metrics_still(
    server: Server, backend: FakeBackend
) -> None:
    backend.health = Health(state="stalled", detail="no sign of life")
    assert (await scrape(server))["asyncengine:ready"] == {(): 0}


async def test_what_a_runner_does_not_report_is_left_out(server: Server, backend: FakeBackend) -> None:
    backend.gauges = dict  # type: ignore[method-assign]
    page = await scrape(server)
    assert "vllm:num_requests_running" not in page
    assert "vllm:kv_cache_usage_perc" not in page


async def test_parts_that_an_engine_need_not_have_are_0_without_them(server: Server) -> None:
    page = await scrape(server)
    for name in ("host_kv_cache_pages", "kv_pages_loaded_total", "session_pinned_pages", "step_time_error_ratio"):
        assert page[f"asyncengine:{name}"] == {(): 0}
    assert "asyncengine:tenant_tokens_total" not in page


async def test_no_prompt_is_on_the_page(server: Server) -> None:
    assert (await server.post(COMPLETIONS, {"prompt": "sentinel-4711"}))[0] == 200
    async with server.session.get(server.url + "/metrics") as response:
        assert "sentinel-4711" not in await response.text()


def test_a_histograms_buckets_hold_those_below_them() -> None:
    samples = histogram_samples((0.5, 2.0), (3, 0, 4), 21.5)
    (family,) = text_string_to_metric_families(
        exposition([Family("x_seconds", "histogram", "A time.", samples)], {}).decode()
    )
    assert family.type == "histogram"
    assert [(sample.name, sample.labels.get("le"), sample.value) for sample in family.samples] == [
        ("x_seconds_bucket", "0.5", 3),
        ("x_seconds_bucket", "2", 3),
        ("x_seconds_bucket", "+Inf", 7),
        ("x_seconds_count", None, 7),
        ("x_seconds_sum", None, 21.5),
    ]


@pytest.mark.parametrize("value", [0, 1, -3, 0.1, 1e-9, 2**53, 1e300, math.inf])
def test_numbers_survive_the_format(value: float) -> None:
    (family,) = text_string_to_metric_families(exposition([Family("x", "gauge", "X.", [Sample(value)])], {}).decode())
    assert family.samples[0].value == value


@pytest.mark.parametrize("text", ['a"b', "a\\b", "a\nb", "org/model ü", "a\\nb"])
def test_labels_survive_the_format(text: str) -> None:
    page = exposition([Family("x", "gauge", "X.", [Sample(1)])], {"model_name": text}).decode()
    (family,) = text_string_to_metric_families(page)
    assert family.samples[0].labels == {"model_name": text}


def test_the_dashboard_asks_for_nothing_that_is_not_on_the_page(backend: FakeBackend) -> None:
    every_gauge = dict.fromkeys((key for _, key, _ in (*_GAUGES, *_COUNTERS)), 1)
    every_gauge |= {"gpu_busy_permille": 1, "waiting_for_pages": 1}
    totals = msgspec.structs.replace(backend.totals(), tenants={"a": TenantTokens(prompt=1, output=1)})
    page = metrics_text(model=MODEL, health=backend.health, gauges=every_gauge, totals=totals).decode()
    families = list(text_string_to_metric_families(page))
    there = {sample.name for family in families for sample in family.samples}
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    board = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text("utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    asked = {name for query in queries for name in re.findall(r"\b(?:vllm|asyncengine):\w+", query)}
    assert len(queries) > 30
    assert asked - there == set()
    legends = {target["legendFormat"] for panel in board["panels"] for target in panel.get("targets", [])}
    assert {label for legend in legends for label in re.findall(r"{{(\w+)}}", legend)} <= labels
