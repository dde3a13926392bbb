"""cli/fit_options.py: the options of fit as their source defines them, wrong first tries, and the short help."""

import re
from pathlib import Path

import pytest
from builders import refused
from lightning import LightningDataModule

import vitmha.data
from vitmha.cli import main
from vitmha.cli.arguments import option_names
from vitmha.cli.fit import TrainingCLI, TrainParser
from vitmha.cli.fit_options import (
    FROM_DATA,
    GENERAL,
    LIGHTNING,
    OTHER,
    SYNONYMS,
    check_call,
    data_classes,
    data_options,
    read_options,
)
from vitmha.training.module import LitViT


@pytest.fixture(scope="module")
def full_parser_options() -> set[str]:
    """The options that the full parser of `vitmha fit` knows, without those of the data module."""
    names: set[str] = set()

    class ParserOnly(TrainingCLI):
        def parse_arguments(self, parser: TrainParser, args: object) -> None:
            names.update(option_names(parser))
            raise InterruptedError

    with pytest.raises(InterruptedError, match=r"^$"):
        ParserOnly(LitViT, LightningDataModule, subclass_mode_data=True, command="fit", parser_class=TrainParser)
    return names


def test_the_options_read_from_the_source_are_those_of_the_full_parser(full_parser_options: set[str]) -> None:
    # The full parser lists the options of `decoder` and `distillation`, None by default, with --model.decoder.help.
    nested = ("model.decoder", "model.distillation")
    is_read = re.compile(r"(model|attention|autosave)\.(?!vit$|.*help$)")
    known = {key for key in full_parser_options if is_read.match(key)} - {*nested}
    assert {key for key in read_options() if not key.startswith(nested)} == known
    only_here = {"help-all", "c", "h", "verbose", *nested}
    assert {*GENERAL, *LIGHTNING, *OTHER} - only_here <= full_parser_options


@pytest.mark.parametrize("name", vitmha.data.__all__)
def test_the_options_of_a_data_module_are_those_that_its_class_accepts(name: str) -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_class_arguments(getattr(vitmha.data, name))
    assert name in data_classes()
    assert set(data_options(name)) == {key for key in option_names(parser) if "help" not in key and "print" not in key}


def test_every_synonym_stands_for_an_option(full_parser_options: set[str]) -> None:
    known = {*full_parser_options, *(f"data.{name}" for name in data_options(None))}
    assert [text for text in SYNONYMS.values() if text.split()[0].lstrip("-") not in known] == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            "leaves",
            "unexpected argument leaves; to train on a directory of images: "
            "vitmha fit --config finetune_folder --data.root leaves",
        ),
        ("cifar10", "unexpected argument cifar10; to use a config: vitmha fit --config cifar10"),
        ("--config cifar10 my.yaml", "unexpected argument my.yaml; to use a config: vitmha fit --config my.yaml"),
        ("", "--data is required, for example --data CIFAR10, or --config quickstart"),
        (
            "--data.root leaves",
            "--data is required, for example --data ImageFolder --data.root leaves, or --config quickstart",
        ),
        (
            "--config cifar10 --model vit_tiny",
            "--model takes no value: --model.name vit_tiny chooses a size; "
            "--model.pretrained MODEL starts from trained weights",
        ),
        ("--data ImageFolder --data.roott x", "unknown option --data.roott (did you mean --data.root?)"),
        ("--config cifar10 --lr 3", "unknown option --lr (did you mean --model.learning_rate?)"),
        ("--config cifar10 --lr=3", "unknown option --lr (did you mean --model.learning_rate?)"),
        ("--config cifar10 --epochs 3", "unknown option --epochs (did you mean --trainer.max_epochs?)"),
        ("--config cifar10 --batch-size 3", "unknown option --batch-size (did you mean --data.batch_size?)"),
        ("--config cifar10 --max_epochs 3", "unknown option --max_epochs (did you mean --trainer.max_epochs?)"),
        ("--config cifar10 --model.depth 3", "unknown option --model.depth (did you mean --model.vit.depth?)"),
        ("--config cifar10 --model.vit.dept 3", "unknown option --model.vit.dept (did you mean --model.vit.depth?)"),
        ("--config cifar10 --data.batchsize 3", "unknown option --data.batchsize (did you mean --data.batch_size?)"),
        ("--config cifar10 --dpeth 3", "unknown option --dpeth (did you mean --model.vit.depth?)"),
        ("--config cifar10 --zzz 3", "unknown option --zzz; --help-all lists the options"),
        (
            "--config cifar10 --model.freeze true",
            "unknown option --model.freeze; to train the head only: --model.linear_probe true",
        ),
        (
            "--config quickstart --data.root x",
            "unknown option --data.root: FashionMNISTMini does not have it, only --data "
            "CIFAR10, CIFAR100, FashionMNIST, ImageFolder",
        ),
        (
            "--data CIFAR",
            "--data CIFAR: unknown class; choose from CIFAR10, CIFAR100, FashionMNIST, FashionMNISTMini, "
            "FashionMNISTSequences, ImageFolder",
        ),
    ],
)
def test_a_wrong_first_try_is_answered_with_the_call_that_works(
    args: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(["fit", *args.split()], capsys) == f"error: {message}"


def test_valid_calls_are_passed_on_with_the_paths_of_the_configs(tmp_path: Path) -> None:
    own = tmp_path / "own data.yaml"
    own.write_text("data: {class_path: my.module.Data}")
    for args in (
        ["--data", "my.module.Data", "--data.anything", "3"],
        ["--data", "ImageFolder", "--data.init_args.root", "x", "--print_config"],
        ["--trainer.max_epochs", "3", "--data", "CIFAR10", "--checkpoint.save_top_k", "-1", "--model.vit.mlp=gelu"],
        ["--data", "CIFAR10", "--trainer.callbacks+", "HeadPruning", "--trainer.callbacks.amount", "0.2"],
        ["--data", "FashionMNISTSequences", "--model.decoder.depth", "1", "--model.vit.depth", "1"],
        ["--data.help", "ImageFolder"],
        ["-c", str(own), "--data.anything", "3"],
    ):
        assert check_call(args, "fit") == args
    [flag, path, overlay] = check_call(["--config", "cifar10", "--config=ddp"], "fit")
    assert (flag, Path(path).name, Path(overlay).name) == ("--config", "cifar10.yaml", "ddp.yaml")


def test_help_lists_the_options_of_vitmha_and_of_the_chosen_data_module(capsys: pytest.CaptureFixture[str]) -> None:
    def options(*args: str) -> set[str]:
        with pytest.raises(SystemExit, match="0"):
            main(["fit", *args, "--help"])
        return set(re.findall(r"^ +--(\S+)", capsys.readouterr().out, re.MULTILINE))

    default, folder, sequences = (
        options(),
        options("--data", "ImageFolder"),
        options("--config", "fashion_mnist_sequences"),
    )
    assert {"config", "run_name", "data", "model.learning_rate", "model.vit.depth", "attention.num_images"} <= default
    assert {"autosave.every_n_minutes", "checkpoint.monitor", "trainer.max_epochs", "help-all"} <= default
    assert not {f"model.vit.{name}" for name in FROM_DATA} & default
    assert folder - default == {f"data.{name}" for name in data_options("ImageFolder")} - {"data.root"}
    assert "model.decoder.depth" in sequences - default
