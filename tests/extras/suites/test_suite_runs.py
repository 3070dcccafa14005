"""``evaluate --suite``: settings for the packages, errors, interruptions, and the packages themselves if installed."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rlhf.extras.commands import evaluate
from lightning_rlhf.extras.suites import command, harness, inspection
from lightning_rlhf.extras.suites.suite import SuiteRun

ROWS = [
    {"question": f"{i} plus {i * 7 % 10} is ", "choices": ["a", "b7", "?"], "label": i % 3} for i in range(12)
]  # fmt: skip
# A package in the place of lm_eval: it writes results as 0.4.13 does, and fails for the task "broken".
LM_EVAL = """
import json, os, sys
from pathlib import Path
settings = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
Path("seen.json").write_text(json.dumps([sys.argv[1:], os.environ.get("OPENAI_API_KEY"), settings]))
print("working")
if "broken" in settings["tasks"]:
    raise ValueError("Tasks not found: broken")
folder = Path(settings["output_path"]) / "model"
folder.mkdir(parents=True)
results = {task: {"sample_len": 12, "acc,none": 0.75, "acc_stderr,none": 0.13} for task in settings["tasks"]}
(folder / "results_2026-01-01.json").write_text(json.dumps({"results": results, "n-samples": {}}))
"""


@pytest.fixture
def run(capfd):
    """Run the command and return its exit code and what it printed."""

    def run(*arguments):
        capfd.readouterr()
        try:
            code = evaluate.run(["--suite", *map(str, arguments)])
        except SystemExit as end:
            code = end.code
        shown = capfd.readouterr()
        return code, shown.out + shown.err

    return run


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Put a stand-in of lm_eval before the installed packages, here and in child processes."""
    packages = tmp_path / "packages"
    (packages / "lm_eval").mkdir(parents=True)
    (packages / "lm_eval/__init__.py").touch()
    (packages / "lm_eval/__main__.py").write_text(LM_EVAL)
    (packages / "lm_eval-0.4.13.dist-info").mkdir()
    metadata = packages / "lm_eval-0.4.13.dist-info/METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: lm_eval\nVersion: 0.4.13\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    return metadata


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("KEY", "0123456789abcdef")
    monkeypatch.setattr(command, "served_model", lambda *_: {"id": "served", "max_model_len": 512})
    return "http://127.0.0.1:8000"


def seen():
    return json.loads(Path("seen.json").read_text())


def test_tasks_are_run_once_and_reported(run, stand_in, tiny_export):
    inputs = ("lm-eval", "--model", tiny_export, "--tasks", "a,b", "c", "--no-chat-template", "--to", "out")
    code, shown = run(*inputs, "--limit", "12", "--json", "report.json", "--", "--write_out")
    assert (code, "working" in shown, "the first 12 rows" in shown) == (0, True, True)
    assert [word for word in shown.split() if word in ("0.750", "0.468", "0.911")] == ["0.750", "0.468", "0.911"] * 3
    written = json.loads(Path("report.json").read_text())
    assert written == json.loads(Path("out/report.json").read_text())
    assert written["sources"].keys() == set("abc")
    assert (written["suite"], written["version"], written["chat_template"]) == ("lm-eval", "0.4.13", False)
    words, key, settings = seen()
    assert (words[0], words[-1], key) == ("run", "--write_out", None)
    assert (settings["model"], settings["tasks"], settings["batch_size"]) == ("hf", ["a", "b", "c"], 8)
    expected = {"pretrained": str(tiny_export), "dtype": "float32", "trust_remote_code": False}
    assert settings["model_args"] == expected or torch.cuda.is_available()
    Path("seen.json").unlink()
    code, shown = run(*inputs, "--limit", "12", "--", "--write_out")
    assert (code, "has the results already" in shown, Path("seen.json").exists()) == (0, True, False)
    code, shown = run(*inputs)
    assert (code, "limit was 12, is None" in shown) == (2, True)


def test_failed_suite_is_one_line_and_its_log_stays(run, stand_in, tiny_export):
    inputs = ("lm-eval", "--model", tiny_export, "--no-chat-template", "--to", "out", "--tasks")
    code, shown = run(*inputs, "broken")
    assert code == 1
    assert "lm-eval ended with exit code 1 and without results: ValueError: Tasks not found: broken (" in shown
    assert "Traceback" in Path("out/output.log").read_text()


