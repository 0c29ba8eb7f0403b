"""Classes of other people, as test_build.py names them in YAML."""

from dataclasses import dataclass
from typing import Any


class Kept:
    """Keeps what it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    @classmethod
    def of_width(cls, width: int = None, **more: Any) -> "Kept":  # noqa: RUF013
        return cls(width=width, **more)


class Child(Kept):
    pass


@dataclass
class Settings:
    width: int
    depth: int = 2


def add(a: int, b: int = 1) -> int:
    return a + b


def fails(**arguments: Any) -> None:
    raise KeyError("inner")
