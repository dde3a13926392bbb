"""`LitViT`, the LightningModule."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from lightning import Callback, LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from vitmha.data.labeled import class_to_idx
from vitmha.errors import UserError
from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import DecoderBlock, DecoderConfig, EncoderDecoder, get_encoder
from vitmha.models.vit import Block, VisionTransformer
from vitmha.training.distillation import DistillationConfig, load_teacher
from vitmha.training.ema import EMAWeightAveraging
from vitmha.training.losses import bce, cross_entropy, distillation_loss, is_correct
from vitmha.training.optimizers import (
    StackedMuon,
    Together,
    check_optimizer,
    named_optimizer,
    parameter_groups,
    warmup_cosine,
    with_rate,
)
from vitmha.weights.load import config_from_pretrained, load_model, load_weights
from vitmha.weights.save import to_config_dict

# Normalised pictures (batch, channels, height, width) and their class numbers (batch), shares (batch, num_classes), or
# sequences of class numbers (batch, length).
Batch = Sequence[Tensor]


class LitViT(LightningModule):
    """Trains a Vision Transformer with cross-entropy, to classify pictures or to read them as sequences of classes.

    Args:
        vit: The architecture. Its picture size, channels and number of classes come from the data.
        decoder: Reads sequences from the tokens of the Vision Transformer, where the labels of the data are sequences.
        optimizer: "muon" for the matrices of the blocks and AdamW for the rest; or for all parameters "adamw", "lamb",
            "sgd" (with Nesterov momentum) or any other name in `timm.optim.list_optimizers()`.
        learning_rate: The rate at the end of the warm-up.
        muon_learning_rate: Muon's rate at the end of the warm-up.
        betas: Decay rates of the first and the second moment, each in [0, 1), where the optimiser takes two.
        weight_decay: Decay of matrices, decoupled in most optimisers; biases, norms, tokens and positions have none.
        layer_decay: The learning rate's factor from each layer to the one below, the head's being 1; for fine-tuning.
        warmup_fraction: Share of all optimiser steps in which the rate rises linearly; the rest follows a cosine to zero.
        loss: "cross_entropy", or "bce": each class apart, where all classes of a mixed picture count as wholly there.
        label_smoothing: Share of the target spread over all classes, in training only.
        patch_dropout_until: Share of all optimiser steps after which vit.patch_dropout ends and pictures are whole: most is
            learned from a part of the patches as well, in a fraction of the time.
        ema_decay: Decay of the running average of the weights, such as 0.999. Where given, the averaged weights are the ones
            that are validated, saved and classified with; training itself goes on with the others.
        distillation: Teaches the model what another one says of the same augmented pictures; with
            vit.distillation_token, the second head learns from it and the first from the labels.
        compile: Whether torch.compile makes the model faster, after some seconds at the start.
        pretrained: Where training starts: a model folder or checkpoint, timm:NAME, hf:REPO, or what else `load_model`
            takes. The architecture is then the source's, and vit says only what differs: dropout rates, another size of
            the patches. The head is new where the classes differ.
        linear_probe: Whether the head alone learns, from the features of the pretrained rest (a linear probe).
    """

    def __init__(
        self,
        vit: ViTConfig,
        *,
        decoder: DecoderConfig | None = None,
        optimizer: str = "adamw",
        learning_rate: float = 1e-3,
        muon_learning_rate: float = 0.02,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.05,
        layer_decay: float = 1.0,
        warmup_fraction: float = 0.05,
        loss: Literal["cross_entropy", "bce"] = "cross_entropy",
        label_smoothing: float = 0.1,
        patch_dropout_until: float = 1.0,
        ema_decay: float | None = None,
        distillation: DistillationConfig | None = None,
        compile: bool = False,  # noqa: A002 (the flag's name)
        pretrained: str | None = None,
        linear_probe: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= warmup_fraction < 1:
            raise UserError(f"--model.warmup_fraction must lie in [0, 1), got {warmup_fraction}.")
        if not 0 <= label_smoothing < 1:
            raise UserError(f"--model.label_smoothing must lie in [0, 1), got {label_smoothing}.")
        if not 0 < layer_decay <= 1:
            raise UserError(f"--model.layer_decay must lie in (0, 1], got {layer_decay}.")
        if not 0 <= patch_dropout_until <= 1:
            raise UserError(f"--model.patch_dropout_until must lie in [0, 1], got {patch_dropout_until}.")
        check_optimizer(optimizer)
        if loss == "bce" and decoder is not None:
            raise UserError("--model.loss bce is for classes, not for sequences: leave it out with --model.decoder.")
        if distillation is not None and decoder is not None:
            raise UserError("--model.distillation is for classes: leave it out with --model.decoder.")
        if linear_probe and (pretrained is None or optimizer == "muon"):
            raise UserError(
                "--model.linear_probe learns from the features of --model.pretrained, with an optimiser for the head such "
                f"as adamw or sgd: got pretrained {pretrained} and optimizer {optimizer}."
            )
        if ema_decay is not None and not 0 <= ema_decay < 1:
            raise UserError(f"--model.ema_decay must lie in [0, 1), got {ema_decay}.")
        self.optimizer, self.weight_decay, self.layer_decay = optimizer, weight_decay, layer_decay
        self.learning_rate, self.muon_learning_rate, self.betas = learning_rate, muon_learning_rate, betas
        self.warmup_fraction, self.patch_dropout_until = warmup_fraction, patch_dropout_until
        self.loss = partial(cross_entropy if loss == "cross_entropy" else bce, label_smoothing=label_smoothing)
        self.ema_decay, self.distillation, self.pretrained = ema_decay, distillation, pretrained
        self.is_compiled = compile
        if pretrained:
            vit = config_from_pretrained(pretrained, vit)
        self.model = VisionTransformer(vit) if decoder is None else EncoderDecoder(vit, decoder)
        self.linear_probe = linear_probe
        if linear_probe:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name.startswith(("head.", "head_dist.")))
        if compile:
            self.model.compile(dynamic=False)  # DropPath chooses a fixed number of the pictures
        # A look for NaN, as the others have it, would make the host wait for the device in every step.
        self.train_accuracy, self.train_loss = (MeanMetric(nan_strategy="disable") for _ in range(2))
        self.val_accuracy, self.test_accuracy = MeanMetric(), MeanMetric()
        self.val_loss, self.test_loss = MeanMetric(), MeanMetric()

    def forward(
        self, images: Tensor, labels: Tensor, *, separate_heads: bool = False
    ) -> Float[Tensor, "batch *length classes"]:
        """The logits of the classes; a decoder reads the true tokens before each token of a sequence.

        Args:
            images: Normalised pictures.
            labels: Their classes or sequences.
            separate_heads: As for `VisionTransformer`.
        """
        are_sequences = labels.ndim == 2 and not labels.is_floating_point()
        if isinstance(self.model, EncoderDecoder):
            if not are_sequences:
                raise UserError("The labels are classes and no sequences: leave out --model.decoder.")
            return self.model(images, labels)
        if are_sequences:
            raise UserError("The labels are sequences of classes: give --model.decoder, which reads them.")
        return self.model(images, separate_heads=separate_heads)

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        self.model.class_names = getattr(data, "class_names", None)
        self.model.preprocessing = getattr(data, "preprocessing", None)
        if self.pretrained and stage == "fit":
            rank_zero_info(load_weights(self.model, self.pretrained))
        elif self.pretrained and self.trainer.ckpt_path is None:
            self._load_for_evaluation(self.pretrained)

    def _load_for_evaluation(self, source: str) -> None:
        """The weights of a source with its head, to be measured: its classes must be those of the data, in order."""
        config = self.model.config
        sizes: dict[str, Any] = {
            "image_size": config.image_size,
            "patch_size": config.patch_size,
            "in_channels": config.in_channels,
        }
        trained = load_model(source, **sizes)
        ours, theirs = self.model.class_names, trained.class_names
        if trained.config.num_classes != config.num_classes or (ours is not None and theirs is None):
            raise UserError(
                f"{source} has no head for these {config.num_classes} classes, but one for "
                f"{trained.config.num_classes or 'none'}: there is nothing to measure before a training."
            )
        if ours is not None and theirs is not None:
            if list(class_to_idx(ours, theirs).values()) != list(range(len(theirs))):
                raise UserError(
                    f"The {len(ours)} classes of the data are not those of {source} in their order: measure it with "
                    "`vitmha classify --truth FOLDER`."
                )
            self.model.class_names = theirs
        faults = [
            f"{name} is {getattr(seen, name)}, here {getattr(wanted, name)}"
            for seen, wanted in [(trained.preprocessing, self.model.preprocessing)]
            for name in ("mean", "std", "interpolation", "crop_pct", "crop_mode")
            if seen is not None and wanted is not None and getattr(seen, name) != getattr(wanted, name)
        ]
        if faults:
            raise UserError(
                f"{source} sees pictures otherwise: {'; '.join(faults)}. Give --data.{faults[0].split()[0]} and so on "
                "as they are there where the data takes them, or measure with `vitmha classify --truth FOLDER`."
            )
        self.model.load_state_dict(trained.state_dict())

    def on_fit_start(self) -> None:
        if self.distillation is None:
            return
        teacher = load_teacher(self.distillation.teacher, self.model).to(self.device)
        if self.is_compiled:
            teacher.compile(dynamic=False)

        @torch.no_grad()
        def teacher_forward(images: Tensor) -> Tensor:
            seen = teacher.preprocessing
            return teacher(images if seen is None else seen.renormalize(images, self.model.preprocessing))

        self.teacher_forward = teacher_forward  # not the module: its parameters are neither counted, saved nor averaged

    def configure_model(self) -> None:
        """Shards the model over the processes, block by block, where the strategy asks for it (FSDP2)."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ModelParallelStrategy):
            if self.optimizer == "muon":
                raise UserError("--model.optimizer muon needs whole matrices, a sharded model has parts: take adamw.")
            blocks = [module for module in self.model.modules() if isinstance(module, Block | DecoderBlock)]
            for part in (*blocks, self.model):
                fully_shard(part, mesh=strategy.device_mesh["data_parallel"])

    def configure_callbacks(self) -> list[Callback]:
        return [] if self.ema_decay is None else [EMAWeightAveraging(self.ema_decay)]

    def on_train_start(self) -> None:
        self.on_train_epoch_start()  # which an epoch that goes on in its middle does not call

    def on_train_epoch_start(self) -> None:
        if self.linear_probe:
            self.model.eval()
        if self.trainer.check_val_every_n_epoch and self.trainer.current_epoch + 1 == self.trainer.max_epochs:
            self.trainer.check_val_every_n_epoch = 1  # what is kept is what was measured, whatever the interval

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        is_whole = self.global_step >= self.patch_dropout_until * self.trainer.estimated_stepping_batches
        encoder = get_encoder(self.model)
        encoder.patch_dropout = 0.0 if is_whole else encoder.config.patch_dropout

    def training_step(self, batch: Batch) -> Tensor:
        images, labels = batch
        logits, loss = self._compute_loss(images, labels)
        self.train_accuracy.update(is_correct(logits.detach(), labels))
        self.train_loss.update(loss.detach().expand(len(labels)))
        self.log("train/loss", loss.detach(), prog_bar=True)  # of this process's part of the batch
        return loss

    def _compute_loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The logits and the loss of one step."""
        if self.distillation is None or not len(labels):
            logits = self(images, labels)
            # A process whose pictures were all left out as damaged takes part in the step with a gradient of zero.
            return logits, self.loss(logits, labels) if len(labels) else logits.sum()
        logits = self(images, labels, separate_heads=True)
        of_labels, of_teacher = logits.unbind(1) if logits.ndim == 3 else (logits, logits)
        alpha, temperature = self.distillation.alpha, self.distillation.temperature
        teacher_logits = distillation_loss(
            of_teacher, self.teacher_forward(images), self.distillation.type, temperature
        )
        return (of_labels + of_teacher) / 2, (1 - alpha) * self.loss(of_labels, labels) + alpha * teacher_logits

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Makes the last step of an epoch the mean over its batches, however few the accumulation has left for it."""
        wanted, batches = self.trainer.accumulate_grad_batches, self.trainer.num_training_batches
        left = 0 if math.isinf(batches) else int(batches) % wanted
        if left and self.trainer.fit_loop.batch_idx >= batches - left:
            loss = loss * (wanted / left)
        super().backward(loss, *args, **kwargs)

    def on_train_epoch_end(self) -> None:
        # Here and not in every step, so that it is also logged by a run that goes on behind the last of them.
        self.log("train/accuracy", self.train_accuracy, prog_bar=True)
        self.log("train/loss_epoch", self.train_loss)

    def validation_step(self, batch: Batch) -> None:
        self._evaluate(batch, "val", self.val_loss, self.val_accuracy)

    def test_step(self, batch: Batch) -> None:
        self._evaluate(batch, "test", self.test_loss, self.test_accuracy)

    def _evaluate(self, batch: Batch, stage: str, loss: MeanMetric, accuracy: MeanMetric) -> None:
        images, labels = batch
        if len(labels):  # a process's last share of the data may be empty
            logits = self(images, labels).float()
            loss.update(cross_entropy(logits, labels), weight=len(labels))
            accuracy.update(is_correct(logits, labels))
        self.log_dict({f"{stage}/loss": loss, f"{stage}/accuracy": accuracy}, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices, others = parameter_groups(self.model, self.weight_decay, self.layer_decay)
        if self.optimizer == "muon":
            muon = StackedMuon(with_rate(matrices, self.muon_learning_rate), self.muon_learning_rate)
            rest = AdamW(with_rate(others, self.learning_rate), self.learning_rate, self.betas)
            optimizer: Optimizer = Together(muon, rest)
        else:
            groups = with_rate(matrices + others, self.learning_rate)
            optimizer = named_optimizer(groups, self.optimizer, self.learning_rate, self.betas)
        if math.isinf(self.trainer.estimated_stepping_batches):
            raise UserError("The schedule needs an end: give --trainer.max_epochs or --trainer.max_steps.")
        total = int(self.trainer.estimated_stepping_batches)
        factor = partial(warmup_cosine, warmup=round(self.warmup_fraction * total), total=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.ema_decay is None and "current_model_state" in checkpoint and self.trainer.state.fn == "fit":
            raise UserError("The checkpoint is of a run with averaged weights: give --model.ema_decay as it was.")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["vitmha"] = to_config_dict(self.model)
