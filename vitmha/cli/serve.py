"""serve: a model behind HTTP."""

import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

from vitmha.cli.arguments import CommandParser, parse_device, positive_int
from vitmha.errors import UserError
from vitmha.inference.classifier import Classifier
from vitmha.inference.engines import is_openvino_dir


def main(args: Sequence[str]) -> None:
    """Serves until it is interrupted."""
    parser = CommandParser(prog="vitmha serve", description="POST a picture to /predict, get its labels as JSON.")
    parser.add_argument("model", metavar="M", help="a model folder, a .ckpt, timm:NAME, hf:REPO, ...")
    parser.add_argument("--host", choices=("127.0.0.1", "0.0.0.0", "::"), default="127.0.0.1", help="default 127.0.0.1")
    parser.add_argument("--port", type=positive_int, default=8000, metavar="N", help="1024 to 65535; default 8000")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    parser.add_argument(
        "--batch-size", type=positive_int, default=16, metavar="N", help="most pictures in a pass; default 16"
    )
    parser.add_argument(
        "--max-megabytes", type=positive_int, default=20, metavar="N", help="largest upload; default 20"
    )
    given = parser.parse_args(args)
    if find_spec("litserve") is None:
        raise UserError("serve needs LitServe: pip install 'vitmha[serve]'.")
    if not 1024 <= given.port <= 65535:
        raise UserError(f"--port must be from 1024 to 65535, got {given.port}.")
    device = "cpu" if is_openvino_dir(given.model) else parse_device(given.device).type
    # What is wrong with the model is said here, and not by a process of the server.
    if not Classifier(given.model, device="cpu").class_names:
        raise UserError(f"{given.model} has no head and so no classes to answer with.")
    from vitmha.inference.server import server

    made = server(given.model, device=device, batch_size=given.batch_size, max_megabytes=given.max_megabytes)
    own = os.getpid()

    def stop(number: int, _: FrameType | None) -> NoReturn:
        """As Ctrl-C, on which alone LitServe ends the processes that it has forked."""
        if os.getpid() == own:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    print(f"POST pictures to http://{given.host}:{given.port}/predict", file=sys.stderr)
    made.run(
        host=given.host,
        port=given.port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
    )
