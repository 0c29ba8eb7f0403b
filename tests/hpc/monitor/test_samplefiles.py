"""Check the sampler's files: complete samples over several starts and on a full disk, readable by TensorBoard."""

import csv
import io
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from hpc.monitor.event_files import ScalarWriter, crc32c, tf_record
from hpc.monitor.node_usage import SampleTable
from hpc.system.files import append_whole

FEW = ["time", "attempt", "cpu_percent"]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as stream:
        return list(csv.DictReader(stream))


@contextmanager
def full(size: int) -> Iterator[None]:
    """Limit the size of this process's files in bytes: writes are cut short there, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_starts_append_and_what_is_not_known_is_an_empty_cell(tmp_path: Path) -> None:
    path = tmp_path / "monitor" / "n1.csv"
    assert SampleTable(path, FEW).first_time() is None
    SampleTable(path, FEW).add({"time": 1000.5, "attempt": 1, "cpu_percent": 12.34567})
    SampleTable(path, FEW).add({"time": 1010.5, "attempt": 2})
    assert path.read_text() == "time,attempt,cpu_percent\n1000.5,1,12.346\n1010.5,2,\n"
    assert SampleTable(path, FEW).first_time() == 1000.5


def test_a_line_that_a_crash_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "n1.csv"
    SampleTable(path, FEW).add({"time": 1, "attempt": 1, "cpu_percent": 1})
    path.write_text(path.read_text() + "2,1")
    SampleTable(path, FEW).add({"time": 3, "attempt": 2, "cpu_percent": 3})
    assert [row["time"] for row in rows(path)] == ["1", "3"] and rows(path)[1]["cpu_percent"] == "3"


@pytest.mark.parametrize("more_first", [False, True])
def test_a_start_with_other_gpus_shares_the_header(more_first: bool, tmp_path: Path) -> None:
    path, many = tmp_path / "n1.csv", [*FEW, "gpu0_percent", "gpu0_watts"]
    for number, columns in enumerate([many, FEW, many] if more_first else [FEW, many, FEW]):
        SampleTable(path, columns).add(dict.fromkeys(columns, number))
    assert len({line.count(",") for line in path.read_text().splitlines()}) == 1
    assert [row["gpu0_watts"] for row in rows(path)] == (["0", "", "2"] if more_first else ["", "1", ""])
    assert [entry.name for entry in tmp_path.iterdir()] == ["n1.csv"]


def test_a_sample_that_finds_no_room_is_lost_whole_and_the_next_is_written(tmp_path: Path) -> None:
    table, curves = SampleTable(tmp_path / "n1.csv", FEW), ScalarWriter(tmp_path)
    table.add({"time": 1, "attempt": 1, "cpu_percent": 1})
    curves.add(1, 0, {"node/cpu_percent": 1})
    (events,) = tmp_path.glob("events*")
    for path, write in {
        table.path: lambda: table.add({"time": 2222, "attempt": 2222, "cpu_percent": 2222}),
        events: lambda: curves.add(2, 1, {"node/cpu_percent": 2}),
    }.items():
        size = path.stat().st_size
        with full(size + 5), pytest.raises(OSError):
            write()
        assert path.stat().st_size == size
    table.add({"time": 3, "attempt": 1, "cpu_percent": 3})
    curves.add(3, 2, {"node/cpu_percent": 3})
    assert [row["time"] for row in rows(table.path)] == ["1", "3"]
    assert read(tmp_path) == [(0, 1.0), (2, 3.0)]


def test_all_of_it_or_nothing_also_where_nothing_can_be_written() -> None:
    with open("/dev/full", "wb") as stream, pytest.raises(OSError):
        append_whole(stream.fileno(), b"a row")


def read(folder: Path) -> list[tuple[int, float]]:
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars("node/cpu_percent")]


def test_tensorboard_shows_the_curves_of_all_starts_as_one(tmp_path: Path) -> None:
    first, second = ScalarWriter(tmp_path), ScalarWriter(tmp_path)
    first.add(1000.25, 0, {"node/cpu_percent": 50.5, "node/gpu0_watts": None})
    first.add(1010.25, 10, {"node/cpu_percent": 60})
    second.add(1500.25, 500, {"node/cpu_percent": 70})
    assert read(tmp_path) == [(0, 50.5), (10, 60), (500, 70)]
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert board.Tags()["scalars"] == ["node/cpu_percent"]
    assert [event.wall_time for event in board.Scalars("node/cpu_percent")] == [1000.25, 1010.25, 1500.25]


@pytest.mark.parametrize("size", [0, 1, 300])
def test_a_record_is_framed_as_tensorboards_own(size: int) -> None:
    stream, data = io.BytesIO(), os.urandom(size)
    RecordWriter(stream).write(data)
    assert tf_record(data) == stream.getvalue()


def test_the_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
