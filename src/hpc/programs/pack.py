"""Pack many small files into a large one, once, before jobs train on it:

  python tools/pack.py data.dir=FOLDER out=FILE.npy [data.image_size=224]      images, decoded and resized
  python tools/pack.py data.files=TEXT out=FILE.npy                            text, as bytes
  python tools/pack.py data.files=TEXT out=FILE.npy tokenizer=tokenizer.json   as tokens
  python tools/pack.py --verify FILE                                           compare a file with its checksums

FILE.npy is an array, and FILE.npy.json says what it holds. It uses all cores of the process (eight of them: taskset -c
0-7 python ...). What is interrupted begins anew, so pack in a job what takes hours.
"""

import argparse
import sys

from hpc.config import errors
from hpc.packed import pack_command


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore  # file names need not be UTF-8
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="key=value", help="out=, tokenizer=, and keys of configs/data")
    parser.add_argument("--verify", metavar="FILE", help="a file that this program has written")
    arguments = parser.parse_args()
    lines = pack_command.verify(arguments.verify) if arguments.verify else pack_command.pack(arguments.words)
    print("\n".join(map(errors.make_printable, lines)))


def run() -> None:
    """Do what the command line says, and exit."""
    with errors.exit_on_config_error():
        main()
