"""Text to tokens, a piece at a time: as bytes, or by a tokenizer of the library `tokenizers`. No torch here."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpc.config.errors import ConfigError
from hpc.system import home

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE_BYTES = 1 << 20  # a tokenizer needs a few hundred times as much memory
PART_BYTES = 1 << 24  # for one process at a time
END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")  # the first that exists ends each file

MAKE_A_TOKENIZER = (
    "make it: python -c \"import tokenizers; t = tokenizers.ByteLevelBPETokenizer(); t.train(['FILE.txt'], 32768, "
    "special_tokens=['<|endoftext|>']); t.save('tokenizer.json')\", or tokenizer=bytes"
)

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


def read_piece(piece: Piece) -> tuple[str, bool]:
    """Return (text, whether it ends the file) of a piece, cut where lines start.

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
        return data.decode(), end == size and bool(data)
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


def read_byte_part(parts: Parts, number: int) -> bytes:
    """Return the tokens of a part whose tokens are its bytes."""
    data = b""
    for file, start, end in parts[number]:
        with open(file, "rb") as stream:
            stream.seek(start)
            data += stream.read(end - start)
    return data


def tokenize_part(parts: Parts, number: int, *, tokenizer: "Tokenizer", dtype: str) -> bytes:
    """Return the tokens of a part as bytes of `dtype`. Raise `ConfigError` for text that is not UTF-8."""
    import numpy as np

    end_of_text, tokens = end_of_text_token(tokenizer), []
    for piece in parts[number]:
        text, is_end = read_piece(piece)
        tokens.append(np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype))
        if is_end and end_of_text is not None:
            tokens.append(np.array([end_of_text], dtype))
    return np.concatenate(tokens).tobytes()


def read_tokenizer(file: str) -> tuple[str, "Tokenizer"]:
    """Return the text of a tokenizer.json, and its tokenizer. Raise `ConfigError` if it cannot be read."""
    from tokenizers import Tokenizer

    try:
        text = home.expand(file).read_text(encoding="utf-8")
        return text, Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower class
        rule = f"must be bytes, or the tokenizer.json of a tokenizer, which packing does not train ({error})"
        raise ConfigError("tokenizer", file, rule, MAKE_A_TOKENIZER) from None


def end_of_text_token(tokenizer: "Tokenizer") -> int | None:
    """Return the token to put after each file, if the tokenizer has one."""
    return next((number for name in END_OF_TEXT_TOKENS if (number := tokenizer.token_to_id(name)) is not None), None)


def vocabulary_size(tokenizer: "Tokenizer") -> int:
    """Return one more than the largest token."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def dtype_for(vocab_size: int) -> str:
    """Return the smallest dtype that holds all tokens."""
    return "uint8" if vocab_size <= 256 else "uint16" if vocab_size <= 65536 else "uint32"


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
