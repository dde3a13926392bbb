"""`python train.py` trains the shipped config `quickstart`; with arguments it is `vitmha fit`."""

import sys

from vitmha.cli import main

if __name__ == "__main__":
    args = sys.argv[1:] or ["--config", "quickstart"]
    main(args if args[0] == "fit" else ["fit", *args])
