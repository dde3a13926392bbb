"""`python train.py ...` is `vitmha fit ...`: without arguments, it trains the shipped config `quickstart`."""

import sys

from vitmha.cli import main

if __name__ == "__main__":
    args = sys.argv[1:]
    main(args if args[:1] == ["fit"] else ["fit", *args])
