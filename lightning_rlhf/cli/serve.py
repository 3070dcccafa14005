"""``lightning-rlhf serve``: a model behind an OpenAI-style API with a key and limits."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightning_rlhf.cli.arguments import command_parser
from lightning_rlhf.cli.main import is_for_users, quiet
from lightning_rlhf.data.tokenizers import load_tokenizer
from lightning_rlhf.models.kv_cache import bytes_per_token, cpu_cache_bytes, longest_in_memory
from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.models.positions import positions
from lightning_rlhf.rollout.vllm.engine import vllm_installed
from lightning_rlhf.serving.door import bind, check_open, key_of

if TYPE_CHECKING:
    import httpx
    from transformers import PreTrainedTokenizerBase

    from lightning_rlhf.serving.limits import Limits
    from lightning_rlhf.serving.upstream import Served, Upstream

_LOOK_SECONDS = 0.5
_EPILOG = """Routes: /v1/models, /v1/completions, /v1/chat/completions, /metrics, and without a key /health. Where you
give no key, one is made for this run and shown. vLLM itself listens on a socket that only your user can reach.

  lightning-rlhf serve --model runs/quickstart/ppo/export
  lightning-rlhf serve --model models/x --host 0.0.0.0 --api-key-file /etc/keys/x   (behind something that does TLS)
