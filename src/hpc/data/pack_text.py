"""Pack files of text into one file of tokens: bytes, or the tokens of a tokenizer. No torch here."""

import os
import shlex
import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from hpc.config.errors import ConfigError
from hpc.data import packing, text_files, token_files, tokenizing
from hpc.data.pack_progress import describe_result, map_with_progress, packing_checksum, reject_unreadable
from hpc.system import home

MIN_BPE_TOKENS = 257  # the 256 bytes, and one more


def pack(data: Any, out: str, *, tokenizer: str) -> list[str]:
    """Pack the text of `data.files` into the file `out`; return lines that describe it.

    Args:
        tokenizer: bytes; bpe, to train one; or the tokenizer.json of one.

    Raises:
        ConfigError: there is no such text, it is not UTF-8, or the tokenizer cannot be used.
        OSError: the file cannot be written.
    """
    files, _ = text_files.list_text_files(data.files)
    if text_files.is_token_file(files[0]):
        rule = "must be text, and not a file that holds tokens already"
        raise ConfigError("data.files", files[0], rule, f"train on it: data=text data.files={files[0]}")
    files = text_files.sort_by_hash(files)  # evaluation gets the last ones: in this order, a bit of everything
    parts = tokenizing.split_into_parts(files)
    spec = tokenizer if tokenizer in ("bytes", "bpe") else read_tokenizer(tokenizer)

    def files_of_part(number: int) -> list[str]:
        return [file for file, _, _ in parts[number]]

    plan = packing_checksum("text", spec, data.vocab_size, parts)
    with packing.open_journal(out, plan, files_of_part=files_of_part) as (results, note):
        done = [results[number] for number in range(len(results))]
        text = ""
        if spec != "bytes":
            if not done:
                _reject_unreadable_text(parts)
            text = store_tokenizer(
                out, spec, tokenizer=tokenizer, vocab_size=data.vocab_size, parts=parts, is_resumed=bool(done)
            )
        notes = tokenizing.token_metadata(data.files, files, tokenizer=tokenizer, text=text)
        work = partial(tokenizing.read_byte_part, parts)
        if text:
            loaded = tokenizing.load_tokenizer(text, tokenizer)
            work = partial(tokenizing.tokenize_part, parts, tokenizer=loaded, dtype=notes["dtype"])
        work = partial(packing.run_with_fingerprint, work, files_of_part)
        _write_parts(out, work, num_parts=len(parts), notes=notes, done=done, note=note)
    content = f"{notes['tokens']} tokens, vocabulary {notes['vocab_size']}"
    content += f", {notes['bytes_per_token']:.3f} bytes per token"
    command = f"python train.py data=text data.files={shlex.quote(out)} model=gpt_124m trainer=gpu"
    return [*describe_result(out, files, content=content, checksum=notes["checksum"]), command]


def _reject_unreadable_text(parts: tokenizing.Parts) -> None:
    """Raise `ConfigError` for text that is not UTF-8."""
    work = partial(tokenizing.find_unreadable, parts)
    unreadable = map_with_progress(work, range(len(parts)), title="checking text")
    reject_unreadable([error for part_errors in unreadable for error in part_errors])


def _write_parts(
    out: str,
    work: Callable[[int], Any],
    *,
    num_parts: int,
    notes: dict[str, Any],
    done: list[Any],
    note: Callable[[int, str, Any], None],
) -> None:
    """Write the parts that are missing after those that are done, then the notes, and publish the file."""
    unfinished = packing.unfinished_paths(out)[0]
    with open(unfinished, "ab") as stream:
        start = len(token_files.npy_header(0, notes["dtype"]))
        stream.truncate(start + sum(size for size, _, _ in done))  # removes what was written, but not noted
        offset = stream.seek(0, os.SEEK_END)
    with open(unfinished, "r+b", buffering=0) as stream:
        for state, (tokens, length) in map_with_progress(work, range(len(done), num_parts), title="packing text"):
            packing.write_at(stream.fileno(), memoryview(tokens), offset=offset)
            offset += len(tokens)
            done.append([len(tokens), zlib.crc32(tokens), length])
            note(len(done) - 1, state, done[-1])
        token_files.write_header_and_notes(stream.fileno(), out, notes=notes, done=done)
    packing.publish(out)


def store_tokenizer(
    out: str, spec: str, *, tokenizer: str, vocab_size: int | None, parts: tokenizing.Parts, is_resumed: bool
) -> str:
    """Write the tokenizer.json beside the tokens; return its text.

    It is the given one, or a BPE that is trained now, or the one that was written when this packing began.
    """
    file = f"{out}.tokenizer.json"
    if is_resumed and os.path.exists(file):
        return read_tokenizer(file)
    text = spec
    if tokenizer == "bpe":
        if not vocab_size or vocab_size < MIN_BPE_TOKENS:
            rule = f"must be at least {MIN_BPE_TOKENS}, the 256 bytes and the tokens that a BPE learns"
            raise ConfigError("data.vocab_size", vocab_size or "null", rule, "data.vocab_size=32768")
        print(f"training a BPE of {vocab_size} tokens", file=sys.stderr)
        text = next(packing.map_in_order(lambda _: tokenizing.train_bpe(parts, vocab_size), [0], num_processes=1))
    actual_size = tokenizing.vocabulary_size(tokenizing.load_tokenizer(text, tokenizer))
    if vocab_size and actual_size > vocab_size:
        rule = f"must be at least the vocabulary of {tokenizer} ({actual_size})"
        raise ConfigError("data.vocab_size", vocab_size, rule, "leave it out: it is noted beside the tokens")
    with open(f"{file}.part", "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(f"{file}.part", file)
    return text


def read_tokenizer(file: str) -> str:
    """Return the text of a tokenizer.json. Raise `ConfigError` if it cannot be read."""
    try:
        return home.expand(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"must be bytes, bpe or the tokenizer.json of a tokenizer ({error})"
        raise ConfigError("tokenizer", file, rule, "tokenizer=bytes") from None
