"""The replayed tokens of the HTTP benchmark."""

from __future__ import annotations

import socket
from array import array
from collections import deque
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from bench_api import RESTARTS, Client, completion_request, even_shares, num_replaced
from replay_runner import STAMP, STAMP_BYTES, ReplayRunner, WorkerRows

from asyncengine import __version__
from asyncengine.api.exposition import Family, Sample, exposition
from asyncengine.errors import StartupError
from asyncengine.sampling import SamplingParams
from asyncengine.wire.answers import Deltas
from asyncengine.wire.base import Finish
from asyncengine.wire.pipes import Pipes, Sender
from asyncengine.wire.requests import Generate, Relink


class Pipe:
    def __init__(self) -> None:
        self.full = False
        self.sent: list[Deltas] = []

    def writable(self) -> bool:
        return not self.full

    def try_send(self, message: Deltas) -> bool:
        self.sent.append(message)
        return True


def request(rid: int, max_tokens: int) -> Generate:
    return Generate(rid, bytes(8), SamplingParams(), max_tokens, b"", "")


def test_rows_that_find_their_pipe_full_get_the_texts_of_all_steps_at_once() -> None:
    pipe = Pipe()
    rows = WorkerRows(cast(Sender, pipe))
    stamps: deque[str] = deque(STAMP.format(float(step)) for step in range(1, 4))
    rows.open([request(7, 9)])
    pipe.full = True
    rows.step()
    rows.send(stamps)
    rows.open([request(8, 2)])
    rows.step()
    rows.step()
    pipe.full = False
    rows.send(stamps)
    (sent,) = pipe.sent
    assert array("Q", sent.rids).tolist() == [7, 8]
    assert sent.text == b"000001.000000 000002.000000 000003.000000 000002.000000 000003.000000 "
    assert array("i", sent.text_ends).tolist() == [3 * STAMP_BYTES, 5 * STAMP_BYTES]
    assert array("i", sent.ids_ends).tolist() == [3, 5]
    assert [*sent.finish] == [0, Finish.LENGTH]
    assert rows.rids.tolist() == [7]
    assert rows.left.tolist() == [6]
    rows.keep(rows.rids != np.uint64(7))
    rows.send(stamps)
    assert len(pipe.sent) == 1


def test_the_client_counts_tokens_events_and_delay() -> None:
    client = Client(("127.0.0.1", 1), [], 1, 0.0, 1e9)
    client._sent[3] = 9.0
    head = b"HTTP/1.1 200 OK\r\nServer: x.y\r\n\r\n"
    mode = b'"system_fingerprint":"asyncengine-%s/float32/cpu/default"' % __version__.encode()
    event = b'data: {%s,"choices":[{"text":"000009.500000 000009.700000 "}]}\n\n' % mode
    client._count(3, head + event, 10.0)
    client._count(3, event + event, 11.0)
    assert (client.events, client.tokens) == (3, 6)
    assert client.late_ms == [500.0, 1500.0]
    assert client.ttft_ms == [1000.0]


def test_requests_and_shares_are_exact() -> None:
    head, _, body = completion_request(3, 5).partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head
    assert b'"max_tokens": 5' in body
    assert even_shares(10, 4) == [3, 3, 2, 2]
    assert even_shares(2, 4) == [1, 1]


def test_streams_that_break_off_are_counted_and_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(("127.0.0.1", 1), [], 3, 0.0, 1e9)
    opened: list[None] = []
    monkeypatch.setattr(client, "_open", lambda: opened.append(None))
    ends = {b"data: [DO": b"NE]\n\n", b'data: {"error":{}}': b"\n\n", b"data: {": b""}
    for begin, rest in ends.items():
        ours, theirs = socket.socketpair()
        client._sockets[ours.fileno()], client._tails[ours.fileno()] = ours, b""
        for part in filter(None, (begin, rest)):
            theirs.sendall(part)
            client._read(ours.fileno())
        if ours.fileno() >= 0:
            if not rest:
                ours.sendall(b"unread, so that the end is a reset")
            theirs.close()
            client._read(ours.fileno())
    assert (client.requests, client.lost, len(opened)) == (1, 2, 3)
    assert client._sockets == {}


def test_a_replay_ends_when_a_process_was_lost(tmp_path: Path) -> None:
    pipes = Pipes(tmp_path)
    runner = ReplayRunner(pipes, max_rows=4, step_s=1.0)
    pipes.sender("runner.requests").send(Relink("api_worker", 1, 1))
    runner._poller.wait(60_000)
    with pytest.raises(StartupError, match="api_worker 1 was lost, which ends a replay"):
        runner._drain()
    pipes.close()


def test_replaced_processes_are_counted_by_the_page_of_metrics() -> None:
    page = exposition(
        [Family(f"{RESTARTS[:-1]}", "counter", "", [Sample(2, {"role": "a"}), Sample(1, {"role": "b"})])], {}
    )
    assert num_replaced(page.decode()) == 3
    assert num_replaced("# HELP asyncengine:sidecar_restarts_total x\n") == 0
