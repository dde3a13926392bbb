"""Where the heads looked while a model trained: a small file for each epoch, read back for the page and as a film."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from vitmha.errors import UserError
from vitmha.inspection.figures import denormalized, draw_maps, percentile, to_layer_head_grid
from vitmha.inspection.maps import dequantize_rows, quantize_rows
from vitmha.inspection.page.page import EpochAttention
from vitmha.models.vit import VisionTransformer

PICTURES = "pictures.npz"
ROWS = "rows.npz"


def write_epoch(
    folder: str | Path,
    epoch: int,
    images: Float[Tensor, "pictures channels height width"],
    rows: Float[Tensor, "pictures all_heads tokens"],
    model: VisionTransformer,
) -> None:
    """Writes `epoch_003/rows.npz`, a byte for each weight, and in the folder the pictures.

    Args:
        folder: The run's `attention`.
        epoch: Its number.
        images: Normalised; the same in each epoch.
        rows: `HeadMetrics.readout_attention` of them.
        model: Says which heads these are.
    """
    folder = Path(folder)
    here = folder / f"epoch_{epoch:03d}"
    here.mkdir(parents=True, exist_ok=True)
    levels, tops = quantize_rows(rows)
    layout = json.dumps(asdict(model.layout))
    _save(here / ROWS, levels=levels.numpy(), tops=tops.numpy(), heads=_heads_of(model), layout=layout)
    _save(folder / PICTURES, images=images.numpy())


def _save(file: Path, **arrays: Any) -> None:
    """Whole or not at all, whenever the run is killed."""
    partial = file.with_suffix(".partial")
    with partial.open("wb") as stream:
        np.savez_compressed(stream, **arrays)
    partial.replace(file)


def read_pictures(folder: str | Path) -> Float[Tensor, "pictures channels height width"] | None:
    """The pictures that a run has looked at; None where it has not yet.

    Args:
        folder: The run's `attention`.
    """
    file = Path(folder) / PICTURES
    if not file.is_file():
        return None
    with np.load(file) as kept:
        return torch.from_numpy(kept["images"])


def read_epochs(
    folder: str | Path, model: VisionTransformer
) -> tuple[Float[Tensor, "pictures channels height width"], list[EpochAttention]]:
    """The pictures that a run looked at, and its epochs, the oldest first.

    Args:
        folder: The run's `attention`.
        model: The run's, trained.

    Raises:
        UserError: Nothing was logged there, or a model with other tokens or heads did.
    """
    folder = Path(folder)
    found = sorted(folder.glob(f"epoch_*/{ROWS}"), key=lambda file: int(file.parent.name[len("epoch_") :]))
    images, epochs = read_pictures(folder), []
    if not found or images is None:
        raise UserError(f"{folder} holds no epoch: train with --attention.every_n_epochs above 0.")
    wanted = _heads_of(model)
    for file in found:
        with np.load(file) as kept:
            levels, tops = (torch.from_numpy(kept[name]) for name in ("levels", "tops"))
            places = {tuple(head): place for place, head in enumerate(kept["heads"].tolist())}
        is_other = any(head not in places for head in map(tuple, wanted))
        if is_other or levels.shape[0] != len(images) or levels.shape[2] != model.layout.num_tokens:
            raise UserError(
                f"{file} holds {levels.shape[1]} heads and {levels.shape[2]} tokens of {len(levels)} pictures, the "
                f"model has {len(wanted)} and {model.layout.num_tokens}, the run {len(images)}: give the run's own."
            )
        here = [places[tuple(head)] for head in wanted]  # heads that were removed later have no place on the page
        levels, tops = levels[:, here], tops[:, here]
        name = f"epoch {int(file.parent.name[len('epoch_') :])}"
        epochs.append(EpochAttention(name=name, rows=dequantize_rows(levels, tops)))
    return images, epochs


def _heads_of(model: VisionTransformer) -> list[list[int]]:
    """Layer and number at first of every head that is there."""
    return [[layer, head] for layer, each in enumerate(model.attentions) for head in each.original_head_index]


def write_animation(
    file: str | Path,
    model: VisionTransformer,
    image: Float[Tensor, "channels height width"],
    epochs: Sequence[EpochAttention],
    picture: int = 0,
    seconds: float = 0.6,
) -> None:
    """Writes one drawing after the other, all on one colour scale, as a moving picture.

    Args:
        file: An .mp4, for which imageio and PyAV must be there, or a .gif or another moving format of Pillow's.
        model: Says which head is in which layer.
        image: The one looked at, normalised.
        epochs: As `read_epochs` gives them.
        picture: Its number among the pictures of the epochs.
        seconds: Each epoch is shown; the last one three times as long.

    Raises:
        UserError: An .mp4 without its packages.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    check_animation(Path(file).suffix[1:])
    grids = [to_layer_head_grid(epoch.rows[picture], model) for epoch in epochs]
    highest, frames = percentile(torch.stack(grids)), []
    for epoch, maps in zip(epochs, grids, strict=True):
        canvas = FigureCanvasAgg(draw_maps(denormalized(model.preprocessing, image), maps, epoch.name, highest))
        canvas.draw()
        frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    frames = [frame.resize(frames[-1].size) for frame in frames]  # labels of another width move the edges
    if Path(file).suffix == ".mp4":
        return _write_mp4(file, [*frames, frames[-1], frames[-1]], seconds)
    times = [round(1000 * seconds)] * (len(frames) - 1) + [round(3000 * seconds)]
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=times, loop=0)
    return None


def check_animation(kind: str) -> None:
    """Refuses a kind of film that cannot be written, before the work is done.

    Raises:
        UserError: "mp4" without its packages.
    """
    if kind == "mp4" and not (find_spec("imageio") and find_spec("av")):  # what imageio writes with
        raise UserError("An .mp4 needs imageio and PyAV: pip install 'vitmha[video]', or write a .gif.")


def _write_mp4(file: str | Path, frames: Sequence[Image.Image], seconds: float) -> None:
    import imageio.v3

    # The format wants sides of an even number of pixels.
    pixels = np.stack([np.asarray(frame)[: frame.height // 2 * 2, : frame.width // 2 * 2] for frame in frames])
    imageio.v3.imwrite(file, pixels, plugin="pyav", codec="libx264", fps=1 / seconds)
