"""training.py: the schedule, the groups, the joined optimiser, the metrics, and whole small runs."""

import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from vitmha.decoder import DecoderConfig, EncoderDecoder
from vitmha.pretrained import load_model
from vitmha.training import LitViT, Together, is_right, split_parameters, warmup_cosine
from vitmha.vit import VisionTransformer, ViTConfig

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
    module = LitViT(CONFIG, **{"optimizer": "muon", "warmup": 0.1, **options.pop("model", {})})
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
    trainer, _ = train(tmp_path, pictures(40, 4), accumulate_grad_batches=4, max_epochs=2, model={"warmup": 0.0})
    assert trainer.global_step == 6  # ten batches make three steps an epoch
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.last_epoch == 6
    assert scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-12)


def test_every_trainable_parameter_is_in_one_group_and_tokens_vectors_and_positions_do_not_decay() -> None:
    config = ViTConfig(
        image_size=8, patch_size=4, embed_dim=12, depth=1, num_heads=3, num_registers=2, layer_scale=0.1, pool="cls"
    )
    model = VisionTransformer(config)
    model.head.bias.requires_grad_(False)
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices, others, undecayed = ([names[p] for p in group] for group in split_parameters(model))
    assert sorted(matrices + others + undecayed) == sorted(set(names.values()) - {"head.bias"})
    assert {"cls_token", "reg_token", "pos_embed", "blocks.0.ls1.gamma", "norm.weight"} <= set(undecayed)
    assert set(others) == {"patch_embed.proj.weight", "head.weight"}
    assert all(name.endswith("weight") and ".norm" not in name for name in matrices)


def test_learned_query_of_attention_pooling_does_not_decay() -> None:
    model = VisionTransformer(
        ViTConfig(image_size=8, patch_size=4, embed_dim=12, depth=1, num_heads=3, pool="attention")
    )
    assert any(parameter is model.attn_pool.probe for parameter in split_parameters(model)[2])


def two_layers() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    return nn.Linear(5, 3, bias=False), nn.Linear(3, 2)


def step(first: nn.Module, second: nn.Module) -> None:
    second(first(torch.linspace(-1, 1, 20).view(4, 5))).square().sum().backward()


def test_together_equals_its_parts_apart_and_a_schedule_reaches_both() -> None:
    joined, apart = two_layers(), two_layers()
    together = Together(Muon(joined[0].parameters(), 0.1), AdamW(joined[1].parameters(), 0.2))
    parts = Muon(apart[0].parameters(), 0.1), AdamW(apart[1].parameters(), 0.2)
    schedule = LambdaLR(together, lambda count: 1 / (1 + count))
    schedules = [LambdaLR(part, lambda count: 1 / (1 + count)) for part in parts]
    for _ in range(3):
        step(*joined)
        step(*apart)
        together.step()
        for part in parts:
            part.step()
        together.zero_grad()
        for part in parts:
            part.zero_grad()
        for one in (schedule, *schedules):
            one.step()
    for ours, theirs in zip(joined, apart, strict=True):
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=0)
    assert [group["lr"] for group in together.param_groups] == pytest.approx([0.025, 0.05])


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


def test_uniform_logits_cost_ln_of_the_classes_with_any_smoothing_and_mixing() -> None:
    module = LitViT(CONFIG, label_smoothing=0.3)
    module.log = lambda *_, **__: None  # no trainer
    images = torch.randn(4, 2, 6, 9)
    for labels in (torch.tensor([0, 1, 2, 3]), torch.full((4, 5), 0.2)):
        torch.testing.assert_close(module.training_step((images, labels)), torch.tensor(math.log(5)))


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


def test_resumed_run_ends_with_the_weights_of_the_uninterrupted_one(tmp_path: Path) -> None:
    _, whole = train(tmp_path / "whole", pictures(40, 8), max_epochs=4)
    trainer, _ = train(tmp_path / "half", pictures(40, 8), [StopAfter(2)], max_epochs=4)
    assert trainer.global_step == 10
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = LitViT(CONFIG, optimizer="muon", warmup=0.1)
    Trainer(
        accelerator="cpu",
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(resumed, pictures(40, 8), pictures(21, 8), ckpt_path=tmp_path / "half.ckpt")
    for name, parameter in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], parameter, rtol=0, atol=1e-6)


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
        ({"warmup": 1.0}, r"--model.warmup .* got 1.0"),
        ({"label_smoothing": -0.1}, r"--model.label_smoothing .* got -0.1"),
    ],
)
def test_rates_outside_their_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LitViT(CONFIG, **options)


def test_right_counts_classes_and_the_larger_part_of_mixed_pictures() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.0], [3, 2, 1]])
    torch.testing.assert_close(is_right(logits, torch.tensor([1, 1])), torch.tensor([1.0, 0]))
    torch.testing.assert_close(is_right(logits, torch.tensor([[0.4, 0.6, 0], [0.3, 0.5, 0.2]])), torch.tensor([1.0, 0]))


def test_the_parts_of_a_reader_are_optimised_like_those_of_a_classifier() -> None:
    model = EncoderDecoder(CONFIG, DecoderConfig(max_length=4, num_heads=3))
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices, others, undecayed = ([names[p] for p in group] for group in split_parameters(model))
    assert {"encoder.blocks.0.attn.q_proj.weight", "blocks.1.cross_attn.v_proj.weight"} <= set(matrices)
    assert sorted(others) == ["encoder.patch_embed.proj.weight", "head.weight", "token_embed.weight"]
    assert {"pos_embed", "encoder.cls_token", "encoder.pos_embed", "norm.bias"} <= set(undecayed)
    assert len(matrices) + len(others) + len(undecayed) == len(names)


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
