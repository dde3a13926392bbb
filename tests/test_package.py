"""The public names of the package, its lazy imports, and the examples in its docstrings."""

import doctest
import subprocess
import sys
import tomllib
from importlib import import_module, metadata
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import vitmha

HEAVY = ("torch", "lightning", "torchvision", "timm", "matplotlib", "jsonargparse", "PIL")


@pytest.mark.parametrize("statement", ["import vitmha", "import vitmha; vitmha.__version__; dir(vitmha)"])
def test_importing_the_package_imports_no_other_package(statement: str) -> None:
    script = f"import sys; {statement}; print(*(name for name in {HEAVY} if name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_importing_a_model_imports_no_training_package() -> None:
    script = f"import sys; from vitmha import create_model; print(*(name for name in {HEAVY} if name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"lightning", "timm", "jsonargparse", "matplotlib"} & set(run.stdout.split())


@pytest.mark.parametrize("name", vitmha.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(vitmha, name) is not None
    assert name in dir(vitmha)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'vitmha' has no attribute 'LitVit'"):
        vitmha.LitVit  # noqa: B018


def test_the_version_is_that_of_the_distribution() -> None:
    assert vitmha.__version__ == metadata.version("vitmha")


def test_user_errors_are_value_errors() -> None:
    assert issubclass(vitmha.UserError, ValueError)


def test_list_models_names_the_bundled_models() -> None:
    assert "fashion-mnist" in vitmha.list_models()


PACKAGE = Path(vitmha.__file__).parent
# An example that needs files says "+SKIP".
WITH_EXAMPLES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if any(">>> " in line and "+SKIP" not in line for line in path.read_text().splitlines())
]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_examples_in_docstrings_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = ".".join(("vitmha", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    results = doctest.testmod(import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def test_every_requirement_has_a_lower_bound_that_this_environment_meets() -> None:
    """`.ci/lowest` runs the tests with the bounds themselves."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    for requirement in map(Requirement, requirements):
        assert ">=" in {bound.operator for bound in requirement.specifier}, requirement
        assert requirement.specifier.contains(metadata.version(requirement.name), prereleases=True), requirement
    bounds = {Requirement(requirement).name: str(Requirement(requirement).specifier) for requirement in requirements}
    assert bounds["timm"] == ">=1.0.26"  # earlier versions run the pickles of a local directory
