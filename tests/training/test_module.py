"""training.py: the schedule, the groups, the joined optimiser, the metrics, and whole small runs."""

import math
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm.loss
import timm.models
import timm.optim
import torch
import torch.nn.functional as F
from lightning import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from vitmha.images import Preprocessing
from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder
from vitmha.models.vit import VisionTransformer
from vitmha.training.distillation import DistillationConfig, load_teacher
from vitmha.training.losses import bce, cross_entropy, distillation_loss, is_correct
from vitmha.training.module import LitViT
from vitmha.training.optimizers import (
    StackedMuon,
    Together,
    check_optimizer,
    named_optimizer,
    parameter_groups,
    warmup_cosine,
    with_rate,
)
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model

CONFIG = ViTConfig(
    image_size=(6, 9), patch_size=3, in_channels=2, num_classes=5, embed_dim=12, depth=2, num_heads=3, mlp_dim=20
)


def pictures(count: int, batch_size: int) -> DataLoader:
    """Noisy copies of one pattern per class."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(5, 2, 6, 9, generator=generator)
    labels = torch.randint(5, (count,), generator=generator)
    images = 2 * patterns[labels] + torch.randn(count, 2, 6, 9, generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size)


class StopAfter(Callback):
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LitViT) -> None:
        trainer.should_stop = trainer.current_epoch + 1 == self.epochs


def train(
    folder: Path,
    loader: DataLoader,
    callbacks: list | None = None,
    validated: DataLoader | None = None,
    **options: object,
) -> tuple[Trainer, LitViT]:
    torch.manual_seed(3)
    vit, chosen = options.pop("vit", CONFIG), options.pop("model", {})
    module = LitViT(vit, **{"optimizer": "muon", "warmup_fraction": 0.1, **chosen})
    trainer = Trainer(
        accelerator="cpu",
        logger=CSVLogger(folder, name="", version=""),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=callbacks,
        **{"max_epochs": 1, "log_every_n_steps": 1, **options},
    )
    trainer.fit(module, loader, validated or pictures(21, 8))
    return trainer, module


def test_cosine_over_six_epochs_has_the_known_values_and_never_rises() -> None:
    factors = [warmup_cosine(step, warmup=0, total=6) for step in range(8)]
    torch.testing.assert_close(torch.tensor(factors[:6])[[0, 4, 5]], torch.tensor([1.0, 0.25, 0.066987]))
    assert factors == sorted(factors, reverse=True)
    assert factors[6:] == [0.0, 0.0]


def test_warmup_rises_in_equal_steps_to_the_cosine() -> None:
    factors = [warmup_cosine(step, warmup=4, total=12) for step in range(6)]
    expected = [0.2, 0.4, 0.6, 0.8, 1.0, 0.5 * (1 + math.cos(math.pi / 8))]
    torch.testing.assert_close(torch.tensor(factors), torch.tensor(expected))


def test_schedule_counts_optimiser_steps_under_accumulation(tmp_path: Path) -> None:
    trainer, _ = train(
        tmp_path, pictures(40, 4), accumulate_grad_batches=4, max_epochs=2, model={"warmup_fraction": 0.0}
    )
    assert trainer.global_step == 6  # ten batches make three steps an epoch
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.last_epoch == 6
    assert scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-12)


def named_groups(model: nn.Module, weight_decay: float = 0.1, layer_decay: float = 1.0) -> list[list[dict[str, Any]]]:
    """The groups of the block matrices and of the others, with the names of the parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    both = parameter_groups(model, weight_decay, layer_decay)
    return [[{**group, "params": {names[p] for p in group["params"]}} for group in groups] for groups in both]


def test_every_trainable_parameter_is_in_one_group_and_tokens_vectors_and_positions_do_not_decay() -> None:
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        embed_dim=12,
        depth=1,
        num_heads=3,
        num_registers=2,
        layer_scale_init=0.1,
        pool="cls",
        num_classes=4,
        distillation_token=True,
    )
    model = VisionTransformer(config)
    model.head.bias.requires_grad_(False)
    (matrices,), (others, undecayed) = named_groups(model)
    assert [group["weight_decay"] for group in (matrices, others, undecayed)] == [0.1, 0.1, 0]
    found = sorted([*matrices["params"], *others["params"], *undecayed["params"]])
    assert found == sorted({name for name, _ in model.named_parameters()} - {"head.bias"})
    assert {"cls_token", "dist_token", "reg_token", "pos_embed", "blocks.0.ls1.gamma", "norm.weight"} <= undecayed[
        "params"
    ]
    assert others["params"] == {"patch_embed.proj.weight", "head.weight", "head_dist.weight"}
    assert all(name.endswith("weight") and ".norm" not in name for name in matrices["params"])


