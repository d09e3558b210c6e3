"""The OpenAPI document says what the code does."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import Server
from fake_backend import FakeBackend

from asyncengine.api.app import make_app
from asyncengine.api.schema import MAX_PROMPTS, CompletionRequest
from asyncengine.config import HttpOptions
from asyncengine.sampling import INT32_MAX, MAX_LOGIT_BIAS, MAX_N

HERE = Path(__file__).parent


@pytest.fixture
async def document(server: Server) -> Any:
    async with server.session.get(server.url + "/openapi.json") as response:
        assert response.status == 200
        return await response.json()


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from references(each)


async def test_every_route_is_in_the_document(document: Any, backend: FakeBackend) -> None:
    routes = {
        (route.method, route.resource.canonical)
        for route in make_app(backend, HttpOptions(console=False)).router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == routes


async def test_the_document_holds_all_that_it_refers_to(document: Any) -> None:
    assert document["openapi"] == "3.1.0"
    schemas = document["components"]["schemas"]
    assert {ref.removeprefix("#/components/schemas/") for ref in references(document)} == schemas.keys()


async def test_bounds_are_those_that_are_enforced(document: Any) -> None:
    body = document["components"]["schemas"]["CompletionRequest"]
    fields = body["properties"]
    assert fields.keys() > set(CompletionRequest.__struct_fields__)
    assert body["required"] == ["prompt"]
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": MAX_N}
    assert fields["logit_bias"]["anyOf"][0]["maxProperties"] == MAX_LOGIT_BIAS
    token = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
    assert fields["prompt"]["anyOf"][1]["anyOf"] == [
        {"type": "array", "items": {"type": "string"}, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": token},
        {"type": "array", "items": {"type": "array", "items": token, "minItems": 1}, "maxItems": MAX_PROMPTS},
    ]
    assert fields["best_of"] == {"enum": [None, 1]}


async def test_errors_are_those_of_the_route(document: Any) -> None:
    paths = document["paths"]
    assert " ".join(paths["/v1/completions"]["post"]["responses"]) == "200 400 401 403 404 408 413 429 500 503 504"
    assert list(paths["/v1/models"]["get"]["responses"]) == ["200", "400", "401", "403", "500"]
    unready = paths["/ready"]["get"]["responses"]["503"]["content"]["application/json"]["schema"]
    assert unready == {"$ref": "#/components/schemas/StatusJson"}


async def test_the_document_can_be_read_more_than_once(server: Server) -> None:
    texts = [await (await server.session.get(server.url + "/openapi.json")).read() for _ in range(2)]
    assert texts[0] == texts[1]


async def test_whatever_schemathesis_sends_gets_what_the_document_promises(server: Server, tmp_path: Path) -> None:
    """Bodies at and beyond every bound, of wrong types, and at random, the same ones each time."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml")),
        *("run", server.url + "/openapi.json", "--no-color"),
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": f"{HERE}:{HERE.parent.parent}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    for phase in ("Coverage", "Fuzzing"):
        assert f"✅ {phase}" in output.decode()
