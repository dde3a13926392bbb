"""Attention maps of a training run: a small file per epoch, read back for the page and as an animation."""

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

from vitmha.atomic import atomic_path
from vitmha.errors import UserError
from vitmha.inspection.figures import denormalized, draw_maps, percentile, to_layer_head_grid
from vitmha.inspection.maps import dequantize_rows, quantize_rows
from vitmha.inspection.page.page import EpochAttention
from vitmha.models.vit import VisionTransformer

IMAGES = "images.npz"
ATTENTION = "attention.npz"


def write_epoch(
    directory: str | Path,
    epoch: int,
    images: Float[Tensor, "images channels height width"],
    rows: Float[Tensor, "images all_heads tokens"],
    model: VisionTransformer,
) -> None:
    """Writes `epoch_003/attention.npz`, one byte per weight, and `images.npz`.

    Args:
        directory: `attention/` of the run.
        epoch: Index of the epoch.
        images: Normalized; the same in each epoch.
        rows: `HeadMetrics.readout_attention` of the images.
        model: The model that has these heads.
    """
    directory = Path(directory)
    epoch_dir = directory / f"epoch_{epoch:03d}"
    levels, maxima = quantize_rows(rows)
    layout = json.dumps(asdict(model.layout))
    heads = _original_heads(model)
    _save(epoch_dir / ATTENTION, levels=levels.numpy(), maxima=maxima.numpy(), heads=heads, layout=layout)
    _save(directory / IMAGES, images=images.numpy())


def _save(file: Path, **arrays: Any) -> None:
    with atomic_path(file) as partial, partial.open("wb") as stream:  # savez would append .npz to the name
        np.savez_compressed(stream, **arrays)


def read_images(directory: str | Path) -> Float[Tensor, "images channels height width"] | None:
    """Returns the images whose attention a run logs, normalized; None if it has not logged any yet.

    Args:
        directory: `attention/` of the run.
    """
    file = Path(directory) / IMAGES
    if not file.is_file():
        return None
    with np.load(file) as arrays:
        return torch.from_numpy(arrays["images"])


def read_epochs(
    directory: str | Path, model: VisionTransformer
) -> tuple[Float[Tensor, "images channels height width"], list[EpochAttention]]:
    """Returns the images whose attention a run has logged, and its epochs, first to last.

    Args:
        directory: `attention/` of the run.
        model: The trained model of the run.

    Raises:
        UserError: No attention was logged, or the model has other tokens or heads than the run.
    """
    directory = Path(directory)
    files = sorted(directory.glob(f"epoch_*/{ATTENTION}"), key=_epoch_of)
    images, epochs = read_images(directory), []
    if not files or images is None:
        raise UserError(f"{directory} holds no logged epoch: train with attention.every_n_epochs of at least 1.")
    heads = _original_heads(model)
    for file in files:
        with np.load(file) as arrays:
            levels, maxima = (torch.from_numpy(arrays[name]) for name in ("levels", "maxima"))
            index_of = {tuple(head): index for index, head in enumerate(arrays["heads"].tolist())}
        has_heads = all(tuple(head) in index_of for head in heads)
        if not has_heads or levels.shape[0] != len(images) or levels.shape[2] != model.layout.num_tokens:
            raise UserError(
                f"{file} holds {levels.shape[1]} heads and {levels.shape[2]} tokens of {len(levels)} images, but the "
                f"model has {len(heads)} heads and {model.layout.num_tokens} tokens, and the run {len(images)} images: "
                "pass the model of this run."
            )
        indices = [index_of[tuple(head)] for head in heads]  # heads that were pruned later are not shown
        rows = dequantize_rows(levels[:, indices], maxima[:, indices])
        epochs.append(EpochAttention(name=f"epoch {_epoch_of(file)}", rows=rows))
    return images, epochs


def _epoch_of(file: Path) -> int:
    return int(file.parent.name.removeprefix("epoch_"))


def _original_heads(model: VisionTransformer) -> list[list[int]]:
    """Returns [layer, index before any pruning] of every remaining head."""
    return [[layer, head] for layer, attention in enumerate(model.attentions) for head in attention.original_head_index]


def write_animation(
    file: str | Path,
    model: VisionTransformer,
    image: Float[Tensor, "channels height width"],
    epochs: Sequence[EpochAttention],
    index: int = 0,
    seconds: float = 0.6,
) -> None:
    """Writes the maps of one image as an animation, one frame per epoch, on one color scale.

    Args:
        file: .mp4, which needs imageio and PyAV, or .gif or another animated format of Pillow.
        model: The model that has these heads.
        image: Normalized.
        epochs: As `read_epochs` returns them.
        index: Index of the image in the epochs.
        seconds: Duration of a frame; the last one is shown three times as long.

    Raises:
        UserError: .mp4 without imageio and PyAV.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    check_animation(Path(file).suffix[1:])
    grids = [to_layer_head_grid(epoch.rows[index], model) for epoch in epochs]
    highest, frames = percentile(torch.stack(grids)), []
    for epoch, maps in zip(epochs, grids, strict=True):
        canvas = FigureCanvasAgg(draw_maps(denormalized(model.preprocessing, image), maps, epoch.name, highest))
        canvas.draw()
        frames.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB"))
    frames = [frame.resize(frames[-1].size) for frame in frames]  # tick labels change the size of a figure
    if Path(file).suffix == ".mp4":
        return _write_mp4(file, [*frames, frames[-1], frames[-1]], seconds)
    durations = [round(1000 * seconds)] * (len(frames) - 1) + [round(3000 * seconds)]
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return None


def check_animation(suffix: str) -> None:
    """Checks that an animation can be written, before the work is done.

    Raises:
        UserError: "mp4" without imageio and PyAV.
    """
    if suffix == "mp4" and not (find_spec("imageio") and find_spec("av")):  # imageio writes .mp4 with PyAV
        raise UserError("An .mp4 needs imageio and PyAV: pip install 'vitmha[video]', or write a .gif.")


def _write_mp4(file: str | Path, frames: Sequence[Image.Image], seconds: float) -> None:
    import imageio.v3

    # H.264 needs an even number of pixels on each side.
    pixels = np.stack([np.asarray(frame)[: frame.height // 2 * 2, : frame.width // 2 * 2] for frame in frames])
    imageio.v3.imwrite(file, pixels, plugin="pyav", codec="libx264", fps=1 / seconds)
