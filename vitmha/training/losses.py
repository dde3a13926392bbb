"""Training losses."""

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def cross_entropy(
    logits: Float[Tensor, "batch *length classes"], labels: Tensor, label_smoothing: float = 0.0
) -> Float[Tensor, ""]:
    """Returns -sum_k t_k log p_k, where p is the softmax of the logits and t the target, averaged over the batch.

    Args:
        logits: Class logits.
        labels: Class indices, -100 (`ignore_index`) where a position does not count; or class probabilities, as mixup
            and cutmix produce them, not yet smoothed.
        label_smoothing: s in t = (1 - s) labels + s / classes.

    Returns:
        At least 0; ln(classes) for uniform logits, whatever the target.
    """
    return F.cross_entropy(logits.movedim(-1, 1), labels, label_smoothing=label_smoothing)


def bce(logits: Float[Tensor, "batch classes"], labels: Tensor, label_smoothing: float = 0.0) -> Float[Tensor, ""]:
    """Returns the multi-label binary cross-entropy, averaged over batch and classes.

    With mixup or cutmix, the targets of all mixed classes are 1, whatever their weights.

    Args:
        logits: Class logits.
        labels: Class indices or class probabilities, as for `cross_entropy`; no sequences.
        label_smoothing: s in t = (1 - s) target + s / classes.

    Returns:
        At least 0.

    Source:
        Touvron et al. 2022 (DeiT III, arXiv 2204.07118), section 4; the smoothing as in timm's `BinaryCrossEntropy`.
    """
    is_present = labels > 0 if labels.is_floating_point() else F.one_hot(labels, logits.shape[-1])
    targets = (1 - label_smoothing) * is_present.to(logits.dtype) + label_smoothing / logits.shape[-1]
    return F.binary_cross_entropy_with_logits(logits, targets)


def distillation_loss(
    logits: Float[Tensor, "batch classes"],
    teacher_logits: Float[Tensor, "batch classes"],
    distillation_type: Literal["soft", "hard"] = "soft",
    temperature: float = 1.0,
) -> Float[Tensor, ""]:
    """Returns the distillation loss between a student and its teacher, averaged over the batch.

    soft: temperature^2 KL(q || p), where q and p are the softmax of the teacher's and the student's logits divided by
    the temperature. hard: the cross-entropy with the teacher's most likely class.

    Args:
        logits: The student's class logits.
        teacher_logits: The teacher's class logits.
        distillation_type: Which of the two formulas.
        temperature: Used by the soft formula only; a higher one gives unlikely classes more weight.

    Returns:
        At least 0.

    Source:
        Hinton et al. 2015 (arXiv 1503.02531); Touvron et al. 2021 (DeiT, arXiv 2012.12877), equations 2 and 3. DeiT's
        code also divides the soft loss by the number of classes.
    """
    if distillation_type == "hard":
        return F.cross_entropy(logits, teacher_logits.argmax(-1))
    log_p, log_q = ((values / temperature).log_softmax(-1) for values in (logits, teacher_logits))
    return temperature**2 * F.kl_div(log_p, log_q, reduction="batchmean", log_target=True)
