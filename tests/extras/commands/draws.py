"""An environment that answers with pictures, and a reward that reads them."""

from typing import Any

from PIL import Image

from lightning_rlhf.environments import Environment, Reply, Turn


class Draws(Environment):
    """Answers the first turn with a picture 20 pixels wide, the second with one of 21."""

    def step(self, turn: Turn) -> Reply:
        picture = Image.new("RGB", (20 + turn.number, 20), "red")
        return Reply([{"role": "user", "content": ["see ", picture]}], reward=1.0)


def seen(conversations: list[list[dict[str, Any]]]) -> list[float]:
    """Return the widths of the pictures in each conversation, summed."""
    return [float(sum(map(_width, messages))) for messages in conversations]


def _width(message: dict[str, Any]) -> int:
    if isinstance(message["content"], str):
        return 0
    return sum(part["image"].open().width for part in message["content"] if "image" in part)
