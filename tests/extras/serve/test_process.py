"""The server's process ends with its parent in every case; invalid options are reported before it starts."""

import json
import os
import signal
import socket
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.serve import command
from lightning_rlhf.extras.serve.access import bind, is_local, load_key
from lightning_rlhf.extras.serve.example import curl_command, example_request
from lightning_rlhf.extras.serve.limits import Limits
from lightning_rlhf.extras.serve.process import ServedModel, ServerProcess
from lightning_rlhf.models.adapter_files import save_adapter
from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.models.lora import LoRA, is_adapter
from tests.extras.serve.conftest import CHAT_TEMPLATE
from tests.models.test_lora import parameters_of

ROOT = Path(__file__).resolve().parents[3]
MODEL = ServedModel("some/model", "m", "auto", 512, 64)
# Starts a child that ignores SIGTERM, as an engine that hangs would; writes both process ids to a file.
SERVER = """
import json, os, signal, subprocess, sys, time
from lightning_rlhf.extras.serve.server import _read_line, killed_with_parent
settings = json.loads(_read_line())
with killed_with_parent(settings["folder"]):
    child = subprocess.Popen([sys.executable, "-c",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
    open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
    print("up", os.environ.get("VLLM_API_KEY"), os.environ.get("VLLM_SERVER_DEV_MODE"), os.environ.get("MINE"),
        os.environ["VLLM_RPC_BASE_PATH"], settings["key"], flush=True)
    time.sleep(float(sys.argv[2]))
    raise ValueError("it broke")
"""
PARENT = """
import sys, time
from pathlib import Path
from tests.extras.serve.test_process import started
server = started(Path(sys.argv[1]), "600")
Path(sys.argv[1] + ".folder").write_text(str(server.folder))
time.sleep(600)
"""


