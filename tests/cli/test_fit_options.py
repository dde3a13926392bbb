"""cli/fit_options.py: the options of fit as their source defines them, and the short help."""

import re

import pytest
from lightning import LightningDataModule

import vitmha.data
from vitmha.cli import main
from vitmha.cli.arguments import option_names
from vitmha.cli.fit import TrainingCLI
from vitmha.cli.fit_check import SYNONYMS
from vitmha.cli.fit_options import (
    FROM_DATA,
    GENERAL,
    LIGHTNING,
    OTHER,
    data_classes,
    data_options,
    read_options,
)
from vitmha.cli.fit_parser import TrainParser
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
    assert [text for text in SYNONYMS.values() if text.split()[0] not in known] == []


def test_help_lists_the_options_of_vitmha_and_of_the_chosen_data_module(capsys: pytest.CaptureFixture[str]) -> None:
    def options(*args: str) -> set[str]:
        with pytest.raises(SystemExit, match="0"):
            main(["fit", *args, "--help"])
        return set(re.findall(r"^ +--(\S+)", capsys.readouterr().out, re.MULTILINE))

    default, image_folder, sequences = (
        options(),
        options("--data", "ImageFolder"),
        options("--config", "fashion_mnist_sequences"),
    )
    assert {"config", "run_name", "data", "model.learning_rate", "model.vit.depth", "attention.num_images"} <= default
    assert {"autosave.every_n_minutes", "checkpoint.monitor", "trainer.max_epochs", "help-all"} <= default
    assert not {f"model.vit.{name}" for name in FROM_DATA} & default
    assert image_folder - default == {f"data.{name}" for name in data_options("ImageFolder")} - {"data.root"}
    assert "model.decoder.depth" in sequences - default
