"""Generation of responses to a file of prompts: independent of batch sizes and interruptions."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lightning_rlhf.extras.commands import generate as command
from lightning_rlhf.extras.commands.response_backends import _make_engine, weights_digest
from lightning_rlhf.extras.commands.responses_file import ResponsesFile, read_lines
from lightning_rlhf.extras.serve.process import ServedModel
from lightning_rlhf.rollout.engine import EngineSetup
from lightning_rlhf.rollout.vllm.availability import vllm_installed

ROOT = Path(__file__).resolve().parents[3]
ROWS = [{"prompt": f"compute {i} times {i * 7 % 10}?", "answer": str(i)} for i in range(11)]
CHATS = [{"prompt": [{"role": "user", "content": f"write {word}"}]} for word in ("a", "bcd", "ef")]


@pytest.fixture
def prompts():
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return "prompts.jsonl"


@pytest.fixture
def generate(capsys, prompts, tiny_export):
    """Run the command with the small model and return its exit code and its output."""

    def generate(*arguments, model=tiny_export, to="out.jsonl", engine="transformers", source=prompts):
        capsys.readouterr()
        who = [] if "--server" in arguments else ["--model", str(model), "--engine", engine]
        inputs = [*who, "--prompts", source, "--to", to, "--max-tokens", "12"]
        try:
            code = command.run([*inputs, *arguments])
        except SystemExit as end:
            code = end.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return generate


def test_each_row_keeps_its_columns_and_gets_its_responses(generate):
    code, out, err = generate("-n", "3")
    assert (code, err) == (0, "")
    assert "tokens/s" in out
    rows = read_lines(Path("out.jsonl"))
    assert [{name: row[name] for name in ("prompt", "answer")} for row in rows] == ROWS
    for row in rows:
        assert len(row["responses"]) == len(row["response_tokens"]) == len(row["finish_reasons"]) == 3
        assert row["prompt_tokens"] == len(row["prompt"])
        assert row["end_tokens"] == ["</s>" if reason == "stop" else "" for reason in row["finish_reasons"]]
        for text, tokens, reason in zip(row["responses"], row["response_tokens"], row["finish_reasons"], strict=True):
            assert (reason == "length" and tokens == 12) or (reason == "stop" and tokens == len(text) + 1)
    assert len({text for row in rows for text in row["responses"]}) > 20


def test_names_of_roles_are_configured(generate):
    Path("roles.jsonl").write_text(json.dumps({"conversations": [{"from": "pupil", "value": "write a"}]}) + "\n")
    code, _, err = generate(source="roles.jsonl")
    assert (code, "a message is from 'pupil'" in err) == (2, True)
    assert generate("--roles", "pupil=user", source="roles.jsonl")[0] == 0
    assert "--roles needs name=role, for example teacher=assistant, got 'pupil'" in generate("--roles", "pupil")[2]
    assert "roles maps 'pupil' to 'child', expected one of system" in generate("--roles", "pupil=child")[2]


def test_responses_depend_on_the_seed_and_not_on_batches(generate):
    for name, arguments in (("a", ("--batch-size", "2")), ("b", ("--batch-size", "100")), ("c", ("--seed", "1"))):
        assert generate("-n", "2", *arguments, to=f"{name}.jsonl")[0] == 0
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    assert all(
        a["responses"] != c["responses"]
        for a, c in zip(read_lines(Path("a.jsonl")), read_lines(Path("c.jsonl")), strict=True)
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_greedy_responses_equal_those_of_transformers(generate, tiny_export, engine):
    if engine == "vllm" and not vllm_installed():
        pytest.skip("vLLM is not installed")
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    assert generate("--temperature", "0", source="chat.jsonl", engine=engine)[0] == 0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_export), AutoTokenizer.from_pretrained(tiny_export)
    for row in read_lines(Path("out.jsonl")):
        text = f"user: {row['prompt'][0]['content']}\nassistant: "
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        output = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert row["responses"] == [tokenizer.decode(output, skip_special_tokens=True)]
        assert row["prompt_tokens"] == ids.shape[1]


def test_truncated_output_file_is_continued(generate):
    assert generate("--batch-size", "4")[0] == 0
    whole = Path("out.jsonl").read_bytes()
    for cut in (0, 1, len(whole) // 3, len(whole) // 2 + 7, len(whole) - 1):
        Path("out.jsonl").write_bytes(whole[:cut])
        code, out, _ = generate("--batch-size", "5")
        assert code == 0
        assert Path("out.jsonl").read_bytes() == whole
        saved = whole[:cut].count(b"\n")
        assert (f"has {saved} of 11 rows already" in out) == (saved > 0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_killed_and_repeated_command_writes_the_same_file(generate, tiny_export, engine):
    if engine == "vllm" and not vllm_installed():
        pytest.skip("vLLM is not installed")
    assert generate("-n", "2", to="whole.jsonl", engine=engine)[0] == 0
    command_line = [
        sys.executable, "-m", "lightning_rlhf", "generate", "--model", str(tiny_export), "--prompts", "prompts.jsonl",
        "--to", "killed.jsonl", "--engine", engine, "--max-tokens", "12", "-n", "2", "--batch-size", "1",
    ]  # fmt: skip
    with subprocess.Popen(
        command_line, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
    ) as child:
        end = time.monotonic() + 200
        killed = Path("killed.jsonl")
        while not (killed.exists() and killed.read_bytes().count(b"\n") >= 2) and time.monotonic() < end:
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
    rows = killed.read_bytes().count(b"\n")
    assert 2 <= rows <= 11
    with killed.open("ab") as file:
        file.write(b'{"prompt": "comp')
    assert generate("-n", "2", to="killed.jsonl", engine=engine)[0] == 0
    assert killed.read_bytes() == Path("whole.jsonl").read_bytes()


def test_changed_settings_are_rejected(generate, tiny_export, tmp_path):
    assert generate()[0] == 0
    before = Path("out.jsonl").read_bytes()
    Path("prompts.jsonl").write_text(Path("prompts.jsonl").read_text().replace("times", "plus"))
    for arguments, message in (
        (("--temperature", "0.5"), "temperature was 1.0, is 0.5"),
        (("--seed", "3"), "seed was 0, is 3"),
        ((), "prompts was '"),
    ):
        code, _, err = generate(*arguments)
        assert code == 2
        assert err.startswith("lightning-rlhf: out.jsonl was started with other settings (")
        assert message in err
    assert Path("out.jsonl").read_bytes() == before


def test_changed_answer_columns_count_as_changed_settings(generate):
    assert generate()[0] == 0
    rows = [{**row, "answer": "another"} for row in ROWS]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = generate()
    assert code == 2
    assert "prompts was '" in err


def test_damaged_settings_file_gives_a_one_line_error(generate):
    assert generate()[0] == 0
    Path("out.jsonl.settings.json").write_text('{"n": ')
    code, _, err = generate()
    assert code == 2
    assert "out.jsonl.settings.json is damaged: remove it and out.jsonl" in err


def test_file_with_unicode_line_separators_and_equal_prompts_is_continued(generate):
    rows = [{"prompt": f"a\u2028b\u2029c\x85d\x1c{i // 2}", "note": "\u2028\r\n"} for i in range(6)]
    text = "\n".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)  # and blank lines
    Path("prompts.jsonl").write_text(text, encoding="utf-8")
    assert generate("--batch-size", "2")[0] == 0
    whole = Path("out.jsonl").read_bytes()
    result = read_lines(Path("out.jsonl"))
    assert [{name: row[name] for name in ("prompt", "note")} for row in result] == rows
    assert result[0]["responses"] != result[1]["responses"]  # equal prompts are sampled with different seeds
    Path("out.jsonl").write_bytes(whole[: len(whole) // 2])
    assert generate()[0] == 0
    assert Path("out.jsonl").read_bytes() == whole


def test_full_disk_gives_a_one_line_error_and_the_file_is_continued(generate):
    assert generate(to="whole.jsonl")[0] == 0
    whole = Path("whole.jsonl").read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, before[1]))
    try:
        code, _, err = generate("--batch-size", "3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert (
        err == "lightning-rlhf: cannot write out.jsonl: File too large; the same command continues after the last row\n"
    )
    assert 0 < Path("out.jsonl").read_bytes().count(b"\n") < 11
    assert generate()[0] == 0
    assert Path("out.jsonl").read_bytes() == whole


def test_missing_directory_is_created_or_gives_a_one_line_error(generate):
    assert generate(to="new/folder/out.jsonl")[0] == 0
    Path("file").write_text("")
    code, _, err = generate(to="file/out.jsonl")
    assert code == 2
    assert err.startswith("lightning-rlhf: cannot write file/out.jsonl: ")


def test_replaced_weights_count_as_changed_settings(generate, tiny_export):
    model = Path("model")
    model.mkdir()
    for path in tiny_export.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    assert generate(model=model)[0] == 0
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-10] ^= 1
    (model / "model.safetensors").write_bytes(content)
    code, _, err = generate(model=model)
    assert code == 2
    assert "weights was" in err


def test_change_of_any_single_tensor_is_detected(tmp_path):
    def result(**changes):
        tensors = {name: torch.zeros(50_000) for name in "abc"} | changes
        save_file(tensors, tmp_path / "model.safetensors")
        return weights_digest(str(tmp_path))

    # LoRA on some layers changes only some tensors, and neither the first nor the last of a file.
    every = [result(), *(result(**{name: torch.ones(50_000)}) for name in "abc")]
    assert len(set(every)) == 4
    assert result() == every[0]


def test_two_processes_cannot_write_the_same_file(tmp_path):
    first, second = (ResponsesFile(tmp_path / "x.jsonl", {"n": 1}, 3) for _ in range(2))
    assert first.begin() == 0
    with pytest.raises(ValueError, match="is being written by another process"):
        second.begin()
    second.close()
    first.close()
    assert second.begin() == 0
    second.close()


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (("-n", "0"), {}, "n must be at least 1, got 0"),
        (("--max-tokens", "256"), {}, "--max-tokens 256 leaves no tokens for a prompt: the model accepts 256"),
        (("--columns", "question"), {}, "--columns needs field=column, for example prompt=question, got 'question'"),
        (("--columns", "prompt=question"), {}, "train data: 11 of 11 rows cannot be used"),
        ((), {"to": "out.csv"}, "--to must end with .jsonl, got 'out.csv'"),
        ((), {"to": "prompts.jsonl"}, "prompts.jsonl exists already and was not written by generate"),
        ((), {"model": "runs/none/export"}, "no model at 'runs/none/export'"),
        ((), {"source": "none.jsonl"}, "no data at 'none.jsonl'"),
        (("--temperature", "-1"), {}, "temperature must be 0 (greedy) or positive, got -1.0"),
        (("--temperature", "nan"), {}, "temperature must be 0 (greedy) or positive, got nan"),
        (("--server", "http://127.0.0.1:9"), {}, "no server answers at http://127.0.0.1:9"),
        (("--server", "http://127.0.0.1:9", "--api-key-env", "NO_KEY"), {}, "the environment variable 'NO_KEY'"),
        (("--api-key-env", "KEY"), {}, "--api-key-env needs --server"),
    ],
)
def test_mistakes_give_one_line_and_code_2(generate, arguments, changes, message):
    code, _, err = generate(*arguments, **changes)
    assert code == 2
    assert err.startswith(f"lightning-rlhf: {message}")
    assert not Path("out.jsonl").exists()


def test_messages_name_the_option_of_the_command(generate):
    Path("prompts.jsonl").write_text(json.dumps({"question": "x"}) + "\n")
    code, _, err = generate()
    assert code == 2
    assert "no column 'prompt', only ['question']; to use 'question', set --columns prompt=question" in err


def test_prompt_without_room_for_a_response_is_a_bad_row(generate):
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "x" * 245}) + "\n" + json.dumps({"prompt": "y"}) + "\n")
    code, _, err = generate()
    assert code == 2
    assert "jsonl:1: the prompt has 245 tokens; --max-tokens leaves 244" in err
    assert generate("--on-bad-row", "skip")[0] == 0
    assert [row["prompt"] for row in read_lines(Path("out.jsonl"))] == ["y"]


def test_row_that_cannot_be_written_is_a_bad_row_before_any_generation(generate):
    Path("prompts.jsonl").write_text('{"prompt": "x", "note": "\\ud800"}\n{"prompt": "y"}\n')
    code, _, err = generate()
    assert code == 2
    assert "prompts.jsonl:1: cannot be written as JSON: " in err
    assert generate("--on-bad-row", "skip")[0] == 0


def test_input_column_with_the_name_of_an_output_column_is_rejected(generate):
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "x", "responses": ["y"]}) + "\n")
    code, _, err = generate()
    assert code == 2
    assert "the prompts have a column 'responses', the name of an output column" in err


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", b"", b"\x08" + b"\0" * 7]
)
def test_invalid_weights_are_reported_with_their_file(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"^the weights in .*model\.safetensors cannot be read, the file is damaged"):
        weights_digest(str(tmp_path))


def test_vllm_does_not_round_the_logits_of_a_saved_model(tmp_path):
    vllm = pytest.importorskip("vllm.config")
    LlamaForCausalLM(LlamaConfig(hidden_size=32, num_attention_heads=2, vocab_size=64)).bfloat16().save_pretrained(
        tmp_path
    )
    config = AutoConfig.from_pretrained(tmp_path)
    setup = EngineSetup(tmp_path, "bfloat16", 64, tmp_path / "log")
    overrides = _make_engine("vllm", config, 1).llm_arguments(setup)["hf_overrides"]
    assert f"--hf-overrides={json.dumps(overrides)}" in ServedModel(str(tmp_path), "m", "bfloat16", 64, 8).arguments()
    options = {"dtype": "bfloat16", "skip_tokenizer_init": True}
    assert vllm.ModelConfig(str(tmp_path), **options).head_dtype == torch.bfloat16
    assert vllm.ModelConfig(str(tmp_path), hf_overrides=overrides, **options).head_dtype == torch.float32
