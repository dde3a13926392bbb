"""module.py: LitViT's arguments, its metrics, and whole small runs."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import NO_DROPOUT_CONFIG, QUIET, pattern_loader, random_model, train
from lightning import Callback, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from vitmha.models.config import SIZES, ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig
from vitmha.training.distillation import DistillationConfig
from vitmha.training.losses import bce, cross_entropy
from vitmha.training.module import LitViT
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model

MUON = {"optimizer": "muon", "warmup_fraction": 0.1}


class StopAfter(Callback):
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LitViT) -> None:
        trainer.should_stop = trainer.current_epoch + 1 == self.epochs


def test_the_last_step_of_an_epoch_is_the_mean_over_its_batches(tmp_path: Path) -> None:
    loader, gradients = pattern_loader(40, 4, channels=2), []

    class RecordGradient(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LitViT, optimizer: Optimizer) -> None:
            gradients.append(pl_module.model.head.bias.grad.clone())

    options = {"vit": NO_DROPOUT_CONFIG, "train_loader": loader, "accumulate_grad_batches": 4}
    model = {"optimizer": "sgd", "learning_rate": 1e-9, "label_smoothing": 0.0}
    module = train(tmp_path, [RecordGradient()], epochs=1, model=model, **options)
    assert module.trainer.global_step == len(gradients) == 3
    images, labels = loader.dataset.tensors
    for gradient, (first, last) in zip(gradients, [(0, 16), (16, 32), (32, 40)], strict=True):
        loss = F.cross_entropy(module.model(images[first:last]), labels[first:last])
        expected = torch.autograd.grad(loss, module.model.head.bias)[0]
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_accuracy_and_loss_are_means_over_samples(tmp_path: Path) -> None:
    module = LitViT(NO_DROPOUT_CONFIG)
    nn.init.zeros_(module.model.head.weight)
    with torch.no_grad():
        module.model.head.bias.copy_(torch.tensor([1.0, 0, 0, 0, 0]))
    labels = torch.tensor([0] * 90 + [1] * 10)
    trainer = Trainer(**QUIET)
    trainer.validate(module, DataLoader(TensorDataset(torch.randn(100, 2, 6, 9), labels), batch_size=64), verbose=False)
    logits = module.model.head.bias.detach().expand(100, -1)
    assert trainer.callback_metrics["val/accuracy"] == pytest.approx(0.9)
    torch.testing.assert_close(trainer.callback_metrics["val/loss"], F.cross_entropy(logits, labels))


@pytest.mark.parametrize(("loss", "formula"), [("cross_entropy", cross_entropy), ("bce", bce)])
def test_training_uses_the_chosen_loss_and_validation_always_the_plain_cross_entropy(
    loss: str, formula: Callable[..., Tensor]
) -> None:
    module = LitViT(NO_DROPOUT_CONFIG, loss=loss, label_smoothing=0.3)
    nn.init.normal_(module.model.head.weight)
    module.log = module.log_dict = lambda *_, **__: None  # no trainer
    images, labels = torch.randn(4, 2, 6, 9), torch.tensor([0, 1, 2, 3])
    logits = module.model(images)
    torch.testing.assert_close(module.training_step((images, labels)), formula(logits, labels, 0.3))
    torch.testing.assert_close(module.validation_step((images, labels)), logits)
    torch.testing.assert_close(module.val_loss.compute(), F.cross_entropy(logits, labels))


def test_an_empty_validation_batch_counts_nothing() -> None:
    module = LitViT(NO_DROPOUT_CONFIG)
    module.log_dict = lambda *_, **__: None  # no trainer
    module.validation_step((torch.randn(3, 2, 6, 9), torch.tensor([0, 1, 2])))
    before = module.val_loss.compute(), module.val_accuracy.compute()
    assert module.validation_step((torch.empty(0, 2, 6, 9), torch.empty(0, dtype=torch.int64))) is None
    assert (module.val_loss.compute(), module.val_accuracy.compute()) == before


def test_the_loss_of_an_epoch_is_the_mean_over_its_images() -> None:
    module = LitViT(NO_DROPOUT_CONFIG)
    module.log = lambda *_, **__: None  # no trainer
    module.model.load_state_dict(random_model().state_dict())
    images, labels = torch.randn(4, 2, 6, 9), torch.tensor([0, 1, 2, 3])
    for part in (slice(0, 3), slice(3, 4), slice(4, 4)):  # all images of the last batch were corrupt
        module.training_step((images[part], labels[part]))
    torch.testing.assert_close(module.train_loss.compute(), module.loss_function(module.model(images), labels).detach())


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_learns_and_repeats_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    options = {
        "vit": NO_DROPOUT_CONFIG,
        "model": {**MUON, "optimizer": optimizer, "learning_rate": 5e-3},
        "train_loader": pattern_loader(160, 16, channels=2),
        "val_loader": pattern_loader(21, 8, channels=2),
    }
    first, second = (train(tmp_path / name, epochs=4, **options) for name in ("1", "2"))
    assert first.trainer.callback_metrics["val/accuracy"] > 0.7
    for name, parameter in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], parameter, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}], ids=["plain", "averaged"])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path, options: dict[str, float]) -> None:
    loader = pattern_loader(40, 8, channels=2)
    settings = {"epochs": 4, "vit": NO_DROPOUT_CONFIG, "model": {**MUON, **options}, "train_loader": loader}
    uninterrupted = train(tmp_path / "uninterrupted", **settings)
    trainer = train(tmp_path / "half", [StopAfter(2)], **settings).trainer
    assert trainer.global_step == 10
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = LitViT(NO_DROPOUT_CONFIG, **settings["model"])  # other initial weights
    val_loader = pattern_loader(11, 4, channels=2)
    Trainer(**QUIET, max_epochs=4).fit(resumed, loader, val_loader, ckpt_path=tmp_path / "half.ckpt")
    for name, parameter in uninterrupted.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], parameter, rtol=0, atol=0)


def test_a_checkpoint_is_a_model_with_its_class_names(tmp_path: Path) -> None:
    module = train(tmp_path, epochs=1, vit=NO_DROPOUT_CONFIG)
    module.model.class_names = ("a", "b", "c", "d", "e")
    module.trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = load_model(tmp_path / "x.ckpt")
    images = torch.randn(3, 2, 6, 9)
    assert loaded.class_names == ("a", "b", "c", "d", "e")
    torch.testing.assert_close(loaded(images), module.model.eval()(images), rtol=0, atol=0)


def test_a_compiled_module_has_the_same_keys() -> None:
    module = LitViT(NO_DROPOUT_CONFIG, compile=True)
    assert module.model._compiled_call_impl is not None
    assert list(module.state_dict()) == list(LitViT(NO_DROPOUT_CONFIG).state_dict())


DECODER = DecoderConfig(max_length=4, num_heads=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -1.0}, "^learning_rate must be above 0, got -1.0"),
        ({"learning_rate": float("nan")}, "^learning_rate must be above 0, got nan"),
        ({"muon_learning_rate": 0.0}, "^muon_learning_rate must be above 0, got 0.0"),
        ({"betas": (0.9, 1.0)}, r"^betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"weight_decay": -1.0}, r"^weight_decay must be 0 \(none\) or more, got -1.0"),
        ({"warmup_fraction": 1.0}, r"^warmup_fraction must be in \[0, 1\), got 1.0"),
        ({"loss": "bce", "decoder": DECODER}, "^loss bce is for classes and cannot be combined with decoder"),
        ({"layer_decay": 0.0}, r"^layer_decay must be in \(0, 1\], got 0.0"),
        ({"optimizer": "adamv"}, r"^optimizer adamv: unknown optimizer \(did you mean one of adam, .*\?\)"),
        ({"optimizer": "adahessian"}, "unknown optimizer"),
        (
            {"distillation": DistillationConfig(teacher="x"), "decoder": DECODER},
            "^distillation is for classes and cannot be combined with decoder",
        ),
        (
            {"vit": ViTConfig(distillation_token=True), "decoder": DECODER},
            "^distillation_token cannot be combined with",
        ),
        ({"ema_decay": 1.0}, r"^ema_decay must be in \[0, 1\), got 1.0"),
        ({"label_smoothing": -0.1}, r"^label_smoothing must be in \[0, 1\), got -0.1"),
        ({"patch_dropout_until": 1.5}, r"^patch_dropout_until must be in \[0, 1\], got 1.5"),
        (
            {"name": "vit_smal"},
            "^name must be one of vit_mini, vit_tiny, vit_small, vit_base, vit_large, vit_huge, got 'vit_smal'",
        ),
        ({"name": "vit_small", "pretrained": "cifar10"}, "^name cannot be combined with pretrained"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LitViT(**{"vit": NO_DROPOUT_CONFIG, **options})


@pytest.mark.parametrize("name", SIZES)
def test_a_name_sets_the_fields_of_vit_that_are_at_their_default(name: str) -> None:
    task = {"image_size": 112, "num_classes": 3, "pool": "mean", "depth": 1}
    with torch.device("meta"):
        config = LitViT(ViTConfig(**task), name=name).model.config
    assert config == ViTConfig(**{**SIZES[name], **task})


def test_a_name_is_resolved_in_the_checkpoint(tmp_path: Path) -> None:
    vit = ViTConfig(image_size=(6, 9), patch_size=3, num_classes=5, depth=1)
    module = train(tmp_path, epochs=1, vit=vit, model={"name": "vit_mini"})
    module.trainer.save_checkpoint(tmp_path / "x.ckpt")
    architecture = torch.load(tmp_path / "x.ckpt", weights_only=True)["vitmha"]["architecture"]
    assert architecture == asdict(replace(vit, embed_dim=128, num_heads=4, mlp_dim=256))


def test_a_sequence_model_learns_and_its_accuracy_is_that_of_greedy_decoding(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(5, 2, 6, 3, generator=generator)
    classes = torch.randint(5, (96, 3), generator=generator)
    lengths = torch.randint(1, 4, (96, 1), generator=generator)
    positions = torch.arange(3)
    parts = patterns[classes] * (positions < lengths)[..., None, None, None]
    images = torch.cat(parts.unbind(1), dim=-1)
    sequences = torch.cat([classes, classes[:, :1]], dim=1)
    positions = torch.arange(4)
    sequences = sequences.where(positions != lengths, 5).where(positions <= lengths, -100)
    loader = DataLoader(TensorDataset(images, sequences), batch_size=16)
    model = {**MUON, "decoder": DecoderConfig(max_length=4, depth=1, num_heads=3)}
    module = train(tmp_path, epochs=12, vit=NO_DROPOUT_CONFIG, model=model, train_loader=loader, val_loader=loader)
    accuracy = module.trainer.callback_metrics["val/accuracy"].item()
    assert 0.3 < accuracy < 1
    decoded, _ = module.model.eval().generate(images)
    is_exact = ((decoded == sequences) | (sequences < 0)).all(1)
    assert is_exact.float().mean().item() == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("decoder", "shape", "message"),
    [
        (None, (2, 4), "^decoder is required: the labels are sequences"),
        (DECODER, (2,), "^decoder must be removed: the labels are classes"),
    ],
)
def test_labels_of_another_kind_than_the_model_predicts_are_refused(
    decoder: DecoderConfig | None, shape: tuple[int, ...], message: str
) -> None:
    module = LitViT(NO_DROPOUT_CONFIG, decoder=decoder)
    with pytest.raises(ValueError, match=message):
        module(torch.randn(2, 2, 6, 9), torch.zeros(shape, dtype=torch.int64))


def test_patch_dropout_is_disabled_after_the_given_fraction_of_training(tmp_path: Path) -> None:
    num_tokens: list[int] = []

    def record(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        if block.training:
            num_tokens.append(args[0].shape[1])

    module = LitViT(replace(NO_DROPOUT_CONFIG, patch_dropout=0.5), patch_dropout_until=0.6)
    module.model.blocks[0].register_forward_pre_hook(record)
    trainer = Trainer(**QUIET, max_epochs=2, default_root_dir=tmp_path)
    trainer.fit(module, pattern_loader(40, 8, channels=2), pattern_loader(21, 8, channels=2))
    assert num_tokens == [4] * 6 + [7] * 4  # the class token with 3 or all 6 patches


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A model of another image size, with more channels and classes than the task."""
    model = random_model(image_size=(12, 9), in_channels=3, num_classes=11)
    model.class_names = tuple("abcdefghijk")
    save_model(model, tmp_path / "pretrained")
    return tmp_path / "pretrained"


