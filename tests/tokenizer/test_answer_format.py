"""What a chat template shows of the answers' format, and what of a request depends on the rendered prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asyncengine.sampling import SamplingParams, Structured
from asyncengine.wire.frames import DetokenizeOptions
from asyncengine.wire.requests import EncodeChat, Generate, Markup
from tokenizer_proc.answer_format import tag_tokens, tool_call_format, writes_reasoning
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.prompt_encoder import PromptEncoder

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
PLAIN, THINKING = Structured("regex", "a"), Structured("regex", "b")
SHOWN = ("<tool_call>", "<think>")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("... <tool_call>\n{{ tool_call.arguments | tojson }} ...", "hermes"),
        ("... <tool_call>\n<function=name> ...", None),
        ("... <tool_call>name\n<arg_key> ...", None),
        ("... <|python_tag|> ...", "llama3"),
        ("""... '<|start_header_id|>ipython' ... '"parameters": ' ...""", "llama3"),
        ("{{ messages }}", None),
        ("", None),
    ],
)
def test_a_template_shows_how_calls_are_written(template: str, expected: str | None) -> None:
    assert tool_call_format(template) == expected


def test_real_templates_show_their_formats(loaded: Callable[[str], Any]) -> None:
    qwen3, smollm2 = loaded("qwen3").file, loaded("smollm2").file
    assert tool_call_format(qwen3.chat_template) == "hermes"
    assert writes_reasoning(qwen3.chat_template)
    assert tag_tokens(qwen3.tokenizer) == ("<tool_call>", "</tool_call>", "<think>", "</think>")
    assert tool_call_format(smollm2.chat_template) is None
    assert not writes_reasoning(smollm2.chat_template)
    assert tag_tokens(smollm2.tokenizer) == ()


def encoded(model: Any, messages: list[dict[str, Any]], kwargs: dict[str, Any], **fields: Any) -> Generate:
    encoder = PromptEncoder(vocabulary=model.vocabulary, template=model.template, max_model_len=4096)
    params = SamplingParams(structured=PLAIN)
    data, variables = json.dumps(messages).encode(), json.dumps(kwargs).encode()
    (outcome,) = encoder.encode([EncodeChat(1, data, params, "", True, variables, **fields)])
    assert isinstance(outcome, Generate), outcome
    return outcome


def test_tools_are_a_variable_of_the_template(loaded: Callable[[str], Any]) -> None:
    model = loaded("qwen3")
    user = [{"role": "user", "content": "hi"}]
    job = encoded(model, user, {}, tools=json.dumps(TOOLS).encode())
    rendered = model.template.render(user, add_generation_prompt=True, kwargs={"tools": TOOLS})
    assert '"name": "f"' in rendered.text
    assert job.ids == model.vocabulary.encode_chats([rendered])[0].tobytes()


@pytest.mark.parametrize(
    ("ending", "prefix", "structured"),
    [
        ("<think>\n", "<think>", THINKING),
        ("<think>", "<think>", THINKING),
        ("<think>\n\n</think>\n\n", "", PLAIN),
        ("", "", PLAIN),
    ],
)
def test_a_prompt_that_leaves_reasoning_open_is_told_to_whoever_reads_the_answer(
    loaded: Callable[[str], Any], ending: str, prefix: str, structured: Structured
) -> None:
    model = loaded("smollm2")
    turn = [{"role": "user", "content": "hi"}]
    source = "{{ messages[0].content }}" + ending
    template = ChatTemplate(source, special_tokens={}, control_tokens=model.vocabulary.control_tokens)
    encoder = PromptEncoder(vocabulary=model.vocabulary, template=template, max_model_len=4096)
    data, params = json.dumps(turn).encode(), SamplingParams(structured=PLAIN)
    for markup in (Markup(SHOWN, "<think>", THINKING), None):
        (outcome,) = encoder.encode([EncodeChat(1, data, params, "", True, b"", b"", markup)])
        assert isinstance(outcome, Generate)
        options = msgspec.msgpack.decode(outcome.detok, type=DetokenizeOptions)
        asked = markup is not None
        assert (options.prefix, options.shown_tokens) == ((prefix, SHOWN) if asked else ("", ()))
        assert outcome.params.structured == (structured if asked else PLAIN)
