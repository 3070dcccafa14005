"""The cache of vLLM on a CPU has room for one text of full length, for any length of texts."""

import argparse

import psutil
import pytest
from transformers import AutoConfig

from lightning_rlhf.extras.serve import command as serve
from lightning_rlhf.extras.serve.command import longest_text_that_fits
from lightning_rlhf.models import kv_cache
from lightning_rlhf.models.kv_cache import bytes_per_token, cpu_cache_bytes
from tests.extras.plan.fakes import source

SMOLLM2 = AutoConfig.for_model(
    "llama", num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3
)


def test_token_needs_the_cache_of_all_layers():
    assert bytes_per_token(SMOLLM2, "float32") == 2 * 30 * 3 * 64 * 4
    assert bytes_per_token(SMOLLM2, "bfloat16") == 2 * 30 * 3 * 64 * 2


def test_latent_attention_stores_its_latent_vector():
    assert bytes_per_token(source("deepseek_v3").hf_config(), "float32") == 2 * (24 + 8) * 4


def test_cache_holds_64_texts_within_its_limits_and_at_least_one(monkeypatch):
    memory = {"SC_PHYS_PAGES": 1 << 24, "SC_PAGE_SIZE": 4096}  # 64 GiB
    monkeypatch.setattr(kv_cache.os, "sysconf", memory.__getitem__)
    monkeypatch.setattr(kv_cache, "_available_bytes", lambda: 64 << 30)
    token = bytes_per_token(SMOLLM2, "float32")
    assert cpu_cache_bytes(SMOLLM2, "float32", 16) == 1 << 28 > 64 * 64 * token  # never less
    assert cpu_cache_bytes(SMOLLM2, "float32", 128) == 64 * 192 * token  # two blocks more than the text
    assert cpu_cache_bytes(SMOLLM2, "float32", 512) == 1 << 30
    memory["SC_PHYS_PAGES"] >>= 3  # 8 GiB
    assert cpu_cache_bytes(SMOLLM2, "float32", 512) == 1 << 29
    monkeypatch.setattr(kv_cache, "_available_bytes", lambda: 3 << 28)
    assert cpu_cache_bytes(SMOLLM2, "float32", 512) == 3 << 27  # half of 768 MiB that are free
    size = cpu_cache_bytes(SMOLLM2, "float32", 16384)
    assert size >= 16384 * token > 1 << 29
    assert size % (32 * token) == 0


def test_longest_supported_text_takes_at_most_half_of_the_memory(monkeypatch):
    memory = {"SC_PHYS_PAGES": 1 << 18, "SC_PAGE_SIZE": 4096}  # 1 GiB
    monkeypatch.setattr(kv_cache.os, "sysconf", memory.__getitem__)
    monkeypatch.setattr(kv_cache, "_available_bytes", lambda: 1 << 30)
    longest = longest_text_that_fits(SMOLLM2, "float32")
    assert 11_000 < longest < 12_000
    assert cpu_cache_bytes(SMOLLM2, "float32", longest) <= 1 << 29


def test_cached_files_count_as_available_memory():
    assert kv_cache._available_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.fixture
def small_memory(monkeypatch):
    monkeypatch.setattr(serve, "longest_text_that_fits", lambda config, dtype: 48)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_serve_shortens_texts_that_do_not_fit_and_prints_the_reason(small_memory, tmp_path, capsys):
    model = exported(tmp_path)
    inputs = argparse.Namespace(model=model, dtype="auto", max_model_len=None)
    assert serve._fitting(inputs, 64) == 48
    assert "too much for this machine's free memory: serving texts of at most 48 (--max-model-len)" in (
        capsys.readouterr().out
    )
    assert serve._fitting(inputs, 32) == 32
    inputs.max_model_len = 64
    with pytest.raises(ValueError, match="free memory: set --max-model-len 48 or less"):
        serve._fitting(inputs, 64)


def exported(folder):
    source("llama").causal().save_pretrained(folder)
    return str(folder)
