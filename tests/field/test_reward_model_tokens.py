"""A reward model of texts is read at the end token that it was trained at, also where that is the padding token."""

import torch
from transformers import AutoModelForSequenceClassification

from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.rewards.learned import LearnedReward
from lightning_rlhf.models.loading import FromConfig
from tests.stand_ins import TINY_LLAMA


def test_learned_reward_scores_the_end_token(tmp_path):
    tokenizer = CharacterTokenizer("abcdefg").load()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    model = FromConfig(TINY_LLAMA | {"pad_token_id": 2}, seed=0).scalar()
    torch.nn.init.normal_(model.lm.score.weight)
    model.save_pretrained(tmp_path)
    reward = LearnedReward(str(tmp_path))
    lm = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    for finished, ids in ((True, [4, 5, 6, 2]), (False, [4, 5, 6])):
        hidden = lm.model(torch.tensor([ids])).last_hidden_state
        (score,) = reward(["ab"], ["c"], finished=[finished])
        torch.testing.assert_close(score, lm.score(hidden)[0, -1, 0].item(), atol=1e-5, rtol=0)
