"""The repeated blocks of a module: what strategies shard, recompute and compile one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hpc.config.errors import ConfigError, closest_word, join_names

LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Blocks:
    """Blocks in the order in which a module holds them.

    Attributes:
        paths: of the lists that hold them, as `get_submodule` takes them.
        owner: the part of the module that holds the first list.
    """

    paths: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    owner: nn.Module

    def __str__(self) -> str:
        kinds = " and ".join(dict.fromkeys(type(block).__name__ for block in self.modules))
        return f"{join_names(self.paths)} ({len(self.modules)} {kinds})"


def find_blocks(module: nn.Module, paths: str | Sequence[str] | None = None) -> Blocks | None:
    """Return the blocks of a module; None if it has none.

    They are what `paths` names; or else the attribute `blocks` of the module or of a part; or else the longest list of
    equal parts, of which the first counts if several are as long. Lists like the found one, as a teacher's, join it.

    Args:
        paths: of one or several lists of blocks, as `strategy.blocks` gives them; an empty list: there are none.

    Raises:
        ConfigError: a path does not lead to a list of modules.
    """
    if paths:
        paths = (paths,) if isinstance(paths, str) else tuple(paths)
        modules = tuple(block for path in paths for block in _list_at(module, path))
        return Blocks(paths, modules, module.get_submodule(paths[0].rpartition(".")[0]))
    if paths is not None:
        return None
    for name, part in module.named_modules():
        if isinstance(part, LISTS) and name.rpartition(".")[2] == "blocks" and len(part):
            return _blocks(module, name, part)
    lists = list(_lists_of_equal_parts(module))
    if not lists:
        return None
    return _blocks(module, *max(lists, key=lambda entry: len(entry[1])))


def _blocks(module: nn.Module, path: str, parts: nn.ModuleList | nn.Sequential) -> Blocks:
    lists = {name: part for name, part in module.named_modules() if isinstance(part, LISTS)}
    alike = {name: part for name, part in lists.items() if _kinds(part) == _kinds(parts)}
    modules = tuple(block for part in alike.values() for block in part)
    return Blocks(tuple(alike), modules, module.get_submodule(path.rpartition(".")[0]))


def _lists_of_equal_parts(module: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    """Yield each list, with its path, whose parts have one class and parameters of the same shapes."""
    for name, part in module.named_modules():
        if isinstance(part, LISTS) and len(part) > 1 and len(kinds := set(_kinds(part))) == 1 and kinds.pop()[1]:
            yield name, part


def _kinds(parts: nn.ModuleList | nn.Sequential) -> list[tuple[type, tuple[Any, ...]]]:
    """Return the class of each part, and the shapes of its parameters."""
    return [(type(part), tuple(parameter.shape for parameter in part.parameters())) for part in parts]


def _list_at(module: nn.Module, path: str) -> nn.ModuleList | nn.Sequential:
    parts = dict(module.named_modules())
    if isinstance(parts.get(path), LISTS) and len(parts[path]):  # type: ignore[arg-type]
        return parts[path]  # type: ignore[return-value]
    lists = [name for name, part in parts.items() if isinstance(part, LISTS) and len(part)]
    shown = ", ".join(lists[:10]) or "none"
    rule = f"must name a list of blocks (torch.nn.ModuleList or Sequential) of {type(module).__name__}; it has {shown}"
    fix = f"strategy.blocks={closest_word(path, lists, 'null')}"
    raise ConfigError("strategy.blocks", path, rule, fix)
