"""Decide which `_target_`s of a run directory may be built.

A run directory may come from anybody, while configs/ is the fork's own. So only the config of a run directory is
checked: its config.yaml, or what its code/configs and overrides.json compose to. Imports neither torch nor lightning.
"""

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hpc.config import defaults
from hpc.config.errors import ConfigError, join_key, make_printable, raise_problems
from hpc.config.project import CONFIGS, HPC, PROJECT, config_files, researcher_packages
from hpc.system import former_names

TRUSTED_FILE = CONFIGS / "trusted.yaml"
# Parts of trusted packages that start programs or execute what they read. trusted.yaml cannot allow them.
NEVER_TRUSTED = (
    "lightning.data", "lightning.fabric.cli", "lightning.pytorch.cli", "lightning.pytorch.demos",
    "lightning.pytorch.serve", "torch._dynamo", "torch._inductor", "torch.distributed.elastic",
    "torch.distributed.launch", "torch.distributed.launcher", "torch.distributed.run", "torch.export", "torch.fx",
    "torch.hub", "torch.jit", "torch.load", "torch.multiprocessing", "torch.onnx", "torch.ops", "torch.package",
    "torch.serialization", "torch.testing", "torch.utils.benchmark", "torch.utils.cpp_extension",
    "torch.utils.data.datapipes", "torch.utils.model_zoo",
)  # fmt: skip
# Parts of trusted packages that touch or download files as soon as they are built: configs/ must name the class itself.
TRUSTED_IF_NAMED = (
    "lightning.fabric", "lightning.pytorch.loggers", "lightning.pytorch.profilers", "lightning.pytorch.utilities",
    "torchmetrics.audio.dnsmos", "torchmetrics.audio.nisqa", "torchmetrics.functional", "torchmetrics.image.arniqa",
    "torchmetrics.image.dists", "torchmetrics.image.fid", "torchmetrics.image.inception", "torchmetrics.image.kid",
    "torchmetrics.image.lpip", "torchmetrics.image.mifid", "torchmetrics.image.perceptual_path_length",
    "torchmetrics.multimodal", "torchmetrics.text.bert", "torchmetrics.text.infolm", "torchmetrics.text.rouge",
    "torchmetrics.text.sacre_bleu", HPC,
)  # fmt: skip
# Classes of earlier versions that configs of projects and of runs may still name, and what to write instead.
LOGGERS, IN_FILE = "lightning.pytorch.loggers", "in configs/logger, of a run in its config.yaml"
FORMER_CLASSES = {
    f"{HPC}.training.histograms.Histograms": "an entry of your own; docs/bring-your-own.md has the class",
    f"{HPC}.training.wandb_logger.OfflineWandbLogger": f"_target_: {LOGGERS}.WandbLogger and offline: true {IN_FILE}",
    f"{HPC}.training.mlflow_logger.LocalMLFlowLogger": (
        f"_target_: {LOGGERS}.MLFlowLogger and, for save_dir, tracking_uri: sqlite:///${{run_dir}}/mlflow.db {IN_FILE}"
    ),
}
# Resolvers that make nodes from text, or whose own name is computed: `reject_untrusted` cannot see such nodes.
# All other resolvers lead to nodes that are checked where they stand.
NODE_MAKING_RESOLVERS = re.compile(r"\$\{\s*(oc\.(create|decode)\b|[^:{}]*\$\{)")
TARGETS = re.compile(r"""(?<![\w.])_(target|check)_["']?[ \t]*:[ \t]*["']?(?!null\b)([\w.]+)""")
# Classes of data, which do nothing else when they are built.
PLAIN_CLASSES = {f"builtins.{kind.__name__}" for kind in (bool, int, float, complex, str, list, tuple, dict, set)}
PLAIN_CLASSES |= {"builtins.frozenset", "builtins.range", "builtins.slice", "types.SimpleNamespace"}


def print_untrusted(cfg: DictConfig) -> None:
    """Print a note at the first start of a run if a resume would reject what its config builds."""
    if _is_snapshot_of(Path(cfg.run_dir)):  # a job's copy of the code trusts the run's config
        return
    try:
        _reject_untrusted(cfg, Path(cfg.run_dir))
    except ConfigError as error:
        rule = error.rule.partition(": this comes")[0]
        note = f"{error.key}={error.value} is built in this run, but a resume will be rejected: it {rule}"
        print(f"note: {make_printable(note)}. Try: {make_printable(error.fix)}", flush=True)


def reject_untrusted(cfg: DictConfig, run_dir: Path) -> None:
    """Check every `_target_` and `_check_` of a run directory's config, before anything is built.

    Each must be a class of a trusted package, or a name in a trusted package that a file of configs/ names, too.

    Raises:
        ConfigError: the first that is neither.
    """
    if not _is_snapshot_of(run_dir):
        _reject_untrusted(cfg, run_dir)


def former_class_problem(key: str, value: object) -> ConfigError | None:
    """Return the error of a `_target_` that is a class of an earlier version."""
    if not isinstance(value, str) or value not in FORMER_CLASSES:
        return None
    return ConfigError(key, value, "This class was one of earlier versions", FORMER_CLASSES[value])