def test_learned_query_of_attention_pooling_does_not_decay() -> None:
    config = ViTConfig(image_size=8, patch_size=4, embed_dim=12, depth=1, num_heads=3, pool="attention")
    assert "attn_pool.probe" in named_groups(VisionTransformer(config))[1][-1]["params"]


def test_layer_decay_scales_the_rates_as_timm_does() -> None:
    sizes = {"patch_size": 4, "embed_dim": 12, "depth": 3, "num_heads": 3}
    model = VisionTransformer(ViTConfig(image_size=8, num_classes=5, **sizes))
    ours = {}
    for group in (group for groups in named_groups(model, layer_decay=0.5) for group in groups):
        for name in group["params"]:
            renamed = re.sub(r"attn\.[qkv]_proj", "attn.qkv", name).replace("out_proj", "proj")
            ours.setdefault(renamed, set()).add((group["lr_scale"], group["weight_decay"]))
    reference = timm.models.VisionTransformer(img_size=8, num_classes=5, **sizes)
    names = {parameter: name for name, parameter in reference.named_parameters()}
    groups = timm.optim.param_groups_layer_decay(reference, 0.1, reference.no_weight_decay(), layer_decay=0.5)
    theirs = {names[p]: {(g["lr_scale"], g["weight_decay"])} for g in groups for p in g["params"]}
    # The last norm goes with the head in BEiT and here, with the last block in timm.
    assert ours == {**theirs, "norm.weight": {(1.0, 0.0)}, "norm.bias": {(1.0, 0.0)}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")
def test_every_name_of_timms_factory_makes_a_step_or_says_why_not() -> None:
    made = []
    for name in map(str, timm.optim.list_optimizers()):
        if timm.optim.get_optimizer_info(name).second_order:
            continue
        check_optimizer(name)
        weights = [nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))]
        groups = with_rate([{"params": [each], "weight_decay": 0.05, "lr_scale": 0.5} for each in weights], 1e-2)
        before = [each.detach().clone() for each in weights]
        if name.startswith(("bnb", "fused")):
            with pytest.raises(ValueError, match=f"--model.optimizer {name} cannot be made here: .*(CUDA|package)"):
                named_optimizer(groups, name, 1e-2, (0.8, 0.9))
            continue
        optimizer = named_optimizer(groups, name, 1e-2, (0.8, 0.9))
        for _ in range(3):
            (weights[0] @ weights[1]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not any(map(torch.equal, before, weights)), name
        made.append(name)
        if name == "adamw":
            assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
            assert optimizer.param_groups[0]["lr"] == 5e-3
    assert {"adan", "adamw", "sgd", "lamb", "lion"} < {*made}
    assert len(made) > 40


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb", "sgd", "lion"])
def test_every_optimiser_gets_the_rates_of_the_layers(tmp_path: Path, optimizer: str) -> None:
    seen = {}

    class SeeRates(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LitViT) -> None:
            names = {parameter: name for name, parameter in pl_module.model.named_parameters()}
            for group in trainer.optimizers[0].param_groups:
                seen.update({names[p]: (group["lr"], group["weight_decay"]) for p in group["params"]})

    options = {"optimizer": optimizer, "layer_decay": 0.5, "warmup_fraction": 0.0, "weight_decay": 0.2}
    _, module = train(tmp_path, pictures(16, 8), [SeeRates()], model=options)
    assert set(seen) == {name for name, _ in module.model.named_parameters()}
    assert (seen["head.weight"], seen["cls_token"]) == ((1e-3, 0.2), (1e-3 / 8, 0))
    base = 0.02 if optimizer == "muon" else 1e-3
    assert seen["blocks.1.mlp.fc1.weight"] == (base / 2, 0.2)
    assert seen["blocks.0.attn.q_proj.bias"] == (1e-3 / 4, 0)


@pytest.mark.parametrize("optimizer", ["muon", "lamb"])
def test_gradients_are_clipped_as_a_whole(tmp_path: Path, optimizer: str) -> None:
    norms = []

    class SeeNorm(Callback):
        def on_before_zero_grad(self, trainer: Trainer, pl_module: LitViT, optimizer: Optimizer) -> None:
            gradients = [p.grad.flatten() for p in pl_module.parameters() if p.grad is not None]
            norms.extend([torch.cat(gradients).norm().item()] if gradients else [])

    options = {"gradient_clip_val": 1e-3, "accumulate_grad_batches": 2, "model": {"optimizer": optimizer}}
    train(tmp_path, pictures(40, 4), [SeeNorm()], **options)
    assert norms == pytest.approx([1e-3] * 4, rel=1e-3)


def test_the_last_step_of_an_epoch_is_the_mean_over_its_batches(tmp_path: Path) -> None:
    loader, gradients = pictures(40, 4), []

    class SeeGradient(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LitViT, optimizer: Optimizer) -> None:
            gradients.append(pl_module.model.head.bias.grad.clone())

    options = {"optimizer": "sgd", "learning_rate": 1e-9, "label_smoothing": 0.0}
    trainer, module = train(tmp_path, loader, [SeeGradient()], accumulate_grad_batches=4, model=options)
    assert trainer.global_step == len(gradients) == 3
    images, labels = loader.dataset.tensors
    for gradient, (first, last) in zip(gradients, [(0, 16), (16, 32), (32, 40)], strict=True):
        loss = F.cross_entropy(module.model(images[first:last]), labels[first:last])
        expected = torch.autograd.grad(loss, module.model.head.bias)[0]
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def two_layers() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    return nn.Linear(5, 3, bias=False), nn.Linear(3, 2)


def step(first: nn.Module, second: nn.Module) -> None:
    second(first(torch.linspace(-1, 1, 20).view(4, 5))).square().sum().backward()


def test_together_equals_its_parts_apart_and_a_schedule_reaches_both() -> None:
    joined, separate_heads = two_layers(), two_layers()
    together = Together(Muon(joined[0].parameters(), 0.1), AdamW(joined[1].parameters(), 0.2))
    parts = Muon(separate_heads[0].parameters(), 0.1), AdamW(separate_heads[1].parameters(), 0.2)
    schedule = LambdaLR(together, lambda count: 1 / (1 + count))
    schedules = [LambdaLR(part, lambda count: 1 / (1 + count)) for part in parts]
    for _ in range(3):
        step(*joined)
        step(*separate_heads)
        together.step()
        for part in parts:
            part.step()
        together.zero_grad()
        for part in parts:
            part.zero_grad()
        for one in (schedule, *schedules):
            one.step()
    for ours, theirs in zip(joined, separate_heads, strict=True):
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=0)
    assert [group["lr"] for group in together.param_groups] == pytest.approx([0.025, 0.05])


