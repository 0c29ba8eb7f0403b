"""Check that tools/pack.py packs small files without changing training, names errors, and loses nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typed_fixes
from PIL import Image
from test_data import built, make_images, node, rejected

from hpc.config.errors import ConfigError
from hpc.config.project import PROJECT
from hpc.data import file_checks, pack_request, packed_files, packing, text_files, token_files, tokenizing
from hpc.data import pack_images as packer
from hpc.programs import pack

PIXELS = 8
TEXT = "Fünf große Flöße treiben vorbei.\n\n  Das sechste nicht.\n"


@pytest.fixture(autouse=True)
def outside_of_jobs(monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(packed_files, "PART_BYTES", 10 * 3 * PIXELS**2)  # ten images a part
    monkeypatch.setattr(tokenizing, "PIECE_BYTES", 200)
    monkeypatch.setattr(tokenizing, "PART_BYTES", 400)


def run_pack(*words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pack.py", *map(str, words)])
        pack.main()


def rejection_of(*words):
    with pytest.raises(ConfigError) as caught:
        run_pack(*words)
    return caught.value


def error_of(*words):
    return str(rejection_of(*words))


def pack_images(folder, out, *words):
    run_pack(f"data.dir={folder}", f"out={out}", f"data.image_size={PIXELS}", *words)


def pack_text(folder, out, *words):
    run_pack(f"data.files={folder}", f"out={out}", *words)


def write_texts(folder, num=12):
    folder.mkdir()
    for i in range(num):
        (folder / f"{i}.txt").write_text(TEXT * (i + 1))
    return folder


def batches(data):
    """Return the batches of every split's loader, as plain lists."""
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    return [[tensor.tolist() for tensor in batch] for loader in loaders for batch in loader]


def leftovers(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith(".") or name.endswith(".part"))


# Images


@pytest.mark.parametrize("layout", ["dealt by a hash", "folders of splits"])
def test_training_gets_the_same_images_in_the_same_order(tmp_path, capsys, layout):
    folder = tmp_path / "images"
    for split in ("",) if layout == "dealt by a hash" else ("train", "val"):
        made = make_images(folder / split, classes=("кот", "dog"), num=30)
        (made / "dog" / "1.png").rename(made / "dog" / os.fsdecode(b"caf\xe9.png"))
        (made / "dog").rename(made / os.fsdecode(b"d\xf6g"))
    pack_images(folder, tmp_path / "images.h5")
    printed = capsys.readouterr().out
    before = "62 before" if layout == "dealt by a hash" else "124 before"
    assert f"{before} (files and their folders), 1 after" in printed
    assert leftovers(tmp_path) == []
    of_folder = built("images", dir=str(folder), image_size=PIXELS, num_workers=0, global_batch_size=7)
    packed = built("packed", file=str(tmp_path / "images.h5"), global_batch_size=7)
    assert batches(packed) == batches(of_folder)
    data = node("packed", file=str(tmp_path / "images.h5"))
    assert file_checks.check_packed_images(data, data) == {"num_classes": 2, "image_size": PIXELS}
    read = packed_files.read_packed_header(data.file)
    assert [os.fsencode(name) for name in read.classes] == [b"d\xf6g", "кот".encode()]


def test_a_batch_is_read_through_a_map_and_not_loaded(tmp_path):
    pack_images(make_images(tmp_path / "images"), tmp_path / "images.h5")
    read = packed_files.read_packed_header(str(tmp_path / "images.h5"))
    pixels = packed_files.map_pixels(read.file, read.offset, num=len(read.labels), image_bytes=read.image_bytes)
    assert isinstance(pixels.base, np.memmap) and read.offset % packed_files.PAGE_BYTES == 0


