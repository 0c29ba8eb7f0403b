"""The records of TensorBoard's files, as TensorBoard's own loader reads them: up to the first damaged one."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc.system.files import open_regular_file

FRAME_BYTES = 16  # around each record: its length, and two checksums
MAX_RECORD_BYTES = 2**16  # larger records, such as pictures, are left out


def read_events(file: Path) -> Iterator[Any]:
    """Yield the events of a file.

    Raises:
        ImportError: tensorboard is not installed.
        OSError: the file cannot be opened, or is not regular.
        ValueError: at the end, if something damaged or cut off follows there, which the loader does not say.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    with open_regular_file(file) as stream:
        size = os.fstat(stream.fileno()).st_size
    position = 0
    try:
        for record in RawEventFileLoader(str(file)).Load():
            if len(record) <= MAX_RECORD_BYTES:
                yield Event.FromString(record)
            position += FRAME_BYTES + len(record)
    except Exception as error:  # TensorFlow's, protobuf's, or of memory if a length is wrong
        raise ValueError(f"damaged at byte {position} of {size}: {type(error).__name__}") from error
    if position < size:
        raise ValueError(f"damaged or cut off at byte {position} of {size}")
