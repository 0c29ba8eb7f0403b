"""Make one large file out of many small ones, once, on a login node, before jobs train on it:

  python tools/pack.py data.dir=FOLDER out=FILE.h5 [data.image_size=224]       images, decoded and resized
  python tools/pack.py data.files=TEXT out=FILE.npy                            text, as bytes
  python tools/pack.py data.files=TEXT out=FILE.npy tokenizer=tokenizer.json   by a tokenizer
  python tools/pack.py data.files=TEXT out=FILE.npy tokenizer=bpe data.vocab_size=32768   by one trained on TEXT
  python tools/pack.py --verify FILE                                           compare all of it with its checksums

It keeps all cores busy that it is given (taskset -c 0-7 python ...: eight). Interrupted, it goes on when called again.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hpc.config import errors
from hpc.data import pack_files


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore  # names of files need not be UTF-8
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="key=value", help="out=, tokenizer=, and keys of configs/data")
    parser.add_argument("--verify", metavar="FILE", help="a file that this program made")
    asked = parser.parse_args()
    lines = pack_files.verify(asked.verify) if asked.verify else pack_files.pack(asked.words)
    print("\n".join(map(errors.printable, lines)))


if __name__ == "__main__":
    with errors.exit_on_config_error():
        main()
