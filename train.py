"""`python train.py` trains configs/quickstart.yaml; with arguments it is `vitmha fit`."""

import sys
from pathlib import Path

from vitmha.cli import main

QUICKSTART = Path(__file__).parent / "configs" / "quickstart.yaml"

if __name__ == "__main__":
    words = sys.argv[1:] or ["--config", str(QUICKSTART)]
    # Lightning starts the other processes of a run with these words again.
    main(words if words[0] == "fit" else ["fit", *words])
