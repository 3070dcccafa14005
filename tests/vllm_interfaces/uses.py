"""What this project uses of vLLM, read from its own source."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_rlhf"
SERVERS = PACKAGE / "extras" / "servers"

_LLM = "vllm.entrypoints.llm:LLM"
_RUNNERS = ("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.gpu.model_runner:GPUModelRunner")
_TRANSFER = "vllm.distributed.weight_transfer.base"
_NCCL = "vllm.distributed.weight_transfer.nccl_engine:NCCLTrainerWeightTransferEngine"

# By file: the expressions in it whose values are vLLM's objects, and their classes. Whatever the file asks of these
# expressions is a use: with "state.detokenizer" in the table, state.detokenizer.num_output_tokens() is a use of
# vllm.v1.engine.detokenizer:IncrementalDetokenizer.num_output_tokens, called without arguments. Of several classes each
# one is there in some runs, so that all must have what is asked. "Class.self" is self in the methods of a class.
OBJECTS: dict[str, dict[str, tuple[str, ...]]] = {
    "rollout/vllm/core.py": {
        "self._llm": (_LLM,),
        "self._engine": ("vllm.v1.engine.llm_engine:LLMEngine",),
        "self._engine.output_processor": ("vllm.v1.engine.output_processor:OutputProcessor",),
        "state": ("vllm.v1.engine.output_processor:RequestState",),
        "state.detokenizer": ("vllm.v1.engine.detokenizer:IncrementalDetokenizer",),
        "config": ("vllm.config:VllmConfig",),
        "config.cache_config": ("vllm.config:CacheConfig",),
        "config.scheduler_config": ("vllm.config:SchedulerConfig",),
        "output": ("vllm.outputs:RequestOutput",),
        "sample": ("vllm.outputs:CompletionOutput",),
        "first": ("vllm.outputs:WeightVersionSpan",),
        "span": ("vllm.outputs:WeightVersionSpan",),
        "output.prompt_logprobs": ("vllm.logprobs:FlatLogprobs",),
        "sample.logprobs": ("vllm.logprobs:FlatLogprobs",),
    },
    "rollout/vllm/receiver.py": {
        "WeightReceiver.self": ("vllm.v1.worker.gpu_worker:Worker",),
        "self.model_runner": _RUNNERS,
        "runner": _RUNNERS,
    },
    "extras/servers/plugin.py": {
        "SharedMemoryTransfer.self": (f"{_TRANSFER}:WeightTransferEngine",),
        "GuardedRoutes.self": ("vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware",),
    },
    "extras/servers/push.py": {"engine": (_NCCL,)},
    "extras/serve/server.py": {"engine": ("vllm.v1.engine.async_llm:AsyncLLM",)},
    "extras/environments/vllm_parser.py": {
        "parser_class": ("vllm.tool_parsers.abstract_tool_parser:ToolParser",),
        "parser": ("vllm.tool_parsers.abstract_tool_parser:ToolParser",),
        "request": ("vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",),
        "result": ("vllm.entrypoints.generate.base.protocol:ExtractedToolCallInformation",),
        "call": ("vllm.entrypoints.generate.base.protocol:ToolCall",),
        "call.function": ("vllm.entrypoints.generate.base.protocol:FunctionCall",),
    },
}
# Classes of ours that vLLM calls, by file and name, with the class of vLLM whose methods they have.
IMPLEMENTED = {
    "extras/servers/plugin.py:SharedMemoryTransfer": f"{_TRANSFER}:WeightTransferEngine",
    "extras/servers/push.py:Chunk": f"{_TRANSFER}:WeightSource",
    "extras/servers/push.py:_ChunkClient": f"{_TRANSFER}:VLLMWeightSyncClient",
}
_ARGUMENTS = "vllm.engine.arg_utils:EngineArgs"
# Functions whose dicts have arguments of vllm.LLM as their keys.
_ARGUMENT_FUNCTIONS = {
    "rollout/vllm/engine.py": ("llm_arguments",),
    "rollout/vllm/adapters.py": ("adapter_arguments", "layers_and_rank"),
}
# Objects and fields that no expression shows: those of other processes, and what is read from their messages.
_OTHERS = (
    "vllm.config:ModelConfig.max_model_len",
    "vllm.config:ModelConfig.logprobs_mode",
    "vllm.config:ModelConfig.skip_tokenizer_init",
    "vllm.config:ModelConfig.hf_overrides",
    "vllm.config:SchedulerConfig.enable_chunked_prefill",
    "vllm.config:DeviceConfig.device",
    "vllm.config:VllmConfig.weight_transfer_config",
    "vllm.config:WeightTransferConfig.backend",
)


class Call(NamedTuple):
    """A call of vLLM: how many arguments are given by position, which by name, and whether more follow in a list."""

    positional: int
    names: tuple[str, ...]
    has_more: bool


class Use(NamedTuple):
    """A use of vLLM: the line of our source, alternative places in vLLM, the call if it is one, and its entry above."""

    where: str
    alternatives: tuple[str, ...]
    call: Call | None = None
    entry: str = ""


def entries() -> list[str]:
    """Return the entries of the tables above, each of which must match something in our source."""
    functions = [f"{file}:{name}" for file, names in _ARGUMENT_FUNCTIONS.items() for name in names]
    return [*functions, *(f"{file}:{text}" for file, texts in OBJECTS.items() for text in texts)]


def uses() -> list[Use]:
    """Return all uses of vLLM's Python interfaces."""
    found = [Use("messages of servers", (place,)) for place in _OTHERS]
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text("utf-8")
        if "vllm" in text:
            found += _of_file(str(file.relative_to(PACKAGE)), ast.parse(text))
    return found


