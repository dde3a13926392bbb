"""serve: predictions over HTTP."""

import errno
import os
import signal
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

from vitmha.cli.arguments import (
    CommandParser,
    add_batch_size,
    add_device,
    add_max_pixels,
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
    add_max_pixels(parser)
    help_ = "seconds in which an upload must arrive; default 60"
    parser.add_argument("--upload-timeout", type=positive_int, default=60, metavar="N", help=help_)
    parsed = parser.parse_args(args)
    if not 1024 <= parsed.port <= 65535:
        refuse(f"--port must be from 1024 to 65535, got {parsed.port}.")
    if find_spec("litserve") is None:
        refuse("serve needs LitServe: pip install 'vitmha[serve]'.")
    _check_free(parsed.host, parsed.port)

    from vitmha.inference.engines import is_openvino_dir
    from vitmha.inference.server import serve

    device = "cpu" if is_openvino_dir(parsed.model) else parse_device(parsed.device).type
    main_process = os.getpid()

    def stop(number: int, _: FrameType | None) -> NoReturn:
        """Acts as Ctrl-C, since only on that LitServe ends the processes that it has forked."""
        if os.getpid() == main_process:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        serve(
            parsed.model,
            host=parsed.host,
            port=parsed.port,
            device=device,
            batch_size=parsed.batch_size,
            max_upload_mb=parsed.max_upload_mb,
            max_pixels=parsed.max_pixels,
            upload_timeout=parsed.upload_timeout,
            on_listening=lambda: print(f"POST images to http://{host}:{parsed.port}/predict", file=sys.stderr),
        )
    finally:
        signal.signal(signal.SIGTERM, previous)


def _check_free(host: str, port: int) -> None:
    """Refuses an address on which the server could not listen, before the model is loaded."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind((host, port))
    except OSError as error:
        reason = "is in use, choose another" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        refuse(f"--port {port} of --host {host} {reason}.")
