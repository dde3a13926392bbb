"""optimizers.py: the schedule, the parameter groups, Muon, and several optimizers as one."""

import math
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import timm.models
import timm.optim
import torch
from builders import NO_DROPOUT_CONFIG, pattern_loader, train
from lightning import Callback, Trainer
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder
from vitmha.models.vit import VisionTransformer
from vitmha.training.module import LitViT
from vitmha.training.optimizers import (
    BatchedMuon,
    CombinedOptimizer,
    check_optimizer,
    create_optimizer,
    learning_rates,
    parameter_groups,
    warmup_cosine,
    with_learning_rate,
)


def test_cosine_over_six_steps_has_the_known_values_and_never_rises() -> None:
    factors = [warmup_cosine(step, warmup=0, total=6) for step in range(8)]
    torch.testing.assert_close(torch.tensor(factors[:6])[[0, 4, 5]], torch.tensor([1.0, 0.25, 0.066987]))
    assert factors == sorted(factors, reverse=True)
    assert factors[6:] == [0.0, 0.0]


def test_warmup_rises_in_equal_steps_to_the_cosine() -> None:
    factors = [warmup_cosine(step, warmup=4, total=12) for step in range(6)]
    expected = [0.2, 0.4, 0.6, 0.8, 1.0, 0.5 * (1 + math.cos(math.pi / 8))]
    torch.testing.assert_close(torch.tensor(factors), torch.tensor(expected))


def test_the_schedule_counts_optimizer_steps_with_gradient_accumulation(tmp_path: Path) -> None:
    model = {"optimizer": "muon", "warmup_fraction": 0.0}
    options = {"vit": NO_DROPOUT_CONFIG, "train_loader": pattern_loader(40, 4, channels=2)}
    trainer = train(tmp_path, epochs=2, model=model, accumulate_grad_batches=4, **options).trainer
    assert trainer.global_step == 6  # ten batches are three steps of an epoch
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.last_epoch == 6
    assert scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-12)


