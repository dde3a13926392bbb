"""`vitmha.data`: its names are imported on first use."""

import subprocess
import sys

import pytest

import vitmha.data


def test_labeled_images_are_read_without_importing_lightning() -> None:
    code = "import sys, vitmha.data.labeled; sys.exit('lightning' in sys.modules or 'torchvision' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", vitmha.data.__all__)
def test_every_public_name_is_a_data_module_and_listed(name: str) -> None:
    assert getattr(vitmha.data, name).__name__ == name
    assert name in dir(vitmha.data)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'vitmha\.data' has no attribute 'CIFAR11'"):
        vitmha.data.CIFAR11  # noqa: B018
