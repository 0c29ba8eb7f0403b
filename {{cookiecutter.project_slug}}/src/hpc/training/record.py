"""What is written beside the scalars: the resolved config, hyperparameters with their result, histograms."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from hpc.checkpoint.on_disk import Checkpoint
from hpc.config import compose
from hpc.config.conversion import flatten
from hpc.config.errors import make_printable
from hpc.config.freezing import environment_values, to_frozen_yaml
from hpc.config.project import PROJECT
from hpc.launch.placement import Placement
from hpc.run import directory, frozen_config, snapshot
from hpc.system import files
from hpc.training import loggers
from hpc.training.attempt import Attempt


def begin(run: Attempt, logging: Sequence[Logger]) -> Callable[[], None] | None:
    """On rank 0, before anything is logged: note the attempt, and keep what made the run: config, code, versions.

    What is returned takes back what has changed in the config of a run that goes on.

    Args:
        logging: the run's loggers.
    """
    cfg, run_dir, found, starts = run.cfg, run.run_dir, run.checkpoint, directory.starts(run.run_dir)
    words = compose.select_overrides(run.program.words)
    # What lay there before the run's first start is not its own.
    others = starts[0].get("logs", {}) if starts else loggers.positions(run_dir, logging)
    if not (run_dir / "config.yaml").exists():
        snapshot.made_by(run_dir)
    take_back = frozen_config.keep(run_dir, cfg, words)
    code = files.source_checksum(PROJECT)
    _tell_other_code(run_dir, code, starts[-1].get("code") if starts else None)
    loggers.cut(run_dir, logging, _logged(cfg, found, words) if found else others, directory.events(run_dir))
    loggers.warn_of_clock(logging, time.time())
    if run.claim:
        loggers.fence(logging, run.claim.mine)
    directory.start(
        run_dir,
        run.number,
        os.environ,
        from_step=found.step if found else 0,
        code=code,
        launcher=run.program.place.launcher,
        hosts=run.hosts,
        world_size=cfg.trainer.num_nodes * cfg.trainer.devices,
        gpus_per_node=0 if cfg.trainer.accelerator == "cpu" else cfg.trainer.devices,
        log_dirs=loggers.folders(run_dir, logging),
        writer=loggers.writer(),
        logs=others,
        reached=loggers.positions(run_dir, logging),
    )
    return take_back


def _tell_other_code(run_dir: Path, code: str, before: object) -> None:
    """Say so where a run goes on with other sources than those it has.

    Args:
        code: checksum of the sources that train now.
        before: that of the last attempt, if it has noted one.
    """
    own, note = run_dir / "code", ""
    if (own / "train.py").is_file() and not own.samefile(PROJECT):
        if files.source_checksum(own) != code:
            how = shlex.join(["python", f"{own}/train.py", f"resume={run_dir}"])
            note = f"the code of {PROJECT} trains now, which is not that of the run; with its own: {how}"
    elif before not in (None, code):
        note = f"the code of {PROJECT} has changed since the last attempt of this run"
    if note:
        print(make_printable(f"note: {note}"), file=sys.stderr, flush=True)


def _logged(cfg: DictConfig, found: Checkpoint, words: Sequence[str]) -> dict[str, int]:
    """How far the logs have come at a checkpoint; at the end of training, where that was `trained` and nothing is left.

    Args:
        words: with one of the Trainer's, training may go on.
    """
    extended = any(word.lstrip("+~").startswith("trainer") for word in words)
    goes_on = extended and not 0 <= (cfg.trainer.max_steps or -1) <= found.step
    # The batches, too: a callback may stop training between two of one step, of which a part is done again then.
    place = ["trained", found.attempt, found.step, found.note.get("batches")]
    for event in directory.events(Path(cfg.run_dir)) if found.note.get("stopped_early") or not goes_on else ():
        if place == [event.get(key) for key in ("event", "attempt", "trained_step", "trained_batches")]:
            return event["logs"]
    return found.note.get("logs", {})


@rank_zero_only
def trained(trainer: L.Trainer, attempt: int) -> None:
    """Note how far the logs are when training ends within an epoch: its values are logged after the last save."""
    run_dir = Path(trainer.default_root_dir)
    facts = {"event": "trained", "time": time.time(), "attempt": attempt}
    facts["trained_step"] = trainer.global_step  # not yet `step`: that one is in a checkpoint
    facts["trained_batches"] = trainer.fit_loop.epoch_loop.batch_progress.total.completed
    directory.note(run_dir / "attempts.jsonl", facts | {"logs": flushed(trainer)})


@rank_zero_only
def config(trainer: L.Trainer, cfg: DictConfig) -> None:
    """The resolved config as a text, for TensorBoard's TEXT page."""
    for board in _tensorboards(trainer):
        board.experiment.add_text("config", f"```yaml\n{to_frozen_yaml(cfg)}```")


