"""The `asyncengine` command, run as a user runs it, with the scripted runner in place of a model."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Command, all_gone, ask, running

from asyncengine.cli import build_parser, engine_config, main, ready_text
from asyncengine.config import ApiKey, EngineConfig, HttpOptions
from asyncengine.errors import StartupError
from asyncengine.run_dir import remove_stale

IMPORT_LIMIT_US = 100_000


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty directory whose name leaves room for the names of sockets; it must be left empty."""
    with tempfile.TemporaryDirectory(prefix="c-") as path:
        yield Path(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_answers_until_a_signal_and_leaves_nothing(short_path: Path, number: signal.Signals) -> None:
    names = ["--allowed-host", "llm.test", "--allowed-host", "llm2.test"]
    with running(short_path, "serve", "--port", "0", "--device", "cpu", *names) as command:
        url = command.read_until(r"Ready: SmolLM2-135M-Instruct at (\S+)")[1]
        children = command.children()
        assert len(children) == 3
        for name in ("llm.test", "llm2.test:80"):
            with urllib.request.urlopen(urllib.request.Request(f"{url}/ready", headers={"Host": name}), timeout=60):
                pass
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(urllib.request.Request(f"{url}/ready", headers={"Host": "evil.test"}), timeout=60)
        assert ask(url) == "one two three"
        with urllib.request.urlopen(f"{url}/", timeout=60) as response:
            assert b"<title>asyncengine</title>" in response.read()
        command.process.send_signal(number)
        code, _, err = command.finish()
    assert code == 0
    assert all_gone(children)
    assert re.search(r"gpu_runner +loading weights +\d+\.\d\d s", err)
    assert "Traceback" not in err


def test_a_signal_ends_a_stream_with_an_error_that_its_client_can_read(short_path: Path) -> None:
    options = ["--drain-timeout-seconds", "0"]
    with running(
        short_path, "serve", "--port", "0", *options, tokens=[40] * 8000, step_ms=5, max_model_len=8192
    ) as command:
        url = command.read_until(r"Ready: \S+ at (\S+)")[1]
        body = json.dumps({"prompt": "go", "max_tokens": 8000, "stream": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.readline().startswith(b"data: {")
            command.process.terminate()
            *_, last = response.read().decode().strip().split("\n\n")
        code, _, err = command.finish()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert code == 0
    assert "Traceback" not in err


def test_a_server_that_loses_too_many_processes_tells_its_clients_and_exits_with_code_1(short_path: Path) -> None:
    with running(
        short_path, "serve", "--port", "0", "--max-crashes", "1", tokens=[40] * 8000, step_ms=5, max_model_len=8192
    ) as command:
        url = command.read_until(r"Ready: \S+ at (\S+)")[1]
        body = json.dumps({"prompt": "go", "max_tokens": 8000, "stream": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.readline().startswith(b"data: {")
            children = command.children()
            os.kill(children[0], signal.SIGKILL)
            *_, last = response.read().decode().strip().split("\n\n")
        code, _, err = command.finish()
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "gpu_runner was killed by SIGKILL"
    assert code == 1
    assert err.splitlines()[-1] == "the engine has failed: gpu_runner was killed by SIGKILL"
    assert all_gone(children)


def test_a_server_killed_in_the_middle_of_a_stream_leaves_no_process_and_its_port_is_free(short_path: Path) -> None:
    with running(short_path, "serve", "--port", "0", tokens=[40] * 8000, step_ms=5, max_model_len=8192) as command:
        url = command.read_until(r"Ready: \S+ at (\S+)")[1]
        body = json.dumps({"prompt": "go", "max_tokens": 8000, "stream": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.readline().startswith(b"data: {")
            children = command.children()
            command.process.kill()
            command.process.wait()
        assert len(children) == 3
        assert all_gone(children)
        with socket.create_server(("127.0.0.1", int(url.rsplit(":", 1)[1]))):
            pass
        remove_stale(short_path)


def test_a_signal_during_the_start_leaves_nothing(short_path: Path) -> None:
    with running(short_path, "serve", "--port", "0") as command:
        deadline = time.monotonic() + 60
        while len(command.children()) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        children = command.children()
        command.process.terminate()
        code, out, err = command.finish()
    assert (code, out) == (0, "")
    assert all_gone(children)
    assert "Traceback" not in err


@pytest.mark.parametrize("workers", ["1", "2"])
def test_signals_that_do_not_stop_break_nothing_off(short_path: Path, workers: str) -> None:
    with running(short_path, "serve", "--port", "0", "--api-workers", workers) as command:
        command.read_until(r"Ready: ")
        children = command.children()
        numbers = itertools.cycle((signal.SIGTERM, signal.SIGINT))
        while command.process.poll() is None:
            command.process.send_signal(next(numbers))
            time.sleep(0.003)
        code, _, err = command.finish()
    assert code == 0
    assert all_gone(children)
    assert "Traceback" not in err


def test_a_signal_during_a_download_ends_it(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub, tempfile.TemporaryDirectory() as cache:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HOME", cache)
        with running(short_path, "serve", "org/name", "--port", "0") as command:
            asked, _ = hub.accept()  # and never answered
            children = command.children()
            command.process.terminate()
            code, out, err = command.finish()
        asked.close()
    assert (code, out, len(children)) == (0, "", 1)
    assert all_gone(children)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "script", "sentence"),
    [
        (["/nowhere/model.gguf"], {}, "there is no model file or folder at /nowhere/model.gguf"),
        ([], {"refuse_start": "one page needs 3 GB and 2 GB are free"}, "one page needs 3 GB and 2 GB are free"),
        (["--max-num-seqs", "0"], {}, "max_num_seqs must be from 1 to 8192, got 0"),
        (["--chat-template", "/nowhere.jinja"], {}, "cannot read the chat template /nowhere.jinja: "),
        (["--host", "0.0.0.0"], {}, "refusing to listen on 0.0.0.0, which other machines reach, without an API key: "),
        (["--port", "70000"], {}, "--port must be from 0 to 65535, got 70000"),
        (["--allowed-host", "http://a.test"], {}, "--allowed-host must be a name or an address, without a scheme and"),
    ],
)
def test_a_start_that_fails_is_one_line_and_code_1(
    short_path: Path, args: list[str], script: dict[str, object], sentence: str
) -> None:
    with running(short_path, "serve", "--port", "0", *args, **script) as command:
        code, out, err = command.finish()
    *progress, last = err.splitlines()
    assert (code, out) == (1, "")
    assert last.startswith(f"asyncengine: {sentence}")
    assert all(re.search(r"\d s$", line) for line in progress)


def test_connections_are_not_limited_to_the_shells_number_of_open_files(short_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        command = Command(short_path, "serve", "--port", "0")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    url = command.read_until(r"Ready: \S+ at (\S+)")[1]
    port = int(url.rsplit(":", 1)[1])
    stalled = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    assert ask(url) == "one two three"
    for connection in stalled:
        connection.close()
    command.process.terminate()
    assert command.finish()[0] == 0


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--temperature", "9"], "temperature must be from 0 to 2, got 9.0"),
        (["--max-tokens", "0"], "a chat's max_tokens must be at least 1, got 0"),
        (["--url", "garbage"], "base_url must begin with http:// or https://, got 'garbage'"),
    ],
)
def test_a_chat_with_a_wrong_option_is_one_line_and_code_1(short_path: Path, args: list[str], sentence: str) -> None:
    with running(short_path, "chat", *args) as command:
        code, out, err = command.finish()
    assert (code, out) == (1, "")
    assert err.startswith(f"asyncengine: {sentence}")
    assert err.count("\n") == 1


def test_a_port_in_use_is_one_line_and_code_1(short_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(short_path, "serve", "--port", str(port)) as command:
            code, out, err = command.finish()
    assert (code, out) == (1, "")
    assert err == f"asyncengine: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


def test_a_chat_streams_answers_and_remembers_the_conversation(short_path: Path) -> None:
    with running(short_path, "chat", "--system", "S", "--temperature", "0") as command:
        code, out, err = command.finish("first\n\n/clear\nsecond\n/exit\n")
    assert code == 0
    answers = re.findall(r"system\nS\nuser\n(.*)\nassistant\n", out)
    assert answers == ["first", "second"]
    assert len(re.findall(r"first token after \d+\.\d\d s, \d+ tokens", out)) == 2
    assert "Traceback" not in err


def test_a_chat_over_http_is_the_same_and_a_lost_server_is_one_line(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCENGINE_API_KEY", "the-key-of-server-and-chat")
    (short_path / "server").mkdir()
    (short_path / "chat").mkdir()
    with running(short_path / "server", "serve", "--port", "0") as server:
        url = server.read_until(r"Ready: \S+ at (\S+)")[1]
        with running(short_path / "chat", "chat", "--url", url, "--max-tokens", "500") as command:
            code, out, _ = command.finish("first\nsecond\n")
        assert code == 0
        assert "user\nfirst\nassistant\n" in out
        assert re.search(r"first token after \d+\.\d\d s, \d+ tokens", out)
        server.process.terminate()
        assert server.finish()[0] == 0
    with running(short_path / "chat", "chat", "--url", url) as command:
        code, out, err = command.finish()
    assert (code, out) == (1, "")
    assert err.startswith(f"asyncengine: there is no usable server at {url}: no answer from {url}: ")
    assert err.count("\n") == 1


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(short_path: Path) -> None:
    endless = {"tokens": [40] * 8000, "step_ms": 5, "max_model_len": 8192}
    with running(short_path, "chat", "--max-tokens", "4000", **endless) as command:
        assert command.process.stdin is not None
        assert command.process.stdout is not None
        command.process.stdin.write("go\n")
        command.process.stdin.flush()
        command.read_until("leaves")
        assert command.process.stdout.read(3)
        command.process.send_signal(signal.SIGINT)
        code, out, err = command.finish("/exit\n")
    assert code == 0
    assert "stopped; first token after" in out
    assert "Traceback" not in err


def test_options_become_the_configuration() -> None:
    args = "serve org/name --no-enable-prefix-caching --max-num-seqs 8 --dtype float32 --scheduling-policy shortest"
    parsed = build_parser().parse_args([*args.split(), "--chat-template", "t.jinja", "--kv-cache-tokens", "4096"])
    assert engine_config(parsed) == EngineConfig(
        model="org/name",
        enable_prefix_caching=False,
        max_num_seqs=8,
        dtype="float32",
        scheduling_policy="shortest",
        chat_template="t.jinja",
        kv_cache_tokens=4096,
    )
    assert engine_config(build_parser().parse_args(["chat"])) == EngineConfig()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "model must not be empty"),
        ({"model": None}, "model: Expected `str`, got `null`"),
        ({"served_model_name": ""}, "served_model_name must not be empty"),
        ({"max_num_seqs": "8"}, "max_num_seqs: Expected `int`, got `str`"),
        ({"max_num_seqs": 8.5}, "max_num_seqs: Expected `int`, got `float`"),
        ({"max_num_seqs": True}, "max_num_seqs: Expected `int`, got `bool`"),
        ({"batch_invariant": "no"}, "batch_invariant: Expected `bool`, got `str`"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization: Expected `float`, got `str`"),
        ({"chat_template": b"t.jinja"}, "chat_template: Expected `str | null`, got `bytes`"),
        ({"device": "tpu"}, "device must be one of auto, cuda, cpu, got 'tpu'"),
    ],
)
def test_a_configuration_of_wrong_values_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as refused:
        EngineConfig(**options)
    assert refused.value.message == message


def test_paths_may_be_paths() -> None:
    paths: dict[str, Any] = {"model": Path("/a/b"), "chat_template": Path("t.jinja")}
    assert EngineConfig(**paths) == EngineConfig(model="/a/b", chat_template="t.jinja")


def test_the_ready_line_holds_a_command_that_a_shell_can_run() -> None:
    text = ready_text("it's/a model", "::1", 8000)
    assert "Ready: it's/a model at http://[::1]:8000\n" in text
    echoed = subprocess.run(
        ["sh", "-c", text.split("\n", 1)[1].replace("curl", "printf '%s\\n'")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(echoed.stdout.splitlines()[-1])["model"] == "it's/a model"
    assert text.endswith("\n  # or in a browser: http://[::1]:8000/")
    assert ready_text("it's/a model", "::1", 8000, HttpOptions(console=False)) == text.rsplit("\n", 1)[0]
    http = HttpOptions(api_keys=(ApiKey(digest=b"", tenant="a"),))
    assert '-H "Authorization: Bearer $ASYNCENGINE_API_KEY"' in ready_text("m", "::1", 8000, http)


def test_help_needs_no_heavy_import(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as it:
        main(["serve", "--help"])
    assert it.value.code == 0
    assert "--max-num-batched-tokens" in capsys.readouterr().out
    loaded = modules_after("import asyncengine.cli; asyncengine.cli.build_parser()")
    assert not loaded & {"torch", "numpy", "aiohttp", "uvloop", "huggingface_hub", "tqdm", "zmq"}


def test_the_package_can_be_run_as_the_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "asyncengine", "--help"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("usage: asyncengine ")


def test_importing_the_package_loads_neither_torch_nor_aiohttp() -> None:
    assert not modules_after("import asyncengine") & {"torch", "numpy", "aiohttp"}
    everything = "from asyncengine import *; from asyncengine import AsyncEngine"
    assert not modules_after(everything) & {
        "torch",
        "numpy",
        "aiohttp",
        "transformers",
        "tokenizers",
        "huggingface_hub",
    }


def test_importing_the_package_takes_less_than_100_ms() -> None:
    # the quickest of several: the others may have met with a busy machine
    assert any(import_time_us() < IMPORT_LIMIT_US for _ in range(10))


def modules_after(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    return {*subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()}


def import_time_us() -> int:
    command = [sys.executable, "-X", "importtime", "-c", "import asyncengine"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (line,) = [line for line in report.splitlines() if line.endswith("| asyncengine")]
    return int(line.split("|")[1])
