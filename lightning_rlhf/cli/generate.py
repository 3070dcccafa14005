"""``lightning-rlhf generate``: responses of a model, or of a server, to a file of prompts."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from lightning_rlhf.cli.answering import Answerer, Prompt, ServerAnswerer, digest
from lightning_rlhf.cli.arguments import command_parser
from lightning_rlhf.cli.engine_answering import EngineAnswerer
from lightning_rlhf.cli.main import is_for_users, quiet
from lightning_rlhf.cli.responses_file import FORMATS, ResponsesFile, check_format
from lightning_rlhf.seeding import derive_seed
from lightning_rlhf.types import SamplingParams

RESPONSES, TOKENS, REASONS, PROMPT_TOKENS = "responses", "response_tokens", "finish_reasons", "prompt_tokens"
_EPILOG = """Each line of the result is a row of the prompts file with its responses beside it. Interrupted, the same
command goes on where it was; each response has a seed of its own, whatever the batch size.

  lightning-rlhf generate --model runs/quickstart/ppo/export --prompts questions.jsonl --to answers.jsonl -n 4
  lightning-rlhf generate --server http://127.0.0.1:8000 --api-key-env KEY --prompts questions.jsonl --to answers.jsonl
"""


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("generate", "Responses of a model, or of a server, to a file of prompts.", _EPILOG)
    files = parser.add_argument_group("what")
    files.add_argument("--prompts", required=True, metavar="FILE", help="rows with a prompt: a file, a hub id, ...")
    files.add_argument("--to", type=Path, required=True, metavar="FILE", help=f"one of {', '.join(FORMATS)}")
    files.add_argument("--columns", nargs="+", default=[], metavar="OURS=YOURS", help="for example prompt=question")
    files.add_argument(
        "--as-messages", action="store_true", help="prompts of text are a user's messages to a chat model"
    )
    files.add_argument("--on-bad-row", choices=("error", "skip"), default="error", help="(default: error)")
    who = parser.add_argument_group("who answers")
    who.add_argument("--model", metavar="DIR", help="directory or hub id; with --server, the model's name there")
    who.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto", help="(default: auto)")
    who.add_argument("--dtype", choices=("float32", "bfloat16"), help="(default: bfloat16 with a GPU, else float32)")
    who.add_argument("--tensor-parallel-size", type=int, default=1, metavar="GPUS", help="GPUs that share the model")
    who.add_argument("--server", metavar="URL", help="a server with OpenAI's API instead of an engine here")
    who.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the server's key")
    who.add_argument("--concurrency", type=int, default=50, help="requests under way at a server (default: 50)")
    how = parser.add_argument_group("how")
    how.add_argument("-n", type=int, default=1, help="responses per prompt (default: 1)")
    how.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token (default: 1)")
    how.add_argument("--top-p", type=float, default=1.0, help="likeliest tokens up to this probability (default: 1)")
    how.add_argument("--top-k", type=int, default=0, help="likeliest tokens, 0 is all (default: 0)")
    how.add_argument("--max-tokens", type=int, default=512, help="longest response (default: 512)")
    how.add_argument("--seed", type=int, default=0, help="(default: 0)")
    how.add_argument("--batch-size", type=int, default=128, help="prompts answered before writing (default: 128)")
    return parser


def run(arguments: list[str]) -> int:
    """Answer prompts.

    Args:
        arguments: behind ``generate``.

    Returns:
        Exit code: 0; 2 for a mistake found before anything was generated; 1 where it ended before the end.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.server is None and given.model is None:
        parser.error("give a --model, or a --server")
    quiet()
    answerer: Answerer | None = None
    code = 2
    try:
        check(given)
        answerer = _answerer(given)
        prompts = answerer.prompts(given.prompts, pairs(given.columns), given.on_bad_row, given.as_messages)
        check_names(prompts)
        settings = {
            **answerer.identity(), "prompts": digest(prompts), "n": given.n, "temperature": given.temperature,
            "top_p": given.top_p, "top_k": given.top_k, "max_tokens": given.max_tokens, "seed": given.seed,
        }  # fmt: skip
        with closing(ResponsesFile(given.to, settings, len(prompts))) as file:
            if done := file.begin():
                print(f"{file.path} has {done} of {len(prompts)} rows already")
            if done < len(prompts):
                log = given.to.with_name(f"{given.to.name}.engine.log")
                print(f"answered by {answerer.start(max(len(prompt.ids) for prompt in prompts), log)}")
                code = 1
                answer_all(answerer, prompts, file, given.n, given.seed, given.batch_size)
                log.unlink(missing_ok=True)
            file.finish()
    except KeyboardInterrupt:
        print("lightning-rlhf: interrupted; the same command goes on where this one was", file=sys.stderr)
        return 1
    except Exception as error:
        if not is_for_users(error):
            raise
        print(f"lightning-rlhf: {error}", file=sys.stderr)
        return code
    finally:
        if answerer is not None:
            answerer.close()
    print(f"{len(prompts)} rows are in {given.to}")
    return 0


