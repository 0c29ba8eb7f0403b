"""Local text for a language model of Hugging Face, read and tokenized by `datasets`."""

from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from hpc.checkpoint.huggingface_folder import has_tokenizer
from hpc.config import extras
from hpc.config.errors import ConfigError
from hpc.data.text_files import list_text_files

END = "\n"  # of an example, if the tokenizer has no token for it


class LocalText(L.LightningDataModule):
    """Blocks of tokens, cut from all examples laid end to end: {"input_ids": (batch, block_size), "labels": the same}.

    `datasets` keeps what it has tokenized in its cache ($HF_HOME), which rank 0 fills.

    Args:
        files: .txt files, of which each line is an example, or .json and .jsonl, of objects with the key `text`.
        val_files: the same, for validation and test; None: a tenth of the examples.
        tokenizer: the folder that has one; if it has none, bytes are the tokens.
        seed: draws the tenth.
    """

    def __init__(
        self,
        files: str | list[str],
        val_files: str | list[str] | None = None,
        *,
        tokenizer: str,
        block_size: int = 512,
        batch_size: int = 8,
        num_workers: int = 0,
        seed: int = 1,
    ) -> None:
        super().__init__()
        extras.require("huggingface", "data", type(self).__name__)
        train_files, eval_files = list_text_files(files, val_files)
        self.files = {"train": train_files, **({"test": eval_files} if eval_files else {})}
        self.tokenizer = Path(tokenizer).expanduser()
        self.block_size = block_size
        self.seed = seed
        self.loading: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers}
        self.prepare_data_per_node = False  # all nodes see the cache

    def prepare_data(self) -> None:
        self._load()

    def setup(self, stage: str) -> None:
        self.blocks = self._load()
        if empty := [name for name, blocks in self.blocks.items() if not len(blocks)]:
            rule = f"must leave a block for training and one for validation; there is none for {empty[0]}"
            raise ConfigError("data.block_size", self.block_size, rule, "a smaller data.block_size, or more text")

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.blocks["train"], shuffle=True, **self.loading)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.blocks["test"], **self.loading)

    test_dataloader = val_dataloader

    def _load(self) -> Any:
        """Return datasets of blocks, "train" and "test"."""
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
        from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

        kind = "text" if self.files["train"][0].endswith(".txt") else "json"
        texts = load_dataset(kind, data_files=self.files)
        if "test" not in self.files:
            texts = texts["train"].train_test_split(test_size=0.1, seed=self.seed)
        tokenizer = None
        if has_tokenizer(self.tokenizer):
            tokenizer = AutoTokenizer.from_pretrained(self.tokenizer, local_files_only=True, trust_remote_code=False)
        columns = texts["train"].column_names
        tokens = texts.map(tokenize, batched=True, remove_columns=columns, fn_kwargs={"tokenizer": tokenizer})
        return tokens.map(cut, batched=True, fn_kwargs={"block_size": self.block_size}).with_format("torch")


def tokenize(rows: dict[str, list[str]], tokenizer: Any) -> dict[str, list[list[int]]]:
    """Return the tokens of each text, with its end."""
    if tokenizer is None:
        return {"input_ids": [[*f"{text}{END}".encode()] for text in rows["text"]]}
    texts = [text + (tokenizer.eos_token or END) for text in rows["text"]]
    return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}


def cut(rows: dict[str, list[list[int]]], block_size: int) -> dict[str, list[list[int]]]:
    """Return the tokens of all rows, in blocks of one size; the rest is dropped."""
    tokens = list(chain.from_iterable(rows["input_ids"]))
    blocks = [tokens[i : i + block_size] for i in range(0, len(tokens) - block_size + 1, block_size)]
    return {"input_ids": blocks, "labels": blocks}
