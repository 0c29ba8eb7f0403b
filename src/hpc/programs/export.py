"""Write a run's weights as one file, which needs no hpc: python tools/export.py RUN_DIR OUT [--step N | --best]

  OUT.ckpt         for Lightning: MyModule.load_from_checkpoint("OUT.ckpt"), trainer.test(module, ckpt_path="OUT.ckpt")
  OUT.pt           the state_dict, for torch.load
  OUT.safetensors  the same for any program, with one tensor in memory at a time

Reads the newest complete checkpoint, of any strategy. With --hf, OUT is a new folder for `from_pretrained` of Hugging
Face: the model with its config, its tokenizer, and adapters of peft merged into the weights.
"""

import argparse
from pathlib import Path

from hpc.checkpoint import export
from hpc.config import errors


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run directory, or a checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--step", type=int, metavar="N", help="export the checkpoint of this step")
    choice.add_argument("--best", action="store_true", help="export the best checkpoint")
    parser.add_argument("--hf", action="store_true", help="write a folder for from_pretrained of Hugging Face")
    parser.add_argument("--force", action="store_true", help="overwrite OUT, if it is a file")
    arguments = parser.parse_args()
    if arguments.hf:
        export_folder(arguments)
        return
    if arguments.out.exists() and not arguments.force:
        rule = "must be a new file, and this one exists"
        raise errors.ConfigError("OUT", arguments.out, rule, "another name, or --force")
    checkpoint, num_bytes = export.export(arguments.run, arguments.out, step=arguments.step, best=arguments.best)
    print(errors.make_printable(f"{arguments.out}: {num_bytes} bytes from {checkpoint}"))


def export_folder(arguments: argparse.Namespace) -> None:
    if arguments.out.exists():
        raise errors.ConfigError("OUT", arguments.out, "must be a new folder, and this one exists", "another name")
    from hpc.checkpoint import huggingface_folder  # torch from here on

    choice = {"step": arguments.step, "best": arguments.best}
    checkpoint = huggingface_folder.write(arguments.run.absolute(), arguments.out, **choice)
    print(errors.make_printable(f"{arguments.out}: a model for from_pretrained, from {checkpoint}"))


def run() -> None:
    """Do what the command line says, and exit."""
    with errors.exit_on_config_error():
        main()
