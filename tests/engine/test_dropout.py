"""Dropout masks: the right rate, and keyed by what they are for, whoever draws them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.kernels.dropout import philox
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.rng import Dropout, DropoutMask

CPU = torch.device("cpu")


@pytest.mark.parametrize("probability", [0.0, 2**-16, 0.1, 0.25, 0.5, 0.9])
def test_the_rate_is_the_probability_and_the_mean_stays(probability: float) -> None:
    dropout, exact = Dropout(probability, 1, 0, (0, 1)), round(probability * 2**16) / 2**16
    keep = dropout.mask("here").keep(2000, 1000, CPU)
    deviation = math.sqrt(exact * (1 - exact) / keep.numel())
    assert keep.double().mean().item() == pytest.approx(1 - exact, abs=5 * deviation)
    scale = dropout.mask("here").factors(2000, 1000, CPU, torch.float64)
    assert scale.unique().tolist() == pytest.approx(
        [0.0, 1 / (1 - probability)][probability == 0 :]
    )
    assert scale.mean().item() == pytest.approx(1.0, abs=5 * deviation / (1 - probability) + 1e-4)


@given(
    samples=st.lists(st.integers(0, 511), min_size=1, max_size=5, unique=True),
    shape=st.tuples(*[st.integers(1, 49)] * 2),
)
def test_a_mask_belongs_to_its_place(samples: list[int], shape: tuple[int, int]) -> None:
    """However a batch is cut into microbatches, a sequence has the same mask."""
    together = Dropout(0.4, 5, 9, tuple(samples)).mask("here").keep(*shape, CPU)
    assert together.shape == (len(samples), *shape)
    for row, sample in zip(together, samples, strict=True):
        assert torch.equal(row, Dropout(0.4, 5, 9, (sample,)).mask("here").keep(*shape, CPU)[0])


def test_a_part_of_the_rows_is_cut_from_the_whole() -> None:
    dropout = Dropout(0.4, 5, 9, (3, 4))
    whole = dropout.mask("here").keep(12, 150, CPU)
    assert torch.equal(dropout.mask("here", first_row=5).keep(7, 150, CPU), whole[:, 5:])


def test_keys_of_every_site_go_to_a_device_together() -> None:
    """Of the sites that were asked for before; a mask's bits are those of its own keys."""
    rows: dict[str, int] = {}
    for iteration in range(2):
        alone = Dropout(0.4, 5, iteration, (3, 4))
        placed = alone.on_device(CPU, rows)
        for site in ("here", "there"):
            mask = placed.mask(site)
            assert isinstance(mask.keys, torch.Tensor) == (iteration > 0)
            assert torch.equal(mask.keep(6, 150, CPU), alone.mask(site).keep(6, 150, CPU))
    assert rows == {"here": 0, "there": 1}


def test_random_bits_are_those_of_philox() -> None:
    """Known answers of Random123 (`kat_vectors`, philox 4×32-10)."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert [word.item() for word in philox(zero, zero, 0)] == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]


def test_every_part_of_the_key_counts() -> None:
    masks = [
        Dropout(0.5, seed, iteration, (sample,)).mask(site).keep(64, 64, CPU)
        for seed, iteration, sample, site in (
            (1, 0, 0, "a"),
            (2, 0, 0, "a"),
            (1, 1, 0, "a"),
            (1, 0, 1, "a"),
            (1, 0, 0, "b"),
            (1, 10, 0, "a"),
            (11, 0, 0, "a"),
        )
    ]
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert 0.4 < (first == second).double().mean() < 0.6


def test_every_site_drops() -> None:
    config = ModelConfig(
        num_layers=1,
        hidden_size=16,
        num_heads=4,
        seq_length=8,
        vocab_size=30,
        padded_vocab_size=32,
        dropout=0.1,
    )
    model = GPT2(config, serial_mesh()).double()
    model.initialize(1)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    seen: list[str] = []

    class Recording(Dropout):
        def mask(self, site: str, first_row: int = 0) -> DropoutMask:
            seen.append(site)
            return super().mask(site, first_row)

    model(tokens, Recording(0.1, 1, 0, (0,)))
    # Embedding, attention weights, attention output, MLP output.
    assert len(seen) == len(set(seen)) == 4
