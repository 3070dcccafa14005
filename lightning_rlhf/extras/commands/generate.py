"""``lightning-rlhf generate``: generate responses of a model, or of a server, to a file of prompts."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_rlhf.cli.config_files import add_import_folders
from lightning_rlhf.cli.errors import one_line_errors
from lightning_rlhf.cli.screen import configure_messages
from lightning_rlhf.data.image_parts import converted_images
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.expected_errors import UsageError, counted
from lightning_rlhf.extras.commands import row_images
from lightning_rlhf.extras.commands.exit_codes import failure_code_1
from lightning_rlhf.extras.commands.options import (
    ROLES_HELP,
    command_parser,
    options_of_commands,
    parse_columns,
    parse_roles,
)
from lightning_rlhf.extras.commands.response_backends import (
    Conversations,
    EngineBackend,
    Response,
    ResponseBackend,
    ResponseRequest,
    RowPrompt,
    ServerBackend,
    prompts_digest,
)
from lightning_rlhf.extras.commands.responses_file import (
    END_TOKENS,
    ENVIRONMENT_REWARDS,
    FINISH_REASONS,
    OUTPUT_COLUMNS,
    PROMPT_TOKENS,
    RESPONSE_MESSAGES,
    RESPONSES,
    STOP_REASONS,
    TOKENS,
    TURNS,
    ResponsesFile,
)
from lightning_rlhf.extras.commands.run_config import loop_arguments, make_environment, parse_run_config
from lightning_rlhf.functional.seeding import derive_seed
from lightning_rlhf.images import ImageSettings
from lightning_rlhf.types import ConversationRecord, SamplingLimits, SamplingParams

_EPILOG = """Each line of the output is a row of the prompts with its responses. After an interruption, the same command
continues; the seed of a response does not depend on the batch size.

  lightning-rlhf generate --model runs/quickstart/ppo/export --prompts questions.jsonl --to answers.jsonl -n 4
  lightning-rlhf generate --server http://127.0.0.1:8000 --api-key-env KEY --prompts questions.jsonl --to answers.jsonl
