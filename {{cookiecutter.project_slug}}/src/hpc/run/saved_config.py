"""Read the config that a run has kept."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from hpc.config.errors import ConfigError, first_line
from hpc.config.yaml_files import YAML_ERRORS, load_yaml


def load(run_dir: Path) -> DictConfig:
    """The frozen config of a run. Raises `ConfigError` where there is none that can be read."""
    path = run_dir / "config.yaml"
    other = f"resume=<a run directory>; what weights are left start a new run: ckpt={run_dir}/checkpoints/last.ckpt"
    if not run_dir.is_dir():
        rule = "is a file" if run_dir.exists() else "there is no such directory"
        raise ConfigError("resume", run_dir, rule, "resume=<a run directory>", only_this_rank=True)
    if not path.exists():
        rule = "holds no config.yaml: no run was started here, or it is half-deleted; of a sweep, name one of its runs"
        raise ConfigError("resume", run_dir, rule, other, only_this_rank=True)
    try:
        cfg = load_yaml(path)
        if not isinstance(cfg, DictConfig) or not cfg:
            raise ValueError("no keys")
    except YAML_ERRORS as error:
        rule = f"{path} is damaged: {first_line(error)}"
        raise ConfigError("resume", run_dir, rule, other, only_this_rank=True) from None
    OmegaConf.set_struct(cfg, True)
    return cfg
