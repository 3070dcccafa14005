"""The first five minutes on a GPU, in a small form on a CPU: every part runs, and the block has its figures."""

import json
import string

import pytest

from benchmarks import first_gpu_run
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.models.loading import FromConfig
from tests.rollout.engines import ARCHITECTURE


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_all_parts_pass_on_a_cpu(tmp_path, capsys):
    pytest.importorskip("vllm")
    tokenizer = CharacterTokenizer(string.ascii_letters + " ,.:()").load()
    tokenizer.save_pretrained(tmp_path)
    model = ARCHITECTURE | {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    FromConfig(model, seed=0).causal().save_pretrained(tmp_path)
    assert first_gpu_run.main(["--device", "cpu", "--model", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "===== lightning-rlhf first GPU run: 5 of 5 parts passed =====" in text
    machine, *lines = map(json.loads, text.partition("passed =====\n")[2].splitlines()[:-1])
    assert machine["model"] == str(tmp_path)
    parts = {line["part"]: line for line in lines}
    assert list(parts) == list(first_gpu_run.PARTS)
    for dtype in ("float32", "bfloat16"):
        assert f"in {dtype}, model runner V" in parts[dtype]["engine"]
        assert len(parts[dtype]["gap_after_push"]) == 3
    assert parts["sleep"]["skipped"] == "vLLM does not sleep on a CPU"
    assert parts["grpo"]["rollout/logprob_diff_mean"] < 0.1


def test_a_model_that_does_not_exist_is_named_at_once():
    with pytest.raises(FileNotFoundError, match="no model at '/nowhere/model'"):
        first_gpu_run.main(["--model", "/nowhere/model"])


def test_error_of_a_part_is_its_result(monkeypatch, capsys):
    def broken(device, model, folder):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(first_gpu_run, "_sleep", broken)
    assert first_gpu_run._run_here("sleep", "cuda", "any") == 0
    assert '"error": "RuntimeError: CUDA error: device-side assert triggered"' in capsys.readouterr().out
