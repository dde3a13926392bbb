"""cli/environment.py: what `vitmha --version --verbose` prints for a bug report."""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from builders import ROOT, refused

import vitmha
from vitmha.cli import environment, main


def printed_facts(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, str]:
    """What the command prints, by the name at the start of each line."""
    with pytest.raises(SystemExit, match="0"):
        main([*args])
    return dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_versions_devices_and_directories_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "/hub")
    monkeypatch.delenv("TORCH_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    facts = printed_facts(capsys, "--version", "--verbose")
    assert facts["vitmha"].startswith(f"{vitmha.__version__} (")
    assert facts["torch"].startswith(f"{torch.__version__} (built ")
    assert facts["device cpu"].startswith(torch.backends.cpu.get_cpu_capability())
    assert "math" in facts["SDPA on cpu"]
    assert facts["shipped configs"] == str(ROOT / "configs")
    assert (facts["HF_HOME"], facts["TORCH_HOME"]) == ("/hub", "/cache/torch")
    assert printed_facts(capsys, "--verbose", "--version") == facts


def test_every_dependency_is_among_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: packages for name, packages in project["optional-dependencies"].items() if name != "dev"}
    declared = [*project["dependencies"], *(package for packages in extras.values() for package in packages)]
    names = {re.match(r"[\w-]+", package)[0] for package in declared}
    assert names - {"torch"} <= {*environment.REQUIRED, *environment.OPTIONAL, *docs_packages(project)}


def docs_packages(project: dict) -> set[str]:
    """The packages that build the documentation, which no bug report needs."""
    return {re.match(r"[\w-]+", package)[0] for package in project["optional-dependencies"].get("docs", [])}


def test_a_package_that_is_missing_or_broken_is_a_fact(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "timm":
            raise PackageNotFoundError(name)
        if name == "einops":
            raise KeyError("Version")
        return "1.2.3"

    monkeypatch.setattr(environment, "version", version)
    monkeypatch.setattr(environment, "OPTIONAL", ("timm", "onnx"))
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    facts = printed_facts(capsys, "--version", "--verbose")
    assert facts["einops"] == "KeyError: 'Version'"
    assert facts["timm"] == "not installed"
    assert facts["onnx"] == "1.2.3"
    assert re.match("1.2.3, cannot be imported: (ModuleNotFound|Import)Error: ", facts["torch"])
    assert not any(name.startswith("device") for name in facts)


def test_an_optional_package_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "REQUIRED", ("no-such-package",))
    monkeypatch.setattr(environment, "OPTIONAL", ("no-such-extra",))
    lines = environment.describe_environment().splitlines()
    assert [line for line in lines if "no-such" in line] == ["no-such-package   not installed"]


def test_a_cuda_device_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, major, minor = "NVIDIA X", 80 * 2**30, 9, 0

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    facts = environment.describe_environment()
    assert re.search(r"^device cuda:0 +NVIDIA X, 80 GiB, compute capability 9\.0, bfloat16$", facts, re.MULTILINE)
    if not torch.cuda.is_available():
        assert re.search(r"^SDPA on cuda:0 +none$", facts, re.MULTILINE)


def test_verbose_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "expected vitmha --version or vitmha --version --verbose"
    assert refused(["--verbose"], capsys) == f"error: vitmha --verbose: {expected}"
    assert refused(["--version", "configs"], capsys) == f"error: vitmha --version configs: {expected}"
