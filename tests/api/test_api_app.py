"""Starting the server, and the routes that generate nothing."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest
from api_server import Server
from fake_backend import MODEL, FakeBackend

from asyncengine import __version__
from asyncengine.api.app import ACCEPTORS, bound_port, make_app, run_app, run_app_on
from asyncengine.engine_info import Health
from asyncengine.errors import StartupError


async def get(server: Server, path: str) -> tuple[int, dict]:
    async with server.session.get(server.url + path) as response:
        return response.status, await response.json()


async def test_models_are_listed_with_their_context_length(server: Server) -> None:
    status, models = await get(server, "/v1/models")
    (card,) = models["data"]
    assert (status, models["object"]) == (200, "list")
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == (
        MODEL,
        "model",
        "asyncengine",
        4096,
    )
    assert await get(server, f"/v1/models/{MODEL}") == (200, card)
    assert (card["batch_invariant"], card["system_fingerprint"]) == (
        False,
        f"asyncengine-{__version__}/float32/cpu/default",
    )
    status, answer = await get(server, "/v1/models/other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_batch_invariant_engine_says_so_and_each_of_its_answers_does(
    server: Server, backend: FakeBackend, path: str
) -> None:
    backend.info = msgspec.structs.replace(backend.info, batch_invariant=True, device="NVIDIA H200", dtype="bfloat16")
    _, card = await get(server, f"/v1/models/{MODEL}")
    fingerprint = f"asyncengine-{__version__}/bfloat16/NVIDIA H200/batch-invariant"
    assert (card["batch_invariant"], card["system_fingerprint"]) == (True, fingerprint)
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    async with server.session.post(server.url + path, json=body) as response:
        assert (await response.json())["system_fingerprint"] == fingerprint
    *chunks, _ = await server.events(path, body)
    assert {chunk["system_fingerprint"] for chunk in chunks} == {fingerprint}


async def test_health_tells_the_state_and_asks_nothing_of_the_engine(server: Server, backend: FakeBackend) -> None:
    assert await get(server, "/health") == (200, {"status": "ok"})
    backend.health = Health(state="stalled", detail="gpu_runner has not been heard of for 5 s")
    assert await get(server, "/health") == (
        503,
        {"status": "stalled", "reason": "gpu_runner has not been heard of for 5 s"},
    )
    assert backend.calls == []


async def test_unknown_routes_and_methods_answer_in_the_error_shape(server: Server) -> None:
    for path in ("/nope", "/v1", "/v1/completions/", "//v1/models"):
        status, answer = await get(server, path)
        assert (status, answer["error"]["code"]) == (404, "not_found")
    async with server.session.get(server.url + "/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_a_port_in_use_is_one_sentence(server: Server, backend: FakeBackend) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(StartupError) as error:
        await run_app(backend, "127.0.0.1", port)
    assert error.value.message == f"cannot listen on 127.0.0.1:{port}: the port is already in use"


async def test_a_host_that_is_not_ours_is_one_sentence(backend: FakeBackend) -> None:
    with pytest.raises(StartupError, match=r"^cannot listen on 192\.0\.2\.1:0: "):
        await run_app(backend, "192.0.2.1", 0)


async def test_port_zero_takes_a_free_port(backend: FakeBackend) -> None:
    runners = [await run_app(backend, "127.0.0.1", 0) for _ in range(2)]
    ports = {bound_port(runner) for runner in runners}
    for runner in runners:
        await runner.cleanup()
    assert len(ports) == 2
    assert 0 not in ports


def test_the_body_limit_follows_the_context_length(backend: FakeBackend) -> None:
    assert make_app(backend)._client_max_size == 4 * 1024 * 1024
    backend.info = type(backend.info)(
        **{name: getattr(backend.info, name) for name in backend.info.__struct_fields__} | {"max_model_len": 2**20}
    )
    assert make_app(backend)._client_max_size == 16 * 2**20


async def test_several_acceptors_share_one_port(backend: FakeBackend) -> None:
    runner = await run_app(backend, "127.0.0.1", 0)
    assert runner.addresses == [("127.0.0.1", bound_port(runner))] * ACCEPTORS
    await runner.cleanup()


class Watched(socket.socket):
    """Notes each mode that it, or a duplicate of it, is given."""

    modes: list[float | None] = []  # noqa: RUF012 - duplicates share it

    def settimeout(self, value: float | None) -> None:
        Watched.modes.append(value)
        super().settimeout(value)


async def test_a_listening_socket_that_processes_share_is_never_blocking(backend: FakeBackend) -> None:
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    bound.setblocking(False)
    inherited = Watched(fileno=bound.fileno())  # as a worker makes it of the descriptor: it takes itself for blocking
    Watched.modes.clear()
    runner = await run_app_on(backend, [inherited])
    assert None not in Watched.modes
    assert len(Watched.modes) >= ACCEPTORS - 1
    assert not os.get_blocking(bound.fileno())
    await runner.cleanup()
    bound.detach()
