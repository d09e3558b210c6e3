"""A conversation as a caller hands it in."""

from __future__ import annotations

import msgspec

from asyncengine.wire.requests import Markup


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation for the model's chat template: messages are {"role": ..., "content": ...} objects, tools
    {"type": "function", "function": {"name": ..., "parameters": ...}} objects. continue_final_message: the last
    message is the beginning of an answer, and what comes next goes on with it. markup: for whoever takes the answer's
    text apart."""

    messages: list[dict[str, object]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, object] = {}
    tools: list[dict[str, object]] = []
    markup: Markup | None = None
