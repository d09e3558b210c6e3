"""Finding the engine's model at its start. A download runs in `python -m asyncengine.model_search ORG/NAME`: it may
take an hour, in threads of a library that nothing ends, and whoever gives up on the start must not wait for it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from asyncengine.api_keys import API_KEY_VARIABLE
from asyncengine.child import describe_exit, wait_for_exit
from asyncengine.errors import StartupError
from asyncengine.model_files import ResolvedModel, is_on_hub, resolve_model
from asyncengine.wire.sidecar import arm_life_line


class Found(msgspec.Struct, frozen=True):
    """Of a `ResolvedModel`; or the sentence that says why there is none."""

    path: str = ""
    served_name: str = ""
    error: str = ""


async def find_model(name: str) -> ResolvedModel:
    """What `resolve_model` returns or raises. A download ends when the caller is cancelled."""
    if not is_on_hub(name):
        return resolve_model(name)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "asyncengine.model_search", name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={variable: value for variable, value in os.environ.items() if variable != API_KEY_VARIABLE},
        start_new_session=True,  # a terminal's Ctrl-C is this process's to hear of
    )
    try:
        await wait_for_exit(os.pidfd_open(process.pid), asyncio.Event())
    finally:
        process.kill()
        answer, _ = process.communicate()
    if process.returncode:
        raise StartupError(f"the download of {name} {describe_exit(process.returncode)}")
    found = msgspec.json.decode(answer, type=Found)
    if found.error:
        raise StartupError(found.error)
    return ResolvedModel(Path(found.path), found.served_name)


def main() -> None:
    arm_life_line()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints is for people
    try:
        model = resolve_model(sys.argv[1])
        found = Found(str(model.path), model.served_name)
    except StartupError as error:
        found = Found(error=error.message)
    answer.write(msgspec.json.encode(found))
    answer.close()


if __name__ == "__main__":
    main()
