"""The synchronous `LLM`, over the real tokenizer and detokenizer, with the scripted runner in place of a model: what
comes back is the prompt."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.processes import children_of
from support.command_line import all_gone
from support.python_path import PYTHON_PATH

from asyncengine import LLM, SamplingParams
from asyncengine.config import Role
from asyncengine.errors import EngineDeadError, InvalidRequestError, OverloadedError, StartupError

MODULES: dict[Role, str] = {"gpu_runner": "support.scripted_runner"}
EOS = 2
ENDLESS = SamplingParams(max_tokens=1900, ignore_eos=True)
TEXTS = ["one two three", "Grüße, 世界! 👨‍👩‍👧", "x", "a\n\nb"]


def make_llm(*, script: dict[str, object] | None = None, **options: Any) -> LLM:
    os.environ["ASYNCENGINE_SCRIPT"] = json.dumps({"endless_from": 1900} | (script or {}))
    return LLM("default", modules=MODULES, device="cpu", **options)


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("ASYNCENGINE_SCRIPT", "{}")
        yield


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """One for the tests that leave it as it was."""
    with make_llm(max_model_len=2048, max_num_seqs=16) as llm:
        yield llm


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def submitted(llm: LLM) -> int:
    return sum(llm._engine.totals().histograms["choices"].counts)


def is_idle(llm: LLM) -> bool:
    gauges = llm._engine.gauges()
    return gauges["running"] == gauges["waiting"] == gauges["open_streams"] == 0


def pids(llm: LLM) -> list[int]:
    return list(llm._engine._supervisor.pids().values())


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    texts = [f"{text} {number}" for number in range(100) for text in TEXTS]
    answers = llm.generate(texts, use_tqdm=False)
    assert [answer.prompt for answer in answers] == texts
    assert [[output.text for output in answer.outputs] for answer in answers] == [[text] for text in texts]


def test_an_answer_has_all_that_is_known_of_it(llm: LLM) -> None:
    prompts: list[str | list[int]] = [TEXTS[1], [40, 41]]
    (text, ids) = llm.generate(prompts, SamplingParams(logprobs=1), use_tqdm=False)
    (output,) = text.outputs
    assert text.prompt_token_ids is not None
    assert output.token_ids == [*text.prompt_token_ids, EOS]
    assert (output.index, output.finish_reason, output.stop_reason) == (0, "stop", None)
    assert output.logprobs is not None
    assert b"".join(entry.token for entry in output.logprobs).decode() == output.text == TEXTS[1]
    times = text.metrics
    assert times is not None
    assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    assert 0 < times.first_token_latency < 60
    assert (ids.prompt, ids.prompt_token_ids, ids.outputs[0].token_ids) == (None, [40, 41], [40, 41, EOS])
    assert (ids.error, ids.num_cached_tokens) == (None, 0)


@pytest.mark.parametrize("prompt", ["one two", [40, 41]])
def test_a_single_prompt_is_a_batch_of_one(llm: LLM, prompt: str | list[int]) -> None:
    assert len(llm.generate(prompt, use_tqdm=False)) == 1


def test_arrays_of_ids_are_prompts(llm: LLM) -> None:
    one: Any = np.array([40, 41])
    several: list[Any] = [one, [one], [one, [40, 41]], np.array([[40, 41]] * 2)]
    for prompts in several:
        answers = llm.generate(prompts, use_tqdm=False)
        found = [(answer.prompt_token_ids, answer.outputs[0].token_ids, answer.error) for answer in answers]
        assert found == [([40, 41], [40, 41, EOS], None)] * (1 if prompts is one else len(prompts))


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == llm.chat([], use_tqdm=False) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=1), SamplingParams(n=3), SamplingParams(stop=(" thr",))]
    cut, three, stopped = llm.generate(["one two three"] * 3, params, use_tqdm=False)
    assert [(output.text, output.finish_reason) for output in cut.outputs] == [("one", "length")]
    assert [(output.index, output.text) for output in three.outputs] == [(k, "one two three") for k in range(3)]
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("one two", " thr")
    with pytest.raises(InvalidRequestError, match="there are 2 prompts and 1 sampling_params"):
        llm.generate(["a", "b"], params[:1], use_tqdm=False)


def test_conversations_go_through_the_chat_template(llm: LLM) -> None:
    conversation: list[dict[str, object]] = [{"role": "user", "content": "Grüße!"}]
    params = SamplingParams(skip_special_tokens=False)
    answers = llm.chat([conversation, conversation], params, use_tqdm=False)
    assert len(answers) == 2
    assert llm.chat(conversation, params, use_tqdm=False)[0].outputs == answers[0].outputs
    assert answers[1].prompt is not None
    assert answers[1].prompt.endswith("<|im_start|>user\nGrüße!<|im_end|>\n<|im_start|>assistant\n")
    assert answers[1].outputs[0].text.startswith(answers[1].prompt)
    (open_ended,) = llm.chat(conversation, params, use_tqdm=False, add_generation_prompt=False)
    assert open_ended.prompt is not None
    assert open_ended.prompt.endswith("Grüße!<|im_end|>\n")
    begun: list[dict[str, object]] = [*conversation, {"role": "assistant", "content": "Guten"}]
    (continued,) = llm.chat(begun, params, use_tqdm=False, continue_final_message=True)
    assert continued.prompt is not None
    assert continued.prompt.endswith("Grüße!<|im_end|>\n<|im_start|>assistant\nGuten")


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {"prompt": "abc"}, iter(["abc"])])
def test_what_are_no_prompts_or_no_parameters_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompts must be one prompt or a list of them"):
        llm.generate(prompts, use_tqdm=False)
    wrong: Any = {"n": 1}
    with pytest.raises(InvalidRequestError, match="sampling_params must be SamplingParams, or a list of them"):
        llm.generate("x", wrong, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="params must be SamplingParams"):
        llm.generate("x", [wrong], use_tqdm=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_tokens'"):
        llm.generate("x", use_tqdm=False, max_tokens=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("messages", [None, "hello", {"role": "user", "content": "x"}, ["hello"], [[], 5]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages must be one conversation"):
        llm.chat(messages, use_tqdm=False)


def test_an_answer_and_an_error_can_be_copied_to_another_process(llm: LLM) -> None:
    (answer,) = llm.generate(TEXTS[0], SamplingParams(logprobs=1, n=2), use_tqdm=False)
    (refused,) = llm.generate("x " * 2048, use_tqdm=False)
    assert copy.deepcopy(answer) == answer
    told, error = refused.error, copy.deepcopy(refused).error
    assert told is not None
    assert error is not None
    assert type(error) is InvalidRequestError
    assert (error.message, error.code, error.param) == (told.message, "context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("prompt", "params", "code"),
    [
        ("", None, "empty_prompt"),
        ([], None, "empty_prompt"),
        ([1, 49152], None, "invalid_token_id"),
        (["a"], None, "invalid_token_id"),
        ([5] * 2048, None, "context_length_exceeded"),
        ([5] * 2000, SamplingParams(max_tokens=49), "context_length_exceeded"),
        ("a\ud800", None, "invalid_unicode"),
        ("a", SamplingParams(priority=1), "unsupported_parameter"),
    ],
)
def test_a_prompt_known_to_be_wrong_is_named_before_anything_runs(
    llm: LLM, prompt: Any, params: SamplingParams | None, code: str
) -> None:
    before = submitted(llm)
    with pytest.raises(InvalidRequestError, match=r"^prompts\[2\]") as raised:
        llm.generate(
            ["a", [1], prompt, ""], [params or SamplingParams() if k == 2 else SamplingParams() for k in range(4)]
        )
    assert (raised.value.code, raised.value.param) == (code, "prompts[2]")
    assert submitted(llm) == before


def test_a_text_that_turns_out_too_long_has_an_error_and_the_others_their_answers(llm: LLM) -> None:
    first, long, last = llm.generate(["one", "x " * 2500, "two"], use_tqdm=False)
    assert isinstance(long.error, InvalidRequestError)
    assert (long.error.code, long.outputs) == ("context_length_exceeded", [])
    assert (first.error, last.error) == (None, None)
    assert (first.outputs[0].text, last.outputs[0].text) == ("one", "two")


def test_prompts_wait_here_while_the_engine_has_no_room(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    subscribe = llm._engine.subscribe
    refused: list[object] = []

    def now_and_then(*args: Any, **options: Any) -> Any:
        if len(refused) < 5:
            refused.append(args)
            raise OverloadedError("no room")
        return subscribe(*args, **options)

    monkeypatch.setattr(llm._engine, "subscribe", now_and_then)
    assert [answer.outputs[0].text for answer in llm.generate(TEXTS, use_tqdm=False)] == TEXTS
    assert len(refused) == 5


def test_no_more_than_a_bounded_number_is_under_way(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    subscribe, most = llm._engine.subscribe, 0

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal most
        stream = subscribe(*args, **options)
        most = max(most, llm._engine.gauges()["open_streams"])
        return stream

    monkeypatch.setattr(llm._engine, "subscribe", counting)
    monkeypatch.setattr("asyncengine.batch.PROMPT_BYTES_UNDER_WAY", 20 * 40)
    ids = [[token] * 10 for token in range(100, 200)]
    answers = llm.generate(ids, use_tqdm=False)
    assert [answer.outputs[0].token_ids[:-1] for answer in answers] == ids
    assert most == 20, "at 40 bytes a prompt"


async def test_it_works_within_a_running_event_loop(llm: LLM) -> None:
    assert llm.generate("one two", use_tqdm=False)[0].outputs[0].text == "one two"


async def test_threads_may_share_it(llm: LLM) -> None:
    batches = await asyncio.gather(
        *(asyncio.to_thread(llm.generate, [f"{name} {k}" for k in range(20)], use_tqdm=False) for name in TEXTS)
    )
    assert [[a.outputs[0].text for a in batch] for batch in batches] == [
        [f"{name} {k}" for k in range(20)] for name in TEXTS
    ]


def test_the_bar_counts_requests_and_tokens(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["one two", "x " * 2500])
    bar = capsys.readouterr().err.split("\r")[-1]
    assert "requests: 100%" in bar
    assert "2/2" in bar
    assert bar.count(" tok/s") == 2
    assert "1 failed" in bar


def test_an_interrupt_aborts_everything_and_the_engine_goes_on(llm: LLM) -> None:
    def interrupt() -> None:
        until(lambda: llm._engine.gauges()["open_streams"] == 40)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[50 + k] for k in range(40)], ENDLESS, use_tqdm=False)
    thread.join()
    assert llm._engine._requests.count == 0
    until(lambda: is_idle(llm))
    assert llm.generate("one", use_tqdm=False)[0].outputs[0].text == "one"


PROGRAM = """
from asyncengine import LLM, SamplingParams
print("starting", flush=True)
llm = LLM(modules={"gpu_runner": "support.scripted_runner"}, device="cpu")
print("started", flush=True)
llm.generate([[7]] * 30, SamplingParams(max_tokens=1900, ignore_eos=True), use_tqdm=False)
"""


@pytest.mark.parametrize("stage", ["starting", "started"])
def test_an_interrupted_program_leaves_no_process_and_no_file(stage: str) -> None:
    with tempfile.TemporaryDirectory(prefix="l-") as folder:
        environ = os.environ | {"TMPDIR": folder, "ASYNCENGINE_SCRIPT": '{"endless_from": 1900}'}
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as program:
            assert program.stdout is not None
            assert any(line.strip() == stage for line in program.stdout)
            until(lambda: len(children_of(program.pid)) == 3)
            children = children_of(program.pid)
            program.send_signal(signal.SIGINT)
            _, err = program.communicate(timeout=60)
        assert program.returncode == -signal.SIGINT
        assert err.splitlines()[-1] == "KeyboardInterrupt"
        assert all_gone(children)
        assert [*Path(folder).iterdir()] == []


def test_a_program_that_ends_without_closing_it_leaves_no_word_and_no_file() -> None:
    with tempfile.TemporaryDirectory(prefix="l-") as folder:
        code = PROGRAM.replace("max_tokens=1900", "max_tokens=3")
        environ = os.environ | {"TMPDIR": folder}
        result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
        assert (result.returncode, result.stdout, result.stderr) == (0, "starting\nstarted\n", "")
        assert [*Path(folder).iterdir()] == []


USED_AFTER_THE_MAIN_THREAD = """
import concurrent.futures.thread, os, signal, threading, time
from asyncengine import LLM, SamplingParams

