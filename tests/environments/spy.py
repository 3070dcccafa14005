"""An engine with scripted turns that records the prompts that it gets."""

from tests.stand_ins import ScriptedEngine


class Spy(ScriptedEngine):
    """Records the prompts.

    Args:
        tokenizer: tokenizer of the turns.
        texts: texts of the turns.
    """

    def __init__(self, tokenizer, texts):
        super().__init__(texts, tokenizer)
        self.prompts = []

    def generate(self, prompts, sampling, seeds):
        self.prompts += [list(prompt) for prompt in prompts]
        return super().generate(prompts, sampling, seeds)
