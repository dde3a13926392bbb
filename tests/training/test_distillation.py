"""distillation.py and the losses of a teacher: the formulas, the teacher's place outside the model, and refusals."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import NO_DROPOUT_CONFIG, pattern_loader, random_model, train

from vitmha.images import Preprocessing
from vitmha.metrics import is_correct
from vitmha.models.vit import VisionTransformer
from vitmha.training.distillation import DistillationConfig, load_teacher
from vitmha.training.losses import cross_entropy, distillation_loss
from vitmha.training.module import LitViT
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model


@pytest.fixture
def teacher(tmp_path: Path) -> VisionTransformer:
    """A model in the directory `teacher`, with dropout that must stay off."""
    model = random_model(embed_dim=8, num_heads=2, depth=1, attention_dropout=0.5)
    save_model(model, tmp_path / "teacher")
    return model.eval()


def test_soft_distillation_is_its_formula() -> None:
    logits, teacher_logits = torch.randn(2, 3, 7)
    p, q = (logits / 4).softmax(-1), (teacher_logits / 4).softmax(-1)
    expected = 16 * (q * (q / p).log()).sum(-1).mean()
    torch.testing.assert_close(distillation_loss(logits, teacher_logits, "soft", 4.0), expected)
    assert distillation_loss(teacher_logits, teacher_logits, "soft", 4.0).item() == pytest.approx(0, abs=1e-6)


def test_hard_distillation_uses_the_teachers_class() -> None:
    logits, teacher_logits = torch.randn(2, 3, 7)
    torch.testing.assert_close(
        distillation_loss(logits, teacher_logits, "hard"), F.cross_entropy(logits, teacher_logits.max(-1).indices)
    )


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("distillation_type", ["soft", "hard"])
def test_a_model_learns_from_labels_and_teacher(
    tmp_path: Path, teacher: VisionTransformer, token: bool, distillation_type: str
) -> None:
    source = str(tmp_path / "teacher")
    distillation = DistillationConfig(teacher=source, type=distillation_type, alpha=0.3, temperature=2.0)
    student = random_model(distillation_token=token)
    module = LitViT(student.config, distillation=distillation)
    module.model.load_state_dict(student.state_dict())
    module.log = lambda *_, **__: None  # no trainer
    module.on_fit_start()
    images, labels = torch.randn(4, 2, 6, 9), torch.tensor([0, 1, 2, 3])
    first, second = module.model(images, separate_heads=True).unbind(1) if token else [module.model(images)] * 2
    teacher_loss = distillation_loss(second, teacher(images), distillation_type, 2.0)
    expected = 0.7 * cross_entropy(first, labels, 0.1) + 0.3 * teacher_loss
    torch.testing.assert_close(module.training_step((images, labels)), expected)
    torch.testing.assert_close(module._compute_loss(images, labels)[0], module.model(images))


def test_the_teacher_is_not_part_of_the_model(tmp_path: Path, teacher: VisionTransformer) -> None:
    distillation = DistillationConfig(teacher=str(tmp_path / "teacher"), alpha=0.9)
    model = {"distillation": distillation, "ema_decay": 0.5, "optimizer": "muon"}
    module = train(tmp_path / "run", epochs=2, vit=NO_DROPOUT_CONFIG, model=model)
    assert list(module.state_dict()) == list(LitViT(NO_DROPOUT_CONFIG).state_dict())
    assert len(list(module.parameters())) == len(list(LitViT(NO_DROPOUT_CONFIG).parameters()))
    module.trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert list(load_model(tmp_path / "x.ckpt").state_dict()) == list(module.model.state_dict())
    torch.testing.assert_close(load_model(tmp_path / "teacher").state_dict(), teacher.state_dict(), rtol=0, atol=0)


def test_a_student_comes_close_to_its_teacher(tmp_path: Path, teacher: VisionTransformer) -> None:
    distillation = DistillationConfig(teacher=str(tmp_path / "teacher"), alpha=1.0)
    loader = pattern_loader(160, 16, channels=2)
    model = {"distillation": distillation, "learning_rate": 5e-3, "optimizer": "muon", "warmup_fraction": 0.1}
    module = train(tmp_path / "run", epochs=8, vit=NO_DROPOUT_CONFIG, model=model, train_loader=loader)
    images = loader.dataset.tensors[0]
    assert is_correct(module.model.eval()(images), teacher(images).argmax(-1)).mean() > 0.7


def test_a_teacher_is_resized_to_the_students_images_and_keeps_its_own_normalization(tmp_path: Path) -> None:
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
    ("fields", "attributes", "message"),
    [
        ({"num_classes": 4}, {}, "its num_classes is 4, expected 5"),
        ({}, {"class_names": ("a", "b", "c", "d", "e")}, r"its class names are \('a', .* expected \('e', 'd'"),
        ({"in_channels": 1}, {}, "its in_channels is 1, expected 2"),
    ],
)
def test_a_teacher_for_other_data_is_refused(
    tmp_path: Path, fields: dict[str, Any], attributes: dict[str, Any], message: str
) -> None:
    other, student = random_model(**fields), random_model()
    student.class_names = ("e", "d", "c", "b", "a")
    for name, value in attributes.items():
        setattr(other, name, value)
    save_model(other, tmp_path)
    with pytest.raises(ValueError, match=f"teacher {re.escape(str(tmp_path))} does not fit the data: {message}"):
        load_teacher(str(tmp_path), student)


@pytest.mark.parametrize("options", [{"alpha": 1.5}, {"temperature": 0.0}, {"temperature": float("inf")}])
def test_numbers_of_a_distillation_outside_their_range_are_refused(options: dict[str, float]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"^{name} must .* got {value}"):
        DistillationConfig(teacher="x", **options)
