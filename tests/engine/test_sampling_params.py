"""What one request may ask of its generation, and how it is told when it asks for more."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams, Structured

NAN, INFINITY = float("nan"), float("inf")
FULL_BIAS = tuple((token, 1.0) for token in range(MAX_LOGIT_BIAS))


@pytest.mark.parametrize(
    ("asked", "same"),
    [
        ({"stop": "ab"}, {"stop": ("ab",)}),
        ({"stop": ["ab", "c"], "stop_token_ids": [5]}, {"stop": ("ab", "c"), "stop_token_ids": (5,)}),
        ({"stop": None, "stop_token_ids": None, "logit_bias": None}, {}),
        ({"logit_bias": {5: 1.0, 6: -2}}, {"logit_bias": ((5, 1.0), (6, -2))}),
        ({"logit_bias": [[5, 1.5]]}, {"logit_bias": ((5, 1.5),)}),
    ],
)
def test_lists_single_texts_and_mappings_are_taken_for_tuples(asked: dict[str, Any], same: dict[str, Any]) -> None:
    params = SamplingParams(**asked)
    assert params == SamplingParams(**same)
    assert hash(params) == hash(SamplingParams(**same))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("structured", ["x", {"type": "object"}, ("regex", "x")])
def test_a_structure_of_another_type_is_refused_by_name(structured: Any) -> None:
    with pytest.raises(InvalidRequestError, match="structured must be a Structured or None"):
        SamplingParams(structured=structured)
    no_text: Any = {"type": "object"}
    with pytest.raises(InvalidRequestError, match="the json_schema must be a text"):
        Structured("json_schema", no_text)


def test_nothing_is_adjusted_or_reported_unless_asked() -> None:
    params = SamplingParams()
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.logit_bias, params.logprobs) == ((), None)


@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
        {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 10},
        {"logit_bias": ((0, -100.0), (2**31 - 1, 100))},
        {"logit_bias": FULL_BIAS},
        {"logprobs": 0},
        {"logprobs": MAX_LOGPROBS},
    ],
)
def test_the_limits_themselves_are_allowed_and_survive_the_wire(asked: dict[str, Any]) -> None:
    params = SamplingParams(**asked)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.01),
        ("presence_penalty", NAN),
        ("presence_penalty", True),
        ("frequency_penalty", -2.01),
        ("frequency_penalty", INFINITY),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 10.5),
        ("repetition_penalty", NAN),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((2**31, 1.0),)),
        ("logit_bias", ((1.5, 1.0),)),
        ("logit_bias", ((True, 1.0),)),
        ("logit_bias", ((5, 100.5),)),
        ("logit_bias", ((5, -101),)),
        ("logit_bias", ((5, NAN),)),
        ("logit_bias", ((5, 1.0), (6, 1.0), (5, 1.0))),
        ("logit_bias", (*FULL_BIAS, (MAX_LOGIT_BIAS, 1.0))),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("logprobs", True),
        ("logprobs", 1.0),
        ("logit_bias", 5),
        ("logit_bias", [5, 6]),
        ("stop", 5),
        ("stop", [5]),
        ("stop", {"x"}),
        ("stop", [""]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", ["5"]),
        ("ignore_eos", "yes"),
        ("skip_special_tokens", 1),
        ("include_stop_str_in_output", None),
        ("n", np.int64(1)),
        ("temperature", np.float32(0.5)),
        ("temperature", np.float64(0.5)),
        ("temperature", 10**400),
        ("logit_bias", {5: np.float64(0.5)}),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
