"""Backends of ``generate``: an engine on this machine, or a server with OpenAI's API."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from lightning_rlhf.data.columns import TEMPLATE_FIELDS, Columns, Fields
from lightning_rlhf.data.image_parts import given_images, images_of, openai_messages, with_images
from lightning_rlhf.data.messages import messages_of
from lightning_rlhf.data.prompts import PromptDataModule
from lightning_rlhf.data.row import BadRow, Row
from lightning_rlhf.data.rows import OnBadRow, RowReport, use_rows
from lightning_rlhf.data.text_messages import TextMessages
from lightning_rlhf.data.tokenizers import end_tokens, generation_ends
from lightning_rlhf.encoded_image import EncodedImage
from lightning_rlhf.environments.settings import EnvironmentSettings
from lightning_rlhf.expected_errors import RunError, UsageError
from lightning_rlhf.extras.commands.row_images import image_reader, naming_the_option
from lightning_rlhf.extras.images.processor import image_token
from lightning_rlhf.extras.images.reading import read_image
from lightning_rlhf.extras.judges.endpoint import Client, Endpoint, Request, ServerBusy, read_key, start_of_reply
from lightning_rlhf.functional.seeding import derive_seed
from lightning_rlhf.images import ImageSettings, ImageStore
from lightning_rlhf.models.loading import Dtype, Pretrained
from lightning_rlhf.models.positions import max_positions
from lightning_rlhf.models.tensors import whole_tensors
from lightning_rlhf.rollout.choose import choose_engine
from lightning_rlhf.rollout.conversation_loop import ConversationRequest
from lightning_rlhf.rollout.conversations import ConversationSampler, conversation_sampler
from lightning_rlhf.rollout.engine import EngineSetup, RolloutEngine
from lightning_rlhf.rollout.generation import CompletionCheck, generate, serve
from lightning_rlhf.rollout.scorer import last_turn, sampled_tokens
from lightning_rlhf.rollout.transformers import TransformersEngine
from lightning_rlhf.rollout.vllm.engine import VLLMEngine
from lightning_rlhf.rollout.vllm.sync import DIRECTORY_VERSION
from lightning_rlhf.types import Completion, ConversationRecord, Prompt, PromptImages, SamplingParams, TokenPrompt

_SERVER_SECONDS = 3600.0  # time limit of one response, and of retries while a server is busy
_TRIES = 8
_SEEDS = 1 << 31  # every server accepts seeds below this
_HINTS = {
    401: "; set --api-key-env to the environment variable with the key",
    404: "; use a server with OpenAI's API",
    503: "; it may still be loading its model",
}
_UNLIMITED = 1 << 30
_FINGERPRINT_BYTES = 1 << 12  # bytes of each tensor in the digest


class RowPrompt(NamedTuple):
    """A prompt with its row, the columns for an environment, and the images for an engine.

    For a server, ``ids`` and ``columns`` are empty, and either ``text`` or ``messages``, which have the images.
    """

    row: dict[str, Any]
    text: str
    ids: list[int]
    messages: list[dict[str, Any]]
    columns: dict[str, Any]
    images: PromptImages | None = None


class Response(NamedTuple):
    """A response; ``tokens`` includes the stop token, and may be None for a server.

    Of a conversation, ``text`` is the last turn, and ``tokens`` are those that the model sampled. ``end_token`` is the
    text of the special token at its end, empty without one; None for a server.
    """

    text: str
    tokens: int | None
    finish_reason: str
    conversation: ConversationRecord | None = None
    end_token: str | None = None


@dataclass(frozen=True)
class ResponseRequest:
    """Request of one response.

    Args:
        seed: seed of the response.
        environment_seed: seed of the environment, which all responses to a prompt share.
    """

    prompt: RowPrompt
    seed: int
    environment_seed: int


@dataclass(frozen=True)
class Conversations:
    """Environment of conversations, and its part of the chat template.

    Args:
        settings: environment and its limits.
        data: options of the data module for the chat template: ``tools``, ``chat_template_kwargs``, ``as_messages``.
        identity: settings that determine the conversations, as plain values.
    """

    settings: EnvironmentSettings
    data: dict[str, Any]
    identity: dict[str, Any]


class EngineBackend:
    """A model in an engine on this machine.

    Args:
        model: directory or hub id.
        engine: ``vllm``, ``transformers`` or ``auto``.
        dtype: dtype of the weights; None: bfloat16 with a GPU, else float32.
        sampling: sampling parameters; the stop tokens of tokenizer and model are added.
        tensor_parallel_size: number of GPUs that share the model in vLLM.
        conversations: environment of conversations; None generates single responses.
    """

    def __init__(
        self,
        model: str,
        engine: str,
        dtype: Dtype | None,
        sampling: SamplingParams,
        tensor_parallel_size: int = 1,
        conversations: Conversations | None = None,
    ) -> None:
        self._source = Pretrained(model, dtype=dtype or ("bfloat16" if torch.cuda.is_available() else "float32"))
        self._config = self._source.hf_config()
        self._sampling = sampling
        self._engine = _make_engine(engine, self._config, tensor_parallel_size)
        self._conversations = conversations
        self._sampler: ConversationSampler | None = None
        self._images: ImageStore | None = None

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the responses, as plain values."""
        environment = {}
        if self._conversations is not None:
            environment = {"environment": self._conversations.identity}
        return {
            **environment,
            "model": self._source.path,
            "dtype": self._source.dtype,
            "engine": type(self._engine).__name__,
            "weights": weights_digest(self._source.path),
        }

    def read_prompts(
        self,
        source: str,
        columns: dict[str, str | None],
        on_bad_row: OnBadRow,
        as_messages: bool = False,
        images: ImageSettings | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> list[RowPrompt]:
        """Read the prompts of a source; a prompt that leaves no tokens for a response is a bad row.

        Args:
            source: file, hub id, ... of the rows.
            columns: configured column of each field.
            on_bad_row: whether bad rows are an error.
            as_messages: whether texts become user messages.
            images: directory and limits of the images of rows; None is the directory of the file.
            roles: further names of roles, each with its role here.
        """
        positions = max_positions(self._config) or _UNLIMITED
        if positions <= self._sampling.max_tokens:
            raise UsageError(
                f"--max-tokens {self._sampling.max_tokens} leaves no tokens for a prompt: the model accepts {positions}"
            )
        sampler = self._conversations
        options = dict(sampler.data) if sampler else {}
        if as_messages:
            options["as_messages"] = True
        if roles:
            options["roles"] = {**(options.get("roles") or {}), **roles}
        data = _PromptRows(
            source,
            self._source.path,
            columns=columns,
            max_tokens=positions - self._sampling.max_tokens,
            on_bad_row=on_bad_row,
            images=images,
            **options,
        )
        data.setup("fit")
        self._tokenizer = data.tokenizer
        if sampler:
            self._sampler = conversation_sampler(sampler.settings, data)
        self._use_images(data.image_store)
        print(replace(data.reports["train"], name="prompts"))
        return data.examples["train"]

    def _use_images(self, store: ImageStore | None) -> None:
        """Prepare for the images of prompts; None without images.

        Raises:
            UsageError: the model or the engine reads texts only.
        """
        self._images = store
        if store is None:
            return
        token = image_token(self._config, f"the model {self._source.path!r}")
        self._sampling = replace(self._sampling, never_sampled=(token,))
        if not self._engine.traits.reads_images:
            raise UsageError(f"{type(self._engine).__name__} does not read images: use --engine transformers or vllm")

    def prepare(self, longest: int, log: Path) -> str:
        """Start the engine for prompts of up to ``longest`` tokens, with its output in a file; return a description."""
        own = [self._tokenizer.eos_token_id, *self._sampling.stop_token_ids]
        stop_ids = dict.fromkeys([*own, *generation_ends(self._source.path)])
        self._sampling = replace(self._sampling, stop_token_ids=tuple(stop_ids))
        self._engine.check(self._sampling)
        total = longest + self._sampling.max_tokens
        threads = torch.get_num_threads()
        images = self._images
        self._engine.start(
            EngineSetup(
                Path(self._source.path),
                self._source.dtype or "float32",
                total,
                log,
                threads=threads,
                processor=None if images is None else images.processor,
                images_per_prompt=0 if images is None else images.longest,
            )
        )
        description = self._engine.wait()
        if isinstance(self._engine, TransformersEngine):  # vLLM loads the directory itself
            self._engine.update_weights(whole_tensors(self._source.causal().lm), DIRECTORY_VERSION)
        return description

    def generate(self, requests: Sequence[ResponseRequest]) -> list[Response]:
        """Generate one response for each request."""
        if self._sampler is None:
            prompts = [TokenPrompt(request.prompt.ids, request.prompt.images) for request in requests]
            completions = generate(self._engine, prompts, self._sampling, [request.seed for request in requests])
        else:
            completions = self._converse(self._sampler, requests)
        texts = self._tokenizer.batch_decode([last_turn(each) for each in completions], skip_special_tokens=True)
        ids = [sampled_tokens(completion) for completion in completions]
        ends = end_tokens(self._tokenizer, ids, [completion.finish_reason == "stop" for completion in completions])
        return [
            Response(text, len(sampled), completion.finish_reason, completion.conversation, end)
            for text, sampled, end, completion in zip(texts, ids, ends, completions, strict=True)
        ]

    def _converse(self, sampler: ConversationSampler, requests: Sequence[ResponseRequest]) -> list[Completion]:
        """Generate one conversation for each request."""
        later_turns = range(1, sampler.settings.max_turns)
        conversations = [
            ConversationRequest(
                prompt=Prompt(
                    request.prompt.ids,
                    request.prompt.text,
                    columns=request.prompt.columns,
                    messages=request.prompt.messages,
                    images=None if self._images is None else _images_of(request.prompt),
                ),
                seed=request.environment_seed,
                turn_seeds=(request.seed, *(derive_seed(request.seed, turn) for turn in later_turns)),
                sampling=self._sampling,
            )
            for request in requests
        ]
        check = CompletionCheck(self._sampling.max_tokens, DIRECTORY_VERSION, self._config.get_text_config().vocab_size)
        return serve(self._engine, conversations, partial(sampler, check=check)).result()

    def close(self) -> None:
        """End the environments and the engine."""
        if self._sampler is not None:
            self._sampler.close()
        self._engine.close()


class _PromptRows(PromptDataModule):
    """Prompts together with their rows."""

    def within_limit(self, ids: list[int], what: str, has_images: bool = False) -> list[int]:
        if len(ids) > self.max_tokens:
            raise BadRow(
                f"{what} has {len(ids)} tokens; --max-tokens leaves {self.max_tokens}",
                f"{what} too long for --max-tokens",
            )
        return ids

    def _read_image(self, value: Any) -> EncodedImage:
        with naming_the_option():
            return super()._read_image(value)

    def convert(self, fields: Fields) -> Any:
        prompt = super().convert(fields)
        row = _as_json(fields.row, self.image_settings if prompt.images else None)
        return RowPrompt(
            row,
            prompt.text,
            prompt.token_ids,
            list(prompt.messages),
            columns=dict(prompt.columns),
            images=prompt.images,
        )


def _images_of(prompt: RowPrompt) -> PromptImages:
    return prompt.images or PromptImages((), (), tuple(prompt.ids))


def _make_engine(name: str, config: PretrainedConfig, tensor_parallel_size: int) -> RolloutEngine:
    if name == "auto":
        engine, reason = choose_engine(config)
        print(f"engine: {type(engine).__name__}: {reason}")
        name = "vllm" if isinstance(engine, VLLMEngine) else "transformers"
    if name == "transformers":
        return TransformersEngine()
    # A run writes the dtype of its logits into the config.json of its engine; an export's has none.
    own_logits = {"hf_overrides": {"head_dtype": getattr(config, "head_dtype", "float32")}}
    return VLLMEngine(0.9, tensor_parallel_size, arguments={"load_format": "safetensors", **own_logits})


def weights_digest(model: str) -> str:
    """Return a digest of the first bytes of each tensor in a directory; empty for a hub id.

    Raises:
        UsageError: a file is damaged, or a pointer of git-lfs.
    """
    total = hashlib.blake2b(digest_size=16)
    files = sorted(Path(model).glob("*.safetensors"))
    for path in files:
        try:
            safe_open(path, framework="pt")
        except SafetensorError as error:
            raise UsageError(f"the weights in {path} cannot be read, the file is damaged: {error}") from error
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            total.update(f"{path.name} {path.stat().st_size}".encode() + header)
            data_start = file.tell()
            for name, entry in json.loads(header).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    file.seek(data_start + begin)
                    total.update(file.read(min(_FINGERPRINT_BYTES, end - begin)))
    if files:
        return total.hexdigest()
    return ""


class ServerBackend:
    """Servers of a model with OpenAI's API: they continue text, and apply their chat template to messages.

    A request goes to the server with the fewest unfinished ones; one that fails gets none for a while.

    Args:
        urls: addresses, for example ``http://127.0.0.1:8000``.
        key_env: name of the environment variable with the key; None sends no key.
        model: name of the model on the servers; None uses their only model.
        sampling: sampling parameters.
        concurrency: largest number of concurrent requests to each server.
    """

    def __init__(
        self, urls: Sequence[str], key_env: str | None, model: str | None, sampling: SamplingParams, concurrency: int
    ) -> None:
        urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        if repeated := [url for url in urls if urls.count(url) > 1]:
            raise UsageError(f"--server has {repeated[0]} twice: list each server once")
        self._urls = ", ".join(urls)
        self._sampling = sampling
        self._clients = {
            route: Client(
                Endpoint([f"{url}/v1/{route}" for url in urls], key_env, _SERVER_SECONDS, _TRIES, concurrency)
            )
            for route in ("completions", "chat/completions")
        }
        self._model = model or self._common_model(urls, key_env)

    def _common_model(self, urls: Sequence[str], key_env: str | None) -> str:
        served = {url: self._only_model(url, key_env) for url in urls}
        if len(set(served.values())) > 1:
            names = ", ".join(f"{name} at {url}" for url, name in served.items())
            raise UsageError(f"the servers have different models: {names}. List servers of one model")
        return served[urls[0]]

    def _only_model(self, url: str, key_env: str | None) -> str:
        import httpx

        headers = {}
        if key_env:
            headers = {"Authorization": f"Bearer {read_key(key_env)}"}
        models = f"{url}/v1/models"
        try:
            response = httpx.get(models, headers=headers, timeout=30, trust_env=False)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise UsageError(f"no server answers at {url} ({error}): start it, or change --server") from error
        if response.status_code != 200:
            raise UsageError(f"{models} answered {response.status_code}{_HINTS.get(response.status_code, '')}")
        try:
            names = [str(entry["id"]) for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{models} lists no models{_HINTS[404]}") from error
        if len(names) != 1:
            raise UsageError(f"{url} serves {', '.join(names) or 'no model'}: set --model to one of them")
        return names[0]

    def identity(self) -> dict[str, Any]:
        """See :class:`EngineBackend`; the address is left out, so that another server can continue the file."""
        return {"model": self._model, "engine": "server"}

    def read_prompts(
        self,
        source: str,
        columns: dict[str, str | None],
        on_bad_row: OnBadRow,
        as_messages: bool = False,
        images: ImageSettings | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> list[RowPrompt]:
        """See :meth:`EngineBackend.read_prompts`."""
        finder = Columns(columns, (*PromptDataModule.field_candidates, *TEMPLATE_FIELDS))
        report = RowReport("prompts")
        settings = images or ImageSettings()

        def convert(row: Row) -> RowPrompt:
            fields = finder.find(row)
            name = "messages" if "messages" in fields else "prompt"
            value = TextMessages()(name, fields[name]) if as_messages else fields[name]
            column_images = given_images(fields)
            if isinstance(value, str):
                if column_images:
                    raise BadRow("a text with images cannot be sent to a server: set --as-messages")
                return RowPrompt(_as_json(row), fields.text(name), [], [], {})
            read = image_reader(settings, report.location)
            messages = with_images(messages_of(value, "prompt", roles), column_images, read, is_answer=False)
            unsent = [name for name in ("tools", "chat_template_kwargs", "system", "history") if fields.get(name)]
            if unsent:
                raise BadRow(f"{unsent[0]!r} of the chat template cannot be sent to a server: use --model")
            while name == "messages" and messages and messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            if not messages or messages[-1]["role"] == "assistant":
                raise BadRow("a prompt that ends with the assistant's words cannot be sent to a server: use --model")
            return RowPrompt(_as_json(row, settings if images_of(messages) else None), "", [], messages, {})

        prompts, report = use_rows(source, report.name, convert, on_bad_row, report=report)
        print(report)
        return prompts

    def prepare(self, longest: int, log: Path) -> str:
        """See :class:`EngineBackend`."""
        return f"{self._model} at {self._urls}"

    def generate(self, requests: Sequence[ResponseRequest]) -> list[Response]:
        """See :class:`EngineBackend`."""

        async def request_all() -> list[Response]:
            return await asyncio.gather(*(self._request(request.prompt, request.seed) for request in requests))

        return asyncio.run(request_all())

    async def _request(self, prompt: RowPrompt, seed: int) -> Response:
        route = "chat/completions" if prompt.messages else "completions"
        body = {
            "model": self._model,
            "seed": seed % _SEEDS,
            "max_tokens": self._sampling.max_tokens,
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.limits.top_p,
        }
        if self._sampling.limits.top_k:  # not every server accepts it
            body["top_k"] = self._sampling.limits.top_k
        body |= {"messages": openai_messages(prompt.messages)} if prompt.messages else {"prompt": prompt.text}
        reply = await self._post_until_free(route, Request(body, 1))
        try:
            choice = reply["choices"][0]
            usage = reply.get("usage") or {}
            text = choice["message"]["content"] if prompt.messages else choice["text"]
            return Response(text or "", usage.get("completion_tokens"), choice["finish_reason"])
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise RunError(f"{self._urls}: {route} returned an invalid completion: {start_of_reply(reply)}") from error

    async def _post_until_free(self, route: str, request: Request) -> Any:
        """Send a request; retry for up to an hour while the server is busy."""
        end = time.monotonic() + _SERVER_SECONDS
        while True:
            try:
                return await self._clients[route].post(request)
            except ServerBusy:
                if time.monotonic() > end:
                    raise

    def close(self) -> None:
        """See :class:`EngineBackend`."""
        for client in self._clients.values():
            client.close()


def _as_json(row: Row, images: ImageSettings | None = None) -> dict[str, Any]:
    """Convert a row to plain JSON values.

    Args:
        images: limits of its images, whose bytes are written in base64; None for a row without images.

    Raises:
        BadRow: a value cannot be written as JSON.
    """
    try:
        text = json.dumps(
            dict(row), ensure_ascii=False, default=None if images is None else partial(_in_base64, images=images)
        )
        text.encode()  # halves of surrogate pairs cannot be encoded
        plain: dict[str, Any] = json.loads(text)
    except (TypeError, ValueError) as error:
        raise BadRow(f"cannot be written as JSON: {error}", "cannot be written as JSON") from error
    return plain


def _in_base64(value: Any, images: ImageSettings) -> str:
    """Return the base64 of the bytes of an image, or of an image of Pillow as PNG.

    Raises:
        ValueError: the value is not an image.
    """
    return base64.b64encode(read_image(value, images, None).read()).decode()


ResponseBackend = EngineBackend | ServerBackend


def prompts_digest(prompts: Sequence[RowPrompt]) -> str:
    """Return a digest of prompts and rows, to detect changed input when a file is continued."""
    total = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        images = [] if prompt.images is None else [[image.sha256 for image in prompt.images.images]]
        values = (prompt.row, prompt.text, prompt.ids, prompt.messages, *images)
        total.update(json.dumps(values, default=operator.attrgetter("sha256")).encode() + b"\n")
    return total.hexdigest()
