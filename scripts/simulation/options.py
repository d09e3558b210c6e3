"""Options that the simulator's commands share: what the engine is."""

from __future__ import annotations

import argparse

from simulation.replica import ReplicaConfig
from simulation.step_model import StepModelFile

from asyncengine.config import PAGE_SIZE

COPY_BYTES_PER_NS = 50
"""Between device and host memory, each way: a PCIe 5 link of 16 lanes."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-num-seqs", type=count, default=256)
    parser.add_argument("--max-num-batched-tokens", type=count, default=2048)
    parser.add_argument("--max-model-len", type=count, help="(default: the model's)")
    parser.add_argument("--kv-cache-tokens", type=count, help="(default: what the GPU has room for)")
    parser.add_argument("--kv-host-tokens", type=count, default=0, help="of a tier in host memory (default: no tier)")
    parser.add_argument("--no-prefix-caching", action="store_true")


def check_engine_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.max_num_batched_tokens < args.max_num_seqs:
        parser.error("--max-num-batched-tokens must be at least --max-num-seqs")


def replica_config(args: argparse.Namespace, file: StepModelFile) -> ReplicaConfig:
    return ReplicaConfig(
        kv_cache_tokens=args.kv_cache_tokens or file.kv_cache.tokens,
        max_model_len=args.max_model_len or file.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        prefix_caching=not args.no_prefix_caching,
        kv_host_tokens=args.kv_host_tokens,
        page_copy_ns=page_copy_ns(file),
    )


def page_copy_ns(file: StepModelFile) -> int:
    """What a page takes between device and host memory."""
    return round(file.kv_cache.bytes_per_token * PAGE_SIZE / COPY_BYTES_PER_NS)


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
