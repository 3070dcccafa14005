"""Persistent buffers are exported and pushed like parameters."""

import pytest
import torch

from lightning_rlhf.models.loading import FromConfig, Pretrained
from lightning_rlhf.models.lora import LoRA, merged_weights
from lightning_rlhf.models.tensors import persistent_buffers, whole_tensors
from lightning_rlhf.modules.sft import SFTModule
from tests.cli.published_architectures import MOONLIGHT, SMALL

SOURCE = FromConfig(MOONLIGHT | SMALL["deepseek_v3"] | {"vocab_size": 50}, seed=0)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_whole_tensors_are_the_saved_ones():
    lm = SOURCE.causal().lm
    assert [name for name, _ in persistent_buffers(lm)] == [BIAS]  # rotary frequencies are not among them
    assert {name for name, _ in whole_tensors(lm)} == lm.state_dict().keys()


def test_export_keeps_the_correction_of_the_router_scores(tmp_path):
    module = SFTModule(SOURCE)
    module.actor = module.build_role("actor")
    wanted = torch.randn(4)
    module.actor.lm.get_buffer(BIAS).copy_(wanted)
    module.export(tmp_path)
    assert torch.equal(Pretrained(str(tmp_path)).causal().lm.get_buffer(BIAS), wanted)


def test_merged_adapters_include_the_buffers():
    pytest.importorskip("peft", reason="needs peft", exc_type=ModuleNotFoundError)
    lm = FromConfig(SOURCE.architecture, seed=0, lora=LoRA(2, 4, ["q_proj"])).causal().lm
    assert merged_weights(lm).keys() == SOURCE.causal().lm.state_dict().keys()


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")
def test_adapters_for_stacked_experts_are_rejected():
    """Merged weights and vLLM would not contain them."""
    pytest.importorskip("peft", reason="needs peft", exc_type=ModuleNotFoundError)
    message = r"^lora: .* peft also adapts the experts of DeepseekV3ForCausalLM.* some of kv_a_proj_with_mqa, kv_b_proj"
    with pytest.raises(ValueError, match=message):
        FromConfig(SOURCE.architecture, seed=0, lora=LoRA(2, 4)).causal()
