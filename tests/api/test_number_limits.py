"""Every number that a body can hold, however deep, has a least and a greatest value, and others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from api_server import CHAT, COMPLETIONS
from msgspec import inspect
from parameter_table import BASE

from asyncengine.api.schema import ChatRequest, CompletionRequest, parse_chat, parse_completion
from asyncengine.api.token_schema import DetokenizeRequest, TokenizeRequest, parse_detokenize, parse_tokenize
from asyncengine.errors import InvalidRequestError

Path = tuple[str | int, ...]
ODD = (-1, 0, 1, 20, 21, 2**31 - 1, 2**31, 10**9, 2**63 - 1, 2**63, 2**64, -(2**31) - 1, -(2**63) - 1, 10**300)
NEED_OTHERS = (("max_tokens",), ("min_tokens",), ("top_logprobs",))
"""Whose ends are taken together with other fields only."""
KEY = "a key"
"""Stands for a number that is the name of a member."""
BODIES: tuple[tuple[type, Callable[[bytes], object], dict[str, Any]], ...] = (
    (CompletionRequest, parse_completion, BASE[COMPLETIONS]),
    (ChatRequest, parse_chat, BASE[CHAT]),
    (TokenizeRequest, parse_tokenize, {"prompt": "x"}),
    (DetokenizeRequest, parse_detokenize, {"tokens": [1]}),
)


def numbers(kind: inspect.Type, path: Path = ()) -> Iterator[tuple[Path, inspect.IntType | inspect.FloatType]]:
    """Where in a value of `kind` numbers are."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield path, kind
        case inspect.Metadata():
            yield from numbers(kind.type, path)
        case inspect.UnionType():
            for each in kind.types:
                yield from numbers(each, path)
        case inspect.StructType():
            for field in kind.fields:
                yield from numbers(field.type, (*path, field.encode_name))
        case inspect.ListType() | inspect.VarTupleType():
            yield from numbers(kind.item_type, (*path, 0))
        case inspect.DictType():
            yield from numbers(kind.key_type, (*path, KEY))
            yield from numbers(kind.value_type, (*path, "5"))
        case _:
            leaves = (inspect.StrType, inspect.BoolType, inspect.NoneType, inspect.LiteralType)
            assert isinstance(kind, (*leaves, inspect.RawType, inspect.AnyType)), kind


def nested(path: Path, value: Any) -> Any:
    if not path:
        return value
    first, *rest = path
    if first == KEY:
        return {str(value): 1}
    inner = nested(tuple(rest), value)
    return [inner] if first == 0 else {first: inner}


def status(parse: Callable[[bytes], object], body: dict[str, Any]) -> int:
    try:
        parse(json.dumps(body).encode())
    except InvalidRequestError as error:
        return error.status
    return 200


@pytest.mark.parametrize(("kind", "parse", "base"), BODIES)
def test_every_number_has_both_ends_and_nothing_beyond_them_is_taken(
    kind: type, parse: Callable[[bytes], object], base: dict[str, Any]
) -> None:
    assert status(parse, base) == 200
    for path, number in numbers(inspect.type_info(kind)):
        low, high = number.ge if number.gt is None else number.gt, number.le
        assert low is not None, path
        assert high is not None, path
        taken = set()
        for value in {*ODD, low, high, int(low) - 1, int(high) + 1}:
            answer = status(parse, base | nested(path, value))
            assert answer == 400 or (low <= value <= high and value != number.gt), (path, value)
            taken |= {value} if answer == 200 else set()
        if path not in NEED_OTHERS:
            assert taken >= {low, high} - {number.gt}, (path, taken)
        wrong: list[object] = [True, "x", [], {}] if path[-1] != KEY else ["x", "", "1.5", "1e3", "True"]
        if isinstance(number, inspect.IntType):
            wrong += [0.5] if path[-1] != KEY else []
        for other in wrong:
            if not (path[:1] == ("prompt",) and isinstance(other, str | list)):
                assert status(parse, base | nested(path, other)) == 400, (path, other)


def test_numbers_are_found_where_they_are() -> None:
    found = {kind.__name__: [path for path, _ in numbers(inspect.type_info(kind))] for kind, _, _ in BODIES}
    assert found["DetokenizeRequest"] == [("tokens", 0)]
    assert found["TokenizeRequest"] == []
    assert {("prompt", 0), ("prompt", 0, 0), ("logit_bias", KEY), ("logit_bias", "5"), ("stop_token_ids", 0)} <= {
        *found["CompletionRequest"]
    }
    assert len(found["ChatRequest"]) == 19


@pytest.mark.parametrize("count", [21, 10**9, -1, -2, 49152, 49151, 2**63])
def test_log_probabilities_beyond_the_most_are_refused_under_each_of_their_names(count: int) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        assert status(parse_completion, BASE[COMPLETIONS] | {name: count}) == 400
    for body in ({"logprobs": True, "top_logprobs": count}, {"prompt_logprobs": count}, {"logprobs": count}):
        assert status(parse_chat, BASE[CHAT] | body) == 400


def test_decoded_numbers_are_those_that_were_sent() -> None:
    body = BASE[COMPLETIONS] | {"logit_bias": {"7": -100, "2147483647": 100}, "stop_token_ids": [0, 2**31 - 1]}
    request = msgspec.json.decode(json.dumps(body), type=CompletionRequest)
    assert request.logit_bias == {7: -100.0, 2147483647: 100.0}
    assert request.stop_token_ids == [0, 2**31 - 1]
