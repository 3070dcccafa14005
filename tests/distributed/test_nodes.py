"""The launchers in examples/cluster/ run unchanged, each with two nodes of two processes on this machine."""

import copy
import os
import re
import subprocess
import sys
import time

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from lightning_rlhf.strategies.checkpoints import manifest
from tests.cli.conftest import PPO
from tests.distributed.launch import ROOT, free_port

CLUSTER = ROOT / "examples" / "cluster"
LAST = "runs/tiny/checkpoints/last.ckpt"
SECONDS_TO_END = 40  # limit for the other node to end after one was killed; 4 s on an idle machine of two cores
# Variables that launchers set, which the tests' own environment must not pass on.
LAUNCHER_PREFIXES = ("SLURM", "TORCHELASTIC", "MASTER", "NODE_RANK", "LOCAL_", "RANK", "WORLD_SIZE", "PL_GLOBAL")

# Like srun, starts every task with its number, and ends all when one fails; also checks the options of the job file.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys, time
nodes, tasks = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
assert sys.argv[1:3] == ["--kill-on-bad-exit=1", "--label"] and os.environ["SRUN_CPUS_PER_TASK"] == "1"
def start(rank):
    number = {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank % tasks, "SLURM_NODEID": rank // tasks}}
    job = {{"SLURM_NTASKS": nodes * tasks, **number}}
    return subprocess.Popen(sys.argv[3:], env={{**os.environ, **{{k: str(v) for k, v in job.items()}}}})
ranks = [start(rank) for rank in range(nodes * tasks)]
while None in [rank.poll() for rank in ranks] and not any(rank.poll() for rank in ranks):
    time.sleep(0.1)
for rank in ranks:
    rank.kill()
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


def write_run(folder, reward="lightning_rlhf.tasks.addition.exact", steps=2):
    """Write a PPO configuration for two nodes, and the commands that the launchers call."""
    config = copy.deepcopy(PPO)
    config["model"]["init_args"]["optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
    config["trainer"] |= {"strategy": "ddp", "max_steps": steps, "max_epochs": -1}
    config["trainer"]["callbacks"][0]["init_args"]["rewards"] = [{"function": reward}]
    save = {"class_path": "lightning_rlhf.callbacks.RunCheckpoint", "init_args": {"every_n_steps": 1}}
    config["trainer"]["callbacks"].append(save)
    (folder / "bin").mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    write_command(folder, "lightning-rlhf", f'#!/bin/sh\nexec {sys.executable} -m lightning_rlhf "$@"\n')


def write_command(folder, name, text):
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)


def start(folder, command, name, **variables):
    """Start a node or a job; its output is written to a file of the given name."""
    base = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_PREFIXES)}
    base |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    base |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / name).open("w") as output:
        return subprocess.Popen(command, cwd=folder, env={**base, **variables}, stdout=output, stderr=subprocess.STDOUT)


def torchrun(folder, *options):
    """Start two nodes like torchrun.sh."""
    position = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODES": "2", "PROCESSES": "2"}
    command = [str(CLUSTER / "torchrun.sh"), "--config", "run.yaml", *options]
    return [start(folder, command, f"node{i}.log", **position, NODE_RANK=str(i)) for i in range(2)]


