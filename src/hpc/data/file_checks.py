"""Checks of the files that a config names, made on the login node before a job is submitted. No torch here.

`check_image_folder` and `check_local_text` are the `_check_` of configs/data/images.yaml and huggingface.yaml. They
return values for keys that are null. `cfg` is the whole config.
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
from hpc.data.image_files import decode_image, list_images, reject_fewer_outputs_than_classes
from hpc.data.text_files import list_examples
from hpc.launch.placement import read_placement

MAX_CHECKED_IMAGES = 2000


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
