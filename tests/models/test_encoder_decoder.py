"""The decoder against PyTorch's layer, and beam search against exhaustive search."""

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from vitmha.attention import KVCache
from vitmha.metrics import is_correct
from vitmha.models.config import ViTConfig
from vitmha.models.encoder_decoder import BlockCache, DecoderBlock, DecoderConfig, EncoderDecoder
from vitmha.weights.load import load_model
from vitmha.weights.save import save_model

assert_equal = partial(assert_close, rtol=0, atol=0)


def small_model(
    num_classes: int = 3, max_length: int = 4, num_kv_heads: int | None = 1, pool: str = "mean"
) -> EncoderDecoder:
    """A small model for images of 6 x 10 pixels whose tokens depend on the image and on all tokens before them."""
    config = ViTConfig(
        image_size=(6, 10),
        in_channels=1,
        num_classes=num_classes,
        patch_size=2,
        embed_dim=12,
        depth=1,
        num_heads=3,
        mlp_dim=7,
        pool=pool,
    )
    decoder = DecoderConfig(max_length=max_length, depth=2, num_heads=2, num_kv_heads=num_kv_heads, mlp_dim=5)
    model = EncoderDecoder(config, decoder).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    nn.init.normal_(model.head.weight, std=0.25)  # similar enough for beams to overtake each other
    nn.init.zeros_(model.head.bias)
    nn.init.constant_(model.head.bias[-1:], -1.5)  # else the shortest sequence is always the most likely
    return model


