"""Fashion-MNIST and the subset that is bundled with the package."""

from importlib.resources import files
from pathlib import Path

from builders import assert_equal
from make_fashion_mnist_mini import write_sheet
from PIL import Image

from vitmha.data import FashionMNIST, FashionMNISTMini


def test_the_bundled_subset_equals_the_official_data(real_data: Path) -> None:
    mini, full = FashionMNISTMini(), FashionMNIST(real_data)
    for train, count in ((True, 1000), (False, 200)):
        images, labels = mini.read(train)
        official, official_labels = full.read(train)
        assert images.shape == (10 * count, 1, 28, 28)
        for label in range(10):
            assert_equal(images[labels == label], official[official_labels == label][:count])


def test_the_script_writes_the_bundled_file(real_data: Path, tmp_path: Path) -> None:
    write_sheet(real_data, tmp_path / "sheet.png")
    bundled = files("vitmha.data") / "fashion_mnist_mini.png"
    with Image.open(tmp_path / "sheet.png") as written, bundled.open("rb") as file:
        assert written.tobytes() == Image.open(file).tobytes()
