"""Rows of images and the sequences of their classes."""

import pytest
import torch
from builders import assert_equal

from vitmha.data import FashionMNISTMini, FashionMNISTSequences
from vitmha.data.sequences import compose_sequences


def test_rows_show_the_images_of_their_sequence_from_left_to_right() -> None:
    images = torch.arange(1, 8, dtype=torch.uint8)[:, None, None, None].expand(7, 1, 2, 3)
    labels = torch.tensor([0, 1, 2, 3, 2, 1, 0])
    rows, sequences = compose_sequences(images, labels, 500, 4, torch.Generator().manual_seed(0))
    assert rows.shape == (500, 1, 2, 15)
    assert sequences.shape == (500, 6)
    lengths = []
    for row, sequence in zip(rows[:, 0], sequences.tolist(), strict=True):
        slots = [slot.unique().tolist() for slot in row.split(3, dim=1)]
        assert all(len(values) == 1 for values in slots)
        classes = [labels[value - 1].item() for [value] in slots if value]
        assert sequence == [*classes, 4, *[-100] * (5 - len(classes))]
        lengths.append(len(classes))
    counts = torch.tensor(lengths).bincount()
    assert counts[0] == 0
    assert counts[1:].min() > 70
    empty = (rows[:, 0, 0, ::3] == 0).float().mean(0)
    assert empty.min() > 0.3  # every slot is empty equally often: 2 of 5 on average
    assert empty.max() < 0.5


def test_the_same_seed_composes_the_same_rows() -> None:
    images, labels = torch.randint(256, (9, 1, 2, 2), dtype=torch.uint8), torch.arange(9)
    first, same, other = (
        compose_sequences(images, labels, 5, 9, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert_equal(first[0], same[0])
    assert_equal(first[1], same[1])
    assert not torch.equal(first[0], other[0])


def test_training_and_test_rows_are_normalized_and_composed_of_different_images() -> None:
    data = FashionMNISTSequences(batch_size=7, num_sequences=70)
    data.setup("fit")
    assert (data.num_classes, data.image_size, data.in_channels) == (10, (28, 140), 1)
    batches = list(data.train_dataloader())
    assert len(batches) == 10
    images, sequences = batches[0]
    assert images.shape == (7, 1, 28, 140)
    assert sequences.shape == (7, 6)
    sources = {train: set(map(bytes, FashionMNISTMini().read(train)[0].numpy())) for train in (True, False)}
    for train in (True, False):
        rows, _ = data.read(train)
        assert len(rows) == (70 if train else 7)
        slots = {bytes(slot.numpy()) for row in rows for slot in row.split(28, dim=2) if slot.any()}
        assert slots <= sources[train]
    rows, sequences = data.read(train=False)
    validated, labels = next(iter(data.val_dataloader()))
    assert_equal(validated, data.preprocessing.normalize(rows))
    assert_equal(labels, sequences)


def test_too_few_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^num_sequences must be at least 10, got 9"):
        FashionMNISTSequences(num_sequences=9)
