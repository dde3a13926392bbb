"""What stands next to the package: workflows, issue forms, the Dockerfile, the citation and the changelog."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import ROOT

import vitmha

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read_yaml(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def commands_of(workflow: Path) -> list[str]:
    return [step["run"] for job in read_yaml(workflow)["jobs"].values() for step in job["steps"] if "run" in step]


def test_every_ci_script_is_called_and_every_called_one_can_be_executed() -> None:
    scripts = {f".ci/{path.name}": path for path in (ROOT / ".ci").iterdir()}
    calls = {call for workflow in WORKFLOWS for call in re.findall(r"\.ci/\w+", "\n".join(commands_of(workflow)))}
    assert calls == set(scripts)
    assert {".ci/docs", ".ci/wheel"} <= set(re.findall(r"^\.ci/\w+", scripts[".ci/run"].read_text(), re.M))
    assert all(os.access(path, os.X_OK) for path in scripts.values())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_the_lowest_python_version_and_may_only_read(workflow: Path) -> None:
    content = read_yaml(workflow)
    assert content["permissions"] == {"contents": "read"}
    versions = re.findall(r'python-version: "(.*)"', workflow.read_text())
    assert {f">={version}" for version in versions} == {PYPROJECT["project"]["requires-python"]}


def test_the_release_workflow_finds_the_version_in_the_source() -> None:
    [check] = [run for run in commands_of(ROOT / ".github/workflows/release.yml") if "GITHUB_REF_NAME" in run]
    line, file = re.fullmatch(r'grep [\w -]*"(.*)" (\S+)', check).groups()
    line = line.replace("${GITHUB_REF_NAME#v}", vitmha.__version__).replace('\\"', '"')
    assert line in (ROOT / file).read_text().splitlines()


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation["version"] == vitmha.__version__
    assert citation["license"] == PYPROJECT["project"]["license"]
    assert citation["repository-code"] == PYPROJECT["project"]["urls"]["Source"]


def test_the_changelog_has_the_version_or_is_unreleased() -> None:
    first = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert first in ("Unreleased", vitmha.__version__)


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_ask_for_the_environment(name: str) -> None:
    fields = [item for item in read_yaml(ROOT / f".github/ISSUE_TEMPLATE/{name}.yml")["body"] if "id" in item]
    assert len({field["id"] for field in fields}) == len(fields)
    [environment] = [field for field in fields if field["id"] == "environment"]
    assert "`vitmha --version --verbose`" in environment["attributes"]["label"]
    assert environment["validations"]["required"]


def test_the_docker_context_holds_what_the_wheel_is_built_from() -> None:
    project, setuptools = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
    packages = {setuptools["package-dir"].get(name, name.partition(".")[0]) for name in setuptools["packages"]}
    files = {"pyproject.toml", project["readme"], *(name for name in project["license-files"] if "/" not in name)}
    included = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert sorted(included) == sorted(packages | files)


def test_the_docker_image_has_the_lowest_python_version_and_extras_that_exist() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    versions = re.findall(r"^FROM python:([\d.]+)-", dockerfile, re.M)
    assert {f">={version}" for version in versions} == {PYPROJECT["project"]["requires-python"]}
    extras = re.search(r"vitmha\[(.*?)\]", dockerfile)[1].split(",")
    assert set(extras) <= set(PYPROJECT["project"]["optional-dependencies"])