def slurm(folder):
    """Start the job like sbatch, with an srun that starts the tasks on this machine."""
    write_command(folder, "srun", SRUN)
    command = ["bash", str(CLUSTER / "slurm.sbatch"), "--config", "run.yaml"]
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "lightning-rlhf", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "2"}
    position = {"SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [start(folder, command, "job.log", **job, **position)]


def jobset(folder):
    """Start the pods like JobSet and Kubernetes, with cluster-dependent values set to this machine."""
    (job,) = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    here = {"CONFIG": "run.yaml", "PROCESSES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pods = []
    for index in range(job["template"]["spec"]["completions"]):
        variables = {"JOB_COMPLETION_INDEX": str(index)}
        for variable in container["env"]:
            if "valueFrom" in variable:
                path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
                variables[variable["name"]] = str(index)
            else:
                variables[variable["name"]] = here.get(variable["name"], variable["value"])
        command = [expanded(part, variables) for part in container["command"]]
        pods.append(start(folder, command, f"pod{index}.log", **variables))
    return pods


def expanded(text, variables):
    """Return the text with ``$(NAME)`` expanded, as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda result: variables[result[1]], text)


def finish(folder, processes, seconds=500):
    """Wait for the processes and return their exit codes and their output."""
    until = time.monotonic() + seconds
    try:
        codes = [process.wait(max(0.1, until - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            kill(process)
    return codes, "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))


def kill(process):
    """Kill a process and all its children, like a machine that loses its power."""
    if process.poll() is not None:
        return
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    process.wait()
    psutil.wait_procs(family)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Weights of the same run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    write_run(folder)
    codes, printed = finish(folder, [start(folder, ["lightning-rlhf", "fit", "--config", "run.yaml"], "run.log")])
    assert codes == [0], printed
    return load_file(folder / "runs/tiny/export/model.safetensors")


def assert_same_weights(folder, others):
    weights = load_file(folder / "runs/tiny/export/model.safetensors")
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("launcher", [torchrun, slurm, jobset])
def test_two_nodes_of_two_processes_train_like_one_process(launcher, alone, tmp_path):
    folder = tmp_path / "run"
    write_run(folder)
    codes, printed = finish(folder, launcher(folder))
    assert set(codes) == {0}, printed
    lines = [line for line in printed.splitlines() if line.startswith("step 2: reward/mean")]
    assert len(lines) == 1  # of one of the four processes
    assert_same_weights(folder, alone)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_node_is_reported_by_the_others_which_end_and_the_run_resumes(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        write_run(folder, reward="tests.distributed.slow_rewards.exact", steps=5)
    nodes = torchrun(killed)
    until = time.monotonic() + 200
    while not manifest.exists(killed / LAST) and time.monotonic() < until and nodes[0].poll() is None:
        time.sleep(0.05)
    assert manifest.exists(killed / LAST), (killed / "node0.log").read_text()
    time.sleep(0.3)  # into the next step
    kill(nodes[1])
    codes, printed = finish(killed, nodes[:1], SECONDS_TO_END)  # raises if it takes longer
    assert codes == [1], printed
    reports = [line for line in (killed / "node0.log").read_text().splitlines() if " ends" in line]
    assert len(reports) == 2, printed  # one of each rank
    for line in reports:
        assert re.search(
            r"rank [01] \(node 0, .*ends.*: node 1: rank 2 .*, rank 3 .* ended without a message: killed", line
        )
    assert "step 5: " not in printed
    codes, printed = finish(killed, torchrun(killed, "--ckpt_path", "last"))
    assert codes == [0, 0], printed
    assert "step 1: " not in printed  # it resumed instead of starting again
    assert "step 5: " in printed
    command = ["lightning-rlhf", "fit", "--config", "run.yaml"]
    codes, printed = finish(whole, [start(whole, command, "run.log")])
    assert codes == [0], printed
    assert_same_weights(killed, load_file(whole / "runs/tiny/export/model.safetensors"))


def test_torchrun_script_reports_a_missing_address():
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run([CLUSTER / "torchrun.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "MASTER_ADDR: is the machine of node 0" in done.stderr


def test_job_files_are_consistent():
    jobset = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert spec["parallelism"] == spec["completions"] == int(variables["NODES"])
    assert variables["MASTER_ADDR"] == f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(variables["PROCESSES"])
    assert (ROOT / variables["CONFIG"]).is_file()
    batch = (CLUSTER / "slurm.sbatch").read_text()
    tasks = re.search(r"#SBATCH --ntasks-per-node=(\d+)", batch)[1]
    assert f"#SBATCH --gres=gpu:{tasks}\n" in batch
    for script in ("torchrun.sh", "slurm.sbatch"):
        named = re.findall(r"--config (\S+\.yaml)", (CLUSTER / script).read_text())
        assert named
        assert all((ROOT / path).is_file() for path in named)
        assert subprocess.run(["bash", "-n", CLUSTER / script]).returncode == 0


def test_files_linked_from_the_readme_exist():
    for link in re.findall(r"\]\(([^)]+)\)", (CLUSTER / "README.md").read_text()):
        assert (CLUSTER / link.partition("#")[0]).resolve().exists(), link
