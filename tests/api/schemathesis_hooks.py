"""Loaded by schemathesis: makes fields agree where a body would be refused for two that contradict each other, or for
one that names nothing, which no schema says. Otherwise hardly any body would get past those checks, and one that is
wrong would be refused for a wrong reason. Values that are wrong themselves stay as they are."""

from __future__ import annotations

from typing import Any

import schemathesis
from fake_backend import MODEL


@schemathesis.hook
def map_case(context: Any, case: Any) -> Any:
    if isinstance(case.body, dict):
        agree(case.body, tokenize=case.path == "/tokenize")
    return case


def agree(body: dict[str, Any], *, tokenize: bool) -> None:
    if isinstance(body.get("model"), str) and len(body["model"]) <= 512:
        body["model"] = MODEL
    if body.get("prompt") == "":
        body["prompt"] = "a"
    if tokenize and body.get("prompt") is None and body.get("messages") is None:
        needs_messages = body.keys() & {
            "tools",
            "chat_template_kwargs",
            "add_generation_prompt",
            "continue_final_message",
        }
        body |= {"messages": [{"role": "user"}]} if needs_messages else {"prompt": "a"}
    if body.get("continue_final_message") is True and body.get("add_generation_prompt") is True:
        body["add_generation_prompt"] = False
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("content") is None:
            message["content"] = "a"
    if tokenize and messages and body.get("add_special_tokens", True) is True:
        body["add_special_tokens"] = False
    if "session_ttl_seconds" in body and body.get("session") is None:
        body["session"] = "agent"
    for name, needed in (("stream_options", "stream"), ("top_logprobs", "logprobs")):
        if name in body and (body.get(needed) is None or body[needed] is False):
            body[needed] = True
