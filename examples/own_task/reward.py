def right(completions, answer):
    """Score 1 where the response is the answer, else 0."""
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]
