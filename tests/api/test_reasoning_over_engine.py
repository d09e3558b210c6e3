"""Reasoning whose block the prompt has opened: templates, tokenizer and detokenizer of the real engine, with the
scripted runner as the model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from api_server import CHAT, Server, serving
from support.python_path import PYTHON_PATH
from support.tokenizers_cache import default_model_file

from asyncengine import AsyncEngine, ChatPrompt, EngineConfig
from asyncengine.tokenizer_file import load_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% if enable_thinking is defined and not enable_thinking %}
</think>

{% endif %}{% endif %}"""
TEXT = "I <b think.\n</think>\n\nYes <think>."
MESSAGES = [{"role": "user", "content": "Hi <think>"}]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    tokens = load_tokenizer(str(default_model_file())).tokenizer.encode(TEXT, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("ASYNCENGINE_SCRIPT", json.dumps({"step_ms": 1, "tokens": tokens}))
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    template: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    config = EngineConfig(max_model_len=512, max_num_seqs=4, chat_template=str(template))
    async with AsyncEngine.start(config, modules={"gpu_runner": "support.scripted_runner"}) as engine:
        assert engine.info.reasoning
        yield engine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(engine: AsyncEngine) -> AsyncIterator[Server]:
    async with serving(engine) as server:
        yield server


async def parts(server: Server, *, stream: bool, **asked: Any) -> tuple[str | None, str]:
    """Reasoning and content of the answer."""
    body = {"messages": MESSAGES, "temperature": 0, **asked}
    if not stream:
        status, answer = await server.post(CHAT, body)
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        assert message.get("reasoning") == message.get("reasoning_content")
        return message.get("reasoning"), message["content"]
    deltas = [event["choices"][0]["delta"] for event in (await server.events(CHAT, body))[:-1]]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
    return reasoning or None, "".join(delta.get("content", "") for delta in deltas)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_begins_within_the_block_that_the_prompt_has_opened(server: Server, stream: bool) -> None:
    assert await parts(server, stream=stream) == ("I <b think.", "Yes <think>.")
    assert await parts(server, stream=stream, max_tokens=3) == ("I <b", "")
    assert await parts(server, stream=stream, stop=["Yes"]) == ("I <b think.", "")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_block_that_the_prompt_has_closed_is_none(server: Server, stream: bool) -> None:
    asked = {"chat_template_kwargs": {"enable_thinking": False}, "stop": ["<think>"]}
    assert await parts(server, stream=stream, **asked) == (None, "I <b think.\n</think>\n\nYes ")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_ends_with_the_users_own_words_opens_nothing(server: Server, stream: bool) -> None:
    asked = {"add_generation_prompt": False, "stop": ["<think>"]}
    assert await parts(server, stream=stream, **asked) == (None, "I <b think.\n</think>\n\nYes ")


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_that_is_to_be_continued_goes_on_until_it_is_closed(server: Server, stream: bool) -> None:
    async def after(begun: str, **asked: Any) -> tuple[str | None, str]:
        messages = [*MESSAGES, {"role": "assistant", "content": begun}]
        return await parts(server, stream=stream, messages=messages, continue_final_message=True, **asked)

    for begun in ("<think>", "<think>\nSo", "Well. <think>So <|im_end|> is"):
        assert await after(begun) == ("I <b think.", "Yes <think>."), begun
    for begun in ("So", "<think>So</think>", "<think>So</think>\n\nYes, "):
        assert await after(begun, stop=["<think>"]) == (None, "I <b think.\n</think>\n\nYes "), begun


async def test_logprobs_and_stop_strings_know_nothing_of_the_tag_that_the_prompt_had(server: Server) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "stop": ["<think>"], "return_token_ids": True}
    _, answer = await server.post(CHAT, body)
    choice = answer["choices"][0]
    assert choice["message"]["reasoning_content"] == "I <b think."
    assert choice["message"]["content"] == "Yes "
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "I <b think.\n</think>\n\nYes <"
    assert entries[0]["text_offset"] == 0


async def test_the_engines_own_text_is_the_models(engine: AsyncEngine) -> None:
    text = ""
    async for delta in engine.generate(ChatPrompt(messages=[*MESSAGES])):  # type: ignore[list-item]
        text += delta.text
    assert text == TEXT
