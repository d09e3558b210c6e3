"""One server with a real gpu_runner, started as carelessly as can be, while what must not happen is tried on it.

Its keys are in a file and in the environment, its umask is 000, its model folder holds code, and from the first moment
on somebody asks whether it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chaos.malformed import MALFORMED
from chaos.processes import SIDECARS, family
from support.byte_tokenizer import EOS, byte_tokenizer
from support.python_path import PYTHON_PATH
from support.random_model import write_config
from support.unused_port import unused_port

from asyncengine.api_keys import API_KEY_VARIABLE

FILE_KEY = "sentinel-of-the-file-5f1c"
ENVIRONMENT_KEY = "sentinel-of-the-environment-9ad2"
WRONG_KEY = "sentinel-of-a-stranger-77e0"
PROMPT = "zanzibar"
SECRETS = [text.encode() for text in (FILE_KEY, ENVIRONMENT_KEY, WRONG_KEY, PROMPT)]
MAX_QUEUED, ROWS = 8, 4
STATUS_LISTEN = "0A"
MOST_WAKE_UPS_A_SECOND = 150
"""A process has four heartbeats a second; one that polls each millisecond would wake up a thousand times."""
JSON = {"Content-Type": "application/json"}


class Guarded:
    def __init__(self, process: Process, port: int, folder: Path) -> None:
        self.process = process
        self.port = port
        self.temporary = folder / "t"
        self.log = folder / "log"
        self.http = aiohttp.ClientSession(
            f"http://127.0.0.1:{port}",
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {FILE_KEY}"},
        )

    def pids(self) -> dict[int, str]:
        return {process.pid: process.role for process in family(self.process.pid) if process.state != "Z"}

    async def post(self, path: str, body: dict[str, Any], key: str = FILE_KEY) -> tuple[int, Any]:
        async with self.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
            return response.status, await response.json()

    async def complete(self, max_tokens: int = 3, key: str = FILE_KEY, **fields: Any) -> tuple[int, Any]:
        body = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, **fields}
        return await self.post("/v1/completions", body, key)

    async def is_ready(self) -> bool:
        """Whether every API process says so, as well as 10 connections tell."""
        statuses = [await self.ready() for _ in range(10)]
        return all(status == 200 for status in statuses)

    async def ready(self) -> int:
        """Its status; 0 while nobody listens."""
        try:
            async with self.http.get("/ready", headers={"Connection": "close"}) as response:
                return response.status
        except aiohttp.ClientConnectorError:
            return 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name: sockets are below it."""
    with tempfile.TemporaryDirectory(prefix="g-") as path:
        yield Path(path)


def poisoned_model(folder: Path, marker: Path) -> Path:
    """A model whose files name code that lies beside them."""
    folder.mkdir()
    code = f"open({str(marker)!r}, 'a').write(__file__)\nclass X: pass\n"
    for name in ("modeling_x", "configuration_x", "tokenizer_x", "processing_x", "x", "__init__", "setup"):
        (folder / f"{name}.py").write_text(code)
    classes = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "modeling_x.X")
    extra = {"auto_map": {**classes, "AutoTokenizer": ["tokenizer_x.X", None]}, "trust_remote_code": True}
    write_config(
        folder, vocab_size=EOS + 1, hidden_size=64, intermediate_size=64, num_hidden_layers=1, eos_token_id=EOS,
        model_file="x.py", custom_pipelines={"x": {"impl": "x.X"}}, **extra,
    )  # fmt: skip
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config", "processor_config", "preprocessor_config", "generation_config"):
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        (folder / f"{name}.json").write_text(json.dumps(extra | {"tokenizer_class": "X", "chat_template": template}))
    return folder


