"""CIFAR-10 and CIFAR-100; what all datasets with official files have in common: statistics, downloads and errors."""

import pickle
import re
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from builders import assert_equal
from torch.testing import assert_close
from torchvision import datasets
from torchvision.transforms.v2.functional import to_pil_image

from vitmha.data import CIFAR10, CIFAR100, FashionMNIST


def test_the_official_binary_files_have_known_labels_and_pixels(real_data: Path) -> None:
    images, labels = CIFAR10(real_data).read(train=False)
    assert [CIFAR10(real_data).class_names[label] for label in labels[:4]] == ["cat", "ship", "ship", "airplane"]
    assert_equal(labels.bincount(), torch.full((10,), 1000))
    assert_equal(images[0, :, 0, 0], torch.tensor([158, 112, 49], dtype=torch.uint8))


def write_python_version(
    dataset: type[datasets.CIFAR10], directory: Path, records: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes records of a label and pixels in the format that torchvision reads, and disables its checksums."""
    directory.mkdir()
    coarse = {"coarse_labels": [0] * len(records)} if dataset is datasets.CIFAR100 else {}
    labels = "fine_labels" if coarse else "labels"
    batch = pickle.dumps({"data": records[:, 1:], labels: records[:, 0].tolist(), **coarse})
    for attribute in ("train_list", "test_list"):
        names = [name for name, _ in getattr(dataset, attribute)]
        for name in names:
            (directory / name).write_bytes(batch)
        monkeypatch.setattr(dataset, attribute, [[name, None] for name in names])
    (directory / dataset.meta["filename"]).write_bytes(pickle.dumps({dataset.meta["key"]: []}))
    monkeypatch.setattr(dataset, "meta", {**dataset.meta, "md5": None})


def test_cifar10_python_version_equals_binary(real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = real_data / "cifar-10-batches-bin/test_batch.bin"
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, 3073)
    write_python_version(datasets.CIFAR10, tmp_path / "cifar-10-batches-py", records, monkeypatch)
    binary, python = CIFAR10(real_data), CIFAR10(tmp_path)
    python.prepare_data()
    for actual, expected in zip(python.read(train=False), binary.read(train=False), strict=True):
        assert_equal(actual, expected)
    assert_equal(python.read(train=True)[1], binary.read(train=False)[1].repeat(5))


def test_cifar100_binary_version_equals_python(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = real_data / "cifar-10-batches-bin/test_batch.bin"
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, 3073)
    records[:, 0] = np.arange(len(records)) % 100
    write_python_version(datasets.CIFAR100, tmp_path / "cifar-100-python", records, monkeypatch)
    python = CIFAR100(tmp_path).read(train=False)

    (tmp_path / "cifar-100-binary").mkdir()
    coarse = np.full((len(records), 1), 19, dtype=np.uint8)
    np.hstack([coarse, records]).tofile(tmp_path / "cifar-100-binary/test.bin")
    data = CIFAR100(tmp_path)
    data.prepare_data()
    data.setup("test")
    for actual, expected in zip(data.read(train=False), python, strict=True):
        assert_equal(actual, expected)
    assert_equal(data.test_dataloader().images, python[0])
    assert data.test_dataloader().images.is_contiguous()
    assert (len(data.class_names), *data.class_names[::33]) == (100, "apple", "forest", "raccoon", "worm")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "cifar-10-batches-bin"
    directory.mkdir()
    (directory / "test_batch.bin").write_bytes(bytes(3073 * 5000))
    with pytest.raises(ValueError, match=r"test_batch.bin has 15365000 bytes instead of 30730000: delete"):
        CIFAR10(tmp_path).setup("test")
    with pytest.raises(ValueError, match=r"data_batch_1.bin has 0 bytes"):
        CIFAR10(tmp_path).setup("fit")


@pytest.mark.parametrize("dataset", [FashionMNIST, CIFAR10])
def test_mean_and_std_equal_those_of_the_training_set(dataset: type[FashionMNIST | CIFAR10], real_data: Path) -> None:
    data = dataset(real_data)
    images, _ = data.read(train=True)
    pixels = images.transpose(0, 1).flatten(1).float() / 255
    assert_close(torch.tensor(data.preprocessing.mean), pixels.mean(1), rtol=0, atol=5e-5)
    assert_close(torch.tensor(data.preprocessing.std), pixels.std(1), rtol=0, atol=1e-4)
    assert data.in_channels == images.shape[1]
    assert data.image_size == images.shape[2:]


def test_evaluation_images_equal_preprocessed_files(real_data: Path) -> None:
    data = CIFAR10(real_data, batch_size=7)
    data.setup("test")
    images, labels = next(iter(data.test_dataloader()))
    raw, expected = data.read(train=False)
    assert_equal(labels, expected[:7])
    assert_equal(images, torch.stack([data.preprocessing(to_pil_image(image)) for image in raw[:7]]))


@pytest.mark.parametrize("dataset", [FashionMNIST, CIFAR10, CIFAR100])
def test_the_error_for_missing_files_says_where_to_put_them(
    dataset: type[FashionMNIST | CIFAR10 | CIFAR100], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*arguments: object, **options: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    data = dataset(tmp_path)
    path = re.escape(str(tmp_path))
    with pytest.raises(ValueError, match=rf"^{path}/.* does not exist .*no network.*set root") as caught:
        data.prepare_data()
    assert caught.value.__suppress_context__
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=rf"^{path}/.* does not hold the official files.*set root"):
        data.setup("fit")
