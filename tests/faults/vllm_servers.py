"""Real vLLM servers on this machine that are started again when they end, as a cluster's scheduler does."""

import os
import random
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress

import yaml

from lightning_rlhf.processes.child import LAUNCHER_PREFIXES
from tests.distributed.launch import ROOT, free_port

_OPTIONS = [
    "--host=127.0.0.1", "--tokens-only", "--load-format=dummy", "--dtype=float32", "--enforce-eager",
    "--logprobs-mode=processed_logprobs", '--weight-transfer-config={"backend": "shared_memory"}',
    "--worker-extension-cls=lightning_rlhf.extras.servers.plugin.SharedMemoryWorker",
    "--no-enable-chunked-prefill", "--kv-cache-memory-bytes=67108864",
]  # fmt: skip


class VLLMServers:
    """Servers of one model.

    Args:
        model: directory with its config.
        count: number of servers.
        max_model_len: largest number of tokens of a text.
        logs: directory for their output.
        faults: file of faults that tests.faults.faulty_server makes; None for servers without faults.
    """

    def __init__(self, model, count, max_model_len, logs, faults=None):
        self.deaths = 0
        self._ended = threading.Event()
        self._logs = logs
        self._ports = [free_port() for _ in range(count)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]
        self._command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--max-model-len", str(max_model_len), *_OPTIONS,
            *(["--middleware=tests.faults.faulty_server.Faults"] if faults else []),
        ]  # fmt: skip
        self._environment = {"FAULTS": str(faults)}
        self._processes = [self._start(port) for port in self._ports]
        self._restarter = threading.Thread(target=self._restart, daemon=True)
        self._restarter.start()

    def _start(self, port):
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
        fixed = {
            "PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        with (self._logs / f"server{port}.log").open("ab") as output:
            return subprocess.Popen(
                [*self._command, "--port", str(port)],
                env={**inherited, **fixed, **self._environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _restart(self):
        while not self._ended.wait(0.2):
            for index, process in enumerate(self._processes):
                if process.poll() is not None:
                    _signal_all(process, signal.SIGKILL)  # its engine
                    self._processes[index] = self._start(self._ports[index])

    def kill_at_random(self, until, steps, seed, every, number=signal.SIGKILL, most=1000):
        """Send signals to servers that respond, one at a time, until an event is set.

        Four of five signals follow the end of a step, so that they are spread over the run.

        Args:
            until: the event.
            steps: function that returns the number of finished steps.
            seed: seed of the times.
            every: largest number of seconds before a signal.
            number: signal, for all processes of a server.
            most: largest number of signals.
        """
        draw = random.Random(seed)
        while self.deaths < most:
            before, awaits_step = steps(), draw.random() < 0.8
            while awaits_step and steps() == before and not until.wait(0.05):
                pass
            if until.wait(draw.random() * every):
                return
            index = draw.randrange(len(self._processes))
            if _responds(self.urls[index]):
                self.deaths += 1
                _signal_all(self._processes[index], number)

    def kill_all(self):
        """Kill all servers; new ones take their places."""
        for process in self._processes:
            _signal_all(process, signal.SIGKILL)

    def close(self):
        """End all servers."""
        self._ended.set()
        self._restarter.join()
        self.kill_all()
        for process in self._processes:
            process.wait()


def _responds(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1):
            return True
    except OSError:
        return False


def _signal_all(process, number):
    """Send a signal to a server and its children; a dead server may have left some of them."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def with_servers(config, urls, **arguments):
    """Return the configuration of a run with these servers as engine."""
    config = yaml.safe_load(yaml.safe_dump(config))
    config["trainer"]["callbacks"][0]["init_args"]["engine"] = {
        "class_path": "lightning_rlhf.extras.servers.engine.VLLMServerEngine",
        "init_args": {"urls": urls, "timeout": 900.0, "max_restarts": 99, **arguments},
    }
    return config
