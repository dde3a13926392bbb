"""`python train.py` trains configs/quickstart.yaml; with arguments it is `vitmha fit`."""

import sys
from pathlib import Path

from vitmha.cli import main

QUICKSTART = Path(__file__).parent / "configs" / "quickstart.yaml"

if __name__ == "__main__":
    args = sys.argv[1:] or ["--config", str(QUICKSTART)]
    main(args if args[0] == "fit" else ["fit", *args])