@pytest.mark.parametrize("nesterov", [True, False])
def test_stacked_muon_takes_the_steps_of_pytorchs(nesterov: bool) -> None:
    shapes = [(24, 24), (24, 24), (48, 24), (24, 48), (24, 24)]
    ours, theirs = ([nn.Parameter(torch.randn(shape)) for shape in shapes] for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.8, "nesterov": nesterov}
    optimizers = StackedMuon(ours, **options), Muon(theirs, **options)
    for step in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            other.data.copy_(mine.data)
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        ours[1].grad = theirs[1].grad = None if step % 2 else ours[1].grad
        before = [parameter.detach().clone() for parameter in ours]
        for optimizer in optimizers:
            optimizer.step()
        for old, mine, other in zip(before, ours, theirs, strict=True):
            assert (mine - other).norm() <= 0.01 * (other - old).norm()  # both iterate in bfloat16
    torch.testing.assert_close(optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"])


def test_together_goes_on_from_its_state_dict() -> None:
    whole, resumed = two_layers(), two_layers()
    optimizers = [
        Together(SGD(a.parameters(), 0.1, momentum=0.9), AdamW(b.parameters(), 0.2)) for a, b in (whole, resumed)
    ]
    for _ in range(2):
        step(*whole)
        optimizers[0].step()
    for old, new in zip(whole, resumed, strict=True):
        new.load_state_dict(old.state_dict())
    optimizers[1].load_state_dict(deepcopy(optimizers[0].state_dict()))
    for layers, optimizer in zip((whole, resumed), optimizers, strict=True):
        optimizer.zero_grad()
        step(*layers)
        optimizer.step()
    for old, new in zip(whole, resumed, strict=True):
        torch.testing.assert_close(new.weight, old.weight, rtol=0, atol=0)


def test_accuracy_is_micro_averaged_and_loss_weighted_by_samples(tmp_path: Path) -> None:
    module = LitViT(CONFIG)
    nn.init.zeros_(module.model.head.weight)
    with torch.no_grad():
        module.model.head.bias.copy_(torch.tensor([1.0, 0, 0, 0, 0]))
    labels = torch.tensor([0] * 90 + [1] * 10)
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    trainer.validate(module, DataLoader(TensorDataset(torch.randn(100, 2, 6, 9), labels), batch_size=64), verbose=False)
    logits = module.model.head.bias.detach().expand(100, -1)
    assert trainer.callback_metrics["val/accuracy"] == pytest.approx(0.9)
    torch.testing.assert_close(trainer.callback_metrics["val/loss"], F.cross_entropy(logits, labels))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_uniform_logits_cost_ln_of_the_classes_with_any_smoothing_and_mixing(label_smoothing: float) -> None:
    for labels in (torch.tensor([0, 3]), torch.tensor([[0.7, 0, 0, 0.3], [0, 1.0, 0, 0]])):
        loss = cross_entropy(torch.full((2, 4), 1.7), labels, label_smoothing)
        torch.testing.assert_close(loss, torch.tensor(math.log(4)))


def test_smoothing_is_applied_once_to_classes_and_to_mixed_pictures() -> None:
    logits, labels = torch.randn(3, 7), torch.tensor([4, 0, 6])
    expected = timm.loss.LabelSmoothingCrossEntropy(0.2)(logits, labels)
    torch.testing.assert_close(cross_entropy(logits, labels, 0.2), expected)
    mixed = 0.3 * F.one_hot(labels, 7) + 0.7 * F.one_hot(labels.flip(0), 7)
    expected = timm.loss.SoftTargetCrossEntropy()(logits, 0.8 * mixed + 0.2 / 7)
    torch.testing.assert_close(cross_entropy(logits, mixed, 0.2), expected)


def test_binary_loss_equals_timm_and_counts_all_classes_of_a_mixed_picture() -> None:
    logits, labels = torch.randn(3, 7), torch.tensor([4, 0, 6])
    for smoothing in (0.0, 0.2):
        expected = timm.loss.BinaryCrossEntropy(smoothing)(logits, labels)
        torch.testing.assert_close(bce(logits, labels, smoothing), expected)
    mixed = 0.3 * F.one_hot(labels, 7) + 0.7 * F.one_hot(labels.flip(0), 7)
    expected = timm.loss.BinaryCrossEntropy(0, target_threshold=0)(logits, mixed)
    torch.testing.assert_close(bce(logits, mixed), expected)
    torch.testing.assert_close(bce(torch.zeros(3, 7), mixed, 0.1), torch.tensor(math.log(2)))


@pytest.mark.parametrize(("loss", "formula"), [("cross_entropy", cross_entropy), ("bce", bce)])
def test_training_takes_the_chosen_loss_and_validation_always_the_plain_cross_entropy(
    loss: str, formula: Callable[..., Tensor]
) -> None:
    module = LitViT(CONFIG, loss=loss, label_smoothing=0.3)
    nn.init.normal_(module.model.head.weight)
    module.log = module.log_dict = lambda *_, **__: None  # no trainer
    images, labels = torch.randn(4, 2, 6, 9), torch.tensor([0, 1, 2, 3])
    logits = module.model(images)
    torch.testing.assert_close(module.training_step((images, labels)), formula(logits, labels, 0.3))
    module.validation_step((images, labels))
    torch.testing.assert_close(module.val_loss.compute(), F.cross_entropy(logits, labels))


def test_an_empty_share_of_the_validation_data_counts_nothing() -> None:
    module = LitViT(CONFIG)
    module.log_dict = lambda *_, **__: None  # no trainer
    module.validation_step((torch.randn(3, 2, 6, 9), torch.tensor([0, 1, 2])))
    before = module.val_loss.compute(), module.val_accuracy.compute()
    module.validation_step((torch.empty(0, 2, 6, 9), torch.empty(0, dtype=torch.int64)))
    assert (module.val_loss.compute(), module.val_accuracy.compute()) == before


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_training_learns_and_repeats_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    options = {"max_epochs": 4, "model": {"optimizer": optimizer, "learning_rate": 5e-3}}
    trainer, first = train(tmp_path / "1", pictures(160, 16), **options)
    _, second = train(tmp_path / "2", pictures(160, 16), **{**options, "model": dict(options["model"])})
    assert trainer.callback_metrics["val/accuracy"] > 0.7
    for name, parameter in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], parameter, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}], ids=["plain", "averaged"])
