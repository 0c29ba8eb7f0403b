"""Causal language modelling with Hugging Face's GPT-2 in Lightning."""

import math
import os
from itertools import chain

import lightning as L
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_linear_schedule_with_warmup

EOS = 256
VOCAB_SIZE = 257


def tokenize_function(examples):
    """Byte-level tokens: every UTF-8 byte is a token, and each text ends with EOS."""
    input_ids = [[*text.encode("utf-8"), EOS] for text in examples["text"]]
    return {"input_ids": input_ids, "attention_mask": [[1] * len(ids) for ids in input_ids]}


class TextDataModule(L.LightningDataModule):
    def __init__(self, data_dir: str, block_size: int = 128, batch_size: int = 8, num_workers: int = 0):
        super().__init__()
        self.data_dir = data_dir
        self.block_size = block_size
        self.batch_size = batch_size
        self.num_workers = num_workers

    def _load(self):
        data_files = {
            "train": os.path.join(self.data_dir, "train.jsonl"),
            "validation": os.path.join(self.data_dir, "validation.jsonl"),
        }
        return load_dataset("json", data_files=data_files)

    def prepare_data(self):
        self._load()

    def setup(self, stage: str):
        raw_datasets = self._load()
        tokenized = raw_datasets.map(tokenize_function, batched=True, remove_columns=["text"])
        self.dataset = tokenized.map(self.group_texts, batched=True)

    def group_texts(self, examples):
        # Concatenate all texts, and drop the small remainder.
        concatenated = {k: list(chain(*examples[k])) for k in examples}
        total_length = len(concatenated["input_ids"])
        total_length = (total_length // self.block_size) * self.block_size
        result = {
            k: [t[i : i + self.block_size] for i in range(0, total_length, self.block_size)]
            for k, t in concatenated.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    def train_dataloader(self):
        return DataLoader(
            self.dataset["train"],
            shuffle=True,
            collate_fn=default_data_collator,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
        )

    def val_dataloader(self):
        return DataLoader(
            self.dataset["validation"],
            collate_fn=default_data_collator,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
        )


class GPT2LanguageModel(L.LightningModule):
    def __init__(
        self,
        model_name_or_path: str | None = None,
        n_layer: int = 12,
        n_head: int = 12,
        n_embd: int = 768,
        n_positions: int = 1024,
        learning_rate: float = 5e-5,
        warmup_steps: int = 0,
        weight_decay: float = 0.0,
    ):
        super().__init__()
        self.save_hyperparameters()
        if model_name_or_path is not None:
            self.model = GPT2LMHeadModel.from_pretrained(model_name_or_path)
        else:
            config = GPT2Config(
                vocab_size=VOCAB_SIZE,
                n_positions=n_positions,
                n_embd=n_embd,
                n_layer=n_layer,
                n_head=n_head,
                bos_token_id=EOS,
                eos_token_id=EOS,
            )
            self.model = GPT2LMHeadModel(config)

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        outputs = self(**batch)
        loss = outputs[0]
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        outputs = self(**batch)
        self.log("val_loss", outputs.loss, prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self):
        val_loss = self.trainer.callback_metrics["val_loss"]
        self.log("perplexity", math.exp(min(val_loss.item(), 20)))

    def configure_optimizers(self):
        """Prepare optimizer and schedule (linear warmup and decay)."""
        no_decay = ["bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"]
        optimizer_grouped_parameters = [
            {
                "params": [p for n, p in self.model.named_parameters() if not any(nd in n for nd in no_decay)],
                "weight_decay": self.hparams.weight_decay,
            },
            {
                "params": [p for n, p in self.model.named_parameters() if any(nd in n for nd in no_decay)],
                "weight_decay": 0.0,
            },
        ]
        optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=self.hparams.learning_rate)

        scheduler = get_linear_schedule_with_warmup(
            optimizer,
            num_warmup_steps=self.hparams.warmup_steps,
            num_training_steps=self.trainer.estimated_stepping_batches,
        )
        scheduler = {"scheduler": scheduler, "interval": "step", "frequency": 1}
        return [optimizer], [scheduler]
