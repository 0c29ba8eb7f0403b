"""Text into tokens, a piece at a time: by bytes, or by a tokenizer of the library `tokenizers`. No torch here."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hpc.config.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE_BYTES = 1 << 20  # bytes: a tokenizer needs a few hundred times as much memory
PART_BYTES = 1 << 24  # bytes that one process does at a time
MAX_TRAINING_BYTES = 1 << 30  # bytes, evenly spread; more text makes a BPE hardly better
END_OF_TEXT_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",
    "</s>",
)  # the token that ends a file: the first that there is

Piece = tuple[str, int, int]  # file, first byte, one past the last: before they are moved to where lines begin


def split_into_parts(files: Sequence[str]) -> list[list[Piece]]:
    """All files, in order, in parts of about PART bytes, which are pieces of at most about PIECE."""
    found: list[list[Piece]] = [[]]
    filled = 0
    for file in files:
        size = os.path.getsize(file)
        for start in range(0, size, PIECE_BYTES):
            if filled >= PART_BYTES:
                found.append([])
                filled = 0
            end = min(start + PIECE_BYTES, size)
            found[-1].append((file, start, end))
            filled += end - start
    return found


def read_piece(piece: Piece) -> tuple[str, int, bool]:
    """(text, its bytes in the file, whether the file ends here) of a piece, cut where lines begin.

    Raises:
        ConfigError: it is not UTF-8.
    """
    file, start, end = piece
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        start, end = _cut(stream, start, size), _cut(stream, end, size)
        stream.seek(start)
        read = stream.read(max(0, end - start))
    try:
        return read.decode(), len(read), end == size and bool(read)
    except UnicodeDecodeError as error:
        rule = f"is text in UTF-8; from byte {start + error.start} on it is not"
        raise ConfigError(
            "data.files", file, rule, "iconv -f latin1 -t utf-8, leave it out, or tokenizer=bytes"
        ) from None


def find_unreadable(every: Sequence[Sequence[Piece]], number: int) -> list[ConfigError]:
    """Which pieces of a part are not UTF-8."""
    found = []
    for piece in every[number]:
        try:
            read_piece(piece)
        except ConfigError as rejected:
            found.append(rejected)
    return found


def read_byte_part(every: Sequence[Sequence[Piece]], number: int) -> tuple[bytes, int]:
    """(tokens, bytes of text): of bytes the same."""
    read = b""
    for file, start, end in every[number]:
        with open(file, "rb") as stream:
            stream.seek(start)
            read += stream.read(end - start)
    return read, len(read)


def tokenize_part(
    every: Sequence[Sequence[Piece]], tokenizer: "Tokenizer", dtype: str, number: int
) -> tuple[bytes, int]:
    """(tokens as bytes of `dtype`, bytes of text) of a part. Raises `ConfigError`."""
    import numpy as np

    end_of_text, tokens, size = end_of_text_token(tokenizer), [], 0
    for piece in every[number]:
        text, length, ends = read_piece(piece)
        tokens.append(np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype))
        size += length
        if ends and end_of_text is not None:
            tokens.append(np.array([end_of_text], dtype))
    return np.concatenate(tokens).tobytes(), size


def load_tokenizer(text: str, source: str) -> "Tokenizer":
    """A tokenizer from the text of its tokenizer.json. Raises `ConfigError`."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            "tokenizer", source, f"is the tokenizer.json of a tokenizer: {error}", "tokenizer=bpe"
        ) from None


def train_bpe(every: Sequence[Sequence[Piece]], vocab_size: int) -> str:
    """The tokenizer.json of a byte-level BPE that is trained on (some of) the pieces. Raises `ConfigError`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT_TOKENS[0]], initial_alphabet=alphabet, show_progress=False
    )  # type: ignore

    chosen = [piece for part in every for piece in part]
    size = sum(end - start for _, start, end in chosen)

    def some() -> Iterator[str]:
        for piece in chosen[:: max(1, size // MAX_TRAINING_BYTES)]:
            yield read_piece(piece)[0]

    tokenizer.train_from_iterator(some(), trainer)
    return tokenizer.to_str(pretty=True)


def end_of_text_token(tokenizer: "Tokenizer") -> int | None:
    """The token that is put after each file."""
    return next((number for name in END_OF_TEXT_TOKENS if (number := tokenizer.token_to_id(name)) is not None), None)


def vocabulary_size(tokenizer: "Tokenizer") -> int:
    """One more than the largest number of a token."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def dtype_for(vocab_size: int) -> str:
    """The smallest that holds all tokens."""
    return "uint8" if vocab_size <= 256 else "uint16" if vocab_size <= 65536 else "uint32"


def describe_tokens(data_files: Any, files: Sequence[str], *, tokenizer: str, text: str) -> dict[str, Any]:
    """What is noted beside the tokens, as far as it is known before they are made."""
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


def _cut(stream: Any, at: int, size: int) -> int:
    """The first place from `at` on where a line begins, and not with white space: no token crosses it, as a rule.

    Where no line begins within a piece: the next character.
    """
    if at in (0, size):
        return at
    stream.seek(at)
    following = stream.read(PIECE_BYTES)
    found = following.find(b"\n")
    while 0 <= found < len(following) - 1:
        if following[found + 1 : found + 2].strip():
            return at + found + 1
        found = following.find(b"\n", found + 1)
    if len(following) < PIECE_BYTES:
        return size
    return at + next((i for i in range(4) if following[i] & 0xC0 != 0x80), 0)
