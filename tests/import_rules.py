"""What a source file may import and do, found by walking its syntax tree; `test_layering.py` applies it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

PROCESS_PACKAGES = ("tokenizer_proc", "detokenizer_proc", "gpu_runner")
PACKAGES = ("asyncengine", *PROCESS_PACKAGES)

WIRE_CONTRACT = (
    *("asyncengine.wire", "asyncengine.config", "asyncengine.sampling", "asyncengine.terms"),
    *("asyncengine.errors", "asyncengine.__version__"),
)

# Room -> what it may import of the project; the longest name that is a prefix of a module's is its room.
ROOMS: dict[str, tuple[str, ...]] = {
    "asyncengine": ("asyncengine",),
    "asyncengine.wire": WIRE_CONTRACT,
    "asyncengine.config": ("asyncengine.errors", "asyncengine.__version__"),
    "asyncengine.sampling": ("asyncengine.config", "asyncengine.errors"),
    "asyncengine.terms": ("asyncengine.config",),
    "asyncengine.errors": (),
    "tokenizer_proc": ("tokenizer_proc", *WIRE_CONTRACT, "asyncengine.tokenizer_file"),
    "detokenizer_proc": ("detokenizer_proc", *WIRE_CONTRACT, "asyncengine.tokenizer_file"),
    "gpu_runner": ("gpu_runner", *WIRE_CONTRACT),
    "gpu_runner.grammar.child": (
        "gpu_runner.grammar.child",
        *WIRE_CONTRACT,
        *("asyncengine.schema_formats", "asyncengine.tokenizer_file"),
    ),
    "gpu_runner.kernels": ("gpu_runner.kernels", "asyncengine.config"),
    "gpu_runner.models": (
        "gpu_runner.models",
        "gpu_runner.kernels",
        *("asyncengine.config", "asyncengine.sampling", "asyncengine.errors"),
    ),
    "gpu_runner.device": (
        "gpu_runner.device",
        "gpu_runner.models",
        "gpu_runner.kernels",
        *("gpu_runner.schedule.plan", "gpu_runner.schedule.buckets", "gpu_runner.schedule.transfers"),
        *WIRE_CONTRACT,
    ),
    "gpu_runner.kvcache": ("gpu_runner.kvcache", *WIRE_CONTRACT),
    "gpu_runner.schedule": ("gpu_runner.schedule", "gpu_runner.kvcache", *WIRE_CONTRACT),
}
# Rooms whose third-party imports are exactly these; the standard library is open to all.
THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "asyncengine.wire": ("msgspec", "zmq"),
    "asyncengine.config": ("msgspec",),
    "asyncengine.sampling": ("msgspec",),
    "asyncengine.terms": ("msgspec",),
    "gpu_runner.kernels": ("torch", "triton", "numpy"),
    "gpu_runner.kvcache": ("numpy",),
    "gpu_runner.schedule": ("numpy",),
}
# Third-party packages that only these rooms may import.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "torch": ("gpu_runner",),
    "triton": ("gpu_runner.kernels",),
    "zmq": ("asyncengine.wire",),
    "llguidance": ("gpu_runner.grammar.child",),
    "opentelemetry": ("asyncengine.api.tracing",),
}

FORBIDDEN_MODULES = (
    *("pickle", "_pickle", "pickletools", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"),
    *("multiprocessing", "concurrent.futures.process", "zmq.asyncio", "torch.multiprocessing"),
)
ALLOWED_INSIDE_FORBIDDEN = ("multiprocessing.shared_memory", "multiprocessing.resource_tracker")
FORBIDDEN_NAMES = {
    *("Unpickler", "Pickler", "find_class", "recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"),
    "ProcessPoolExecutor",
}
FORBIDDEN_TRUE_KEYWORDS = {"trust_remote_code", "allow_pickle"}
COMPUTED = "<computed at run time>"
SOCKET_ROOM = "asyncengine.wire.pipes"


def imports(tree: ast.AST, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported at any depth, `importlib` calls with a literal name included.

    `from a import b` gives `a.b`: whether b is a module or a name in a, the rules are about its prefix.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, base] if base else kept)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and name_of(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield node.lineno, imported_name(node)


def imported_name(call: ast.Call) -> str:
    """The name that an `import_module` call imports; of an f-string its fixed first packages, `a.b.<computed ...>`."""
    argument = call.args[0] if call.args else None
    fixed = next(iter(argument.values), None) if isinstance(argument, ast.JoinedStr) else argument
    text = fixed.value if isinstance(fixed, ast.Constant) and isinstance(fixed.value, str) else ""
    if fixed is argument:
        return text or COMPUTED
    return f"{text[: text.rfind('.') + 1]}{COMPUTED}"


def import_offences(tree: ast.AST, module: str, *, is_package: bool = False) -> list[str]:
    """What `module` imports though its room may not. Modules outside the four packages (tests, scripts) are free."""
    room = longest_prefix(module, ROOMS)
    if room is None:
        return []
    found = []
    for line, name in imports(tree, module, is_package=is_package):
        top = name.partition(".")[0]
        if top in PACKAGES:
            allowed = any(within(name, target) for target in ROOMS[room])
            # a package's name alone (`import asyncengine`) reaches no room of it
            if not allowed and name not in PACKAGES[:1]:
                found.append(f"{module}:{line}: {room} may not import {name}")
        elif name == COMPUTED:
            found.append(f"{module}:{line}: imports a name computed at run time")
        elif top not in sys.stdlib_module_names:
            closed = longest_prefix(module, THIRD_PARTY)
            if closed and top not in THIRD_PARTY[closed]:
                found.append(f"{module}:{line}: {closed} may not import {top}")
            elif top in ONLY_IN and not any(within(module, home) for home in ONLY_IN[top]):
                found.append(f"{module}:{line}: only {' and '.join(ONLY_IN[top])} may import {top}")
    return found


def unsafe_offences(tree: ast.AST, module: str) -> list[str]:
    """Pickle in any form, code taken from a model, sockets made outside their one place, bare excepts."""
    found = []

    def report(node: ast.AST, what: str) -> None:
        found.append(f"{module}:{getattr(node, 'lineno', 0)}: {what}")

    for line, name in imports(tree, module):
        forbidden = any(within(name, bad) for bad in FORBIDDEN_MODULES)
        if forbidden and not any(within(name, good) for good in ALLOWED_INSIDE_FORBIDDEN):
            found.append(f"{module}:{line}: imports {name}")
        if name == "torch.load" or name.rpartition(".")[2] in FORBIDDEN_NAMES:
            found.append(f"{module}:{line}: imports {name}")
        if name in ("zmq.Context", "zmq.Socket") and module != SOCKET_ROOM:
            found.append(f"{module}:{line}: imports {name}; sockets are made in {SOCKET_ROOM}")

    torch_names = {"torch"} | {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "torch" and alias.asname
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            report(node, "bare except")
        elif isinstance(node, ast.Name | ast.Attribute):
            dotted = name_of(node)
            base, _, last = dotted.rpartition(".")
            if last in FORBIDDEN_NAMES:
                report(node, f"uses {last}")
            if last == "load" and base in torch_names:
                report(node, "uses torch.load")
            if dotted == "zmq.Context" and module != SOCKET_ROOM:
                report(node, f"uses {dotted}; sockets are made in {SOCKET_ROOM}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name in FORBIDDEN_NAMES:
                report(node, f"defines {node.name}")
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in FORBIDDEN_TRUE_KEYWORDS and not false:
                    report(node, f"passes {keyword.arg}")
            makes_socket = isinstance(node.func, ast.Attribute) and node.func.attr == "socket"
            if makes_socket and name_of(node.func) != "socket.socket" and module != SOCKET_ROOM:
                report(node, f"makes a socket; they are made in {SOCKET_ROOM}")
    return found


def name_of(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes; the part before a call or subscript is left out."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return ""


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def longest_prefix(module: str, names: dict[str, tuple[str, ...]]) -> str | None:
    return max((name for name in names if within(module, name)), key=len, default=None)
