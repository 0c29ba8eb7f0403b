"""The tokenizer in a local folder of Hugging Face. No torch here."""

from pathlib import Path
from typing import Any

from hpc.config.errors import ConfigError, first_line

# Of any of these, transformers makes a tokenizer; a slow one may have nothing but its vocabulary.
FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer."""
    return any((folder / name).is_file() for name in FILES)


def reject_missing_folder(folder: str) -> None:
    """Raise `ConfigError` unless `data.tokenizer` is a folder."""
    if not Path(folder).expanduser().is_dir():
        rule = "must be a local folder, as nothing is downloaded"
        raise ConfigError("data.tokenizer", folder, rule, "data.tokenizer=<the folder of the model>")


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of transformers in a folder; None if there is none.

    Raises:
        ConfigError: there are files of a tokenizer, and none can be made of them.
    """
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

    if not has_tokenizer(folder):
        return None
    fix = "a whole tokenizer.json in this folder, as AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a damaged file: ValueError, KeyError, or, from tokenizers, Exception itself
        rule = f"must have a tokenizer that transformers can load without code from that folder: {first_line(error)}"
        raise ConfigError(str(folder), None, rule, fix) from error
    # If its own files are missing, transformers makes a tokenizer of special tokens, which leaves out all text.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ConfigError(str(folder), None, "must have the vocabulary of its tokenizer, not only special tokens", fix)
    return tokenizer
