"""Checks of the files that a config names, made on the login node before a job is submitted. No torch here.

`check_image_folder`, `check_packed_images`, `check_text_files` and `check_local_text` are the `_check_` of
configs/data/images.yaml, packed.yaml, text.yaml and huggingface.yaml. They return values for keys that are null. `cfg`
is the whole config.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hpc.checkpoint.tokenizer_folder import has_tokenizer, reject_missing_folder
from hpc.config.errors import ConfigError, make_printable
from hpc.config.sections import Config
from hpc.data import packed_files
from hpc.data.file_parts import verify_checksums
from hpc.data.image_files import decode_image, list_images, reject_fewer_outputs_than_classes
from hpc.data.staging import require_node_local_key
from hpc.data.text_files import (
    is_token_file,
    list_examples,
    list_text_files,
    map_file,
    num_tokens,
    reject_tokens_outside,
    windows_of_split,
)
from hpc.data.token_files import read_metadata, token_parts, vocab_size_and_bytes_per_token
from hpc.launch.placement import read_placement

MAX_CHECKED_IMAGES = 2000
MAX_CHECKED_PARTS = 8  # of a packed file, each about 16 MB
MAX_CHECKED_TOKENS = 1_000_000  # at each end of a token file; fewer per file if there are many


def check_image_folder(node: DictConfig, cfg: Config) -> dict[str, Any] | None:
    """Reject a `data.dir` that cannot be trained on. Up to 2000 of its images, evenly spread, are decoded."""
    classes, splits, ignored = list_images(node.get("dir"))
    if ignored:
        _print_note(ignored)
    if node.num_classes is not None:
        reject_fewer_outputs_than_classes(node.num_classes, len(classes))
    reject_large_batch(node.global_batch_size, len(splits["train"]))
    files = list(dict.fromkeys(file for samples in splits.values() for file, _ in samples))
    num = min(len(files), MAX_CHECKED_IMAGES)
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(decode_image, [files[i * len(files) // num] for i in range(num)]):
            pass  # the loop raises the error of each thread here
    return {"num_classes": len(classes)} if node.num_classes is None else None


def check_packed_images(node: DictConfig, cfg: Config) -> dict[str, Any] | None:
    """Reject a `data.file` that cannot be trained on. A few of its parts are compared with their checksums."""
    packed = packed_files.read_packed_header(str(node.file))
    packed_files.reject_image_size_mismatch(packed, node.image_size)
    if node.num_classes is not None:
        reject_fewer_outputs_than_classes(node.num_classes, len(packed.classes))
    first, end = packed.splits["train"]
    reject_large_batch(node.global_batch_size, end - first)
    require_node_local_key(node.stage, node.node_local)
    verify_checksums(packed.parts, config_key="data.file", max_parts=MAX_CHECKED_PARTS)
    return {"num_classes": len(packed.classes), "image_size": packed.image_size}


def check_text_files(node: DictConfig, cfg: Config) -> dict[str, Any] | None:
    """Reject text or token files that cannot be trained on. Of token files, both ends are read."""
    files, val_files = list_text_files(node.get("files"), node.get("val_files"))
    _reject_short_text(node, files, val_files=val_files)
    vocab_size, bytes_per_token = vocab_size_and_bytes_per_token(files + val_files)
    limit = node.vocab_size or vocab_size or 0
    if not is_token_file(files[0]):
        reject_tokens_outside(limit, smallest=0, largest=255, file=files[0])
    num = max(10_000, MAX_CHECKED_TOKENS // len(files + val_files))
    for file in files + val_files if is_token_file(files[0]) else ():
        for end in (map_file(file)[:num], map_file(file)[-num:]):
            reject_tokens_outside(limit, smallest=int(end.min()), largest=int(end.max()), file=file)
        if read_metadata(file):
            verify_checksums(token_parts(file), config_key="data.files", max_parts=MAX_CHECKED_PARTS)
    require_node_local_key(node.stage, node.node_local)
    for file in files + val_files if node.stage else ():
        token_parts(file)  # rejects a file that was not packed
    return {"vocab_size": vocab_size, "bytes_per_token": bytes_per_token}


def check_local_text(node: DictConfig, cfg: Config) -> None:
    """Reject files that are no text or cannot be read, and a missing folder. Say if it has no tokenizer."""
    list_examples(node.get("files"), node.get("val_files"))
    tokenizer = str(node.tokenizer)
    if tokenizer != OmegaConf.select(cfg.model, "folder"):  # which the check of the model rejects
        reject_missing_folder(tokenizer)
    folder = Path(tokenizer).expanduser()
    if folder.is_dir() and not has_tokenizer(folder):
        _print_note(f"{tokenizer} has no tokenizer: bytes are the tokens")


def reject_large_batch(global_batch_size: int, num_samples: int) -> None:
    """Raise `ConfigError` for a batch larger than the training set: an epoch leaves its last, incomplete batch out."""
    if global_batch_size > num_samples:
        rule = f"cannot be larger than the training set, which has {num_samples} samples"
        raise ConfigError("data.global_batch_size", global_batch_size, rule, f"data.global_batch_size={num_samples}")


def reject_few_samples(split: str, num_samples: int, *, num_ranks: int) -> None:
    """Raise `ConfigError` if a rank has no sample to evaluate: none is repeated to fill a batch."""
    if num_samples < num_ranks:
        rule = f"must have a sample of each split for each of the {num_ranks} ranks; {split} has {num_samples}"
        fix = f"more samples for {split}, or fewer trainer.num_nodes or trainer.devices"
        raise ConfigError("data", None, rule, fix)


def _print_note(note: str) -> None:
    """Print a note on stderr, on rank 0 only."""
    if read_placement(os.environ).rank == 0:
        print(make_printable(f"note: {note}"), file=sys.stderr, flush=True)


def _reject_short_text(node: DictConfig, files: list[str], *, val_files: list[str]) -> None:
    """Raise `ConfigError` if a split has no window of tokens, or training has fewer than a batch."""
    for split in ("train", "val", "test"):
        split_files, windows = windows_of_split(split, files, val_files=val_files, block_size=node.block_size)
        if not windows:
            num = sum(map(num_tokens, split_files))
            window = f"a window of block_size + 1 = {node.block_size + 1} tokens"
            rule = f"must hold {window} for {split}, and hold only {num} tokens for it"
            fix = "more text, or data.val_files=..., or a smaller data.block_size"
            raise ConfigError("data.files", node.files, rule, fix)
        if split == "train":
            reject_large_batch(node.global_batch_size, len(windows))
