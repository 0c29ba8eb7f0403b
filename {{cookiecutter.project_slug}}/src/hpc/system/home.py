"""The home directory, also of an account that has neither home nor name, as containers and services make them."""

import getpass
import os
from contextlib import suppress
from pathlib import Path


def expand(path: str | Path) -> Path:
    """The path with `~` or `~user` expanded. Where that leads nowhere, a place where no file is and none can be made.

    (`Path.expanduser` raises, and `os.path.expanduser` leaves a folder called `~` in the working directory.)
    """
    expanded = os.path.expanduser(path)
    return Path(os.devnull, expanded) if expanded.startswith("~") else Path(expanded)


def user_name() -> str:
    """The name of this account; `USER` where it has none, which a person replaces."""
    with suppress(KeyError, OSError):  # as it is raised until Python 3.12, and after
        return getpass.getuser()
    return "USER"
