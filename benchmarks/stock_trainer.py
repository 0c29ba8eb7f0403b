"""The same work with a Lightning Trainer as in its documentation: python benchmarks/stock_trainer.py [features|bare]"""

import sys
import tempfile
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from turns import wait_for_turn


class Turns(L.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        wait_for_turn()


class Module(L.LightningModule):
    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.network, self.logs = nn.Sequential(nn.Linear(32, 32), nn.ReLU()), logs

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        if self.logs:
            self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(features: bool) -> None:
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    data = TensorDataset(torch.randn(8000, 32), torch.randint(0, 32, (8000,)))
    bare: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    usual: dict[str, Any] = {
        "logger": TensorBoardLogger(folder),
        "gradient_clip_val": 1.0,
        "log_every_n_steps": 50,
        "callbacks": [
            LearningRateMonitor(), ModelCheckpoint(folder, every_n_train_steps=1000),
            ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])), L.pytorch.callbacks.TQDMProgressBar(10),
        ],
    }  # fmt: skip
    options = usual if features else bare
    options["callbacks"] = [*options.get("callbacks", []), Turns()]
    trainer = L.Trainer(
        accelerator="cpu", max_steps=-1, max_epochs=-1, enable_model_summary=False, default_root_dir=folder, **options
    )
    trainer.fit(Module(features), DataLoader(data, batch_size=8, shuffle=True))


if __name__ == "__main__":
    main("bare" not in sys.argv[1:])
