"""The console in a real browser, over a scripted engine: what a person sees, types and points at."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack, cast

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from api_server import COMPLETIONS, Server, eventually, serving
from fake_backend import ANSWER, FakeBackend
from support.chromium import Page, browser, find_chromium

from asyncengine.api_keys import digest_of
from asyncengine.chat_prompt import ChatPrompt
from asyncengine.config import ApiKey, HttpOptions
from asyncengine.delta import Delta
from asyncengine.errors import EngineError, InvalidRequestError
from asyncengine.request_terms import TenantTerms
from asyncengine.sampling import SamplingParams
from asyncengine.wire.accounting import RingWriter, StepRecord, TurnRecord

EXECUTABLE = find_chromium()
pytestmark = [
    pytest.mark.skipif(EXECUTABLE is None, reason="no chromium here (Debian, Ubuntu: apt install chromium)"),
    pytest.mark.asyncio(loop_scope="module"),
]
KEYS = ("first-key~!#$%", "second-key")
API_KEYS = [ApiKey(digest=digest_of(key), tenant=tenant) for key, tenant in zip(KEYS, "ab", strict=True)]
HOSTILE = '<img src="/nowhere" onerror="window.hacked = 1"><script>window.hacked = 2</script>&lt;b&gt; ${1}'


class GatedBackend(FakeBackend):
    """Goes on after `gate_after` deltas only when `gate` is open."""

    gate_after = -1

    def __init__(self) -> None:
        super().__init__()
        self.numbered = False
        self.gate = asyncio.Event()

    async def generate(
        self,
        prompt: str | Sequence[int] | ChatPrompt,
        params: SamplingParams | None = None,
        *,
        namespace: str = "",
        request_id: str = "",
        **terms: Unpack[TenantTerms],
    ) -> AsyncGenerator[Delta, None]:
        sent = 0
        async for delta in super().generate(prompt, params, namespace=namespace, request_id=request_id, **terms):
            if sent == self.gate_after:
                await self.gate.wait()
            yield delta
            sent += 1

    def messages(self) -> list[Any]:
        """Of the last request, as role and content."""
        prompt = self.calls[-1][0]
        assert isinstance(prompt, ChatPrompt)
        return [(message["role"], message.get("content")) for message in prompt.messages]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tab() -> AsyncIterator[Page]:
    assert EXECUTABLE is not None
    async with browser(EXECUTABLE) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="module")
async def backend() -> GatedBackend:
    return GatedBackend()


@pytest_asyncio.fixture(loop_scope="module")
async def page(tab: Page, backend: GatedBackend) -> AsyncIterator[Page]:
    """The console of `backend`, loaded; at the end the browser has nothing to complain of."""
    tab.complaints.clear()
    await tab.resize(1280, 800)
    async with serving(backend) as server:
        await tab.open(server.url)
        await tab.until("document.getElementById('state').dataset.state === 'ready'")
        yield tab
        await tab.open("about:blank")
    assert tab.complaints == []


@pytest.fixture
def keep() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def run_site(app: web.Application) -> web.AppRunner:
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


async def say(page: Page, text: str) -> None:
    await page.js("document.getElementById('prompt').focus()")
    await page.type(text)
    await page.press("Enter")


async def text_of(page: Page, selector: str) -> str:
    """Of the last such element."""
    text: str = await page.js(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)?.textContent")
    return text


async def answered(page: Page) -> None:
    await page.until(
        "document.getElementById('send').textContent === 'Send' && document.querySelectorAll('.assistant').length > 0"
    )


@pytest_asyncio.fixture(loop_scope="module")
async def guarded(tab: Page, backend: GatedBackend) -> AsyncIterator[tuple[Page, Server, list[ApiKey]]]:
    """The console of a server with the first of the keys, which nobody has told the page, and the keys that the server
    has. All that the browser complains of are refusals."""
    tab.complaints.clear()
    await tab.resize(1280, 800)
    keys = API_KEYS[:1]
    http = HttpOptions(api_keys=cast(tuple[ApiKey, ...], keys))  # a list, so that a test can change it meanwhile
    async with serving(backend, http) as server:
        await tab.open(server.url)
        await tab.until("!gate.hidden")
        yield tab, server, keys
        await tab.js("sessionStorage.clear()")
        await tab.open("about:blank")
    assert [text for text in tab.complaints if "status of 401" not in text] == []


async def enter(page: Page, text: str) -> None:
    await page.until("document.activeElement.id === 'key'")
    await page.type(text)
    await page.press("Enter")


async def test_a_browser_lets_no_page_of_another_site_use_the_server(tab: Page, backend: GatedBackend) -> None:
    async def evil_page(request: web.Request) -> web.Response:
        return web.Response(text="<!DOCTYPE html><p>evil</p>", content_type="text/html")

    elsewhere = web.Application()
    elsewhere.router.add_get("/", evil_page)
    runner = await run_site(elsewhere)
    async with serving(backend) as server:
        await tab.open(server.url.replace("127.0.0.1", "evil.example"))  # it is rebound
        rebound = json.loads(await tab.js("document.body.textContent"))["error"]
        assert rebound["code"] == "host_not_allowed"
        await tab.open(f"http://evil.example:{runner.addresses[0][1]}/")
        for path in ("/v1/requests/cmpl-1/cancel", COMPLETIONS):
            for site in (server.url, server.url.replace("127.0.0.1", "localhost")):
                ask = f"fetch('{site}{path}', {{method: 'POST', mode: 'no-cors', body: '{{\"prompt\": \"a\"}}'}})"
                assert await tab.js(f"{ask}.then((answer) => answer.type)") == "opaque"
        assert (backend.cancelled, backend.calls) == ([], [])
        await tab.open("about:blank")
    await runner.cleanup()
    tab.complaints.clear()  # the refusals


async def test_the_page_fits_every_screen_and_shows_the_engine(page: Page) -> None:
    assert await text_of(page, "#model") == "org/fake-model · cpu"
    assert await text_of(page, ".figure:nth-child(2) .value") == "2"
    assert await text_of(page, ".figure:nth-child(2) .note") == "3 waiting"
    for scheme in ("dark", "light"):
        await page.prefer(scheme)
        for width, height in ((375, 667), (768, 1024), (1280, 800), (3840, 2160)):
            await page.resize(width, height)
            for tab in ("engine", "chat"):
                await page.js(f"document.getElementById('tab-{tab}').click()")
                assert await page.js("document.documentElement.scrollWidth") <= width
                assert await page.js("document.documentElement.scrollHeight") <= height


async def test_a_conversation_streams_turn_by_turn_with_its_figures(page: Page, backend: GatedBackend) -> None:
    await page.js("document.getElementById('settings').open = true")
    for name, value in {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "max_tokens": 99,
        "seed": 3,
    }.items():
        await page.js(f"document.getElementById('{name}').select()")
        await page.type(str(value))
    await page.js("document.getElementById('system').focus()")
    await page.type("Be kind.")
    backend.gate_after = 3
    await page.js("document.getElementById('prompt').focus()")
    await page.type("one")
    await page.press("Enter", shift=True)
    assert backend.calls == []
    await page.type("two")
    await page.press("Enter")
    await page.until("document.querySelector('.assistant .text')?.textContent === 'Hello '")
    assert await page.js("document.getElementById('send').textContent") == "Stop"
    backend.gate.set()
    await answered(page)
    assert await text_of(page, ".assistant .text") == ANSWER
    stats = await text_of(page, ".stats")
    assert re.match(r"TTFT [\d.]+ m?s · 5 tokens · [\d.]+ tokens/s · finish stop", stats)
    params = backend.calls[-1][1]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.max_tokens, params.seed) == (99, 3)
    assert backend.messages() == [("system", "Be kind."), ("user", "one\ntwo")]
    await say(page, "three")
    await page.until("document.querySelectorAll('.assistant').length === 2")
    await answered(page)
    assert backend.messages()[1:] == [("user", "one\ntwo"), ("assistant", ANSWER), ("user", "three")]
    await page.js("localStorage.clear()")


async def test_text_is_shown_as_text_whatever_it_is(page: Page, backend: GatedBackend) -> None:
    backend.pieces = [HOSTILE, HOSTILE]
    images = await page.js("document.images.length")
    await say(page, HOSTILE)
    await answered(page)
    assert await text_of(page, ".user .text") == HOSTILE
    assert await text_of(page, ".assistant .text") == HOSTILE + HOSTILE
    backend.refusal = EngineError(HOSTILE)
    await say(page, "again")
    await page.until("document.querySelector('.error') !== null")
    assert await text_of(page, ".error") == HOSTILE
    assert await page.js("[document.images.length, document.scripts.length, typeof window.hacked]") == [
        images,
        1,
        "undefined",
    ]
    page.complaints.clear()  # the status 500


async def test_stop_ends_the_request_and_keeps_what_was_said(page: Page, backend: GatedBackend) -> None:
    backend.hold_after = 3
    await say(page, "hello")
    await page.until("document.querySelector('.assistant .text')?.textContent === 'Hello '")
    assert backend.open == 1
    await page.js("document.getElementById('send').click()")
    await eventually(lambda: backend.left_early == 1)
    await answered(page)
    assert "3 tokens" in await text_of(page, ".stats")
    assert "finish stopped" in await text_of(page, ".stats")
    assert await text_of(page, ".error") is None


async def test_a_refusal_and_a_failure_are_in_the_servers_words_and_can_be_tried_again(
    page: Page, backend: GatedBackend
) -> None:
    backend.refusal = InvalidRequestError("the prompt is too long")
    await say(page, "hello")
    await answered(page)
    assert await text_of(page, ".error") == "the prompt is too long"
    backend.refusal, backend.failure, backend.fail_after = None, EngineError("gpu_runner was killed"), 3
    await page.js("[...document.querySelectorAll('.doing button')].at(-1).click()")
    await page.until("document.querySelector('.assistant .text')?.textContent === 'Hello '")
    await answered(page)
    assert await text_of(page, ".error") == "gpu_runner was killed"
    backend.failure = None
    await page.js("[...document.querySelectorAll('.doing button')].at(-1).click()")
    await page.until(f"document.querySelector('.assistant .text')?.textContent === {json.dumps(ANSWER)}")
    await answered(page)
    assert await page.js("document.querySelectorAll('.error, .assistant').length") == 1
    assert backend.messages() == [("user", "hello")]
    page.complaints.clear()  # the status 400


async def test_reasoning_is_folded_and_calls_are_shown_and_answered(page: Page, backend: GatedBackend) -> None:
    backend.info = msgspec.structs.replace(backend.info, reasoning=True)
    call = '<tool_call>{"name": "weather", "arguments": {"city": "<b>Rome"}}</tool_call>'
    backend.pieces = ["<think>Where is", " it?</think>", "Let me look.", call]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    await page.js("document.getElementById('settings').open = true")
    await page.js("document.getElementById('tools').focus()")
    await page.type(json.dumps(tools))
    await say(page, "The weather?")
    await answered(page)
    assert await text_of(page, ".reasoning div") == "Where is it?"
    assert await page.js("document.querySelector('.reasoning').open") is False
    assert await text_of(page, ".assistant .text") == "Let me look."
    assert await text_of(page, ".call .name") == "weather"
    assert json.loads(await text_of(page, ".call pre")) == {"city": "<b>Rome"}
    assert "finish tool_calls" in await text_of(page, ".stats")
    await page.js("document.querySelector('.call textarea').focus()")
    await page.type("sunny")
    backend.pieces = ["It is sunny."]
    await page.js("document.querySelector('.results').click()")
    await page.until("document.querySelectorAll('.assistant').length === 2")
    await answered(page)
    assert await text_of(page, ".assistant .text") == "It is sunny."
    assert backend.messages() == [("user", "The weather?"), ("assistant", "Let me look."), ("tool", "sunny")]
    await page.js("localStorage.clear()")


async def test_whoever_scrolls_up_stays_there_until_he_wants_the_latest(page: Page, backend: GatedBackend) -> None:
    backend.pieces = ["line\n" * 60, "line\n" * 60]
    backend.gate_after = 1
    await say(page, "hello")
    at_end = "scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 2"
    await page.until(f"scroller.scrollHeight > 1200 && {at_end}")
    await page.js("scroller.scrollTop = 100")
    await page.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    backend.gate.set()
    await answered(page)
    await page.until("!latest.hidden")
    assert await page.js("scroller.scrollTop") == 100
    await page.js("latest.click()")
    await page.until(f"latest.hidden && {at_end}")


async def test_lanes_show_what_the_processes_just_did(
    page: Page, backend: GatedBackend, keep: ExitStack, tmp_path: Path
) -> None:
    loop, api = RingWriter(tmp_path, "gpu_runner", 0, StepRecord), RingWriter(tmp_path, "engine", 0, TurnRecord)
    keep.callback(loop.close)
    keep.callback(api.close)
    backend.run_dir = tmp_path
    left, top, width, height = await page.js(
        "(({ left, top, width, height }) => [left, top, width, height])(lanes.getBoundingClientRect())"
    )

    async def tips(lane: int) -> list[str]:
        """What is told of the places along a lane, from left to right."""
        found: list[str] = []
        for x in range(140, int(width), 16):
            await page.move(left + x, top + 16 + lane * (height - 24) / 5)
            told = await page.js("tip.hidden ? '' : tip.textContent")
            if told and told not in found:
                found.append(told)
        return found

    device: list[str] = []
    step = 0
    while not device:  # the record has come and is not yet too old, unless this machine is very slow
        step += 1
        times = [time.monotonic_ns() + 200_000_000 * (k - 7) for k in range(8)]
        loop.write((step, 8, 8, 3, 8, 0, *times[:3], 0, *times[4:8], step, times[2], times[6], 1, 0))
        api.write((times[1], times[2], times[6], 1, 8, 1, 0))
        await asyncio.sleep(2)  # what is drawn is as old as a step takes, and a little more
        await page.js("pause.click()")
        device = await tips(0)
        if not device:
            await page.js("pause.click()")
    assert device == [f"prefill  800 ms\nstep {step}, 8 rows"]
    phases = [("drain", 200), ("plan", 200), ("launch", 400), ("wait", 200), ("commit", 200), ("send", 200)]
    assert await tips(1) == [f"{phase}  {ms} ms\nstep {step}" for phase, ms in phases]
    assert await tips(2) == ["read  200 ms\n1 message, 8 tokens", "write  800 ms\n1 message, 8 tokens"]
    await page.move(1, 1)
    await page.js("lanes.focus()")
    await page.press("ArrowDown")
    await page.press("ArrowDown")
    await page.until("said.textContent.startsWith('gpu_runner: ')")
    assert await page.js("[pause.textContent, tip.hidden]") == ["Resume", False]
    await page.press(" ")
    assert await page.js("[pause.textContent, tip.hidden]") == ["Pause", True]


async def test_the_page_asks_for_a_key_until_the_server_knows_it_and_shows_it_in_every_request(
    guarded: tuple[Page, Server, list[ApiKey]], backend: GatedBackend
) -> None:
    page, server, _ = guarded
    assert await page.js("[document.getElementById('key').type, rooms.inert, state.dataset.state]") == [
        "password",
        True,
        "starting",
    ]
    await page.js("performance.clearResourceTimings()")
    await enter(page, "no-such-key")
    await page.until("document.getElementById('key-refused').textContent !== ''")
    assert await text_of(page, "#key-refused") == "The server does not know this key."
    for width, height in ((375, 667), (1280, 800)):
        await page.resize(width, height)
        assert await page.js("document.documentElement.scrollWidth") <= width
        assert await page.js("document.getElementById('key-form').getBoundingClientRect().right") <= width
    await enter(page, f" {KEYS[0]} ")
    await page.until("state.dataset.state === 'ready' && gate.hidden && !rooms.inert")
    await say(page, "hello")
    await answered(page)
    assert await text_of(page, ".assistant .text") == ANSWER
    assert backend.terms[-1].tenant == "a"
    urls = [server.url, *await page.js("performance.getEntriesByType('resource').map(({ name }) => name)")]
    kept = await page.js("[location.href, document.cookie, JSON.stringify(localStorage), document.body.innerHTML]")
    assert not [text for text in (*urls, *kept) if "key~" in text or "such-key" in text]
    assert await page.js("[document.getElementById('key').value, Object.values(sessionStorage)]") == ["", [KEYS[0]]]
    await page.open(server.url)  # again, in this tab
    await page.until("state.dataset.state === 'ready'")
    assert await page.js("gate.hidden") is True


async def test_a_key_that_is_known_no_more_is_asked_for_again_and_the_conversation_goes_on(
    guarded: tuple[Page, Server, list[ApiKey]], backend: GatedBackend
) -> None:
    page, _, keys = guarded
    await enter(page, KEYS[0])
    await page.until("state.dataset.state === 'ready'")
    await say(page, "one")
    await answered(page)
    keys[:] = API_KEYS[1:]
    await page.js("document.querySelector('.example').click()")
    await page.until("!gate.hidden")
    await enter(page, KEYS[1])
    await page.until("document.querySelectorAll('.assistant').length === 2")
    await answered(page)
    assert await text_of(page, ".assistant .text") == ANSWER
    assert await page.js("document.querySelector('.error')") is None
    example = await text_of(page, ".example:first-child")
    assert backend.messages() == [("user", "one"), ("assistant", ANSWER), ("user", example)]
    assert [terms.tenant for terms in backend.terms] == ["a", "b"]
