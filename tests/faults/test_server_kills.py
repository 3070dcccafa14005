"""A run with a teacher on a real vLLM server: kills of run and server, and resume, give the result without them."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from lightning_rlhf import FromConfig
from tests.distributed.launch import free_port
from tests.faults.runs import KILLED, LLAMA, TOKENIZER, data, output, ppo, rows
from tests.helpers import assert_close

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
TEACHER = {**LLAMA, "num_hidden_layers": 1}


class Server:
    """A vLLM server with the teacher, which can be killed and started again at the same address."""

    def __init__(self, directory):
        self.directory, self.port = directory, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.directory), "--port",
            str(self.port), "--dtype", "float32", "--max-logprobs", "18", "--max-model-len", "128", "--enforce-eager",
            "--served-model-name", "teacher",
        ]  # fmt: skip
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with (self.directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        return self

    def wait(self):
        for _ in range(400):
            assert self.process.poll() is None, (self.directory / "server.log").read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=1):
                    return self
            except OSError:
                time.sleep(0.5)
        raise TimeoutError((self.directory / "server.log").read_text()[-4000:])

    def kill(self):
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("vllm")
    directory = tmp_path_factory.mktemp("teacher")
    FromConfig(TEACHER, seed=5).causal().save_pretrained(directory)
    from lightning_rlhf.data.tokenizers import CharacterTokenizer

    CharacterTokenizer(**TOKENIZER["init_args"]).load().save_pretrained(directory)
    server = Server(directory)
    yield server.start().wait()
    server.kill()


def distillation(server, max_staleness):
    """Return 8 steps of a student, with a checkpoint after every second."""
    config = ppo(max_staleness=max_staleness)
    actor = config["model"]["init_args"]["actor"]
    config["model"] = {
        "class_path": "lightning_rlhf.DistillationModule",
        "init_args": {
            "actor": actor,
            "teacher": {
                "class_path": "lightning_rlhf.extras.judges.teacher_server.TeacherServer",
                "init_args": {"urls": [server.url]},
            },
            "divergence": {"beta": 0.5, "top_k": 4},
            "optimizer": {"lr": 3.0e-3, "weight_decay": 0.0},
            "minibatch_size": 4,
        },
    }
    config["data"]["init_args"] = data("prompts", "Problems")
    loop, *others = config["trainer"]["callbacks"]
    callbacks = [each for each in others if "KLControl" not in each["class_path"]]
    config["trainer"] |= {"callbacks": [loop, *callbacks], "max_steps": 8, "val_check_interval": 4}
    return config


def losses(directory):
    return [float(dict(row)["loss/distillation"]) for row in rows(directory) if dict(row)["loss/distillation"]]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_kills_of_run_and_server_change_no_result(forge, server, tmp_path, max_staleness):
    config = distillation(server, max_staleness)
    assert forge.attempt(tmp_path / "whole", config) == 0, output(tmp_path / "whole")[-4000:]
    expected = losses(tmp_path / "whole")
    assert len(expected) == 8
    assert expected[-1] != expected[0]

    directory = tmp_path / "killed"
    middle = ("lightning_rlhf.modules.role_module:RoleModule.update", 7, "before")  # two updates in a step
    assert forge.attempt(directory, config, position=middle) == KILLED

    server.kill()
    assert forge.attempt(directory, config, resume="last") == 2  # not there before the run: an error at once
    assert server.url in output(directory).splitlines()[-1]

    server.start().wait()
    parts = output(directory).count("run directory: ")

    def restart():
        """Let the server die and come back during the run: after its checks, before its first step."""
        while output(directory).count("run directory: ") == parts:
            time.sleep(0.05)
        server.kill()
        server.start()

    restarted = threading.Thread(target=restart, daemon=True)
    restarted.start()
    assert forge.attempt(directory, config, resume="last") == 0, output(directory)[-4000:]
    restarted.join()
    server.wait()
    # The server batches texts by their arrival, which changes rounding, so that bits are not compared.
    assert_close(losses(directory), expected, rtol=1e-3, atol=1e-4)
