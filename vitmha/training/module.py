"""`LitViT`, the LightningModule."""

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from lightning import Callback, LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer
from torchmetrics import MeanMetric

from vitmha.data.labeled import class_to_idx
from vitmha.errors import UserError, check_argument
from vitmha.images import Preprocessing
from vitmha.metrics import is_correct
from vitmha.models.config import SIZES, ViTConfig
from vitmha.models.encoder_decoder import DecoderBlock, DecoderConfig, EncoderDecoder, get_encoder
from vitmha.models.vit import Block, VisionTransformer
from vitmha.training.batches import images_and_labels, images_of
from vitmha.training.callbacks import ValidateLastEpoch
from vitmha.training.distillation import DistillationConfig, load_teacher
from vitmha.training.ema import EMAWeightAveraging
from vitmha.training.losses import bce, cross_entropy, distillation_loss
from vitmha.training.optimizers import (
    BatchedMuon,
    CombinedOptimizer,
    FactorSchedule,
    check_optimizer,
    create_optimizer,
    learning_rates,
    parameter_groups,
    warmup_cosine,
    with_learning_rate,
)
from vitmha.training.run_record import check_against_record, model_record, recorded_in, run_record
from vitmha.weights.load import config_from_pretrained, load_model, load_weights
from vitmha.weights.save import to_config_dict

# All that `LitViT` logs in `fit`; `checkpoint.monitor` chooses one of them.
METRICS = ("val/accuracy", "val/loss", "train/accuracy", "train/loss", "train/loss_epoch")