def test_key_of_another_service_is_not_sent(run, stand_in, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of-another-service")
    inputs = ("lm-eval", "--server", f"{server}/v1", "--tasks", "a", "--chat-template")
    assert run(*inputs, "--to", "without")[0] == 0
    assert seen()[1] == "none"
    assert run(*inputs, "--to", "with", "--api-key-env", "KEY")[0] == 0
    assert seen()[1] == "0123456789abcdef"
    assert "0123456789abcdef" not in "".join(path.read_text() for path in Path("with").rglob("*.json"))


def test_harness_asks_a_server_by_the_route_that_fits():
    def settings(**options):
        both = {"tasks": ["a"], "folder": Path(), "server": "http://x:1", "served_name": "m", "longest": 512, **options}
        values = harness.Harness()._settings(SuiteRun(**both))
        return values["model"], values["model_args"]

    kind, arguments = settings(chat=True)
    assert (kind, arguments["base_url"]) == ("local-chat-completions", "http://x:1/v1/chat/completions")
    kind, arguments = settings(chat=False)
    assert (kind, arguments["base_url"]) == ("local-completions", "http://x:1/v1/completions")
    assert (arguments["tokenized_requests"], arguments["max_length"]) == (False, 512)
    for chat, adds_bos, expected in ((True, True, False), (False, True, True), (False, False, False)):
        kind, arguments = settings(chat=chat, adds_bos=adds_bos, tokenizer="t")
        assert (kind, arguments["tokenizer"]) == ("local-completions", "t")
        assert (arguments["tokenized_requests"], arguments["add_bos_token"]) == (True, expected)


def test_settings_of_generation_reach_the_harness():
    def generation(**options):
        run = SuiteRun(["a"], Path(), chat=False, model="m", **options)
        return harness.Harness()._settings(run)["gen_kwargs"]

    assert generation() is None
    assert generation(max_tokens=9) == {"max_gen_toks": 9}
    assert generation(temperature=0.5) == {"temperature": 0.5, "do_sample": True}
    assert generation(temperature=0.0) == {"temperature": 0.0, "do_sample": False}
    vllm = harness.Harness()._settings(SuiteRun(["a"], Path(), chat=False, model="m", longest=64, is_vllm=True))
    assert (vllm["model"], vllm["model_args"]["max_model_len"], vllm["batch_size"]) == ("vllm", 64, "auto")


def test_inspect_gets_each_prompt_with_one_bos_and_no_words_of_its_own(tmp_path):
    def asked(**options):
        run = SuiteRun(["t.py"], tmp_path, **options)
        words = inspection.Inspection().command(run)
        return words, json.loads((tmp_path / "inspect-model.json").read_text())

    words, model = asked(chat=True, model="models/x", temperature=0.0)
    assert (words[:3], words[words.index("--model") + 1]) == (["inspect_ai", "eval-set", "t.py"], "hf/x")
    assert (model["tokenizer_call_args"], model["do_sample"]) == ({"add_special_tokens": False}, False)
    assert "--temperature" not in words  # transformers rejects 0
    _, model = asked(chat=False, model="models/x", temperature=0.5)
    assert "do_sample" not in model
    tokenizer = AutoTokenizer.from_pretrained(_with_bos(tmp_path))
    messages = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(messages, chat_template=model["chat_template"], tokenize=False) == "1+1="
    words, model = asked(chat=True, server="http://x:1", served_name="m", temperature=0.0, limit=3)
    assert (model, words[words.index("--model") + 1]) == ({}, "openai-api/lightning/m")
    assert [words[words.index(name) + 1] for name in ("--model-base-url", "--temperature", "--limit")] == [
        "http://x:1/v1", "0.0", "3"
    ]  # fmt: skip
    words, _ = asked(chat=False, server="http://x:1", served_name="m", max_tokens=4)
    assert words[words.index("--model") + 1] == "openai-api-completions/lightning/m"


def _with_bos(folder):
    from lightning_rlhf.data.tokenizers import CharacterTokenizer

    CharacterTokenizer("0123456789+=").load().save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


MODEL = ("--model", "{model}", "--tasks", "a", "--to", "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (MODEL, "has a chat template: set --chat-template or --no-chat-template"),
        (("answers.jsonl", *MODEL), "has its own prompts, so leave out answers.jsonl"),
        ((*MODEL, "--reward", "x.py:f"), "--reward is for files of responses"),
        (MODEL[:-2], "--suite needs --to"),
        (("--model", "{model}", "--to", "out"), "--suite needs --tasks"),
        (("--tasks", "a", "--to", "out"), "--suite needs --model DIR, or --server URL"),
        (("--server", "u", "v", "--tasks", "a", "--to", "out"), "asks one server, got 2"),
        (("--server", "{server}", "--tasks", "a", "--to", "out"), "a server may have a chat template: set"),
        ((*MODEL, "--api-key-env", "KEY"), "--api-key-env needs --server"),
        ((*MODEL, "--limit", "0"), "--limit must be at least 1, got 0"),
        ((*MODEL, "--fewshot", "-1"), "--fewshot must be at least 0, got -1"),
        ((*MODEL, "--temperature", "nan"), "--temperature must be at least 0, got nan"),
        ((*MODEL, "--tokenizer", "t"), "--tokenizer is that of a server"),
        ((*MODEL, "--", "--trust_remote_code"), "trust_remote_code runs code of the hub"),
        (("--model", "nowhere", *MODEL[2:]), "nowhere"),
    ],
)
def test_mistakes_are_one_sentence(run, stand_in, server, tiny_export, arguments, message):
    words = [word.format(model=tiny_export, server=server) for word in arguments]
    code, shown = run("lm-eval", *words)
    assert (code, message in shown, Path("out").exists()) == (2, True, False), shown


