"""Losses, and the correctness of predictions."""

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def cross_entropy(
    logits: Float[Tensor, "batch *length classes"], labels: Tensor, label_smoothing: float = 0.0
) -> Float[Tensor, ""]:
    """-sum_k t_k log p_k, with p the softmax of the logits and t the target; the mean over the batch.

    Args:
        logits: Of the classes.
        labels: Class numbers, negative (-100) where nothing is asked; or the shares of the classes in mixed pictures,
            not smoothed yet.
        label_smoothing: The share of the target that all classes have alike: t = (1 - s) labels + s / classes.

    Returns:
        At least 0; the logarithm of the number of classes where all logits are the same, whatever the target.
    """
    return F.cross_entropy(logits.movedim(-1, 1), labels, label_smoothing=label_smoothing)


def bce(logits: Float[Tensor, "batch classes"], labels: Tensor, label_smoothing: float = 0.0) -> Float[Tensor, ""]:
    """Whether each class is there, asked apart: the mean over batch and classes of the binary cross-entropy.

    All classes of a mixed picture are wholly there, whatever their shares.

    Args:
        logits: Of the classes.
        labels: As for `cross_entropy`; no sequences.
        label_smoothing: As for `cross_entropy`.

    Returns:
        At least 0.

    Source:
        Touvron et al. 2022 (DeiT III, arXiv 2204.07118), section 4; the smoothing as in timm's `BinaryCrossEntropy`.
    """
    there = labels > 0 if labels.is_floating_point() else F.one_hot(labels, logits.shape[-1])
    targets = (1 - label_smoothing) * there.to(logits.dtype) + label_smoothing / logits.shape[-1]
    return F.binary_cross_entropy_with_logits(logits, targets)


def distillation_loss(
    logits: Float[Tensor, "batch classes"],
    teacher_logits: Float[Tensor, "batch classes"],
    kind: Literal["soft", "hard"] = "soft",
    temperature: float = 1.0,
) -> Float[Tensor, ""]:
    """How far a model is from its teacher, the mean over the batch.

    soft: temperature^2 KL(q || p), with q and p the softmax of the teacher's and the model's logits / temperature.
    hard: the cross-entropy with the teacher's most likely class.

    Args:
        logits: The model's.
        teacher_logits: The teacher's.
        kind: Which of the two formulas.
        temperature: Of the soft one; a higher one gives the unlikely classes more weight.

    Returns:
        At least 0.

    Source:
        Hinton et al. 2015 (arXiv 1503.02531); Touvron et al. 2021 (DeiT, arXiv 2012.12877), equations 2 and 3, whose
        code further divides the soft one by the number of classes.
    """
    if kind == "hard":
        return F.cross_entropy(logits, teacher_logits.argmax(-1))
    p, q = ((each / temperature).log_softmax(-1) for each in (logits, teacher_logits))
    return temperature**2 * F.kl_div(p, q, reduction="batchmean", log_target=True)


def is_correct(logits: Float[Tensor, "batch *length classes"], labels: Tensor) -> Float[Tensor, " batch"]:
    """1 where the most likely class is the label, in a sequence at every place; else 0.

    For sequences these are the ones that greedy search reads without a fault, though the true tokens before each place
    were given: as long as all is right, they are the ones it has chosen.

    Args:
        logits: Of the classes.
        labels: Class numbers, with negative ones where nothing is asked; or shares of the classes in a mixed picture,
            whose larger part counts.
    """
    labels = labels.argmax(-1) if labels.is_floating_point() else labels
    right = (logits.argmax(-1) == labels) | (labels < 0)
    return right.flatten(1).all(1).float() if right.ndim > 1 else right.float()