@asynccontextmanager
async def started(folder: Path, model: Path) -> AsyncIterator[Guarded]:
    (folder / "t").mkdir()
    keys = folder / "keys"
    keys.write_text(f"another-key-1\n{FILE_KEY}\n")
    port = unused_port()
    options = {
        "port": port, "device": "cpu", "load-format": "dummy", "api-workers": 2, "api-key-file": keys,
        "max-num-seqs": ROWS, "max-queued-requests": MAX_QUEUED, "kv-cache-tokens": 4096, "max-crashes": 9,
    }  # fmt: skip
    environ = {"PYTHONPATH": PYTHON_PATH, "TMPDIR": str(folder / "t"), API_KEY_VARIABLE: ENVIRONMENT_KEY}
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncengine.cli", "serve", str(model)),
            *(word for name, value in options.items() for word in (f"--{name}", str(value))),
            env=os.environ | environ,
            cwd=model,
            umask=0,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    server = Guarded(process, port, folder)
    try:
        yield server
    finally:
        await server.http.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_nothing_leaks_opens_or_runs_that_should_not(folder: Path, tmp_path: Path) -> None:
    """One test of many steps: a server takes seconds to start."""
    marker = tmp_path / "marker"
    async with started(folder, poisoned_model(folder / "model", marker)) as server:
        await it_is_ready_when_a_request_succeeds_and_not_before(server)
        it_listens_on_its_port_only(server)
        await nobody_is_busy_while_nobody_asks(server)
        media_is_refused_and_nobody_is_asked_for_it(await media_answers(server))
        await texts_of_megabytes_are_refused(server)
        await more_than_may_wait_is_turned_away_and_the_rest_answered(server)
        await losses_and_malformed_requests(server)
        await no_secret_is_anywhere(server)
        server.process.terminate()
        assert await server.process.wait() == 0
    log = server.log.read_bytes()
    assert [secret for secret in SECRETS if secret in log] == []
    assert log.count(b"was replaced within") == 2
    assert b"everybody on this machine can read the API keys in " in log
    assert not marker.exists()
    assert list((folder / "t").iterdir()) == []


async def it_is_ready_when_a_request_succeeds_and_not_before(server: Guarded) -> None:
    seen = Counter[int]()
    async with asyncio.timeout(180):
        while (status := await server.ready()) != 200:
            seen[status] += 1
            await asyncio.sleep(0.05)
    status, body = await server.complete()
    assert (status, body.get("usage", body)["completion_tokens"]) == (200, 3)
    assert set(seen) <= {0, 503}
    assert (await server.complete(key=ENVIRONMENT_KEY))[0] == 200
    assert (await server.complete(key=WRONG_KEY))[0] == 401
    for path, status in (("/", 200), ("/console/key.js", 200), ("/console/timeline", 401), ("/metrics", 401)):
        async with server.http.get(path, headers={"Authorization": f"Bearer {WRONG_KEY}"}) as response:
            assert response.status == status


def it_listens_on_its_port_only(server: Guarded) -> None:
    inodes = set()
    for pid in server.pids():
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed just now, which no socket that listens is
                inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    listening, others = set(), []
    for name in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes and (name[:3] != "tcp" or words[3] == STATUS_LISTEN):
                (listening.add(words[1]) if name == "tcp" else others.append(line))
    assert listening == {f"0100007F:{server.port:04X}"}
    assert others == []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[6] in inodes and len(words) > 7:
            assert words[7].startswith(str(server.temporary)), "a name that others can reach"
    (run_dir,) = server.temporary.iterdir()
    assert run_dir.stat().st_mode & 0o777 == 0o700


async def nobody_is_busy_while_nobody_asks(server: Guarded) -> None:
    """By how often each process wakes up: how long it then takes is the machine's affair."""
    before, began = wake_ups(server), time.monotonic()
    await asyncio.sleep(2)
    rates = {pid: (count - before[pid]) / (time.monotonic() - began) for pid, count in wake_ups(server).items()}
    roles = server.pids()
    assert {roles[pid]: rate for pid, rate in rates.items() if rate > MOST_WAKE_UPS_A_SECOND} == {}


