"""A text that every machine has: the sources of Python's standard library."""

import os
import sysconfig

from hpc.config.errors import ConfigError
from hpc.data.text_files import list_text_files
from hpc.packed.next_token import NextToken

# Folders of tests, of installed packages, and of tables and manuals that are stored as code.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "lib2to3", "idlelib", "site-packages", "dist-packages", "__pycache__"}
SKIPPED_FOLDERS |= {"encodings", "pydoc_data"}


class StandardLibrary(NextToken):
    """The sources of Python's standard library as bytes: about 10 MB of real text, without a download."""

    def list_files(self) -> tuple[list[str], list[str]]:
        """Return (training files, validation files). The latter are empty, so a tenth of the former is held out."""
        root = sysconfig.get_paths()["stdlib"]
        sources: list[str] = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
            sources += [os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")]
        if not sources:
            rule = f"The sources of Python's standard library must be in {root}, and there are none"
            raise ConfigError("data=stdlib", None, rule=rule, fix="data=text data.files=...")
        return list_text_files(sources)