def _reject_untrusted(cfg: DictConfig, run_dir: Path) -> None:
    for key, value in leaves(OmegaConf.to_container(cfg, resolve=False)):
        kind = key.rpartition(".")[2]
        if isinstance(value, str) and NODE_MAKING_RESOLVERS.search(value):
            rule = "must not create nodes from text or compute names: this comes from a run directory"
            raise ConfigError(key, ascii(value), rule, _suggest_fix(run_dir), only_this_rank=True)
        is_built = kind in ("_target_", "_check_") and value is not None
        raise_problems([former_class_problem(key, value)])
        if is_built and (rule := broken_rule(value, kind)):
            rule += ": this comes from a run directory"
            raise ConfigError(key, ascii(value), rule, _suggest_fix(run_dir, value), only_this_rank=True)


def broken_rule(value: Any, kind: str) -> str:
    """Return the rule that forbids to build this `_target_`, or to call this `_check_`; "" if none does."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value, re.ASCII):
        return "must be the dotted name of a class"
    if value in PLAIN_CLASSES:
        return ""
    value = former_names.present_name(value)
    if not _is_below(value, trusted_packages()):
        return f"must be in a trusted package ({', '.join(trusted_packages())})"
    if _is_below(value, NEVER_TRUSTED):
        return "must not start programs or execute what it reads"
    if value in names_in_configs()[kind]:
        return ""
    if kind == "_check_" or _is_below(value, TRUSTED_IF_NAMED) or "._" in value:
        return "must be named by a file of configs/"
    module, _, name = value.rpartition(".")
    try:  # Hydra would follow any attribute, but torch.nn.parallel.distributed.os, for example, is no module of torch.
        target = getattr(import_module(module), name, None)
    except Exception as error:  # importing a trusted package can fail in any way
        return f"cannot be imported: {type(error).__name__}"
    if not isinstance(target, type):
        return "must be a class, or named by a file of configs/"
    full_name = f"{target.__module__}.{target.__name__}"
    if not _is_below(target.__module__, trusted_packages()) or _is_below(full_name, NEVER_TRUSTED):
        return f"must be defined in a trusted package, not in {target.__module__}"
    if _is_below(full_name, TRUSTED_IF_NAMED):
        return f"must be named by a file of configs/, as {full_name} may touch files"
    return ""


@cache
def trusted_packages() -> tuple[str, ...]:
    """Return the project's own packages and those of configs/trusted.yaml.

    Raises:
        ConfigError: that file is not a list of names.
    """
    try:
        names = OmegaConf.to_container(OmegaConf.load(TRUSTED_FILE)) if TRUSTED_FILE.is_file() else []
        if not isinstance(names, list) or not all(isinstance(name, str) and name.strip(".") for name in names):
            raise ValueError("it is not a list of names")
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        rule = f"must be a list of packages: {str(error).splitlines()[0]}"
        raise ConfigError(str(TRUSTED_FILE), None, rule, "- torch.nn, and a line for each other package") from None
    return (HPC, *researcher_packages(), *map(str, names))


@cache
def names_in_configs() -> dict[str, set[str]]:
    """Return the names in the files of configs/, and the library's defaults, those of `_target_` and of `_check_`."""
    names: dict[str, set[str]] = {"_target_": set(), "_check_": set()}
    names["_target_"] |= {value for key, value in leaves(defaults.all_defaults()) if key.endswith("._target_")}
    for file in config_files():
        try:
            text = re.sub(r"(?m)(^|\s)#.*", "", file.read_text(encoding="utf-8", errors="replace"))
        except FileNotFoundError:  # gone since it was listed
            continue
        for kind, name in TARGETS.findall(text):
            names[f"_{kind}_"].add(former_names.present_name(name))
    return names


def leaves(node: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return all leaves of a plain container with their dotted keys. A `_target_` or `_check_` counts as one leaf."""
    if isinstance(node, dict | list) and prefix.rpartition(".")[2] not in ("_target_", "_check_"):
        entries = node.items() if isinstance(node, dict) else enumerate(node)
        return [leaf for key, value in entries for leaf in leaves(value, join_key(prefix, str(key)))]
    return [(prefix, node)]


def _is_below(name: str, packages: tuple[str, ...]) -> bool:
    """Return whether a dotted name is one of the packages or lies in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _is_snapshot_of(run_dir: Path) -> bool:
    """Return whether this program is the snapshot in the run directory, or in the folder of its array.

    Its config is then to be trusted as much as the program itself. The test is where this program lies, as a link in
    the run directory could lead to any project.
    """
    folders = (run_dir.resolve(), run_dir.resolve().parent)
    return PROJECT.name == "code" and PROJECT.parent in folders and (PROJECT.parent / "made_by.json").is_file()


def _suggest_fix(run_dir: Path, target: Any = None) -> str:
    """Return what to do if the run is to be trusted."""
    if not isinstance(target, str) or _is_below(target, NEVER_TRUSTED):
        return f"python {run_dir}/code/train.py resume={run_dir}, which runs its own code, if you trust it"
    if line := trusting_line(target):
        return line
    return "name it in a file of configs/, if you trust it"


def trusting_line(target: str) -> str:
    """Return the line by which the package of this name would be trusted; "" if it is, or never can be."""
    if _is_below(target, (*trusted_packages(), *NEVER_TRUSTED)):
        return ""
    return f"a line - {target.partition('.')[0]} in {TRUSTED_FILE}, if you trust this package"