def wait(condition):
    while not condition():
        time.sleep(0.005)

def use():
    wait(lambda: concurrent.futures.thread._shutdown)
    supervisor = llm._engine._supervisor
    os.kill(supervisor.pids()["gpu_runner"], signal.SIGKILL)
    wait(supervisor.lives)
    print(llm.generate("once more", use_tqdm=False)[0].outputs[0].text)

llm = LLM(modules={"gpu_runner": "support.scripted_runner"}, device="cpu")
threading.Thread(target=use).start()
"""


def test_what_is_lost_while_only_other_threads_than_the_main_one_are_left_is_replaced() -> None:
    with tempfile.TemporaryDirectory(prefix="l-") as folder:
        environ = os.environ | {"TMPDIR": folder, "ASYNCENGINE_SCRIPT": "{}"}
        result = subprocess.run(
            [sys.executable, "-c", USED_AFTER_THE_MAIN_THREAD],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (result.returncode, result.stdout) == (0, "once more\n"), result.stderr
        assert [*Path(folder).iterdir()] == []


FORKED = """
import os, signal, sys
from asyncengine import LLM, EngineError

llm = LLM(modules={"gpu_runner": "support.scripted_runner"}, device="cpu")
if os.fork() == 0:
    signal.alarm(60)
    try:
        llm.generate("here", use_tqdm=False)
    except EngineError as error:
        sys.exit(error.code)
