"""Compact storage of the attention of all heads to one image, for the page."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitmha.attention import attention_gradients, attention_probabilities
from vitmha.inspection.maps import dequantize_rows, quantize_rows
from vitmha.inspection.record import value_lengths
from vitmha.inspection.trace import Trace
from vitmha.models.vit import VisionTransformer

RANK = 16  # of the factors of the gradients


def pack_attention(model: VisionTransformer, traced: Trace) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Packs the attention of all heads to the image of a trace.

    Whole maps are stored, quantized by `quantize_rows`, if they are smaller than queries and keys. Otherwise queries
    and keys are stored as int8 with a scale per token, and the page computes the softmax. The gradient of
    the target with respect to the weights is dy v^T; two factors of a rank of at most `RANK` are stored.

    Returns:
        The arrays by name, with the heads of all layers along the first axis, and the errors, see `PageResult.error`.
    """
    out_projs = [model.attentions[layer].out_proj for layer in traced.layers]
    parts: dict[str, list[Tensor]] = {}
    errors: dict[str, list[Tensor]] = {"probability": [], "variation": [], "missed": [], "size": []}
    with torch.no_grad():
        for out_proj, block in zip(out_projs, traced.blocks, strict=True):
            q, k, v, dy = (t[0].float().cpu() for t in (block.q, block.k, block.v, block.grad_y))
            weights = attention_probabilities(q[None], k[None])[0]
            true = (weights * attention_gradients(dy[None], v[None])[0]).clamp_min(0)
            layer, restored = _packed_rows(q, k, weights)
            lengths = value_lengths(v[None], out_proj.weight.detach().float().cpu(), len(q))[0]
            left, right = _low_rank_factors(dy, v)
            if not model.layout.num_class_tokens:
                patches = model.layout.patches
                layer |= {"pooled": weights[:, patches].mean(1), "pooled_relevance": true[:, patches].mean(1)}
            layer |= {"norms": lengths, **_quantize_vectors("left", left), **_quantize_vectors("right", right)}
            product = _dequantize_vectors(layer, "left") @ _dequantize_vectors(layer, "right").mT
            errors["probability"].append((restored - weights).abs().max())
            errors["variation"].append((restored - weights).abs().sum(-1).mean() / 2)
            errors["missed"].append(((restored * product).clamp_min(0) - true).square().sum())
            errors["size"].append(true.square().sum())
            for name, values in layer.items():
                parts.setdefault(name, []).append(values)
    sections = {name: torch.cat(values).numpy() for name, values in parts.items()}
    missed, size = (torch.stack(errors[name]).sum() for name in ("missed", "size"))
    return sections, {
        "probability": float(torch.stack(errors["probability"]).max()),
        "variation": float(torch.stack(errors["variation"]).mean()),
        "relevance": float((missed / size.clamp_min(1e-30)).sqrt()),
    }


def _packed_rows(
    q: Float[Tensor, "heads tokens head_dim"],
    k: Float[Tensor, "kv_heads tokens head_dim"],
    weights: Float[Tensor, "heads tokens tokens"],
) -> tuple[dict[str, Tensor], Float[Tensor, "heads tokens tokens"]]:
    """Returns what is stored of a layer's weights, and the weights that the page restores from it."""
    if weights.shape[-1] <= 2 * q.shape[-1]:
        levels, maxima = quantize_rows(weights)
        return {"maps": levels, "maxima": maxima}, dequantize_rows(levels, maxima)
    k = k - k.mean(1, keepdim=True)  # a common offset of all keys does not change the softmax, but costs precision
    k = k.repeat_interleave(len(q) // len(k), dim=0)
    stored = {**_quantize_vectors("q", q * q.shape[-1] ** -0.5), **_quantize_vectors("k", k)}
    return stored, (_dequantize_vectors(stored, "q") @ _dequantize_vectors(stored, "k").mT).softmax(-1)


def _quantize_vectors(name: str, x: Float[Tensor, "heads tokens width"]) -> dict[str, Tensor]:
    """Quantizes each token's vector to int8 with one scale."""
    scale = x.abs().amax(-1).clamp_min(torch.finfo(x.dtype).tiny) / 127
    return {name: (x / scale[..., None]).round().to(torch.int8), f"{name}_scale": scale}


def _dequantize_vectors(stored: Mapping[str, Tensor], name: str) -> Tensor:
    return stored[name].float() * stored[f"{name}_scale"][..., None]


def _low_rank_factors(
    dy: Float[Tensor, "heads tokens head_dim"], v: Float[Tensor, "kv_heads tokens head_dim"]
) -> tuple[Float[Tensor, "heads tokens rank"], Float[Tensor, "heads tokens rank"]]:
    """Returns two factors of the best approximation of dy v^T of rank `RANK`."""
    v = v.repeat_interleave(len(dy) // len(v), dim=0)
    (left, left_triangle), (right, right_triangle) = torch.linalg.qr(dy), torch.linalg.qr(v)
    u, values, w = torch.linalg.svd(left_triangle @ right_triangle.mT)
    rank = min(RANK, values.shape[-1])
    root = values[:, None, :rank].sqrt()
    return left @ u[..., :rank] * root, right @ w.mT[..., :rank] * root


def store(sections: Mapping[str, np.ndarray], blobs: list[str]) -> dict[str, Any]:
    """Appends the arrays as one base64 blob; returns the offset in bytes (a multiple of 4), dtype and shape of each."""
    table, content = {}, b""
    dtypes = {"uint8": "u1", "int8": "i1", "float32": "f4"}
    for name, values in sections.items():
        table[name] = {"offset": len(content), "dtype": dtypes[values.dtype.name], "shape": values.shape}
        content += values.tobytes()
        content += bytes(-len(content) % 4)
    blobs.append(base64.b64encode(content).decode())
    return {"index": len(blobs) - 1, "sections": table}
