"""Files that a report leaves in a run directory or in the folder of a study, which may be another user's."""

from pathlib import Path

from hpc.system.files import complete_file
from hpc.system.tables import one_line


def write_whole(path: Path, content: bytes) -> str:
    """Write a file whole or not at all, and return a line on the outcome. A link in its place is not followed.

    It may fail: another user's folder is read-only, and a disk may be full.
    """
    try:
        with complete_file(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        return one_line(f"cannot write {path}: {error.strerror}")
    return one_line(f"page: {path}" if path.suffix == ".html" else f"table: {path}")
