"""A case of drawn_inputs.py, and the folders that it uses."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Ground:
    """The folders of a case. A program may change files in `open`, and nothing else."""

    folder: Path
    base: Path  # a valid run, search, images and text, which cases copy

    @property
    def canary(self) -> Path:
        return self.folder / "canary"

    @property
    def open(self) -> Path:
        return self.folder / "open"

    def copy(self, name: str) -> Path:
        shutil.copytree(self.base / name, self.open / name, symlinks=True)
        return self.open / name


@dataclass
class Case:
    """A program and its arguments. `setup` patches this process before the program starts."""

    program: str
    words: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    configs: Path | None = None  # replaces the project's configs
    personal: Path | None = None  # clusters.yaml
    inspect: str = ""  # what is checked: the printed job script (bash), or the trained run (run)
    run_dir: Path | None = None  # its run directory
    host: str = ""  # the hostname
    scripted: dict[str, str] = field(default_factory=dict)  # the environment of a job script


Draw = Callable[[random.Random, Ground], Case]
