"""Make one large file out of many small ones, once, on a login node, before jobs train on it:

  python tools/pack.py data.dir=FOLDER out=FILE.h5 [data.image_size=224]       images, decoded and resized
  python tools/pack.py data.files=TEXT out=FILE.npy                            text, as bytes
  python tools/pack.py data.files=TEXT out=FILE.npy tokenizer=tokenizer.json   by a tokenizer
  python tools/pack.py data.files=TEXT out=FILE.npy tokenizer=bpe data.vocab_size=32768   by one trained on TEXT
  python tools/pack.py --verify FILE                                           compare all of it with its checksums

It keeps all cores busy that it is given (taskset -c 0-7 python ...: eight). Interrupted, it goes on when called again.
"""

import argparse
import hashlib
import os
import shlex
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hpc.config import compose, errors
from hpc.config.errors import ConfigError
from hpc.data import file_parts, image_files, packed_files, packing, text_files, token_files, tokenizing
from hpc.launch import placement
from hpc.system import home

SUFFIX = {"images": ".h5", "text": ".npy"}
USED = {"images": ("data.dir", "data.image_size", "out"), "text": ("data.files", "data.vocab_size", "tokenizer", "out")}


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore  # names of files need not be UTF-8
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="key=value", help="out=, tokenizer=, and keys of configs/data")
    parser.add_argument("--verify", metavar="FILE", help="a file that this program made")
    asked = parser.parse_args()
    if asked.verify:
        return verify(os.path.abspath(asked.verify))
    reject_in_a_job(asked.words)
    kind = "text" if any(word.startswith("data.files=") for word in asked.words) else "images"
    reject_unused(asked.words, kind)
    own = dict(word.split("=", 1) for word in asked.words if word.startswith(("out=", "tokenizer=")))
    words = [word for word in asked.words if word.partition("=")[0] not in own]
    data = compose.compose_overrides([f"data={kind}", *words]).data
    out = place(own.get("out"), SUFFIX[kind])
    try:
        pack_images(data, out) if kind == "images" else pack_text(data, out, own.get("tokenizer", "bytes"))
    except OSError as error:
        fix = "make room there, or another out=" if packing.no_room(error) else "out=<a file in a folder of yours>"
        rule = f"{error.strerror or error}; what is packed so far is kept, and the same command goes on"
        raise ConfigError("out", out, rule, fix) from None
    except KeyboardInterrupt:
        raise ConfigError(
            "out", out, "interrupted; what is packed so far is kept", "the same command goes on"
        ) from None


def reject_in_a_job(words: Sequence[str]) -> None:
    """GPUs that wait for one process to read small files are wasted, and the next job would do it once more."""
    if placement.is_in_job(os.environ):
        rule = "data are prepared once, on a login node; a job trains on what is there"
        command = " ".join(shlex.quote(word) for word in words)
        raise ConfigError("tools/pack.py", None, rule, f"on a login node: python tools/pack.py {command}")


def reject_unused(words: Sequence[str], kind: str) -> None:
    """What packing would pass over: files for validation, say, are packed by themselves, into another out=."""
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    for word, key in zip(words, keys, strict=True):
        if key not in USED[kind]:
            raise ConfigError(word, None, f"packing of {kind} takes {', '.join(USED[kind])}", "leave it out")
        if keys.count(key) > 1:
            raise ConfigError(word, None, "is typed once", f"one {key}=")
    if "data.vocab_size" in keys and not any(word.startswith("tokenizer=") for word in words):
        rule = "is what a BPE learns, or the least that a tokenizer must have; bytes are 256"
        raise ConfigError("data.vocab_size", None, rule, "tokenizer=bpe as well, or leave it out")


def place(out: str | None, suffix: str) -> str:
    """Where the file will be."""
    if not out:
        raise ConfigError("out", None, "names the file that is made", f"out=<file>{suffix}")
    path = os.path.abspath(home.expand(out))
    if not path.endswith(suffix):
        raise ConfigError("out", out, f"ends in {suffix}", f"out={out}{suffix}")
    if os.path.lexists(path):
        raise ConfigError("out", out, "is there already", f"another name, or: rm '{path}'")
    if not os.access(os.path.dirname(path), os.W_OK):
        raise ConfigError("out", out, "lies in a folder that is there, and is yours", "mkdir -p it, or another out=")
    return path


