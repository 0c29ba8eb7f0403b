"""Export of a run's model as a folder that `from_pretrained` of Hugging Face loads."""

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from hpc.checkpoint import export, tokenizer_folder, trained
from hpc.config import extras
from hpc.config.errors import ConfigError
from hpc.run import frozen_config


def write(run_dir: Path, out: Path, *, step: int | None = None, best: bool = False) -> Path:
    """Write the model of a run, with the tokenizer of the folder that it came from; return the checkpoint.

    The adapters of peft are merged into the weights. The folder appears whole or not at all.

    Args:
        run_dir: whose config builds the module, from trusted classes only.
        out: a new folder.
        step, best: the checkpoint, as in `export.choose_checkpoint`.

    Raises:
        ConfigError: the module has no single model of transformers, its tokenizer cannot be loaded, or the folder
            cannot be written.
    """
    extras.require("huggingface", "--hf", None, modules=["peft", "transformers"])
    if not out.parent.is_dir():
        raise ConfigError("OUT", out, "must be in a folder that exists", f"mkdir -p {shlex.quote(str(out.parent))}")
    cfg = frozen_config.read_compatible(run_dir)
    checkpoint = export.choose_checkpoint(run_dir, step=step, best=best)
    module, _ = trained.load_module(cfg, checkpoint)
    model = merge_adapters(find_model(module))
    source = model.name_or_path  # of a model that was not loaded from a folder it is empty
    tokenizer = tokenizer_folder.load_tokenizer(Path(source)) if source else None
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        part.mkdir()
        model.save_pretrained(part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        part.replace(out)
    except OSError as error:
        rule, given = "must be a folder that can be written", f"{out} ({error.strerror or error})"
        raise ConfigError("OUT", given, rule, "a folder in a directory with space for it") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return checkpoint


def find_model(module: nn.Module) -> Any:
    """Return the model of transformers or peft that a module holds. A model within another one is a part of that.

    Raises:
        ConfigError: there is none, or there are several.
    """
    from peft import PeftModel  # pyright: ignore[reportMissingImports]
    from transformers import PreTrainedModel  # pyright: ignore[reportMissingImports]

    models: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in models)
        if isinstance(part, PreTrainedModel | PeftModel) and not is_inside:
            models[name] = part
    if len(models) == 1:
        return next(iter(models.values()))
    rule = "must hold one model of Hugging Face (a transformers.PreTrainedModel or peft.PeftModel), and it holds "
    rule += f"several: {', '.join(models)}" if models else "none"
    raise ConfigError("model", type(module).__name__, rule, "without --hf: all weights as one safetensors file")


def merge_adapters(model: Any) -> Any:
    from peft import PeftModel  # pyright: ignore[reportMissingImports]

    if not isinstance(model, PeftModel):
        return model
    if not hasattr(model.base_model, "merge_and_unload"):
        kind = getattr(model.active_peft_config.peft_type, "value", None)
        rule = "must have adapters that can be merged into the weights, such as LoRA"
        raise ConfigError("model", kind, rule, "without --hf: all weights as one safetensors file")
    return model.merge_and_unload()
