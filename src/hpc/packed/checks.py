"""Checks of the packed files, text and tokens that a config names, made before a job is submitted. No torch here.

`check_packed_images` and `check_text_files` are the `_check_` of configs/data/packed.yaml and text.yaml. They return
values for keys that are null. `cfg` is the whole config.
"""

from typing import Any

from omegaconf import DictConfig

from hpc.config.errors import ConfigError
from hpc.config.sections import Config
from hpc.data.file_checks import reject_large_batch
from hpc.data.image_files import reject_fewer_outputs_than_classes
from hpc.data.text_files import is_token_file, list_text_files
from hpc.packed.packed_file import verify_checksums
from hpc.packed.packed_images import read_packed_images, reject_image_size_mismatch
from hpc.packed.staging import require_node_local_key
from hpc.packed.token_files import (
    map_file,
    num_tokens,
    read_token_notes,
    reject_tokens_outside,
    token_parts,
    vocab_size_and_bytes_per_token,
    windows_of_split,
)

MAX_CHECKED_PARTS = 8  # of a packed file, each about 16 MB
MAX_CHECKED_TOKENS = 1_000_000  # at each end of a token file; fewer per file if there are many


def check_packed_images(node: DictConfig, cfg: Config) -> dict[str, Any] | None:
    """Reject a `data.file` that cannot be trained on. A few of its parts are compared with their checksums."""
    packed = read_packed_images(str(node.file))
    reject_image_size_mismatch(packed, node.image_size)
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
        if read_token_notes(file):
            verify_checksums(token_parts(file), config_key="data.files", max_parts=MAX_CHECKED_PARTS)
    require_node_local_key(node.stage, node.node_local)
    for file in files + val_files if node.stage else ():
        token_parts(file)  # rejects a file that was not packed
    return {"vocab_size": vocab_size, "bytes_per_token": bytes_per_token}


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
