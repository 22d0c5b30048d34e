"""Words of the programs' messages."""


def counted(n: int, noun: str, plural: str | None = None) -> str:
    """A number and what it counts, as `1 token`; plural is given where it is not noun + s."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"
