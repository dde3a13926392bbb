"""Training a Vision Transformer to classify: loss, metrics, optimiser and schedule."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch.nn.functional as F
from jaxtyping import Float
from lightning import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from vitmha.decoder import DecoderConfig, EncoderDecoder
from vitmha.pretrained import describe, load_weights
from vitmha.vit import VisionTransformer, ViTConfig

# Normalised pictures (batch, channels, height, width) and their class numbers (batch), shares (batch, num_classes), or
# sequences of class numbers (batch, length).
Batch = Sequence[Tensor]


class LitViT(LightningModule):
    """Trains a Vision Transformer with cross-entropy, to classify pictures or to read them as sequences of classes.

    Args:
        vit: The architecture. Its picture size, channels and number of classes come from the data.
        decoder: Reads sequences from the tokens of the Vision Transformer, where the labels of the data are sequences.
        optimizer: "adamw" for all parameters, or "muon" for the matrices of the blocks and AdamW for the rest.
        learning_rate: AdamW's rate at the end of the warm-up.
        muon_learning_rate: Muon's rate at the end of the warm-up.
        betas: AdamW's decay rates of the first and the second moment, each in [0, 1).
        weight_decay: Decoupled decay of matrices; biases, norms, tokens and positions are not decayed.
        warmup: Share of all optimiser steps in which the rate rises linearly; the rest follows a cosine to zero.
        label_smoothing: Share of the target spread over all classes, in training only.
        compile: Whether torch.compile makes the model faster, after some seconds at the start.
        pretrained: A model folder or checkpoint to start from; the head is new where the classes differ.
    """

    def __init__(
        self,
        vit: ViTConfig,
        *,
        decoder: DecoderConfig | None = None,
        optimizer: Literal["adamw", "muon"] = "adamw",
        learning_rate: float = 1e-3,
        muon_learning_rate: float = 0.02,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.05,
        warmup: float = 0.05,
        label_smoothing: float = 0.1,
        compile: bool = False,  # noqa: A002 (the flag's name)
        pretrained: str | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= warmup < 1:
            raise ValueError(f"--model.warmup must lie in [0, 1), got {warmup}.")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"--model.label_smoothing must lie in [0, 1), got {label_smoothing}.")
        self.optimizer, self.weight_decay, self.warmup = optimizer, weight_decay, warmup
        self.learning_rate, self.muon_learning_rate, self.betas = learning_rate, muon_learning_rate, betas
        self.label_smoothing, self.pretrained = label_smoothing, pretrained
        self.model = VisionTransformer(vit) if decoder is None else EncoderDecoder(vit, decoder)
        if compile:
            self.model.compile()
        self.train_accuracy, self.val_accuracy, self.test_accuracy = (MeanMetric() for _ in range(3))
        self.val_loss, self.test_loss = MeanMetric(), MeanMetric()

    def forward(self, images: Tensor, labels: Tensor) -> Float[Tensor, "batch *length classes"]:
        """The logits of the classes; a decoder reads the true tokens before each token of a sequence."""
        are_sequences = labels.ndim == 2 and not labels.is_floating_point()
        if isinstance(self.model, EncoderDecoder):
            if not are_sequences:
                raise ValueError("The labels are classes and no sequences: leave out --model.decoder.")
            return self.model(images, labels)
        if are_sequences:
            raise ValueError("The labels are sequences of classes: give --model.decoder, which reads them.")
        return self.model(images)

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        self.model.class_names = getattr(data, "class_names", None)
        self.model.preprocessing = getattr(data, "preprocessing", None)
        if stage == "fit" and self.pretrained:
            new = load_weights(self.model, self.pretrained)
            rank_zero_info(f"Started from {self.pretrained}; new: {', '.join(new) or 'nothing'}.")

    def training_step(self, batch: Batch) -> Tensor:
        images, labels = batch
        logits = self(images, labels)
        loss = F.cross_entropy(logits.movedim(-1, 1), labels, label_smoothing=self.label_smoothing)
        self.train_accuracy.update(is_right(logits.detach(), labels))
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch) -> None:
        self._evaluate(batch, "val", self.val_loss, self.val_accuracy)

    def test_step(self, batch: Batch) -> None:
        self._evaluate(batch, "test", self.test_loss, self.test_accuracy)

    def _evaluate(self, batch: Batch, stage: str, loss: MeanMetric, accuracy: MeanMetric) -> None:
        images, labels = batch
        if len(labels):  # a process's last share of the data may be empty
            logits = self(images, labels).float()
            loss.update(F.cross_entropy(logits.movedim(-1, 1), labels), weight=len(labels))
            accuracy.update(is_right(logits, labels))
        self.log_dict({f"{stage}/loss": loss, f"{stage}/accuracy": accuracy}, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices, others, undecayed = split_parameters(self.model)
        others = others if self.optimizer == "muon" else matrices + others
        groups: list[dict[str, Any]] = [{"params": others}, {"params": undecayed, "weight_decay": 0.0}]
        optimizer: Optimizer = AdamW(groups, self.learning_rate, self.betas, weight_decay=self.weight_decay)
        if self.optimizer == "muon":
            muon = Muon(matrices, self.muon_learning_rate, weight_decay=self.weight_decay)
            optimizer = Together(muon, optimizer)
        total = int(self.trainer.estimated_stepping_batches)
        factor = partial(warmup_cosine, warmup=round(self.warmup * total), total=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["vitmha"] = describe(self.model)


def is_right(logits: Float[Tensor, "batch *length classes"], labels: Tensor) -> Float[Tensor, " batch"]:
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


class Together(Optimizer):
    """Several optimisers, each with parameters of its own, as one: one step, one schedule, one state dict.

    Args:
        parts: The optimisers.
    """

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        # The very dictionaries of the parts, so that a schedule reaches them.
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """All trainable parameters, each once, by how they are optimised.

    Returns:
        The matrices of the blocks; the other matrices (patches, pooling, head); what must not decay: all vectors,
        tokens and positions.
    """
    matrices, others, undecayed = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim == 1 or name.endswith(("token", "pos_embed", "probe")):
            undecayed.append(parameter)
        elif "blocks." in name:
            matrices.append(parameter)
        else:
            others.append(parameter)
    return matrices, others, undecayed


def warmup_cosine(step: int, *, warmup: int, total: int) -> float:
    """The factor on the learning rate at an optimiser step: linear up to 1, then half a cosine down to 0.

    Args:
        step: Optimiser steps done, from 0.
        warmup: Steps of the linear part.
        total: All steps.

    Returns:
        A factor in [0, 1].
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(total - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
