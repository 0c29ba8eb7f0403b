"""Classification of time series of different lengths with an LSTM."""

import pickle
from typing import NamedTuple

import lightning as L
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import F1Score


class SeriesBatch(NamedTuple):
    series: torch.Tensor  # (batch, longest, channels)
    lengths: torch.Tensor  # (batch,)
    labels: torch.Tensor  # (batch,)


class SeriesDataset(Dataset):
    def __init__(self, path):
        with open(path, "rb") as f:
            self.samples = pickle.load(f)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        series, label = self.samples[i]
        return torch.as_tensor(series, dtype=torch.float32), label


def collate(samples):
    series, labels = zip(*samples, strict=True)
    return SeriesBatch(
        series=pad_sequence(series, batch_first=True),
        lengths=torch.tensor([len(s) for s in series]),
        labels=torch.tensor(labels),
    )


class BucketBatchSampler(Sampler[list[int]]):
    """Batches of series of similar length. The last batch of each bucket may be smaller."""

    def __init__(self, lengths, batch_size, bucket_size):
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        self.buckets = [order[i : i + bucket_size] for i in range(0, len(order), bucket_size)]
        self.batch_size = batch_size

    def __len__(self):
        return sum(-(-len(bucket) // self.batch_size) for bucket in self.buckets)

    def __iter__(self):
        for b in torch.randperm(len(self.buckets)).tolist():
            bucket = self.buckets[b]
            shuffled = [bucket[i] for i in torch.randperm(len(bucket)).tolist()]
            for start in range(0, len(shuffled), self.batch_size):
                yield shuffled[start : start + self.batch_size]


class SeriesDataModule(L.LightningDataModule):
    def __init__(self, train_file, val_file, test_file=None, batch_size=32, bucket_size=100, num_workers=0):
        super().__init__()
        self.train_file = train_file
        self.val_file = val_file
        self.test_file = test_file
        self.batch_size = batch_size
        self.bucket_size = bucket_size
        self.num_workers = num_workers

    def setup(self, stage):
        if stage in ("fit", "validate"):
            self.train_set = SeriesDataset(self.train_file)
            self.val_set = SeriesDataset(self.val_file)
        if stage == "test":
            self.test_set = SeriesDataset(self.test_file)

    def train_dataloader(self):
        lengths = [len(series) for series, _ in self.train_set.samples]
        return DataLoader(
            self.train_set,
            batch_sampler=BucketBatchSampler(lengths, self.batch_size, self.bucket_size),
            collate_fn=collate,
            num_workers=self.num_workers,
        )

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size, collate_fn=collate, num_workers=self.num_workers)

    def test_dataloader(self):
        return DataLoader(self.test_set, batch_size=self.batch_size, collate_fn=collate, num_workers=self.num_workers)


class SeriesClassifier(L.LightningModule):
    def __init__(self, input_size, hidden_size, num_classes, num_layers=1, class_weights=None, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.lstm = nn.LSTM(input_size, hidden_size, num_layers=num_layers, batch_first=True)
        self.classifier = nn.Linear(hidden_size, num_classes)
        weight = torch.tensor(class_weights) if class_weights is not None else None
        self.criterion = nn.CrossEntropyLoss(weight=weight)
        self.train_f1 = F1Score(task="multiclass", num_classes=num_classes, average="macro")
        self.val_f1 = F1Score(task="multiclass", num_classes=num_classes, average="macro")
        self.test_f1 = F1Score(task="multiclass", num_classes=num_classes, average="macro")

    def forward(self, series, lengths):
        packed = pack_padded_sequence(series, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (h_n, _) = self.lstm(packed)
        return self.classifier(h_n[-1])

    def training_step(self, batch, batch_idx):
        logits = self(batch.series, batch.lengths)
        loss = self.criterion(logits, batch.labels)
        self.log("train_loss", loss)
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.train_f1(outputs["logits"], batch.labels)
        self.log("train_f1", self.train_f1, on_step=False, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        logits = self(batch.series, batch.lengths)
        self.val_f1(logits, batch.labels)
        self.log("val_loss", self.criterion(logits, batch.labels))
        self.log("val_f1", self.val_f1, prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.test_f1(self(batch.series, batch.lengths), batch.labels)
        self.log("test_f1", self.test_f1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