"""
_DEFAULT_TOKENS = 512
_RESPONSES = 64  # responses before the first write, a minute of a model of 100 M parameters on a CPU
_SECONDS = 20.0  # time between two writes, to which the number of prompts between them is adjusted


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_parser(
        "generate",
        "Generate responses of a model, or of a server, to a file of prompts.",
        _EPILOG,
        "--prompts FILE --to FILE.jsonl (--model DIR | --server URL)",
    )
    files = parser.add_argument_group("files")
    files.add_argument("--prompts", required=True, metavar="FILE", help="rows with a prompt: a file, a hub id, ...")
    files.add_argument("--to", type=Path, required=True, metavar="FILE.jsonl", help="file of JSON lines to write")
    files.add_argument("--columns", nargs="+", default=[], metavar="FIELD=COLUMN", help="for example prompt=question")
    files.add_argument("--roles", nargs="+", default=[], metavar="NAME=ROLE", help=ROLES_HELP)
    files.add_argument("--as-messages", action="store_true", help="convert texts to user messages")
    files.add_argument("--images", metavar="DIR", help=row_images.HELP)
    files.add_argument("--on-bad-row", choices=("error", "skip"), default="error", help="(default: error)")
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="DIR", help="directory or hub id, or a server's name of it")
    model.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto", help="(default: auto)")
    model.add_argument("--dtype", choices=("float32", "bfloat16"), help="(default: bfloat16 with a GPU, else float32)")
    model.add_argument("--tensor-parallel-size", type=int, default=1, metavar="GPUS", help="GPUs that share the model")
    model.add_argument("--environment", metavar="CONFIG.yaml", help="run whose environment replies to the model")
    model.add_argument(
        "--server", nargs="+", metavar="URL", help="servers of a model with OpenAI's API, used instead of an engine"
    )
    model.add_argument("--api-key-env", metavar="NAME", help="environment variable with the server's key")
    model.add_argument(
        "--concurrency", type=int, metavar="N", default=50, help="requests to a server at once (default: 50)"
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("-n", type=int, default=1, help="responses per prompt (default: 1)")
    sampling.add_argument("--temperature", type=float, metavar="T", default=1.0, help="0 is greedy (default: 1)")
    sampling.add_argument(
        "--top-p", type=float, metavar="P", default=1.0, help="probability of the likeliest tokens (default: 1)"
    )
    sampling.add_argument(
        "--top-k", type=int, metavar="N", default=0, help="number of likeliest tokens, 0 is all (default: 0)"
    )
    sampling.add_argument(
        "--max-tokens", type=int, metavar="N", help="length of a response (default: that of --environment, else 512)"
    )
    sampling.add_argument("--seed", type=int, metavar="N", default=0, help="(default: 0)")
    sampling.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="prompts between writes (default: of 20 s)",
    )
    return parser


@one_line_errors
def run(arguments: list[str]) -> int:
    """Generate responses.

    Returns:
        Exit code: 0; 2 for a mistake found before anything was generated; 1 if it ended before the last prompt.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.server is None and options.model is None:
        parser.error("set --model or --server")
    configure_messages()
    add_import_folders()
    _check_options(options)
    try:
        with options_of_commands(), _ended_by_sigterm(), closing(_make_backend(options)) as backend:
            rows = _generate_file(backend, options)
    except KeyboardInterrupt:
        print("lightning-rlhf: interrupted; the same command continues from here", file=sys.stderr)
        return 1
    print(f"{options.to} has {counted(rows, 'row')}")
    return 0


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, so that the engine ends and its files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _check_options(options: argparse.Namespace) -> None:
    if options.to.suffix != ".jsonl":
        raise UsageError(f"--to must end with .jsonl, got {str(options.to)!r}")
    for name in ("n", "batch_size", "concurrency", "tensor_parallel_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    if options.api_key_env is not None and options.server is None:
        raise UsageError("--api-key-env needs --server")
    if options.environment is not None and options.server is not None:
        raise UsageError("--environment needs --model: conversations need the tokens of an engine on this machine")


def _make_backend(options: argparse.Namespace) -> ResponseBackend:
    conversations = None
    longest = _DEFAULT_TOKENS
    stop_ids: tuple[int, ...] = ()
    if options.environment is not None:
        config = parse_run_config(["--config", options.environment])
        conversations = _conversations(options.environment, config)
        longest = loop_arguments(config)["max_response_tokens"]
        stop_ids = tuple(loop_arguments(config)["stop_token_ids"] or ())
    if options.max_tokens is None:
        options.max_tokens = longest
    limits = SamplingLimits(options.top_p, options.top_k)
    sampling = SamplingParams(options.max_tokens, options.temperature, limits, stop_ids)
    if options.server is not None:
        return ServerBackend(options.server, options.api_key_env, options.model, sampling, options.concurrency)
    return EngineBackend(
        options.model,
        options.engine,
        options.dtype,
        sampling,
        tensor_parallel_size=options.tensor_parallel_size,
        conversations=conversations,
    )


def _conversations(path: str, config: Namespace) -> Conversations:
    """Return the environment of a run's configuration, and its part of the chat template."""
    settings = make_environment(config)
    if settings is None:
        raise UsageError(f"{path} has no RolloutLoop with an environment: use the configuration of a run that has one")
    of_data = config["data"]["init_args"]
    data = {name: of_data[name] for name in ("tools", "chat_template_kwargs", "as_messages") if of_data.get(name)}
    loop = loop_arguments(config)
    identity = {**vars(loop["environment"]), **data, "stop_token_ids": loop["stop_token_ids"]}
    return Conversations(settings, data, json.loads(json.dumps(identity, default=vars)))


def _generate_file(backend: ResponseBackend, options: argparse.Namespace) -> int:
    """Read the prompts, generate the missing responses, and return the number of rows."""
    columns = parse_columns(options.columns)
    images = ImageSettings(folder=options.images)
    roles = parse_roles(options.roles)
    prompts = backend.read_prompts(
        options.prompts, columns, options.on_bad_row, options.as_messages, images=images, roles=roles
    )
    _check_columns(prompts)
    settings = {**backend.identity(), "prompts": prompts_digest(prompts)}
    for name in ("n", "temperature", "top_p", "top_k", "max_tokens", "seed"):
        settings[name] = getattr(options, name)
    with closing(ResponsesFile(options.to, settings, len(prompts))) as file:
        if done := file.begin():
            print(f"{file.path} has {done} of {len(prompts)} rows already")
        if done < len(prompts):
            log = options.to.with_name(f"{options.to.name}.engine.log")
            print("starting the engine", flush=True)
            print(f"generated by {backend.prepare(max(len(prompt.ids) for prompt in prompts), log)}")
            with failure_code_1():
                _generate(backend, prompts, file, options)
            log.unlink(missing_ok=True)
    return len(prompts)


def _check_columns(prompts: list[RowPrompt]) -> None:
    """Validate that no column of the prompts has the name of an output column."""
    for name in OUTPUT_COLUMNS:
        if any(name in prompt.row for prompt in prompts):
            raise UsageError(f"the prompts have a column {name!r}, the name of an output column: rename it")


def _generate(
    backend: ResponseBackend, prompts: list[RowPrompt], file: ResponsesFile, options: argparse.Namespace
) -> None:
    """Generate the responses to the prompts after the last row of a file, and write them batch by batch."""
    n = options.n
    size = options.batch_size or max(1, _RESPONSES // n)
    tokens = 0
    began = last = time.monotonic()
    while file.done < len(prompts):
        positions = range(file.done, min(file.done + size, len(prompts)))
        requests = [
            ResponseRequest(
                prompt=prompts[position],
                seed=derive_seed(options.seed, "generate", position, sample),
                environment_seed=derive_seed(options.seed, "environment", position),
            )
            for position in positions
            for sample in range(n)
        ]
        responses = backend.generate(requests)
        groups = [responses[first : first + n] for first in range(0, len(responses), n)]
        file.append([_row(prompts[position], group) for position, group in zip(positions, groups, strict=True)])
        tokens += sum(response.tokens or 0 for response in responses)
        now = time.monotonic()
        if options.batch_size is None:
            size = max(1, round(size * min(2.0, _SECONDS / max(now - last, 1e-3))))
        last = now
        speed = tokens / (now - began)
        print(f"{file.done} of {len(prompts)} prompts, {tokens} tokens, {speed:.0f} tokens/s", flush=True)


def _row(prompt: RowPrompt, responses: list[Response]) -> dict[str, Any]:
    counts = {PROMPT_TOKENS: len(prompt.ids)} if prompt.ids else {}
    return {
        **prompt.row,
        **counts,
        RESPONSES: [response.text for response in responses],
        TOKENS: [response.tokens for response in responses],
        FINISH_REASONS: [response.finish_reason for response in responses],
        **({END_TOKENS: ends} if (ends := [r.end_token for r in responses]) and None not in ends else {}),
        **_conversation_columns([response.conversation for response in responses if response.conversation]),
    }


def _as_part(image: EncodedImage) -> dict[str, Any]:
    return {"type": "image", "image": image.data_url()}


def _conversation_columns(records: list[ConversationRecord]) -> dict[str, list[Any]]:
    """Return the columns of the conversations of a row; nothing without conversations."""
    if not records:
        return {}
    return {
        RESPONSE_MESSAGES: [converted_images(record.messages, _as_part) for record in records],
        TURNS: [len(record.turn_ends) for record in records],
        # evaluate leaves null out: the failure of an environment is not one of the model.
        ENVIRONMENT_REWARDS: [None if record.fault else sum(record.turn_rewards) for record in records],
        STOP_REASONS: [record.stop for record in records],
    }