def check(given: argparse.Namespace) -> None:
    """Refuse what cannot be meant, before anything is read.

    Raises:
        ValueError: what it is.
    """
    check_format(given.to)
    for name in ("n", "batch_size", "concurrency", "tensor_parallel_size"):
        if getattr(given, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(given, name)}")
    if given.api_key_env is not None and given.server is None:
        raise ValueError("--api-key-env is for a --server, and none is given")


def _answerer(given: argparse.Namespace) -> Answerer:
    sampling = SamplingParams(given.max_tokens, given.temperature, given.top_p, given.top_k)
    if given.server is not None:
        return ServerAnswerer(given.server, given.api_key_env, given.model, sampling, given.concurrency)
    return EngineAnswerer(given.model, given.engine, given.dtype, sampling, given.tensor_parallel_size)


def pairs(given: list[str]) -> dict[str, str]:
    """Columns as they are given on a command line.

    Raises:
        ValueError: something is no pair.
    """
    wrong = [pair for pair in given if "=" not in pair]
    if wrong:
        raise ValueError(f"columns are given as ours=yours, for example prompt=question, got {wrong[0]!r}")
    return dict(pair.split("=", 1) for pair in given)


def check_names(prompts: list[Prompt]) -> None:
    """Refuse rows whose columns would be written over.

    Raises:
        ValueError: the column.
    """
    for name in (RESPONSES, TOKENS, REASONS, PROMPT_TOKENS):
        if any(name in prompt.row for prompt in prompts):
            raise ValueError(
                f"the prompts have a column {name!r} already, under which responses are written: rename it"
            )


def answer_all(
    answerer: Answerer, prompts: list[Prompt], file: ResponsesFile, n: int, seed: int, batch_size: int
) -> None:
    """Answer what is not answered yet, and write it batch by batch.

    Args:
        answerer: who answers.
        prompts: all of them.
        file: with the first of their answers.
        n: answers per prompt.
        seed: of the command; each answer has one of its own, from this, the prompt's place and its own number.
        batch_size: prompts per batch.
    """
    tokens, began = 0, time.monotonic()
    while file.done < len(prompts):
        places = range(file.done, min(file.done + batch_size, len(prompts)))
        seeds = [derive_seed(seed, "generate", place, number) for place in places for number in range(n)]
        answers = answerer.answer([prompts[place] for place in places for _ in range(n)], seeds)
        groups = [answers[first : first + n] for first in range(0, len(answers), n)]
        file.append([_row(prompts[place], group) for place, group in zip(places, groups, strict=True)])
        tokens += sum(answer.tokens or 0 for answer in answers)
        speed = tokens / (time.monotonic() - began)
        print(f"{file.done} of {len(prompts)} prompts, {tokens} tokens, {speed:.0f} tokens/s", flush=True)


def _row(prompt: Prompt, answers: list[Any]) -> dict[str, Any]:
    counts = {PROMPT_TOKENS: len(prompt.ids)} if prompt.ids else {}
    return {
        **prompt.row,
        **counts,
        RESPONSES: [answer.text for answer in answers],
        TOKENS: [answer.tokens for answer in answers],
        REASONS: [answer.finish_reason for answer in answers],
    }
