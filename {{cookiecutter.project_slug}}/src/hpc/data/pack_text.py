"""Pack files of text into one file of tokens: bytes, or what a tokenizer makes of them. Imports no torch."""

import os
import shlex
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hpc.config.errors import ConfigError
from hpc.data import packing, text_files, token_files, tokenizing
from hpc.data.pack_progress import fingerprint, progress, reject_unreadable, summary
from hpc.system import home


def pack(data: Any, out: str, *, tokenizer: str) -> list[str]:
    """Pack the text of `data.files`; return the lines that say so.

    Args:
        tokenizer: bytes; bpe, to train one; or the tokenizer.json of one.

    Raises:
        ConfigError: there is no such text, it is no UTF-8, or the tokenizer cannot be used.
        OSError: the file cannot be written.
    """
    files, _ = text_files.list_text(data.files)
    if text_files.is_token_file(files[0]):
        raise ConfigError("data.files", files[0], "is text; this holds tokens already", "data=text data.files=<it>")
    files = text_files.sort_by_hash(files)  # the last are those that evaluation gets: some of everything
    every = tokenizing.split_into_parts(files)
    spec = tokenizer if tokenizer in ("bytes", "bpe") else read_tokenizer(tokenizer)

    def of_part(number: int) -> list[str]:
        return [file for file, _, _ in every[number]]

    with packing.open_journal(out, fingerprint("text", spec, data.vocab_size, every), files_of_part=of_part) as (
        known,
        note,
    ):
        done = [known[number] for number in range(len(known))]
        text = ""
        if spec != "bytes":
            if not done:
                checks = progress(
                    partial(tokenizing.find_unreadable, every), range(len(every)), title="looking through text"
                )
                reject_unreadable([rejected for found in checks for rejected in found])
            text = vocabulary(out, spec, tokenizer=tokenizer, size=data.vocab_size, every=every, is_begun=bool(done))
        noted = tokenizing.describe_tokens(data.files, files, tokenizer=tokenizer, text=text)
        work = partial(tokenizing.read_byte_part, every)
        if text:
            work = partial(tokenizing.tokenize_part, every, tokenizing.load_tokenizer(text, tokenizer), noted["dtype"])
        _write(
            out,
            partial(packing.work_with_state, work, of_part),
            num_parts=len(every),
            noted=noted,
            done=done,
            note=note,
        )
    what = f"{noted['tokens']} tokens, vocabulary {noted['vocab_size']}, {noted['bytes_per_token']:.3f} bytes per token"
    command = f"python train.py data=text data.files={shlex.quote(out)} model=gpt_124m trainer=gpu"
    return [*summary(out, files, what=what, checksum=noted["checksum"]), command]


def _write(
    out: str,
    work: Callable[[int], Any],
    *,
    num_parts: int,
    noted: dict[str, Any],
    done: list[Any],
    note: Callable[[int, str, Any], None],
) -> None:
    """Write the parts that are left behind those that are done, and give the file its name."""
    part = packing.unfinished_paths(out)[0]
    with open(part, "ab") as stream:
        start = len(token_files.npy_header(0, noted["dtype"]))
        stream.truncate(start + sum(size for size, _, _ in done))  # what was written, but not noted
        at = stream.seek(0, os.SEEK_END)
    with open(part, "r+b", buffering=0) as stream:
        for state, (tokens, length) in progress(work, range(len(done), num_parts), title="packing text"):
            packing.write_at(stream.fileno(), memoryview(tokens), offset=at)
            at += len(tokens)
            done.append([len(tokens), zlib.crc32(tokens), length])
            note(len(done) - 1, state, done[-1])
        token_files.write_header_and_notes(stream.fileno(), out, notes=noted, done=done)
    packing.publish(out)


def vocabulary(
    out: str,
    spec: str,
    *,
    tokenizer: str,
    size: int | None,
    every: Sequence[Sequence[tokenizing.Piece]],
    is_begun: bool,
) -> str:
    """Return the tokenizer.json, kept beside the tokens: what was given, or trained now or when this was begun."""
    beside = f"{out}.tokenizer.json"
    if is_begun and os.path.exists(beside):
        return read_tokenizer(beside)
    text = spec
    if tokenizer == "bpe":
        if not size or size < 257:
            rule = "is the number of tokens that a BPE learns: the 256 bytes and more"
            raise ConfigError("data.vocab_size", size or "null", rule, "data.vocab_size=32768")
        print(f"training a BPE of {size} tokens", file=sys.stderr)
        text = next(packing.map_in_order(lambda _: tokenizing.train_bpe(every, size), [0], num_processes=1))
    found = tokenizing.vocabulary_size(tokenizing.load_tokenizer(text, tokenizer))
    if size and found > size:
        rule = f"is at least the vocabulary of {tokenizer}, {found}"
        raise ConfigError("data.vocab_size", size, rule, "leave it out: it is noted beside the tokens")
    with open(f"{beside}.part", "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(f"{beside}.part", beside)
    return text


def read_tokenizer(file: str) -> str:
    """Return the text of a tokenizer.json. Raises `ConfigError` where it cannot be read."""
    try:
        return home.expand(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"is bytes, bpe or the tokenizer.json of a tokenizer; {error}"
        raise ConfigError("tokenizer", file, rule, "tokenizer=bytes") from None
