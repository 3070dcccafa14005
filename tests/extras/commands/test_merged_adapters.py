"""``export --merge`` and ``--extract``: models from adapters, adapters from models, and mistakes."""

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf import FromConfig, Pretrained
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.commands import export as command
from lightning_rlhf.models.adapter_files import save_adapter
from lightning_rlhf.models.lora import LoRA, is_adapter
from tests.models.test_lora import GPT2, IDS, INDEX, logprobs, parameters_of, randomize_adapters
from tests.stand_ins import TINY_LLAMA


@pytest.fixture
def export(capsys, tmp_path, monkeypatch):
    """Run the command in a directory with a base model and its tokenizer; return exit code, output and error."""
    monkeypatch.chdir(tmp_path)
    FromConfig(TINY_LLAMA, seed=0).causal().save_pretrained("base")
    CharacterTokenizer("abcdefgh").load().save_pretrained("base")

    def export(*arguments):
        capsys.readouterr()
        try:
            code = command.run(list(arguments))
        except SystemExit as end:
            code = end.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return export


def write_adapter(directory, scalar=False, lora=None):
    lora = lora or LoRA(3, 6)
    source = Pretrained("base", lora=lora)
    model = randomize_adapters(source.scalar() if scalar else source.causal())
    if scalar:
        model.lm.score.weight.data.fill_(0.25)
    named = parameters_of(model.lm).items()
    weights = {name: tensor for name, tensor in named if is_adapter(name) or name == "score.weight"}
    save_adapter(lora, weights, Path(directory), "base", model.adapter_metadata)
    return model


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"rslora": True}], ids=["lora", "dora", "rslora"])
def test_adapter_is_merged_into_its_base(export, options):
    model = write_adapter("adapter", lora=LoRA(3, 6, **options))
    code, out, _ = export("--merge", "adapter", "--base", "base", "--to", "merged")
    assert (code, out) == (0, "merged has base with the adapter merged in float32\n")
    merged = Pretrained("merged").causal().double()  # float32 would add the rounding of both forward passes
    torch.testing.assert_close(logprobs(merged), logprobs(model.double()), atol=1e-5, rtol=0)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter").merge_and_unload()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(load_file("merged/model.safetensors").get(name, tensor), tensor)
    assert AutoTokenizer.from_pretrained("merged").get_vocab() == AutoTokenizer.from_pretrained("base").get_vocab()


def test_adapter_of_a_reward_model_becomes_a_classifier(export):
    model = write_adapter("adapter", scalar=True)
    assert export("--merge", "adapter", "--base", "base", "--to", "merged")[0] == 0
    torch.testing.assert_close(Pretrained("merged").scalar()(IDS, INDEX), model(IDS, INDEX), atol=1e-5, rtol=0)


def test_adapter_of_a_model_that_differs_by_its_rank_is_extracted_without_loss(export):
    model = write_adapter("adapter")
    export("--merge", "adapter", "--base", "base", "--to", "merged")
    code, out, err = export("--extract", "merged", "--base", "base", "--rank", "3", "--to", "extracted")
    assert (code, err) == (0, "")
    assert out == "extracted has an adapter of rank 3 with 100.0 % of the squared change of the weights\n"
    again = Pretrained("base", adapter="extracted").causal()
    torch.testing.assert_close(logprobs(again), logprobs(model), atol=1e-5, rtol=0)
    _, out, _ = export("--extract", "merged", "--base", "base", "--rank", "1", "--to", "less")
    share = float(out.rpartition(" with ")[2].partition(" ")[0])
    assert 30 < share < 95


def test_interrupted_extraction_leaves_nothing(export, monkeypatch):
    write_adapter("adapter")
    export("--merge", "adapter", "--base", "base", "--to", "merged")

    def interrupted(change, rank):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_rlhf.extras.commands.adapters._factors", interrupted)
    before = sorted(Path().iterdir())
    with pytest.raises(KeyboardInterrupt):
        export("--extract", "merged", "--base", "base", "--to", "extracted")
    assert sorted(Path().iterdir()) == before


