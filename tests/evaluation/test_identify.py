"""`mlm-eval identify`: our protocols' numbers on published tests are named, and else it says
none."""

import shutil
from pathlib import Path

import pytest

from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS
from tests.evaluation.conftest import Evaluated, pass_for_published
from tests.made_data import wikitext

MEGATRON, PER_WORD = (
    {"text": "detokenised", "documents": "one text"},
    {"average": "original tokens"},
)
PLANTED: dict[str, tuple[str, dict[str, str]]] = {
    "wikitext103": ("perplexity", MEGATRON | PER_WORD | {"windows": "a 32nd apart"}),
    "wikitext103-stride512": (
        "perplexity",
        MEGATRON | PER_WORD | {"windows": "overlapping by half"},
    ),
    "wikitext103-stride1024": (
        "subword_perplexity",
        MEGATRON | {"windows": "disjoint", "average": "sub-words"},
    ),
    "wikitext103-raw": (
        "bits_per_byte",
        {"text": "as it stands", "windows": "a 32nd apart", "average": "bytes"},
    ),
    "wikitext103-lm-eval": ("perplexity", {"documents": "separate", "average": "lm-eval words"}),
    "wikitext103-huggingface": ("perplexity", {"text": "rows joined by blank lines"}),
    "lambada": ("perplexity", {"target": "the last word", "average": "targets"}),
    "lambada-lm-eval": (
        "perplexity",
        {"target": "what follows the last space", "average": "targets"},
    ),
    "lambada-last-token": ("perplexity", {"target": "the last sub-word"}),
}
"""Protocol of ours, its number, what is to be named."""


@pytest.fixture
def two_articles(made_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two articles that pass for WikiText-103's test file."""
    shutil.copytree(made_data, tmp_path / "data")
    (tmp_path / "data" / TEST_SETS["wikitext103"].place).write_bytes(wikitext(2, seed=1).encode())
    pass_for_published(tmp_path / "data", monkeypatch)


@pytest.mark.usefixtures("two_articles")
def test_our_protocols_are_named(oracle: Path, evaluated: Evaluated) -> None:
    for protocol, (quantity, axes) in PLANTED.items():
        claimed = f"{evaluated(protocol, '--ckpt', oracle / 'model')[quantity]:.6g}"
        task = protocol.partition("-")[0]
        words = ("identify", "--ckpt", oracle / "model", "--task", task, "--claimed")
        found = evaluated(*words, claimed)
        assert any(axes.items() <= match.items() for match in found["matches"]), (protocol, found)
        off = evaluated(
            "identify",
            "--ckpt",
            oracle / "model",
            "--claimed",
            f"{float(claimed) * 1.31:.6g}",
            "--task",
            task,
        )
        assert not any(axes.items() <= match.items() for match in off["matches"])
        assert len(off["nearest"]) == 3


@pytest.mark.usefixtures("two_articles")
@pytest.mark.parametrize("protocol", ["lambada", "wikitext103-stride1024"])
def test_what_a_tokenizer_puts_before_a_text_is_named(
    protocol: str, tmp_path: Path, evaluated: Evaluated
) -> None:
    pytest.importorskip("transformers")
    from tests.evaluation.test_pretrained import made

    directory = made(tmp_path / "model", "LlamaConfig")
    claimed = f"{evaluated(protocol, '--ckpt', directory, '--limit', 10**6)['perplexity']:.7g}"
    words = (
        "identify",
        "--ckpt",
        directory,
        "--task",
        protocol.partition("-")[0],
        "--claimed",
        claimed,
    )
    found = evaluated(*words)["matches"]
    assert any(
        match["first"] == "scored after what the tokenizer puts before a text" for match in found
    )
