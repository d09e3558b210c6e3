"""Structured output behind the real HTTP endpoint: schemas, patterns, choices and grammars.

The model has no sense of its own (`support.babbling_model`); real ones are asked in the other tests of this folder."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from chaos.processes import ON_DEMAND, family
from support.babbling_model import EOS, write_babbling_model
from support.command_line import all_gone
from support.eventually import eventually

from asyncengine import AsyncEngine, EngineConfig, SamplingParams, collect
from asyncengine.api.app import bound_port, run_app
from asyncengine.errors import EngineError, InvalidRequestError
from asyncengine.sampling import Structured

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "capital": {"type": "boolean"},
    },
    "required": ["name", "population", "capital"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    CITY,
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {
            "kind": {"const": "point"},
            "at": {
                "type": "array",
                "prefixItems": [{"type": "integer", "maximum": 99, "minimum": -99}] * 2,
                "minItems": 2,
                "items": False,
            },
        },
        "required": ["kind", "at"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}},
                "required": ["left"],
                "additionalProperties": False,
            },
            "leaf": {
                "type": "object",
                "properties": {"value": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["value"],
                "additionalProperties": False,
            },
        },
        "$ref": "#/$defs/tree",
    },
    {"type": "string", "pattern": "^[A-Z][a-z]{2,8}-[0-9]{4}$"},
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncEngine]:
    model = write_babbling_model(tmp_path_factory.mktemp("model"))
    config = EngineConfig(model=model, load_format="dummy", device="cpu", kv_cache_tokens=16384, max_num_seqs=32)
    async with AsyncEngine.start(config) as engine:
        assert grammar_processes(engine) == [], "nobody has asked for structured output yet"
        yield engine
        left = grammar_processes(engine)
        assert len(left) == 2
    assert all_gone(left)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url(engine: AsyncEngine) -> AsyncIterator[str]:
    runner = await run_app(engine, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{bound_port(runner)}/v1"
    await runner.cleanup()


@pytest.fixture
def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


def grammar_processes(engine: AsyncEngine) -> list[int]:
    """Those of the engine's gpu_runner, in the order of their start."""
    runner = engine._supervisor._children["gpu_runner", 0].process.pid
    return [process.pid for process in family(runner) if process.role in ON_DEMAND]


async def complete(url: str, *, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "The city of Rome as JSON:", "max_tokens": 200, **fields}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == status, answer
        return answer


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * len(answer["choices"])
    return [choice["text"] for choice in answer["choices"]]


