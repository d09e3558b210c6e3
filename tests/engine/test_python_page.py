"""The code of docs/python.md runs as it stands, with the scripted runner, which gives back the prompt."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import running
from support.python_path import PYTHON_PATH

from asyncengine.supervisor import Supervisor

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
MODULES = {"gpu_runner": "support.scripted_runner"}


class ScriptedSupervisor(Supervisor):
    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options | {"modules": MODULES})  # type: ignore[arg-type]


@pytest.fixture
def url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="p-") as folder, running(Path(folder), "serve", "--port", "0") as command:
        yield command.read_until(r"Ready: \S+ at (\S+)")[1]
        command.process.terminate()
        command.finish()


def test_the_blocks_run_one_after_the_other(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    monkeypatch.setenv("ASYNCENGINE_SCRIPT", "{}")
    monkeypatch.setattr("asyncengine.engine.Supervisor", ScriptedSupervisor)
    printed = []
    namespace: dict[str, object] = {"__name__": "page"}
    for block in BLOCKS:
        exec(compile(block.replace("http://127.0.0.1:8000", url), str(PAGE), "exec"), namespace)
        printed.append(capsys.readouterr().out)
    batch, chat, engine, client = printed
    assert batch.splitlines() == [f"{text} -> {text} stop" for text in ("The capital of France is", "Once upon a time")]
    assert chat.count("What is the capital of France?") == chat.count("And of Italy?") == 2
    assert "[504, 505]" in chat
    assert engine.startswith("Once upon a time")
    assert "Name a colour." in engine
    models, *answers = client.splitlines()
    assert models == "['SmolLM2-135M-Instruct'] Health(state='ready', detail='')"
    assert answers == [
        "Once upon a time" + "0 times seven is",
        *(f"{number} times seven is" for number in range(1, 10)),
    ]
