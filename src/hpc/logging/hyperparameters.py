"""The config in the loggers: as text, as hyperparameters, and beside the result on TensorBoard's HPARAMS page."""

from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf

from hpc.config.conversion import flatten
from hpc.config.freezing import to_frozen_yaml
from hpc.config.sections import Config
from hpc.logging.loggers import tensorboard_loggers


@rank_zero_only
def log_config(trainer: L.Trainer, cfg: Config, *, attempt: int) -> None:
    """Log the resolved config: as a text for TensorBoard's TEXT page, as hyperparameters for all others but CSV.

    MLflow gets those of the first attempt only: it rejects a value that has changed.
    """
    text = to_frozen_yaml(cfg.node)
    values: Any = OmegaConf.to_container(OmegaConf.create(text))
    for logger in tensorboard_loggers(trainer):
        logger.experiment.add_text("config", f"```yaml\n{text}```")
    for logger in trainer.loggers:
        has_config = isinstance(logger, MLFlowLogger) and attempt > 1
        if not has_config and not isinstance(logger, TensorBoardLogger | CSVLogger):
            logger.log_hyperparams(values)


@rank_zero_only
def log_result(trainer: L.Trainer, cfg: Config, *, metrics: dict[str, Any]) -> None:
    """Log the hyperparameters and the final metrics for TensorBoard's HPARAMS page, which reads scalars by name."""
    # Imported here, as only the rank that writes needs TensorBoard.
    from torch.utils.tensorboard.summary import hparams
    from torch.utils.tensorboard.writer import FileWriter

    values = flatten(OmegaConf.create(to_frozen_yaml(cfg.node)))
    sections = ("model.", "data.", "trainer.", "strategy.", "seed")
    shown = {key: value for key, value in values.items() if key.startswith(sections)}
    plain = {key: value if isinstance(value, bool | int | float) else _to_utf8(value) for key, value in shown.items()}
    for logger in tensorboard_loggers(trainer):
        # Not logger.log_hyperparams: it would write each metric a second time, as another point of its curve.
        writer = FileWriter(logger.log_dir, filename_suffix=logger.experiment.filename_suffix)
        for summary in hparams(plain, dict.fromkeys(metrics, 0)):
            writer.add_summary(summary)
        writer.close()


def _to_utf8(value: Any) -> str:
    """Return the text of a value in UTF-8, as TensorBoard requires; a path may hold other bytes."""
    return str(value).encode(errors="backslashreplace").decode()
