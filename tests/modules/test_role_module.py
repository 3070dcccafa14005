"""What a module knows of its models."""

from types import SimpleNamespace

from lightning_rlhf import SFTModule
from tests.stand_ins import TinyModel


def test_configuration_is_read_once_for_the_token_of_images():
    reads = []

    class WithImages(TinyModel):
        def hf_config(self):
            reads.append(self)
            return SimpleNamespace(image_token_id=7)

    module = SFTModule(WithImages())
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(image_store=None))
    assert module.image_tokens == ()
    module._trainer.datamodule.image_store = object()
    reads.clear()
    assert [module.image_tokens for _ in range(3)] == [(7,)] * 3
    assert len(reads) == 1
