"""The OpenAPI document, made of the routes and of the types that their bodies are read into and their answers written
from. It says what can be said of one value at a time; that two fields contradict each other only the answer says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from asyncengine import __version__
from asyncengine.api.endpoints import Endpoint, Header
from asyncengine.api.errors import ErrorJson
from asyncengine.api.request_body import json_response
from asyncengine.api.unknown_fields import CONVERSATION

DONE = "[DONE]"
"""Data of a stream's last event, which is no JSON."""

Json = dict[str, Any]


def openapi_endpoint(endpoints: Sequence[Endpoint]) -> Endpoint:
    """The route of the document on `endpoints` and itself."""

    async def handler(request: web.Request) -> web.Response:
        return json_response(answer())

    @cache
    def answer() -> Json:
        """Made when it is asked for first: it takes longer than the rest of an application."""
        return document([*endpoints, endpoint])

    endpoint = Endpoint(
        method="GET",
        path="/openapi.json",
        name="openapi",
        summary="This document",
        handler=handler,
        answer=dict[str, Any],
    )
    return endpoint


def document(endpoints: Sequence[Endpoint]) -> Json:
    """The document on `endpoints`."""
    schemas, components = _schemas(endpoints)
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.template, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "asyncengine", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _schemas(endpoints: Sequence[Endpoint]) -> tuple[dict[Any, Json], Json]:
    """Schema of each type, and those that they refer to by name."""
    kinds: list[Any] = [ErrorJson]
    for endpoint in endpoints:
        kinds += [endpoint.body, endpoint.answer, endpoint.event, *endpoint.answers().values()]
        kinds += [header.kind for header in (*endpoint.headers, *endpoint.answer_headers)]
    found, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for endpoint in endpoints:
        if endpoint.body is not None:
            components[endpoint.body.__name__]["properties"] |= {
                name: {"enum": [None, *values]} for name, values in endpoint.no_effect.items()
            }
    for kind in CONVERSATION:
        del components[kind.__name__]["additionalProperties"]
    return dict(zip(kinds, found, strict=True)), components


def _operation(endpoint: Endpoint, schemas: Mapping[Any, Json]) -> Json:
    content = {"text/plain" if endpoint.answer is str else "application/json": {"schema": schemas[endpoint.answer]}}
    if endpoint.event is not None:
        content["text/event-stream"] = {"schema": _event([schemas[endpoint.event], schemas[ErrorJson]])}
    answer: Json = {"description": "The answer", "content": content}
    if endpoint.answer_headers:
        answer["headers"] = {header.name: _header(header, schemas) for header in endpoint.answer_headers}
    operation: Json = {"operationId": endpoint.name, "summary": endpoint.summary}
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in endpoint.variables
    ]
    parameters += [{"name": header.name, "in": "header", **_header(header, schemas)} for header in endpoint.headers]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[endpoint.body]}},
        }
    operation["responses"] = {"200": answer} | {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schemas[kind]}},
        }
        for status, kind in endpoint.answers().items()
    }
    return operation


def _event(data: list[Json]) -> Json:
    """One event of a stream, whose data is JSON of one of the schemas `data`; as OpenAPI 3.2 has it for all of them."""
    json = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": data}}
    return {"type": "object", "properties": {"data": {"anyOf": [json, {"const": DONE}]}}, "required": ["data"]}


def _header(header: Header, schemas: Mapping[Any, Json]) -> Json:
    return {"description": header.description, "schema": schemas[header.kind]}
