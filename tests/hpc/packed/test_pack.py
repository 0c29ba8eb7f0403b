"""Check that tools/pack.py packs small files without changing training, names errors, and loses nothing."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import typed_fixes
from data_nodes import built, make_images, node, rejected
from PIL import Image

from hpc.config.errors import ConfigError
from hpc.config.project import PROJECT
from hpc.data import image_files, text_files
from hpc.packed import checks, pack_command, packed_file, packed_images, tokenizing, writing
from hpc.packed import pack_images as image_packer
from hpc.programs import pack

PIXELS = 8
TEXT = "Fünf große Flöße treiben vorbei.\n\n  Das sechste nicht.\n"


@pytest.fixture(autouse=True)
def outside_of_jobs(monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(image_packer, "PART_BYTES", 10 * 3 * PIXELS**2)  # ten images a part
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
    pack_images(folder, tmp_path / "images.npy")
    printed = capsys.readouterr().out
    before = "62 before" if layout == "dealt by a hash" else "124 before"
    assert f"{before} (files and their folders), 2 after" in printed
    assert leftovers(tmp_path) == []
    of_folder = built("images", dir=str(folder), image_size=PIXELS, num_workers=0, global_batch_size=7)
    packed = built("packed", file=str(tmp_path / "images.npy"), global_batch_size=7)
    assert batches(packed) == batches(of_folder)
    data = node("packed", file=str(tmp_path / "images.npy"))
    assert checks.check_packed_images(data, data) == {"num_classes": 2, "image_size": PIXELS}
    read = packed_images.read_packed_images(data.file)
    assert [os.fsencode(name) for name in read.classes] == [b"d\xf6g", "кот".encode()]


def test_a_batch_is_read_through_a_map_and_not_loaded(tmp_path):
    pack_images(make_images(tmp_path / "images"), tmp_path / "images.npy")
    parts = packed_images.read_packed_images(str(tmp_path / "images.npy")).parts
    pixels = packed_images.map_pixels(parts.file)
    assert isinstance(pixels.base, np.memmap) and parts.offset == 4096  # whole pages


def test_a_packed_file_is_an_array_and_its_notes_which_anybody_can_read(tmp_path):
    folder = make_images(tmp_path / "images")
    pack_images(folder, tmp_path / "images.npy")
    images, notes = np.load(tmp_path / "images.npy"), json.loads((tmp_path / "images.npy.json").read_text())
    for split, samples in image_files.list_images(str(folder))[1].items():
        first, end = notes["splits"][split]
        assert [str(folder / name) for name in notes["names"][first:end]] == [file for file, _ in samples]
        assert notes["labels"][first:end] == [label for _, label in samples]
        for image, (file, _) in zip(images[first:end], samples, strict=True):
            assert np.array_equal(image, image_files.load_cropped(file, PIXELS))
    assert notes["classes"] == ["cat", "dog"] and sum(num for num, _ in notes["parts"]) == len(images) == 80


def test_all_images_that_cannot_be_decoded_are_named_at_once_and_nothing_is_left(tmp_path, capsys):
    folder, out = make_images(tmp_path / "images"), tmp_path / "images.npy"
    bad = [folder / "dog" / f"{i}.png" for i in (1, 39)]
    good = bad[0].read_bytes()
    for file in bad:
        file.write_bytes(good[: len(good) // 2])
    words = error_of(f"data.dir={folder}", f"out={out}", f"data.image_size={PIXELS}") + capsys.readouterr().err
    assert all(str(file) in words for file in bad) and "1 more" in words
    assert os.listdir(tmp_path) == ["images"]
    assert "python tools/pack.py" in rejected(checks.check_packed_images, "packed", file=str(out))
    for file in bad:
        file.write_bytes(good)
    pack_images(folder, out)
    run_pack("--verify", out)


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_images, write_texts])
def test_packing_that_was_interrupted_begins_anew(tmp_path, make, monkeypatch):
    """Interrupt it by a key, which removes what was written, and by the loss of the node, which leaves it."""
    folder, out = make(tmp_path / "files"), tmp_path / "out.npy"
    words = [f"data.dir={folder}", f"data.image_size={PIXELS}"] if make is make_images else [f"data.files={folder}"]

    def interrupted(*arguments, **keywords):
        results = in_order(*arguments, **keywords)
        for _ in range(3):
            yield next(results)
        results.close()
        raise KeyboardInterrupt

    in_order = writing.map_in_order
    with monkeypatch.context() as patch:
        patch.setattr(writing, "map_in_order", interrupted)
        assert "begins anew" in error_of(*words, f"out={out}")
    assert os.listdir(tmp_path) == ["files"]
    unfinished = Path(writing.unfinished_path(str(out)))
    unfinished.write_bytes(b"what the lost node has written" * 10_000)
    for file in (out, tmp_path / "whole.npy"):
        run_pack(*words, f"out={file}")
    assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes() and leftovers(tmp_path) == []
    run_pack("--verify", out)


def test_a_process_that_is_killed_is_reported(tmp_path, monkeypatch):
    folder, out = make_images(tmp_path / "images"), tmp_path / "images.npy"
    monkeypatch.setattr(image_packer, "decode_part", lambda *_: os.kill(os.getpid(), 9))
    assert "was killed" in error_of(f"data.dir={folder}", f"out={out}", f"data.image_size={PIXELS}")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["images"]
    pack_images(folder, out)


DAMAGES = ["a pixel", "a label", "the end", "the header", "no notes", "half of the notes"]


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_rejected_before_training(tmp_path, damage):
    out = tmp_path / "images.npy"
    pack_images(make_images(tmp_path / "images"), out)
    notes, offset = Path(f"{out}.json"), packed_images.read_packed_images(str(out)).parts.offset
    if damage == "the end":
        os.truncate(out, offset + 100)
    elif damage == "the header":
        out.write_bytes(out.read_bytes().replace(b"}", b"(", 1))
    elif damage == "a pixel":
        with out.open("r+b") as stream:
            stream.seek(offset + 100)
            stream.write(b"\1")
    elif damage == "a label":
        changed = json.loads(notes.read_text())
        changed["labels"][3] = 1 - changed["labels"][3]
        notes.write_text(json.dumps(changed))
    elif damage == "no notes":
        notes.unlink()
    else:
        os.truncate(notes, notes.stat().st_size // 2)
    assert str(out) in rejected(checks.check_packed_images, "packed", file=str(out))
    assert str(out) in error_of("--verify", out)


def test_values_that_do_not_fit_the_file_are_rejected(tmp_path):
    out = str(tmp_path / "images.npy")
    pack_images(make_images(tmp_path / "images"), out)
    for key, value in {"image_size": 224, "num_classes": 1}.items():
        assert f"data.{key}=null" in rejected(checks.check_packed_images, "packed", file=out, **{key: value})
        with pytest.raises(ConfigError, match=f"data.{key}"):
            built("packed", file=out, **{key: value}).dataset("train")
    assert "cannot be larger" in rejected(checks.check_packed_images, "packed", file=out, global_batch_size=999)
    (tmp_path / "other.npy").write_text("something else")
    np.save(tmp_path / "array.npy", np.zeros((9, 3, 8, 8), np.uint8))
    pack_text(write_texts(tmp_path / "texts"), tmp_path / "texts.npy")
    for name in ("other.npy", "array.npy", "texts.npy"):
        message = rejected(checks.check_packed_images, "packed", file=str(tmp_path / name))
        assert "must be a whole array" in message or "must hold images that tools/pack.py has packed" in message


def test_images_that_were_packed_into_hdf5_are_told_to_be_packed_again(tmp_path):
    folder, old = make_images(tmp_path / "images"), tmp_path / "images.h5"
    old.write_bytes(b"\x89HDF\r\n\x1a\n")
    again = f"python tools/pack.py data.dir=<folder of class folders> out={tmp_path}/images.npy"
    assert again in rejected(checks.check_packed_images, "packed", file=str(old))
    with pytest.raises(ConfigError, match="must be packed again"):
        built("packed", file=str(old)).dataset("train")
    assert again in error_of("--verify", old)
    assert f"out={tmp_path}/images.npy" in rejection_of(f"data.dir={folder}", f"out={old}").fix


# Text


def test_bytes_are_packed_as_they_are(tmp_path, capsys):
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "texts.npy"
    (folder / "latin").write_bytes(b"caf\xe9 " * 100)
    pack_text(folder, out)
    listed = text_files.sort_by_hash([str(file) for file in sorted(folder.iterdir())])
    assert np.load(out).tobytes() == b"".join(Path(file).read_bytes() for file in listed)
    assert "14 before (files and their folders), 2 after" in capsys.readouterr().out
    text = node("text", files=str(out), block_size=16)
    assert checks.check_text_files(text, text) == {"vocab_size": 256, "bytes_per_token": 1.0}
    run_pack("--verify", out)


def trained(folder, beside, size=300):
    """Type what a rejection says about a tokenizer, with the files of this folder; return the tokenizer.json."""
    fix = rejection_of(f"data.files={folder}", f"out={beside}/x.npy", "tokenizer=bpe").fix
    command = shlex.split(re.search(r'python -c ".*"', fix)[0])
    files = sorted(str(file) for file in folder.glob("*.txt"))
    assert "'FILE.txt'" in command[2] and "32768" in command[2]
    code = command[2].replace("'FILE.txt'", ", ".join(map(repr, files))).replace("32768", str(size))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=beside)
    return beside / "tokenizer.json"


def test_tokens_have_notes_and_decode_to_the_text(tmp_path):
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "texts.npy"
    given = trained(folder, tmp_path)
    pack_text(folder, out, f"tokenizer={given}")
    from tokenizers import Tokenizer

    tokens = np.load(out)
    assert tokens.dtype == np.uint16
    ends = np.flatnonzero(tokens == 0)  # <|endoftext|>
    listed = text_files.sort_by_hash([str(file) for file in sorted(folder.iterdir())])
    assert Path(f"{out}.tokenizer.json").read_bytes() == given.read_bytes()
    made = Tokenizer.from_file(str(given))
    texts = [made.decode(document.tolist()) for document in np.split(tokens, ends)]
    assert texts == [*(Path(file).read_text() for file in listed), ""]
    size = sum(map(os.path.getsize, listed))
    text = node("text", files=str(out), block_size=16)
    assert checks.check_text_files(text, text) == {"vocab_size": 320, "bytes_per_token": size / len(tokens)}
    assert size / len(tokens) > 1.5
    for vocab_size, checked_size in ((None, None), (320, None), (319, 319)):  # None: the notes say that it is enough
        assert (
            built("text", files=str(out), block_size=16, vocab_size=vocab_size).dataset("train").vocab_size
            == checked_size
        )


def test_text_that_becomes_unreadable_while_it_is_packed_is_named(tmp_path, monkeypatch):
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "texts.npy"
    given = trained(folder, tmp_path)
    last = Path(text_files.sort_by_hash([str(file) for file in sorted(folder.iterdir())])[-1])
    good = last.read_bytes()
    monkeypatch.setattr(tokenizing, "find_unreadable", lambda *_: [])  # the file becomes unreadable after the check
    last.write_bytes(good[:-3] + b"\xe9 \n")
    rule = error_of(f"data.files={folder}", f"tokenizer={given}", f"out={out}")
    assert f"data.files={last}" in rule and f"from byte {len(good) - 3} on" in rule
    assert sorted(os.listdir(tmp_path)) == ["texts", "tokenizer.json"]


def test_text_that_changes_while_it_is_packed_is_told(tmp_path, monkeypatch):
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "texts.npy"
    read = tokenizing.read_byte_part

    def read_and_add(parts, number):
        with open(folder / "3.txt", "a") as stream:
            stream.write("more")
        return read(parts, number)

    monkeypatch.setattr(tokenizing, "read_byte_part", read_and_add)
    assert "must not change while" in error_of(f"data.files={folder}", f"out={out}")
    assert os.listdir(tmp_path) == ["texts"]


def test_tokens_that_were_packed_by_an_earlier_version_are_read(tmp_path):
    """Write the header of numpy and the notes of that version, which had the number of tokens, too."""
    tokens, out = np.arange(3000, dtype=np.uint16) % 300, tmp_path / "old.npy"
    np.save(out, tokens)
    parts = [[len(part), zlib.crc32(part.tobytes())] for part in (tokens[:2000], tokens[2000:])]
    notes = {"dtype": "uint16", "vocab_size": 320, "tokenizer": "t.json 1f", "end_of_text": 0, "sources": {}}
    notes |= {"tokens": 3000, "bytes_per_token": 1.5, "parts": parts}
    Path(f"{out}.json").write_text(json.dumps(notes | {"checksum": packed_file.notes_checksum(notes)}))
    text = node("text", files=str(out), block_size=16)
    assert checks.check_text_files(text, text) == {"vocab_size": 320, "bytes_per_token": 1.5}
    run_pack("--verify", out)


def test_all_files_that_are_not_text_are_named_at_once(tmp_path, capsys):
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "texts.npy"
    given = trained(folder, tmp_path)
    for name in ("3.txt", "7.txt"):
        (folder / name).write_bytes((folder / name).read_bytes() + b"\xff\xfe")
    words = error_of(f"data.files={folder}", f"out={out}", f"tokenizer={given}")
    words += capsys.readouterr().err
    assert f"{folder}/3.txt" in words and f"{folder}/7.txt" in words and "1 more" in words
    assert not Path(f"{out}.tokenizer.json").exists()


def test_pieces_begin_where_lines_do_and_leave_nothing_out(tmp_path):
    text = TEXT * 20 + "é" * 500 + "\n\n" + TEXT
    (tmp_path / "text").write_text(text)
    pieces = [
        tokenizing.read_piece(piece) for part in tokenizing.split_into_parts([str(tmp_path / "text")]) for piece in part
    ]
    assert "".join(piece for piece, _ in pieces) == text
    assert [ends for piece, ends in pieces if piece] == [False] * (len([p for p, _ in pieces if p]) - 1) + [True]
    assert all(piece[0] in "FDé" for piece, _ in pieces if piece)


@pytest.mark.slow
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
    assert str(out) in rejected(checks.check_text_files, "text", files=str(out), block_size=16)


# Invalid arguments and full disks


@pytest.mark.slow
def test_wrong_words_are_rejected(tmp_path):
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

    assert "out=<file>.npy" in error_of(images)
    assert f"out={tmp_path}/x.npy" in error_of(images, f"out={tmp_path}/x")
    assert f"out={tmp_path}/x.npy" in error_of(images, f"out={tmp_path}/x.h5")
    assert "mkdir -p" in error_of(images, f"out={tmp_path}/no/x.npy")
    (tmp_path / "there.npy").touch()
    assert "cannot be a file that exists already" in error_of(images, f"out={tmp_path}/there.npy")
    assert "leave it out" in error_of(images, f"out={tmp_path}/x.npy", "trainer=gpu")
    assert "data.image_size" in error_of(images, f"out={tmp_path}/x.npy", "data.imagesize=8")
    assert "takes only data.files" in error_of(text, f"out={tmp_path}/x.npy", f"data.val_files={texts}/1.txt")
    assert "takes only data.files" in error_of(text, f"out={tmp_path}/x.npy", "data.vocab_size=300")
    assert "takes only data.dir" in error_of(images, f"out={tmp_path}/x.npy", "tokenizer=bytes")
    assert "typed only once" in error_of(text, f"out={tmp_path}/x.npy", f"out={tmp_path}/y.npy")
    for tokenizer in ("bpe", f"{tmp_path}/none.json", f"{texts}/1.txt"):
        message = error_of(text, f"out={tmp_path}/x.npy", f"tokenizer={tokenizer}")
        assert "must be bytes, or the tokenizer.json of a tokenizer" in message and "tokenizer=bytes" in message


def test_files_are_packed_in_a_job(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    pack_text(write_texts(tmp_path / "texts"), tmp_path / "texts.npy")
    run_pack("--verify", tmp_path / "texts.npy")


def test_two_processes_do_not_write_into_one_file(tmp_path):
    folder, out = make_images(tmp_path / "images"), tmp_path / "images.npy"
    with writing._open_unfinished(str(out)):
        assert "another process is packing it" in error_of(f"data.dir={folder}", f"out={out}")


def test_a_file_that_another_process_has_just_packed_is_kept(tmp_path, monkeypatch):
    """Finish another process's file after this one has looked for it, and before it has the lock."""
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "texts.npy"
    check_out = pack_command.check_output_path
    monkeypatch.setattr(
        pack_command, "check_output_path", lambda *words: (check_out(*words), out.write_text("theirs"))[0]
    )
    assert "Another process has just packed this file" in error_of(f"data.files={folder}", f"out={out}")
    assert out.read_text() == "theirs" and leftovers(tmp_path) == []


