"""serve: predictions over HTTP."""

import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

from vitmha.cli.arguments import (
    CommandParser,
    add_batch_size,
    add_device,
    add_model,
    parse_device,
    positive_int,
    refuse,
)


def main(args: Sequence[str]) -> None:
    """Serves until it is interrupted."""
    parser = CommandParser(prog="vitmha serve", description="POST an image to /predict, receive its labels as JSON.")
    add_model(parser, note=", or a directory that vitmha export wrote for OpenVINO")
    parser.add_argument("--host", choices=("127.0.0.1", "0.0.0.0", "::"), default="127.0.0.1", help="default 127.0.0.1")
    parser.add_argument("--port", type=positive_int, default=8000, metavar="N", help="1024 to 65535; default 8000")
    add_device(parser)
    add_batch_size(parser, default=16)
    help_ = "largest upload in megabytes; default 20"
    parser.add_argument("--max-upload-mb", type=positive_int, default=20, metavar="N", help=help_)
    parsed = parser.parse_args(args)
    if not 1024 <= parsed.port <= 65535:
        refuse(f"--port must be from 1024 to 65535, got {parsed.port}.")
    if find_spec("litserve") is None:
        refuse("serve needs LitServe: pip install 'vitmha[serve]'.")

    from vitmha.errors import UserError
    from vitmha.inference.classifier import Classifier
    from vitmha.inference.engines import is_openvino_dir

    device = "cpu" if is_openvino_dir(parsed.model) else parse_device(parsed.device).type
    # Loaded here first, so that an unusable model is an error of this command, not of a worker process.
    if not Classifier(parsed.model, device="cpu").class_names:
        raise UserError(f"model {parsed.model} has no classification head, so there are no labels to serve.")
    from vitmha.inference.server import build_server

    server = build_server(parsed.model, device=device, batch_size=parsed.batch_size, max_upload_mb=parsed.max_upload_mb)
    main_process = os.getpid()

    def stop(number: int, _: FrameType | None) -> NoReturn:
        """Acts as Ctrl-C, since only on that LitServe ends the processes that it has forked."""
        if os.getpid() == main_process:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    print(f"POST images to http://{parsed.host}:{parsed.port}/predict", file=sys.stderr)
    server.run(
        host=parsed.host,
        port=parsed.port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
    )