def test_share_is_that_of_the_largest_singular_values(export):
    torch.manual_seed(1)
    tuned = Pretrained("base").causal()
    layer = tuned.lm.model.layers[0].self_attn.q_proj.weight
    change = 0.1 * torch.randn_like(layer)
    layer.data += change
    tuned.save_pretrained("tuned")
    _, out, _ = export("--extract", "tuned", "--base", "base", "--rank", "4", "--to", "extracted")
    values = torch.linalg.svdvals(change) ** 2
    expected = 100 * float(values[:4].sum() / values.sum())
    assert out == f"extracted has an adapter of rank 4 with {expected:.1f} % of the squared change of the weights\n"


def test_transposed_weights_and_ranks_above_the_size_of_a_layer(export, tmp_path):
    FromConfig(GPT2, seed=0).causal().save_pretrained("gpt2")
    tuned = Pretrained("gpt2").causal()
    for parameter in tuned.parameters():
        if parameter.ndim == 2 and min(parameter.shape) > 11:
            parameter.data += 0.05 * torch.randn_like(parameter)
    tuned.save_pretrained("tuned")
    code, *_ = export("--extract", "tuned", "--base", "gpt2", "--rank", "40", "--to", "extracted")
    assert code == 0
    again = Pretrained("gpt2", adapter="extracted").causal()
    name = "transformer.h.0.attn.c_attn"
    merged = (
        dict(again.lm.named_parameters())[f"{name}.base_layer.weight"]
        + (
            again.lm.get_submodule(name).lora_B["default"].weight
            @ again.lm.get_submodule(name).lora_A["default"].weight
        ).T
    )
    torch.testing.assert_close(merged, tuned.lm.get_parameter(f"{name}.weight"), atol=1e-4, rtol=0)


def test_change_outside_of_the_layers_is_reported(export, caplog):
    tuned = Pretrained("base").causal()
    tuned.lm.model.norm.weight.data += 1.0
    tuned.lm.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1.0
    tuned.save_pretrained("tuned")
    _, out, _ = export("--extract", "tuned", "--base", "base", "--to", "extracted")
    assert "97.0 % of the squared change is in embeddings, norms and biases" in caplog.text  # 32 of 33
    assert "with 3.0 % of the squared change" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--merge", "adapter"], "--merge and --extract need the base model: --base DIR, or its hub id"),
        (["--merge", "nowhere", "--base", "base"], "no adapter at 'nowhere': adapter_config.json is missing"),
        (["--extract", "base", "--base", "base"], "base and base have the same weights: nothing to extract"),
        (["--extract", "other", "--base", "base"], "differ in the shape of"),
        (["--extract", "base", "--base", "base", "--rank", "0"], "--rank must be at least 1, got 0"),
        (["--merge", "base", "--base", "base"], "it contains a whole model: set it as path, not as adapter"),
        (["--merge", "adapter", "--base", "base", "--data.x", "1"], "unknown option --data.x: only --config accepts"),
        (
            ["--merge", "adapter", "--base", "base", "--role", "actor"],
            "--role belongs to --config: remove it beside --merge",
        ),
        (["--merge", "adapter", "--base", "base", "--rank", "4"], "--rank belongs to --extract: remove it"),
        (["--extract", "base", "--base", "base", "--adapter"], "--adapter belongs to --config: remove it beside"),
        (["--config", "config.yaml", "--base", "base"], "--base belongs to --merge and --extract: remove it beside"),
        ([], "one of the arguments --config --merge --extract is required"),
        (["--merge", "a", "--extract", "b"], "not allowed with argument"),
    ],
)
def test_mistakes_give_one_line_and_code_2(export, arguments, message):
    write_adapter("adapter")
    FromConfig(TINY_LLAMA | {"hidden_size": 16}, seed=0).causal().save_pretrained("other")
    code, _, err = export(*arguments, "--to", "out")
    assert code == 2
    assert message in err
    assert not Path("out").exists()
    assert not list(Path().glob(".out*"))
