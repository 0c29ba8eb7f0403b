"""Build the objects that a config names."""

import re
import textwrap
from pathlib import Path
from traceback import walk_tb
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc.config import batch_size, freezing
from hpc.config.errors import ConfigError, first_line, make_printable
from hpc.config.project import CONFIGS, SOURCES, researcher_packages
from hpc.config.sections import Config

# The errors of constructors that cannot use the values they are given.
ARGUMENT_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


def build(node: Any, **kwargs: Any) -> Any:
    """Build the objects of a config node, as `hydra.utils.instantiate` does. This is the only place that calls it.

    Raises:
        ConfigError: a library rejects the values that the config gives it.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(strip_check_keys(node), **kwargs)
    except InstantiationException as error:
        raise_config_error_for_arguments(error)
        _raise_config_error_for_import(error)
        error.add_note(_describe_arguments(node, error))  # below the traceback of the researcher's own code
        raise


def build_data(cfg: Config | DictConfig) -> Any:
    """Build the section `data`, with the batch size under the name that its class takes; None for data=none."""
    if cfg.data.get("_target_") is None:
        return None
    return build(batch_size.with_class_batch_size(strip_check_keys(cfg.data), cfg))


def build_group(group: DictConfig) -> list[Any]:
    """Build the objects of a config group, without null entries and without objects whose `enabled` is false.

    Lightning calls every callback at every step, so one that has nothing to do would cost time all the same.
    """
    objects = [build(node) for node in group.values() if node]
    return [item for item in objects if getattr(item, "enabled", True)]


def _describe_arguments(node: Any, error: BaseException) -> str:
    """Return which part of the config has given its arguments to the constructor that failed, and the file of it."""
    section = node._get_full_key(None) if OmegaConf.is_config(node) else ""
    path = re.search(r"full_key: (\S+)", str(error))
    part = OmegaConf.select(node, path[1]) if path and OmegaConf.is_config(node) else node
    part = part if OmegaConf.is_dict(part) else OmegaConf.create(part or {})
    target = str(part.get("_target_"))
    files = [file for file in sorted(CONFIGS.rglob("*.yaml")) if target in file.read_text(errors="replace")]
    place = ", ".join(str(file.relative_to(CONFIGS.parent)) for file in files[:3]) or "the config"
    key = ".".join(filter(None, [section, path[1] if path else ""]))
    try:
        text = freezing.to_frozen_yaml(part)
    except OmegaConfBaseException:  # by itself, the part lacks what its references lead to
        text = OmegaConf.to_yaml(part)
    arguments = textwrap.indent(text, "    ")
    return make_printable(f"The arguments are those of {key or target} ({place}):\n{arguments}")


def _raise_config_error_for_import(error: BaseException) -> None:
    """Raise `ConfigError`, with file and line, if a module of the researcher imports what is not there; else return."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    calls = [(frame.f_code.co_filename, line) for frame, line in walk_tb(cause.__traceback__)]
    own = [call for call in calls if Path(call[0]).is_relative_to(SOURCES)]
    if isinstance(cause, ImportError) and own:
        file, line = own[-1]
        rule = f"The module must be importable; {file}, line {line}: {type(cause).__name__}: {first_line(cause)}"
        key = re.search(r"full_key: (\S+)", str(error))
        fix = "install what it names, or correct that line"
        raise ConfigError(key[1] if key else "config", None, rule, fix) from error


def raise_config_error_for_arguments(error: BaseException) -> None:
    """Raise `ConfigError` if the error comes from a library that rejects the values of the config; else return.

    An error in the project's own code is the author's, who needs its traceback.
    """
    from hydra.errors import InstantiationException

    cause = error.__cause__ if isinstance(error, InstantiationException) else error
    if isinstance(cause, ConfigError) and cause is not error:  # raised by the object that was to be built
        raise cause
    # Subclasses of RuntimeError, such as running out of GPU memory, are not about arguments.
    if not isinstance(cause, ARGUMENT_ERRORS) and type(cause) is not RuntimeError:
        return
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(cause.__traceback__)]
    hydra_calls = [number for number, module in enumerate(modules) if module.split(".")[0] == "hydra"]
    # The modules below Hydra's last call. None of them: the call itself does not fit the signature.
    called = modules[hydra_calls[-1] + 1 :] if hydra_calls else list(researcher_packages()[:1])
    if called and called[0].partition(".")[0] in researcher_packages():
        return
    match = re.search(r"full_key: (\S+)", str(error))
    rejected_by = called[0] if called else "the class that it names"
    rule = f"must have values that {rejected_by} accepts: {type(cause).__name__}: {first_line(cause)}"
    fix = "correct these values; --cfg job shows the whole config"
    raise ConfigError(match[1] if match else "config", None, rule, fix) from error


def strip_check_keys(node: Any) -> Any:
    """Return a plain, resolved copy of a node without its `_check_` entries, which are no arguments of the class."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if isinstance(node, dict):
        return {key: strip_check_keys(value) for key, value in node.items() if key != "_check_"}
    return [strip_check_keys(value) for value in node] if isinstance(node, list) else node
