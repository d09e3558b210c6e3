"""The architecture as tests: who imports whom, nothing unsafe anywhere, which folders there are, what is loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from import_rules import PACKAGES, ROOMS, import_offences, unsafe_offences

ROOT = Path(__file__).parent.parent
OTHER_FOLDERS = {"tests", "scripts", "docs"}
MADE_BY_TOOLS = {"build", "dist", "__pycache__"}


def source_files(*folders: str) -> dict[str, Path]:
    """Dotted module name -> file, packages by their own name."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


PACKAGE_FILES = source_files(*PACKAGES)
ALL_FILES = source_files(*PACKAGES, *OTHER_FOLDERS)


@cache
def parse(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def test_every_module_imports_only_what_its_room_may() -> None:
    offences = [
        offence
        for module, path in PACKAGE_FILES.items()
        for offence in import_offences(parse(path), module, is_package=path.name == "__init__.py")
    ]
    assert offences == []


def test_nothing_anywhere_pickles_trusts_remote_code_makes_stray_sockets_or_catches_everything() -> None:
    assert [offence for module, path in ALL_FILES.items() for offence in unsafe_offences(parse(path), module)] == []


def test_every_room_of_the_rules_exists() -> None:
    assert [room for room in ROOMS if room not in PACKAGE_FILES] == []


def test_the_top_level_folders_are_the_designed_ones() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    folders = {name for name in folders - MADE_BY_TOOLS if not name.endswith(".egg-info")}
    assert set(PACKAGES) <= folders
    assert folders - set(PACKAGES) <= OTHER_FOLDERS
    assert {name for name in folders if (ROOT / name / "__init__.py").exists()} == set(PACKAGES)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("asyncengine", {"torch", "aiohttp", "tokenizers", "transformers", *PACKAGES[1:]}),
        ("asyncengine.wire.sidecar", {"torch", "aiohttp", "numpy", *PACKAGES[1:]}),
        ("tokenizer_proc.worker", {"torch", "transformers", "aiohttp", "gpu_runner", "detokenizer_proc"}),
        ("detokenizer_proc.worker", {"torch", "transformers", "aiohttp", "gpu_runner", "tokenizer_proc"}),
        ("gpu_runner.grammar.child.worker", {"torch", "triton", "transformers", "aiohttp", "tokenizer_proc"}),
        ("gpu_runner.grammar.gate", {"torch", "triton", "tokenizers", "llguidance"}),
        ("gpu_runner.schedule", {"torch", "triton"}),
        ("gpu_runner.kvcache", {"torch", "triton"}),
    ],
)
def test_importing_a_module_does_not_load_what_it_has_no_use_for(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*(name for name in sys.modules if '.' not in name))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert absent & set(result.stdout.split()) == set()


