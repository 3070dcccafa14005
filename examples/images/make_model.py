"""Write a small vision-language model with random weights, its tokenizer and its processor.

    python examples/images/make_model.py idefics3 runs/images/model

The architectures are idefics3 (that of SmolVLM), which vLLM also runs on a CPU, and qwen2_5_vl. Both read pictures of
32 x 32 pixels as 16 tokens.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast

from lightning_rlhf.tasks.drawings import CHARACTERS

SPECIAL = (
    "<pad>", "<s>", "</s>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    "<|vision_start|>", "<|vision_end|>", "<|video_pad|>",
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% if message.role == 'assistant' %}</s>{% endif %}{% endfor %}"
)
IMAGES = {
    "idefics3": "<image>",
    "qwen2_5_vl": "<|vision_start|><image><|vision_end|>",
}
TEXT = {
    "vocab_size": len(SPECIAL) + len(CHARACTERS), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "initializer_range": 0.08,
}  # fmt: skip
CONFIGS = {
    "idefics3": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 4, "initializer_range": 0.08,
        },
        "scale_factor": 2,
    },
    "qwen2_5_vl": {
        "text_config": {
            **TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
        },
        "vision_config": {
            "hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 2, "out_hidden_size": 128,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1, "window_size": 32,
            "fullatt_block_indexes": [0, 1], "initializer_range": 0.08,
        },
        "vision_start_token_id": SPECIAL.index("<|vision_start|>"),
        "vision_end_token_id": SPECIAL.index("<|vision_end|>"),
        "video_token_id": SPECIAL.index("<|video_pad|>"),
    },
}  # fmt: skip
PROCESSORS = {
    "idefics3": {
        "processor_class": "Idefics3Processor", "image_seq_len": 16,
    },
    "qwen2_5_vl": {"processor_class": "Qwen2_5_VLProcessor"},
}  # fmt: skip
IMAGE_PROCESSORS = {
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 32}, "do_image_splitting": False,
    },
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 1,
        "size": {"shortest_edge": 1024, "longest_edge": 1024},
    },
}  # fmt: skip


def make_tokenizer(architecture: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    characters.add_special_tokens(list(SPECIAL))
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", IMAGES[architecture])
    return tokenizer


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architecture", choices=sorted(CONFIGS))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights")
    arguments = parser.parse_args()
    name, directory = arguments.architecture, arguments.directory
    transformers.logging.set_verbosity_error()
    further = {"image_token_id": SPECIAL.index("<image>"), "pad_token_id": 0, "initializer_range": 0.08}
    config = CONFIG_MAPPING[name](**CONFIGS[name], **further)
    torch.manual_seed(arguments.seed)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(directory)
    make_tokenizer(name).save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps(PROCESSORS[name]))
    (directory / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSORS[name]))
    print(f"{directory}: {name} with {sum(weights.numel() for weights in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