def test_a_block_equals_the_decoder_layer_of_pytorch_in_output_and_gradients() -> None:
    block = DecoderBlock(12, 3, mlp_dim=7).double()
    reference = nn.TransformerDecoderLayer(
        12, 3, 7, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
    ).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        for attention, target in ((block.self_attn, reference.self_attn), (block.cross_attn, reference.multihead_attn)):
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            target.in_proj_weight.copy_(torch.cat([layer.weight for layer in projections]))
            target.in_proj_bias.copy_(torch.cat([layer.bias for layer in projections]))
            target.out_proj.load_state_dict(attention.out_proj.state_dict())
        for layer, target in (
            *((getattr(block, f"norm{i}"), getattr(reference, f"norm{i}")) for i in (1, 2, 3)),
            (block.mlp.fc1, reference.linear1),
            (block.mlp.fc2, reference.linear2),
        ):
            target.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    y, expected = block(x, memory), reference(x, memory, tgt_mask=causal)
    assert_close(y, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(y)
    grads, expected_grads = (torch.autograd.grad((out * weight).sum(), (x, memory)) for out in (y, expected))
    assert_close(grads, expected_grads, rtol=0, atol=1e-12)


def test_a_block_attends_to_a_memory_of_another_width() -> None:
    assert DecoderBlock(12, 3, memory_dim=11)(torch.randn(2, 5, 12), torch.randn(2, 7, 11)).shape == (2, 5, 12)


@pytest.mark.parametrize("chunks", [[1, 1, 1, 1, 1], [2, 3], [1, 4]])
def test_decoding_with_a_cache_equals_one_pass(chunks: list[int]) -> None:
    model = small_model(max_length=5)
    tokens, memory = torch.randint(4, (2, 5)), torch.randn(2, 17, 12)
    caches = model.new_caches(17)
    with torch.no_grad():
        pieces = [model.decode(piece, memory, caches) for piece in tokens.split(chunks, dim=1)]
    assert_close(torch.cat(pieces, dim=1), model.decode(tokens, memory), rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_layer_without_heads_still_counts_the_cached_tokens(num_beams: int) -> None:
    model = small_model(max_length=5)
    model.blocks[0].self_attn.prune_heads(range(model.blocks[0].self_attn.num_heads))
    model.blocks[1].cross_attn.prune_heads(range(model.blocks[1].cross_attn.num_heads))
    images = torch.randn(2, 1, 6, 10)
    sequences, scores = model.generate(images, num_beams=num_beams)
    for image, sequence, score in zip(images, sequences, scores, strict=True):
        assert log_probabilities(model, image[None])[tuple(sequence.tolist())] == pytest.approx(float(score), abs=1e-4)


def test_the_image_is_projected_once_per_sequence() -> None:
    model = small_model()
    calls = []
    model.blocks[0].cross_attn.k_proj.register_forward_hook(lambda *_: calls.append(1))
    model.generate(torch.randn(2, 1, 6, 10), num_beams=2)
    assert len(calls) == 1


def test_caches_have_the_bytes_of_their_heads() -> None:
    model = small_model(max_length=5, num_kv_heads=1)
    caches = model.new_caches(15)
    model.decode(torch.zeros(2, 1, dtype=torch.int64), torch.randn(2, 15, 12), caches)
    # keys and values, 2 sequences, 1 head of 6 channels, 4 bytes
    assert [(cache.tokens.nbytes, cache.memory.nbytes) for cache in caches] == [
        (2 * 2 * 5 * 6 * 4, 2 * 2 * 15 * 6 * 4)
    ] * 2


def log_probabilities(model: EncoderDecoder, image: Tensor) -> dict[tuple[int, ...], float]:
    """The log-probability of every possible sequence, computed without a cache."""
    end, length = model.end_token, model.decoder.max_length
    ended = [(*start, *[end] * (length - n)) for n in range(length) for start in product(range(end), repeat=n)]
    sequences = torch.tensor([*ended, *product(range(end), repeat=length)])
    with torch.no_grad():
        logits = model(image.expand(len(sequences), -1, -1, -1), sequences).double().log_softmax(-1)
    steps = logits.gather(2, sequences[..., None])[..., 0]
    is_counted = (sequences == end).cumsum(1) - (sequences == end).int() == 0  # up to the first end
    scores = (steps * is_counted).sum(1)
    return {tuple(s): score for s, score in zip(sequences.tolist(), scores.tolist(), strict=True)}


def test_the_probabilities_of_all_sequences_sum_to_one() -> None:
    scores = log_probabilities(small_model(), torch.randn(1, 6, 10))
    assert sum(torch.tensor(list(scores.values())).exp()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_enough_beams_find_the_most_likely_of_all_sequences(seed: int) -> None:
    torch.manual_seed(seed)
    model, images = small_model(), torch.randn(2, 1, 6, 10)
    sequences, scores = model.generate(images, num_beams=4**4)
    for image, sequence, score in zip(images, sequences, scores, strict=True):
        known = log_probabilities(model, image)
        best = max(known, key=lambda s: known[s])
        assert tuple(sequence.tolist()) == best
        assert score.item() == pytest.approx(known[best], abs=1e-5)


def beam_search_by_hand(model: EncoderDecoder, image: Tensor, num_beams: int) -> tuple[list[int], float]:
    """Beam search in plain lists that recomputes the full sequence in each step."""
    end, beams = model.end_token, [([], 0.0)]
    for position in range(model.decoder.max_length):
        grown = []
        for sequence, score in beams:
            if end in sequence:
                grown.append(([*sequence, end], score))
                continue
            known = torch.tensor([[*sequence, end]])
            with torch.no_grad():
                steps = model(image[None], known)[0, position].log_softmax(-1)
            grown += [([*sequence, token], score + step) for token, step in enumerate(steps.tolist())]
        beams = sorted(grown, key=lambda beam: -beam[1])[:num_beams]
    return beams[0]


def differs(model: EncoderDecoder, images: Tensor, num_beams: int) -> bool:
    """Whether the search finds different sequences for different images, and others than greedy search."""
    sequences = model.generate(images, num_beams)[0]
    is_greedy = num_beams > 1 and torch.equal(sequences, model.generate(images)[0])
    return len({tuple(sequence.tolist()) for sequence in sequences}) > 1 and not is_greedy


@pytest.mark.parametrize("num_beams", [1, 2, 3, 7])
def test_search_equals_the_same_search_without_cache_and_batch(num_beams: int) -> None:
    images = torch.randn(7, 1, 6, 10)
    models = (small_model(num_classes=5, max_length=6) for _ in range(50))
    model = next(model for model in models if differs(model, images, num_beams))
    sequences, scores = model.generate(images, num_beams)
    for image, sequence, score in zip(images, sequences, scores, strict=True):
        by_hand, expected = beam_search_by_hand(model, image, num_beams)
        assert sequence.tolist() == by_hand
        assert score.item() == pytest.approx(expected, abs=1e-4)


def test_more_beams_than_sequences_change_nothing_and_zero_beams_are_rejected() -> None:
    model, images = small_model(), torch.randn(2, 1, 6, 10)
    assert_equal(model.generate(images, 300), model.generate(images, 256))
    with pytest.raises(ValueError, match="num_beams must be at least 1, got 0"):
        model.generate(images, 0)


def test_correct_at_every_position_means_greedy_search_finds_the_sequence() -> None:
    model = small_model(num_classes=4, max_length=4)
    images, end = torch.randn(40, 1, 6, 10), 4
    written, _ = model.generate(images)
    known = written.clone()
    known[::2, 0] = torch.randint(4, (20,))
    known[::3, 1] = torch.randint(5, (14,))
    is_end = known == end
    known[is_end.cumsum(1) - is_end.int() > 0] = -100
    is_found = ((written == known) | (known < 0)).all(1)
    assert_equal(is_correct(model(images, known), known), is_found.float())
    assert 10 < is_found.sum() < 30


def test_padding_after_the_end_token_changes_nothing_before_it() -> None:
    model, images = small_model(), torch.randn(2, 1, 6, 10)
    padded, other = torch.tensor([[1, 3, -100, -100], [0, 2, 3, -100]]), torch.tensor([[1, 3, 2, 0], [0, 2, 3, 1]])
    for row, length in ((0, 2), (1, 3)):
        assert_equal(model(images, padded)[row, :length], model(images, other)[row, :length])


@pytest.mark.parametrize("pool", ["cls", "mean", "attention"])
def test_gradients_reach_every_parameter(pool: str) -> None:
    model = small_model(pool=pool)
    model(torch.randn(3, 1, 6, 10), torch.randint(3, (3, 4))).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_a_saved_model_generates_the_same(tmp_path: Path) -> None:
    model = small_model()
    model.class_names = ("hat", "shoe", "bag")
    model.blocks[1].cross_attn.prune_heads([1])
    save_model(model, tmp_path)
    loaded, images = load_model(tmp_path), torch.randn(5, 1, 6, 10)
    assert_equal(loaded.generate(images, 2), model.generate(images, 2))
    assert loaded.decode_labels(torch.tensor([2, 0, 3, 3])) == ["bag", "hat"]
    assert small_model().decode_labels(torch.tensor([2, 0, 1, 1])) == ["2", "0", "1", "1"]


def test_sequences_beyond_max_length_and_invalid_depth_are_rejected() -> None:
    model, memory = small_model(max_length=4), torch.randn(2, 15, 12)
    with pytest.raises(ValueError, match="tokens must have at most max_length 4 tokens, got 5"):
        model.decode(torch.zeros(2, 5, dtype=torch.int64), memory)
    caches = model.new_caches(15)
    model.decode(torch.zeros(2, 3, dtype=torch.int64), memory, caches)
    with pytest.raises(ValueError, match="tokens must have at most max_length 4 tokens, got 5"):
        model.decode(torch.zeros(2, 2, dtype=torch.int64), memory, caches)
    with pytest.raises(ValueError, match="depth of the decoder must be at least 1, got 0"):
        DecoderConfig(max_length=4, depth=0)


def test_a_full_cache_of_a_block_is_rejected() -> None:
    block, memory = DecoderBlock(12, 3), torch.randn(2, 7, 12)
    cache = BlockCache(KVCache(2), KVCache(7))
    with torch.no_grad():
        block(torch.randn(2, 2, 12), memory, cache)
        with pytest.raises(ValueError, match="max_tokens 2 is too small: the cache holds 2 tokens and the call adds 1"):
            block(torch.randn(2, 1, 12), memory, cache)
