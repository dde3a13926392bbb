"""cli/fit_check.py: wrong first tries are answered with the call that works, and valid calls pass."""

from pathlib import Path

import pytest
from builders import refused

from vitmha.cli.fit_check import check_call


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
        ("--trainer.max_epochs 3", "--data is required, for example --data CIFAR10, or --config quickstart"),
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
            "--config cifar10 --model.lora 4",
            "unknown option --model.lora; all weights are trained, or with --model.linear_probe true those of the head "
            "only",
        ),
        ("--config cifar10 --model.num_classes 9", "unknown option --model.num_classes; the data determines it"),
        (
            "--config cifar10 --dropout 0.1",
            "unknown option --dropout; choose from --model.vit.attention_dropout, --model.vit.drop_path and "
            "--model.vit.patch_dropout",
        ),
        (
            "--config cifar10 --patience 3",
            "unknown option --patience; to stop early: --trainer.callbacks+ EarlyStopping --trainer.callbacks.monitor "
            "val/loss",
        ),
        (
            "--config cifar10 --warmup-epochs 3",
            "unknown option --warmup-epochs (did you mean --model.warmup_fraction?)",
        ),
        ("--config cifar10 --model.qqq 3", "unknown option --model.qqq; --help-all lists the options"),
        (
            "--config quickstart --img-size 64",
            "unknown option --img-size: FashionMNISTMini does not have --data.image_size, only --data ImageFolder",
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


def test_validate_is_answered_with_a_call_that_has_weights_and_a_path_with_a_blank_is_quoted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = "vitmha validate --data ImageFolder --data.root 'my leaves' --model.pretrained MODEL"
    message = f"error: unexpected argument my leaves; for a directory of images: {call}"
    assert refused(["validate", "my leaves"], capsys) == message


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


def test_fit_without_arguments_trains_the_quick_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_call([], "fit") == check_call(["--config", "quickstart"], "fit")
    message = "error: --data is required, for example --data CIFAR10, or --config quickstart"
    assert refused(["validate"], capsys) == message