def started(who, seconds, secrets=()):
    """Return a process with the stub above instead of vLLM; its log is next to the file ``who``."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return ServerProcess(
            MODEL, listening, key="the key", limits=Limits(), log=who.with_name("log"), secrets=secrets,
            command=(sys.executable, "-c", SERVER, str(who), seconds),
        )  # fmt: skip


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def written(path):
    return [int(part) for part in path.read_text().split()] if path.exists() else []


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_close_ends_the_server_and_its_children(tmp_path):
    server = started(tmp_path / "who", "600")
    pids = wait_for(lambda: written(tmp_path / "who"))
    assert server.folder.stat().st_mode & 0o777 == 0o700
    assert server.alive
    server.close()
    assert not server.alive
    wait_for(lambda: not any(runs(pid) for pid in pids), 5)
    assert not server.folder.exists()
    server.close()


def test_server_that_ends_leaves_no_processes_and_its_last_output(tmp_path):
    server = started(tmp_path / "who", "0.1")
    pids = wait_for(lambda: written(tmp_path / "who"))
    wait_for(lambda: not server.alive)
    wait_for(lambda: not any(runs(pid) for pid in pids), 5)
    assert server.log_tail().endswith("it broke")
    server.close()


@pytest.mark.slow
def test_killed_parent_ends_its_server(tmp_path):
    who = tmp_path / "who"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(who)], cwd=ROOT) as parent:
        try:
            pids = wait_for(lambda: Path(f"{who}.folder").exists() and written(who))
        finally:
            parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(runs(pid) for pid in pids), 20)
    wait_for(lambda: not Path(Path(f"{who}.folder").read_text()).exists(), 20)


def test_variables_that_open_vllm_or_hold_keys_are_not_passed_to_it(tmp_path, monkeypatch):
    for name in ("VLLM_API_KEY", "VLLM_SERVER_DEV_MODE", "MINE"):
        monkeypatch.setenv(name, "1")
    server = started(tmp_path / "who", "600", ["MINE"])
    wait_for(lambda: server.log_tail().startswith("up"))
    server.close()
    # The engine's sockets are in the folder; the key is neither in the environment nor on the command line.
    assert server.log_tail().split("\n")[0] == f"up None None None {server.folder} the key"


def test_vllm_runs_no_code_of_the_model_and_has_no_documentation_routes(tmp_path):
    line = MODEL.arguments()
    assert not [part for part in line if part.startswith(("--host", "--port", "--trust-remote-code", "--api-key"))]
    assert "--load-format=safetensors" in line
    assert "--disable-fastapi-docs" in line
    (inputs,) = (part for part in line if part.startswith("--override-generation-config="))
    assert json.loads(inputs.partition("=")[2]) == {"max_new_tokens": 64}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines, so set a key: --api-key-env NAME or"),
        (["--host", "::"], ":: can be reached from other machines, so set a key"),
        (["--host", "::ffff:0.0.0.0"], "::ffff:0.0.0.0 can be reached from other machines, so set a key"),
        (["--host", "::ffff:10.0.0.1"], "::ffff:10.0.0.1 can be reached from other machines, so set a key"),
        (["--host", "0"], "0 can be reached from other machines, so set a key"),
        (["--host", "example.org"], "example.org can be reached from other machines, so set a key"),
        (["--host", "0.0.0.0", "--api-key-env", "NOT_SET"], "NOT_SET must contain a key of at least 16 visible ASCII"),
        (["--api-key-env", "SHORT"], "SHORT must contain a key of at least 16 visible ASCII"),
        (["--api-key-env", "SPACED"], "SPACED must contain a key of at least 16 visible ASCII"),
        (["--api-key-file", "nowhere"], "key file nowhere not found"),
        (["--model", "runs/none/export"], "no model at 'runs/none/export'"),
        (["--api-key-file", "bytes"], "cannot read a key from bytes: 'utf-8' codec can't decode"),
        (["--port", "70000"], "the port must be from 0 (a free one) to 65535, got 70000"),
        (["--host", "x" * 100, "--api-key-env", "LONG"], f"cannot listen on {'x' * 100}:0: encoding with 'idna' codec"),
        (["--max-prompt-tokens", "0"], "max_prompt_tokens must be positive, got 0"),
        (["--adapter", "x"], "--adapter must be NAME=DIR, such as math=runs/math/export, got 'x'"),
        (["--adapter", "x=nowhere"], "no adapter at 'nowhere'"),
        (["--name", "x", "--adapter", "x=nowhere"], "--adapter x=nowhere: another model has the name 'x'"),
        (["--concurrency", "0"], "concurrency must be positive, got 0"),
        (["--seconds", "-1"], "seconds must be positive, got -1.0"),
    ],
)
def test_invalid_options_give_one_line_and_code_2(served_model, monkeypatch, tmp_path, capsys, arguments, message):
    monkeypatch.setattr(ServerProcess, "__init__", lambda *_, **__: pytest.fail("vLLM was started"))
    monkeypatch.setattr(command, "vllm_installed", lambda: True)
    monkeypatch.setenv("SHORT", "abc")
    monkeypatch.setenv("SPACED", "a key with spaces in it")
    monkeypatch.setenv("LONG", "0123456789abcdef")
    monkeypatch.chdir(tmp_path)
    Path("bytes").write_bytes(b"\xff" * 20)
    assert command.run(["--model", str(served_model), "--port", "0", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"lightning-rlhf: {message}")
    assert len(shown.err.splitlines()) == 1


def test_adapter_of_a_reward_model_gives_one_line_and_code_2(served_model, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ServerProcess, "__init__", lambda *_, **__: pytest.fail("vLLM was started"))
    monkeypatch.setattr(command, "vllm_installed", lambda: True)
    lora = LoRA(2, 4)
    model = Pretrained(str(served_model), lora=lora).scalar()
    named = parameters_of(model.lm).items()
    weights = {name: tensor for name, tensor in named if is_adapter(name) or name == "score.weight"}
    save_adapter(lora, weights, tmp_path / "judge", str(served_model), model.adapter_metadata)
    arguments = ["--model", str(served_model), "--port", "0", "--adapter", f"judge={tmp_path / 'judge'}"]
    assert command.run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "it is the adapter of a reward model or critic" in line


def test_occupied_port_is_reported_before_the_model_loads(served_model, monkeypatch, capsys):
    monkeypatch.setattr(command, "vllm_installed", lambda: True)
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert command.run(["--model", str(served_model), "--port", str(port)]) == 2
    message = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in message
    assert message.endswith("; choose another --port or --host\n")


def test_unusable_log_or_socket_gives_a_one_line_error(served_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "vllm_installed", lambda: True)
    inputs = ["--model", str(served_model), "--port", "0", "--log"]
    assert command.run([*inputs, str(tmp_path)]) == 2
    assert f"lightning-rlhf: cannot write the log {tmp_path}: Is a directory; choose another" in capsys.readouterr().err
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 80)
    assert command.run([*inputs, str(tmp_path / "log")]) == 2
    assert "is too long for sockets: set TMPDIR to a path of at most 56 characters" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()


def test_killed_server_leaves_no_processes(tmp_path):
    server = started(tmp_path / "who", "600")
    pids = wait_for(lambda: written(tmp_path / "who"))
    os.kill(server.process.pid, signal.SIGKILL)
    wait_for(lambda: not server.alive)
    server.close()
    wait_for(lambda: not any(runs(pid) for pid in pids), 5)


def test_model_name_is_that_of_its_directory(served_model, monkeypatch):
    monkeypatch.chdir(served_model)
    for inputs, name in ((".", served_model.name), (str(served_model), served_model.name), (".", "policy")):
        arguments = ["--model", inputs, *(["--name", name] if name == "policy" else [])]
        assert command._served_model(command.make_parser().parse_args(arguments), 64, 8).name == name
    config = command.Pretrained(str(served_model)).hf_config()
    monkeypatch.setattr(command.Pretrained, "hf_config", lambda self: config)
    options = command.make_parser().parse_args(["--model", "Qwen/Qwen3-0.6B"])
    assert command._served_model(options, 64, 8).name == "Qwen3-0.6B"


@pytest.mark.parametrize(
    ("path", "name"),
    [("runs/sums/ppo/export", "ppo"), ("export", "here"), ("/export", "export"), ("a/export-100", "export-100")],
)
def test_model_name_of_an_export_is_that_of_its_run(path, name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert command._name_of(path) == name


def test_example_request_fits_the_model_and_the_route():
    digits = CharacterTokenizer("0123456789+=").load()
    assert example_request(digits, 100, 64) == ("/v1/completions", {"prompt": "12+30=", "max_tokens": 32})
    assert example_request(digits, 5, 64)[1]["max_tokens"] == 5
    assert example_request(digits, 100, 16)[1]["max_tokens"] == 10
    odd = CharacterTokenizer("xyzw").load()
    assert example_request(odd, 100, 64)[1]["prompt"] == "xyzw"
    chats = CharacterTokenizer(string.printable).load()
    chats.chat_template = CHAT_TEMPLATE
    messages = [{"role": "user", "content": "Compute 12 + 30."}]
    assert example_request(chats, 100, 512) == ("/v1/chat/completions", {"messages": messages, "max_tokens": 32})
    chats.chat_template = "{{ raise_exception('a system message, please') }}"
    assert example_request(chats, 100, 512)[0] == "/v1/completions"


def test_example_is_quoted_for_a_shell_for_any_name(tmp_path):
    program = tmp_path / "curl"
    program.write_text('#!/bin/sh\nfor part; do echo "$part"; done\n')
    program.chmod(0o755)
    (tmp_path / "my key").write_text("0123456789abcdef")
    question = ("/v1/completions", {"prompt": "it's", "max_tokens": 1})
    for key in (("abc", "abc"), load_key(None, tmp_path / "my key")):
        text = curl_command("http://h:1", "the 'model'", key, question)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        output = subprocess.run(["sh", "-c", text], env=environment, capture_output=True, text=True, check=True).stdout
        url, _, header, _, _, _, body = output.splitlines()
        assert (url, header) == ("http://h:1/v1/completions", f"Authorization: Bearer {key[0]}")
        assert json.loads(body) == {"model": "the 'model'", "prompt": "it's", "max_tokens": 1}


def test_key_is_read_from_its_source_and_shown_only_if_generated(tmp_path, monkeypatch):
    def key(*arguments):
        inputs = command.make_parser().parse_args(["--model", "x", *arguments])
        return load_key(inputs.api_key_env, inputs.api_key_file)

    monkeypatch.setenv("MINE", "0123456789abcdef")
    (tmp_path / "key").write_text("fedcba9876543210\n")
    assert key("--api-key-env", "MINE") == ("0123456789abcdef", "$MINE")
    assert key("--api-key-file", str(tmp_path / "key")) == ("fedcba9876543210", f"$(cat {tmp_path / 'key'})")
    made, shown = key()
    assert made == shown
    assert len(made) >= 32
    assert made != key()[0]


def test_only_loopback_is_local():
    local = [is_local(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost")]
    open_ = [is_local(host) for host in ("0.0.0.0", "::", "10.0.0.1", "", "localhost.example.org", "*", "0", "LAN")]
    assert all(local)
    assert not any(open_)
