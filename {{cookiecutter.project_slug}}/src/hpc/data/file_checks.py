"""What can be told on the login node about the files a config points at. Imports no torch.

`image_folder`, `packed_images` and `text_files` are the `_check_` of configs/data/images.yaml, packed.yaml, text.yaml.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from omegaconf import DictConfig

from hpc.config.errors import ConfigError, make_printable
from hpc.data import packed_files
from hpc.data.file_parts import verify_parts
from hpc.data.image_files import decode_image, list_images, reject_few_classes
from hpc.data.staging import reject_missing_folder
from hpc.data.text_files import is_token_file, list_text, map_file, num_tokens, reject_tokens_outside, split_text
from hpc.data.token_files import read_notes, read_vocabulary, token_parts
from hpc.launch.placement import read_placement

MAX_CHECKED_IMAGES = 2000
MAX_CHECKED_PARTS = 8  # of a packed file, each about 16 MB
MAX_CHECKED_TOKENS = 1_000_000  # at each end of a token file; of many files less each


def check_image_folder(node: DictConfig, cfg: DictConfig) -> dict[str, Any] | None:
    """Reject a `data.dir` that cannot be trained on; up to 2000 images, spread evenly, are decoded to know."""
    classes, splits, left_out = list_images(node.get("dir"))
    if left_out and read_placement(os.environ).rank == 0:
        print(make_printable(f"note: {left_out}"), file=sys.stderr, flush=True)
    if node.num_classes is not None:
        reject_few_classes(node.num_classes, len(classes))
    reject_large_batch(node.global_batch_size, len(splits["train"]))
    files = list(dict.fromkeys(file for samples in splits.values() for file, _ in samples))
    num = min(len(files), MAX_CHECKED_IMAGES)
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(decode_image, [files[i * len(files) // num] for i in range(num)]):
            pass  # what a thread rejects is raised here
    return {"num_classes": len(classes)} if node.num_classes is None else None


def check_packed_images(node: DictConfig, cfg: DictConfig) -> dict[str, Any] | None:
    """Reject a `data.file` that cannot be trained on; a few of its parts are compared with their checksums."""
    packed = packed_files.read(str(node.file))
    packed_files.reject_other_size(packed, node.image_size)
    if node.num_classes is not None:
        reject_few_classes(node.num_classes, len(packed.classes))
    first, end = packed.splits["train"]
    reject_large_batch(node.global_batch_size, end - first)
    reject_missing_folder(node.stage, node.node_local)
    verify_parts(packed.parts, "data.file", max_parts=MAX_CHECKED_PARTS)
    return {"num_classes": len(packed.classes), "image_size": packed.image_size}


def check_text_files(node: DictConfig, cfg: DictConfig) -> dict[str, Any] | None:
    """Reject text or token files that cannot be trained on. Of token files both ends are read."""
    files, val_files = list_text(node.get("files"), node.get("val_files"))
    for split in ("train", "val", "test"):
        chosen, windows = split_text(split, files, val_files=val_files, block_size=node.block_size)
        if not windows:
            found = sum(map(num_tokens, chosen))
            rule = f"{split} needs a window of block_size + 1 = {node.block_size + 1} tokens; the files have {found}"
            raise ConfigError(
                "data.files", node.files, rule, "more text, or data.val_files=..., or a smaller data.block_size"
            )
        if split == "train":
            reject_large_batch(node.global_batch_size, len(windows))
    vocab_size, bytes_per_token = read_vocabulary(files + val_files)
    limit = node.vocab_size or vocab_size or 0
    if not is_token_file(files[0]):
        reject_tokens_outside(limit, smallest=0, largest=255, file=files[0])
    num = max(10_000, MAX_CHECKED_TOKENS // len(files + val_files))
    for file in files + val_files if is_token_file(files[0]) else ():
        for end in (map_file(file)[:num], map_file(file)[-num:]):
            reject_tokens_outside(limit, smallest=int(end.min()), largest=int(end.max()), file=file)
        if read_notes(file):
            verify_parts(token_parts(file), "data.files", max_parts=MAX_CHECKED_PARTS)
    reject_missing_folder(node.stage, node.node_local)
    for file in files + val_files if node.stage else ():
        token_parts(file)  # rejects what was not packed
    return {"vocab_size": vocab_size, "bytes_per_token": bytes_per_token}


def reject_large_batch(global_batch_size: int, num_samples: int) -> None:
    """An incomplete batch is left out of an epoch, so one that is larger than the training set would never come."""
    if global_batch_size > num_samples:
        rule = f"the training set has {num_samples} samples, a batch cannot be larger"
        raise ConfigError("data.global_batch_size", global_batch_size, rule, f"data.global_batch_size={num_samples}")


def reject_few_samples(split: str, num_samples: int, *, num_ranks: int) -> None:
    """Nothing is repeated to fill a batch, so a rank without a sample would have nothing to evaluate."""
    if num_samples < num_ranks:
        rule = f"each of the {num_ranks} ranks must have a sample to evaluate; {split} has {num_samples}"
        raise ConfigError(
            "data", None, rule, f"more samples for {split}, or fewer trainer.num_nodes or trainer.devices"
        )
