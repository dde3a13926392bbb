"""pack: a folder of pictures into a few large files."""

from collections.abc import Sequence
from pathlib import Path

from vitmha.cli.arguments import CommandParser, fraction, writable_dir
from vitmha.data import shards
from vitmha.data.image_folder import find_files


def main(args: Sequence[str]) -> None:
    """Packs a folder of pictures into shards."""
    parser = CommandParser(
        prog="vitmha pack", description="Put a folder of pictures into a few large files, to train on."
    )
    parser.add_argument("folder", metavar="FOLDER", help="as for --data.root")
    parser.add_argument(
        "dest", type=writable_dir, metavar="DEST", help="the folder to make; then give it as --data.root"
    )
    parser.add_argument(
        "--val-fraction", type=fraction, default=0.1, metavar="SHARE", help="as for --data.val_fraction"
    )
    parser.add_argument("--split-seed", type=int, default=0, metavar="N", help="as for --data.split_seed")
    given = parser.parse_args(args)
    names, train_files, val_files = find_files(Path(given.folder), given.val_fraction, given.split_seed)
    shards.pack(Path(given.folder), names, train_files, val_files, Path(given.dest))
    print(f"{given.dest}: {len(names)} classes, {len(train_files)} training and {len(val_files)} validation pictures")