def test_resumed_run_ends_with_the_weights_of_the_uninterrupted_one(tmp_path: Path, options: dict[str, float]) -> None:
    _, whole = train(tmp_path / "whole", pictures(40, 8), max_epochs=4, model=dict(options))
    trainer, _ = train(tmp_path / "half", pictures(40, 8), [StopAfter(2)], max_epochs=4, model=dict(options))
    assert trainer.global_step == 10
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = LitViT(CONFIG, optimizer="muon", warmup_fraction=0.1, **options)
    Trainer(
        accelerator="cpu",
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(resumed, pictures(40, 8), pictures(21, 8), ckpt_path=tmp_path / "half.ckpt")
    for name, parameter in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], parameter, rtol=0, atol=0)


class SeeWeight(Callback):
    """Notes a weight of the model after each step and each validation, with its two values in a checkpoint of then."""

    def __init__(self) -> None:
        self.trained: list[float] = []
        self.validated: list[float] = []
        self.saved: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LitViT, *_: object) -> None:
        self.trained.append(pl_module.model.head.bias[0].item())

    def on_validation_end(self, trainer: Trainer, pl_module: LitViT) -> None:
        if not trainer.sanity_checking:
            self.validated.append(pl_module.model.head.bias[0].item())
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            averaged, current = (checkpoint[key]["model.head.bias"] for key in ("state_dict", "current_model_state"))
            self.saved.append((averaged[0].item(), current[0].item()))


