"""The chaos runner itself: it must see what is wrong, and do the same again for the same seed."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from chaos.answers import Answer, WrongAnswerError, answer_of, departure, difference, part_of
from chaos.arrivals import read_trace, trace_times
from chaos.cases import KINDS, Lengths, make_cases
from chaos.exchange import Reply
from chaos.faults import Kill, Saboteur, draw_faults
from chaos.load import draw_arrivals
from chaos.malformed import REFUSED, refused
from chaos.report import percentile
from chaos.samples import History, slope


def event(text: str = "", finish: str | None = None, ids: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "token_ids": list(ids), "logprobs": None, "finish_reason": finish}
    return {"choices": [choice | more]}


def stream(*events: dict[str, Any] | str) -> Reply:
    texts = (event if isinstance(event, str) else json.dumps(event) for event in events)
    body = "".join(f"data: {text}\n\n" for text in texts).encode()
    return Reply(200, {"content-type": "text/event-stream; charset=utf-8"}, body, complete=True)


def whole(*, text: str = "one two", ids: tuple[int, ...] = (7, 8, 9)) -> Reply:
    body = json.dumps(event(text, "length", ids) | USAGE).encode()
    return Reply(200, {"content-type": "application/json"}, body, complete=True)


def usage(**details: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": details}}


USAGE = usage(cached_tokens=3, session_tokens=4, first_differing_token=2)
ENTRY = {"logprobs": {"tokens": ["a"], "token_logprobs": [-1.5], "top_logprobs": [{"a": -1.5}]}}


def test_a_stream_and_a_whole_answer_have_one_form() -> None:
    streamed = answer_of(
        stream(event("one", ids=(7,)), event(" two", "length", (8, 9)), {"choices": []} | USAGE, "[DONE]")
    )
    assert difference(streamed, answer_of(whole()), tolerance=0) == ""


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (stream(event("x", "stop"), {"choices": []} | USAGE), "0 times [DONE]"),
        (stream(event("x", "stop"), {"choices": []} | USAGE, "[DONE]", "[DONE]"), "2 times [DONE]"),
        (stream(event("x", "stop"), "[DONE]", {"choices": []} | USAGE), "the last event is"),
        (stream(event("x"), {"choices": []} | USAGE, "[DONE]"), "choice 0 has no finish_reason"),
        (stream(event("x", "stop"), event("y", "stop"), "[DONE]"), "choice 0 goes on after its finish_reason"),
        (stream(event("x", "stop"), "[DONE]"), "there is no usage"),
        (stream(event("x", "stop"), USAGE | {"choices": []}, USAGE | {"choices": []}, "[DONE]"), "a second usage"),
        (stream({"choices": []} | usage(cached_tokens=4), "[DONE]"), "the usage contradicts itself"),
        (
            stream({"choices": []} | usage(cached_tokens=0, first_differing_token=0), "[DONE]"),
            "the usage contradicts itself",
        ),
        (stream(event("x"), {"error": {"message": "lost"}}), "0 times [DONE]"),
        (stream(event("x"), {"error": {"message": "lost"}}, "[DONE]"), "an error within the answer"),
        (Reply(500, {"content-type": "application/json"}, b"{}", complete=True), "HTTP 500"),
        (Reply(200, {"content-type": "application/json"}, b"", broken="it ended"), "it ended"),
    ],
)
def test_what_is_no_complete_answer_is_told(reply: Reply, sentence: str) -> None:
    with pytest.raises(WrongAnswerError) as wrong:
        answer_of(reply)
    assert sentence in str(wrong.value)


def spoilt(change: Callable[[Answer], object]) -> str:
    answer = answer_of(stream(event("one", "length", (7, 8), **ENTRY), {"choices": []} | USAGE, "[DONE]"))
    right = answer_of(stream(event("one", "length", (7, 8), **ENTRY), {"choices": []} | USAGE, "[DONE]"))
    change(answer)
    return difference(answer, right, tolerance=0.001)


def test_one_character_token_number_or_reason_that_differs_is_found() -> None:
    assert spoilt(lambda answer: None) == ""
    assert "text is 'onee'" in spoilt(lambda answer: setattr(answer.choices[0], "text", "onee"))
    assert "token_ids is [7]" in spoilt(lambda answer: answer.choices[0].token_ids.pop())
    assert "finish_reason is 'stop'" in spoilt(lambda answer: setattr(answer.choices[0], "finish_reason", "stop"))
    assert "stop_reason is '.'" in spoilt(lambda answer: setattr(answer.choices[0], "stop_reason", "."))
    assert "usage is (3, 4)" in spoilt(lambda answer: setattr(answer, "usage", (3, 4)))
    assert "choices are [0, 1]" in spoilt(lambda answer: answer.choices.update({1: answer.choices[0]}))
    assert spoilt(lambda answer: answer.choices[0].logprobs.update(token_logprobs=[-1.5005])) == ""
    assert "logprobs are" in spoilt(lambda answer: answer.choices[0].logprobs.update(token_logprobs=[-1.502]))
    assert "logprobs are" in spoilt(lambda answer: answer.choices[0].logprobs["tokens"].append("a"))
    assert "logprobs are" in spoilt(lambda answer: answer.choices[0].logprobs.update(top_logprobs=[{"b": -1.5}]))


def test_what_a_leaving_client_had_must_be_the_answers_beginning() -> None:
    right = answer_of(whole())
    cut = stream(event("one", ids=(7,)))
    cut.body += b'data: {"choi'
    assert departure(part_of(cut), right) == ""
    assert departure(part_of(Reply()), right) == ""
    assert "text begins with 'oneone'" in departure(part_of(stream(event("one"), event("one"))), right)
    assert "token_ids begin with [7, 9]" in departure(part_of(stream(event("one", ids=(7, 9)))), right)


def test_a_refusal_is_a_status_or_the_connections_end() -> None:
    assert refused(Reply(400))
    assert refused(Reply(0, broken="the connection ended before an answer"))
    assert not refused(Reply(200))
    assert not refused(Reply(500))
    assert not refused(Reply(0, broken="no end after 120 s"))
    assert len(set(REFUSED)) == len(REFUSED)


def test_a_seed_draws_the_same_run_again_and_another_seed_another() -> None:
    trace = read_trace()

    def drawn(seed: int) -> tuple[object, ...]:
        arrivals = draw_arrivals(random.Random(seed), trace, rate=5, cases=9)
        faults = draw_faults(random.Random(seed), kills_per_second=2, stops_per_second=1)
        cases = make_cases(seed, 30, trace, Lengths(10, 10, 50, 20), KINDS)
        return list(itertools.islice(arrivals, 500)), list(itertools.islice(faults, 100)), cases

    assert drawn(3) == drawn(3)
    for first, second in zip(drawn(3), drawn(4), strict=True):
        assert first != second


def test_faults_and_arrivals_come_in_order_at_the_rates_asked_for() -> None:
    faults = list(
        itertools.takewhile(
            lambda fault: fault.at < 1000, draw_faults(random.Random(1), kills_per_second=2, stops_per_second=1)
        )
    )
    assert faults == sorted(faults)
    assert 1900 < sum(fault.kind == "kill" for fault in faults) < 2100
    assert 900 < sum(fault.kind == "stop" for fault in faults) < 1100
    times = list(itertools.islice(trace_times(read_trace(), rate=4, begin=100), 2000))
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] == pytest.approx(500, rel=0.01)
    assert not list(draw_faults(random.Random(1), kills_per_second=0, stops_per_second=0))


def test_a_kill_has_the_silences_that_lasted_across_it() -> None:
    saboteur = Saboteur(root=0)
    saboteur.kills = [Kill(10.0, "gpu_runner"), Kill(20.0, "tokenizer_proc")]
    for before, now in ((1.0, 9.0), (9.5, 10.5), (9.0, 12.0), (12.0, 19.0), (19.5, 20.5), (20.5, 30.0)):
        saboteur.heard(before, now)
    assert [kill.silences for kill in saboteur.kills] == [[1.0, 3.0], [1.0]]


def test_a_connection_counts_as_cut_if_its_process_was_killed_after_it_began() -> None:
    saboteur = Saboteur(root=0)
    saboteur.kills = [Kill(10.0, "api_worker", frozenset({501, 502})), Kill(20.0, "gpu_runner")]
    assert [saboteur.cut(port, 9.0) for port in (501, 502, 503)] == [True, True, False]
    assert not saboteur.cut(501, 11.0), "its port was another's before"


def test_growth_is_the_slope_after_the_warm_up_and_none_for_a_short_life() -> None:
    times = [2.0 * index for index in range(150)]
    steady = History("server", times, [10**8 + int(500 * at) if at >= 90 else int(10**6 * at) for at in times])
    assert steady.growth() == pytest.approx(500)
    assert History("server", times[:100], steady.rss_bytes[:100]).growth() is None
    assert slope([(0, 1), (1, 3), (2, 5)]) == 2
    assert [percentile([4, 1, 3, 2], share) for share in (0.5, 0.75, 0.99)] == [2, 3, 4]
