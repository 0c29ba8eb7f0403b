"""Local text for a language model of Hugging Face, read and tokenized by `datasets`."""

from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
from hpc.checkpoint.tokenizer_folder import load_tokenizer, reject_missing_folder
from hpc.config import extras
from hpc.config.errors import ConfigError, first_line
from hpc.data.text_files import list_examples
from torch.utils.data import DataLoader

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
        train_files, eval_files, self.kind = list_examples(files, val_files)
        reject_missing_folder(tokenizer)
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
        from datasets.exceptions import DatasetGenerationError  # pyright: ignore[reportMissingImports]

        tokenizer = load_tokenizer(self.tokenizer)
        try:
            texts = load_dataset(self.kind, data_files=self.files)
        except DatasetGenerationError as error:
            rule = f"must be .txt in UTF-8, or JSON objects with the same keys: {first_line(error.__cause__ or error)}"
            raise ConfigError("data.files", None, rule, "correct the files") from error
        if "test" not in self.files:
            if texts["train"].num_rows < 2:
                rule = "must hold two examples or more, as a tenth of them is held out for validation"
                raise ConfigError("data.files", self.files["train"][0], rule, "more text, or data.val_files=<others>")
            texts = texts["train"].train_test_split(test_size=0.1, seed=self.seed)
        columns = texts["train"].column_names
        tokens = texts.map(tokenize, batched=True, remove_columns=columns, fn_kwargs={"tokenizer": tokenizer})
        for name, split in tokens.items():  # each with a rest of its own
            tokens[name] = split.map(cut, batched=True, fn_kwargs={"block_size": self.block_size, "rest": []})
        return tokens.with_format("torch")


def tokenize(rows: dict[str, list[str]], tokenizer: Any) -> dict[str, list[list[int]]]:
    """Return the tokens of each text, with its end. Raise `ConfigError` if an example has no text."""
    texts = rows.get("text", [])
    if not texts or not all(isinstance(text, str) for text in texts):
        rule = "must hold objects with the key `text`, a string, and one of them has none"
        raise ConfigError("data.files", None, rule, 'lines such as {"text": "an example"}')
    if tokenizer is None:
        return {"input_ids": [[*f"{text}{END}".encode()] for text in texts]}
    texts = [text + (tokenizer.eos_token or END) for text in texts]
    return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}


def cut(rows: dict[str, list[list[int]]], block_size: int, rest: list[int]) -> dict[str, list[list[int]]]:
    """Return the tokens of `rest` and of all rows, in blocks of one size; what is left is the next call's `rest`."""
    tokens = [*rest, *chain.from_iterable(rows["input_ids"])]
    end = len(tokens) - len(tokens) % block_size
    rest[:] = tokens[end:]
    blocks = [tokens[i : i + block_size] for i in range(0, end, block_size)]
    return {"input_ids": blocks, "labels": blocks}
