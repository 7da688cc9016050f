"""A blend of token files is megatron-core's, sample for sample."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed

from data_pipeline.tokens.samples import BlendedSamples
from data_pipeline.tokens.token_file import TokenFile, TokenFileWriter, token_dtype


@pytest.fixture
def _one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [1.0, 7.0, 3.0]])
def test_every_sample_is_megatrons(weights: list[float], tmp_path: Path) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    random, seq_length, count = np.random.RandomState(0), 16, 200
    prefixes = [tmp_path / str(part) for part in range(len(weights))]
    for prefix in prefixes:
        sizes = random.randint(1, 40, 60)
        with TokenFileWriter(prefix, token_dtype(1000)) as writer:
            writer.add_documents(random.randint(0, 1000, sizes.sum()), sizes)
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=seq_length, blend=([str(prefix) for prefix in prefixes], weights),
        split="1,0,0", path_to_cache=str(tmp_path / "cache"), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, tokenizer=SimpleNamespace(eod=0, pad=None, vocab_size=1000, unique_identifiers={}),
    )  # fmt: skip
    theirs = BlendedMegatronDatasetBuilder(GPTDataset, [count, 0, 0], lambda: True, config).build()[0]
    ours = BlendedSamples(
        [(TokenFile(prefix), weight) for prefix, weight in zip(prefixes, weights, strict=True)], count, seq_length, 1234
    )
    for number in range(count):
        item = theirs[number]
        assert [*item["tokens"].tolist(), int(item["labels"][-1])] == ours.sample(number).tolist()
