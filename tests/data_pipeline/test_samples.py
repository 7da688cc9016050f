"""Samples and their order are Megatron-LM's, for one token file and for a blend; a sample is shown
as trained on."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_repro.data_pipeline.tokens.samples import (
    BlendedSamples,
    PackedSamples,
    blending_indices,
    build_sample_index,
    normalized,
)
from mlm_repro.data_pipeline.tokens.token_file import TokenFile, TokenFileWriter, token_dtype


def write_file(prefix: Path, sizes: list[int], first: int = 0) -> TokenFile:
    """A token file whose tokens count up from `first`."""
    with TokenFileWriter(prefix, token_dtype(100)) as writer:
        writer.add_documents(np.arange(first, first + sum(sizes)), sizes)
    return TokenFile(prefix)


WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=9)


@given(weights=WEIGHTS, size=st.integers(0, 400))
@pytest.mark.filterwarnings("ignore")
def test_blend_equals_megatron_core(weights: list[float], size: int) -> None:
    from megatron.core.datasets.helpers_cpp import build_blending_indices

    shares = normalized(weights)
    datasets, numbers = np.empty(size, np.int16), np.empty(size, np.int64)
    build_blending_indices(datasets, numbers, normalized(shares), len(weights), size, False)
    ours = blending_indices(shares, size)
    assert np.array_equal(ours[0], datasets)
    assert np.array_equal(ours[1], numbers)


@given(
    sizes=st.lists(st.integers(1, 12), min_size=3, max_size=20),
    num_samples=st.integers(1, 60),
    seq_length=st.integers(1, 6),
)
@pytest.mark.filterwarnings("ignore")
def test_sample_index_equals_megatron_core(
    sizes: list[int], num_samples: int, seq_length: int
) -> None:
    from megatron.core.datasets.helpers import build_sample_idx

    array = np.array(sizes, dtype=np.int32)
    if array.sum() <= seq_length:
        return
    index = build_sample_index(array, num_samples, seq_length, seed=5)
    epochs = len(index.documents) // len(sizes)
    theirs = build_sample_idx(array, index.documents, seq_length, epochs, int(array.sum()), True, 1)
    tokens = np.concatenate([[0], np.cumsum(array[index.documents])])
    starts = [tokens[position] + offset for position, offset in index.samples.tolist()]
    assert starts == [tokens[position] + offset for position, offset in theirs.tolist()]


@settings(max_examples=50)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=2, max_size=4), num_samples=st.integers(1, 40)
)
def test_a_blend_draws_from_each_in_its_own_order(
    weights: list[float], num_samples: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("blend")
    files = [write_file(folder / str(part), [7, 2, 9], 100 * part) for part in range(len(weights))]
    blend = BlendedSamples(list(zip(files, weights, strict=True)), num_samples, 3, seed=2)
    seen = [blend.sample(number) for number in range(num_samples)]
    datasets = [int(tokens[0]) // 100 for tokens in seen]
    for part, share in enumerate(normalized(weights)):
        count = datasets.count(part)
        assert abs(count - share * num_samples) <= len(weights)
        alone = PackedSamples(
            files[part], max(int(np.ceil(num_samples * share * 1.005)), count), 3, seed=2
        )
        own = [
            tokens.tolist()
            for tokens, dataset in zip(seen, datasets, strict=True)
            if dataset == part
        ]
        assert own == [alone.sample(number).tolist() for number in range(count)]


@pytest.fixture
def _one_rank() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [1.0, 7.0, 3.0]])
def test_every_sample_is_megatrons(weights: list[float], tmp_path: Path) -> None:
    random, seq_length, count = np.random.RandomState(0), 16, 200
    prefixes = [tmp_path / str(part) for part in range(len(weights))]
    for prefix in prefixes:
        sizes = random.randint(1, 40, 60)
        with TokenFileWriter(prefix, token_dtype(1000)) as writer:
            writer.add_documents(random.randint(0, 1000, sizes.sum()), sizes)
    assert_samples_are_megatrons(
        [*zip(prefixes, weights, strict=True)], count, seq_length, tmp_path / "cache"
    )


def assert_samples_are_megatrons(
    blend: list[tuple[Path, float]],
    count: int,
    seq_length: int,
    cache: Path,
    vocab_size: int = 1000,
) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    tokenizer = SimpleNamespace(eod=0, pad=None, vocab_size=vocab_size, unique_identifiers={})
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=seq_length,
        blend=([str(each) for each, _ in blend], [w for _, w in blend]),
        split="1,0,0",
        path_to_cache=str(cache),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=tokenizer,
    )
    theirs = BlendedMegatronDatasetBuilder(GPTDataset, [count, 0, 0], lambda: True, config).build()[
        0
    ]
    ours = BlendedSamples(
        [(TokenFile(prefix), weight) for prefix, weight in blend], count, seq_length, 1234
    )
    for number in range(count):
        item = theirs[number]
        assert [*item["tokens"].tolist(), int(item["labels"][-1])] == ours.sample(number).tolist()
