"""Models, a tokenizer and checkpoints small enough to compute by hand or in a moment."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mlm_repro.data_pipeline.files import DataCard, Split, TokenizerFacts, dataset_digest
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.engine.checkpoint.checkpoint import TrainingState, save_checkpoint
from mlm_repro.engine.config import DataSection, ModelConfig, RunConfig, TwinScale
from mlm_repro.engine.model.gpt2 import GPT2
from mlm_repro.engine.optim.adam import FlatAdamW
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.parallel.sharding import sharded_parameters
from mlm_repro.evaluation.protocol import Request, Scores
from mlm_repro.evaluation.scoring.scores import ScoringModel
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.files import write_document
from mlm_repro.lineage.run import RunDirectory

SENTENCE = (
    "the cat sat on a mat and saw another dog run over green hills while old rivers slept below"
)
WORDS = SENTENCE.split()


class Bigram:
    """Logits that depend on the last token only: row `token` of a table [vocabulary, padded
    vocabulary]."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, tokens: Tensor) -> Tensor:
        return F.one_hot(tokens.T, len(self.table)).to(self.table.dtype)

    def hidden_states_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return F.one_hot(tokens.gather(1, positions).T, len(self.table)).to(self.table.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.table


class Bytes:
    """A tokenizer whose sub-words are bytes."""

    vocab_size = 256
    end_of_text = document_start = 0
    first_tokens = ()
    digest = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]


def scoring_model(
    network: GPT2 | Bigram, vocab_size: int, seq_length: int = 32, hidden_size: int = 32
) -> ScoringModel:
    return ScoringModel(network, vocab_size, seq_length, hidden_size, torch.float32)  # type: ignore[arg-type]


def made_up_scores(
    requests: Sequence[Request], nll_per_token: float, greedy: Sequence[bool]
) -> Scores:
    """Scores in which every token costs the same and all tokens of a request are right or wrong as
    given."""
    counts = np.array([request.num_scored for request in requests])
    right = np.repeat(np.array(greedy), counts)
    return Scores(np.full(counts.sum(), -nll_per_token), right, right, counts)


def tiny_config(vocab_size: int = 61, seq_length: int = 32) -> ModelConfig:
    return ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        seq_length=seq_length,
        vocab_size=vocab_size,
        padded_vocab_size=-(-vocab_size // 64) * 64,
        init_std=0.3,
    )


def tiny_gpt2(config: ModelConfig, seed: int = 7) -> GPT2:
    """An untrained GPT-2 with weights large enough that position and context matter."""
    model = GPT2(config, serial_mesh("cpu")).eval()
    model.initialize(seed)
    return model


def sentences(count: int) -> list[str]:
    """Documents of 30 to 129 words."""
    return [
        " ".join(WORDS[(i * i + j * (i + 3)) % len(WORDS)] for j in range(30 + i % 100))
        for i in range(count)
    ]


def write_dataset(directory: Path) -> str:
    """A sealed dataset directory with a tokenizer and validation documents; its digest."""
    documents = sentences(40)
    (directory / "documents").mkdir(parents=True)
    lines = (json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(documents))
    (directory / "documents" / "valid.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer = Tokenizer.train(documents, 300)
    tokenizer.save(directory / "tokenizer")
    card = DataCard(
        name="words",
        source="made",
        seed=1,
        vocab_size=300,
        padded_vocab_size=320,
        tokenizer=TokenizerFacts(kind="bpe", digest=tokenizer.digest),
        splits={
            "train": Split(
                prefix="train_text_document", documents=len(documents), bytes=9, tokens=4321
            )
        },
    )
    write_document(directory / "dataset.json", card)
    seal(directory)
    return dataset_digest(directory)


def write_run(
    root: Path, *, twin: bool = True, zero: bool = False, dtype: torch.dtype = torch.float32
) -> Path:
    """A training run below `root` with one checkpoint of a tiny untrained GPT-2; `zero` makes it a
    uniform model."""
    dataset = root / "words"
    digest = write_dataset(dataset)
    config = RunConfig(
        name="tiny",
        model=tiny_config(vocab_size=300, seq_length=64),
        data=DataSection(dataset=dataset),
        twin=TwinScale() if twin else None,
    )
    run = RunDirectory.begin(
        root, config.name, "training", config.model_dump(mode="json"), {"dataset": digest}
    )
    model = tiny_gpt2(config.model).to(dtype)
    if zero:
        for parameter in model.parameters():
            parameter.data.zero_()
    parameters = sharded_parameters(model, model.mesh)
    optimizer = FlatAdamW(parameters, config.train, model.mesh)
    state = TrainingState(iteration=10)
    save_checkpoint(
        run.path, config, state, parameters, optimizer, model.mesh, dataset / "tokenizer"
    )
    return run.path