def matches(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Of the keywords that the schemas above use."""
    if "$ref" in schema:
        return matches(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(matches(value, part, root) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            long = len(value) <= schema.get("maxLength", 10**9)
            return isinstance(value, str) and long and re.search(schema.get("pattern", ""), value) is not None
        case "array":
            items = schema.get("prefixItems") or [schema["items"]] * len(value)
            size = schema["minItems"] <= len(value) <= schema.get("maxItems", len(items))
            return size and all(matches(item, part, root) for item, part in zip(value, items, strict=True))
        case _:
            properties = schema["properties"]
            return value.keys() == set(schema["required"]) and all(
                matches(item, properties[name], root) for name, item in value.items()
            )


async def tokens_of(engine: AsyncEngine, prompt: Sequence[int] | str, params: SamplingParams) -> list[int]:
    return [token async for delta in engine.generate(prompt, params) for token in delta.token_ids]


async def test_json_keeps_to_its_schema_at_any_seed(url: str) -> None:
    async def keeps_to(schema: dict[str, Any], seed: int) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        (text,) = texts(await complete(url, response_format=form, seed=seed))
        assert matches(json.loads(text), schema, schema), text

    await asyncio.gather(*(keeps_to(schema, seed) for schema in SCHEMAS for seed in (1, 20)))


async def test_a_json_object_is_one_whatever_it_holds(url: str) -> None:
    answer = await complete(url, response_format={"type": "json_object"}, temperature=0, max_tokens=30)
    text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
    assert reason == "length" or isinstance(json.loads(text), dict)
    assert text.startswith("{")


async def test_a_pattern_is_matched_from_end_to_end(url: str) -> None:
    answer = await complete(url, structured_outputs={"regex": r"[0-9]{3}-[a-f]{2,5}(!|\?)"}, n=4, seed=3)
    assert len(texts(answer)) == 4
    for text in texts(answer):
        assert re.fullmatch(r"[0-9]{3}-[a-f]{2,5}(!|\?)", text)


async def test_one_of_the_choices_and_nothing_else(url: str) -> None:
    choices = ['say "yes"', "non\nne", "größer 😀", "a\\b/c", "<|im_end|>"]
    answer = await complete(url, structured_outputs={"choice": choices}, n=8, seed=1, temperature=2)
    assert set(texts(answer)) <= set(choices)
    assert len(set(texts(answer))) > 1
    (only,) = texts(await complete(url, structured_outputs={"choice": ["größer 😀"]}, temperature=0))
    assert only == "größer 😀"


@pytest.mark.parametrize(
    "grammar",
    ['start: "(" NUMBER ("," NUMBER)* ")"\nNUMBER: /[0-9]{1,3}/', 'root ::= "(" n ("," n)* ")"\nn ::= [0-9] [0-9]?'],
    ids=["lark", "gbnf"],
)
async def test_a_grammar_in_either_notation(url: str, grammar: str) -> None:
    answer = await complete(url, structured_outputs={"grammar": grammar}, seed=2, temperature=0.5, max_tokens=60)
    text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
    assert re.fullmatch(r"\([0-9]{1,3}(,[0-9]{1,3})*\)?,?", text)
    assert (reason == "stop") == text.endswith(")")


async def test_a_stream_is_the_same_text_and_log_probabilities_are_the_models_own(
    engine: AsyncEngine, client: openai.AsyncOpenAI
) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    ask: dict[str, Any] = {
        "model": engine.info.model,
        "messages": [{"role": "user", "content": "Tell me about Rome."}],
        "response_format": form,
        "seed": 5,
        "logprobs": True,
        "top_logprobs": 1,
    }
    whole = await client.chat.completions.create(**ask)
    stream = await client.chat.completions.create(**ask, stream=True)
    chunks = [chunk async for chunk in stream]
    text = whole.choices[0].message.content
    assert text is not None
    assert matches(json.loads(text), CITY, CITY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    entries = whole.choices[0].logprobs
    assert entries is not None
    assert entries.content is not None
    # what the model would have said is not what it was let say, and is reported all the same
    assert any(entry.top_logprobs[0].token != entry.token for entry in entries.content)
    assert all(entry.logprob <= entry.top_logprobs[0].logprob for entry in entries.content)


async def test_unconstrained_neighbours_get_the_tokens_that_they_get_alone(engine: AsyncEngine) -> None:
    prompts = ["Once upon a time", "In Rome"]
    free = [SamplingParams(seed=seed, max_tokens=8, ignore_eos=True) for seed in range(2)]
    alone = [await tokens_of(engine, prompt, params) for prompt, params in zip(prompts, free, strict=True)]
    schema = json.dumps(CITY)
    bound = [
        SamplingParams(seed=seed, max_tokens=12, structured=Structured("json_schema", schema)) for seed in range(2)
    ]
    asked = [
        *zip(prompts, free, strict=True),
        *((prompt, params) for prompt, params in zip(prompts, bound, strict=True)),
    ]
    together = await asyncio.gather(*(tokens_of(engine, prompt, params) for prompt, params in asked))
    assert together[:2] == alone
    bound_alone = [await tokens_of(engine, prompt, params) for prompt, params in zip(prompts, bound, strict=True)]
    assert together[2:] == bound_alone


BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "["}, "unclosed character class"),
    ({"regex": "(?=y)+"}, "look-around"),
    ({"regex": "(" * 50_000}, "cannot be used"),
    ({"regex": "\\"}, "incomplete escape"),
    ({"json": {"type": "no such type"}}, "no such type"),
    ({"json": {"type": "object", "if": {"type": "object"}}}, "if"),
    ({"json": False}, "must be an object"),
    ({"json": "{"}, "not valid JSON"),
    ({"json": {"$ref": "http://localhost:1/schema"}}, "localhost:1"),
    ({"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "no text can match"),
    ({"json": {"items": json.loads("[" * 70 + "]" * 70)}}, "deeper than 64"),
    ({"json": json.dumps({"enum": ["x" * 70_000]})}, "65536 bytes"),
    ({"grammar": "not a grammar"}, "cannot be used"),
    ({"grammar": 'start: "a" missing'}, "missing"),
    ({"grammar": "start: start"}, "no text can match"),
]


@pytest.mark.parametrize(("outputs", "words"), BAD, ids=[str(outputs)[:40] for outputs, _ in BAD])
async def test_what_cannot_be_compiled_is_refused_in_words(url: str, outputs: dict[str, Any], words: str) -> None:
    error = (await complete(url, status=400, structured_outputs=outputs))["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith("structured_outputs")
    assert len(error["message"]) < 1000


async def test_a_schema_that_takes_for_ever_is_refused_and_nobody_else_notices(engine: AsyncEngine, url: str) -> None:
    known = SamplingParams(max_tokens=40, structured=Structured("regex", "[a-z ]{8,10}"), seed=1)
    await tokens_of(engine, "Rome", known)
    meanwhile = 0
    for number in range(10):  # of a machine that is too slow for some steps within the 2 s, one try may tell nothing
        await complete(url, structured_outputs={"choice": [str(number)]})  # the process for checks has started
        schema = {"type": "integer", "multipleOf": 9_999_991 - 20 * number}
        slow = asyncio.create_task(complete(url, status=400, structured_outputs={"json": schema}))
        bound = asyncio.create_task(tokens_of(engine, "Rome", known))
        meanwhile = 0
        free = SamplingParams(max_tokens=8000, ignore_eos=True)
        async with aclosing(engine.generate("Rome", free)) as deltas:
            async for delta in deltas:
                if slow.done():
                    break
                meanwhile += len(delta.token_ids)
        assert "more than 2 s" in (await slow)["error"]["message"]
        assert await bound
        if meanwhile > 2:
            break
    assert meanwhile > 2, "more tokens than the steps that were in flight had"
    # the process that was killed is replaced, and the verdict is remembered
    assert texts(await complete(url, structured_outputs={"choice": ["new"]})) == ["new"]
    processes = grammar_processes(engine)
    await complete(url, status=400, structured_outputs={"json": {"type": "integer", "multipleOf": 9_999_991}})
    assert grammar_processes(engine) == processes, "another check would have cost the process once more"


async def test_who_leaves_while_a_schema_is_checked_leaves_nothing_behind(engine: AsyncEngine) -> None:
    slow = Structured("json_schema", '{"type": "integer", "multipleOf": 9999973}')
    asked = asyncio.create_task(tokens_of(engine, "Rome", SamplingParams(structured=slow, n=2)))
    await asyncio.sleep(0.2)
    asked.cancel()
    free = SamplingParams(max_tokens=3, structured=Structured("choice", '["after that"]'))
    assert await tokens_of(engine, "Rome", free)
    await eventually(lambda: engine.gauges()["open_streams"] == engine.gauges()["waiting"] == 0)


async def test_a_killed_mask_process_costs_the_rows_that_waited_for_it_and_no_others(engine: AsyncEngine) -> None:
    # many seconds of work, without an end of its own: it is lost early, however late this process is
    bound = SamplingParams(
        max_tokens=8000, structured=Structured("regex", "[a-z ]+"), logit_bias=((EOS, -100.0),), seed=1
    )
    free = SamplingParams(max_tokens=100, ignore_eos=True, seed=1)
    expected = await tokens_of(engine, "Once", free)
    masks = grammar_processes(engine)[0]  # the first that was started
    neighbour = asyncio.create_task(tokens_of(engine, "Once", free))
    async with aclosing(engine.generate("Rome", bound)) as lost:
        await anext(lost)
        os.kill(masks, signal.SIGKILL)
        with pytest.raises(EngineError, match="was lost"):
            await collect(lost)
    assert await neighbour == expected
    again = SamplingParams(max_tokens=20, structured=Structured("choice", '["once more"]'))
    assert await tokens_of(engine, "Rome", again)
    assert masks not in grammar_processes(engine)


async def test_contradictions_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="ignore_eos contradicts"):
        SamplingParams(structured=Structured("regex", "a"), ignore_eos=True)
    with pytest.raises(InvalidRequestError, match="min_tokens contradicts"):
        SamplingParams(structured=Structured("regex", "a"), min_tokens=1)
    with pytest.raises(InvalidRequestError, match="1 to 65536 bytes"):
        Structured("regex", "")
