"""Downloads of datasets, with one message when they fail."""

from collections.abc import Callable
from pathlib import Path

from vitmha.errors import UserError


def _download(folder: Path, download: Callable[[], object]) -> None:
    try:
        download()
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{folder} is absent and its download failed ({reason}): put the official files there, "
            "or name the folder that holds them with --data.root"
        ) from None


def _unreadable(folder: Path, error: Exception) -> UserError:
    return UserError(
        f"{folder} does not hold the official files in good order ({error}): delete it and it is downloaded again, "
        "or name another folder with --data.root"
    )