print(os.waitstatus_to_exitcode(os.wait()[1]), llm.generate("there", use_tqdm=False)[0].outputs[0].text)
"""


def test_a_forked_process_is_refused_and_ends_without_closing_it() -> None:
    environ = os.environ | {"ASYNCENGINE_SCRIPT": "{}"}
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "1 there\n", "wrong_process\n")


def test_a_closed_one_says_so_and_whoever_waits_is_told() -> None:
    llm = make_llm()
    children, errors = pids(llm), []

    def wait() -> None:
        try:
            llm.generate([[7]], ENDLESS, use_tqdm=False)
        except EngineDeadError as error:
            errors.append(error.message)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: llm._engine.gauges()["running"] == 1)
    llm.close()
    thread.join()
    llm.close()
    assert errors == ["the engine was closed"]
    assert all_gone(children)
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        llm.generate("a")


def test_one_that_nobody_refers_to_is_closed_from_whatever_thread() -> None:
    llm = make_llm()
    children, loop = pids(llm), llm._loop

    class Holder:
        def __init__(self, llm: LLM) -> None:
            self.llm, self.cycle = llm, self

    Holder(llm)
    del llm
    loop._loop.call_soon_threadsafe(gc.collect)
    assert all_gone(children)
    loop._thread.join(60)
    assert not loop._thread.is_alive()


def test_a_start_that_fails_leaves_nothing() -> None:
    threads = set(threading.enumerate())
    with pytest.raises(StartupError, match=r"^no memory$"):
        make_llm(script={"refuse_start": "no memory"})
    with pytest.raises(StartupError, match="max_num_seqs must be from 1 to 8192, got 0"):
        make_llm(max_num_seqs=0)
    with pytest.raises(TypeError, match="max_seqs"):
        make_llm(max_seqs=1)
    assert set(threading.enumerate()) <= threads
