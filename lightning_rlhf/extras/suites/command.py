"""``lightning-rlhf evaluate --suite``: run the tasks of another package, and show its figures like those of rewards."""

from __future__ import annotations

import argparse
import codecs
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lightning_rlhf.cli.screen import configure_messages
from lightning_rlhf.data.tokenizers import load_tokenizer
from lightning_rlhf.expected_errors import MissingPackageError, RunError, UsageError, for_terminal
from lightning_rlhf.extras.commands.evaluate import table
from lightning_rlhf.extras.commands.exit_codes import ended_by_sigterm, failure_code_1
from lightning_rlhf.extras.commands.options import table_width
from lightning_rlhf.extras.commands.response_backends import served_model, weights_digest
from lightning_rlhf.extras.commands.responses_file import locked_settings, write_errors
from lightning_rlhf.extras.judges.endpoint import read_key
from lightning_rlhf.extras.suites.harness import Harness
from lightning_rlhf.extras.suites.inspection import Inspection
from lightning_rlhf.extras.suites.suite import Suite, SuiteRun, report
from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.models.positions import max_positions
from lightning_rlhf.processes.child import Child, describe_exit, inherited_environment
from lightning_rlhf.rollout.vllm.availability import vllm_installed

_SUITES: dict[str, Suite] = {"lm-eval": Harness(), "inspect": Inspection()}
_LAUNCH = (sys.executable, "-m", "lightning_rlhf.extras.suites.launch")
_CLOSE_SECONDS = 30.0  # inspect writes its log when it is interrupted
_CHANGEABLE = ("folder", "concurrency", "batch_size", "server", "longest")  # between two calls for the same results


def run_suite(options: argparse.Namespace, further: Sequence[str]) -> int:
    """Run the tasks, or continue with them, and print a table of the figures.

    Args:
        options: options of the command.
        further: options of the suite's own command line.

    Returns:
        Exit code: 0, 2 for a mistake found before the suite started, 1 if it failed or was interrupted.
    """
    configure_messages()
    suite = _SUITES[options.suite]
    if find_spec(suite.module) is None:
        raise MissingPackageError(
            f"--suite {options.suite} needs {suite.module}, which is not installed: pip install {suite.package}"
        )
    _check_options(options, further)
    run = _suite_run(options, further)
    suite.check(run)
    settings = {name: value for name, value in asdict(run).items() if name not in _CHANGEABLE}
    settings |= {"suite": options.suite, "version": version(suite.module)}
    if run.model is not None:
        settings["weights"] = weights_digest(run.model)
    with write_errors(run.folder, "choose another --to"):
        run.folder.mkdir(parents=True, exist_ok=True)
    lock = locked_settings(run.folder / "settings.json", json.loads(json.dumps(settings)), run.folder)
    try:
        with failure_code_1():
            if suite.results(run):
                print(f"{run.folder} has the results already")
            else:
                with ended_by_sigterm():
                    _execute(suite, run, options)
            _show(suite, run, options.suite, options.json)
    except KeyboardInterrupt:
        print("lightning-rlhf: interrupted; the same command continues from here", file=sys.stderr)
        return 1
    finally:
        lock.close()
    return 0


