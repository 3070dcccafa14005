"""Forbidden constructs in the package: running code from data, and hiding errors."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*ROOT.glob("lightning_rlhf/**/*.py"), *ROOT.glob("callbacks/**/*.py"), *ROOT.glob("examples/*.py")])
# Number of broad ``except`` clauses per file. The engine's process sends errors to the trainer, which raises them;
# errors of a reward function or an environment are counted or end the run, depending on the configuration; threads
# pass errors to the thread that waits; the parser imports a user's module again, and reports its error.
PASSED_ON = {
    "lightning_rlhf/extras/doctor/command.py": 1,
    "lightning_rlhf/extras/doctor/trial.py": 1,
    "lightning_rlhf/calls/threads.py": 1,
    "lightning_rlhf/cli/signatures.py": 1,
    "lightning_rlhf/environments/hosts.py": 1,
    "lightning_rlhf/environments/live.py": 2,
    "lightning_rlhf/environments/loop_host.py": 1,
    "lightning_rlhf/extras/agents/endpoint.py": 1,
    "lightning_rlhf/rollout/generation.py": 3,
    "lightning_rlhf/rollout/vllm/engine.py": 1,
    "lightning_rlhf/rollout/vllm/receiver.py": 1,
    "lightning_rlhf/rollout/vllm/worker.py": 1,
    "lightning_rlhf/rewards/function.py": 1,
}
BROAD = {"Exception", "BaseException"}
CODE_FROM_DATA = {
    "eval", "exec", "compile", "os.system", "os.popen", "pickle.load", "pickle.loads", "cloudpickle.loads",
    "dill.loads", "marshal.loads", "yaml.load", "yaml.unsafe_load",
}  # fmt: skip
UNSAFE = {"trust_remote_code": True, "weights_only": False, "shell": True}


def dangers(source):
    """Return descriptions of the forbidden constructs in some code."""
    return [word for node in ast.walk(ast.parse(source)) for word in _dangers_of(node)]


def _dangers_of(node):
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name in CODE_FROM_DATA:
            yield f"{name}() at line {node.lineno}"
        for keyword in node.keywords:
            if isinstance(keyword.value, ast.Constant) and UNSAFE.get(keyword.arg, object()) is keyword.value.value:
                yield f"{keyword.arg}={keyword.value.value} at line {node.lineno}"
        if name == "torch.load" and not any(keyword.arg == "weights_only" for keyword in node.keywords):
            yield f"torch.load without weights_only at line {node.lineno}"
    if isinstance(node, ast.ExceptHandler) and _is_broad(node) and not _raises(node):
        yield f"a broad except that swallows at line {node.lineno}"


def _is_broad(handler):
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in BROAD for kind in kinds)


def _raises(handler):
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def test_package_has_no_forbidden_constructs():
    dangerous, swallowed = [], {}
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        for danger in dangers(path.read_text()):
            if danger.startswith("a broad except"):
                swallowed[name] = swallowed.get(name, 0) + 1
            else:
                dangerous.append(f"{name}: {danger}")
    assert dangerous == []
    assert swallowed == PASSED_ON


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("AutoModel.from_pretrained(path, trust_remote_code=True)", 1),
        ("AutoModel.from_pretrained(path, trust_remote_code=False)", 0),
        ("torch.load(path, weights_only=False)", 1),
        ("torch.load(path)", 1),
        ("torch.load(path, weights_only=True)", 0),
        ("pickle.load(file)", 1),
        ("eval(text)", 1),
        ("model.eval()", 0),
        ("subprocess.run(line, shell=True)", 1),
        ("try:\n    f()\nexcept:\n    pass", 1),
        ("try:\n    f()\nexcept (ValueError, Exception):\n    log()", 1),
        ("try:\n    f()\nexcept Exception as error:\n    raise RuntimeError('f') from error", 0),
        ("try:\n    f()\nexcept ValueError:\n    pass", 0),
    ],
)
def test_forbidden_constructs_are_detected(source, count):
    assert len(dangers(source)) == count
