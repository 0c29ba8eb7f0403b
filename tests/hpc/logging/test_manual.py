"""Check that the callback in the manual works as it is printed."""

import re
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MANUAL = Path(__file__).parents[3] / "docs" / "bring-your-own.md"


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch.reshape(1, 1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_the_callback_of_the_manual_logs_histograms(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(class Histograms.*?)```", MANUAL.read_text(), re.DOTALL)
    names: dict[str, Any] = {"lightning": lightning}
    exec(code, names)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    trainer = lightning.Trainer(
        accelerator="cpu", logger=logger, callbacks=[names["Histograms"]()], max_steps=101,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Line(), torch.ones(101))
    board = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0}).Reload()
    assert {f"{kind}/net.{name}" for kind in ("weights", "gradients") for name in ("weight", "bias")} == {
        *board.Tags()["histograms"]
    }
    assert [event.step for event in board.Histograms("weights/net.weight")] == [0, 100]