def test_without_locks_a_file_that_two_processes_write_is_one_of_theirs(tmp_path, monkeypatch):
    """Let another process begin the same file while this one packs it, where the file system has no locks."""
    folder, out = write_texts(tmp_path / "texts"), tmp_path / "texts.npy"
    unfinished = Path(writing.unfinished_path(str(out)))
    unfinished.write_text("left by a lost node")

    def no_locks(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def begun_by_another(work, *_, **__):
        yield work(0)
        unfinished.unlink()
        unfinished.write_text("theirs")

    monkeypatch.setattr(writing.fcntl, "flock", no_locks)
    with monkeypatch.context() as patch:
        patch.setattr(writing, "map_with_progress", begun_by_another)
        assert "another process is packing it" in error_of(f"data.files={folder}", f"out={out}")
    assert unfinished.read_text() == "theirs" and sorted(os.listdir(tmp_path)) == [".texts.npy.part", "texts"]
    pack_text(folder, out)
    run_pack("--verify", out)


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
        words = (f"data.dir={make_images(tmp_path / 'images')}", f"data.image_size={PIXELS}", f"out={small_disk}/x.npy")
    else:
        words = (f"data.files={write_texts(tmp_path / 'texts', 40)}", f"out={small_disk}/x.npy")
    assert f"needs {'1.54e-05' if kind == 'images' else '4.84e-05'} GB" in error_of(*words)
    monkeypatch.setattr(writing, "_reject_full_disk", lambda *_: None)  # as with a quota that the check misses
    assert "No space left on device" in (rule := error_of(*words)) and "make room" in rule
    assert os.listdir(small_disk) == ["ballast"]
    ballast.unlink()
    run_pack(*words)
    run_pack("--verify", words[-1].partition("=")[2])


@pytest.mark.soak
@pytest.mark.slow
def test_a_folder_whose_name_is_not_utf_8_is_packed_and_trained_on(tmp_path, call):
    folder = tmp_path / os.fsdecode(b"d\xff \xd1\x84")
    pack_images(f"'{make_images(folder / 'images')}'", folder / "x.npy")
    words = ["data=packed", f"data.file='{folder}/x.npy'", "data.global_batch_size=8", "trainer.max_steps=2"]
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
        rule = error_of(f"data.dir={folder}", f"out={tmp_path}/x.npy", f"data.image_size={PIXELS}")
        assert f"data.dir={bomb}" in rule and "pixels" in rule and "make it smaller" in rule
    assert not recwarn.list


def test_text_of_which_no_token_results_is_told(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"#": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    words = (f"data.files={write_texts(tmp_path / 'texts')}", f"tokenizer={tmp_path}/tokenizer.json")
    assert "data.files must hold text" in error_of(*words, f"out={tmp_path}/x.npy")
    assert sorted(os.listdir(tmp_path)) == ["texts", "tokenizer.json"]