"""


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("serve", "A model behind an OpenAI-style API with a key and limits.", _EPILOG)
    model = parser.add_argument_group("model")
    model.add_argument("--model", required=True, metavar="DIR", help="an export, or a hub id")
    model.add_argument("--name", help="of the model in requests (default: the directory's name)")
    model.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="(default: auto)")
    model.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="prompt with response (default: the model's)"
    )
    model.add_argument("--tensor-parallel-size", type=int, default=1, metavar="GPUS", help="GPUs that share the model")
    model.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE", help="(default: 0.9)")
    model.add_argument("--log", type=Path, default=Path("serve.log"), help="vLLM's output (default: serve.log)")
    door = parser.add_argument_group("door")
    door.add_argument("--host", default="127.0.0.1", help="any but this machine's own needs a key (default: 127.0.0.1)")
    door.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    key = door.add_mutually_exclusive_group()
    key.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the key")
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="file that holds the key")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-body-bytes", type=int, default=1 << 20, help="of a request (default: 1 MiB)")
    limits.add_argument("--max-prompt-tokens", type=int, help="of a prompt (default: what the model takes)")
    limits.add_argument("--max-tokens", type=int, default=2048, help="of a response (default: 2048)")
    limits.add_argument("--max-responses", type=int, default=16, help="prompts x n of a request (default: 16)")
    limits.add_argument("--concurrency", type=int, default=64, help="requests under way (default: 64)")
    limits.add_argument("--seconds", type=float, default=600.0, help="for a request (default: 600)")
    limits.add_argument("--read-seconds", type=float, default=10.0, help="to send one, headers or body (default: 10)")
    return parser


def run(arguments: list[str]) -> int:
    """Serve until a signal ends it.

    Args:
        arguments: behind ``serve``.

    Returns:
        Exit code: 0 after SIGTERM or SIGINT; 2 for a mistake found before the model loads; 1 if vLLM ends.
    """
    given = _parser().parse_args(arguments)
    quiet()
    try:
        check_installed()
        from lightning_rlhf.serving.limits import Limits

        key, shown = key_of(given.api_key_env, given.api_key_file)
        check_open(given.host, given.api_key_env is not None or given.api_key_file is not None)
        given.model = Pretrained(given.model).path  # the home directory is written out
        longest = given.max_model_len
        if longest is None:
            longest = positions(Pretrained(given.model).hf_config())
        if longest is None:
            raise ValueError(f"{given.model} does not say how long its texts may be: give --max-model-len")
        longest = _fitting(given, longest)
        prompt_tokens = longest if given.max_prompt_tokens is None else given.max_prompt_tokens
        limits = Limits(
            given.max_body_bytes, prompt_tokens, min(given.max_tokens, longest),
            given.max_responses, given.concurrency, given.seconds, given.read_seconds,
        )  # fmt: skip
        served = _served(given, longest, limits.max_tokens)
        cache = cpu_cache_bytes(Pretrained(given.model).hf_config(), _dtype(given), longest)
        served = replace(served, cpu_cache_bytes=cache)
        tokenizer = load_tokenizer(given.model)
        with bind(given.host, given.port) as listening, signals() as asked:
            from lightning_rlhf.serving.upstream import Upstream

            upstream = Upstream(served, given.log, [name for name in (given.api_key_env,) if name])
            try:
                return serve(upstream, served, listening, (key, shown), limits, tokenizer, asked)
            finally:
                upstream.close()
    except Exception as error:
        if not is_for_users(error):
            raise
        print(f"lightning-rlhf: {error}", file=sys.stderr)
        return 2


def check_installed() -> None:
    """Refuse to begin without what it takes.

    Raises:
        ModuleNotFoundError: what is missing.
    """
    missing = [name for name in ("httpx", "starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"serve needs {' and '.join(missing)}, which is not installed: pip install 'lightning-rlhf[serve]'"
        )
    if not vllm_installed():
        raise ModuleNotFoundError("serve needs vLLM: pip install 'lightning-rlhf[vllm]'")


def _fitting(given: argparse.Namespace, longest: int) -> int:
    """Return the longest prompt with response whose cache fits into the memory of a machine without a GPU.

    Raises:
        ValueError: it is not what ``--max-model-len`` asks for.
    """
    if torch.cuda.is_available():
        return longest
    dtype, config = _dtype(given), Pretrained(given.model).hf_config()
    most = longest_in_memory(config, dtype)
    if longest <= most:
        return longest
    takes = f"texts of {longest} tokens take a cache of {longest * bytes_per_token(config, dtype) / 2**30:.1f} GiB"
    if given.max_model_len is not None:
        raise ValueError(f"{takes}, too much for this machine's free memory: give --max-model-len {most} or less")
    print(f"{takes}, too much for this machine's free memory: serving texts of at most {most} (--max-model-len)")
    return most


def _dtype(given: argparse.Namespace) -> str:
    """Return the dtype of weights and cache without a GPU."""
    return "float32" if given.dtype == "auto" else str(given.dtype)


def _served(given: argparse.Namespace, longest: int, max_tokens: int) -> Served:
    from lightning_rlhf.serving.upstream import Served

    name = given.name or os.path.basename(os.path.abspath(given.model))  # of "." too
    sizes = given.tensor_parallel_size, given.gpu_memory_utilization
    return Served(given.model, name, given.dtype, longest, max_tokens, *sizes)


@contextmanager
def signals() -> Iterator[list[int]]:
    """Signals that ask for an end, as they come; uvicorn sends those that it gets again when it has ended."""
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: asked.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(
    upstream: Upstream,
    served: Served,
    listening: socket.socket,
    key: tuple[str, str],
    limits: Limits,
    tokenizer: PreTrainedTokenizerBase,
    asked: list[int],
) -> int:
    """Put the front before a server that starts, until a signal comes or the server ends.

    Args:
        upstream: the server.
        served: what it serves.
        listening: socket of the front.
        key: and how it is shown.
        limits: of requests.
        tokenizer: of the model.
        asked: signals that came.

    Returns:
        Exit code.
    """
    import anyio

    from lightning_rlhf.serving import example
    from lightning_rlhf.serving.front import Front
    from lightning_rlhf.serving.listening import listener
    from lightning_rlhf.serving.upstream import client_of

    host, port = listening.getsockname()[:2]
    url, began = f"http://{f'[{host}]' if ':' in host else host}:{port}", time.monotonic()
    print(f"{url}: loading {served.name}; vLLM's output is in {upstream.log}", flush=True)
    question = example.request(tokenizer, limits.max_tokens, served.max_model_len)

    def ready() -> None:
        took = time.monotonic() - began
        said = f"{served.name} is ready after {took:.0f} s. To ask it, in another shell:"
        print(f"\n{said}\n\n{example.shown(url, served.name, key, question)}\n", flush=True)

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    async def main() -> None:
        async with client_of(upstream.socket) as client:
            server = listener(Front(client, key[0], limits, count), limits)

            def stop() -> None:
                server.should_exit = True

            async with anyio.create_task_group() as group:
                group.start_soon(_watch, upstream, client, ready, stop, asked)
                await server.serve(sockets=[listening])
                group.cancel_scope.cancel()

    anyio.run(main)
    if asked or upstream.alive:
        return 0
    print(f"lightning-rlhf: vLLM ended; {upstream.log} ends with:\n{upstream.tail()}", file=sys.stderr)
    return 1


async def _watch(
    upstream: Upstream,
    client: httpx.AsyncClient,
    ready: Callable[[], None],
    stop: Callable[[], None],
    asked: list[int],
) -> None:
    """Say when the server is ready, and stop when it has ended or a signal asked for that."""
    import anyio
    import httpx

    from lightning_rlhf.serving.front import HEALTH

    waiting = True
    while upstream.alive and not asked:
        try:
            if waiting and (await client.get(HEALTH)).status_code == 200:
                waiting = False
                ready()
        except httpx.TransportError:
            waiting = True
        await anyio.sleep(_LOOK_SECONDS)
    stop()
