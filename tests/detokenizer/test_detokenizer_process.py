"""`python -m detokenizer_proc` as the supervisor starts it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from detokenizer_ring import WAIT_MS, Piece, Ring, Row, opened, receive_one
from support.tokenizers_cache import default_model_file

from asyncengine.config import EngineConfig, SidecarConfig
from asyncengine.tokenizer_file import load_tokenizer
from asyncengine.wire.base import Finish
from asyncengine.wire.pipes import Receiver, make_run_dir
from asyncengine.wire.reports import Fatal, Heartbeat, Progress, Ready, ToSupervisor
from asyncengine.wire.sidecar import write_config


def start(run_dir: Path, model_path: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", "detokenizer_proc"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    config = SidecarConfig(
        engine=EngineConfig(), role="detokenizer_proc", index=0, model_path=model_path, run_dir=str(run_dir)
    )
    write_config(process.stdin, config)
    process.stdin.flush()
    return process


def stop(process: subprocess.Popen[bytes]) -> int:
    """Close the process's life-line if it still runs; its exit code."""
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(timeout=60)


def first_of(receiver: Receiver, kind: type) -> object:
    while not isinstance(message := receive_one(receiver), kind):
        assert isinstance(message, Progress | Heartbeat), message
    return message


def test_a_real_tokenizer_is_served_until_the_process_is_told_to_end() -> None:
    run_dir = make_run_dir()
    ring = Ring(run_dir)
    supervisor = ring.pipes.receiver("supervisor", ToSupervisor)
    process = start(run_dir, str(default_model_file()))
    try:
        ready = first_of(supervisor, Ready)
        assert isinstance(ready, Ready)
        assert (ready.role, ready.index) == ("detokenizer_proc", 0)
        text = "The capital of France is Paris. 👨‍👩‍👧 你好"
        ids = load_tokenizer(str(default_model_file())).tokenizer.encode(text, add_special_tokens=False).ids
        ring.send(opens=(opened(7, 3, 99, prompt_tokens=4),))
        for token in ids:
            ring.send(Row(7, 3, token))
        ring.send(Row(7, 3, 2, Finish.STOP))
        received: list[Piece] = []
        while not received or received[-1].finish == Finish.NONE:
            received += ring.receive()
        assert "".join(piece.text for piece in received) == text
        assert [token for piece in received for token in piece.ids] == [*ids, 2]
        assert (received[-1].finish, received[-1].stop_reason, received[-1].prompt_tokens) == (Finish.STOP, 2, 4)
        beat = first_of(supervisor, Heartbeat)
        assert isinstance(beat, Heartbeat)
        assert set(beat.gauges) == {"streams", "pending", "stop_hits", "bad_ids", "malformed"}
        process.terminate()
        assert process.wait(timeout=60) == 0
    finally:
        stop(process)
        ring.pipes.close()
        shutil.rmtree(run_dir)


def test_a_missing_model_is_reported_in_one_sentence_and_ends_the_process() -> None:
    run_dir = make_run_dir()
    ring = Ring(run_dir)
    supervisor = ring.pipes.receiver("supervisor", ToSupervisor)
    process = start(run_dir, str(run_dir / "absent.gguf"))
    try:
        fatal = first_of(supervisor, Fatal)
        assert isinstance(fatal, Fatal)
        assert "absent.gguf" in fatal.message
        assert process.wait(timeout=WAIT_MS / 1000) == 1
    finally:
        stop(process)
        ring.pipes.close()
        shutil.rmtree(run_dir)


def test_the_process_imports_neither_torch_nor_numpy_nor_aiohttp() -> None:
    code = "import sys, detokenizer_proc.worker; print(sorted({'torch', 'numpy', 'aiohttp'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