def pack_images(data: Any, out: str) -> None:
    classes, splits, left_out = image_files.list_images(data.dir)
    if left_out:
        print(errors.make_printable(f"note: {left_out}"), file=sys.stderr)
    folder, size = os.path.expanduser(data.dir), data.image_size
    samples, ranges = [], {}
    for split, chosen in splits.items():
        if split == "test" and chosen is splits["val"]:
            ranges["test"] = ranges["val"]
        else:
            ranges[split] = [len(samples), len(samples) + len(chosen)]
            samples += chosen
    names = [os.fsencode(os.path.relpath(file, folder)) for file, _ in samples]
    reject_without_room(out, len(samples) * 3 * size**2)
    per_part = packed_files.images_per_part(size)

    def of_part(number: int) -> list[str]:
        return [file for file, _ in samples[number * per_part : (number + 1) * per_part]]

    with packing.journal(out, plan("images", size, ranges, names), of_part) as (done, note):
        part = packing.beside(out)[0]
        if not os.path.exists(part):
            labels, words = [label for _, label in samples], [os.fsencode(name) for name in classes]
            packed_files.create(f"{part}.new", names, labels, words, ranges, size)
            os.replace(f"{part}.new", part)
        shape = packed_files.read(part, unfinished=True)
        left, bad = [number for number in range(len(shape.crcs)) if number not in done], []
        work = partial(packing.with_state, partial(packed_files.put_part, samples, shape), of_part)
        for state, (number, crc, unreadable) in progress(work, left, "packing images"):
            bad += unreadable
            if not unreadable:
                done[number] = crc
                note(number, state, crc)
        reject_unreadable(bad)
        checksum = packed_files.finish(part, [done[number] for number in range(len(done))])
        packing.finished(out)
    what = f"{len(samples)} images of {size} x {size} pixels in {len(classes)} classes"
    report(out, [file for file, _ in samples], what, checksum)
    print(errors.make_printable(f"python train.py data=packed data.file={shlex.quote(out)} model=resnet18 trainer=gpu"))


def pack_text(data: Any, out: str, tokenizer: str) -> None:
    files, _ = text_files.list_text(data.files)
    if text_files.is_tokens(files[0]):
        raise ConfigError("data.files", files[0], "is text; this holds tokens already", "data=text data.files=<it>")
    files = text_files.by_hash(files)  # the last are those that evaluation gets: some of everything
    every = tokenizing.parts(files)
    spec = tokenizer if tokenizer in ("bytes", "bpe") else read(tokenizer)

    def of_part(number: int) -> list[str]:
        return [file for file, _, _ in every[number]]

    with packing.journal(out, plan("text", spec, data.vocab_size, every), of_part) as (known, note):
        done = [known[number] for number in range(len(known))]
        if spec != "bytes" and not done:
            checks = progress(partial(tokenizing.unreadable, every), range(len(every)), "looking through text")
            reject_unreadable([rejected for found in checks for rejected in found])
        text = "" if spec == "bytes" else vocabulary(out, spec, tokenizer, data.vocab_size, every, bool(done))
        noted = tokenizing.described(data.files, files, tokenizer, text)
        work = partial(tokenizing.byte_part, every)
        if text:
            work = partial(tokenizing.token_part, every, tokenizing.load(text, tokenizer), noted["dtype"])
        with open(packing.beside(out)[0], "ab") as stream:
            start = len(token_files.header(0, noted["dtype"]))
            stream.truncate(start + sum(size for size, _, _ in done))  # what was written, but not noted
            at = stream.seek(0, os.SEEK_END)
        with open(packing.beside(out)[0], "r+b", buffering=0) as stream:
            work = partial(packing.with_state, work, of_part)
            for state, (tokens, length) in progress(work, range(len(done), len(every)), "packing text"):
                packing.put(stream.fileno(), memoryview(tokens), at)
                at += len(tokens)
                done.append([len(tokens), zlib.crc32(tokens), length])
                note(len(done) - 1, state, done[-1])
            token_files.finish(stream.fileno(), out, noted, done)
        packing.finished(out)
    what = f"{noted['tokens']} tokens, vocabulary {noted['vocab_size']}, {noted['bytes_per_token']:.3f} bytes per token"
    report(out, files, what, noted["checksum"])
    print(errors.make_printable(f"python train.py data=text data.files={shlex.quote(out)} model=gpt_124m trainer=gpu"))