class LitViT(LightningModule):
    """LightningModule for Vision Transformer classification and sequence models.

    Its batches are (images, labels), or dictionaries as Hugging Face makes them (`vitmha.training.batches`): normalized
    images (batch, channels, height, width), and class indices (batch), class probabilities (batch, classes) or
    sequences of class indices (batch, length). vitmha's data modules give the model its class names and preprocessing;
    with data loaders of your own, set `module.model.class_names` and `module.model.preprocessing` before training.
    `module.model` is the trained model.

    Args:
        vit: Architecture. Image size, channels and number of classes come from the data.
        name: Named size, such as vit_small: sets every field of vit that is left at its default.
        decoder: Decoder on the tokens of the Vision Transformer, for data whose labels are sequences.
        optimizer: A name in `timm.optim.list_optimizers()`, such as adamw, lamb or sgd, or muon: Muon for the matrices
            of the blocks, AdamW for the rest. This muon is `BatchedMuon` with muon_learning_rate, in place of timm's of
            the same name; timm's other ones, such as nmuon and adamuon, get all parameters and learning_rate.
        learning_rate: Learning rate at the end of the warmup, above 0.
        muon_learning_rate: Muon's learning rate at the end of the warmup, above 0.
        betas: Decay rates of the two moments, each in [0, 1), for optimizers that take two.
        weight_decay: Weight decay of matrices, at least 0; biases, norms, tokens and position embeddings have none.
        layer_decay: Factor on the learning rate from each layer to the one before it, in (0, 1]; for fine-tuning.
        warmup_fraction: Fraction of training with a linear warmup; the rest follows a cosine to zero.
        loss: Training loss. With bce and mixup or cutmix, the targets of all mixed classes are 1.
        label_smoothing: Label smoothing in [0, 1), in training only.
        patch_dropout_until: Fraction of training after which patch_dropout is disabled.
        ema_decay: Decay of the exponential moving average of the weights, such as 0.999. The averaged weights are
            validated and saved; training continues on the raw weights.
        distillation: Distillation from a teacher; with vit.distillation_token, its own head learns from the teacher.
        compile: Whether to use torch.compile, which takes some seconds at the start.
        pretrained: Trained weights to start from: a model directory, a checkpoint, timm:NAME, hf:REPO, or anything else
            that `load_model` takes. Leave vit unset except for what may differ: dropout rates and patch_size.
        linear_probe: Whether to train only the head, on the features of pretrained.

    Raises:
        UserError: A number outside its range, an unknown name, or arguments that cannot be combined.

    Example:
        >>> module = LitViT(ViTConfig(image_size=32, patch_size=4, num_classes=10), name="vit_mini", optimizer="muon")
        >>> module.model.config.embed_dim
        128
    """

    def __init__(
        self,
        vit: ViTConfig,
        *,
        name: str | None = None,
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
        check_argument("learning_rate", learning_rate, 0 < learning_rate < math.inf, "above 0")
        check_argument("muon_learning_rate", muon_learning_rate, 0 < muon_learning_rate < math.inf, "above 0")
        check_argument("betas", betas, all(0 <= beta < 1 for beta in betas), "two numbers in [0, 1)")
        check_argument("weight_decay", weight_decay, 0 <= weight_decay < math.inf, "0 (none) or more")
        check_argument("warmup_fraction", warmup_fraction, 0 <= warmup_fraction < 1, "in [0, 1)")
        check_argument("label_smoothing", label_smoothing, 0 <= label_smoothing < 1, "in [0, 1)")
        check_argument("layer_decay", layer_decay, 0 < layer_decay <= 1, "in (0, 1]")
        check_argument("patch_dropout_until", patch_dropout_until, 0 <= patch_dropout_until <= 1, "in [0, 1]")
        check_argument("ema_decay", ema_decay, ema_decay is None or 0 <= ema_decay < 1, "in [0, 1)")
        check_optimizer(optimizer)
        if decoder is not None and loss == "bce":
            raise UserError("loss bce is for classes and cannot be combined with decoder.")
        if decoder is not None and distillation is not None:
            raise UserError("distillation is for classes and cannot be combined with decoder.")
        if linear_probe and (pretrained is None or optimizer == "muon"):
            raise UserError(
                "linear_probe needs pretrained weights and an optimizer for the head such as adamw or sgd, got "
                f"pretrained {pretrained} and optimizer {optimizer}."
            )
        if name is not None and pretrained is not None:
            raise UserError("name cannot be combined with pretrained, whose architecture is used: remove one of them.")
        self.optimizer, self.weight_decay, self.layer_decay = optimizer, weight_decay, layer_decay
        self.learning_rate, self.muon_learning_rate, self.betas = learning_rate, muon_learning_rate, betas
        self.warmup_fraction, self.patch_dropout_until = warmup_fraction, patch_dropout_until
        self.loss, self.label_smoothing = loss, label_smoothing
        self.loss_function = partial(cross_entropy if loss == "cross_entropy" else bce, label_smoothing=label_smoothing)
        self.ema_decay, self.distillation, self.pretrained = ema_decay, distillation, pretrained
        self.is_compiled, self.linear_probe = compile, linear_probe
        if name is not None:
            vit = ViTConfig(**fill_from_size(name, asdict(vit)))
        if pretrained is not None:
            vit = config_from_pretrained(pretrained, vit)
        self.model = VisionTransformer(vit) if decoder is None else EncoderDecoder(vit, decoder)
        if linear_probe:
            for parameter_name, parameter in self.model.named_parameters():
                parameter.requires_grad_(parameter_name.startswith(("head.", "head_dist.")))
        if compile:
            self.model.compile(dynamic=False)  # DropPath keeps a fixed number of images of a batch
        # Checking for NaN, as the other metrics do, would synchronize host and device in every step.
        self.train_accuracy, self.train_loss = (MeanMetric(nan_strategy="disable") for _ in range(2))
        self.val_accuracy, self.test_accuracy = MeanMetric(), MeanMetric()
        self.val_loss, self.test_loss = MeanMetric(), MeanMetric()

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # hyperparameters are not needed
        cls, checkpoint_path: str | Path, map_location: str | torch.device | None = None, **arguments: Any
    ) -> "LitViT":
        """Returns the module of a checkpoint: architecture, weights (averaged ones if there are), class names.

        Args:
            checkpoint_path: Written by a run of vitmha or by a `Trainer` of this module.
            map_location: Where the module is moved; by default it stays on the CPU.
            arguments: Of the constructor, to train on with, such as learning_rate; by default its defaults.

        Raises:
            UserError: A file that is missing, corrupt, or not such a checkpoint.

        Example:
            >>> module = LitViT.load_from_checkpoint("runs/vit/version_0/checkpoints/best.ckpt")  # doctest: +SKIP
            >>> trainer.predict(module, loader)  # doctest: +SKIP
        """
        trained = load_model(checkpoint_path)
        decoder = trained.decoder if isinstance(trained, EncoderDecoder) else None
        module = cls(trained.config, decoder=decoder, **arguments)
        module.model.load_state_dict(trained.state_dict())
        module.model.class_names, module.model.preprocessing = trained.class_names, trained.preprocessing
        return module.to(map_location) if map_location else module

    @property
    def backbone(self) -> nn.Module:
        """The parameters and modules of the model but its head, for Lightning's `BackboneFinetuning`."""
        backbone = nn.Module()
        for name, parameter in self.model.named_parameters(recurse=False):
            backbone.register_parameter(name, parameter)
        for name, module in self.model.named_children():
            if name not in ("head", "head_dist"):
                backbone.add_module(name, module)
        return backbone

    def forward(
        self, images: Tensor, labels: Tensor | None = None, *, separate_heads: bool = False
    ) -> Float[Tensor, "batch *length classes"]:
        """Returns class logits. A decoder predicts each token from the true tokens before it (teacher forcing).

        Args:
            images: Normalized images.
            labels: Their classes or sequences; only a decoder needs them.
            separate_heads: See `VisionTransformer.forward`.

        Raises:
            UserError: Sequences without a decoder, or a decoder without sequences.
        """
        are_sequences = labels is not None and labels.ndim == 2 and not labels.is_floating_point()
        if isinstance(self.model, EncoderDecoder):
            if labels is None:
                raise UserError("labels are required by a decoder; `module.model.generate` predicts without them.")
            if not are_sequences:
                raise UserError("decoder must be removed: the labels are classes and not sequences.")
            return self.model(images, labels)
        if are_sequences:
            raise UserError("decoder is required: the labels are sequences of classes.")
        return self.model(images, separate_heads=separate_heads)

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the class logits of a batch, or what an encoder-decoder's `generate` returns.

        Args:
            batch: Normalized images, alone or in a pair or dictionary with anything else.
            batch_idx: Not used.
            dataloader_idx: Not used.
        """
        images = images_of(batch)
        return self.model.generate(images) if isinstance(self.model, EncoderDecoder) else self(images)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            for name in ("max_epochs", "max_steps", "limit_train_batches"):
                if getattr(self.trainer, name) == 0:
                    raise UserError(f"{name} is 0, so nothing would be trained: set it to at least 1, or remove it.")
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        self._describe_data(getattr(data, "class_names", None), getattr(data, "preprocessing", None), stage)
        if self.pretrained and stage == "fit":
            rank_zero_info(load_weights(self.model, self.pretrained))
        elif self.pretrained and self.trainer.ckpt_path is None:
            self._load_for_evaluation(self.pretrained)

    def _describe_data(
        self, class_names: Sequence[str] | None, preprocessing: Preprocessing | None, stage: str
    ) -> None:
        """Gives the model the class names and the preprocessing of the data; what the data lacks stays as it was set.

        Raises:
            UserError: The model has other classes.
        """
        model = self.model
        if class_names is not None and model.class_names is not None and tuple(class_names) != tuple(model.class_names):
            raise UserError(
                f"class_names of the data are {_first(class_names)}, those of the model {_first(model.class_names)}: "
                "to train on other classes, pass the model as `pretrained` to a new LitViT."
            )
        model.class_names = model.class_names if class_names is None else tuple(class_names)
        model.preprocessing = model.preprocessing if preprocessing is None else preprocessing
        if model.class_names is not None and len(model.class_names) != model.config.num_classes:
            raise UserError(
                f"class_names has {len(model.class_names)} names, the model has {model.config.num_classes} classes."
            )
        missing = [name for name in ("class_names", "preprocessing") if getattr(model, name) is None]
        if missing and stage == "fit" and not isinstance(model, EncoderDecoder):
            rank_zero_info(
                f"The data has no {' and no '.join(missing)}: set {' and '.join(f'module.model.{n}' for n in missing)} "
                "before training, so that the trained model can classify image files by name."
            )

    def _load_for_evaluation(self, source: str) -> None:
        """Loads weights with their head, for data with the same classes, in any order.

        Raises:
            UserError: Other classes, or images that are preprocessed differently.
        """
        config = self.model.config
        trained = load_model(
            source, image_size=config.image_size, patch_size=config.patch_size, in_channels=config.in_channels
        )
        data_names, model_names = self.model.class_names, trained.class_names
        if trained.config.num_classes != config.num_classes or (data_names is not None and model_names is None):
            raise UserError(
                f"pretrained {source} has {trained.config.num_classes or 'no'} classes"
                f"{'' if model_names else ' without names'}, but the data has {config.num_classes}: pass the trained "
                "model, for example RUN/model."
            )
        state = trained.state_dict()
        self._match_classes(model_names, state)
        record, call = (model_record(to_config_dict(model)) for model in (trained, self.model))
        check_against_record(f"pretrained {source}", record, call, "validate")
        self.model.load_state_dict(state)

    def _match_classes(self, trained_names: tuple[str, ...] | None, state: dict[str, Tensor]) -> None:
        """Gives the head of trained weights the class order of the data, if both have the same class names."""
        data_names = self.model.class_names
        if data_names is None or trained_names is None:
            return
        try:
            indices = list(class_to_idx(data_names, trained_names).values())
        except UserError:
            return  # `check_against_record` compares the names
        in_order = list(range(len(trained_names)))
        if sorted(indices) != in_order:
            return
        self.model.class_names = tuple(trained_names[index] for index in indices)
        if indices == in_order:
            return
        if isinstance(self.model, EncoderDecoder):
            raise UserError("The classes of the data are in another order than those of the trained sequence model.")
        for key in state:
            if key.removeprefix("model.").startswith(("head.", "head_dist.")):
                state[key] = state[key][indices]

    def on_fit_start(self) -> None:
        if self.distillation is None:
            return
        teacher = load_teacher(self.distillation.teacher, self.model).to(self.device)
        if self.is_compiled:
            teacher.compile(dynamic=False)

        @torch.no_grad()
        def teacher_forward(images: Tensor) -> Tensor:
            preprocessing = teacher.preprocessing
            if preprocessing is not None:
                images = preprocessing.renormalize(images, self.model.preprocessing)
            return teacher(images)

        # A closure and not a submodule: the teacher's parameters are not optimized, saved or averaged.
        self.teacher_forward = teacher_forward

    def configure_model(self) -> None:
        """Shards the model over the processes, block by block, if the strategy is FSDP2."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ModelParallelStrategy):
            if self.optimizer == "muon":
                raise UserError("optimizer muon needs whole matrices and cannot train a sharded model: use adamw.")
            blocks = [module for module in self.model.modules() if isinstance(module, Block | DecoderBlock)]
            for module in (*blocks, self.model):
                fully_shard(module, mesh=strategy.device_mesh["data_parallel"])

    def configure_callbacks(self) -> list[Callback]:
        averaging = [] if self.ema_decay is None else [EMAWeightAveraging(self.ema_decay)]
        return [ValidateLastEpoch(), *averaging]

    def on_train_start(self) -> None:
        self.on_train_epoch_start()  # not called for an epoch that is resumed in its middle

    def on_train_epoch_start(self) -> None:
        if self.linear_probe:
            self.model.eval()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        is_disabled = self.global_step >= self.patch_dropout_until * self.trainer.estimated_stepping_batches
        encoder = get_encoder(self.model)
        encoder.patch_dropout = 0.0 if is_disabled else encoder.config.patch_dropout

    def training_step(self, batch: Any) -> Tensor:
        images, labels = images_and_labels(batch)
        logits, loss = self._compute_loss(images, labels)
        self.train_accuracy.update(is_correct(logits.detach(), labels))
        self.train_loss.update(loss.detach().expand(len(labels)))
        self.log("train/loss", loss.detach(), prog_bar=True)  # of this process's part of the batch
        return loss

    def _compute_loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits and the loss of one step."""
        if self.distillation is None or not len(labels):
            logits = self(images, labels)
            # A process whose images were all corrupt and skipped takes part in the step with a zero gradient.
            return logits, self.loss_function(logits, labels) if len(labels) else logits.sum()
        logits = self(images, labels, separate_heads=True)
        class_logits, distillation_logits = logits.unbind(1) if logits.ndim == 3 else (logits, logits)
        alpha, temperature = self.distillation.alpha, self.distillation.temperature
        teacher_logits = self.teacher_forward(images)
        teacher_loss = distillation_loss(distillation_logits, teacher_logits, self.distillation.type, temperature)
        loss = (1 - alpha) * self.loss_function(class_logits, labels) + alpha * teacher_loss
        return (class_logits + distillation_logits) / 2, loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Scales the loss so that an epoch's last, incomplete accumulation is the mean over its batches too."""
        accumulated, num_batches = self.trainer.accumulate_grad_batches, self.trainer.num_training_batches
        remainder = 0 if math.isinf(num_batches) else int(num_batches) % accumulated
        if remainder and self.trainer.fit_loop.batch_idx >= num_batches - remainder:
            loss = loss * (accumulated / remainder)
        super().backward(loss, *args, **kwargs)

    def on_train_epoch_end(self) -> None:
        # Not logged in each step: a run that is resumed after the last step of an epoch logs them too.
        self.log("train/accuracy", self.train_accuracy, prog_bar=True)
        self.log("train/loss_epoch", self.train_loss)
        self.log_dict(learning_rates(self.trainer.optimizers[0]), sync_dist=True)  # else Lightning warns

    def validation_step(self, batch: Any) -> Tensor | None:
        """Returns the logits for callbacks; None for an empty batch."""
        return self._evaluate(batch, "val", self.val_loss, self.val_accuracy)

    def test_step(self, batch: Any) -> Tensor | None:
        """Returns the logits for callbacks; None for an empty batch."""
        return self._evaluate(batch, "test", self.test_loss, self.test_accuracy)

    def _evaluate(self, batch: Any, stage: str, loss: MeanMetric, accuracy: MeanMetric) -> Tensor | None:
        images, labels = images_and_labels(batch)
        logits = None
        if len(labels):  # the last batch of a process may be empty
            logits = self(images, labels).float()
            loss.update(cross_entropy(logits, labels), weight=len(labels))
            accuracy.update(is_correct(logits, labels))
        self.log_dict({f"{stage}/loss": loss, f"{stage}/accuracy": accuracy}, prog_bar=True)
        return logits

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices, others = parameter_groups(self.model, self.weight_decay, self.layer_decay)
        if self.optimizer == "muon":
            muon = BatchedMuon(with_learning_rate(matrices, self.muon_learning_rate), self.muon_learning_rate)
            adamw = AdamW(with_learning_rate(others, self.learning_rate), self.learning_rate, self.betas)
            optimizer: Optimizer = CombinedOptimizer(muon, adamw)
        else:
            groups = with_learning_rate(matrices + others, self.learning_rate)
            optimizer = create_optimizer(groups, self.optimizer, self.learning_rate, self.betas)
        if math.isinf(self.trainer.estimated_stepping_batches):
            raise UserError("max_epochs or max_steps must be set: the learning rate schedule needs the total steps.")
        total, least = int(self.trainer.estimated_stepping_batches), self.trainer.min_steps
        if least is not None and least > total:
            raise UserError(f"min_steps {least} is above the {total} steps of the run: lower it, or raise max_epochs.")
        factor = partial(warmup_cosine, warmup=round(self.warmup_fraction * total), total=total)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": FactorSchedule(optimizer, factor), "interval": "step"},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        stage: Any = self.trainer.state.fn
        if stage not in ("fit", "validate", "test"):
            return
        if stage == "fit":
            self.trainer.fit_loop.setup_data()  # the number of training images is part of the record
        record = recorded_in(checkpoint)
        if stage != "fit":
            self._match_classes(record.get("class_names"), checkpoint["state_dict"])
        check_against_record(str(self.trainer.ckpt_path), record, run_record(self, self.trainer), stage)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["vitmha"] = to_config_dict(self.model)
        checkpoint["run"] = run_record(self, self.trainer)


def fill_from_size(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns fields of `ViTConfig` with those of a named size where they are missing or at their default.

    Args:
        name: A name in `vitmha.models.config.SIZES`.
        config: Fields of `ViTConfig`. A field that is set to its default cannot be told from one that is not set.

    Raises:
        UserError: An unknown name.
    """
    if name not in SIZES:
        raise UserError(f"name must be one of {', '.join(SIZES)}, got {name!r}.")
    defaults = {field.name: field.default for field in fields(ViTConfig)}
    unset = {field for field, default in defaults.items() if config.get(field, default) == default}
    return {**config, **{field: value for field, value in SIZES[name].items() if field in unset}}


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f", ... ({len(names)})" if len(names) > 5 else "")
