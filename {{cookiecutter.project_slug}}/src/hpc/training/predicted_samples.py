"""A look at what the network predicts: some validation images, or a line of text, in TensorBoard."""

from functools import partial
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

TILE = 64  # pixels of an image
LINE = 14  # pixels of the text above it


class PredictedSamples(L.Callback):
    """The first `num` samples of the first validation batch, with prediction and truth, after each validation.

    Predictions are what the module's own forward returned as the batch was validated; it is not called once more, as it
    may draw random numbers or count.
    """

    def __init__(self, num: int = 16) -> None:
        self.num = num
        self._hook: Any = None
        self._logits: Tensor | None = None

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == dataloader_idx == 0 and not trainer.sanity_checking and shown(batch):
            self._hook = pl_module.register_forward_hook(partial(self._look, targets=batch[1]))

    def _look(self, module: Any, inputs: Any, output: Any, targets: Tensor) -> None:
        if self._logits is None and isinstance(output, Tensor) and output.shape[:-1] == targets.shape:
            self._logits = output[: self.num].detach()

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._hook is None:
            return
        self._hook.remove()
        logits, self._hook, self._logits = self._logits, None, None
        boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if logits is None or not (trainer.is_global_zero and boards):
            return
        predicted, targets = logits.argmax(dim=-1).cpu(), batch[1][: self.num].cpu()
        board = boards[0].experiment
        if shown(batch) == "images":
            sheet = contact_sheet(
                batch[0][: self.num].float().cpu(), predicted=predicted.tolist(), truth=targets.tolist()
            )
            board.add_image("val/samples", sheet, trainer.global_step, dataformats="HWC")
        else:
            board.add_text("val/samples", text_table(predicted, targets), trainer.global_step)


def shown(batch: Any) -> str:
    """Say how to show a batch: "images" (n, 1 or 3, height, width) with classes (n,), "text" (n, length), or ""."""
    pair = batch[:2] if isinstance(batch, tuple | list) else ()
    if len(pair) < 2 or not all(isinstance(one, Tensor) for one in pair):
        return ""
    inputs, targets = pair
    images = inputs.ndim == 4 and inputs.shape[1] in (1, 3) and targets.ndim == 1
    return "images" if images else "text" if inputs.ndim == targets.ndim == 2 else ""


def contact_sheet(images: Tensor, *, predicted: list[int], truth: list[int], columns: int = 4) -> np.ndarray:
    """Draw images (n, channels, height, width) in rows under their predictions, wrong ones in red; uint8 (H, W, 3)."""
    from PIL import Image, ImageDraw

    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (TILE * columns, (TILE + LINE) * rows), "white")
    draw = ImageDraw.Draw(sheet)
    for i, image in enumerate(images):
        left, top = TILE * (i % columns), (TILE + LINE) * (i // columns)
        low, high = image.min(), image.max()
        pixels = ((image - low) / (high - low + 1e-9) * 255).byte().permute(1, 2, 0).expand(-1, -1, 3)
        sheet.paste(Image.fromarray(pixels.numpy()).resize((TILE, TILE), Image.Resampling.NEAREST), (left, top + LINE))
        right = predicted[i] == truth[i]
        text = str(predicted[i]) if right else f"{predicted[i]} is {truth[i]}"
        draw.text((left + 4, top + 1), text, fill="green" if right else "red")
    return np.asarray(sheet)


def text_table(predicted: Tensor, truth: Tensor, *, width: int = 80) -> str:
    """Return Markdown: each line of truth above what was predicted, token by token, from the true text before it."""
    rows = [
        f"    truth      {readable(t[:width])}\n    predicted  {readable(p[:width])}"
        for p, t in zip(predicted, truth, strict=True)
    ]
    return "\n\n".join(rows)


def readable(tokens: Tensor) -> str:
    """Return bytes as text, other tokens as numbers."""
    if int(tokens.max()) < 256:
        text = bytes(tokens.clamp(min=0).tolist()).decode("latin-1")
        return "".join(c if c.isprintable() else "·" for c in text)
    return " ".join(map(str, tokens.tolist()))
