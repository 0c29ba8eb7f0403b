"""Denoising diffusion (DDPM) of points in the plane."""

import copy
import math

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def two_moons(n, noise, rng):
    angle = rng.uniform(0, np.pi, n)
    lower = rng.integers(0, 2, n)
    x = np.where(lower, 1 - np.cos(angle), np.cos(angle)) - 0.5
    y = np.where(lower, 0.5 - np.sin(angle), np.sin(angle)) - 0.25
    points = np.stack([x, y], axis=1) + rng.normal(0, noise, (n, 2))
    return torch.tensor(points, dtype=torch.float32)


class MoonsDataModule(pl.LightningDataModule):
    def __init__(self, n_train: int = 10000, n_val: int = 1000, noise: float = 0.05):
        super().__init__()
        self.n_train = n_train
        self.n_val = n_val
        self.noise = noise

    def setup(self, stage: str):
        rng = np.random.default_rng(42)
        self.train = TensorDataset(two_moons(self.n_train, self.noise, rng))
        self.val = TensorDataset(two_moons(self.n_val, self.noise, rng))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=48, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=48)


class SinusoidalEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, t):
        half = self.dim // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
        args = t[:, None].float() * freqs[None]
        return torch.cat([args.sin(), args.cos()], dim=-1)


class ResidualBlock(nn.Module):
    def __init__(self, dim, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, dim)
        self.time = nn.Linear(dim, dim)
        self.fc2 = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, emb):
        h = F.silu(self.fc1(self.norm(x)) + self.time(emb))
        return x + self.fc2(self.dropout(h))


class Denoiser(nn.Module):
    def __init__(self, dim, depth, dropout):
        super().__init__()
        self.time_embedding = SinusoidalEmbedding(dim)
        self.proj_in = nn.Linear(2, dim)
        self.blocks = nn.ModuleList([ResidualBlock(dim, dropout) for _ in range(depth)])
        self.proj_out = nn.Linear(dim, 2)

    def forward(self, x, t):
        emb = self.time_embedding(t)
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x, emb)
        return self.proj_out(x)


class DDPM(pl.LightningModule):
    def __init__(self, dim=128, depth=4, dropout=0.1, timesteps=100, ema_decay=0.999, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = Denoiser(dim, depth, dropout)

        # exponential moving average of the weights, used for validation and sampling
        self.ema_model = copy.deepcopy(self.model)
        self.ema_model.requires_grad_(False)
        self.ema_model.eval()

        betas = torch.linspace(1e-4, 0.02, timesteps) * (1000 / timesteps)
        alphas = 1.0 - betas
        alphas_cumprod = torch.cumprod(alphas, dim=0)
        self.register_buffer("betas", betas)
        self.register_buffer("alphas", alphas)
        self.register_buffer("alphas_cumprod", alphas_cumprod)

    def q_sample(self, x_0, t, noise):
        a = self.alphas_cumprod[t][:, None]
        return a.sqrt() * x_0 + (1 - a).sqrt() * noise

    def diffusion_loss(self, model, x_0):
        t = torch.randint(0, self.hparams.timesteps, (x_0.shape[0],), device=self.device)
        noise = torch.randn_like(x_0)
        return F.mse_loss(model(self.q_sample(x_0, t, noise), t), noise)

    def training_step(self, batch, batch_idx):
        (x_0,) = batch
        loss = self.diffusion_loss(self.model, x_0)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        decay = self.hparams.ema_decay
        with torch.no_grad():
            for ema_p, p in zip(self.ema_model.parameters(), self.model.parameters(), strict=True):
                ema_p.mul_(decay).add_(p, alpha=1 - decay)

    def validation_step(self, batch, batch_idx):
        (x_0,) = batch
        loss = self.diffusion_loss(self.ema_model, x_0)
        self.log("val/loss", loss, prog_bar=True, batch_size=x_0.shape[0])

    @torch.no_grad()
    def sample(self, n):
        x = torch.randn(n, 2, device=self.device)
        for i in reversed(range(self.hparams.timesteps)):
            t = torch.full((n,), i, device=self.device)
            eps = self.ema_model(x, t)
            x = (x - self.betas[i] / (1 - self.alphas_cumprod[i]).sqrt() * eps) / self.alphas[i].sqrt()
            if i > 0:
                x = x + self.betas[i].sqrt() * torch.randn_like(x)
        return x

    def on_validation_epoch_end(self):
        samples = self.sample(64)
        self.log("val/sample_mean", samples.mean())
        self.log("val/sample_std", samples.std())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=self.hparams.lr)
