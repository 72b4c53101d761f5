"""``headrace demo``"""


def demo() -> None:
    """Demo."""
