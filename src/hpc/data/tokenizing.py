"""Text to tokens, a piece at a time: as bytes, or by a tokenizer of the library `tokenizers`. No torch here."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hpc.config.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE_BYTES = 1 << 20  # a tokenizer needs a few hundred times as much memory
PART_BYTES = 1 << 24  # for one process at a time
MAX_BPE_TRAINING_BYTES = 1 << 30  # evenly spread; a BPE hardly improves with more text
END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")  # the first that exists ends each file

Piece = tuple[str, int, int]  # file, first byte, one past the last byte: before both are moved to where a line starts
Parts = Sequence[Sequence[Piece]]


def split_into_parts(files: Sequence[str]) -> list[list[Piece]]:
    """Return all files, in order, as parts of about PART_BYTES, each a list of pieces of at most about PIECE_BYTES."""
    parts: list[list[Piece]] = [[]]
    part_size = 0
    for file in files:
        size = os.path.getsize(file)
        for start in range(0, size, PIECE_BYTES):
            if part_size >= PART_BYTES:
                parts.append([])
                part_size = 0
            end = min(start + PIECE_BYTES, size)
            parts[-1].append((file, start, end))
            part_size += end - start
    return parts


def read_piece(piece: Piece) -> tuple[str, int, bool]:
    """Return (text, its bytes in the file, whether it ends the file) of a piece, cut where lines start.

    Raises:
        ConfigError: it is not UTF-8.
    """
    file, start, end = piece
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        start, end = (_move_to_line_start(stream, offset, size=size) for offset in (start, end))
        stream.seek(start)
        data = stream.read(max(0, end - start))
    try:
        return data.decode(), len(data), end == size and bool(data)
    except UnicodeDecodeError as error:
        rule = f"Text must be UTF-8; from byte {start + error.start} on, this file is not"
        fix = "iconv -f latin1 -t utf-8, leave it out, or tokenizer=bytes"
        raise ConfigError("data.files", file, rule, fix) from None


def find_unreadable(parts: Parts, number: int) -> list[ConfigError]:
    """Return an error for each piece of a part that is not UTF-8."""
    errors = []
    for piece in parts[number]:
        try:
            read_piece(piece)
        except ConfigError as error:
            errors.append(error)
    return errors


def read_byte_part(parts: Parts, number: int) -> tuple[bytes, int]:
    """Return (tokens, bytes of text) of a part whose tokens are its bytes."""
    data = b""
    for file, start, end in parts[number]:
        with open(file, "rb") as stream:
            stream.seek(start)
            data += stream.read(end - start)
    return data, len(data)


def tokenize_part(parts: Parts, number: int, *, tokenizer: "Tokenizer", dtype: str) -> tuple[bytes, int]:
    """Return (tokens as bytes of `dtype`, bytes of text) of a part. Raise `ConfigError` for text that is not UTF-8."""
    import numpy as np

    end_of_text, tokens, size = end_of_text_token(tokenizer), [], 0
    for piece in parts[number]:
        text, length, is_end = read_piece(piece)
        tokens.append(np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype))
        size += length
        if is_end and end_of_text is not None:
            tokens.append(np.array([end_of_text], dtype))
    return np.concatenate(tokens).tobytes(), size


def load_tokenizer(text: str, source: str) -> "Tokenizer":
    """Return the tokenizer of a tokenizer.json's text; `source` is named in errors. Raise `ConfigError`."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower class
        rule = f"must be the tokenizer.json of a tokenizer ({error})"
        raise ConfigError("tokenizer", source, rule, "tokenizer=bpe") from None


def train_bpe(parts: Parts, vocab_size: int) -> str:
    """Train a byte-level BPE on (some of) the pieces; return its tokenizer.json. Raise `ConfigError`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special_tokens = [END_OF_TEXT_TOKENS[0]]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )  # type: ignore

    pieces = [piece for part in parts for piece in part]
    size = sum(end - start for _, start, end in pieces)

    def texts() -> Iterator[str]:
        for piece in pieces[:: max(1, size // MAX_BPE_TRAINING_BYTES)]:
            yield read_piece(piece)[0]

    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer.to_str(pretty=True)


def end_of_text_token(tokenizer: "Tokenizer") -> int | None:
    """Return the token to put after each file, if the tokenizer has one."""
    return next((number for name in END_OF_TEXT_TOKENS if (number := tokenizer.token_to_id(name)) is not None), None)


def vocabulary_size(tokenizer: "Tokenizer") -> int:
    """Return one more than the largest token."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def dtype_for(vocab_size: int) -> str:
    """Return the smallest dtype that holds all tokens."""
    return "uint8" if vocab_size <= 256 else "uint16" if vocab_size <= 65536 else "uint32"


def token_metadata(data_files: Any, files: Sequence[str], *, tokenizer: str, text: str) -> dict[str, Any]:
    """Return the notes that are written beside the tokens, without those that are known only when they are made.

    Args:
        data_files: the config's value, of which `files` is the list.
        tokenizer: bytes, bpe, or the file of a tokenizer.
        text: of the tokenizer.json; "" for bytes.
    """
    size = 256
    loaded = load_tokenizer(text, tokenizer) if text else None
    if loaded:
        size = vocabulary_size(loaded)
    sha = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {
        "dtype": dtype_for(size),
        "vocab_size": -(-size // 64) * 64,
        "tokenizer": f"{tokenizer} {sha}" if text else "bytes",
        "end_of_text": end_of_text_token(loaded) if loaded else None,
        "sources": {"data.files": str(data_files), "files": len(files), "bytes": sum(map(os.path.getsize, files))},
    }


def _move_to_line_start(stream: Any, offset: int, *, size: int) -> int:
    """Return the first place from `offset` on where a line starts, without white space: tokens rarely cross it.

    If no line starts within a piece, return the start of the next character.
    """
    if offset in (0, size):
        return offset
    stream.seek(offset)
    following = stream.read(PIECE_BYTES)
    newline = following.find(b"\n")
    while 0 <= newline < len(following) - 1:
        if following[newline + 1 : newline + 2].strip():
            return offset + newline + 1
        newline = following.find(b"\n", newline + 1)
    if len(following) < PIECE_BYTES:
        return size
    return offset + next((i for i in range(4) if following[i] & 0xC0 != 0x80), 0)
