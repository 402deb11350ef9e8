"""The command `windrow bench`: `python -m windrow.bench conv2d --devices 0,1`.

As a rank of a job, `torchrun --nproc-per-node 2 -m windrow.bench conv2d --gather`, it takes its place
from torchrun's variables.
"""

import signal
import sys

from windrow._native import command


def main():
    # The command runs outside of the interpreter, which could not act on Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(command(["bench", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
