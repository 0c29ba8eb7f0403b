"""Show in TensorBoard what the network predicts for some validation images or for a line of text."""

from functools import partial
from typing import Any

import lightning as L
import numpy as np
from torch import Tensor

from hpc.logging.loggers import tensorboard_loggers

TILE_PIXELS = 64  # of an image
LINE_PIXELS = 14  # of the text above it
MAX_TOKENS = 80  # of a text, that are shown


class PredictedSamples(L.Callback):
    """The first `num` samples of the first validation batch, with prediction and truth, after each validation.

    Predictions are what the module's own forward returned when the batch was validated. It is not called once more, as
    it may draw random numbers or count.
    """

    def __init__(self, num: int = 16) -> None:
        self.num = num
        self._hook: Any = None
        self._logits: Tensor | None = None

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == dataloader_idx == 0 and not trainer.sanity_checking and sample_kind(batch):
            self._hook = pl_module.register_forward_hook(partial(self._record_logits, targets=batch[1]))

    def _record_logits(self, module: Any, inputs: Any, output: Any, targets: Tensor) -> None:
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
        boards = tensorboard_loggers(trainer)
        if logits is None or not (trainer.is_global_zero and boards):
            return
        predicted, targets = logits.argmax(dim=-1).cpu(), batch[1][: self.num].cpu()
        board = boards[0].experiment
        if sample_kind(batch) == "images":
            sheet = contact_sheet(
                batch[0][: self.num].float().cpu(), predicted=predicted.tolist(), truth=targets.tolist()
            )
            board.add_image("val/samples", sheet, trainer.global_step, dataformats="HWC")
        else:
            board.add_text("val/samples", text_table(predicted, targets), trainer.global_step)


def sample_kind(batch: Any) -> str:
    """Return how to show a batch: "images" (n, 1 or 3, height, width) with classes (n,), "text" (n, length), or "".

    Targets of a regression are no classes.
    """
    pair = batch[:2] if isinstance(batch, tuple | list) else ()
    if len(pair) < 2 or not all(isinstance(item, Tensor) for item in pair) or pair[1].is_floating_point():
        return ""
    inputs, targets = pair
    is_images = inputs.ndim == 4 and inputs.shape[1] in (1, 3) and targets.ndim == 1
    return "images" if is_images else "text" if inputs.ndim == targets.ndim == 2 else ""


def contact_sheet(images: Tensor, *, predicted: list[int], truth: list[int], columns: int = 4) -> np.ndarray:
    """Draw images (n, channels, height, width) in rows under their predictions, wrong ones in red; uint8 (H, W, 3)."""
    from PIL import Image, ImageDraw

    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (TILE_PIXELS * columns, (TILE_PIXELS + LINE_PIXELS) * rows), "white")
    draw = ImageDraw.Draw(sheet)
    for i, image in enumerate(images):
        left, top = TILE_PIXELS * (i % columns), (TILE_PIXELS + LINE_PIXELS) * (i // columns)
        low, high = image.min(), image.max()
        pixels = ((image - low) / (high - low + 1e-9) * 255).byte().permute(1, 2, 0).expand(-1, -1, 3)
        tile = Image.fromarray(pixels.numpy()).resize((TILE_PIXELS, TILE_PIXELS), Image.Resampling.NEAREST)
        sheet.paste(tile, (left, top + LINE_PIXELS))
        is_right = predicted[i] == truth[i]
        text = str(predicted[i]) if is_right else f"{predicted[i]} is {truth[i]}"
        draw.text((left + 4, top + 1), text, fill="green" if is_right else "red")
    return np.asarray(sheet)


def text_table(predicted: Tensor, truth: Tensor) -> str:
    """Return Markdown: each line of truth above what was predicted, token by token, from the true text before it."""
    rows = [
        f"    truth      {tokens_to_text(t[:MAX_TOKENS])}\n    predicted  {tokens_to_text(p[:MAX_TOKENS])}"
        for p, t in zip(predicted, truth, strict=True)
    ]
    return "\n\n".join(rows)


def tokens_to_text(tokens: Tensor) -> str:
    """Return bytes as text, other tokens as numbers."""
    if int(tokens.max()) < 256:
        text = bytes(tokens.clamp(min=0).tolist()).decode("latin-1")
        return "".join(c if c.isprintable() else "·" for c in text)
    return " ".join(map(str, tokens.tolist()))