def vocabulary(
    out: str,
    spec: str,
    tokenizer: str,
    vocab_size: int | None,
    every: Sequence[Sequence[tokenizing.Piece]],
    begun: bool,
) -> str:
    """The tokenizer.json, kept beside the tokens: what was given, or trained now or when this was begun."""
    beside = f"{out}.tokenizer.json"
    if begun and os.path.exists(beside):
        return read(beside)
    text = spec
    if tokenizer == "bpe":
        if not vocab_size or vocab_size < 257:
            rule = "is the number of tokens that a BPE learns: the 256 bytes and more"
            raise ConfigError("data.vocab_size", vocab_size or "null", rule, "data.vocab_size=32768")
        print(f"training a BPE of {vocab_size} tokens", file=sys.stderr)
        text = next(packing.in_order(lambda _: tokenizing.trained(every, vocab_size), [0], 1))
    found = tokenizing.num_tokens(tokenizing.load(text, tokenizer))
    if vocab_size and found > vocab_size:
        rule = f"is at least the vocabulary of {tokenizer}, {found}"
        raise ConfigError("data.vocab_size", vocab_size, rule, "leave it out: it is noted beside the tokens")
    with open(f"{beside}.part", "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(f"{beside}.part", beside)
    return text


def progress(work: Callable[[int], Any], left: Sequence[int], title: str) -> Iterator[Any]:
    """What `work` returns for the parts that are left, in order."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread: processes are forked
    if left:
        processes = min(len(os.sched_getaffinity(0)), len(left))
        results = packing.in_order(work, left, processes)
        yield from tqdm(results, f"{title} ({processes} processes)", len(left), unit="part")


def reject_unreadable(bad: Sequence[ConfigError]) -> None:
    """All of them at once: what is written anew in its place costs no more than its part."""
    for rejected in bad[1:]:
        print(errors.make_printable(f"{rejected.key}={rejected.value}: {rejected.rule}"), file=sys.stderr)
    if bad:
        more = f" ({len(bad) - 1} more are named above)" if len(bad) > 1 else ""
        raise ConfigError(bad[0].key, bad[0].value, bad[0].rule + more, bad[0].fix)


def plan(*what: Any) -> str:
    """What is packed, and how, in short. Paths may hold bytes that are no UTF-8."""
    return hashlib.sha256(repr(what).encode(errors="surrogateescape")).hexdigest()


def read(file: str) -> str:
    try:
        return home.expand(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"is bytes, bpe or the tokenizer.json of a tokenizer; {error}"
        raise ConfigError("tokenizer", file, rule, "tokenizer=bytes") from None


def reject_without_room(out: str, size: int) -> None:
    """Quotas show only when something is written."""
    free = shutil.disk_usage(os.path.dirname(out)).free
    part = packing.beside(out)[0]
    there = os.stat(part).st_blocks * 512 if os.path.exists(part) else 0
    if size > free + there:
        rule = f"needs {size / 1e9:.3g} GB; there are {(free + there) / 1e9:.3g} GB"
        raise ConfigError("out", out, rule, "make room there, another out=, or a smaller data.image_size=")


def report(out: str, files: Sequence[str], what: str, checksum: str) -> None:
    before = len(files) + len({os.path.dirname(file) for file in files})
    after = sum(os.path.exists(out + more) for more in ("", ".json", ".tokenizer.json"))
    size = f"{os.path.getsize(out) / 1e6:.4g} MB"
    print(errors.make_printable(f"{out}: {what}, {size}, checksum {checksum[:16]}"))
    print(f"inodes: {before} before (files and their folders), {after} after")


def verify(file: str) -> None:
    """Raise `ConfigError` where a file is not what was packed."""
    packed = file.endswith(SUFFIX["images"])
    if not packed and not os.path.exists(f"{file}.json"):
        raise ConfigError("--verify", file, "is a file that this program made", "--verify FILE.h5, or FILE.npy")
    found = packed_files.read(file).parts if packed else token_files.token_parts(file)
    num = file_parts.verify(found, "data.file" if packed else "data.files")
    print(errors.make_printable(f"{file}: as it was packed ({num} parts, checksum {found.checksum[:16]})"))


if __name__ == "__main__":
    with errors.exit_on_config_error():
        main()
