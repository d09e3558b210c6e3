"""A headless Chromium and one page of it, driven over the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

SECONDS = 60
FLAGS = (
    *("--headless=new", "--remote-debugging-port=0", "--no-first-run", "--no-sandbox", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars"),
    *("--force-color-profile=srgb", "--no-proxy-server", "--mute-audio"),
    "--host-resolver-rules=MAP evil.example 127.0.0.1",  # as a name that is rebound
)


def find_chromium() -> str | None:
    """The browser's path; None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """complaints: what the browser has logged as a warning or an error, violations of the page's policy among them, and
    exceptions that nobody caught."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._reading = asyncio.create_task(self._read())
        self.complaints: list[str] = []

    async def begin(self) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str) -> None:
        """Returns once the page is loaded, its modules included."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(SECONDS):
            await self._loaded.wait()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(SECONDS):
            result = await answer
        assert "error" not in result, result
        found: dict[str, Any] = result["result"]
        return found

    async def js(self, expression: str) -> Any:
        """The value of an expression, a promise's included."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Returns once an expression is true."""
        async with asyncio.timeout(SECONDS):
            while not await self.js(condition):
                await asyncio.sleep(0.02)

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "ArrowUp": 38, "ArrowDown": 40}
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        common = {"key": key, "windowsVirtualKeyCode": code.get(key, 0), "modifiers": 8 * shift}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def move(self, x: float, y: float) -> None:
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def resize(self, width: int, height: int, *, scale: float = 1, mobile: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    async def prefer(self, scheme: str) -> None:
        """dark or light."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        """A PNG."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            params = message.get("params", {})
            match message.get("method"):
                case None:
                    answer = self._answers.pop(message["id"])
                    if not answer.done():
                        answer.set_result(message)
                case "Page.loadEventFired":
                    self._loaded.set()
                case "Log.entryAdded" if params["entry"]["level"] in ("warning", "error"):
                    self.complaints.append(params["entry"]["text"])
                case "Runtime.exceptionThrown":
                    details = params["exceptionDetails"]
                    self.complaints.append(details.get("exception", {}).get("description", details["text"]))
                case "Runtime.consoleAPICalled" if params["type"] in ("warning", "error", "assert"):
                    self.complaints.append(str([arg.get("value", arg.get("description")) for arg in params["args"]]))


@asynccontextmanager
async def browser(executable: str) -> AsyncIterator[Page]:
    """A browser of its own, with nothing of the user's, that ends with the block."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                port = await _port(Path(profile) / "DevToolsActivePort", process)
                async with aiohttp.ClientSession() as session:
                    async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                        pages = [target for target in await response.json() if target["type"] == "page"]
                    async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                        page = Page(socket)
                        try:
                            await page.begin()
                            yield page
                        finally:
                            await page.close()
            finally:
                process.terminate()


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    async with asyncio.timeout(SECONDS):
        while not file.exists() or not file.read_text().strip():
            assert process.poll() is None, f"the browser ended with code {process.returncode}"
            await asyncio.sleep(0.02)
    return int(file.read_text().split()[0])
