"""How a model writes what is not plain text in its answers, as its chat template shows it."""

from __future__ import annotations

from tokenizers import Tokenizer

from asyncengine.config import ToolCallFormat

TAGS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>")
OTHER_CALLS = ("<function=", "<arg_key>")
"""Formats that use the tag of Hermes's, but are not JSON."""


def tool_call_format(template: str) -> ToolCallFormat | None:
    """None for a model that is told of no tools, or whose format is not supported."""
    if "<tool_call>" in template:
        return None if any(mark in template for mark in OTHER_CALLS) else "hermes"
    # the smaller models of Llama 3 have no tag; what a function's answer is to them is its role
    is_llama3 = "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template)
    return "llama3" if is_llama3 else None


def writes_reasoning(template: str) -> bool:
    return "</think>" in template


def tag_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The tags that are tokens of their own."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return tuple(tag for tag in TAGS if tag in added)
