"""Signs of numbers in texts of language models, which write more than the ASCII ones."""

# Minus sign, small and full-width hyphen, hyphen and non-breaking hyphen; full-width and small plus sign.
_PLAIN = str.maketrans("\u2212\ufe63\uff0d\u2010\u2011\uff0b\ufe62", "-----++")


def plain_signs(text: str) -> str:
    """Return a text whose minus and plus signs are ASCII."""
    return text.translate(_PLAIN)
