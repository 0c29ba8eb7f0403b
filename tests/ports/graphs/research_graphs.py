"""Message-passing network for the regression of a molecular property."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanAbsoluteError


class MessagePassing(nn.Module):
    def __init__(self, hidden_dim, edge_dim):
        super().__init__()
        self.message = nn.Sequential(
            nn.Linear(2 * hidden_dim + edge_dim, hidden_dim), nn.SiLU(), nn.Linear(hidden_dim, hidden_dim)
        )
        self.update = nn.Sequential(nn.Linear(2 * hidden_dim, hidden_dim), nn.SiLU(), nn.Linear(hidden_dim, hidden_dim))
        self.norm = nn.LayerNorm(hidden_dim)

    def forward(self, h, edge_index, edge_attr):
        src, dst = edge_index
        m = self.message(torch.cat([h[src], h[dst], edge_attr], dim=-1))
        agg = torch.zeros_like(h).index_add(0, dst, m)
        return self.norm(h + self.update(torch.cat([h, agg], dim=-1)))


class GraphRegressor(pl.LightningModule):
    def __init__(self, node_dim=5, edge_dim=1, hidden_dim=64, num_layers=4, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(node_dim, hidden_dim)
        self.layers = nn.ModuleList([MessagePassing(hidden_dim, edge_dim) for _ in range(num_layers)])
        self.readout = nn.Sequential(nn.Linear(hidden_dim, hidden_dim), nn.SiLU(), nn.Linear(hidden_dim, 1))
        self.val_mae = MeanAbsoluteError()

    def forward(self, batch):
        h = self.embed(batch.x)
        for layer in self.layers:
            h = layer(h, batch.edge_index, batch.edge_attr)
        node_out = self.readout(h).squeeze(-1)
        return node_out.new_zeros(batch.num_graphs).index_add(0, batch.batch, node_out)

    def training_step(self, batch, batch_idx):
        loss = F.smooth_l1_loss(self(batch), batch.y)
        self.log("train_loss", loss, batch_size=batch.num_graphs, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        pred = self(batch)
        self.val_mae(pred, batch.y)
        self.log("val_loss", F.smooth_l1_loss(pred, batch.y), batch_size=batch.num_graphs)
        self.log("val_mae", self.val_mae, batch_size=batch.num_graphs, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
        return [optimizer], [scheduler]