def test_missing_old_and_unfitting_packages_are_named(run, stand_in, server, tiny_export, monkeypatch):
    inputs = [word.format(model=tiny_export) for word in MODEL] + ["--no-chat-template"]
    stand_in.write_text(stand_in.read_text().replace("0.4.13", "0.4.9.1"))
    assert "lm-eval 0.4.9.1 is too old" in run("lm-eval", *inputs)[1]
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    code, shown = run("lm-eval", *inputs)
    assert (code, "needs lm_eval, which is not installed: pip install 'lm_eval[hf,api]'" in shown) == (2, True)
    code, shown = run("inspect", *inputs)
    assert (code, "needs inspect_ai, which is not installed: pip install inspect-ai openai" in shown) == (2, True)
    monkeypatch.setattr(command, "find_spec", find_spec)
    of_inspect = inspection.Inspection()
    for options, message in (
        ({"fewshot": 5}, "--fewshot is an option for lm-eval"),
        ({"include_path": "x"}, "--include-path is an option for lm-eval"),
        ({"is_vllm": True}, "run lightning-rlhf serve --model m"),
        ({"server": "u", "model": None}, "set --max-tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            of_inspect.check(SuiteRun(["t"], Path(), **{"chat": False, "model": "m", **options}))


def test_options_of_suites_need_one(capsys):
    for arguments, message in (
        (["answers.jsonl", "--model", "x"], "--model needs --suite"),
        (["answers.jsonl", "--no-chat-template"], "--chat-template needs --suite"),
        ([], "required: FILE, or --suite"),
    ):
        try:
            code = evaluate.run(arguments)
        except SystemExit as end:
            code = end.code
        assert (code, message in capsys.readouterr().err) == (2, True)


def loglikelihood(model, ids, count):
    """Return the sum of the log-probabilities of the last ``count`` tokens."""
    logprobs = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return sum(logprobs[position, ids[position + 1]].item() for position in range(len(ids) - 1 - count, len(ids) - 1))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
@pytest.mark.parametrize("is_chat", [False, True])
def test_harness_has_the_loglikelihoods_and_responses_of_the_model(run, tiny_export, is_chat):
    model = AutoModelForCausalLM.from_pretrained(tiny_export)
    tokenizer = AutoTokenizer.from_pretrained(tiny_export)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt(row):
        return f"user: {row['question'].strip()}\nassistant: " if is_chat else row["question"]

    def greedy(row):
        tokens = torch.tensor([ids(prompt(row))])
        output = model.generate(tokens, max_new_tokens=4, do_sample=False)[0, tokens.shape[1] :]
        return tokenizer.decode(output, skip_special_tokens=True)

    rows = [{**row, "answer": greedy(row) if i % 3 else "no"} for i, row in enumerate(ROWS)]
    write_tasks(rows, "{{question.strip()}}" if is_chat else "{{question}}")
    template = "--chat-template" if is_chat else "--no-chat-template"
    code, shown = run("lm-eval", "--model", tiny_export, "--tasks", "tiny_choice", "tiny_exact", "--include-path",
                      "tasks", template, "--to", "out", "--engine", "transformers")  # fmt: skip
    assert code == 0, shown
    best, correct = [], 0
    for row in rows:
        values = [loglikelihood(model, ids(prompt(row)) + ids(c), len(ids(c))) for c in row["choices"]]
        best.append(values)
        correct += values.index(max(values)) == row["label"]
    (samples,) = Path("out/results").glob("*/samples_tiny_choice_*.jsonl")
    for line, values in zip(samples.read_text().splitlines(), best, strict=True):
        found = [float(response[0]) for response in json.loads(line)["filtered_resps"]]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(values), rtol=1e-4, atol=1e-4, check_dtype=False)
    sources = json.loads(Path("out/report.json").read_text())["sources"]
    assert sources["tiny_choice"]["rewards"]["acc"]["mean"] == pytest.approx(correct / 12)
    assert sources["tiny_exact"]["rewards"]["exact_match"]["mean"] == pytest.approx(8 / 12)
    code, shown = run("lm-eval", "--model", tiny_export, "--tasks", "tiny_choice", "tiny_exact", "--include-path",
                      "tasks", template, "--to", "out", "--engine", "transformers")  # fmt: skip
    assert (code, "has the results already" in shown) == (0, True)


def write_tasks(rows, prompt):
    Path("tasks").mkdir()
    data = Path("tasks/rows.jsonl").absolute()
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    common |= {"doc_to_text": prompt, "target_delimiter": ""}
    choice = {"task": "tiny_choice", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
              "doc_to_target": "label", "metric_list": [{"metric": "acc"}]}  # fmt: skip
    generation = {"until": ["\n\n\n"], "max_gen_toks": 4, "do_sample": False}
    exact = {"task": "tiny_exact", "output_type": "generate_until", "doc_to_target": "answer",
             "generation_kwargs": generation, "metric_list": [{"metric": "exact_match"}]}  # fmt: skip
    for task in (choice, exact):
        Path(f"tasks/{task['task']}.yaml").write_text(json.dumps({**common, **task}))


INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

@task
def tiny():
    return Task(json_dataset("{data}", FieldSpec(input="question", target="answer")), generate(), scorer=exact())
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("inspect_ai") is None, reason="inspect_ai is not installed")
@pytest.mark.parametrize("is_chat", [False, True])
def test_inspect_has_the_responses_of_the_model(run, tiny_export, is_chat):
    model = AutoModelForCausalLM.from_pretrained(tiny_export)
    tokenizer = AutoTokenizer.from_pretrained(tiny_export)

    def greedy(row):
        text = f"user: {row['question']}\nassistant: " if is_chat else row["question"]
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        output = model.generate(tokens, max_new_tokens=4, do_sample=False)[0, tokens.shape[1] :]
        return tokenizer.decode(output, skip_special_tokens=True)

    data = Path("rows.jsonl").absolute()
    rows = [{**row, "answer": greedy(row) if i % 3 else "no"} for i, row in enumerate(ROWS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("tiny.py").write_text(INSPECT.format(data=data))
    inputs = ("inspect", "--model", tiny_export, "--tasks", "tiny.py", "--to", "out", "--temperature", "0")
    inputs += ("--max-tokens", "4", "--chat-template" if is_chat else "--no-chat-template")
    code, shown = run(*inputs)
    assert code == 0, shown
    report = json.loads(Path("out/report.json").read_text())
    (rewards,) = [source["rewards"] for source in report["sources"].values()]
    assert rewards["mean"]["mean"] == pytest.approx(8 / 12)
    assert (rewards["mean"]["interval"], rewards["mean"]["stderr"] > 0) == ("wilson", True)
    code, shown = run(*inputs)
    assert (code, "has the results already" in shown) == (0, True)
