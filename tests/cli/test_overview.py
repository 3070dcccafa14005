"""``lightning-rlhf`` lists its commands quickly and suggests a command for an unknown word."""

import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch import Trainer

from lightning_rlhf import __main__

LIGHTNING = {"fit", "validate", "test", "predict"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def call(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["lightning-rlhf", *arguments])
        code = __main__.main()
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def test_overview_lists_every_command_for_each_way_to_request_it(call):
    message = {call(*arguments) for arguments in ((), ("--help",), ("-h",), ("help",))}
    ((code, out, err),) = message
    assert (code, err) == (0, "")
    shown = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    further = out.splitlines()[-1].partition(": ")[2].partition(";")[0].split(", ")
    assert sorted([*shown, *further]) == sorted(__main__.COMMANDS)
    assert len(shown) <= 11
    assert all(len(line) < 100 for line in out.splitlines())


def test_command_comes_first(call):
    message = "lightning-rlhf: the command comes first: lightning-rlhf fit --config ...\n"
    assert call("--config", "x.yaml", "fit") == (2, "", message)
    assert call("--confg") == (2, "", "lightning-rlhf: unknown command '--confg'; lightning-rlhf --help lists all\n")


def test_c_is_short_for_config(call, monkeypatch, tmp_path):
    code, _, err = call("fit", "-c", str(tmp_path / "missing.yaml"))
    assert (code, err.startswith("lightning-rlhf: configuration file not found")) == (2, True)


def test_ctrl_c_during_imports_prints_one_line(call, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "import_module", interrupted)
    assert call("doctor") == (130, "", "lightning-rlhf: ended by Ctrl-C\n")


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"], ["new", "--list"], ["new", "{folder}/{number}"]])
def test_reader_that_ends_before_the_last_line_gets_no_traceback(arguments, tmp_path):
    def command_to(number):
        return [sys.executable, "-m", "lightning_rlhf", *(w.format(folder=tmp_path, number=number) for w in arguments)]

    line = f"{shlex.join(command_to(1))} | head -1"
    piped = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert (len(piped.stdout.splitlines()), piped.stderr) == (1, "")
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(command_to(2), cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_run_whose_output_has_no_reader_says_why_it_ends(call, monkeypatch):
    def broken(arguments):
        raise BrokenPipeError

    monkeypatch.setattr(__main__, "import_module", lambda name: SimpleNamespace(run=broken))
    monkeypatch.setattr(__main__, "_check_files", lambda name, arguments: True)
    monkeypatch.setattr(__main__, "_show", lambda text: 141)
    code, _, err = call("fit", "--config", "x.yaml")
    assert (code, err) == (
        141,
        "lightning-rlhf: the program that read the output has ended, and so the run ends\n",
    )


def test_another_pipe_that_broke_is_an_error(call, monkeypatch):
    def broken(arguments):
        raise BrokenPipeError("a socket")

    monkeypatch.setattr(__main__, "import_module", lambda name: SimpleNamespace(run=broken))
    with pytest.raises(BrokenPipeError, match="a socket"):
        call("doctor")


def test_overview_imports_no_heavy_libraries():
    ask = "import sys; sys.argv = ['x']; from lightning_rlhf.__main__ import main; main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = {name.split(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert not modules & {"torch", "lightning", "transformers", "numpy", "vllm", "datasets"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("servee", "did you mean 'serve'?"),
        ("fti", "did you mean 'fit'?"),
        ("exportt", "did you mean 'export'?"),
        ("check", "did you mean 'check-data'?"),
        ("check-dta", "did you mean 'check-data'?"),
        ("data", "did you mean 'check-data'?"),
        ("xyzzy", "lightning-rlhf --help lists all"),
    ],
)
def test_unknown_command_gives_one_line_and_code_2(call, word, message):
    assert call(word, "--config", "x.yaml") == (2, "", f"lightning-rlhf: unknown command {word!r}; {message}\n")


@pytest.mark.parametrize("name", sorted(__main__.COMMANDS.keys() - LIGHTNING))
def test_every_command_has_help(name, capsys):
    module = import_module(__main__.COMMANDS[name][0])
    arguments = ["--help"]
    try:
        code = module.run(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(__main__.COMMANDS))
def test_help_of_a_command_fits_on_a_screen(name, call, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    try:
        lines = call(name, "--help")[1].splitlines()
    except SystemExit:
        lines = capsys.readouterr().out.splitlines()
    assert 5 < len(lines) <= 50
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", sorted(LIGHTNING))
def test_help_of_fit_fits_on_a_screen_and_lists_trainer_arguments(call, name):
    code, out, err = call(name, "--help")
    assert (code, err) == (0, "")
    assert call(name, "--config", "x.yaml", "-h") == (code, out, err)
    assert out.startswith(f"usage: lightning-rlhf {name} --config FILE")
    assert len(out.splitlines()) <= 24
    assert max(len(line) for line in out.splitlines()) <= 120
    trainer = re.findall(r"--trainer\.(\w+) ", out)
    assert len(trainer) == 6
    assert set(trainer) <= set(inspect.signature(Trainer).parameters)


def test_all_options_of_fit_have_a_description(call, monkeypatch):
    shown = []
    monkeypatch.setattr(
        __main__, "import_module", lambda name: SimpleNamespace(run=lambda _: shown.append(sys.argv[1:]) or 0)
    )
    assert call("fit", "--help-all")[0] == 0
    assert call("generate", "--help-all")[0] == 0  # its own parser reads its arguments
    assert shown == [["fit", "--help"], ["generate", "--help-all"]]


@pytest.mark.parametrize(("name", "known"), [("train", "fit"), ("init", "new"), ("eval", "evaluate"), ("plam", "plan")])
def test_command_that_people_know_from_elsewhere_is_answered_with_ours(call, name, known):
    assert call(name) == (2, "", f"lightning-rlhf: unknown command {name!r}; did you mean {known!r}?\n")
