"""``python -m lightning_rlhf.extras.schema``: write ``schema.json``."""

from lightning_rlhf.extras.schema.generate import as_text
from lightning_rlhf.extras.schema.known import SCHEMA

SCHEMA.write_text(as_text(), encoding="utf-8")
