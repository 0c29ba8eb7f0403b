"""SimCLR-like contrastive learning with a queue of negatives, and a kNN classifier as validation."""

import random
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


def augment(img: np.ndarray) -> np.ndarray:
    """Random crop, flip, colours, and noise on an image of shape (3, H, W)."""
    _, h, w = img.shape
    size = random.randint(int(0.7 * h), h)
    top, left = random.randint(0, h - size), random.randint(0, w - size)
    rows = top + np.arange(h) * size // h
    cols = left + np.arange(w) * size // w
    img = img[:, rows][:, :, cols]
    if random.random() < 0.5:
        img = img[:, :, ::-1]
    img = img * np.random.uniform(0.4, 1.6, (3, 1, 1))
    img = img + np.random.normal(0, 0.05, img.shape)
    return np.ascontiguousarray(img, dtype=np.float32)


class TwoViewDataset(Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        img = self.images[idx]
        return torch.from_numpy(augment(img)), torch.from_numpy(augment(img))


class LabelledDataset(Dataset):
    def __init__(self, images, labels):
        self.images = images
        self.labels = labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        return torch.from_numpy(self.images[idx]), int(self.labels[idx])


class ContrastiveDataModule(L.LightningDataModule):
    def __init__(self, data_dir: str = "data", batch_size: int = 64, num_workers: int = 4):
        super().__init__()
        self.data_dir = Path(data_dir)
        self.batch_size = batch_size
        self.num_workers = num_workers

    def _read(self, split):
        images = np.load(self.data_dir / f"{split}_images.npy").astype(np.float32) / 255
        return images, np.load(self.data_dir / f"{split}_labels.npy")

    def setup(self, stage=None):
        train_images, train_labels = self._read("train")
        self.ssl_dataset = TwoViewDataset(train_images)
        self.knn_bank = LabelledDataset(train_images, train_labels)
        self.knn_query = LabelledDataset(*self._read("val"))

    def train_dataloader(self):
        return DataLoader(
            self.ssl_dataset,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.num_workers,
        )

    def val_dataloader(self):
        # the first fills the feature bank, the second is classified by it
        return [
            DataLoader(self.knn_bank, batch_size=self.batch_size),
            DataLoader(self.knn_query, batch_size=self.batch_size),
        ]


class ContrastiveModel(L.LightningModule):
    def __init__(
        self,
        feature_dim: int = 64,
        proj_dim: int = 32,
        queue_size: int = 1024,
        temperature: float = 0.2,
        encoder_lr: float = 0.05,
        projector_lr: float = 0.1,
        knn_k: int = 5,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False

        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, feature_dim, 3, stride=2, padding=1),
            nn.BatchNorm2d(feature_dim),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(
            nn.Linear(feature_dim, feature_dim),
            nn.BatchNorm1d(feature_dim),
            nn.ReLU(),
            nn.Linear(feature_dim, proj_dim),
        )

        # create the queue
        self.register_buffer("queue", F.normalize(torch.randn(proj_dim, queue_size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

        self.bank_features, self.bank_labels = [], []
        self.query_features, self.query_labels = [], []

    def forward(self, x):
        return self.encoder(x)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        batch_size = keys.shape[0]
        ptr = int(self.queue_ptr)
        columns = torch.arange(ptr, ptr + batch_size, device=keys.device) % self.hparams.queue_size
        self.queue[:, columns] = keys.T
        self.queue_ptr[0] = (ptr + batch_size) % self.hparams.queue_size

    def info_nce(self, q, k):
        # negatives: the other images of the batch, and the queue
        l_batch = q @ k.T
        l_queue = q @ self.queue.clone().detach()
        logits = torch.cat([l_batch, l_queue], dim=1) / self.hparams.temperature
        labels = torch.arange(logits.shape[0], device=self.device)
        return F.cross_entropy(logits, labels)

    def training_step(self, batch, batch_idx):
        view_1, view_2 = batch
        opt_encoder, opt_projector = self.optimizers()

        z_1 = F.normalize(self.projector(self.encoder(view_1)), dim=1)
        z_2 = F.normalize(self.projector(self.encoder(view_2)), dim=1)
        loss = 0.5 * (self.info_nce(z_1, z_2) + self.info_nce(z_2, z_1))

        opt_encoder.zero_grad()
        opt_projector.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(opt_encoder, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        opt_encoder.step()
        opt_projector.step()
        self._dequeue_and_enqueue(z_2.detach())

        self.log("train_loss_ssl", loss, on_step=True, on_epoch=True, prog_bar=True)

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        images, labels = batch
        features = F.normalize(self(images), dim=1)
        if dataloader_idx == 0:
            self.bank_features.append(features)
            self.bank_labels.append(labels)
        else:
            self.query_features.append(features)
            self.query_labels.append(labels)

    def on_validation_epoch_end(self):
        bank, bank_labels = torch.cat(self.bank_features), torch.cat(self.bank_labels)
        query, query_labels = torch.cat(self.query_features), torch.cat(self.query_labels)
        neighbours = (query @ bank.T).topk(min(self.hparams.knn_k, len(bank)), dim=1).indices
        pred = bank_labels[neighbours].mode(dim=1).values
        self.log("knn_acc", (pred == query_labels).float().mean(), prog_bar=True)

        self.bank_features.clear()
        self.bank_labels.clear()
        self.query_features.clear()
        self.query_labels.clear()

    def configure_optimizers(self):
        opt_encoder = torch.optim.SGD(self.encoder.parameters(), lr=self.hparams.encoder_lr, momentum=0.9)
        opt_projector = torch.optim.SGD(self.projector.parameters(), lr=self.hparams.projector_lr, momentum=0.9)
        sch_encoder = torch.optim.lr_scheduler.StepLR(opt_encoder, step_size=2, gamma=0.7)
        sch_projector = torch.optim.lr_scheduler.StepLR(opt_projector, step_size=1, gamma=0.9)
        return [opt_encoder, opt_projector], [sch_encoder, sch_projector]
