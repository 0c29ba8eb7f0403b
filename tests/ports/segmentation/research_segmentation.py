"""Semantic segmentation of images, with samples of a rare class drawn more often."""

import os

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from torchmetrics import JaccardIndex


class SegmentationDataset(Dataset):
    """root/images/*.png and root/masks/*.png with the same names; the names of a split are in root/<split>.txt"""

    def __init__(self, root, split):
        self.root = root
        with open(os.path.join(root, f"{split}.txt")) as f:
            self.names = f.read().split()

    def __len__(self):
        return len(self.names)

    def load_mask(self, i):
        return np.array(Image.open(os.path.join(self.root, "masks", self.names[i])))

    def __getitem__(self, i):
        image = np.array(Image.open(os.path.join(self.root, "images", self.names[i])).convert("RGB"))
        image = torch.from_numpy(image).permute(2, 0, 1).float() / 255.0
        mask = torch.from_numpy(self.load_mask(i)).long()
        return image, mask


class SegmentationData(pl.LightningDataModule):
    def __init__(self, root="data", batch_size=16, num_workers=0, rare_class=2, rare_weight=4.0):
        super().__init__()
        self.root = root
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.rare_class = rare_class
        self.rare_weight = rare_weight

    def setup(self, stage=None):
        self.train_ds = SegmentationDataset(self.root, "train")
        self.val_ds = SegmentationDataset(self.root, "val")
        self.test_ds = SegmentationDataset(self.root, "test")

    def train_dataloader(self):
        # show images with the rare class more often
        weights = [
            self.rare_weight if (self.train_ds.load_mask(i) == self.rare_class).any() else 1.0
            for i in range(len(self.train_ds))
        ]
        sampler = WeightedRandomSampler(weights, num_samples=len(weights), replacement=True)
        return DataLoader(
            self.train_ds, batch_size=self.batch_size, sampler=sampler, num_workers=self.num_workers, drop_last=True
        )

    def val_dataloader(self):
        return DataLoader(self.val_ds, batch_size=self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self):
        return DataLoader(self.test_ds, batch_size=self.batch_size, num_workers=self.num_workers)


class EncoderDecoder(nn.Module):
    def __init__(self, num_classes, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.enc1 = nn.Sequential(nn.Conv2d(width, width * 2, 3, stride=2, padding=1), nn.GroupNorm(4, width * 2))
        self.enc2 = nn.Sequential(nn.Conv2d(width * 2, width * 4, 3, stride=2, padding=1), nn.GroupNorm(4, width * 4))
        self.dec2 = nn.ConvTranspose2d(width * 4, width * 2, 2, stride=2)
        self.dec1 = nn.ConvTranspose2d(width * 2, width, 2, stride=2)
        self.head = nn.Conv2d(width, num_classes, 1)
        self.drop = nn.Dropout2d(0.1)

    def forward(self, x):
        s0 = F.relu(self.stem(x))
        s1 = F.relu(self.enc1(s0))
        s2 = self.drop(F.relu(self.enc2(s1)))
        x = F.relu(self.dec2(s2)) + s1
        x = F.relu(self.dec1(x)) + s0
        return self.head(x)


class DiceLoss(nn.Module):
    def __init__(self, num_classes, eps=1e-6):
        super().__init__()
        self.num_classes = num_classes
        self.eps = eps

    def forward(self, logits, mask):
        probs = logits.softmax(dim=1)
        onehot = F.one_hot(mask, self.num_classes).permute(0, 3, 1, 2).to(probs)
        inter = (probs * onehot).sum(dim=(0, 2, 3))
        union = (probs + onehot).sum(dim=(0, 2, 3))
        return 1 - ((2 * inter + self.eps) / (union + self.eps)).mean()


class SegmentationModel(pl.LightningModule):
    def __init__(self, num_classes=3, width=16, lr=1e-3, dice_weight=0.5, max_epochs=20):
        super().__init__()
        self.save_hyperparameters()
        self.net = EncoderDecoder(num_classes, width)
        self.dice = DiceLoss(num_classes)
        self.ce = nn.CrossEntropyLoss()
        self.iou = nn.ModuleDict(
            {split: JaccardIndex(task="multiclass", num_classes=num_classes) for split in ("val", "test")}
        )

    def forward(self, x):
        return self.net(x)

    def compute_loss(self, logits, mask):
        dice = self.dice(logits, mask)
        ce = self.ce(logits, mask)
        return self.hparams.dice_weight * dice + (1 - self.hparams.dice_weight) * ce, dice, ce

    def training_step(self, batch, batch_idx):
        image, mask = batch
        loss, dice, ce = self.compute_loss(self(image), mask)
        self.log_dict({"train/loss": loss, "train/dice": dice, "train/ce": ce})
        return loss

    def shared_eval_step(self, batch, split):
        image, mask = batch
        logits = self(image)
        loss, _, _ = self.compute_loss(logits, mask)
        self.iou[split](logits.argmax(dim=1), mask)
        self.log(f"{split}/loss", loss, prog_bar=True)
        self.log(f"{split}/iou", self.iou[split], prog_bar=True)

    def validation_step(self, batch, batch_idx):
        self.shared_eval_step(batch, "val")

    def test_step(self, batch, batch_idx):
        self.shared_eval_step(batch, "test")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.hparams.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}