def test_an_unfinished_file_is_rejected_and_packing_it_resumes(tmp_path, capsys):
    folder, out = make_images(tmp_path / "images"), tmp_path / "images.h5"
    bad = [folder / "dog" / f"{i}.png" for i in (37, 39)]
    good = bad[0].read_bytes()
    for file in bad:
        file.write_bytes(good[: len(good) // 2])
    words = error_of(f"data.dir={folder}", f"out={out}", f"data.image_size={PIXELS}") + capsys.readouterr().err
    assert all(str(file) in words for file in bad) and "1 more" in words
    part, journal = (Path(path) for path in packing.unfinished_paths(str(out)))
    noted = journal.read_text().splitlines()
    assert len(noted) in (7, 8) and not out.exists()  # one call for the plan, and up to eight for parts
    assert "python tools/pack.py" in rejected(file_checks.check_packed_images, "packed", file=str(out))
    assert "must be packed to the end" in rejected(file_checks.check_packed_images, "packed", file=str(part))
    with journal.open("a") as stream:
        stream.write("12345")  # a crash in the middle of a line
    assert "other files or settings" in error_of(f"data.dir={folder}", f"out={out}", "data.image_size=9")
    for file in bad:
        file.write_bytes(good)
    first = packed_files.read_packed_header(str(part), unfinished=True)
    packed_first = image_of(tmp_path / "images", 0)
    kept, state = packed_first.read_bytes(), packed_first.stat()
    packed_first.write_bytes(b"is not read again".ljust(state.st_size))
    os.utime(packed_first, ns=(state.st_atime_ns, state.st_mtime_ns))
    pack_images(folder, out)
    packed_first.write_bytes(kept)
    assert first.offset == packed_files.read_packed_header(str(out)).offset and leftovers(tmp_path) == []
    run_pack("--verify", out)
    of_folder = built("images", dir=str(folder), image_size=PIXELS, num_workers=0)
    assert batches(built("packed", file=str(out))) == batches(of_folder)


def change_content(folder):
    """Change each file, but not its size."""
    for file in folder.rglob("*.*"):
        before = file.stat().st_size
        file.write_bytes(file.read_bytes()[::-1]) if file.suffix == ".txt" else Image.new("RGB", (9, 9)).save(file)
        with file.open("ab") as stream:
            stream.write(b" " * (before - file.stat().st_size))  # decoders ignore bytes after an image


@pytest.mark.parametrize("make", [make_images, write_texts])
def test_files_that_have_changed_since_they_were_packed_are_packed_again(tmp_path, make, monkeypatch):
    folder, suffix = make(tmp_path / "files"), ".h5" if make is make_images else ".npy"
    out, whole = tmp_path / f"out{suffix}", tmp_path / f"whole{suffix}"
    words = [f"data.dir={folder}", f"data.image_size={PIXELS}"] if make is make_images else [f"data.files={folder}"]

    def interrupted(*arguments, **keywords):
        results = in_order(*arguments, **keywords)
        for _ in range(3):
            yield next(results)
        results.close()
        raise KeyboardInterrupt

    in_order = packing.map_in_order
    with monkeypatch.context() as patch:
        patch.setattr(packing, "map_in_order", interrupted)
        assert "interrupted" in error_of(*words, f"out={out}")
    change_content(folder)
    for file in (out, whole):
        run_pack(*words, f"out={file}")
    checksums = [
        packed_files.read_packed_header(str(file)).parts.checksum
        if suffix == ".h5"
        else token_files.read_metadata(str(file))["checksum"]
        for file in (out, whole)
    ]
    assert checksums[0] == checksums[1]
    run_pack("--verify", out)


def image_of(folder, index):
    """Return the file of a training image."""
    from hpc.data.image_files import list_images

    return Path(list_images(str(folder))[1]["train"][index][0])


def test_a_journal_without_its_unfinished_file_is_ignored(tmp_path):
    folder, out = make_images(tmp_path / "images"), tmp_path / "images.h5"
    bad = folder / "dog" / "39.png"
    good = bad.read_bytes()
    bad.write_bytes(b"")
    error_of(f"data.dir={folder}", f"out={out}", f"data.image_size={PIXELS}")
    Path(packing.unfinished_paths(str(out))[0]).unlink()
    bad.write_bytes(good)
    pack_images(folder, out)
    run_pack("--verify", out)


def test_a_process_that_is_killed_is_reported(tmp_path, monkeypatch):
    folder, out = make_images(tmp_path / "images"), tmp_path / "images.h5"
    monkeypatch.setattr(packed_files, "write_part", lambda *_: os.kill(os.getpid(), 9))
    assert "was killed" in error_of(f"data.dir={folder}", f"out={out}", f"data.image_size={PIXELS}")
    monkeypatch.undo()
    pack_images(folder, out)


@pytest.mark.parametrize("damage", ["a pixel", "a label", "the end"])
def test_a_damaged_file_is_rejected_before_training(tmp_path, damage):
    out = tmp_path / "images.h5"
    pack_images(make_images(tmp_path / "images"), out)
    read = packed_files.read_packed_header(str(out))
    if damage == "the end":
        os.truncate(out, read.offset + 100)
    elif damage == "a pixel":
        with out.open("r+b") as stream:
            stream.seek(read.offset + 100)
            stream.write(b"\1")
    else:
        import h5py

        with h5py.File(out, "r+") as changed:
            changed["labels"][3] = 1 - changed["labels"][3]
    assert str(out) in rejected(file_checks.check_packed_images, "packed", file=str(out))
    assert str(out) in error_of("--verify", out)


def test_values_that_do_not_fit_the_file_are_rejected(tmp_path):
    out = str(tmp_path / "images.h5")
    pack_images(make_images(tmp_path / "images"), out)
    for key, value in {"image_size": 224, "num_classes": 1}.items():
        assert f"data.{key}=null" in rejected(file_checks.check_packed_images, "packed", file=out, **{key: value})
        with pytest.raises(ConfigError, match=f"data.{key}"):
            built("packed", file=out, **{key: value}).dataset("train")
    assert "cannot be larger" in rejected(file_checks.check_packed_images, "packed", file=out, global_batch_size=999)
    (tmp_path / "other.h5").write_text("something else")
    other = str(tmp_path / "other.h5")
    message = rejected(file_checks.check_packed_images, "packed", file=other)
    assert "must be one that tools/pack.py has packed" in message


# Text


def test_bytes_are_packed_as_they_are(tmp_path, capsys):
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "texts.npy"
    (folder / "latin").write_bytes(b"caf\xe9 " * 100)
    pack_text(folder, out)
    listed = text_files.sort_by_hash([str(file) for file in sorted(folder.iterdir())])
    assert np.load(out).tobytes() == b"".join(Path(file).read_bytes() for file in listed)
    assert "14 before (files and their folders), 2 after" in capsys.readouterr().out
    text = node("text", files=str(out), block_size=16)
    assert file_checks.check_text_files(text, text) == {"vocab_size": 256, "bytes_per_token": 1.0}
    run_pack("--verify", out)


@pytest.mark.parametrize("tokenizer", ["bpe", "a file"])
def test_tokens_have_notes_and_decode_to_the_text(tmp_path, tokenizer):
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "texts.npy"
    pack_text(folder, out, "tokenizer=bpe", "data.vocab_size=300")
    if tokenizer == "a file":
        given, out = f"{out}.tokenizer.json", tmp_path / "again.npy"
        pack_text(folder, out, f"tokenizer={given}")
    from tokenizers import Tokenizer

    tokens = np.load(out)
    assert tokens.dtype == np.uint16
    ends = np.flatnonzero(tokens == 0)  # <|endoftext|>
    listed = text_files.sort_by_hash([str(file) for file in sorted(folder.iterdir())])
    made = Tokenizer.from_file(f"{out}.tokenizer.json")
    texts = [made.decode(document.tolist()) for document in np.split(tokens, ends)]
    assert texts == [*(Path(file).read_text() for file in listed), ""]
    size = sum(map(os.path.getsize, listed))
    text = node("text", files=str(out), block_size=16)
    assert file_checks.check_text_files(text, text) == {"vocab_size": 320, "bytes_per_token": size / len(tokens)}
    assert size / len(tokens) > 1.5
    for vocab_size, checked_size in ((None, None), (320, None), (319, 319)):  # None: the notes say that it is enough
        assert (
            built("text", files=str(out), block_size=16, vocab_size=vocab_size).dataset("train").vocab_size
            == checked_size
        )


def test_packing_text_resumes_where_it_was_interrupted(tmp_path, monkeypatch):
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "texts.npy"
    last = Path(text_files.sort_by_hash([str(file) for file in sorted(folder.iterdir())])[-1])
    good = last.read_bytes()
    monkeypatch.setattr(tokenizing, "find_unreadable", lambda *_: [])  # the file becomes unreadable after the check
    words = (f"data.files={folder}", f"tokenizer={trained(folder, tmp_path)}", f"out={out}")
    run_pack(*words[:2], f"out={tmp_path / 'whole.npy'}")
    last.write_bytes(good[:-3] + b"\xe9 \n")
    rule = error_of(*words)
    assert f"data.files={last}" in rule and f"from byte {len(good) - 3} on" in rule
    part, journal = packing.unfinished_paths(str(out))
    assert len(Path(journal).read_text().splitlines()) > 2
    assert "interrupted" in rejected(file_checks.check_text_files, "text", files=part)
    with open(part, "ab") as stream:
        stream.write(b"half a part, which nobody noted")
    last.write_bytes(good)
    run_pack(*words)
    assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert leftovers(tmp_path) == []
    assert (
        token_files.read_metadata(str(out))["parts"] == token_files.read_metadata(str(tmp_path / "whole.npy"))["parts"]
    )


def test_all_files_that_are_not_text_are_named_at_once(tmp_path, capsys):
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "texts.npy"
    for name in ("3.txt", "7.txt"):
        (folder / name).write_bytes((folder / name).read_bytes() + b"\xff\xfe")
    words = error_of(f"data.files={folder}", f"out={out}", "tokenizer=bpe", "data.vocab_size=300")
    words += capsys.readouterr().err
    assert f"{folder}/3.txt" in words and f"{folder}/7.txt" in words and "1 more" in words
    assert not Path(f"{out}.tokenizer.json").exists()


def trained(folder, beside):
    """Train a tokenizer and write its tokenizer.json."""
    every = tokenizing.split_into_parts([str(file) for file in sorted(folder.iterdir())])
    (beside / "tokenizer.json").write_text(tokenizing.train_bpe(every, 270))
    return beside / "tokenizer.json"


def test_pieces_begin_where_lines_do_and_leave_nothing_out(tmp_path):
    text = TEXT * 20 + "é" * 500 + "\n\n" + TEXT
    (tmp_path / "text").write_text(text)
    pieces = [
        tokenizing.read_piece(piece) for part in tokenizing.split_into_parts([str(tmp_path / "text")]) for piece in part
    ]
    assert "".join(piece for piece, _, _ in pieces) == text
    assert [ends for piece, _, ends in pieces if piece] == [False] * (len([p for p, _, _ in pieces if p]) - 1) + [True]
    assert all(piece[0] in "FDé" for piece, _, _ in pieces if piece)


@pytest.mark.parametrize("damage", ["other dtype", "cut short", "a token", "another note"])
def test_tokens_that_differ_from_their_notes_are_rejected(tmp_path, damage):
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "texts.npy"
    pack_text(folder, out)
    tokens = np.load(out)
    if damage == "other dtype":
        np.save(out, tokens.astype(np.int32))
    elif damage == "cut short":
        np.save(out, tokens[:-10])
    elif damage == "a token":
        tokens[100] ^= 1
        np.save(out, tokens)
    else:
        noted = json.loads(Path(f"{out}.json").read_text())
        Path(f"{out}.json").write_text(json.dumps(noted | {"bytes_per_token": 2.0}))
    assert str(out) in rejected(file_checks.check_text_files, "text", files=str(out), block_size=16)


# Invalid arguments and full disks


def test_wrong_words_are_rejected(tmp_path, monkeypatch):
    folder, texts = make_images(tmp_path / "images"), write_texts(tmp_path / "texts")
    images, text = f"data.dir={folder}", f"data.files={texts}"

    def pack_and_remove(words):
        run_pack(*words)
        Path(next(word for word in words if word.startswith("out="))[4:]).unlink()

    def error_of(*words):
        """Return the message, after what it says has been typed."""
        rejected = rejection_of(*words)
        typed_fixes.follow(pack_and_remove, words, rejected)
        return str(rejected)

    assert "out=<file>.h5" in error_of(images)
    assert f"out={tmp_path}/x.h5" in error_of(images, f"out={tmp_path}/x")
    assert "mkdir -p" in error_of(images, f"out={tmp_path}/no/x.h5")
    (tmp_path / "there.h5").touch()
    assert "cannot be a file that exists already" in error_of(images, f"out={tmp_path}/there.h5")
    assert "leave it out" in error_of(images, f"out={tmp_path}/x.h5", "trainer=gpu")
    assert "data.image_size" in error_of(images, f"out={tmp_path}/x.h5", "data.imagesize=8")
    assert "takes only data.files" in error_of(text, f"out={tmp_path}/x.npy", f"data.val_files={texts}/1.txt")
    assert "takes only data.dir" in error_of(images, f"out={tmp_path}/x.h5", "tokenizer=bpe")
    assert "typed only once" in error_of(text, f"out={tmp_path}/x.npy", f"out={tmp_path}/y.npy")
    assert "tokenizer=bpe as well" in error_of(text, f"out={tmp_path}/x.npy", "data.vocab_size=300")
    assert "data.vocab_size=32768" in error_of(text, f"out={tmp_path}/x.npy", "tokenizer=bpe")
    assert "tokenizer=bytes" in error_of(text, f"out={tmp_path}/x.npy", f"tokenizer={tmp_path}/none.json")
    no_tokenizer = error_of(text, f"out={tmp_path}/y.npy", f"tokenizer={texts}/1.txt")
    assert "must be the tokenizer.json of a tokenizer" in no_tokenizer
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    command = error_of(images, f"out={tmp_path}/with space.h5")
    assert f"on a login node: python tools/pack.py {images} 'out={tmp_path}/with space.h5'" in command


def test_two_processes_do_not_write_into_one_file(tmp_path):
    folder, out = make_images(tmp_path / "images"), tmp_path / "images.h5"
    with packing.open_journal(str(out), "of another process", files_of_part=lambda number: []):
        assert "another process is packing it" in error_of(f"data.dir={folder}", f"out={out}")


def test_a_file_that_another_process_has_just_packed_is_kept(tmp_path, monkeypatch):
    """Finish another process's file after this one has looked for it, and before it has the lock."""
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "texts.npy"
    check_out = pack_request.check_output_path
    monkeypatch.setattr(
        pack_request, "check_output_path", lambda *words: (check_out(*words), out.write_text("theirs"))[0]
    )
    assert "Another process has just packed this file" in error_of(f"data.files={folder}", f"out={out}")
    assert out.read_text() == "theirs" and leftovers(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    """Return the mount point of a file system of 256 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("kind", ["images", "text"])
def test_a_disk_that_fills_up_loses_nothing(tmp_path, small_disk, monkeypatch, kind):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(248 * 1024))
    if kind == "images":
        words = (f"data.dir={make_images(tmp_path / 'images')}", f"data.image_size={PIXELS}", f"out={small_disk}/x.h5")
        assert "needs 1.54e-05 GB" in error_of(*words)
        monkeypatch.setattr(packer, "reject_full_disk", lambda *_: None)  # as with a quota that the check misses
    else:
        words = (f"data.files={write_texts(tmp_path / 'texts', 40)}", f"out={small_disk}/x.npy")
    assert "No space left on device" in (rule := error_of(*words)) and "make room" in rule
    assert not (small_disk / words[-1].partition("=")[2]).exists()
    ballast.unlink()
    run_pack(*words)
    run_pack("--verify", words[-1].partition("=")[2])


@pytest.mark.soak
@pytest.mark.slow
def test_a_folder_whose_name_is_not_utf_8_is_packed_and_trained_on(tmp_path, call):
    folder = tmp_path / os.fsdecode(b"d\xff \xd1\x84")
    pack_images(f"'{make_images(folder / 'images')}'", folder / "x.h5")
    words = ["data=packed", f"data.file='{folder}/x.h5'", "data.global_batch_size=8", "trainer.max_steps=2"]
    words += ["model=resnet18", "model.network.depths=[1]", "model.network.widths=[8]", f"run_dir={tmp_path}/run"]
    ran = call(*words)
    assert ran.returncode == 0, ran.stderr


def test_packing_needs_no_torch(tmp_path):
    (tmp_path / "texts").write_text(TEXT * 10)
    code = "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__'); assert 'torch' not in sys.modules"
    words = [str(PROJECT / "tools" / "pack.py"), f"data.files={tmp_path}/texts", f"out={tmp_path}/x.npy"]
    command = [sys.executable, "-c", code.replace("sys.argv[0]", repr(words[0])), *words[1:]]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_an_image_that_claims_too_many_pixels_is_named(tmp_path, monkeypatch, recwarn):
    folder = make_images(tmp_path / "images")
    bomb = folder / "dog" / "7.png"
    Image.new("1", (20000, 10000)).save(bomb)
    for limit in (None, 10**8):  # beyond twice Pillow's limit it raises, before that it only warns
        if limit:
            monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit + 10**7)
        rule = error_of(f"data.dir={folder}", f"out={tmp_path}/x.h5", f"data.image_size={PIXELS}")
        assert f"data.dir={bomb}" in rule and "pixels" in rule and "make it smaller" in rule
    assert not recwarn.list


def test_text_of_which_no_token_results_is_told(tmp_path):
    file = tmp_path / "out.npy"
    with file.open("wb", buffering=0) as stream, pytest.raises(ConfigError, match=r"data\.files must hold text"):
        token_files.write_header_and_notes(stream.fileno(), str(file), notes={"dtype": "uint8"}, done=[])
