"""docs/data.md: every row is read by the module of its section, and every configuration is valid."""

import json
import re
from pathlib import Path

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser

import lightning_rlhf
from tests.data.rows_given import Letters, module_of
from tests.stand_ins import columns_of, each

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()
FORMATS = re.findall(r"### (\w+)\n+```jsonl\n(.*?)```", TEXT, re.DOTALL)
ROWS = [(name, row) for name, rows in FORMATS for row in rows.splitlines()]
CONFIGS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


def test_page_has_rows_and_configurations():
    assert [name for name, _ in FORMATS] == [
        f"{name}DataModule" for name in ("Prompt", "Conversation", "Preference", "Unpaired")
    ]
    assert (len(ROWS), len(CONFIGS)) == (15, 4)


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_each_documented_row_is_read(name, row):
    module = module_of(getattr(lightning_rlhf, name), json.loads(row), chat=True)
    assert module.reports["train"].used == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jsonargparse's, of the very call that Lightning makes
@pytest.mark.parametrize("config", CONFIGS)
def test_each_documented_configuration_reads_its_data(config, tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Letters().load().save_pretrained("runs/sft/export")
    Letters(chat=True).load().save_pretrained("models/chat")
    talks = [{side: f"\n\nHuman: why?\n\nAssistant: {side}" for side in ("chosen", "rejected")}] * 32
    Path("data/hh_rlhf.jsonl").write_text("\n".join(map(json.dumps, talks)))
    questions = [{"question": "why?", "answer": "so"}, {"question": "a" * 99, "answer": "so"}]
    Path("data/arithmetic.jsonl").write_text("\n".join(map(json.dumps, questions)))
    Path("data/held_out.csv").write_text("question,answer\nwhy?,so\n")
    verl = {"question": "how?", "reward_model": {"style": "rule", "ground_truth": "so"}}
    parquet.write_table(pyarrow.Table.from_pylist([verl]), "data/verl.parquet")
    graded = [
        {"prompt": "a" * (9 - i), "data_source": source, "extra_info": {"level": i}}
        for i, source in enumerate(("arithmetic", "logic") * 2)
    ]
    Path("data/graded.jsonl").write_text("\n".join(map(json.dumps, graded)))
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
        sources = [source for batch in batches for source in columns_of(batch)["data_source"]]
        assert (sources.count("arithmetic"), sources.count("logic")) == (4, 2)
