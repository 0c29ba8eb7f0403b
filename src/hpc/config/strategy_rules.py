"""Rules on the section `strategy`, and on what it needs of the trainer, the network and the callbacks.

Each raises `ConfigError` for the first value that breaks it.
"""

from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from hpc.config import signatures
from hpc.config.errors import ConfigError, require_at_least
from hpc.config.project import is_project_code
from hpc.config.sections import StrategyConfig, TrainerConfig

MAX_SUGGESTED_SIZE = 4096  # more devices work in no tensor-parallel group


def check_strategy(strategy: StrategyConfig, trainer: TrainerConfig, *, cfg: DictConfig) -> None:
    """Check sizes, precision, and what DeepSpeed and the callbacks need."""
    world_size = trainer.num_nodes * (trainer.devices or 1)
    if not isinstance(cfg.strategy.lightning, DictConfig) or "_target_" not in cfg.strategy.lightning:
        rule = "must be a node with a _target_, as the files of configs/strategy have it"
        raise ConfigError("strategy.lightning", cfg.strategy.lightning, rule, "strategy=ddp, or another one of --help")
    require_at_least("strategy.tensor_parallel_size", strategy.tensor_parallel_size, minimum=1)
    if strategy.kind == "single" and world_size > 1:
        name, number = ("num_nodes", trainer.num_nodes) if trainer.num_nodes > 1 else ("devices", trainer.devices)
        rule = "must be 1 with strategy=single, which trains on one device"
        raise ConfigError(f"trainer.{name}", number, rule, f"trainer.{name}=1, or strategy=ddp")
    _check_tensor_parallel_size(strategy, trainer, world_size=world_size)
    if strategy.kind == "fsdp" and trainer.precision == "16-mixed":
        # Shards would have to agree on the loss scale, which Lightning 2.6 does not do for FSDP2.
        rule = f"must be one of 32-true, 64-true, bf16-mixed, bf16-true, 16-true with strategy={strategy.name}"
        raise ConfigError("trainer.precision", trainer.precision, rule, "trainer.precision=bf16-mixed")
    if strategy.kind == "deepspeed":
        _check_deepspeed(strategy, trainer, cfg=cfg)
    _check_weight_callbacks(strategy, cfg=cfg)


def check_model_network(strategy: StrategyConfig, cfg: DictConfig) -> None:
    """Check that a network that the config names has a tensor-parallel plan if the strategy needs one."""
    target = OmegaConf.select(cfg, "model.network._target_") or ""
    if not is_project_code(target):
        return
    member = "tensor_parallel_plan"
    if strategy.tensor_parallel_size > 1 and member not in signatures.read_signature(target).members:
        rule = f"must be a class with `{member}`, which strategy={strategy.name} uses"
        fix = f"give the class `{member}` (see models/gpt.py), or strategy=ddp"
        raise ConfigError("model.network", target, rule, fix)


def _check_tensor_parallel_size(strategy: StrategyConfig, trainer: TrainerConfig, *, world_size: int) -> None:
    key, size = "strategy.tensor_parallel_size", strategy.tensor_parallel_size
    if size > 1 and strategy.kind != "fsdp":
        fix = f"{key}=1, or strategy=fsdp with a network that has `tensor_parallel_plan` (see models/gpt.py)"
        raise ConfigError(key, size, f"must be 1 with strategy={strategy.name}", fix)
    if world_size % size:
        sizes = f"{trainer.num_nodes} nodes * {trainer.devices} devices = {world_size}"
        rule = f"must be a divisor of the world size ({sizes})"
        raise ConfigError(key, size, rule, f"{key}={_closest_divisor(world_size, size)}")


def _check_weight_callbacks(strategy: StrategyConfig, *, cfg: DictConfig) -> None:
    """Check the strategy of callbacks that freeze weights, or average them."""
    for key, node in signatures.find_targets(OmegaConf.to_container(cfg.callbacks), "callbacks"):
        if node["_target_"].endswith("Finetuning") and strategy.kind == "deepspeed":
            rule = "must be used without DeepSpeed: DeepSpeed trains no parameters that are released later"
            raise ConfigError(key, None, rule, f"strategy=ddp or fsdp, or {key}=null")
        if node["_target_"].endswith("WeightAveraging") and strategy.kind not in ("single", "ddp"):
            rule = f"must be used with strategy=single or ddp, not {strategy.name}: it averages whole weights"
            raise ConfigError(key, None, rule, f"strategy=ddp, or {key}=null")


def _check_deepspeed(strategy: StrategyConfig, trainer: TrainerConfig, *, cfg: DictConfig) -> None:
    if find_spec("deepspeed") is None:
        rule = "It needs the package deepspeed, which is not installed"
        raise ConfigError("strategy", strategy.name, rule, "pip install deepspeed -c constraints.txt")
    if trainer.precision == "64-true":
        rule = "must be a precision of 32 or 16 bit with DeepSpeed"
        raise ConfigError("trainer.precision", trainer.precision, rule, "trainer.precision=32-true")
    if trainer.gradient_clip_algorithm == "value" and trainer.gradient_clip_val:
        rule = "must be norm with DeepSpeed, which clips gradients itself"
        fix = "trainer.gradient_clip_algorithm=norm, or strategy=ddp or fsdp"
        raise ConfigError("trainer.gradient_clip_algorithm", "value", rule, fix)
    if strategy.compile and cfg.strategy.lightning.stage == 3:
        rule = "must be false with ZeRO-3, which gathers parameters in hooks that a compiled block would not run"
        raise ConfigError("strategy.compile", True, rule, "strategy.compile=false, or strategy=fsdp")


def _closest_divisor(number: int, target: int) -> int:
    """Return the divisor of `number` that is closest to `target`, and at most `MAX_SUGGESTED_SIZE`."""
    divisors = (n for n in range(1, min(number, MAX_SUGGESTED_SIZE) + 1) if number % n == 0)
    return min(divisors, key=lambda divisor: abs(divisor - target))