def test_pretrained_sets_the_architecture_and_all_weights_but_the_head(tmp_path: Path, pretrained: Path) -> None:
    task = ViTConfig(image_size=(6, 9), patch_size=3, in_channels=2, num_classes=5, drop_path=0.1)
    model = {"pretrained": str(pretrained), "learning_rate": 1e-30, "optimizer": "sgd"}
    module = train(tmp_path / "run", epochs=1, model=model, vit=task)
    expected = load_model(pretrained, image_size=(6, 9), in_channels=2, num_classes=5)
    assert module.model.config == replace(expected.config, drop_path=0.1)
    body = {name: tensor for name, tensor in expected.state_dict().items() if not name.startswith("head")}
    trained = {name: tensor for name, tensor in module.model.state_dict().items() if not name.startswith("head")}
    torch.testing.assert_close(trained, body, rtol=0, atol=0)


def test_another_architecture_than_the_pretrained_one_is_refused(pretrained: Path) -> None:
    with pytest.raises(ValueError, match=r"\bdepth\b.*\b2\b.*\b7\b"):
        LitViT(replace(NO_DROPOUT_CONFIG, depth=7), pretrained=str(pretrained))


def test_a_linear_probe_trains_the_head_and_nothing_else(tmp_path: Path, pretrained: Path) -> None:
    model = {"pretrained": str(pretrained), "linear_probe": True, "learning_rate": 0.1, "optimizer": "sgd"}
    module = train(tmp_path / "run", epochs=1, vit=NO_DROPOUT_CONFIG, model=model)
    expected = load_model(pretrained, image_size=(6, 9), in_channels=2, num_classes=5).state_dict()
    for name, tensor in module.model.state_dict().items():
        assert torch.equal(tensor, expected[name]) != name.startswith("head."), name
    # The features have no dropout.
    assert not any(part.training for part in module.model.blocks.modules())


@pytest.mark.parametrize("options", [{"pretrained": "x", "optimizer": "muon"}, {}])
def test_a_linear_probe_needs_pretrained_weights_and_an_optimizer_for_a_head(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^linear_probe needs pretrained weights"):
        LitViT(NO_DROPOUT_CONFIG, linear_probe=True, **options)
