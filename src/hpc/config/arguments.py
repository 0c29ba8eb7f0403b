"""Check the arguments of the classes that a config names, and the files, as seen from this machine."""

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hpc.config import batch_size, signatures
from hpc.config.build import ARGUMENT_ERRORS
from hpc.config.errors import ConfigError, first_line, raise_problems
from hpc.config.project import is_project_code
from hpc.config.sections import Config
from hpc.config.signatures import unknown_argument_error
from hpc.system import home


def argument_problems(cfg: Config, *, reads_data: bool = True) -> Iterator[ConfigError]:
    """Yield the errors of all arguments that are given. Those that are null may be filled in from the files."""
    sections = [str(name) for name in cfg.node if reads_data or name != "data"]
    try:
        yield from _target_problems(cfg.node, cfg, sections, is_complete=False)
    except ConfigError as error:  # there is no such class
        yield error
        return
    yield from _plan_problems(cfg)


def check_files(cfg: Config, *, reads_data: bool = True, awaited: Sequence[Path] = ()) -> Config:
    """Check that the files that the config names can be used, as seen from this machine, and return the config.

    `_check_` functions fill in keys of its nodes that are null.

    Args:
        reads_data: whether the section data is checked, too.
        awaited: runs that are finished when this one starts, so they need no checkpoint yet.

    Raises:
        ConfigError: the first file that cannot be used; or all arguments that do not fit.
    """
    if cfg.ckpt and not _has_own_checkpoint(cfg):
        from hpc.config import run_checkpoint  # only here: few runs have one

        run_checkpoint.reject_missing(cfg.ckpt, awaited)
    sections = [str(name) for name in cfg.node if reads_data or name != "data"]
    for name in sections:
        _run_check_functions(cfg.node[name], cfg)  # they may rely on the types of the arguments
    filled = cfg.node.copy()
    filled.run_dir = cfg.run_dir or "runs"  # chosen later, but a path by then
    raise_problems(_target_problems(filled, cfg, sections, is_complete=True))
    return cfg


def _has_own_checkpoint(cfg: Config) -> bool:
    """Return whether the run resumes from a checkpoint of its own and no longer needs the one that it started from."""
    checkpoint = home.expand(cfg.run_dir) / "checkpoints/last.ckpt" if cfg.run_dir else None
    return checkpoint is not None and checkpoint.exists() and cfg.task == "train"


def _target_problems(
    node: DictConfig, cfg: Config, sections: Sequence[str], *, is_complete: bool
) -> Iterator[ConfigError]:
    """Yield the errors of every node with a `_target_`.

    Args:
        is_complete: whether required arguments must be there, and null must be a value that they can have.
    """
    plain = {
        name: OmegaConf.to_container(node[name], resolve=True) for name in sections if OmegaConf.is_config(node[name])
    }
    signatures.learn(target["_target_"] for name in plain for _, target in signatures.find_targets(plain[name]))
    for name, section in plain.items():
        if name == "data" and section.get("_target_"):  # type: ignore[union-attr]
            section = batch_size.with_class_batch_size(section, cfg)  # type: ignore[arg-type]
        for key, target in signatures.find_targets(section, name):
            yield from node_problems(key, target, is_complete=is_complete)


def node_problems(key: str, node: dict, *, is_complete: bool = True) -> Iterator[ConfigError]:
    """Yield the errors of the keys and the plain values of one `_target_` node: see `_target_problems`."""
    target = node["_target_"]
    signature = signatures.read_signature(target)
    given = {name: value for name, value in node.items() if not (name.startswith("_") and name.endswith("_"))}
    for name, value in given.items():
        if value is None and not is_complete:
            continue
        if name not in signature.parameters and not signature.accepts_any:
            yield unknown_argument_error(key, name, target=target, signature=signature)
        if (annotation := signature.parameters.get(name, "")) and not signatures.is_compatible(value, annotation):
            rule, fix = f"must be of type {annotation}", f"{key}.{name}=<{annotation}>"
            if isinstance(value, str) and re.fullmatch(r"[\d.e+-]+|true|false|null", value):
                value = repr(value)
                fix += f'; of an environment variable {key}.{name}="$NAME", so that the shell fills it in'
            yield ConfigError(f"{key}.{name}", value, rule, fix)
    missing = [f"{key}.{name}" for name in signature.required if name not in given]
    if is_complete and missing and not node.get("_partial_") and not node.get("_args_"):
        rule = f"must be given, as {target} requires {'it' if len(missing) == 1 else 'them'}"
        yield ConfigError(", ".join(missing), None, rule, " ".join(f"{name}=..." for name in missing))


def _plan_problems(cfg: Config) -> Iterator[ConfigError]:
    """Yield the error of a network without a tensor-parallel plan if the strategy needs one."""
    target = OmegaConf.select(cfg.model, "network._target_") or ""
    if cfg.strategy.tensor_parallel_size == 1 or not is_project_code(target):
        return
    if not signatures.read_signature(target).has_tensor_parallel_plan:
        rule = f"must be a class with `tensor_parallel_plan`, which strategy={cfg.strategy.name} uses"
        fix = "give the class `tensor_parallel_plan` (see models/gpt.py), or strategy=ddp"
        yield ConfigError("model.network", target, rule, fix)


def _run_check_functions(node: Any, cfg: Config) -> None:
    """Run the `_check_` functions that nodes name. The values they return fill keys that are null."""
    for value in list(node.values()) if isinstance(node, DictConfig) else []:
        _run_check_functions(value, cfg)
    if isinstance(node, DictConfig) and (name := node.get("_check_")):
        module, _, function = name.rpartition(".")
        try:
            values = getattr(import_module(module), function)(node, cfg) or {}
        except (ImportError, *ARGUMENT_ERRORS) as error:
            rule = f"must have values that {name} can check: {type(error).__name__}: {first_line(error)}"
            raise ConfigError(node._get_full_key(None), None, rule, "correct these values, or that function") from error
        for key, value in values.items():
            if node[key] is None:
                node[key] = value
