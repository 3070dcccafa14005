"""A conversation has the same token ids, and these ids the same score, wherever a reward model reads them."""

import asyncio
import json
from functools import partial

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightning_rlhf import FromConfig, GRPOModule, PreferenceDataModule, RewardModule
from lightning_rlhf.data.rows import InMemory
from lightning_rlhf.data.tokenizers import CharacterTokenizer, end_tokens
from lightning_rlhf.extras.commands import evaluate
from lightning_rlhf.extras.export.hf_export import Origin, complete_export
from lightning_rlhf.extras.judges.endpoint import Endpoint
from lightning_rlhf.extras.judges.remote import RemoteReward, VLLMReward
from lightning_rlhf.extras.rewards.learned import LearnedReward
from lightning_rlhf.extras.tokenizers.byte_pairs import BytePairTokenizer
from lightning_rlhf.models.loading import Pretrained
from lightning_rlhf.rewards.executor import compute_reward
from lightning_rlhf.rewards.function import RewardFunction
from tests.stand_ins import TINY_LLAMA, Response, TinyModel, fit, rollout_of

CHATML = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
ROWS = [("ab", "cab"), ("abc ab", "b"), ("c", "abcabcab"), ("cab ca", "bca b")]
SGD = partial(torch.optim.SGD, lr=0.0)


def characters(tmp_path):
    return CharacterTokenizer("abcdefghijklmnoprstu \n").load()


