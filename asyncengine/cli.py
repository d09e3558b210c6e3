"""The `asyncengine` command. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import shlex
import signal
import socket
import stat
import sys
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING

from asyncengine.api_keys import API_KEY_VARIABLE, read_api_keys
from asyncengine.bench.command import add_bench_options
from asyncengine.config import HTTP_DEFAULTS, EngineConfig, HttpOptions, Role, runs_on_cpu
from asyncengine.engine_options import add_engine_options, engine_config
from asyncengine.errors import EngineError, InvalidRequestError, StartupError
from asyncengine.host_names import read_allowed_hosts
from asyncengine.telemetry import export_spans_to, make_tracing
from asyncengine.wire.faults import log_faults_without_texts

if TYPE_CHECKING:
    import tqdm

    from asyncengine.api.worker_group import WorkerGroup
    from asyncengine.engine import AsyncEngine

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
OPEN_FILES = 65536
BYTES_PHASE = "loading weights"
"""The phase of start-up whose progress is in bytes; that of others counts things."""
MAX_API_WORKERS = 64
AUTO_API_WORKERS = 4
CORES_FOR_API_WORKERS = 8
MAX_DRAIN_SECONDS = 86400
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
FAILED_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130


def main(argv: Sequence[str] | None = None, *, modules: Mapping[Role, str] | None = None) -> int:
    """Run a command; returns the exit code. One that fails is one line on stderr and code 1.

    modules: the module to run for a role in place of the role's own package.
    """
    args = build_parser().parse_args(argv)
    args.modules = modules
    try:
        code: int = args.command(args)
    except EngineError as error:
        print(f"asyncengine: {error.message}", file=sys.stderr)
        return FAILED_EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncengine", description="An LLM inference engine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over an OpenAI-compatible HTTP API")
    serve.set_defaults(command=serve_command)
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; one that other machines reach needs an API key (default: %(default)s)",
    )
    serve.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="PORT",
        help="port to listen on, 0 = any free one (default: %(default)s)",
    )
    serve.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="API keys, one a line, each of which may be followed by tenant=NAME and class=interactive or "
        f"class=background; with them, or with one in {API_KEY_VARIABLE}, every request but for /health, "
        "/ready and the files of the console, which asks for one, needs one (default: none)",
    )
    serve.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="without API keys, a name or address by which the server may be asked besides loopback ones and those "
        "without a dot, as behind a proxy that passes its own on, and whose web pages may ask it; for several, repeat "
        "it (default: none)",
    )
    serve.add_argument(
        "--api-workers",
        default="auto",
        metavar="N",
        help=f"processes that serve HTTP, from 1 to {MAX_API_WORKERS}, or auto: 1 without a GPU or with fewer than "
        f"{CORES_FOR_API_WORKERS} cores, else {AUTO_API_WORKERS} (default: %(default)s)",
    )
    serve.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="OpenTelemetry collector (OTLP over HTTP) that gets a span per request "
        "(default: OTEL_EXPORTER_OTLP_ENDPOINT, or none)",
    )
    serve.add_argument(
        "--console",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a page at / to talk to the model and to watch the engine work (default: %(default)s)",
    )
    serve.add_argument(
        "--drain-timeout-seconds",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM or Ctrl-C, a second of which ends them at once; new "
        "ones are refused meanwhile (default: %(default)s)",
    )
    add_engine_options(serve)

    chat = commands.add_parser("chat", help="talk to a model in the terminal")
    chat.set_defaults(command=chat_command)
    chat.add_argument(
        "--url",
        metavar="URL",
        help=f"talk to the server at this address, with the key in {API_KEY_VARIABLE} if there is one, instead of "
        "starting an engine (default: none)",
    )
    chat.add_argument("--system", metavar="TEXT", help="system message (default: none)")
    chat.add_argument(
        "--temperature", type=float, default=0.7, metavar="NUMBER", help="from 0 = greedy to 2 (default: %(default)s)"
    )
    chat.add_argument(
        "--max-tokens", type=int, metavar="TOKENS", help="longest answer (default: what the context holds)"
    )
    add_engine_options(chat)

    add_bench_options(commands.add_parser("bench", help="load a running server and measure what its clients see"))
    return parser


def serve_command(args: argparse.Namespace) -> int:
    keys = read_api_keys(args.api_key_file, os.environ)
    if args.api_key_file and os.stat(args.api_key_file).st_mode & stat.S_IROTH:
        print(f"note: everybody on this machine can read the API keys in {args.api_key_file}", file=sys.stderr)
    if args.host not in LOOPBACK_HOSTS and not keys:
        raise StartupError(
            f"refusing to listen on {args.host}, which other machines reach, without an API key: set --api-key-file or "
            f"{API_KEY_VARIABLE}, or take one of {', '.join(LOOPBACK_HOSTS)}"
        )
    hosts = read_allowed_hosts(args.allowed_host)
    args.http = HttpOptions(console=args.console, api_keys=keys, allowed_hosts=hosts)
    if not 0 <= args.port <= 65535:
        raise StartupError(f"--port must be from 0 to 65535, got {args.port}")
    if not 0 <= args.drain_timeout_seconds <= MAX_DRAIN_SECONDS:
        raise StartupError(
            f"--drain-timeout-seconds must be from 0 to {MAX_DRAIN_SECONDS}, got {args.drain_timeout_seconds}"
        )
    if args.otlp_endpoint:
        export_spans_to(args.otlp_endpoint)
    config = engine_config(args)
    workers = api_workers(args.api_workers, config)
    check_port_free(args.host, args.port)
    allow_many_connections()
    log_faults_without_texts()

    import uvloop

    if workers == 1:
        serving = _serve(config, args)
    else:
        serving = _serve_with_workers(config, args, workers)
    return uvloop.run(serve_until_signal(serving))


def api_workers(given: str, config: EngineConfig) -> int:
    """The number that --api-workers stands for; raises `StartupError`."""
    if given == "auto":
        enough_cores = len(os.sched_getaffinity(0)) >= CORES_FOR_API_WORKERS
        return AUTO_API_WORKERS if enough_cores and not runs_on_cpu(config) else 1
    if not given.isdecimal() or not 1 <= int(given) <= MAX_API_WORKERS:
        raise StartupError(f"--api-workers must be auto or from 1 to {MAX_API_WORKERS}, got {given}")
    return int(given)


async def serve_until_signal(serve: Coroutine[object, object, None]) -> int:
    """Serve until SIGTERM or SIGINT, at whatever stage it arrives; then end requests, engine and server in order. A
    second one breaks off whatever waits for requests to end by themselves.

    Returns the exit code: 1 when the engine has failed, so that whoever keeps services alive starts a new one.
    """
    serving = asyncio.create_task(serve)
    loop = asyncio.get_running_loop()
    for number in ENDING_SIGNALS:
        loop.add_signal_handler(number, serving.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await serving
            return FAILED_EXIT_CODE
        return 0
    finally:  # nothing is left to break off, and the loop's end would make one more signal this process's
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)


async def serve_out(engine: AsyncEngine | WorkerGroup, drain_seconds: float) -> None:
    """Wait for the engine to fail. Cancelled, let the requests that it has end before, within `drain_seconds`."""
    try:
        await engine.wait_failed()
    except asyncio.CancelledError:
        seconds = f"{drain_seconds:g}"
        print(f"shutting down; requests have {seconds} s to end, another signal ends them now", file=sys.stderr)
        if await engine.drain(drain_seconds):
            raise


async def _serve(config: EngineConfig, args: argparse.Namespace) -> None:
    """Serve until cancelled or until the engine has failed, which its log tells."""
    from asyncengine.api.app import bound_port, freeze_start_up, run_app
    from asyncengine.engine import AsyncEngine
    from asyncengine.startup_report import report

    tracing = make_tracing()
    async with contextlib.AsyncExitStack() as stack:
        with contextlib.closing(ConsoleProgress()) as progress:
            engine = await AsyncEngine.start(config, progress=progress, modules=args.modules)
            print("\n".join(report(engine.info)), file=sys.stderr, flush=True)
        stack.push_async_callback(engine.close)
        freeze_start_up()
        runner = await run_app(engine, args.host, args.port, args.http, tracing=tracing)
        stack.push_async_callback(runner.cleanup)
        # closed before the server, the engine ends every stream with an error that its client can read
        stack.push_async_callback(engine.close)
        port = bound_port(runner)
        print(ready_text(engine.info.model, args.host, port, args.http), flush=True)
        await serve_out(engine, args.drain_timeout_seconds)


async def _serve_with_workers(config: EngineConfig, args: argparse.Namespace, workers: int) -> None:
    """The same with several processes that serve HTTP; this one only looks after them."""
    from asyncengine.api.app import bind
    from asyncengine.api.worker_group import WorkerGroup
    from asyncengine.startup_report import report

    async with contextlib.AsyncExitStack() as stack:
        with contextlib.closing(ConsoleProgress()) as progress:
            group = WorkerGroup(
                config,
                bind(args.host, args.port),
                workers=workers,
                http=args.http,
                progress=progress,
                modules=args.modules,
            )
            stack.push_async_callback(group.close)
            await group.start()
            print("\n".join(report(group.info)), file=sys.stderr, flush=True)
        print(ready_text(group.info.model, args.host, group.port, args.http), flush=True)
        await serve_out(group, args.drain_timeout_seconds)


def ready_text(model: str, host: str, port: int, http: HttpOptions = HTTP_DEFAULTS) -> str:
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": True}
    )
    browser = f"\n  # or in a browser: {url}/" if http.console else ""
    shown = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if http.api_keys else ""
    return (
        f"Ready: {model} at {url}\n"
        f"  curl {url}/v1/chat/completions{shown} -H 'Content-Type: application/json' -d {shlex.quote(body)}{browser}"
    )


def allow_many_connections() -> None:
    """Raise this process's limit of open files, often 1024, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def check_port_free(host: str, port: int) -> None:
    """Raise `StartupError` now if the port is taken, rather than after the model has been loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartupError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None


def chat_command(args: argparse.Namespace) -> int:
    from asyncengine.chat import Chat
    from asyncengine.chat_backends import engine_backend, server_backend
    from asyncengine.engine import AsyncEngine
    from asyncengine.sampling import SamplingParams

    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    if params.max_tokens == 0:
        raise InvalidRequestError("a chat's max_tokens must be at least 1, got 0", param="max_tokens")
    with contextlib.closing(ConsoleProgress()) as progress:
        if args.url:
            backend = server_backend(args.url, os.environ.get(API_KEY_VARIABLE))
        else:
            backend = engine_backend(AsyncEngine.start(engine_config(args), progress=progress, modules=args.modules))
        return Chat(backend, params, system=args.system).run()


class ConsoleProgress:
    """Start-up for a person: one line per phase with its time and, on a terminal, a bar where it can be measured."""

    def __init__(self) -> None:
        self._bar: tqdm.tqdm | None = None

    def update(self, role: str, index: int, phase: str, done: int, total: int) -> None:
        if not total or not sys.stderr.isatty():
            return
        if self._bar is None:
            import tqdm

            of_bytes = phase == BYTES_PHASE
            self._bar = tqdm.tqdm(
                total=total, desc=phase, unit="B" if of_bytes else "", unit_scale=of_bytes, leave=False, file=sys.stderr
            )
        self._bar.update(done - self._bar.n)

    def phase_done(self, role: str, index: int, phase: str, seconds: float) -> None:
        self.close()
        self._print(role, index, phase, seconds)

    def ready(self, role: str, index: int, seconds: float) -> None:
        self._print(role, index, "ready", seconds)

    def _print(self, role: str, index: int, phase: str, seconds: float) -> None:
        name = f"{role} {index}" if index else role
        print(f"{name:<20} {phase:<32} {seconds:7.2f} s", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


if __name__ == "__main__":
    sys.exit(main())
