"""A case of hostile input, and the ground on which its program runs."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trial import ground


class Ground(ground.Ground):
    """The folders of a case. A program may change files in `open`, and nothing else.

    Attributes:
        base: a valid run, search, images and text, which cases copy.
    """

    def __init__(self, folder: Path, project: Path, base: Path) -> None:
        super().__init__(folder, project)
        self.base, self.open = base, folder / "open"
        (self.open / "home").mkdir(parents=True)
        (folder / "victim").write_text("precious")
        self.said = folder / "said"  # the output of the program
        self.said.mkdir()

    def copy(self, name: str) -> Path:
        shutil.copytree(self.base / name, self.open / name, symlinks=True)
        return self.open / name


@dataclass
class Case:
    """A program and its arguments."""

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
