"""The text that every machine has: the sources of Python's own standard library."""

import os
import sysconfig

from hpc.config.errors import ConfigError
from hpc.data.next_token import NextToken
from hpc.data.text_files import list_text

# Tests, what is installed beside the library, and tables and manuals in the shape of code.
NOT_SOURCES = {"test", "tests", "idle_test", "lib2to3", "idlelib", "site-packages", "dist-packages", "__pycache__"}
NOT_SOURCES |= {"encodings", "pydoc_data"}


class StandardLibrary(NextToken):
    """The sources of Python's own standard library, as bytes: about 10 MB of real text, without a download."""

    def list_files(self) -> tuple[list[str], list[str]]:
        root = sysconfig.get_paths()["stdlib"]
        sources: list[str] = []
        for folder, below, names in os.walk(root):
            below[:] = sorted(set(below) - NOT_SOURCES)
            sources += [os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")]
        if not sources:
            raise ConfigError(
                "data", "stdlib", f"this Python comes with its sources in {root}", "data=text data.files=..."
            )
        return list_text(sources)