def routes() -> dict[str, set[str]]:
    """Return the routes of servers that are requested, as ``POST /pause``, and the names of their parameters."""
    found: dict[str, set[str]] = {"POST /inference/v1/generate": set()}  # its path is a constant
    for file in SERVERS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and (route := _route(node)):
                found.setdefault(route, set()).update(_parameters(node))
    return dict(sorted(found.items()))


def _route(call: ast.Call) -> str:
    """Return the route that a call requests by ``get``, ``post`` or ``_confirmed``; empty for another call."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    texts = [part.value for part in call.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    path = next((text for text in texts if text.startswith("/")), "")
    return f"{'GET' if name == 'get' else 'POST'} {path}" if path and name in ("get", "post", "_confirmed") else ""


def _parameters(call: ast.Call) -> set[str]:
    """Return the parameters of a request: arguments by name, and the keys of its body."""
    names = {keyword.arg or "" for keyword in call.keywords} - {"seconds", "with_key"}  # of our client
    bodies = [part for part in call.args if isinstance(part, ast.Dict)]
    return names | {str(key.value) for body in bodies for key in body.keys if isinstance(key, ast.Constant)}


def variables() -> list[str]:
    """Return the environment variables of vLLM that are set or read."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("VLLM_"):
                found.add(node.value)
    return sorted(found)


def implemented() -> Iterator[tuple[str, str, ast.ClassDef]]:
    """Yield our classes whose methods vLLM calls: their place, vLLM's class, and their definition."""
    for place, theirs in IMPLEMENTED.items():
        file, _, name = place.partition(":")
        tree = ast.parse((PACKAGE / file).read_text("utf-8"))
        yield place, theirs, next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)


def _of_file(file: str, tree: ast.Module) -> Iterator[Use]:
    objects = {text: places for text, places in OBJECTS.get(file, {}).items() if not text.endswith(".self")}
    for use, name in _imports(file, tree):
        yield use
        yield from _asked(file, tree, {name: use.alternatives}, are_alternatives=True)
    yield from _asked(file, tree, objects)
    for text, places in OBJECTS.get(file, {}).items():
        if text.endswith(".self"):
            node = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and f"{n.name}.self" == text)
            own = _own_names(node)
            for use in _asked(file, node, {"self": places}):
                if use.alternatives[0].split(".")[-1] not in own:
                    yield use._replace(entry=f"{file}:{text}")
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name in _ARGUMENT_FUNCTIONS.get(file, ()):
            for node in ast.walk(function):
                for key in _argument_names(node):
                    yield Use(f"{file}:{node.lineno}", (f"{_ARGUMENTS}.{key}",), entry=f"{file}:{function.name}")


def _imports(file: str, tree: ast.Module) -> Iterator[tuple[Use, str]]:
    """Yield the imported names; those of a ``try`` and of its handler are alternatives."""
    alternatives: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            for inner in (statement for part in [node, *node.handlers] for statement in part.body):
                for place, name in _imported(inner):
                    alternatives[name] = (*alternatives.get(name, ()), place)
    for node in ast.walk(tree):
        for place, name in _imported(node):
            yield Use(f"{file}:{node.lineno}", alternatives.get(name, (place,))), name


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
        for alias in node.names:
            yield f"{node.module}:{alias.name}", alias.asname or alias.name


def _asked(
    file: str, tree: ast.AST, objects: dict[str, tuple[str, ...]], *, are_alternatives: bool = False
) -> Iterator[Use]:
    """Yield what is asked of objects: their attributes, and how they and their methods are called."""
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        call = _call(called[id(node)]) if id(node) in called else None
        if isinstance(node, ast.Name) and call is not None and node.id in objects:
            yield Use(f"{file}:{node.lineno}", objects[node.id], call, f"{file}:{node.id}")
        if isinstance(node, ast.Attribute) and (owner := ast.unparse(node.value)) in objects:
            asked = tuple(f"{place}.{node.attr}" for place in objects[owner])
            for places in [asked] if are_alternatives else [(place,) for place in asked]:
                yield Use(f"{file}:{node.lineno}", places, call, f"{file}:{owner}")


def _call(node: ast.Call) -> Call:
    positional = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
    names = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
    return Call(len(positional), names, len(positional) < len(node.args) or len(names) < len(node.keywords))


def _own_names(node: ast.ClassDef) -> set[str]:
    """Return the names that a class defines itself; an annotation without a value declares what vLLM defines."""
    names = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign):
            names |= {ast.unparse(target).removeprefix("self.") for target in inner.targets}
        if isinstance(inner, ast.AnnAssign) and inner.value is not None:
            names.add(ast.unparse(inner.target).removeprefix("self."))
    return names


_NESTED = ("image", "custom_ops", "backend")  # only keys of dicts that are values of arguments


def _argument_names(node: ast.AST) -> Iterator[str]:
    """Yield the keys of a dict of arguments, and the key of an assignment to it."""
    if isinstance(node, ast.Dict) and not _is_nested(node):
        yield from (key.value for key in node.keys if isinstance(key, ast.Constant))
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "arguments":
        assert isinstance(node.slice, ast.Constant)
        yield str(node.slice.value)


def _is_nested(node: ast.Dict) -> bool:
    """Return whether a dict is the value of an argument, such as limit_mm_per_prompt."""
    return len(node.keys) == 1 and isinstance(node.keys[0], ast.Constant) and node.keys[0].value in _NESTED
