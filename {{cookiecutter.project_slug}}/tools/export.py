"""Write a run's weights as one safetensors file: python tools/export.py RUN_DIR OUT.safetensors [--step N | --best]

They come from the newest whole checkpoint, of any strategy, with one tensor in memory at a time.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hpc.checkpoint import export
from hpc.config import errors


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run directory, or a checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step, not the newest")
    which.add_argument("--best", action="store_true", help="the best checkpoint, not the newest")
    parser.add_argument("--force", action="store_true", help="overwrite OUT.safetensors")
    words = parser.parse_args()
    if words.out.exists() and not words.force:
        raise errors.ConfigError("OUT", words.out, "is there already", "another name, or --force")
    checkpoint, size = export.export(words.run, words.out, step=words.step, best=words.best)
    print(errors.printable(f"{words.out}: {size} bytes from {checkpoint}"))


if __name__ == "__main__":
    with errors.exit_on_config_error():
        main()
