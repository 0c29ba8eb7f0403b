"""Packages that few tests need, in a folder of their own beside the tests' environment: transformers, regex, peft.

torchmetrics, which Lightning imports, imports transformers where it finds it. That takes a quarter of the time in which
a process starts, and a project's environment does not have it either. Only transformers needs regex.
"""

import os
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "extra"
ENVIRON = {"EXTRA_PACKAGES": str(FOLDER)}  # read by extra_packages.pth, in each Python of the environment


def use() -> None:
    """Find them in this process and in those that it starts."""
    os.environ.update(ENVIRON)
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