def wake_ups(server: Guarded) -> dict[int, int]:
    """How often the threads of each process have gone to sleep by themselves."""
    found = Counter[int]()
    for pid in server.pids():
        for task in Path(f"/proc/{pid}/task").iterdir():
            found[pid] += int(re.findall(r"\nvoluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text())[0])
    return found


async def media_answers(server: Guarded) -> tuple[list[tuple[int, Any]], list[str]]:
    """Answers to requests with media, and who came to fetch one."""
    visitors: list[str] = []

    async def visited(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visitors.append(str(writer.get_extra_info("peername")))
        writer.close()

    listener = await asyncio.start_server(visited, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    urls = (f"http://127.0.0.1:{port}/x.png", "file:///etc/passwd", "data:image/png;base64,AAAA", f"//127.0.0.1:{port}")
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts += [{"type": "image_url", "image_url": urls[0]}, {"type": "input_image", "image_url": urls[0]}]
    parts += [{"type": kind, kind: {"url": urls[0]}} for kind in ("audio_url", "video_url", "input_audio", "file")]
    answers = []
    for part in parts:
        text = {"type": "text", "text": PROMPT}
        messages = [{"role": "user", "content": [text, part]}]
        answers.append(await server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}))
    listener.close()
    await listener.wait_closed()
    return answers, visitors


def media_is_refused_and_nobody_is_asked_for_it(result: tuple[list[tuple[int, Any]], list[str]]) -> None:
    answers, visitors = result
    assert [status for status, _ in answers] == [400] * len(answers)
    assert {body["error"]["type"] for _, body in answers} == {"invalid_request_error"}
    assert visitors == []


async def texts_of_megabytes_are_refused(server: Guarded) -> None:
    for character in ("a", " ", "_", "😀"):
        whole = character * (8_000_000 // len(character.encode()))
        for text, expected in (
            (whole, (413, "request_too_large")),
            (whole[: len(whole) * 3 // 7], (400, "context_length_exceeded")),
        ):
            data = json.dumps({"prompt": text, "max_tokens": 1}, ensure_ascii=False).encode()
            async with server.http.post("/v1/completions", data=data, headers=JSON) as response:
                assert (response.status, (await response.json())["error"]["code"]) == expected


async def more_than_may_wait_is_turned_away_and_the_rest_answered(server: Guarded) -> None:
    assert (await server.complete(n=MAX_QUEUED + ROWS))[0] == 200
    status, body = await server.complete(n=MAX_QUEUED + ROWS + 1)
    assert (status, body["error"]["code"]) == (429, "queue_full")
    assert body["error"]["message"] == (
        "0 interactive and 0 background requests wait already, and --max-queued-requests is 8; this one has 13"
    )
    share = MAX_QUEUED // 2 + ROWS
    assert (await server.complete(n=share, service_class="background"))[0] == 200
    status, body = await server.complete(n=share + 1, service_class="background")
    assert (status, body["error"]["code"]) == (429, "queue_full")
    assert body["error"]["message"] == (
        "0 background requests wait already, and 4 may, half of --max-queued-requests; this one has 9"
    )

    async def ask() -> int:
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
        async with server.http.post("/v1/completions", json=body, headers={"Connection": "close"}) as response:
            answer = await response.json()
            if response.status == 429:
                assert int(response.headers["Retry-After"]) > 0
                assert answer["error"]["code"] == "queue_full"
            else:
                assert answer["usage"]["completion_tokens"] == 200
            return response.status

    statuses = Counter(await asyncio.gather(*(ask() for _ in range(50))))
    assert set(statuses) == {200, 429}
    assert statuses[200] >= MAX_QUEUED + ROWS


async def losses_and_malformed_requests(server: Guarded) -> None:
    """gpu_runner and the tokenizer are killed amid requests, all of which are answered; what is none is refused."""
    for role in ("gpu_runner", "tokenizer_proc"):
        (pid,) = [pid for pid, name in server.pids().items() if name == role]
        running = [asyncio.create_task(server.complete(100)) for _ in range(3)]
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(120):
            assert [status for status, _ in await asyncio.gather(*running)] == [200] * 3
            while pid in server.pids() or not await server.is_ready():
                await asyncio.sleep(0.05)
    for raw in MALFORMED:
        for key in (FILE_KEY, WRONG_KEY):
            line, _, rest = re.sub(rb"Authorization: .*\r\n", b"", raw).partition(b"\r\n")
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"\r\n".join((line, f"Authorization: Bearer {key}\r\nX-Api-Key: {key}".encode(), rest)))
            writer.write_eof()
            answer = await reader.read()
            assert answer[:10] in (b"HTTP/1.1 4", b"HTTP/1.0 4") or not answer
            assert not any(secret in answer for secret in SECRETS)
            writer.close()
    bad: list[dict[str, Any]] = [{"temperature": PROMPT}, {"seed": [PROMPT]}, {"stop": [1, PROMPT]}, {"n": "9" * 30}]
    for fields in bad:
        assert (await server.complete(**fields))[0] == 400
    assert (await server.post(f"/v1/{PROMPT}?key={FILE_KEY}", {}))[0] == 404
    async with server.http.post("/v1/completions", data=f'{{"prompt": "{PROMPT}", "key": "{FILE_KEY}" '.encode()) as r:
        assert r.status == 400


async def no_secret_is_anywhere(server: Guarded) -> None:
    for path in ("/metrics", "/openapi.json", "/v1/models", "/version", "/health", "/ready"):
        async with server.http.get(path) as response:
            assert response.status == 200
            body = await response.read()
        assert [secret for secret in SECRETS if secret in body] == [], path
    roles = Counter[str]()
    for pid, role in server.pids().items():
        roles[role] += 1
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert [secret for secret in SECRETS if secret in command] == [], role
        if role in (*SIDECARS, "api_worker"):
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            assert [secret for secret in (*SECRETS, API_KEY_VARIABLE.encode()) if secret in environ] == [], role
    assert roles == Counter({"server": 1, "api_worker": 2, "gpu_runner": 1, "tokenizer_proc": 1, "detokenizer_proc": 1})
