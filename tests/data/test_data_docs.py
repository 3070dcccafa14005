"""docs/data.md: every row is read by the module of its section, and every configuration is valid."""

import json
import re
import string
from dataclasses import dataclass
from pathlib import Path

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser

import lightning_rlhf
from lightning_rlhf.data.tokenizers import CharacterTokenizer
from lightning_rlhf.extras.commands import check_data
from tests.data.rows_given import GivenRows, Letters, module_of
from tests.stand_ins import columns_of, each

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()
FORMATS = re.findall(r"### (\w+)\n+```jsonl\n(.*?)```", TEXT, re.DOTALL)
ROWS = [(name, row) for name, rows in FORMATS for row in rows.splitlines()]
CONFIGS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
MIXTURE = re.search(r"`(\S+\.Mixture)` with `(init_args: .*?)`", TEXT).expand(r"class_path: \1\n      \2")
SAMPLER = r"class_path: \S+\.Curriculum .*\n +init_args: .*"
RUN = """
model: {class_path: lightning_rlhf.GRPOModule, init_args: {actor: runs/sft/export}}
trainer:
  max_steps: 1
  callbacks:
    - class_path: lightning_rlhf.callbacks.RolloutLoop
      init_args: {group_size: 2, rewards: [{function: lightning_rlhf.extras.rewards.text.ExactMatch}]}
"""


def test_page_has_rows_and_configurations():
    assert [name for name, _ in FORMATS] == [
        f"{name}DataModule" for name in ("Prompt", "Conversation", "Preference", "Unpaired", "Ranking")
    ]
    assert (len(ROWS), len(CONFIGS)) == (20, 3)


PAIRS = [("PromptDataModule", row) for name, row in ROWS if name == "PreferenceDataModule"]


@pytest.mark.parametrize(("name", "row"), ROWS + PAIRS)
def test_each_documented_row_is_read(name, row):
    module = module_of(getattr(lightning_rlhf, name), json.loads(row), chat=True)
    assert module.reports["train"].used == 1


@dataclass(frozen=True)
class Tools:
    """A tokenizer source whose chat template writes tool calls."""

    def load(self):
        tokenizer = CharacterTokenizer(string.printable).load()
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
            "{{ call.function.name }}{{ call.function.arguments }}{% endfor %}|{% endfor %}"
        )
        return tokenizer


def test_documented_tool_call_is_learned():
    (row,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    module = lightning_rlhf.ConversationDataModule(GivenRows((json.loads(row),)), Tools(), batch_size=1)
    module.setup("fit")
    (text,) = module.examples["train"]
    learned = [token for token, is_learned in zip(text.ids, text.loss_mask, strict=True) if is_learned]
    assert module.tokenizer.decode(learned) == 'assistant: add{"a": 2, "b": 3}|assistant: 5|</s>'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with the data and tokenizer of the page's configurations; its Parquet rows are verl's."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Letters(chat=True).load().save_pretrained("models/chat")
    talks = [{side: f"\n\nHuman: why?\n\nAssistant: {side}" for side in ("chosen", "rejected")}] * 32
    Path("data/hh_rlhf.jsonl").write_text("\n".join(map(json.dumps, talks)))
    questions = [{"prompt": [{"role": "user", "content": text}], "answer": "so"} for text in ("why?", "a" * 99)]
    Path("data/arithmetic.jsonl").write_text("\n".join(map(json.dumps, questions)))
    Path("data/held_out.csv").write_text("prompt,answer\nwhy?,so\n")
    (verl,) = (json.loads(row) for name, row in ROWS if name == "PromptDataModule" and "reward_model" in row)
    parquet.write_table(pyarrow.Table.from_pylist([verl]), "data/verl.parquet")
    graded = [
        {"prompt": "a" * (9 - i), "data_source": source, "extra_info": {"level": i}}
        for i, source in enumerate(("arithmetic", "logic") * 2)
    ]
    Path("data/graded.jsonl").write_text("\n".join(map(json.dumps, graded)))
    return tmp_path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jsonargparse's, of the very call that Lightning makes
@pytest.mark.parametrize("config", [*CONFIGS, re.sub(SAMPLER, MIXTURE, CONFIGS[-1])])
def test_each_documented_configuration_reads_its_data(config, folder):
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    data = parser.instantiate_classes(parser.parse_string(config))["data"]
    data.setup("fit")
    batches = list(data.train_dataloader())
    if "as_messages" in config:
        assert "user: why?|assistant: chosen" in data.tokenizer.decode(batches[0].chosen.input_ids[0])
    elif data.sampler is None:
        assert [columns_of(batch)["ground_truth"] for batch in batches] == [["so", "so"]]
        assert data.reports["train"].dropped == {"the prompt longer than 64 tokens": 1}
        assert data.reports["val"].used == 1
    elif "Curriculum" in config:
        assert [len(ids) for batch in batches for ids in each(batch, "token_ids")] == [9, 8, 7, 6]
    else:
        assert "Mixture" in config
        sources = [source for batch in batches for source in columns_of(batch)["data_source"]]
        assert (sources.count("arithmetic"), sources.count("logic")) == (4, 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_check_data_prints_the_documented_lines(folder, capsys):
    Path("x.yaml").write_text(CONFIGS[0] + RUN)
    assert check_data.run(["--config", "x.yaml"]) == 0
    (shown,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line in shown.splitlines()][: len(shown.splitlines())] == shown.splitlines()


def test_documented_python_reads_rows_in_memory(folder):
    pytest.importorskip("datasets")
    names = {}
    exec(*re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL), names)
    names["data"].setup("fit")
    assert names["data"].reports["train"].used == 1
