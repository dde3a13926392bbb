"""shard: packs an image directory into shards."""

from collections.abc import Sequence
from pathlib import Path

from vitmha.cli.arguments import CommandParser, fraction, writable_dir


def main(args: Sequence[str]) -> None:
    """Packs an image directory into a few large files."""
    parser = CommandParser(
        prog="vitmha shard",
        description="Pack an image directory into a few large files (shards) to train on, for example from a network "
        "disk or an object store.",
    )
    parser.add_argument("source", metavar="SOURCE", help="a directory of class directories, as for --data.root")
    parser.add_argument(
        "--output",
        type=writable_dir,
        required=True,
        metavar="DEST",
        help="the directory to create; train on it with --data ImageFolder --data.root DEST",
    )
    parser.add_argument(
        "--val-fraction",
        type=fraction,
        default=0.1,
        metavar="F",
        help="fraction of each class for validation if SOURCE has no train/; default 0.1",
    )
    parser.add_argument(
        "--split-seed", type=int, default=0, metavar="N", help="chooses the images for validation; default 0"
    )
    help_ = "accept class directories whose images are all in subdirectories"
    parser.add_argument("--nested-classes", action="store_true", help=help_)
    options = parser.parse_args(args)
    from vitmha.data import shards  # torch and Lightning take seconds to import, which a wrong call need not wait for
    from vitmha.data.image_folder import find_files, find_test_files

    source, output = Path(options.source), Path(options.output)
    class_names, train_files, val_files = find_files(
        source, options.val_fraction, options.split_seed, nested_classes=options.nested_classes
    )
    test_files = find_test_files(source, class_names, nested_classes=options.nested_classes)
    shards.write_shards(source, class_names, train_files, val_files, output, test_files)
    counts = f"{len(train_files)} training, {len(val_files)} validation and {len(test_files)} test images"
    print(f"{output}: {len(class_names)} classes; {counts}")
