"""What every refusal of the API looks like."""

from __future__ import annotations

from typing import Any

from api_server import Server

USER = {"role": "user", "content": "hi"}


def error_of(status: int, answer: Any) -> dict[str, Any]:
    assert 400 <= status < 500, answer
    assert answer.keys() == {"error"}
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert "msgspec" not in answer["error"]["message"]
    assert "Traceback" not in answer["error"]["message"]
    return answer["error"]


async def refused(server: Server, path: str, body: Any) -> dict[str, Any]:
    status, answer = await server.post(path, body)
    assert status == 400
    return error_of(status, answer)
