"""Every prediction equals the model's own and belongs to its image."""

import copy
import pickle
import threading
from pathlib import Path

import pytest
import torch
from builders import CLASS_NAMES, classifier_model, expected_probabilities, files_in, stack_probabilities
from PIL import Image
from torch.testing import assert_close
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

import vitmha.cli.classify
import vitmha.images.find
import vitmha.inference.classifier
import vitmha.inference.engines
from vitmha import Classifier, create_model, record_attention
from vitmha.images import ImageBytes, read_image
from vitmha.inference.classifier import Prediction
from vitmha.inference.engines import CALIBRATION_IMAGES
from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import DecoderConfig, EncoderDecoder
from vitmha.models.vit import VisionTransformer
from vitmha.pruning.remove import prune


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 1), (8, 4), (64, 2)])
@pytest.mark.parametrize("reverse", [False, True])
def test_every_prediction_belongs_to_its_file(
    model: VisionTransformer, image_dir: Path, batch_size: int, workers: int, reverse: bool
) -> None:
    files = files_in(image_dir)
    files = files[::-1] if reverse else files
    files = [*files, files[3]]  # named twice
    predictions = list(
        Classifier(model, batch_size=batch_size, num_workers=workers).classify(files, top_k=3, all_probabilities=True)
    )
    assert [prediction.path for prediction in predictions] == files
    for prediction in predictions:
        if prediction.error is not None:
            assert "05 cut" in prediction.path or "11 not an image" in prediction.path
            assert prediction.labels == prediction.probabilities == ()
            continue
        expected = expected_probabilities(model, prediction.path)
        assert_close(prediction.all_probabilities, expected, rtol=0, atol=1e-5)
        best = expected.topk(3)
        assert prediction.labels == tuple(CLASS_NAMES[i] for i in best.indices)
        assert prediction.probabilities == pytest.approx(best.values.tolist(), abs=1e-5)
    assert sum(prediction.error is not None for prediction in predictions) == 2


def test_labels_below_the_threshold_are_omitted(model: VisionTransformer, image_dir: Path) -> None:
    files = files_in(image_dir)[:4]
    whole = list(Classifier(model).classify(files, top_k=7))
    limit = sorted(p for prediction in whole for p in prediction.probabilities)[14]
    for prediction, before in zip(Classifier(model).classify(files, top_k=7, threshold=limit), whole, strict=True):
        kept = sum(p >= limit for p in before.probabilities)
        assert prediction.labels == before.labels[:kept]
        assert len(prediction.probabilities) == kept
    [none] = Classifier(model).classify(files[:1], threshold=1.0)
    assert (none.labels, none.probabilities, none.error) == ((), (), None)


def test_images_arrays_and_bytes_are_classified_like_files(model: VisionTransformer, image_dir: Path) -> None:
    file = image_dir / "03.png"
    image = Image.open(file)
    pixels = pil_to_tensor(read_image(file)).permute(1, 2, 0).numpy()
    content = ImageBytes(file.read_bytes(), "x.tar/a.png")
    wrong = torch.zeros(2, 3, 5).numpy()
    predictions = list(
        Classifier(model).classify([file, str(file), image, pixels, content, wrong], all_probabilities=True)
    )
    for prediction in predictions[1:5]:
        assert_close(prediction.all_probabilities, predictions[0].all_probabilities, rtol=0, atol=1e-6)
    assert [prediction.path for prediction in predictions] == [
        file,
        str(file),
        str(file),
        "ndarray",
        "x.tar/a.png",
        "ndarray",
    ]
    assert predictions[5].error
    assert image.resize((2, 3)).size == (2, 3)  # still open


