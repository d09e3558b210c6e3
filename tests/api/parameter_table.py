"""Every parameter of the generation endpoints but `user`, with a value that makes a difference."""

from __future__ import annotations

from typing import Any

from api_server import CHAT, COMPLETIONS

BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "abc"},
    CHAT: {"messages": [{"role": "user", "content": "abc"}]},
}
BOTH: dict[str, dict[str, Any]] = {
    "model": {"model": "other"},
    "max_tokens": {"max_tokens": 3},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "min_tokens": {"min_tokens": 2},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.5},
    "presence_penalty": {"presence_penalty": 1},
    "frequency_penalty": {"frequency_penalty": 1},
    "repetition_penalty": {"repetition_penalty": 2},
    "logit_bias": {"logit_bias": {"5": 1}},
    "n": {"n": 2},
    "seed": {"seed": 7},
    "stop": {"stop": "x"},
    "stop_token_ids": {"stop_token_ids": [5]},
    "ignore_eos": {"ignore_eos": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "priority": {"priority": 3},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "return_token_ids": {"return_token_ids": True},
    "return_prompt_token_ids": {"return_prompt_token_ids": True},
    "timings": {"timings": True},
    "request_id": {"request_id": "mine"},
    "cache_salt": {"cache_salt": "tenant"},
    "service_class": {"service_class": "background"},
    "session": {"session": "agent 7/ü"},
    "session_ttl_seconds": {"session": "agent 7/ü", "session_ttl_seconds": 60},
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"choice": ["a", "b"]}},
}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "f"}}]}
OWN: dict[str, dict[str, dict[str, Any]]] = {
    COMPLETIONS: {"prompt": {"prompt": "abd"}, "logprobs": {"logprobs": 1}, "echo": {"echo": True}},
    CHAT: {
        "messages": {"messages": [{"role": "user", "content": "abd"}]},
        "logprobs": {"logprobs": True},
        "top_logprobs": {"logprobs": True, "top_logprobs": 2},
        "add_generation_prompt": {"add_generation_prompt": False},
        "continue_final_message": {"continue_final_message": True},
        "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
        "tools": TOOLS,
        "tool_choice": TOOLS | {"tool_choice": "required"},
        "parallel_tool_calls": TOOLS | {"parallel_tool_calls": False},
    },
}
