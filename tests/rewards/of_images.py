"""Reward functions of the images of prompts, which worker processes import fast."""


def wide(images):
    """Return the width of the first image, 0 without images."""
    return [0.0 if of_prompt is None else float(of_prompt[0].open().width) for of_prompt in images]


def width(completions, images):
    return wide(images)


def width_of_one(completions, images):
    assert len(images) == 1
    return wide(images)


width_of_one.per_sample = True


async def awaited_width(completions, images):
    return wide(images)


def with_everything(completions, **columns):
    return wide(columns["images"])
