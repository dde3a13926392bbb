"""What users of Lightning and Hugging Face call on `LitViT` from Python."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import CONFIG, NO_DROPOUT_CONFIG, QUIET, assert_equal, pattern_loader, train
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vitmha import Classifier, LitViT, load_model, save_model
from vitmha.images import Preprocessing
from vitmha.models.encoder_decoder import DecoderConfig
from vitmha.training.attention_logger import AttentionLogger
from vitmha.training.callbacks import ClassificationReportCallback

NAMES = ("ant", "bee", "cat", "dog", "eel")
PREPROCESSING = Preprocessing(image_size=(6, 9), mean=(0.5,) * 3, std=(0.5,) * 3)


def loader_of(batches: list[Any]) -> DataLoader:
    return DataLoader(batches, batch_size=None)


def dictionaries(loader: DataLoader, images: str = "pixel_values", labels: str = "labels") -> DataLoader:
    return loader_of([{images: batch[0], labels: batch[1], "id": ["a"] * len(batch[1])} for batch in loader])


def trained(directory: Path, **options: Any) -> LitViT:
    """A module trained on loaders, with names and preprocessing set by hand; its checkpoint is last.ckpt."""
    torch.manual_seed(3)
    module = LitViT(CONFIG)
    module.model.class_names, module.model.preprocessing = NAMES, PREPROCESSING
    checkpoint = ModelCheckpoint(directory, "last", save_weights_only=False)
    trainer = Trainer(**{**QUIET, "enable_checkpointing": True}, callbacks=[checkpoint], max_epochs=1, **options)
    trainer.fit(module, pattern_loader(20, 5), pattern_loader(5, 5))
    return module


def test_a_checkpoint_is_loaded_and_predicts(tmp_path: Path) -> None:
    module = trained(tmp_path)
    loaded = LitViT.load_from_checkpoint(tmp_path / "last.ckpt", learning_rate=0.5)
    assert (loaded.learning_rate, loaded.model.config) == (0.5, CONFIG)
    assert (loaded.model.class_names, loaded.model.preprocessing) == (NAMES, PREPROCESSING)
    assert_equal(list(loaded.state_dict().values()), list(module.state_dict().values()))
    loader = pattern_loader(11, 4)
    with torch.no_grad():
        expected = torch.cat([module.model.eval()(images) for images, _ in loader])
    trainer = Trainer(**QUIET)
    images_only = [images for images, _ in loader]
    without_labels = [{"pixel_values": images} for images in images_only]
    for batches in (loader, loader_of(images_only), dictionaries(loader), loader_of(without_labels)):
        torch.testing.assert_close(torch.cat(trainer.predict(loaded, batches)), expected)
    first, _ = trainer.predict(loaded, [loader, loader])
    torch.testing.assert_close(torch.cat(first), expected)
    with pytest.raises(ValueError, match=r"nowhere\.ckpt: no such file"):
        LitViT.load_from_checkpoint("nowhere.ckpt")


def test_a_sequence_model_predicts_sequences() -> None:
    module = LitViT(NO_DROPOUT_CONFIG, decoder=DecoderConfig(max_length=4, depth=1, num_heads=3))
    images = torch.randn(3, 2, 6, 9)
    [generated] = Trainer(**QUIET).predict(module, loader_of([images]))
    assert_equal(generated, module.model.eval().generate(images))
    with pytest.raises(ValueError, match="labels are required by a decoder"):
        module(images)


def test_a_module_is_saved_and_classifies_as_its_model(tmp_path: Path) -> None:
    module = LitViT(CONFIG)
    module.model.class_names, module.model.preprocessing = NAMES, PREPROCESSING
    save_model(module, tmp_path)
    assert_equal(load_model(tmp_path).state_dict()["head.weight"], module.model.head.weight.data)
    image = torch.rand(3, 6, 9)
    [expected] = Classifier(tmp_path)(image)
    assert Classifier(module)(image)[0].probabilities == pytest.approx(expected.probabilities)
    assert Classifier(torch.compile(module.model))(image)[0].labels == expected.labels
    with pytest.raises(ValueError, match="save_model saves a VisionTransformer or an EncoderDecoder, got Linear"):
        save_model(nn.Linear(2, 3), tmp_path)


@pytest.mark.parametrize(("images", "labels"), [("pixel_values", "labels"), ("image", "label"), ("img", "label")])
def test_dictionaries_train_as_pairs_do(images: str, labels: str, tmp_path: Path) -> None:
    loader = pattern_loader(20, 5)
    pairs = train(tmp_path / "pairs", epochs=1, train_loader=loader)
    module = train(
        tmp_path / "dicts",
        [AttentionLogger(num_images=2)],
        epochs=1,
        train_loader=dictionaries(loader, images, labels),
        val_loader=dictionaries(loader, images, labels),
    )
    assert_equal(list(module.state_dict().values()), list(pairs.state_dict().values()))
    report = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[ClassificationReportCallback()])
    report.validate(module, dictionaries(loader, images, labels), verbose=False)
    assert json.loads((tmp_path / "evaluation" / "metrics.json").read_text())["num_images"] == 20


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": 1, "labels": 2}, r"one of the keys pixel_values, image, img, got \['x', 'labels'\]"),
        ({"image": 1, "img": 2}, r"one of the keys pixel_values, image, img, got \['image', 'img'\]"),
        ({"image": torch.zeros(1, 3, 6, 9)}, r"one of the keys labels, label, got \['image'\]"),
        (torch.zeros(1, 3, 6, 9), r"must be \(images, labels\), two tensors, or a dictionary of them, got a Tensor"),
        ([torch.zeros(1, 3, 6, 9), torch.zeros(1), "a"], "got a list of Tensor, Tensor, str"),
    ],
)
def test_other_batches_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(**QUIET).validate(LitViT(CONFIG), loader_of([batch]), verbose=False)


def test_class_names_and_preprocessing_are_asked_for_kept_and_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        Trainer(**QUIET, max_epochs=1).fit(LitViT(CONFIG), pattern_loader(5, 5), pattern_loader(5, 5))
    assert "The data has no class_names and no preprocessing: set module.model.class_names and module." in caplog.text
    caplog.clear()
    module = trained(tmp_path)
    assert "The data has no" not in caplog.text
    assert (module.model.class_names, module.model.preprocessing) == (NAMES, PREPROCESSING)
    module._describe_data(list(NAMES), None, "validate")
    with pytest.raises(ValueError, match="class_names of the data are bee, ant, those of the model ant, bee, cat"):
        module._describe_data(["bee", "ant"], None, "validate")
    module.model.class_names = NAMES[:3]
    with pytest.raises(ValueError, match="class_names has 3 names, the model has 5 classes"):
        Trainer(**QUIET, max_epochs=1).fit(module, pattern_loader(5, 5), pattern_loader(5, 5))


def test_backbone_finetuning_trains_the_head_before_the_rest() -> None:
    module, changes = LitViT(CONFIG, warmup_fraction=0.0), []
    before = {name: parameter.detach().clone() for name, parameter in module.model.named_parameters()}

    class Recorder(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LitViT) -> None:
            state = module.model.named_parameters()
            changes.append({name for name, parameter in state if not torch.equal(parameter, before[name])})

    callbacks = [BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False), Recorder()]
    Trainer(**QUIET, max_epochs=2, callbacks=callbacks).fit(module, pattern_loader(20, 5), pattern_loader(5, 5))
    assert changes[0] == {"head.weight", "head.bias"}
    assert changes[1] >= {"cls_token", "pos_embed", "blocks.1.mlp.fc1.weight", "norm.weight"}


def test_the_backbone_has_every_parameter_but_those_of_the_head() -> None:
    module = LitViT(CONFIG)

    def shared(part: nn.Module) -> set[int]:
        return {parameter.data_ptr() for parameter in part.parameters()}

    assert shared(module.backbone) == shared(module.model) - shared(module.model.head)
    assert isinstance(module.model.head.weight, Tensor)
