"""cli/fit_configs.py: config files that cannot be used are refused in one line, before PyTorch is imported."""

from pathlib import Path

import pytest
from builders import refused

from vitmha.cli.fit_configs import options_of, read_config

# Eleven levels of nine aliases each: 500 bytes that stand for thirty billion strings.
BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
MERGE_BOMB = "a0: &a0 {k0: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1}, ' * 9}]}}\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BOMB, "line 1, column 1: the aliases stand for more than 100,000 values"),
        (MERGE_BOMB, "line 1, column 1: the aliases stand for more than 100,000 values"),
        ("a: &a {b: *a}", "line 1, column 4: an alias stands for what it is a part of"),
        ("trainer: {max_epochs: 1}\ntrainer: {max_steps: 1}", "line 2, column 1: the key trainer is there twice"),
        ("model:\n  vit: {depth: 1, depth: 2}", "line 2, column 19: the key depth is there twice"),
        ("{" * 3000, "its values are nested too deeply"),
        ("trainer: {max_epochs: ", "line 1, column 23: expected the node content, but found '<stream end>'"),
        ("run_name: !!python/object/apply:os.system [ls]", "line 1, column 11: could not determine a constructor"),
        (b"run_name: \xff\xfe\n", "expected a text file in UTF-8"),
        ("", "expected a YAML mapping such as `trainer: {max_epochs: 3}`, got None"),
        ("- 1\n- 2", "expected a YAML mapping such as `trainer: {max_epochs: 3}`, got [1, 2]"),
        ("1: 2", "expected names of options as keys, got 1"),
        ("trainer: 3", "trainer must be a mapping of its options, got 3"),
        ("data: [1]", "data must be a mapping of its options, got [1]"),
        ("data: {class_path: [3]}", "data.class_path must be the name of a class, got [3]"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(
    content: str | bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refused(["fit", "--config", "quickstart", "--config", str(file)], capsys)
    assert line.startswith(f"error: --config {file}: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: {lr: 3}", "unknown option --model.lr (did you mean --model.learning_rate?)"),
        ("model: {vit: {dept: 3}}", "unknown option --model.vit.dept (did you mean --model.vit.depth?)"),
        (
            "data: {init_args: {root: x}}",
            "unknown option --data.root: FashionMNISTMini does not have it, only --data "
            "CIFAR10, CIFAR100, FashionMNIST, ImageFolder",
        ),
    ],
)
def test_unknown_keys_are_answered_like_unknown_flags(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(content)
    assert refused(["fit", "--config", "quickstart", "--config", str(file)], capsys) == f"error: {message}"


def test_aliases_and_merged_keys_are_read(tmp_path: Path) -> None:
    file = tmp_path / "aliases.yaml"
    file.write_text("model: {vit: &vit {depth: 3}, decoder: {<<: *vit, max_length: 5}}\ndata: {init_args: {root: x}}")
    options = dict(options_of(read_config(str(file))))
    assert options == {
        "model.vit.depth": 3,
        "model.decoder.depth": 3,
        "model.decoder.max_length": 5,
        "data.root": "x",
    }
