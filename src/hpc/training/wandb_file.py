"""Read how far an offline file of Weights & Biases (run-ID.wandb) has come.

Its format is LevelDB's log: blocks of 32 KiB, which hold records or parts of records, each after a header of 7 bytes:
checksum, length, kind. The first block begins with 7 bytes of wandb's own. A record is a message of wandb's protocol.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES, HEADER = 2**15, struct.Struct("<IHB")
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4  # kinds of parts


@dataclass(frozen=True)
class FilePosition:
    """A position in a file: bytes of all whole records, and the `_step` of the next row."""

    num_bytes: int = HEADER.size
    next_row: int = 0


def read_end(file: Path, *, after: FilePosition) -> FilePosition:
    """Return the end of the last whole record that is on the disk.

    Args:
        after: a position that was returned before: only what follows it is read.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    with file.open("rb") as stream:
        stream.seek(after.num_bytes)
        data = stream.read()
    start, next_row = after.num_bytes, after.next_row
    position, end, record = start, start, b""
    while True:
        if (room := BLOCK_BYTES - position % BLOCK_BYTES) < HEADER.size:
            position += room  # zeros: no header fits into the rest of this block
        header = data[position - start : position - start + HEADER.size]
        if len(header) < HEADER.size:
            break
        _, length, kind = HEADER.unpack(header)
        position += HEADER.size
        part = data[position - start : position - start + length]
        if len(part) < length or not WHOLE <= kind <= LAST:
            break
        position += length
        record = part if kind in (WHOLE, FIRST) else record + part
        if kind in (WHOLE, LAST):
            message = Record.FromString(record)
            next_row = message.history.step.num + 1 if message.HasField("history") else next_row
            end = position
    return FilePosition(end, next_row)
