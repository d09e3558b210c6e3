"""Loaded by schemathesis: makes fields agree where a body whose every field is right would be refused for two that
contradict each other, which no schema says. Without it hardly any body would get past those checks."""

from __future__ import annotations

from typing import Any

import schemathesis
from fake_backend import MODEL


@schemathesis.hook
def map_case(context: Any, case: Any) -> Any:
    body = case.body
    if isinstance(body, dict) and case.meta.generation.mode == schemathesis.GenerationMode.POSITIVE:
        agree(body, tokenize=case.path == "/tokenize")
    return case


def agree(body: dict[str, Any], *, tokenize: bool) -> None:
    if body.get("model"):
        body["model"] = MODEL
    if body.get("prompt") == "" or (tokenize and body.get("prompt") is None and not body.get("messages")):
        body["prompt"] = "a"
    for message in body.get("messages") or ():
        message["content"] = message.get("content") or "a"
    if tokenize and body.get("messages"):
        body |= {"prompt": None, "add_special_tokens": False}
    if body.get("stream_options") is not None:
        body["stream"] = True
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