def test_a_single_image_a_directory_and_a_batch_are_classified(
    model: VisionTransformer, image_dir: Path, tmp_path: Path
) -> None:
    classifier, file = Classifier(model), image_dir / "03.png"
    image = read_image(file)
    pixels = pil_to_tensor(image)
    [expected] = classifier.classify([file], all_probabilities=True)
    singles = [str(file), file, image, pixels, pixels.permute(1, 2, 0).numpy(), pixels / 255, pixels[None] / 255]
    for single in singles:
        [prediction] = classifier(single, all_probabilities=True)
        assert_close(prediction.all_probabilities, expected.all_probabilities, rtol=0, atol=1e-6)
    assert [prediction.path for prediction in classifier(str(image_dir))] == files_in(image_dir)
    batch = torch.stack([pixels, pixels.flip(-1), pixels])
    found = stack_probabilities(classifier(batch, all_probabilities=True))
    assert_close(found[[0, 2]], expected.all_probabilities.expand(2, -1), rtol=0, atol=1e-6)
    assert not torch.equal(found[0], found[1])
    [refused] = classifier(model.preprocessing(image))
    assert refused.path == "Tensor"
    assert "expected [0, 1], or uint8. Do not normalize the image" in refused.error
    assert classifier(singles[:2], 3)[1].labels == expected.labels[:3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"threshold": 50.0}, r"threshold must be in \[0, 1\], got 50.0"),
        ({"embeddings": True}, "require engine 'torch', got 'compile'"),
    ],
)
def test_wrong_options_of_classify_are_refused_before_the_first_image(
    model: VisionTransformer, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Classifier(model, engine="compile").classify([], **options)


def test_tta_hflip_is_the_mean_over_image_and_mirror_image(model: VisionTransformer, image_dir: Path) -> None:
    file = files_in(image_dir)[0]
    [prediction] = Classifier(model, tta="hflip").classify([file], all_probabilities=True, attention=True)
    images = model.preprocessing(read_image(file))[None]
    with torch.no_grad():
        expected = (model(images).softmax(-1) + model(images.flip(-1)).softmax(-1)) / 2
    assert_close(prediction.all_probabilities, expected[0], rtol=0, atol=1e-6)
    [plain] = Classifier(model).classify([file], attention=True)
    assert_close(prediction.attention, plain.attention, rtol=0, atol=1e-6)  # of the image, not of the mirror image


def test_predict_proba_is_differentiable_and_a_classifier_can_be_copied(model: VisionTransformer) -> None:
    classifier = Classifier(model)
    images = torch.randn(3, 3, 24, 40, requires_grad=True)
    probabilities = classifier.predict_proba(images)
    assert_close(probabilities, model(images).softmax(-1))
    probabilities[:, 0].sum().backward()
    assert images.grad.abs().sum() > 0
    for copied in (copy.deepcopy(classifier), pickle.loads(pickle.dumps(classifier))):
        assert torch.equal(copied.predict_proba(images), probabilities)


def test_a_model_in_training_mode_is_evaluated(image_dir: Path) -> None:
    model = classifier_model(attention_dropout=0.5, drop_path=0.5)
    classifier = Classifier(model)
    model.train()
    first, second = (
        stack_probabilities(list(classifier.classify(files_in(image_dir)[:4], all_probabilities=True)))
        for _ in range(2)
    )
    assert_close(first, second, rtol=0, atol=0)


def large_jpeg(file: Path) -> None:
    """Blobs and fine grain, 400 x 300: more than eight times, but not sixteen times what the model sees."""
    coarse = to_pil_image(torch.randint(256, (3, 9, 12), dtype=torch.uint8)).resize(
        (400, 300), Image.Resampling.BICUBIC
    )
    grain = torch.randint(-20, 21, (3, 300, 400))
    to_pil_image((pil_to_tensor(coarse).int() + grain).clamp(0, 255).byte()).save(file, quality=95)


def test_large_jpegs_are_decoded_at_reduced_size_unless_full_decode(model: VisionTransformer, tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    large_jpeg(file)
    [exact] = Classifier(model, full_decode=True).classify([file], all_probabilities=True)
    assert_close(exact.all_probabilities, expected_probabilities(model, str(file)), rtol=0, atol=1e-6)
    classifier = Classifier(model)
    scaled, full = classifier.read(file), Classifier(model, full_decode=True).read(file)
    difference = (scaled.int() - full.int()).abs().float()
    assert 0 < difference.mean() < 1  # of 255
    assert difference.max() < 8
    [prediction] = classifier.classify([file], all_probabilities=True)
    assert_close(prediction.all_probabilities, exact.all_probabilities, rtol=0, atol=0.02)


def test_embeddings_and_attention_equal_those_of_the_model(model: VisionTransformer, image_dir: Path) -> None:
    files = files_in(image_dir)[:5]
    images = torch.stack([model.preprocessing(read_image(file)) for file in files])
    with torch.no_grad(), record_attention(model, layers=[1]) as recorded:
        expected = model.features(images)
        maps = model.layout.to_grid(recorded.maps[0][:, :, 0])
    features = [prediction.embedding for prediction in Classifier(model).classify(files, embeddings=True)]
    assert_close(torch.stack(features), expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        both = (expected + model.features(images.flip(-1))) / 2
    features = [prediction.embedding for prediction in Classifier(model, tta="hflip").classify(files, embeddings=True)]
    assert_close(torch.stack(features), both, rtol=0, atol=1e-5)
    attention = [prediction.attention for prediction in Classifier(model, batch_size=2).classify(files, attention=True)]
    assert attention[0].shape == (3, 3, 5)
    assert_close(torch.stack(attention), maps, rtol=0, atol=1e-5)
    pooled = classifier_model(pool="mean")
    [prediction] = Classifier(pooled).classify(files[:1], attention=True)
    assert_close(prediction.attention.sum((1, 2)), torch.ones(3))
    prune(pooled, {1: range(3)})
    with torch.no_grad(), record_attention(pooled, layers=[0], queries="pooled") as recorded:
        pooled(images[:1])
    [prediction] = Classifier(pooled).classify(files[:1], attention=True)  # the last layer has lost all of its heads
    assert_close(prediction.attention, pooled.layout.to_grid(recorded.maps[0][0, :, 0]), rtol=0, atol=1e-6)


def test_a_model_without_a_head_returns_embeddings(image_dir: Path) -> None:
    classifier = Classifier(classifier_model(num_classes=0))
    [prediction] = classifier.classify(files_in(image_dir)[:1], embeddings=True)
    assert prediction.embedding.shape == (24,)
    with pytest.raises(ValueError, match="has no classification head"):
        list(classifier.classify(files_in(image_dir)[:1]))


@pytest.mark.parametrize("batch_size", [3, 8, 32])
def test_int8_is_calibrated_on_the_same_images_for_every_batch_size(
    batch_size: int, model: VisionTransformer, image_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_in(image_dir) * 3
    readable = [file for file in files if " " not in Path(file).name][:CALIBRATION_IMAGES]
    given: list[torch.Tensor] = []
    monkeypatch.setattr(vitmha.inference.engines, "find_spec", lambda package: package)
    monkeypatch.setattr(
        vitmha.inference.classifier, "to_openvino", lambda model, _, images: given.append(images) or model
    )
    classifier = Classifier(model, engine="openvino", precision="int8", batch_size=batch_size)
    assert len(list(classifier.classify(files))) == 75
    [images] = given
    assert_close(images, torch.stack([model.preprocessing(read_image(file)) for file in readable]), rtol=0, atol=1e-6)


def test_threads_share_a_classifier(model: VisionTransformer, image_dir: Path) -> None:
    files = files_in(image_dir)
    classifier = Classifier(model, batch_size=3)
    expected = stack_probabilities(list(classifier.classify(files, all_probabilities=True)))
    found: dict[int, list[Prediction]] = {}

    def classify(number: int) -> None:
        found[number] = list(classifier.classify(files, all_probabilities=True, attention=number % 2 == 0))

    threads = [threading.Thread(target=classify, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for number, predictions in found.items():
        assert_close(stack_probabilities(predictions), expected, rtol=0, atol=1e-6)
        assert (predictions[0].attention is not None) == (number % 2 == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_names": ["a", "b"]}, "class_names has 2 names, the model has 7 classes"),
        ({"class_names": ["a", "b", "\x1bc", "d", "\x1bc", "f", "g"]}, r"class_names: names 3 and 5 are both \\x1bc;"),
        ({"class_names": ["a", "b", "c", "d", " ", "f", "g"]}, "class_names: name 5 is empty"),
        ({"batch_size": 0}, "must be at least 1, got 0"),
        ({"precision": "int8"}, "precision must be one of float32, bfloat16, float16 for engine 'torch'; got 'int8'"),
        ({"engine": "openvino", "device": "cuda"}, "device must be 'cpu' or 'auto' for engine 'openvino', got 'cuda'"),
    ],
)
def test_wrong_options_are_named(model: VisionTransformer, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Classifier(model, **options)


def test_models_that_cannot_classify_are_refused(model: VisionTransformer) -> None:
    bare = create_model("vit_mini", image_size=8, embed_dim=8, num_heads=2)
    with pytest.raises(ValueError, match="The model has no preprocessing"):
        Classifier(bare)
    config = ViTConfig(image_size=8, num_classes=3, patch_size=4, embed_dim=8, depth=1, num_heads=2)
    with pytest.raises(ValueError, match="is an encoder-decoder"):
        Classifier(EncoderDecoder(config, DecoderConfig(max_length=3, depth=1, num_heads=2)))
    with pytest.raises(ValueError, match="require engine 'torch', got 'compile'"):
        list(Classifier(model, engine="compile").classify([], embeddings=True))
    with pytest.raises(ValueError, match="nowhere: no such file or directory"):
        Classifier("nowhere")


def test_half_precision_is_close(model: VisionTransformer, image_dir: Path) -> None:
    files = files_in(image_dir)
    expected = stack_probabilities(list(Classifier(model).classify(files, all_probabilities=True)))
    halves = stack_probabilities(list(Classifier(model, precision="bfloat16").classify(files, all_probabilities=True)))
    assert_close(halves, expected, rtol=0, atol=0.05)
    assert not torch.equal(halves, expected)


@pytest.mark.parametrize(
    ("engine", "precision"),
    [
        pytest.param("openvino", "float32", id="openvino"),
        pytest.param("openvino", "int8", id="int8"),
        pytest.param("compile", "float32", id="compiled", marks=pytest.mark.ci),
    ],
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_engines_agree(model: VisionTransformer, image_dir: Path, engine: str, precision: str) -> None:
    if engine == "openvino":
        pytest.importorskip("openvino")
        pytest.importorskip("nncf")
    files = files_in(image_dir)
    expected = stack_probabilities(list(Classifier(model).classify(files, all_probabilities=True)))
    classifier = Classifier(model, engine=engine, precision=precision, batch_size=8)
    if precision == "int8":  # the batches change nothing, not even what it is calibrated on
        files, expected = files * 3, expected.repeat(3, 1)
        other = Classifier(model, engine=engine, precision=precision, batch_size=3)
        one, two = (
            stack_probabilities(list(each.classify(files, all_probabilities=True))) for each in (classifier, other)
        )
        assert_close(one, two, rtol=0, atol=1e-5)
    for _ in range(2):
        predictions = list(classifier.classify(files, all_probabilities=True))
        assert [prediction.path for prediction in predictions] == files
        found = stack_probabilities(predictions)
        if precision == "int8":
            assert (found.argmax(1) == expected.argmax(1)).float().mean() > 0.8  # so small a model has no room to spare
        else:
            assert_close(found, expected, rtol=0, atol=1e-5)
