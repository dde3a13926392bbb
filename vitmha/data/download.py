"""Downloads of datasets, with one message if they fail."""

from collections.abc import Callable
from pathlib import Path

from vitmha.errors import UserError


def download_to(directory: Path, download: Callable[[], object]) -> None:
    """Runs a download.

    Args:
        directory: Where the files of the dataset belong; only named in the error.
        download: Fetches the files.

    Raises:
        UserError: The download failed.
    """
    try:
        download()
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{directory} does not exist and its download failed ({reason}): put the official files there, or set root "
            "to the directory that holds them"
        ) from None


def unreadable_files(directory: Path, error: Exception) -> UserError:
    """The error for files of a dataset that are incomplete or corrupt."""
    return UserError(
        f"{directory} does not hold the official files, complete and intact ({error}): delete it, and it is downloaded "
        "again, or set root to another directory"
    )
