"""PyTorch Lightning MNIST tutorial."""

import os
import urllib.request

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split
from torchmetrics import Accuracy

URL = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"


class RandomCrop:
    """Pad the image on all sides and crop it back to its size at a random place."""

    def __init__(self, size=28, padding=2):
        self.size = size
        self.padding = padding

    def __call__(self, img):
        img = F.pad(img, [self.padding] * 4)
        top = torch.randint(0, 2 * self.padding + 1, (1,)).item()
        left = torch.randint(0, 2 * self.padding + 1, (1,)).item()
        return img[:, top : top + self.size, left : left + self.size]


class MNIST(Dataset):
    def __init__(self, root, train=True, transform=None):
        with np.load(os.path.join(root, "mnist.npz")) as f:
            self.data = f["x_train" if train else "x_test"]
            self.targets = f["y_train" if train else "y_test"]
        self.transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        img = torch.from_numpy(self.data[index]).float().div(255).unsqueeze(0)
        img = (img - 0.1307) / 0.3081
        if self.transform is not None:
            img = self.transform(img)
        return img, int(self.targets[index])


class LitMNIST(L.LightningModule):
    def __init__(self, hidden_size=64, learning_rate=2e-4):
        super().__init__()

        # Set our init args as class attributes
        self.save_hyperparameters()

        # Hardcode some dataset specific attributes
        self.num_classes = 10
        self.dims = (1, 28, 28)
        channels, width, height = self.dims

        # Define PyTorch model
        self.layer_1 = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * width * height, hidden_size),
            nn.ReLU(),
            nn.Dropout(0.1),
        )
        self.layer_2 = nn.Sequential(
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(),
            nn.Dropout(0.1),
        )
        self.layer_3 = nn.Linear(hidden_size, self.num_classes)

        self.val_accuracy = Accuracy(task="multiclass", num_classes=10)
        self.test_accuracy = Accuracy(task="multiclass", num_classes=10)

    def forward(self, x):
        x = self.layer_1(x)
        x = self.layer_2(x)
        x = self.layer_3(x)
        return F.log_softmax(x, dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        preds = torch.argmax(logits, dim=1)
        self.val_accuracy.update(preds, y)

        # Calling self.log will surface up scalars for you in TensorBoard
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        preds = torch.argmax(logits, dim=1)
        self.test_accuracy.update(preds, y)

        self.log("test_loss", loss, prog_bar=True)
        self.log("test_acc", self.test_accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        return optimizer


class MNISTDataModule(L.LightningDataModule):
    def __init__(self, data_dir="./", batch_size=64, num_workers=0):
        super().__init__()
        self.data_dir = data_dir
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.transform = RandomCrop(28, padding=2)

    def prepare_data(self):
        # download
        file = os.path.join(self.data_dir, "mnist.npz")
        if not os.path.exists(file):
            os.makedirs(self.data_dir, exist_ok=True)
            urllib.request.urlretrieve(URL, file)

    def setup(self, stage=None):
        # Assign train/val datasets for use in dataloaders
        if stage == "fit" or stage is None:
            mnist_full = MNIST(self.data_dir, train=True, transform=self.transform)
            n_val = len(mnist_full) // 6
            self.mnist_train, self.mnist_val = random_split(mnist_full, [len(mnist_full) - n_val, n_val])

        # Assign test dataset for use in dataloader(s)
        if stage == "test" or stage is None:
            self.mnist_test = MNIST(self.data_dir, train=False)

    def train_dataloader(self):
        return DataLoader(self.mnist_train, batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self):
        return DataLoader(self.mnist_val, batch_size=self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self):
        return DataLoader(self.mnist_test, batch_size=self.batch_size, num_workers=self.num_workers)