# ---------------------------------------------------------------------------------- the rules catch what they are for


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("asyncengine.engine", "import torch"),
        ("asyncengine.engine", "import torch.nn.functional as F"),
        ("asyncengine.engine", "import gpu_runner.loop"),
        ("asyncengine.supervisor", "def start():\n    from tokenizer_proc import worker"),
        ("asyncengine.engine", "import zmq"),
        ("asyncengine.wire.pipes", "from asyncengine.engine import AsyncEngine"),
        ("asyncengine.wire.frames", "import numpy"),
        ("asyncengine.errors", "from asyncengine.config import EngineConfig"),
        ("tokenizer_proc.worker", "class A:\n    def f(self):\n        if True:\n            import torch"),
        ("tokenizer_proc.worker", "from detokenizer_proc.byte_table import ByteTable"),
        ("tokenizer_proc.worker", "from asyncengine.engine import AsyncEngine"),
        ("tokenizer_proc.worker", "from asyncengine import engine"),
        ("detokenizer_proc.worker", "import tokenizer_proc"),
        ("detokenizer_proc.worker", "import importlib\nimportlib.import_module('gpu_runner.loop')"),
        ("detokenizer_proc.worker", "__import__('torch')"),
        ("detokenizer_proc.worker", "import importlib\nimportlib.import_module(name)"),
        ("detokenizer_proc.worker", "from importlib import import_module\nimport_module(f'{name}.worker')"),
        ("detokenizer_proc.worker", "from importlib import import_module\nimport_module(f'asyncengine.{name}')"),
        ("gpu_runner.loop", "from asyncengine.delta import Delta"),
        ("gpu_runner.loop", "import detokenizer_proc"),
        ("gpu_runner.loop", "import triton"),
        ("gpu_runner.kernels.reference", "import msgspec"),
        ("gpu_runner.kernels.reference", "from gpu_runner.models import decoder"),
        ("gpu_runner.kernels.reference", "from ..device import buffers"),
        ("gpu_runner.kernels", "from ..models import decoder"),
        ("gpu_runner.models.decoder", "from gpu_runner.device.executor import Executor"),
        ("gpu_runner.models.decoder", "from gpu_runner.schedule.plan import StepPlan"),
        ("gpu_runner.device.executor", "from gpu_runner.schedule.scheduler import Scheduler"),
        ("gpu_runner.device.executor", "from gpu_runner.schedule import scheduler"),
        ("gpu_runner.device.executor", "from gpu_runner.kvcache.pages import PagePool"),
        ("gpu_runner.kvcache.pages", "import torch"),
        ("gpu_runner.kvcache.pages", "from gpu_runner.schedule.plan import Int32"),
        ("gpu_runner.schedule.scheduler", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("gpu_runner.schedule.scheduler", "from gpu_runner.device.executor import Executor"),
        ("gpu_runner.schedule.scheduler", "import gpu_runner.loop"),
    ],
)
def test_a_forbidden_import_is_caught(module: str, code: str) -> None:
    offences = import_offences(ast.parse(code), module, is_package=module in ROOMS)
    assert len(offences) == 1
    assert offences[0].startswith(f"{module}:")


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("asyncengine.engine", "import msgspec, aiohttp\nfrom asyncengine.api.app import App"),
        ("asyncengine", "from importlib import import_module\nimport_module(f'asyncengine.{name}')"),
        ("asyncengine.wire.pipes", "import zmq, msgspec\nfrom asyncengine.errors import InvalidRequestError"),
        ("tokenizer_proc.worker", "import tokenizers, jinja2, numpy\nfrom asyncengine.wire import frames"),
        ("tokenizer_proc.worker", "from . import vocabulary\nfrom asyncengine.tokenizer_file import load"),
        ("gpu_runner.kernels.reference", "import math, torch, numpy\nfrom asyncengine.config import PAGE_SIZE"),
        ("gpu_runner.models.decoder", "import torch, safetensors, gguf\nfrom gpu_runner.kernels import ops"),
        (
            "gpu_runner.device.executor",
            "import torch\nfrom ..models import decoder\nfrom ..schedule.plan import StepPlan",
        ),
        ("gpu_runner.schedule.scheduler", "import numpy as np\nfrom gpu_runner.kvcache.pages import PagePool"),
        ("gpu_runner.loop", "import torch\nfrom gpu_runner.schedule.scheduler import Scheduler"),
    ],
)
def test_an_allowed_import_is_not_reported(module: str, code: str) -> None:
    assert import_offences(ast.parse(code), module) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    import _pickle as p",
        "from marshal import loads",
        "import cloudpickle",
        "import dill",
        "import shelve",
        "import joblib",
        "import importlib\nimportlib.import_module('pickle')",
        "from multiprocessing import Queue",
        "from multiprocessing import Pipe, shared_memory",
        "import multiprocessing as mp",
        "from multiprocessing.managers import BaseManager",
        "import torch.multiprocessing",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures\npool = concurrent.futures.ProcessPoolExecutor()",
        "socket.recv_pyobj()",
        "sockets[0].send_pyobj(1)",
        "torch.load('model.bin')",
        "import torch as t\nt.load('model.bin', weights_only=True)",
        "from torch import load",
        "load = torch.load",
        "class U(io.Unpickler):\n    pass",
        "class U:\n    def find_class(self, module, name): ...",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=trust)",
        "numpy.load(path, allow_pickle=True)",
        "try:\n    f()\nexcept:\n    pass",
        "import zmq.asyncio",
        "context = zmq.Context()",
        "context = zmq.Context.instance()",
        "from zmq import Context",
        "socket = context.socket(zmq.PUSH)",
        "socket = make_context().socket(zmq.PUSH)",
    ],
)
def test_unsafe_code_is_caught(code: str) -> None:
    assert unsafe_offences(ast.parse(code), "asyncengine.engine") != []


@pytest.mark.parametrize(
    "code",
    [
        "from multiprocessing import shared_memory",
        "from multiprocessing.shared_memory import SharedMemory",
        "import json\njson.load(file)",
        "safetensors.torch.load(data)",
        "numpy.load(path, allow_pickle=False)",
        "try:\n    f()\nexcept OSError:\n    pass",
        "import socket\nlistener = socket.socket()",
        "# pickle\nwords = 'pickle, torch.load(x)'",
        "receiver.socket.send(data)",
    ],
)
def test_safe_code_is_not_reported(code: str) -> None:
    assert unsafe_offences(ast.parse(code), "asyncengine.engine") == []


def test_sockets_may_be_made_in_their_one_place() -> None:
    code = "import zmq\nsocket = zmq.Context().socket(zmq.PUSH)"
    assert unsafe_offences(ast.parse(code), "asyncengine.wire.pipes") == []
