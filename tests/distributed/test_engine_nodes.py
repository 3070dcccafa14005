"""Runs whose servers are on other machines: the launchers with engines, and network namespaces with a slow, lossy link.

The weights do not cross the links here: NCCL needs GPUs, so the servers load them from shared memory.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import yaml

from lightning_rlhf.rollout.vllm.availability import vllm_installed
from tests.distributed.launch import ROOT, free_port
from tests.distributed.test_nodes import CLUSTER, expanded, finish, start, write_command
from tests.faults.runs import LLAMA, ppo
from tests.faults.vllm_servers import with_servers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not vllm_installed(), reason="vLLM is not installed"),
]
OPTIONS = (
    "--dtype float32 --max-model-len 128 --enforce-eager --no-enable-chunked-prefill --kv-cache-memory-bytes 67108864 "
    "--worker-extension-cls lightning_rlhf.extras.servers.plugin.SharedMemoryWorker"
)
SERVER = {
    "VLLM_API_KEY": "open sesame", "TRANSFER": '{"backend": "shared_memory"}', "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip

# Like srun, starts every task with its number and forwards signals.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
words, options = sys.argv[1:], {{}}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value or ("" if name == "--label" else words.pop(0))
tasks, nodes = int(options["--ntasks"]), int(options["--nodes"])
assert len(options["--nodelist"].split(",")) == nodes
def start(rank):
    each = tasks // nodes
    job = {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank % each, "SLURM_NODEID": rank // each, "SLURM_NTASKS": tasks,
           "SLURM_NNODES": nodes, "SLURM_NODELIST": "127.0.0.1"}}
    return subprocess.Popen(words, env={{**os.environ, **{{k: str(v) for k, v in job.items()}}}})
ranks = [start(rank) for rank in range(tasks)]
signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
while None in [rank.poll() for rank in ranks]:
    time.sleep(0.1)
sys.exit(max(abs(rank.returncode) for rank in ranks))
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the configuration of a run, the model of the servers, and the command of the launchers."""
    config = with_servers(ppo(1, max_steps=4), "servers.txt")
    config["trainer"]["strategy"] = "rlhf_ddp"
    (tmp_path / "bin").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    write_command(tmp_path, "lightning-rlhf", f'#!/bin/sh\nexec {sys.executable} -m lightning_rlhf "$@"\n')
    yield tmp_path
    for pid in servers_of(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def servers_of(folder):
    """Return the processes of servers with the folder's model."""
    listed = subprocess.run(["pgrep", "-f", f"api_server.*{folder}/model"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


def until(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def assert_servers_ended(folder, file="servers.txt"):
    until(lambda: not servers_of(folder), 60)
    assert (folder / file).read_text() == ""


def steps(text):
    return sorted(map(int, re.findall(r"^(?:\d: )?step (\d+): reward", text, re.MULTILINE)))


def test_slurm_job_with_an_engine_node(folder):
    write_command(folder, "srun", SRUN)
    write_command(folder, "scontrol", "#!/bin/sh\nprintf 'node0\\nnode1\\nnode2\\n'\n")
    job = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "lightning-rlhf", "SLURM_NNODES": "3", "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_JOB_NODELIST": "node[0-2]", "MASTER_PORT": str(free_port()), "MODEL": f"{folder}/model",
        "ENGINE_OPTIONS": OPTIONS, "HOST": "127.0.0.1", "PORT": str(free_port()), "CLUSTER": str(CLUSTER),
    }  # fmt: skip
    text = (folder / "run.yaml").read_text()
    assert "servers.txt" in text
    (folder / "run.yaml").write_text(text.replace("servers.txt", "servers-$SLURM_JOB_ID.txt"))
    command = ["bash", str(CLUSTER / "slurm_engines.sbatch"), "--config", "run.yaml"]
    codes, text = finish(folder, [start(folder, command, "job.log", **job, **SERVER)], 600)
    assert codes == [0], text[-4000:]
    assert steps(text) == [1, 2, 3, 4]
    assert_servers_ended(folder, "servers-7.txt")


def test_jobset_with_an_engine_pod(folder):
    jobs = yaml.safe_load((CLUSTER / "jobset_engines.yaml").read_text())["spec"]["replicatedJobs"]
    here = {
        "CONFIG": "run.yaml", "PROCESSES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "MODEL": f"{folder}/model", "DTYPE": "float32", "LENGTH": "128", "HOST": "127.0.0.1",
    }  # fmt: skip
    pods = {"node": [], "engine": []}
    for job in jobs:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        for index in range(job["template"]["spec"]["completions"] if job["name"] == "node" else 1):
            variables = (
                {"NODE_RANK": str(index), **here} if job["name"] == "node" else {**here, "PORT": str(free_port())}
            )
            for variable in container["env"]:
                variables.setdefault(variable["name"], variable.get("value", ""))
            variables = {**variables, **SERVER}
            command = [expanded(part, variables) for part in container["command"]]
            if job["name"] == "engine":
                command = [str(ROOT / command[0]), *command[1:-2], *OPTIONS.split()]
            pods[job["name"]].append(start(folder, command, f"{job['name']}{index}.log", **variables))
    codes, text = finish(folder, pods["node"], 600)
    pods["engine"][0].terminate()  # JobSet ends the pods when all nodes have ended
    assert codes == [0, 0], text[-4000:]
    assert pods["engine"][0].wait(60) == 143
    assert_servers_ended(folder)


# -- network namespaces ----------------------------------------------------------------


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines():
    """Four network namespaces, joined by a bridge: name and address of each."""
    names = {f"rlhf{number}": f"10.77.19.{number + 1}" for number in range(4)}
    try:
        ip("link", "add", "rlhfbr", "type", "bridge")
        ip("link", "set", "rlhfbr", "up")
        for name, address in names.items():
            ip("netns", "add", name)
            ip("link", "add", f"{name}br", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{name}br", "master", "rlhfbr")
            ip("link", "set", f"{name}br", "up")
            for words in (["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                ip("-n", name, *words)
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        remove(names)
        pytest.skip(f"this machine makes no network namespaces: {error}")
    yield list(names.items())
    remove(names)


def remove(names):
    for words in (*(["netns", "delete", name] for name in names), ["link", "delete", "rlhfbr"]):
        subprocess.run(["ip", *words], check=False, capture_output=True)


def make_slow_and_lossy(name, rate):
    """Limit the rate of a machine's link, with a queue so short that packets are lost."""
    limit = ["tbf", "rate", rate, "burst", "3000", "limit", "6000"]
    for device, of in (("eth0", name), (f"{name}br", None)):
        within = ["ip", "netns", "exec", of] if of else []
        subprocess.run([*within, "tc", "qdisc", "add", "dev", device, "root", *limit], check=True, capture_output=True)


def test_trainers_and_servers_on_machines_with_a_slow_and_lossy_link(folder, machines):
    (folder / "sitecustomize.py").write_text(
        "from lightning_rlhf.extras.servers.client import VLLMServer\n"
        "VLLMServer.is_local = property(lambda server: True)  # the memory is shared, unlike that of machines\n"
    )
    make_slow_and_lossy(machines[3][0], "4mbit")
    serving = ["servers.txt", "--model", f"{folder}/model", *OPTIONS.split()]
    common = {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": f"{folder}:{ROOT}", **SERVER}
    engines = [
        start(
            folder,
            ["ip", "netns", "exec", name, str(CLUSTER / "engine.sh"), *serving],
            f"{name}.log",
            **{**common, "HOST": address},
        )
        for name, address in machines[2:]
    ]
    position = {"MASTER_ADDR": machines[0][1], "MASTER_PORT": "29611", "NODES": "2", "PROCESSES": "1"}
    trainers = [
        start(
            folder,
            ["ip", "netns", "exec", name, str(CLUSTER / "torchrun.sh"), "--config", "run.yaml"],
            f"{name}.log",
            **{**common, **position, "NODE_RANK": str(rank)},
        )
        for rank, (name, _) in enumerate(machines[:2])
    ]
    try:
        until(lambda: "step 1: " in (folder / f"{machines[0][0]}.log").read_text(), 400)
        os.kill(servers_of(folder)[0], signal.SIGKILL)
        codes, text = finish(folder, trainers, 400)
        assert codes == [0, 0], text[-4000:]
        assert steps(text) == [1, 2, 3, 4]
        assert len((folder / "servers.txt").read_text().split()) == 2
        assert "has ended, and is started again" in text
    finally:
        for engine in engines:
            engine.terminate()
    assert [engine.wait(60) for engine in engines] == [143, 143]
    assert_servers_ended(folder)


def doctor(machines, folder, *options):
    position = {"MASTER_ADDR": machines[0][1], "MASTER_PORT": "29613", "GLOO_SOCKET_IFNAME": "eth0"}
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    line += [f"--master-addr={machines[0][1]}", "--master-port=29613"]
    processes = [
        start(
            folder,
            ["ip", "netns", "exec", name, *line, f"--node-rank={rank}", "-m", "lightning_rlhf", "doctor", *options],
            f"doctor{rank}.log",
            **position,
        )
        for rank, (name, _) in enumerate(machines[:2])
    ]
    codes, _ = finish(folder, processes, 300)
    return codes, (folder / "doctor0.log").read_text()


def test_doctor_measures_the_links(folder, machines):
    _, text = doctor(machines, folder, "--links")
    rate = int(re.search(r"link to rank 1 on \S+.*?([\d.]+) ms, (\d+) MB/s", text, re.DOTALL)[2])
    assert rate > 20
    assert "segments were lost" not in text
    make_slow_and_lossy(machines[1][0], "4mbit")
    codes, text = doctor(machines, folder, "--links")
    assert codes[0] == 1
    assert re.search(r"fault: the link to rank 1 on \S+ transfers 0\.\d MB/s", text)
    assert re.search(r"fault: [\d.]+% of the TCP segments were lost", text)