def _check_options(options: argparse.Namespace, further: Sequence[str]) -> None:
    if options.files:
        raise UsageError(
            f"--suite has its own prompts, so leave out {options.files[0]}; the suite's own options follow after --"
        )
    scoring = ("reward", "messages", "answer", "columns", "roles", "images", "keep")
    if given := next((name for name in scoring if getattr(options, name)), None):
        raise UsageError(
            f"--{given} is for files of responses: leave it out, the tasks of --suite have their own scores"
        )
    for name in ("tasks", "to"):
        if not getattr(options, name):
            raise UsageError(f"--suite needs --{name}, for example --tasks gsm8k --to results/x")
    if not options.server and options.model is None:
        raise UsageError("--suite needs --model DIR, or --server URL")
    if options.server and len(options.server) > 1:
        raise UsageError(f"--suite asks one server, got {len(options.server)}: name one, or the address of a balancer")
    if options.api_key_env is not None and not options.server:
        raise UsageError("--api-key-env needs --server")
    for name in ("limit", "max_tokens", "batch_size", "concurrency"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    for name in ("fewshot", "temperature"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < float("inf"):
            raise UsageError(f"--{name} must be at least 0, got {value}")
    if any("trust_remote_code" in word for word in further):
        raise UsageError("trust_remote_code runs code of the hub, which no command here does: leave it out")


def _suite_run(options: argparse.Namespace, further: Sequence[str]) -> SuiteRun:
    """Return what the options ask for; asks a server for its model."""
    common = {
        name: getattr(options, name)
        for name in ("include_path", "limit", "fewshot", "max_tokens", "temperature", "batch_size", "concurrency")
    }
    common |= {"tasks": [task for names in options.tasks for task in names.split(",")], "folder": options.to}
    common["further"] = list(further)
    if options.server:
        url = options.server[0].rstrip("/").removesuffix("/v1")
        served = served_model(url, options.api_key_env, options.model)
        tokenizer = options.tokenizer
        chat, adds_bos = _prompt_form(tokenizer, options.chat_template)
        return SuiteRun(
            **common,
            chat=chat,
            server=url,
            served_name=served["id"],
            tokenizer=tokenizer,
            adds_bos=adds_bos,
            longest=served.get("max_model_len"),
        )
    if options.tokenizer is not None:
        raise UsageError("--tokenizer is that of a server: leave it out, --model has its own")
    source = Pretrained(options.model)
    has_gpu = torch.cuda.is_available()
    chat, adds_bos = _prompt_form(source.path, options.chat_template)
    return SuiteRun(
        **common,
        chat=chat,
        model=source.path,
        adds_bos=adds_bos,
        longest=max_positions(source.hf_config()),
        is_vllm=options.engine == "vllm" or (options.engine == "auto" and _prefers_vllm(options.suite, has_gpu)),
        dtype=options.dtype or ("bfloat16" if has_gpu else "float32"),
    )


def _prefers_vllm(suite: str, has_gpu: bool) -> bool:
    return suite == "lm-eval" and has_gpu and vllm_installed()


def _prompt_form(tokenizer: str | None, chat: bool | None) -> tuple[bool, bool]:
    """Return whether prompts are rendered by the chat template, and whether the tokenizer begins a text with BOS.

    Raises:
        UsageError: both forms are possible and none was chosen, or there is no template.
    """
    choice = (
        "set --chat-template or --no-chat-template, because scores depend on it and the suites have different defaults"
    )
    if tokenizer is None:
        if chat is None:
            raise UsageError(f"a server may have a chat template: {choice}")
        return chat, False
    loaded = load_tokenizer(tokenizer)
    if loaded.chat_template is None and chat:
        raise UsageError(f"the tokenizer of {tokenizer} has no chat template: set --no-chat-template")
    if loaded.chat_template is not None and chat is None:
        raise UsageError(f"{tokenizer} has a chat template: {choice}")
    first = loaded("a")["input_ids"][:1]
    return bool(chat), loaded.bos_token_id is not None and first == [loaded.bos_token_id]


def _execute(suite: Suite, run: SuiteRun, options: argparse.Namespace) -> None:
    """Run the suite with its output on the screen and in ``output.log``.

    Raises:
        RunError: it failed, or left no results.
    """
    log = run.folder / "output.log"
    # A key of another service must not reach this server.
    environment = inherited_environment([suite.key, "OPENAI_BASE_URL"])
    if run.server is not None:
        environment[suite.key] = read_key(options.api_key_env) if options.api_key_env else "none"
    root = str(Path(__file__).resolve().parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    with write_errors(run.folder, "choose another --to"):
        command = [*_LAUNCH, *suite.command(run)]
        file = log.open("wb")
    print(f"{options.suite}: {', '.join(run.tasks)}; its output is in {log}", flush=True)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with file, Child(command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        try:
            while chunk := os.read(process.stdout.fileno(), 1 << 16):
                file.write(chunk)
                sys.stderr.write(decoder.decode(chunk))
                sys.stderr.flush()
            code = process.wait()
        finally:
            if process.poll() is None:
                process.signal_group(signal.SIGINT)
            process.end(_CLOSE_SECONDS)
    if code or not suite.results(run):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise RunError(
            f"{options.suite} ended with {describe_exit(code)} and without results: "
            f"{lines[-1][:500] if lines else 'no output'} ({log}); the same command continues after a correction"
        )


def _show(suite: Suite, run: SuiteRun, name: str, json_file: Path | None) -> None:
    """Print the figures and write them to ``report.json``, and to a file that was asked for."""
    tasks = suite.results(run)
    title = str(run.model if run.server is None else f"{run.served_name} at {run.server}")
    form = {"suite": name, "version": version(suite.module), "chat_template": run.chat, "limit": run.limit}
    result: dict[str, Any] = report(title, tasks, **form)
    screen = Console(width=table_width(), markup=False, emoji=False, highlight=False)
    screen.print(table([result]))
    prompts = "rendered by the chat template" if run.chat else "texts without a chat template"
    begins = ", each after the tokenizer's BOS" if run.adds_bos and not run.chat else ""
    screen.print(for_terminal(f"{name} {form['version']}; prompts are {prompts}{begins}"))
    if run.limit is not None:
        screen.print(f"the first {run.limit} rows of each task only: compare with nothing but the same rows")
    for path in filter(None, (run.folder / "report.json", json_file)):
        with write_errors(path, "the table is above"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=2) + "\n")
