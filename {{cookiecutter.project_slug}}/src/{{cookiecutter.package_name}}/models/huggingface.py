"""Fine-tuning of a causal language model of Hugging Face: as a whole, in part, or by LoRA adapters."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from hpc.config.errors import ConfigError, first_line
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from .checks import require_pretrained


class CausalLM(L.LightningModule):
    """Train a pretrained model to predict the next token.

    Args:
        folder: a local one with config.json and the weights, as `save_pretrained` writes it.
        learning_rate: of AdamW, after the warm-up; then it decays linearly to zero.
        warmup_steps: optimizer steps of linear warm-up.
        frozen: beginnings of names of parameters that are not trained.
        lora: arguments of `peft.LoraConfig`; if given, only the adapters are trained.

    Raises:
        ConfigError: there is no such folder, transformers is not installed, or `frozen` or `lora` do not fit
            the model.
    """

    def __init__(
        self,
        folder: str,
        *,
        learning_rate: float = 5e-5,
        warmup_steps: int = 0,
        frozen: Sequence[str] = (),
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        pretrained = require_pretrained(folder)
        # Extras are imported here, as only runs of this model need them.
        from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

        self.save_hyperparameters()
        # In float32, whatever the file has: bf16 would round AdamW's small steps away. trainer.precision=bf16-mixed
        # computes in bf16.
        model = AutoModelForCausalLM.from_pretrained(
            pretrained, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        for prefix in frozen:
            freeze(model, prefix)
        if lora:
            model = add_adapters(model, lora)
        self.model = model.train()  # it is loaded with dropout off, and Lightning leaves that as it is

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch, use_cache=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(**batch).loss  # hpc logs it as step/loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        from transformers import get_linear_schedule_with_warmup  # pyright: ignore[reportMissingImports]

        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.hparams["learning_rate"], weight_decay=0.0)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_linear_schedule_with_warmup(optimizer, self.hparams["warmup_steps"], num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _evaluate(self, stage: str, batch: dict[str, Tensor]) -> None:
        loss = self(**batch).loss
        self.log(f"{stage}/loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch["input_ids"]))


def freeze(model: nn.Module, prefix: str) -> None:
    """Exclude the parameters whose names begin with this from training. Raise `ConfigError` if there are none."""
    parameters = dict(model.named_parameters())
    if not (names := [name for name in parameters if name.startswith(prefix)]):
        shown = ", ".join([*parameters][:10])
        rule = f"must be beginnings of names of parameters, which are {shown}, ..."
        raise ConfigError("model.frozen", prefix, rule, "model.frozen=[<the beginning of one of them>]")
    for name in names:
        parameters[name].requires_grad = False


def add_adapters(model: Any, lora: Mapping[str, Any]) -> nn.Module:
    """Return the model with LoRA adapters, which alone are trained. Raise `ConfigError` if they do not fit."""
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

    try:
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
    except (TypeError, ValueError) as error:
        rule = f"must be arguments of peft.LoraConfig that fit the model: {first_line(error)}"
        raise ConfigError("model.lora", dict(lora), rule, "model.lora.target_modules=all-linear") from error
