"""What a run knows of its training at its end: the summary from which the model card is filled."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger

import vitmha
from vitmha.data import ImageFolder
from vitmha.data.in_memory import InMemoryData
from vitmha.models.encoder_decoder import EncoderDecoder
from vitmha.training.run_record import count_images, run_record
from vitmha.weights.training_summary import EvaluationSummary, TrainingSummary, summary_of_record


def training_summary(module: Any, trainer: Trainer) -> TrainingSummary:
    """What a run knows of its training at its end, for the model card; the result is that of its last validation.

    Args:
        module: The `LitViT` that was trained.
        trainer: Its trainer, with the data.
    """
    data, metrics = trainer.datamodule, trainer.callback_metrics  # type: ignore[attr-defined]
    summary = summary_of_record(run_record(module, trainer))
    root = getattr(data, "root", None)
    if isinstance(data, ImageFolder) and root is not None:
        summary = replace(summary, dataset=Path(str(root)).absolute().name)
    result = None
    if "val/accuracy" in metrics:
        is_sequence_model = isinstance(module.model, EncoderDecoder)
        result = EvaluationSummary(
            accuracy=round(metrics["val/accuracy"].item(), 6),
            metric="exact_match" if is_sequence_model else "accuracy",
            num_images=count_images(trainer.val_dataloaders) if trainer.limit_val_batches == 1.0 else None,
            split="test" if isinstance(data, InMemoryData) else "validation",
            dataset=summary.dataset,
        )
    hyperparameters = {
        **summary.hyperparameters,
        "epochs": trainer.current_epoch,
        "processes": trainer.world_size,
        "device": trainer.strategy.root_device.type,
        "versions": f"vitmha {vitmha.__version__}, torch {torch.__version__}",
    }
    logger = trainer.logger
    return replace(
        summary,
        name=logger.name if isinstance(logger, CSVLogger) and logger.name else None,
        hyperparameters=hyperparameters,
        pretrained=module.pretrained,
        result=result,
        notes=() if result is None else (_use_of_images(result.split, trainer),),
    )


def _use_of_images(split: str, trainer: Trainer) -> str:
    """What the images of the evaluation were used for before, which can make a result optimistic."""
    ended = any(isinstance(callback, EarlyStopping) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    end = ", but they decided when training ended (EarlyStopping)" if ended else ""
    return f"Training ended with the weights of the last step: the {split} images chose no checkpoint{end}."
