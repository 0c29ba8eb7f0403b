"""U-Net that maps a coarse 2-d field to its high-resolution target."""

import h5py
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanSquaredError


class DoubleConv(nn.Module):
    """(convolution => [BN] => ReLU) * 2"""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Down(nn.Module):
    """Downscaling with maxpool then double conv"""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(in_channels, out_channels))

    def forward(self, x):
        return self.maxpool_conv(x)


class Up(nn.Module):
    """Upscaling then double conv"""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x1, x2):
        return self.conv(torch.cat([x2, self.up(x1)], dim=1))


class UNet(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, width: int):
        super().__init__()
        self.inc = DoubleConv(in_channels, width)
        self.down1 = Down(width, width * 2)
        self.down2 = Down(width * 2, width * 4)
        self.up1 = Up(width * 4, width * 2)
        self.up2 = Up(width * 2, width)
        self.outc = nn.Conv2d(width, out_channels, kernel_size=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(x3, x2)
        x = self.up2(x, x1)
        return self.outc(x)


class H5FieldDataset(Dataset):
    """One split of an HDF5 file: groups train, valid and test, each with the arrays `input` and `target`."""

    def __init__(self, path: str, split: str):
        self.path = path
        self.split = split
        self.file = None
        with h5py.File(path, "r") as f:
            self.length = len(f[split]["input"])

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        # h5py handles cannot be shared between processes, so each worker opens its own
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        group = self.file[self.split]
        return {
            "input": torch.from_numpy(group["input"][idx]),
            "target": torch.from_numpy(group["target"][idx]),
        }


class FieldDataModule(L.LightningDataModule):
    def __init__(self, path: str, batch_size: int = 16, num_workers: int = 0, pin_memory: bool = False):
        super().__init__()
        self.save_hyperparameters(logger=False)

    def setup(self, stage=None):
        self.data_train = H5FieldDataset(self.hparams.path, "train")
        self.data_val = H5FieldDataset(self.hparams.path, "valid")
        self.data_test = H5FieldDataset(self.hparams.path, "test")

    def _loader(self, dataset, shuffle):
        return DataLoader(
            dataset=dataset,
            batch_size=self.hparams.batch_size,
            num_workers=self.hparams.num_workers,
            pin_memory=self.hparams.pin_memory,
            persistent_workers=self.hparams.num_workers > 0,
            shuffle=shuffle,
        )

    def train_dataloader(self):
        return self._loader(self.data_train, shuffle=True)

    def val_dataloader(self):
        return self._loader(self.data_val, shuffle=False)

    def test_dataloader(self):
        return self._loader(self.data_test, shuffle=False)


class UNetRegressor(L.LightningModule):
    def __init__(
        self,
        in_channels: int = 1,
        out_channels: int = 1,
        width: int = 32,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        patience: int = 5,
    ):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = UNet(in_channels, out_channels, width)
        self.criterion = nn.MSELoss()
        self.valid_mse = MeanSquaredError()
        self.test_mse = MeanSquaredError()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        pred = self(batch["input"])
        loss = self.criterion(pred, batch["target"])
        self.log("train/mse", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.valid_mse(self(batch["input"]), batch["target"])
        self.log("valid/mse", self.valid_mse, on_step=False, on_epoch=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.test_mse(self(batch["input"]), batch["target"])
        self.log("test/mse", self.test_mse, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="min", factor=0.5, patience=self.hparams.patience
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler,
                "monitor": "valid/mse",
                "interval": "epoch",
                "frequency": 1,
            },
        }
