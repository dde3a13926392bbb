"""Global batches: which process reads which samples, in which order."""

import logging
from itertools import chain

import pytest
import torch

from vitmha.data.sampling import GlobalBatchSampler


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_evaluation_reads_each_sample_once(world_size: int) -> None:
    parts = [GlobalBatchSampler(21, 4, training=False, rank=rank, world_size=world_size) for rank in range(world_size)]
    read = [list(part) for part in parts]
    assert {len(part) for part in parts} == {len(batches) for batches in read} == {-(-21 // (4 * world_size))}
    steps = zip(*read, strict=True)
    assert list(chain.from_iterable(chain(*steps))) == list(range(21))
    assert max(len(batch) for batches in read for batch in batches) <= 4


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_processes_read_slices_of_the_global_batches_of_one(world_size: int) -> None:
    single = GlobalBatchSampler(53, 6, training=True, seed=5)
    parts = [
        GlobalBatchSampler(53, 6 // world_size, training=True, seed=5, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for epoch in (0, 4):
        for sampler in (single, *parts):
            sampler.set_epoch(epoch)
        together = [list(chain(*slices)) for slices in zip(*parts, strict=True)]
        assert together == list(single)
        assert len(together) == 8
        assert len({index for batch in together for index in batch}) == 48


def test_the_order_depends_only_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        sampler = GlobalBatchSampler(40, 4, training=True, seed=seed)
        sampler.set_epoch(epoch)
        torch.rand(3)
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    assert len({str(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize(("batch_size", "repeated_aug", "distinct"), [(12, 3, 4), (8, 3, 3), (5, 1, 5), (4, 9, 1)])
def test_the_copies_of_a_sample_are_in_one_global_batch(batch_size: int, repeated_aug: int, distinct: int) -> None:
    single = list(GlobalBatchSampler(53, batch_size, training=True, repeated_aug=repeated_aug))
    assert len(single) == 53 // batch_size
    for batch in single:
        assert len(batch) == batch_size
        assert len(set(batch)) == distinct
        assert batch == (batch[:distinct] * repeated_aug)[:batch_size]
    assert len(set(chain.from_iterable(single))) == distinct * len(single)
    if batch_size % 2 == 0:
        parts = [
            GlobalBatchSampler(53, batch_size // 2, training=True, rank=rank, world_size=2, repeated_aug=repeated_aug)
            for rank in (0, 1)
        ]
        assert [first + second for first, second in zip(*parts, strict=True)] == single


def test_a_batch_larger_than_the_training_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^batch_size 12 on 2 processes takes 24 .*, but the training set has 21"):
        GlobalBatchSampler(21, 12, training=True, world_size=2)
    with pytest.raises(ValueError, match=r"^batch_size must be at least 1, got 0"):
        GlobalBatchSampler(21, 0, training=False)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(30, None), (34, "5 steps per epoch; 4 of 34 images are skipped each epoch (incomplete last batch).")],
)
def test_images_skipped_by_an_incomplete_last_batch_are_counted(
    samples: int, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        GlobalBatchSampler(samples, 6, training=True)
        GlobalBatchSampler(samples, 6, training=False)
    assert [record.getMessage() for record in caplog.records] == ([expected] if expected else [])


def test_the_position_is_that_of_the_last_batch_yielded_in_this_epoch() -> None:
    sampler = GlobalBatchSampler(40, 4, training=True)
    sampler.load_state_dict({"epoch": 2, "start": 7})
    assert sampler.state_dict() == {"epoch": 2, "start": 7}
    assert len(list(sampler)) == 3
    sampler.set_epoch(2)
    assert sampler.state_dict() == {"epoch": 2, "start": 7}
    sampler.set_epoch(3)
    assert sampler.state_dict() == {"epoch": 3, "start": 0}
    assert len(list(sampler)) == 10