def named_groups(model: nn.Module, weight_decay: float = 0.1, layer_decay: float = 1.0) -> list[list[dict[str, Any]]]:
    """The groups of the block matrices and of the others, with parameter names in place of parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    both = parameter_groups(model, weight_decay, layer_decay)
    return [[{**group, "params": {names[p] for p in group["params"]}} for group in groups] for groups in both]


def test_every_trainable_parameter_is_in_one_group_and_only_matrices_have_weight_decay() -> None:
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
    expected = {"cls_token", "dist_token", "reg_token", "pos_embed", "blocks.0.ls1.gamma", "norm.weight"}
    assert expected <= undecayed["params"]
    assert others["params"] == {"patch_embed.proj.weight", "head.weight", "head_dist.weight"}
    assert all(name.endswith("weight") and ".norm" not in name for name in matrices["params"])


def test_the_learned_query_of_attention_pooling_has_no_weight_decay() -> None:
    config = ViTConfig(image_size=8, patch_size=4, embed_dim=12, depth=1, num_heads=3, pool="attention")
    assert "attn_pool.probe" in named_groups(VisionTransformer(config))[1][-1]["params"]


def test_layer_decay_scales_the_learning_rates_as_timm_does() -> None:
    sizes = {"patch_size": 4, "embed_dim": 12, "depth": 3, "num_heads": 3}
    model = VisionTransformer(ViTConfig(image_size=8, num_classes=5, **sizes))
    found: dict[str, set[tuple[float, float]]] = {}
    for group in (group for groups in named_groups(model, layer_decay=0.5) for group in groups):
        for name in group["params"]:
            timm_name = re.sub(r"attn\.[qkv]_proj", "attn.qkv", name).replace("out_proj", "proj")
            found.setdefault(timm_name, set()).add((group["lr_scale"], group["weight_decay"]))
    reference = timm.models.VisionTransformer(img_size=8, num_classes=5, **sizes)
    names = {parameter: name for name, parameter in reference.named_parameters()}
    groups = timm.optim.param_groups_layer_decay(reference, 0.1, reference.no_weight_decay(), layer_decay=0.5)
    expected = {names[p]: {(g["lr_scale"], g["weight_decay"])} for g in groups for p in g["params"]}
    # The last norm has the factor of the head in BEiT and vitmha, that of the last block in timm.
    assert found == {**expected, "norm.weight": {(1.0, 0.0)}, "norm.bias": {(1.0, 0.0)}}


def test_the_layers_of_an_encoder_decoder_are_those_of_its_encoder_and_the_decoder_is_the_last() -> None:
    model = EncoderDecoder(NO_DROPOUT_CONFIG, DecoderConfig(max_length=4, num_heads=3))
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


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:It is highly recommended to have 'opt_einsum'")
def test_every_name_of_timms_factory_takes_a_step_or_says_why_not() -> None:
    created = []
    for name in map(str, timm.optim.list_optimizers()):
        if timm.optim.get_optimizer_info(name).second_order:
            continue
        check_optimizer(name)
        weights = [nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))]
        groups = [{"params": [weight], "weight_decay": 0.05, "lr_scale": 0.5} for weight in weights]
        groups = with_learning_rate(groups, 1e-2)
        before = [weight.detach().clone() for weight in weights]
        if name.startswith(("bnb", "fused")):
            with pytest.raises(ValueError, match=f"^optimizer {name} is not available here: .*(CUDA|package)"):
                create_optimizer(groups, name, 1e-2, (0.8, 0.9))
            continue
        optimizer = create_optimizer(groups, name, 1e-2, (0.8, 0.9))
        for _ in range(3):
            (weights[0] @ weights[1]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not any(map(torch.equal, before, weights)), name
        created.append(name)
        if name == "adamw":
            assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
            assert optimizer.param_groups[0]["lr"] == 5e-3
    assert {"adan", "adamw", "sgd", "lamb", "lion"} < {*created}
    assert len(created) > 40


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb", "sgd", "lion"])
def test_every_optimizer_gets_the_learning_rates_of_the_layers(tmp_path: Path, optimizer: str) -> None:
    rates: dict[str, tuple[float, float]] = {}

    class RecordRates(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LitViT) -> None:
            names = {parameter: name for name, parameter in pl_module.model.named_parameters()}
            for group in trainer.optimizers[0].param_groups:
                rates.update({names[p]: (group["lr"], group["weight_decay"]) for p in group["params"]})

    model = {"optimizer": optimizer, "layer_decay": 0.5, "warmup_fraction": 0.0, "weight_decay": 0.2}
    module = train(tmp_path, [RecordRates()], epochs=1, vit=NO_DROPOUT_CONFIG, model=model)
    assert set(rates) == {name for name, _ in module.model.named_parameters()}
    assert (rates["head.weight"], rates["cls_token"]) == ((1e-3, 0.2), (1e-3 / 8, 0))
    base = 0.02 if optimizer == "muon" else 1e-3
    assert rates["blocks.1.mlp.fc1.weight"] == (base / 2, 0.2)
    assert rates["blocks.0.attn.q_proj.bias"] == (1e-3 / 4, 0)


@pytest.mark.parametrize("optimizer", ["muon", "lamb"])
def test_gradients_are_clipped_by_the_norm_of_all_parameters(tmp_path: Path, optimizer: str) -> None:
    norms = []

    class RecordNorm(Callback):
        def on_before_zero_grad(self, trainer: Trainer, pl_module: LitViT, optimizer: Optimizer) -> None:
            gradients = [p.grad.flatten() for p in pl_module.parameters() if p.grad is not None]
            norms.extend([torch.cat(gradients).norm().item()] if gradients else [])

    options = {"train_loader": pattern_loader(40, 4, channels=2), "model": {"optimizer": optimizer}}
    options |= {"gradient_clip_val": 1e-3, "accumulate_grad_batches": 2}
    train(tmp_path, [RecordNorm()], epochs=1, vit=NO_DROPOUT_CONFIG, **options)
    assert norms == pytest.approx([1e-3] * 4, rel=1e-3)


def two_layers() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(7)
    return nn.Linear(5, 3, bias=False), nn.Linear(3, 2)


def backward(first: nn.Module, second: nn.Module) -> None:
    second(first(torch.linspace(-1, 1, 20).view(4, 5))).square().sum().backward()


def test_a_combined_optimizer_equals_its_optimizers_alone_and_a_schedule_reaches_both() -> None:
    combined_layers, separate_layers = two_layers(), two_layers()
    combined = CombinedOptimizer(
        Muon(combined_layers[0].parameters(), 0.1), AdamW(combined_layers[1].parameters(), 0.2)
    )
    separate = Muon(separate_layers[0].parameters(), 0.1), AdamW(separate_layers[1].parameters(), 0.2)
    schedules = [LambdaLR(optimizer, lambda count: 1 / (1 + count)) for optimizer in (combined, *separate)]
    for _ in range(3):
        backward(*combined_layers)
        backward(*separate_layers)
        for optimizer in (combined, *separate):
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
    for found, expected in zip(combined_layers, separate_layers, strict=True):
        torch.testing.assert_close(found.weight, expected.weight, rtol=0, atol=0)
    assert [group["lr"] for group in combined.param_groups] == pytest.approx([0.025, 0.05])


def test_the_logged_learning_rates_are_those_of_the_head_and_of_muon() -> None:
    matrix, vectors = torch.zeros(3, 3), [torch.zeros(2), torch.zeros(5)]
    adamw = AdamW([{"params": [vectors[0]], "lr": 0.1}, {"params": [vectors[1]], "lr": 0.4}])
    assert learning_rates(adamw) == {"lr": 0.4}
    assert learning_rates(CombinedOptimizer(Muon([matrix], 0.02), adamw)) == {"lr": 0.4, "muon_lr": 0.02}


def test_a_combined_optimizer_resumes_from_its_state_dict() -> None:
    saved, resumed = two_layers(), two_layers()
    optimizers = [
        CombinedOptimizer(SGD(a.parameters(), 0.1, momentum=0.9), AdamW(b.parameters(), 0.2))
        for a, b in (saved, resumed)
    ]
    for _ in range(2):
        backward(*saved)
        optimizers[0].step()
    for old, new in zip(saved, resumed, strict=True):
        new.load_state_dict(old.state_dict())
    optimizers[1].load_state_dict(deepcopy(optimizers[0].state_dict()))
    for layers, optimizer in zip((saved, resumed), optimizers, strict=True):
        optimizer.zero_grad()
        backward(*layers)
        optimizer.step()
    for old, new in zip(saved, resumed, strict=True):
        torch.testing.assert_close(new.weight, old.weight, rtol=0, atol=0)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("reference", ["torch", "timm"])
def test_batched_muon_takes_the_steps_of_torch_and_timm(reference: str, nesterov: bool) -> None:
    shapes = [(24, 24), (24, 24), (48, 24), (24, 48), (24, 24)]
    weights, expected = ([nn.Parameter(torch.randn(shape)) for shape in shapes] for _ in range(2))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.8, "nesterov": nesterov}
    timm_options = {"ns_coefficients": "original", "adjust_lr_fn": "original"}
    is_torch = reference == "torch"
    other = Muon(expected, **options) if is_torch else timm.optim.Muon(expected, **options, **timm_options)
    muon = BatchedMuon(weights, **options)
    for step in range(4):
        for weight, twin in zip(weights, expected, strict=True):
            twin.data.copy_(weight.data)
            weight.grad = torch.randn_like(weight)
            twin.grad = weight.grad.clone()
        weights[1].grad = expected[1].grad = None if step % 2 else weights[1].grad
        before = [weight.detach().clone() for weight in weights]
        for optimizer in (muon, other):
            optimizer.step()
        for old, weight, twin in zip(before, weights, expected, strict=True):
            assert (weight - twin).norm() <= 0.01 * (twin - old).norm()  # both iterate in bfloat16
    for index, state in muon.state_dict()["state"].items():
        torch.testing.assert_close(state["momentum_buffer"], other.state_dict()["state"][index]["momentum_buffer"])
