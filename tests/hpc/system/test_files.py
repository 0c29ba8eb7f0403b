"""Check the reading of untrusted files: it never blocks, never reads without bound, and follows no link elsewhere."""

import os
from pathlib import Path
from typing import IO

import pytest

from hpc.config import errors
from hpc.run import attempt_log, frozen_config
from hpc.system import files


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "device", tmp_path):
        with pytest.raises(OSError, match=r"regular file|directory"):
            files.read_text(path)


def test_nothing_is_added_to_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "attempts.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        attempt_log.append_json_line(tmp_path / "attempts.jsonl", {"event": "start"})
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_file_that_cannot_be_written_to_the_end_is_not_there(tmp_path: Path) -> None:
    def write(stream: IO[bytes]) -> None:
        stream.write(b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        files.write_durably(tmp_path / "part", write)
    assert not [*tmp_path.iterdir()]
    files.write_durably(tmp_path / "part", lambda stream: stream.write(b"all"))
    assert (tmp_path / "part").read_bytes() == b"all" and len([*tmp_path.iterdir()]) == 1


def test_a_text_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    files.write_atomically(tmp_path / "verdict", "continue", is_durable=True)
    with pytest.raises(UnicodeEncodeError):
        files.write_atomically(tmp_path / "verdict", "\udcff")
    assert (tmp_path / "verdict").read_text() == "continue" and len([*tmp_path.iterdir()]) == 1
    files.write_atomically(tmp_path / "verdict", "\udcff", errors="replace")
    assert (tmp_path / "verdict").read_text() == "?" and len([*tmp_path.iterdir()]) == 1


def test_json_that_is_too_deep_is_damaged_json() -> None:
    with pytest.raises(ValueError, match="too deeply"):
        files.parse_json("[" * 100_000)


def test_aliases_of_aliases_are_not_followed(tmp_path: Path) -> None:
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{b}: &{b} [{','.join(['*' + a] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(errors.ConfigError, match="its aliases stand for"):
        frozen_config.read(tmp_path)


def test_a_terminal_is_sent_no_codes() -> None:
    told = str(errors.ConfigError("a\nb", "\x1b]0;owned\x07\u202e", "rule", "fix"))
    assert told.splitlines()[0] == "a\\nb=\\x1b]0;owned\\x07\\u202e: rule."


def test_a_source_that_an_editor_holds_or_removes_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib" / "hpc"
    (tmp_path / "src").mkdir()
    library.mkdir(parents=True)
    (tmp_path / "train.py").write_text("a = 1\n")
    (tmp_path / "src" / "net.py").write_text("b = 1\n")
    (library / "core.py").write_text("c = 1\n")
    alone = files.source_checksum(tmp_path, library)
    (tmp_path / "src" / ".#net.py").symlink_to("ada@login1.4711:1790000000")  # the lock of Emacs
    assert files.source_checksum(tmp_path, library) == alone
    (tmp_path / "src" / "other.py").write_text("d = 1\n")
    assert files.source_checksum(tmp_path, library) != alone
    read = Path.read_bytes

    def gone(path: Path) -> bytes:
        if path.name == "other.py":  # removed between its listing and its reading
            path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", gone)
    assert files.source_checksum(tmp_path, library) == alone
