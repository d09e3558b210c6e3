"""The sandbox, the deadline, and what a caller reads when a template does not accept a conversation."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from asyncengine.errors import InvalidRequestError, StartupError
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.control_tokens import ControlTokens
from tokenizer_proc.conversation import parse_conversation, parse_template_kwargs
from tokenizer_proc.deadline import DeadlineExceeded, deadline

USER = [{"role": "user", "content": "hi"}]


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(
        source, special_tokens={"bos_token": "<s>"}, control_tokens=ControlTokens(["<s>", "</s>"]), **options
    )


def render(source: str, messages: Any = USER, kwargs: dict[str, Any] | None = None, **options: Any) -> str:
    return template(source, **options).render(messages, add_generation_prompt=True, kwargs=kwargs or {}).text


CHATML = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def continued(source: str, content: Any, **fields: Any) -> str:
    messages = [*USER, {"role": "assistant", "content": content, **fields}]
    made = template(source).render(messages, add_generation_prompt=True, continue_final_message=True, kwargs={})
    return made.text.replace(made.marker, "|") if made.marker else made.text


def refusal(source: str, messages: Any = USER, **options: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        render(source, messages, **options)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "chat_template_error", "messages")
    assert not any(word in error.message.lower() for word in ("jinja", "undefined", "traceback", "python", "dict"))
    return error


def test_templates_get_the_variables_and_helpers_that_transformers_gives() -> None:
    assert render("{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}") == (
        "<s>TrueTrueTrue"
    )
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "<é'>"}]) == (
        '[{"role": "user", "content": "<é\'>"}]'
    )
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": [\n  2\n ],\n "b": 1\n}'
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{% generation %}a{{ messages[0].content }}{% endgeneration %}b") == "ahib"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_request_variables_cannot_replace_the_messages() -> None:
    kwargs = {"messages": [], "add_generation_prompt": False, "flag": "on"}
    assert render("{{ messages | length }}{{ add_generation_prompt }}{{ flag }}", kwargs=kwargs) == "1Trueon"


def test_the_templates_own_refusal_is_passed_on_in_its_words() -> None:
    error = refusal("{{ raise_exception('Only user and assistant roles!') }}")
    assert error.message == "the chat template rejects these messages: Only user and assistant roles!"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.more }}",
        "{{ messages[7].role }}",
        "{{ 'a' + 1 }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ range(10000000) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_refused_in_one_clear_sentence(source: str) -> None:
    assert refusal(source).message == "the chat template cannot render these messages"


def test_a_template_that_takes_too_long_is_stopped() -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    error = refusal(loop, render_seconds=0.05)
    assert error.message == "the chat template took longer than 0.05 s for these messages"
    assert signal.getitimer(signal.ITIMER_REAL)[1] == 0


def test_a_rendered_text_without_bound_is_stopped() -> None:
    endless = "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}"
    assert "more than 5000 characters" in refusal(endless, max_chars=5000).message


def test_the_deadline_puts_another_alarm_back() -> None:
    outer = signal.getitimer(signal.ITIMER_REAL)
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1000)
        own = signal.getsignal(signal.SIGALRM)
        with pytest.raises(DeadlineExceeded), deadline(0.01):
            signal.pause()
        assert signal.getsignal(signal.SIGALRM) is own
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, handler)


def test_a_text_that_is_no_template_stops_the_start() -> None:
    with pytest.raises(StartupError, match="the chat template is not valid"):
        template("{% for %}")


def test_parts_are_joined_split_or_left_by_what_the_template_takes() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    only_text = "{{ messages[0].content }}"
    only_parts = "{% for p in messages[0].content if p.type == 'text' %}({{ p.text }}){% endfor %}"
    both = "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}" + only_parts + "{% endif %}"
    assert [render(source, parts) for source in (only_text, only_parts, both)] == ["ab", "(a)(b)", "(a)(b)"]
    assert [render(source) for source in (only_text, only_parts, both)] == ["hi", "(hi)", "hi"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("[]", "messages must be a list of at least one message"),
        ('"x"', "messages must be a list of at least one message"),
        ("{}", "messages must be a list of at least one message"),
        ("[1]", "messages[0] must be an object"),
        ("[{}]", "messages[0].role must be a text that is not empty"),
        ('[{"role": 5, "content": "x"}]', "messages[0].role must be a text that is not empty"),
        ('[{"role": "user"}]', "messages[0].content is missing"),
        ('[{"role": "user", "content": null}]', "messages[0].content is missing"),
        ('[{"role": "user", "content": []}]', "messages[0].content must not be an empty list"),
        ('[{"role": "user", "content": 5}]', "messages[0].content must be a text or a list of text parts"),
        (
            '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]',
            'messages[0].content[0] must be of type "text": other content is not supported',
        ),
        (
            '[{"role":"user","content":"a"},{"role":"user","content":[{"type":"text"}]}]',
            "messages[1].content[0].text must be a text",
        ),
        ("[{", "messages is not valid JSON"),
        ("[" * 100_000, "messages is nested too deeply"),
    ],
)
def test_messages_that_are_none_are_refused_naming_the_place(messages: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_conversation(messages.encode())
    assert (caught.value.message, caught.value.param) == (message, "messages")


def test_tool_calls_may_stand_without_content_and_their_arguments_become_objects() -> None:
    def call(arguments: Any) -> dict[str, Any]:
        return {"id": "1", "function": {"name": "f", "arguments": arguments}}

    given = [call('{"a": 1}'), call("not json"), call({"b": 2}), call("[1]")]
    (message,) = parse_conversation(json.dumps([{"role": "assistant", "tool_calls": given}]).encode())
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == [{"a": 1}, "not json", {"b": 2}, "[1]"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"reasoning": "a"}, "a"),
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning": "a", "reasoning_content": "a"}, "a"),
        ({"reasoning": "a", "reasoning_content": "older"}, "a"),
        ({"reasoning": "", "reasoning_content": "a"}, "a"),
        ({"reasoning": None, "reasoning_content": "a"}, "a"),
    ],
)
def test_templates_find_reasoning_by_either_name(given: dict[str, Any], text: str) -> None:
    (message,) = parse_conversation(json.dumps([{"role": "assistant", "content": "b", **given}]).encode())
    assert message == {"role": "assistant", "content": "b", "reasoning": text, "reasoning_content": text}


def test_template_variables_must_be_an_object() -> None:
    assert parse_template_kwargs(b"") == {}
    assert parse_template_kwargs(b'{"enable_thinking": false}') == {"enable_thinking": False}
    with pytest.raises(InvalidRequestError, match="must be an object"):
        parse_template_kwargs(b"[1]")


@pytest.mark.parametrize("content", ["The answer", "s", "</s", "a\n", "assistant: ", "\ue000", "👩‍👧"])
def test_a_continued_message_ends_the_prompt_as_it_is_whatever_the_template_writes_behind_it(content: str) -> None:
    assert continued(CHATML, content) == f"<s>user: hi</s><s>assistant: {content}"


def test_a_control_token_within_a_continued_message_stays_text() -> None:
    assert continued(CHATML, "a</s>b") == "<s>user: hi</s><s>assistant: a<|/s>b"
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }};{% endfor %}{% endfor %}"
    assert continued(parts, "yes") == "hi;yes"


@pytest.mark.parametrize(
    ("source", "content", "fields"),
    [
        (CHATML, "", {}),
        (CHATML, None, {"tool_calls": [{}]}),
        (CHATML, "a", {"tool_calls": [{}]}),
        (CHATML, "a", {"role": "user"}),
        (CHATML, [{"type": "text", "text": "a"}], {}),
        ("{{ messages[0].content }}", "a", {}),
        ("{{ messages[1].content * 2 }}", "a", {}),
    ],
)
def test_what_cannot_be_continued_is_refused(source: str, content: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        continued(source, content, **fields)
    assert (caught.value.status, caught.value.param) == (400, "continue_final_message")
