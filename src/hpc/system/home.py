"""The home directory, also of an account that has neither home nor name, as containers and services make them."""

import getpass
import os
from contextlib import suppress
from pathlib import Path


def expand(path: str | Path) -> Path:
    """Expand `~` or `~user` at the start of a path.

    Where there is no such home, return a path below /dev/null: nothing exists there, and nothing can be created.
    `Path.expanduser` would raise, and `os.path.expanduser` would leave a folder called `~` in the working directory.
    """
    expanded = os.path.expanduser(path)
    return Path(os.devnull, expanded) if expanded.startswith("~") else Path(expanded)


def user_name() -> str:
    """Return the name of this account, or the placeholder `USER` where the account has no name."""
    with suppress(KeyError, OSError):  # getpass raises KeyError until Python 3.12 and OSError from 3.13 on
        return getpass.getuser()
    return "USER"