def hide(cfg: DictConfig, *owners: Any) -> None:
    """Put references for what came from the environment, perhaps secrets, among hyperparameters that are saved.

    Args:
        owners: the module and the data; what they keep by `save_hyperparameters` goes into checkpoints and to loggers.
    """
    references = environment_values(cfg)
    for owner in owners:
        # The private one is a copy, for loggers: Lightning has no public way to change it.
        for kept in (getattr(owner, "hparams", {}), getattr(owner, "_hparams_initial", {})):
            for key, value in kept.items():
                kept[key] = _hidden(value, references)


def _hidden(value: Any, references: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _hidden(one, references) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_hidden(one, references) for one in value)
    return references.get(value, value) if isinstance(value, str) else value


def environment(place: Placement) -> ClusterEnvironment:
    """How Lightning learns its rank: from `launch`, whoever started it, and never by guessing at SLURM_ variables."""
    return LightningEnvironment() if place.launcher == "none" else TorchElasticEnvironment()


@rank_zero_only
def result(trainer: L.Trainer, cfg: DictConfig, metrics: dict[str, Any]) -> None:
    """The hyperparameters beside the final metrics, for TensorBoard's HPARAMS page, which reads the scalars by name."""
    # As late as TensorBoard itself, which only the rank that writes imports.
    from torch.utils.tensorboard.summary import hparams
    from torch.utils.tensorboard.writer import FileWriter

    values = flatten(OmegaConf.create(to_frozen_yaml(cfg)))
    shown = {k: v for k, v in values.items() if k.startswith(("model.", "data.", "trainer.", "strategy.", "seed"))}
    plain = {k: v if isinstance(v, bool | int | float) else _text(v) for k, v in shown.items()}
    final = [k for k in metrics if k.startswith(("val/", "test/"))]
    for logger in _tensorboards(trainer):
        # Not logger.log_hyperparams: it would write each metric a second time, as another point of its curve.
        writer = FileWriter(logger.log_dir)
        for summary in hparams(plain, dict.fromkeys(final, 0)):
            writer.add_summary(summary)
        writer.close()


def _text(value: Any) -> str:
    """As TensorBoard takes it: a path need not be UTF-8."""
    return str(value).encode(errors="backslashreplace").decode()


def flushed(trainer: L.Trainer) -> dict[str, int]:
    """Make what was logged durable; how far each file has come, where a run that goes on from here can cut it."""
    run_dir = Path(trainer.default_root_dir)
    loggers.flush(trainer.loggers)
    loggers.cut_again(run_dir, trainer.loggers, directory.events(run_dir))
    return loggers.positions(run_dir, trainer.loggers)


def skip(run_dir: Path, step: int, attempt: int) -> None:
    """The samples up to this step of this attempt are to be left out when the run goes on from an earlier one."""
    directory.note(run_dir / "skipped.jsonl", {"step": step, "attempt": attempt})


def skipped(run_dir: Path, step: int, attempt: int) -> int:
    """How many global batches to leave out after the checkpoint of this step, which this attempt wrote."""
    notes = directory.notes(run_dir / "skipped.jsonl")
    return sum(note["step"] - step for note in notes if note["attempt"] >= attempt and note["step"] > step)


def _tensorboards(trainer: L.Trainer) -> list[Any]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
