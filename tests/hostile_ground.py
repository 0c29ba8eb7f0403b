"""A case of drawn_inputs.py, and the folders that it uses."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Ground:
    """The folders of a case. Files may be written in `open`; nothing else may change."""

    folder: Path
    base: Path  # valid run, search, images, text, to be copied

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
    """A program and its words. `setup` changes this process before: monkeypatches, so to say."""

    program: str
    words: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    configs: Path | None = None  # instead of the project's own
    personal: Path | None = None  # clusters.yaml
    inspect: str = ""  # what is looked at: a job script that is printed (bash), what a training left (run)
    run_dir: Path | None = None  # where it trains
    host: str = ""  # how this machine calls itself
    scripted: dict[str, str] = field(default_factory=dict)  # the environment of a job script


Draw = Callable[[random.Random, Ground], Case]
