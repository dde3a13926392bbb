"""cli/arguments.py: argument types, and messages in which argument names become flags."""

import argparse
from pathlib import Path

import pytest
from builders import refused

from vitmha.cli.arguments import CommandParser, fraction, positive_int, register_flags, with_flags, writable_dir


def test_argument_names_in_a_message_become_the_flags_that_end_in_them() -> None:
    register_flags(["--data.batch_size", "--model.vit.depth", "--model.decoder.depth", "--data.root", "--top-k"])
    assert with_flags("batch_size must be at least 1, got 0.") == "--data.batch_size must be at least 1, got 0."
    assert with_flags("root ./leaves: no image files found") == "--data.root ./leaves: no image files found"
    assert with_flags("Lower batch_size or top_k.") == "Lower --data.batch_size or --top-k."
    assert with_flags("Give it as `root`, not `depth`.") == "Give it as --data.root, not `depth`."
    unchanged = [
        "depth must be at least 1",  # of two options
        "The root has no images",  # English, not the argument
        "num_things must be at least 1",  # unknown
        "--data.batch_size must be at least 1",
        "/tmp/batch_size/x.png and batch_size.csv are corrupt",
    ]
    assert [with_flags(message) for message in unchanged] == unchanged


def test_the_flags_are_those_of_the_parser_that_parses_last() -> None:
    parser = CommandParser(prog="heads")
    parser.add_argument("--batch-size")
    inner = parser.add_subparsers(dest="what").add_parser("prune")
    inner.add_argument("--num-images")
    parser.parse_args(["prune"])
    message = "batch_size and num_images must be at least 1"
    assert with_flags(message) == "batch_size and --num-images must be at least 1"
    parser.parse_args([])
    assert with_flags(message) == "--batch-size and num_images must be at least 1"


@pytest.mark.parametrize(
    ("module", "args", "flag"),
    [
        ("fit", ["fit", "--config", "quickstart"], "--data.batch_size"),
        ("classify", ["classify", "x.png", "--model", "cifar10"], "--batch-size"),
        ("heads", ["heads", "importance", "--model", "cifar10", "--data", "x", "--output", "y"], "--batch-size"),
    ],
)
def test_a_library_error_reaches_the_user_of_each_command_with_its_flag(
    module: str, args: list[str], flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    from vitmha.errors import UserError

    command = importlib.import_module(f"vitmha.cli.{module}")

    def fail(*args: object, **kwargs: object) -> None:
        raise UserError("batch_size must be at least 1, got 0.")

    # What each command calls first after its arguments are parsed.
    first_call = {"fit": "TrainingCLI", "classify": "classifier_options", "heads": "parse_device"}[module]
    monkeypatch.setattr(command, first_call, fail)
    assert refused(args, capsys) == f"error: {flag} must be at least 1, got 0."


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_a_positive_int_is_an_integer_of_at_least_1(text: str) -> None:
    assert positive_int("17") == 17
    with pytest.raises(argparse.ArgumentTypeError, match="expected an integer of at least 1, got"):
        positive_int(text)


@pytest.mark.parametrize("text", ["0", "1", "-0.5", "nan", "half"])
def test_a_fraction_is_strictly_between_0_and_1(text: str) -> None:
    assert fraction("0.25") == 0.25
    with pytest.raises(argparse.ArgumentTypeError, match="expected a number between 0 and 1, got"):
        fraction(text)


def test_an_output_directory_is_refused_where_a_file_is(tmp_path: Path) -> None:
    assert writable_dir(str(tmp_path / "new/directory")) == str(tmp_path / "new/directory")
    (tmp_path / "file").touch()
    with pytest.raises(argparse.ArgumentTypeError, match="file is not a directory"):
        writable_dir(str(tmp_path / "file/below"))
