"""Rendering and tokenizing chats must equal what transformers does with the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support.tokenizers_cache import NAMES
from transformers import PreTrainedTokenizerFast

from asyncengine.tokenizer_file import load_tokenizer
from tokenizer_proc.chat_template import Rendered

MODELS = ("smollm2", *NAMES)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city, e.g. <Köln> & 'Paris' > \"x\"",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief.\nAlways."}
USER = {"role": "user", "content": "What is 12+34? 你好 👨‍👩‍👧 é مرحبا\r\n\tcode()"}
ASSISTANT = {"role": "assistant", "content": "  46, of course. "}
QUOTE = {"role": "user", "content": "> a quote, a list [1, 2] and a tail <"}
CONVERSATIONS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, QUOTE],
    "answered": [USER, ASSISTANT],
}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
TOOL_CONVERSATION = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"t": 21}'},
]


@cache
def reference(name: str, path: str) -> PreTrainedTokenizerFast:
    """transformers' tokenizer from the same files, its special tokens taken from tokenizer_config.json."""
    if name == "smollm2":
        file = load_tokenizer(path)
        return PreTrainedTokenizerFast(
            tokenizer_object=file.tokenizer, chat_template=file.chat_template, **file.special_tokens
        )
    with open(f"{path}/tokenizer_config.json") as stream:
        config = json.load(stream)
    tokens = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    return PreTrainedTokenizerFast(
        tokenizer_file=f"{path}/tokenizer.json", chat_template=config["chat_template"], **tokens
    )


def assert_equal_to_reference(model: Any, name: str, messages: list[Any], generation: bool, **kwargs: Any) -> Rendered:
    rendered = model.template.render(messages, add_generation_prompt=generation, kwargs=kwargs)
    expected = reference(name, str(model.path))
    options = {"add_generation_prompt": generation, **kwargs}
    text = rendered.text.replace(rendered.marker, "") if rendered.marker else rendered.text
    assert text == expected.apply_chat_template(messages, tokenize=False, **options)
    (ids,) = model.vocabulary.encode_chats([rendered])
    assert ids.tolist() == expected.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    return rendered


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_becomes_the_text_and_ids_that_transformers_makes(
    loaded: Callable[[str], Any], name: str, conversation: str, generation: bool
) -> None:
    assert_equal_to_reference(loaded(name), name, CONVERSATIONS[conversation], generation)


@pytest.mark.parametrize("name", ["qwen3", "mistral_nemo"])
def test_tools_become_the_text_and_ids_that_transformers_makes(loaded: Callable[[str], Any], name: str) -> None:
    assert_equal_to_reference(loaded(name), name, TOOL_CONVERSATION, True, tools=TOOLS)


def test_a_template_variable_reaches_the_template(loaded: Callable[[str], Any]) -> None:
    plain = assert_equal_to_reference(loaded("qwen3"), "qwen3", [USER], True)
    short = assert_equal_to_reference(loaded("qwen3"), "qwen3", [USER], True, enable_thinking=False)
    assert short.text == plain.text + "<think>\n\n</think>\n\n"


def test_thinking_text_is_dropped_from_history_as_transformers_does(loaded: Callable[[str], Any]) -> None:
    thought = {"role": "assistant", "content": "<think>\nhm <\n</think>\n\n46"}
    rendered = assert_equal_to_reference(loaded("qwen3"), "qwen3", [USER, thought, USER], True)
    assert "hm" not in rendered.text


@pytest.mark.parametrize("name", MODELS)
def test_text_at_the_border_of_a_control_token_is_tokenized_as_if_never_cut(
    loaded: Callable[[str], Any], name: str
) -> None:
    heads = ["<", "<|", "<|im_", "[", "[IN", "</", "<s", "<｜"]
    tails = [">", "|>", "end|>", "]", "INST]", "s>", "｜>"]
    messages: list[Any] = []
    for head, tail in zip(heads, tails * 2, strict=False):
        messages.append({"role": "user", "content": f"{tail} Straße {head}"})
        messages.append({"role": "assistant", "content": f"{tail}\n\n naïve {head}"})
    rendered = assert_equal_to_reference(loaded(name), name, messages, False)
    assert rendered.marker != ""


def test_gemma_takes_text_parts_as_they_come_and_others_get_them_joined(loaded: Callable[[str], Any]) -> None:
    parts = [{"type": "text", "text": " one "}, {"type": "text", "text": "two "}]
    assert_equal_to_reference(loaded("gemma3"), "gemma3", [{"role": "user", "content": parts}], True)
    for name in ("smollm2", "qwen3", "llama3_1", "mistral_nemo", "deepseek_v3"):
        template = loaded(name).template
        listed = template.render([{"role": "user", "content": parts}], add_generation_prompt=True, kwargs={})
        joined = template.render([{"role": "user", "content": " one two "}], add_generation_prompt=True, kwargs={})
        assert listed == joined
