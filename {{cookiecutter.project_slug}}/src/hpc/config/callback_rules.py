"""Rules on the section `callbacks`."""

from omegaconf import DictConfig, OmegaConf

from hpc.config import signatures
from hpc.config.errors import ConfigError

_SAVES = (
    "The project itself must write the checkpoints, whole or not at all, as it resumes from them",
    "callbacks.{}=null; see checkpoint.every_n_steps=, checkpoint.monitor= and checkpoint.keep=",
)
_SEARCHES = (
    "A run must not search for its own settings: it would find others each time it is resumed",
    "callbacks.{}=null; tools/search.py compares runs with different settings",
)
_RENAMES = (
    "Parameters must keep their names: pruning replaces them, so an interrupted run could not be resumed",
    "callbacks.{}=null; prune the trained network of the run's best checkpoint",
)
# Callbacks of Lightning that do not work here: the name of the class → rule, fix.
UNSUPPORTED_CALLBACKS = {"ModelPruning": _RENAMES, "ModelCheckpoint": _SAVES, "OnExceptionCheckpoint": _SAVES}
UNSUPPORTED_CALLBACKS |= {"LearningRateFinder": _SEARCHES, "BatchSizeFinder": _SEARCHES}


def check_callbacks(cfg: DictConfig) -> None:
    """Check that callbacks are named nodes, and none of those that do not work here.

    Raises:
        ConfigError: the first that breaks a rule.
    """
    if not isinstance(cfg.callbacks, DictConfig):
        raise ConfigError("callbacks", cfg.callbacks, "must be a mapping from names to callbacks", "callbacks=default")
    for name, node in cfg.callbacks.items():
        if node and not (isinstance(node, DictConfig) and "_target_" in node):
            rule = "must be a node with a _target_, or null"
            raise ConfigError(f"callbacks.{name}", node, rule, f"callbacks.{name}=null")
    for key, node in signatures.find_targets(OmegaConf.to_container(cfg.callbacks), "callbacks"):
        class_name = node["_target_"].rpartition(".")[2]
        if class_name in UNSUPPORTED_CALLBACKS and node["_target_"].startswith(("lightning.", "pytorch_lightning.")):
            rule, fix = UNSUPPORTED_CALLBACKS[class_name]
            raise ConfigError(key, node["_target_"], rule, fix.format(key.partition(".")[2]))
