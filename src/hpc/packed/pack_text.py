"""Pack files of text into one file of tokens: bytes, or the tokens of a tokenizer. No torch here.

The notes have
    vocab_size       a multiple of 64, so that matrices have whole tiles
    bytes_per_token  of text
    tokenizer        "bytes", or its file and a checksum of it
    end_of_text      the token between files, or null
    sources          data.files, and the number and the bytes of the files
"""

import hashlib
import os
import shlex
from functools import partial
from typing import Any

from hpc.config.errors import ConfigError
from hpc.data import text_files
from hpc.packed import tokenizing
from hpc.packed.writing import MakePart, map_with_progress, reject_unreadable, write_packed_file


def pack(data: Any, out: str, *, tokenizer: str) -> tuple[list[str], str, str]:
    """Pack the text of `data.files` into the file `out`.

    Args:
        tokenizer: bytes, or the tokenizer.json of a tokenizer, which is copied to `out.tokenizer.json`.

    Returns:
        The text files, what the packed file holds, and a command that trains on it.

    Raises:
        ConfigError: there is no such text, it is not UTF-8, or the tokenizer cannot be used.
        OSError: the file cannot be written.
    """
    files, _ = text_files.list_text_files(data.files)
    if text_files.is_token_file(files[0]):
        rule = "must be text, and not a file that holds tokens already"
        raise ConfigError("data.files", files[0], rule, f"train on it: data=text data.files={files[0]}")
    files = text_files.sort_by_hash(files)  # evaluation gets the last ones: in this order, a bit of everything
    num_bytes = sum(map(os.path.getsize, files))
    parts = tokenizing.split_into_parts(files)
    is_bytes = tokenizer == "bytes"
    text, loaded = ("", None) if is_bytes else tokenizing.read_tokenizer(tokenizer)
    vocab_size = tokenizing.vocabulary_size(loaded) if loaded else 256
    dtype = tokenizing.dtype_for(vocab_size)
    make_part: MakePart = partial(tokenizing.read_byte_part, parts)
    if loaded:
        _reject_unreadable_text(parts)
        make_part = partial(tokenizing.tokenize_part, parts, tokenizer=loaded, dtype=dtype)

    def describe(num_tokens: int) -> dict[str, Any]:
        if not num_tokens:
            rule = "must hold text; the tokenizer makes no token of it"
            raise ConfigError("data.files", None, rule, "files that are not empty, or another tokenizer=")
        if sum(map(os.path.getsize, files)) != num_bytes:
            raise ConfigError("data.files", None, "must not change while they are packed", "the same command again")
        return {
            "vocab_size": -(-vocab_size // 64) * 64,
            "bytes_per_token": num_bytes / num_tokens,
            "tokenizer": f"{tokenizer} {hashlib.sha256(text.encode()).hexdigest()[:16]}" if loaded else "bytes",
            "end_of_text": tokenizing.end_of_text_token(loaded) if loaded else None,
            "sources": {"data.files": str(data.files), "files": len(files), "bytes": num_bytes},
        }

    notes = write_packed_file(
        out,
        make_part,
        len(parts),
        title="packing text",
        dtype=dtype,
        num_bytes=num_bytes if is_bytes else 0,
        describe=describe,
        beside={".tokenizer.json": text} if loaded else {},
    )
    num_tokens = sum(num for num, _ in notes["parts"])
    content = f"{num_tokens} tokens, vocabulary {notes['vocab_size']}, {notes['bytes_per_token']:.3f} bytes per token"
    content += f", checksum {notes['checksum'][:16]}"
    return files, content, f"python train.py data=text data.files={shlex.quote(out)} model=gpt_124m trainer=gpu"


def _reject_unreadable_text(parts: tokenizing.Parts) -> None:
    """Raise `ConfigError` for text that is not UTF-8, before hours of work."""
    work = partial(tokenizing.find_unreadable, parts)
    unreadable = map_with_progress(work, len(parts), title="checking text")
    reject_unreadable([error for part_errors in unreadable for error in part_errors])
