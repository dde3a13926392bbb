"""cli/configs.py: the shipped configs, found by name."""

import re
import tomllib
from pathlib import Path

import pytest
from builders import ROOT, refused

from vitmha.cli import main
from vitmha.cli.configs import find_config, shipped_configs

NAMES = [path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in (ROOT / "configs").rglob("*.yaml")]


def test_every_config_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    main(["configs"])
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(NAMES)
    assert all(re.fullmatch(r"\S+ +[A-Z].+[.:]", line) for line in lines)


def test_a_config_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    main(["configs", "overlays/ddp"])
    assert capsys.readouterr().out == (ROOT / "configs/overlays/ddp.yaml").read_text()
    assert refused(["configs", "nosuch"], capsys).startswith("error: nosuch: no such file, and no shipped config")


def test_a_config_is_found_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("cifar10") == ROOT / "configs/cifar10.yaml"
    assert find_config("ddp") == find_config("overlays/ddp") == ROOT / "configs/overlays/ddp.yaml"
    (tmp_path / "cifar10").write_text("a file here")
    assert find_config("cifar10") == Path("cifar10")


def test_a_config_that_does_not_exist_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(["fit", "--config", "nosuch"], capsys)
    names = ", ".join(shipped_configs())
    assert message == f"error: --config nosuch: no such file, and no shipped config of that name ({names})"
    assert refused(["fit", "--config=nosuch"], capsys) == message


def test_the_wheel_holds_every_package_and_the_configs() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "vitmha").rglob("__init__.py")}
    assert set(setup["packages"]) == {*packages, "vitmha.configs"}
    assert setup["package-dir"] == {"vitmha.configs": "configs"}
    patterns = setup["package-data"]["vitmha.configs"]
    assert {path for pattern in patterns for path in (ROOT / "configs").glob(pattern)} == {
        ROOT / "configs" / f"{name}.yaml" for name in NAMES
    }
