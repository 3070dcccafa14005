"""GSM8K in verl's layout, as the recipes read it: parquet with data_source, prompt, reward_model, extra_info.

    python examples/04_verl_data.py openai/gsm8k data/verl/gsm8k          # from the hub
    python examples/04_verl_data.py data/gsm8k data/verl/gsm8k            # from train.jsonl and test.jsonl

Data that somebody has prepared for verl need nothing of this: put the folder where the recipe looks, or name it there.
On the hub, PRIME-RL/Eurus-2-RL-Data and BytedTsinghua-SIA/DAPO-Math-17k have this layout already.
"""

import sys
from pathlib import Path

from datasets import Dataset

from lightning_rlhf.data.rows import HubDataset, as_rows

ASK = ' Let\'s think step by step and output the final answer after "####".'


def verl_row(question: str, answer: str, split: str, index: int) -> dict[str, object]:
    """Return one problem; the correct answer is the number after ``####``."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question + ASK}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.rpartition("####")[2].strip().replace(",", "")},
        "extra_info": {"split": split, "index": index},
    }


def main(source: str, target: str) -> dict[str, int]:
    """Write both parts; how many rows each has."""
    counts = {}
    for split in ("train", "test"):
        file = Path(source, f"{split}.jsonl")
        rows = as_rows(str(file)) if file.is_file() else HubDataset(source, "main", split)
        made = [verl_row(row["question"], row["answer"], split, i) for i, (_, row) in enumerate(rows.rows())]
        Path(target).mkdir(parents=True, exist_ok=True)
        Dataset.from_list(made).to_parquet(str(Path(target, f"{split}.parquet")))
        counts[split] = len(made)
    return counts


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
