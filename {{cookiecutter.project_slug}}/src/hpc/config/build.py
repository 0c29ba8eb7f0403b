"""Build the objects that a config names."""

import re
from traceback import walk_tb
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hpc.config.errors import ConfigError, first_line
from hpc.config.project import researcher_packages


def build(node: Any, **kwargs: Any) -> Any:
    """Objects for a config node: the only caller of Hydra's instantiate.

    Raises:
        ConfigError: a library does not take the values that the config gives it.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(without_checks(node), _convert_="all", **kwargs)
    except InstantiationException as error:
        reject_bad_arguments(error)
        raise


# What constructors raise for values that they cannot use.
ARGUMENT_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


def reject_bad_arguments(error: BaseException) -> None:
    """Raise `ConfigError` where a library that the config names does not take the values that the config gives it.

    What fails within the project's own code does so for its author, with a traceback.
    """
    from hydra.errors import InstantiationException

    cause = error.__cause__ if isinstance(error, InstantiationException) else error
    if isinstance(cause, ConfigError) and cause is not error:  # by what was to be built
        raise cause
    if not isinstance(cause, ARGUMENT_ERRORS) and type(cause) is not RuntimeError:  # no want of memory, say
        return
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(cause.__traceback__)]
    calls = [number for number, module in enumerate(modules) if module.split(".")[0] == "hydra"]
    called = (
        modules[calls[-1] + 1 :] if calls else list(researcher_packages()[:1])
    )  # nothing: the call itself does not fit
    if called and called[0].partition(".")[0] in researcher_packages():
        return
    by = f" by {called[0]}" if called else ""
    key = found[1] if (found := re.search(r"full_key: (\S+)", str(error))) else "config"
    rule = f"the values must be such as are taken{by}: {type(cause).__name__}: {first_line(cause)}"
    raise ConfigError(key, None, rule, "correct them; --cfg job shows the whole config") from error


def build_group(group: DictConfig) -> list[Any]:
    """The objects of a group; without entries that are null, and without objects that say they are not `enabled`.

    Lightning calls every callback at every step: one that has nothing to do would cost time all the same.
    """
    built = [build(node) for node in group.values() if node]
    return [one for one in built if getattr(one, "enabled", True)]


def without_checks(node: Any) -> Any:
    """A plain, resolved copy of a node without the `_check_` entries, which are ours and not arguments."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if isinstance(node, dict):
        return {key: without_checks(value) for key, value in node.items() if key != "_check_"}
    return [without_checks(value) for value in node] if isinstance(node, list) else node