def byte_pairs(tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": a + b}) + "\n" for a, b in ROWS * 9))
    return BytePairTokenizer(str(tmp_path / "texts.jsonl"), 300).load()


def adds_a_begin_token(tmp_path):
    made = byte_pairs(tmp_path)
    made._tokenizer.post_processor = TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", made.bos_token_id)])
    return made


def one_special_token(tmp_path):
    """Return a tokenizer whose only special token is the end token, as GPT-2 has."""
    made = byte_pairs(tmp_path)
    made.bos_token = made.unk_token = made.pad_token = made.eos_token
    return made


TOKENIZERS = [characters, byte_pairs, adds_a_begin_token, one_special_token]


class Paths:
    """A reward model in its directory, and each way to score a prompt with a response."""

    def __init__(self, tokenizer, tmp_path, as_messages):
        self.directory, self.tmp_path, self.as_messages = str(tmp_path / "export"), tmp_path, as_messages
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        self.tokenizer_path = str(tmp_path / "tokenizer")
        self.data = PreferenceDataModule(
            train=InMemory([{"prompt": self.prompt(a), "chosen": self.answer(b), "rejected": self.answer("ccc")}
                            for a, b in ROWS]),
            tokenizer=self.tokenizer_path, batch_size=len(ROWS),
        )  # fmt: skip
        self.data.setup("fit")
        self.tokenizer = self.data.tokenizer
        config = TINY_LLAMA | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
        config |= {"pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": 256}
        model = FromConfig(config, seed=0).scalar()
        torch.nn.init.normal_(model.lm.score.weight, std=0.3)
        model.save_pretrained(self.directory)
        self.module = RewardModule(self.directory, optimizer=SGD)
        origin = Origin(self.module, "reward_model", self.data, tmp_path / "none", 0, {})
        complete_export(tmp_path / "export", origin, self.tokenizer)

    def prompt(self, text):
        return [{"role": "user", "content": text}] if self.as_messages else text

    def answer(self, text):
        return [{"role": "assistant", "content": text}] if self.as_messages else text

    @property
    def pairs(self):
        return self.data.collate(self.data.examples["train"], list(range(len(ROWS))), [], 0)

    @property
    def ids(self):
        texts = self.pairs.chosen
        return [row[:length].tolist() for row, length in zip(texts.input_ids, texts.lengths, strict=True)]

    def reward_module(self):
        seen = {}
        row_scores = self.module.row_scores

        def recorded(rows):
            chosen, rejected = row_scores(rows)
            for ids, length, score in zip(rows.chosen.input_ids, rows.chosen.lengths, chosen, strict=True):
                seen[tuple(ids[:length].tolist())] = score.item()
            return chosen, rejected

        self.module.row_scores = recorded
        fit(self.module, [self.pairs])
        return [seen[tuple(ids)] for ids in self.ids]

    def reward_model_role(self):
        """Score the tokens that an engine would sample: those of the answer with its end token."""
        rows = [Response(ids[:2], ids[2:]) for ids in self.ids]
        actor = TinyModel({**TINY_LLAMA, "vocab_size": len(self.tokenizer), "max_position_embeddings": 256})
        module = GRPOModule(actor, reward_model=Pretrained(self.directory), optimizer=SGD, minibatch_size=4)
        seen, scores = [], module.scores
        module.scores = lambda rollout: seen.append(scores(rollout)) or seen[-1]
        fit(module, [rollout_of(rows)])
        return seen[0].tolist()

    def learned(self, finished=True):
        function = RewardFunction(LearnedReward(self.directory, batch_tokens=40), messages=self.as_messages)
        prompts, texts = zip(*ROWS, strict=True)
        columns = {"prompts": list(prompts), "completions": list(texts), "finished": [finished] * len(ROWS)}
        return compute_reward(function, **columns).tolist()

    def alone(self, ids):
        """Compute the score by transformers, of one text without padding."""
        model = AutoModelForSequenceClassification.from_pretrained(self.directory)
        with torch.no_grad():
            return model(torch.tensor([ids])).logits.item()

    def vllm(self):
        reward = VLLMReward(Endpoint("http://127.0.0.1:1/classify"), self.directory)

        async def post(request):
            return {"data": [{"probs": [self.alone(request.body["input"])]}]}

        reward.client.post = post
        prompts, texts = ([make(text) for text in column] for make, column in
                          zip((self.prompt, self.answer), zip(*ROWS, strict=True), strict=True))  # fmt: skip
        return asyncio.run(reward(prompts, texts))

    def openrlhf(self):
        """Score as OpenRLHF's server: it gets the text of the ids, and tokenizes it without further special tokens.

        Pairs of bytes over the border of prompt and response are a property of the protocol, which sends one text.
        """
        reward = RemoteReward(Endpoint("http://127.0.0.1:1/get_reward"))

        async def post(request):
            (query,) = request.body["query"]
            (ids,) = [ids for ids in self.ids if self.tokenizer.decode(ids) == query]
            if self.as_messages:
                assert self.tokenizer(query, add_special_tokens=False)["input_ids"] == ids
            return {"rewards": [self.alone(ids)]}

        reward.client.post = post
        prompts = [self.prompt_text(a) for a, _ in ROWS]
        texts = [b for _, b in ROWS]
        ends = end_tokens(self.tokenizer, self.ids, [True] * len(ROWS))
        return asyncio.run(reward(prompts, texts, finished=[True] * len(ROWS), end_tokens=ends))

    def prompt_text(self, text):
        if not self.as_messages:
            return text
        return self.tokenizer.apply_chat_template(self.prompt(text), tokenize=False, add_generation_prompt=True)

    def evaluate(self):
        (self.tmp_path / "score.py").write_text(
            f"from lightning_rlhf.extras.rewards.learned import LearnedReward\n"
            f"reward = LearnedReward({self.directory!r})\n"
        )
        scores = []
        for i, (prompt, text) in enumerate(ROWS):
            row = {"prompt": self.prompt(prompt), "responses": [text], "truncated": [False]}
            (self.tmp_path / f"{i}.jsonl").write_text(json.dumps(row) + "\n")
            options = ["--reward", f"{self.tmp_path}/score.py:reward", "--json", f"{self.tmp_path}/{i}.json"]
            assert evaluate.run([f"{self.tmp_path}/{i}.jsonl", *options, *["--messages"] * self.as_messages]) == 0
            report = json.loads((self.tmp_path / f"{i}.json").read_text())
            (statistics,) = report["sources"].values()
            scores.append(next(iter(statistics["rewards"].values()))["mean"])
        return scores

    def transformers(self, side):
        """Score a padded batch by transformers' own code with the tokenizer of the export."""
        tokenizer = AutoTokenizer.from_pretrained(self.directory, padding_side=side)
        if tokenizer.pad_token is None:  # then transformers reads single texts only
            with pytest.raises(ValueError, match="pad"):
                tokenizer.pad({"input_ids": self.ids}, return_tensors="pt")
            return [self.alone(ids) for ids in self.ids]
        batch = tokenizer.pad({"input_ids": self.ids}, return_tensors="pt")
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        model = AutoModelForSequenceClassification.from_pretrained(self.directory)
        with torch.no_grad():
            return model(**batch, position_ids=positions).logits.squeeze(1).tolist()


def test_end_token_is_that_of_finished_responses():
    tokenizer = CharacterTokenizer("ab").load()
    responses = [[4, 2], [4, 1], [4, 2], [], [4, 5]]
    ends = end_tokens(tokenizer, responses, [True, True, False, True, True])
    assert ends == ["</s>", "<s>", "", "", ""]
    columns = {"prompts": ["p"] * 5, "completions": ["a"] * 5, "end_tokens": ends, "ground_truth": [None] * 5}
    seen = []

    def reward_func(queries, prompts, labels):
        seen.extend(queries)
        return [0.0] * len(queries)

    compute_reward(RewardFunction(reward_func), **columns)
    assert seen == ["pa</s>", "pa<s>", "pa", "pa", "pa"]


@pytest.mark.parametrize("as_messages", [False, True], ids=["texts", "messages"])
@pytest.mark.parametrize("padding", ["own padding", "padding is the end"])
@pytest.mark.parametrize("make", TOKENIZERS, ids=lambda make: make.__name__)
@pytest.mark.quick_cases(2)
def test_score_of_a_conversation_is_the_same_on_all_paths(make, padding, as_messages, tmp_path):
    tokenizer = make(tmp_path)
    tokenizer.chat_template = CHATML
    if padding == "padding is the end":
        tokenizer.pad_token = tokenizer.eos_token
    paths = Paths(tokenizer, tmp_path, as_messages)
    assert all(ids[-1] == tokenizer.eos_token_id for ids in paths.ids)
    expected = paths.reward_module()
    assert len({round(score, 4) for score in expected}) == len(expected)
    others = {
        "alone": [paths.alone(ids) for ids in paths.ids],
        "reward_model": paths.reward_model_role(),
        "LearnedReward": paths.learned(),
        "VLLMReward": paths.vllm(),
        "OpenRLHF": paths.openrlhf(),
        "evaluate": paths.evaluate(),
        "transformers, right": paths.transformers("right"),
        "transformers, left": paths.transformers("left"),
    }
    wrong = {name: scores for name, scores in others.items() if scores != pytest.approx(expected, abs=1e-4)}
    assert not wrong, (expected, wrong)
    assert paths.learned(finished=False) != pytest.approx(expected, abs=1e-3)