def test_averaged_weights_are_validated_and_saved_and_the_others_trained(tmp_path: Path) -> None:
    options = {"max_epochs": 3, "accumulate_grad_batches": 2}
    _, module = train(tmp_path / "1", pictures(40, 4), [seen := SeeWeight()], model={"ema_decay": 0.4}, **options)
    _, plain = train(tmp_path / "2", pictures(40, 4), model={}, **options)
    steps = seen.trained[1::2]
    averages = [steps[0]]
    for step, weight in enumerate(steps[1:], start=1):
        decay = min(0.4, (1 + step) / (10 + step))
        averages.append(decay * averages[-1] + (1 - decay) * weight)
    assert seen.validated == pytest.approx(averages[4::5], rel=1e-4)
    assert seen.saved == list(zip(seen.validated, steps[4::5], strict=True))
    assert seen.trained[-1] == plain.model.head.bias[0].item()
    assert module.model.head.bias[0].item() == seen.validated[-1]


def test_a_checkpoint_with_averaged_weights_loads_as_the_model_that_was_validated(tmp_path: Path) -> None:
    trainer, module = train(tmp_path, pictures(16, 8), model={"ema_decay": 0.5})
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    torch.testing.assert_close(load_model(tmp_path / "x.ckpt").state_dict(), module.model.state_dict(), rtol=0, atol=0)
    goes_on = Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    with pytest.raises(ValueError, match=r"run with averaged weights: give --model\.ema"):
        goes_on.fit(LitViT(CONFIG), pictures(16, 8), pictures(21, 8), ckpt_path=tmp_path / "x.ckpt")
    validated = LitViT(CONFIG, ema_decay=0.5)
    accuracy = trainer.callback_metrics["val/accuracy"]
    again = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    again.validate(validated, pictures(21, 8), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert again.callback_metrics["val/accuracy"] == accuracy


def test_checkpoint_is_a_model_with_its_names(tmp_path: Path) -> None:
    trainer, module = train(tmp_path, pictures(16, 8))
    module.model.class_names = ("a", "b", "c", "d", "e")
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = load_model(tmp_path / "x.ckpt")
    images = torch.randn(3, 2, 6, 9)
    assert loaded.class_names == ("a", "b", "c", "d", "e")
    torch.testing.assert_close(loaded(images), module.model.eval()(images), rtol=0, atol=0)


def test_compiled_module_has_clean_keys() -> None:
    module = LitViT(CONFIG, compile=True)
    assert module.model._compiled_call_impl is not None
    assert list(module.state_dict()) == list(LitViT(CONFIG).state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_fraction": 1.0}, r"--model.warmup_fraction .* got 1.0"),
        ({"loss": "bce", "decoder": DecoderConfig(max_length=4, num_heads=3)}, "--model.loss bce is for classes"),
        ({"layer_decay": 0.0}, r"--model.layer_decay .* got 0.0"),
        ({"optimizer": "adamv"}, "--model.optimizer adamv: there is no such optimiser; the nearest are adam, "),
        ({"optimizer": "adahessian"}, "there is no such optimiser"),
        (
            {"distillation": DistillationConfig(teacher="x"), "decoder": DecoderConfig(max_length=4, num_heads=3)},
            "--model.distillation is for classes",
        ),
        (
            {"vit": ViTConfig(distillation_token=True), "decoder": DecoderConfig(max_length=4, num_heads=3)},
            "distillation_token is for a model with a head",
        ),
        ({"ema_decay": 1.0}, r"--model.ema_decay .* got 1.0"),
        ({"label_smoothing": -0.1}, r"--model.label_smoothing .* got -0.1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LitViT(**{"vit": CONFIG, **options})


def test_right_counts_classes_and_the_larger_part_of_mixed_pictures() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.0], [3, 2, 1]])
    torch.testing.assert_close(is_correct(logits, torch.tensor([1, 1])), torch.tensor([1.0, 0]))
    torch.testing.assert_close(
        is_correct(logits, torch.tensor([[0.4, 0.6, 0], [0.3, 0.5, 0.2]])), torch.tensor([1.0, 0])
    )


def random_model(**fields: Any) -> VisionTransformer:
    """No weight of it is at its start value."""
    model = VisionTransformer(ViTConfig(**{**vars(CONFIG), **fields}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def teacher(tmp_path: Path) -> VisionTransformer:
    """A model in the folder `teacher`, with dropout that must stay off."""
    model = random_model(embed_dim=8, num_heads=2, depth=1, attention_dropout=0.5)
    save_model(model, tmp_path / "teacher")
    return model.eval()


def test_soft_distillation_is_its_formula() -> None:
    logits, teacher_logits = torch.randn(2, 3, 7)
    p, q = (logits / 4).softmax(-1), (teacher_logits / 4).softmax(-1)
    expected = 16 * (q * (q / p).log()).sum(-1).mean()
    torch.testing.assert_close(distillation_loss(logits, teacher_logits, "soft", 4.0), expected)
    assert distillation_loss(teacher_logits, teacher_logits, "soft", 4.0).item() == pytest.approx(0, abs=1e-6)


def test_hard_distillation_takes_the_teachers_class() -> None:
    logits, teacher_logits = torch.randn(2, 3, 7)
    torch.testing.assert_close(
        distillation_loss(logits, teacher_logits, "hard"), F.cross_entropy(logits, teacher_logits.max(-1).indices)
    )


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_model_learns_from_labels_and_teacher(
    tmp_path: Path, teacher: VisionTransformer, token: bool, kind: str
) -> None:
    distillation = DistillationConfig(teacher=str(tmp_path / "teacher"), type=kind, alpha=0.3, temperature=2.0)
    module = LitViT(ViTConfig(**{**vars(CONFIG), "distillation_token": token}), distillation=distillation)
    module.model.load_state_dict(random_model(distillation_token=token).state_dict())
    module.log = lambda *_, **__: None  # no trainer
    module.on_fit_start()
    images, labels = torch.randn(4, 2, 6, 9), torch.tensor([0, 1, 2, 3])
    first, second = module.model(images, separate_heads=True).unbind(1) if token else [module.model(images)] * 2
    expected = 0.7 * cross_entropy(first, labels, 0.1) + 0.3 * distillation_loss(second, teacher(images), kind, 2.0)
    torch.testing.assert_close(module.training_step((images, labels)), expected)
    torch.testing.assert_close(module._compute_loss(images, labels)[0], module.model(images))


def test_the_teacher_is_no_part_of_the_model(tmp_path: Path, teacher: VisionTransformer) -> None:
    distillation = DistillationConfig(teacher=str(tmp_path / "teacher"), alpha=0.9)
    options = {"distillation": distillation, "ema_decay": 0.5}
    trainer, module = train(tmp_path / "run", pictures(40, 8), max_epochs=2, model=options)
    assert list(module.state_dict()) == list(LitViT(CONFIG).state_dict())
    assert len(list(module.parameters())) == len(list(LitViT(CONFIG).parameters()))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert list(load_model(tmp_path / "x.ckpt").state_dict()) == list(module.model.state_dict())
    torch.testing.assert_close(load_model(tmp_path / "teacher").state_dict(), teacher.state_dict(), rtol=0, atol=0)


def test_a_student_comes_close_to_its_teacher(tmp_path: Path, teacher: VisionTransformer) -> None:
    distillation = DistillationConfig(teacher=str(tmp_path / "teacher"), alpha=1.0)
    loader = pictures(160, 16)
    options = {"distillation": distillation, "learning_rate": 5e-3}
    _, module = train(tmp_path / "run", loader, max_epochs=8, model=options)
    images = loader.dataset.tensors[0]
    assert is_correct(module.model.eval()(images), teacher(images).argmax(-1)).mean() > 0.7


def test_the_loss_of_an_epoch_is_the_mean_over_its_pictures() -> None:
    module = LitViT(CONFIG)
    module.log = lambda *_, **__: None  # no trainer
    module.model.load_state_dict(random_model().state_dict())
    images, labels = torch.randn(4, 2, 6, 9), torch.tensor([0, 1, 2, 3])
    for part in (slice(0, 3), slice(3, 4), slice(4, 4)):  # all pictures of the last batch were damaged
        module.training_step((images[part], labels[part]))
    torch.testing.assert_close(module.train_loss.compute(), module.loss(module.model(images), labels).detach())


def test_a_teacher_is_fitted_to_the_students_size_and_keeps_its_own_normalisation(tmp_path: Path) -> None:
    other, student = random_model(in_channels=1, image_size=(12, 9)), random_model(in_channels=1)
    other.preprocessing = Preprocessing(image_size=(12, 9), mean=(0.6,), std=(0.2,))
    save_model(other, tmp_path)
    distillation = DistillationConfig(teacher=str(tmp_path), type="soft", alpha=1.0)
    module = LitViT(student.config, distillation=distillation)
    module.model.preprocessing = Preprocessing(image_size=(6, 9), mean=(0.4,), std=(0.3,))
    module.on_fit_start()
    pixels = torch.rand(2, 1, 6, 9)
    expected = load_model(tmp_path, image_size=(6, 9))((pixels - 0.6) / 0.2)
    torch.testing.assert_close(module.teacher_forward((pixels - 0.4) / 0.3), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "known", "message"),
    [
        ({"num_classes": 4}, {}, "its number of classes is 4, here 5"),
        ({}, {"class_names": ("a", "b", "c", "d", "e")}, r"its classes are \('a', .* here \('e', 'd'"),
        ({"in_channels": 1}, {}, "its channels are 1, here 2"),
    ],
)
def test_a_teacher_for_other_data_is_refused(
    tmp_path: Path, fields: dict[str, Any], known: dict[str, Any], message: str
) -> None:
    other, student = random_model(**fields), random_model()
    student.class_names = ("e", "d", "c", "b", "a")
    for name, value in known.items():
        setattr(other, name, value)
    save_model(other, tmp_path)
    with pytest.raises(ValueError, match=f"--model.distillation.teacher {tmp_path} is for other data: {message}"):
        load_teacher(str(tmp_path), student)


@pytest.mark.parametrize("options", [{"alpha": 1.5}, {"temperature": 0.0}])
def test_nonsense_numbers_of_a_distillation_are_refused(options: dict[str, float]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"--model.distillation.{name} must .* got {value}"):
        DistillationConfig(teacher="x", **options)


def test_the_parts_of_a_reader_are_optimised_like_those_of_a_classifier() -> None:
    model = EncoderDecoder(CONFIG, DecoderConfig(max_length=4, num_heads=3))
    (matrices,), (others, undecayed) = named_groups(model)
    assert {"encoder.blocks.0.attn.q_proj.weight", "blocks.1.cross_attn.v_proj.weight"} <= matrices["params"]
    assert others["params"] == {"encoder.patch_embed.proj.weight", "head.weight", "token_embed.weight"}
    assert {"pos_embed", "encoder.cls_token", "encoder.pos_embed", "norm.bias"} <= undecayed["params"]
    assert sum(len(group["params"]) for group in (matrices, others, undecayed)) == len(list(model.parameters()))
    scales = {
        name: group["lr_scale"]
        for groups in named_groups(model, layer_decay=0.5)
        for group in groups
        for name in group["params"]
    }
    assert scales["encoder.blocks.1.mlp.fc1.weight"] == 0.5
    assert scales["blocks.0.mlp.fc1.weight"] == scales["pos_embed"] == scales["token_embed.weight"] == 1
    assert scales["encoder.pos_embed"] == 0.125


def test_a_reader_learns_sequences_and_is_right_as_greedy_search_says(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(5, 2, 6, 3, generator=generator)
    known = torch.randint(5, (96, 3), generator=generator)
    lengths = torch.randint(1, 4, (96, 1), generator=generator)
    places = torch.arange(3)
    parts = patterns[known] * (places < lengths)[..., None, None, None]
    images = torch.cat(parts.unbind(1), dim=-1)
    sequences = torch.cat([known, known[:, :1]], dim=1)
    places = torch.arange(4)
    sequences = sequences.where(places != lengths, 5).where(places <= lengths, -100)
    loader = DataLoader(TensorDataset(images, sequences), batch_size=16)
    decoder = DecoderConfig(max_length=4, depth=1, num_heads=3)
    trainer, module = train(tmp_path, loader, validated=loader, model={"decoder": decoder}, max_epochs=12)
    accuracy = trainer.callback_metrics["val/accuracy"].item()
    assert 0.3 < accuracy < 1
    written, _ = module.model.eval().generate(images)
    is_read = ((written == sequences) | (sequences < 0)).all(1)
    assert is_read.float().mean().item() == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("decoder", "shape", "message"),
    [
        (None, (2, 4), "labels are sequences.*give --model.decoder"),
        (DecoderConfig(max_length=4, num_heads=3), (2,), "labels are classes.*leave out --model.decoder"),
    ],
)
def test_labels_that_the_model_cannot_learn_are_refused(
    decoder: DecoderConfig | None, shape: tuple[int, ...], message: str
) -> None:
    module = LitViT(CONFIG, decoder=decoder)
    with pytest.raises(ValueError, match=message):
        module(torch.randn(2, 2, 6, 9), torch.zeros(shape, dtype=torch.int64))


def test_pictures_are_whole_from_the_given_share_of_the_steps_on(tmp_path: Path) -> None:
    tokens: list[int] = []

    def note(block: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if block.training:
            tokens.append(arguments[0].shape[1])

    config = replace(CONFIG, patch_dropout=0.5)
    torch.manual_seed(3)
    module = LitViT(config, patch_dropout_until=0.6)
    module.model.blocks[0].register_forward_pre_hook(note)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=2,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, pictures(40, 8), pictures(21, 8))
    assert tokens == [4] * 6 + [7] * 4  # the class token with 3 or all 6 patches
    with pytest.raises(ValueError, match=r"--model\.patch_dropout_until must lie in \[0, 1\], got 1\.5"):
        LitViT(CONFIG, patch_dropout_until=1.5)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A model of another picture size, with more channels and classes than the task has."""
    model = random_model(image_size=(12, 9), in_channels=3, num_classes=11)
    model.class_names = tuple("abcdefghijk")
    save_model(model, tmp_path / "earlier")
    return tmp_path / "earlier"


def test_pretrained_brings_its_architecture_and_all_but_the_head(tmp_path: Path, earlier: Path) -> None:
    task = ViTConfig(image_size=(6, 9), patch_size=3, in_channels=2, num_classes=5, drop_path=0.1)
    options = {"pretrained": str(earlier), "learning_rate": 0.0, "optimizer": "sgd"}
    _, module = train(tmp_path / "run", pictures(16, 8), model=options, vit=task)
    expected = load_model(earlier, image_size=(6, 9), in_channels=2, num_classes=5)
    assert module.model.config == replace(expected.config, drop_path=0.1)
    body = {name: tensor for name, tensor in expected.state_dict().items() if not name.startswith("head")}
    trained = {name: tensor for name, tensor in module.model.state_dict().items() if not name.startswith("head")}
    torch.testing.assert_close(trained, body, rtol=0, atol=0)


def test_another_architecture_than_the_pretrained_is_refused(earlier: Path) -> None:
    with pytest.raises(ValueError, match="another architecture: depth is 2, here 7"):
        LitViT(replace(CONFIG, depth=7), pretrained=str(earlier))


def test_head_only_trains_the_head_and_nothing_else(tmp_path: Path, earlier: Path) -> None:
    options = {"pretrained": str(earlier), "linear_probe": True, "learning_rate": 0.1, "optimizer": "sgd"}
    _, module = train(tmp_path / "run", pictures(16, 8), model=options)
    expected = load_model(earlier, image_size=(6, 9), in_channels=2, num_classes=5).state_dict()
    for name, tensor in module.model.state_dict().items():
        assert torch.equal(tensor, expected[name]) != name.startswith("head."), name
    # Nothing random happens on the way to the head.
    assert not any(part.training for part in module.model.blocks.modules())


@pytest.mark.parametrize("options", [{"pretrained": "x", "optimizer": "muon"}, {}])
def test_head_only_needs_features_and_an_optimiser_for_a_head(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"--model\.linear_probe learns from the features of"):
        LitViT(CONFIG, linear_probe=True, **options)
