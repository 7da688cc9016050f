"""A published BERT that is trained on, beside transformers' own and torch's AdamW in float64, and
written back."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.implementations import BertWordPieceTokenizer
from transformers import AutoTokenizer, BertConfig, BertForPreTraining, BertTokenizerFast

from mlm_repro.data_pipeline.tokens.sentence_pairs import PairSamples
from mlm_repro.data_pipeline.tokens.sentences import Vocabulary
from mlm_repro.data_pipeline.tokens.token_file import TokenFile
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.finetune.train import PairEncoder
from mlm_repro.engine.formats.convert import export_checkpoint, import_checkpoint
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.run.files import read_steps
from mlm_repro.engine.run.resolved import resolve
from mlm_repro.engine.train import train as train_resolved
from mlm_repro.lineage.config import override_config
from mlm_repro.lineage.errors import BadInput
from tests.commands import Program
from tests.engine.conftest import WORDS
from tests.engine.small_run import finish, small_config, train

MODEL: dict[str, Any] = {
    "family": "bert",
    "dropout": 0.0,
    "bert": {"layer_norm_order": "original", "layer_norm_epsilon": 1e-12},
}
TRAIN: dict[str, Any] = {
    "iterations": 12,
    "global_batch_size": 4,
    "microbatch_size": 4,
    "precision": "fp64",
    "decay": "constant",
    "warmup_iterations": 3,
    "validation_interval": 12,
    "checkpoint_interval": 12,
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents of a few sentences each."""
    random = np.random.RandomState(seed)
    sentences = (
        " ".join(random.choice(WORDS, random.randint(4, 9))).capitalize() + "."
        for _ in range(6 * count)
    )
    return [" ".join(next(sentences) for _ in range(6)) for _ in range(count)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of a small BERT with random weights and a WordPiece vocabulary of
    its own."""
    directory = tmp_path_factory.mktemp("hub") / "bert"
    trained = BertWordPieceTokenizer()
    trained.train_from_iterator(
        texts(50), vocab_size=70, special_tokens=SPECIAL, show_progress=False
    )
    directory.mkdir()
    trained.save_model(str(directory))
    BertTokenizerFast(str(directory / "vocab.txt")).save_pretrained(directory)
    torch.manual_seed(5)
    shape = BertConfig(
        vocab_size=trained.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForPreTraining(shape).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def pieces(hub: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that `mlm-data` makes of text with the vocabulary of `hub`."""
    folder = tmp_path_factory.mktemp("pieces")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(120, 1))
    (folder / "text.jsonl").write_text(lines, encoding="utf-8")
    (folder / "recipe.toml").write_text(
        'name = "pieces"\nstages = ["split", "tokenize"]\n[sources]\nnames ='
        f' ["jsonl:{folder}/text.jsonl"]\n[tokenizer]\npath = "{hub}"\nend_of_text = "[SEP]"\n'
    )
    code, _, err = finish(Program("mlm-data", "run", folder / "recipe.toml", "--runs", folder))
    assert code == 0, err
    return folder / "pieces"


def loop(model: BertForPreTraining, samples: PairSamples, rates: list[float]) -> Iterator[float]:
    """The losses of an ordinary loop over the samples."""
    model = model.double().train()
    groups: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[not (name.endswith("bias") or "LayerNorm" in name)].append(parameter)
    decays = [
        {"params": groups[True], "weight_decay": 0.01},
        {"params": groups[False], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(decays)
    for number, rate in enumerate(rates):
        batch = [samples.sample(4 * number + place) for place in range(4)]
        lengths = torch.tensor([pair.length for pair in batch])
        rows, targets, types = (
            torch.from_numpy(np.stack(columns))
            for columns in zip(
                *((pair.tokens, pair.targets, pair.token_types) for pair in batch), strict=True
            )
        )
        output = model(
            rows,
            attention_mask=(torch.arange(rows.size(1)) < lengths[:, None]).long(),
            token_type_ids=types,
            labels=torch.where(targets < 0, -100, targets),
            next_sentence_label=torch.tensor([pair.is_swapped for pair in batch]),
        )
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        yield output.loss.item()


@pytest.mark.parametrize("tp", [1, 2])
def test_continued_pretraining_equals_transformers_and_goes_back(
    tp: int, hub: Path, pieces: Path, tmp_path: Path
) -> None:
    start = import_checkpoint(hub, tmp_path / "imported")
    config: RunConfig = small_config(pieces, MODEL, init_from=str(start), **TRAIN)
    run = run_threads(
        lambda: (
            train_resolved(
                resolve(override_config(config, [f"parallel.tp={tp}"]), tp), tmp_path
            ).path
        ),
        tp,
    )[0]
    vocabulary = Vocabulary.of(Tokenizer.load(pieces / "tokenizer"))
    samples = PairSamples(TokenFile(pieces / "train_text_document"), vocabulary, 32, 1234)
    model = BertForPreTraining.from_pretrained(hub)
    expected = list(loop(model, samples, [3e-3 * min(step / 3, 1) for step in range(1, 13)]))
    assert [step.loss for step in read_steps(run)] == pytest.approx(expected, rel=0, abs=1e-12)
    assert expected[-1] < expected[0] - 0.5
    back = BertForPreTraining.from_pretrained(export_checkpoint(run, tmp_path / "exported"))
    for (name, theirs), ours in zip(model.named_parameters(), back.parameters(), strict=True):
        torch.testing.assert_close(
            ours, theirs.float(), rtol=0, atol=1e-6, msg=lambda text, name=name: name + text
        )
    pair = AutoTokenizer.from_pretrained(tmp_path / "exported")("The old house.", "it sings under")
    assert (
        pair["input_ids"]
        == AutoTokenizer.from_pretrained(hub)("The old house.", "it sings under")["input_ids"]
    )


def test_words_and_sentences_of_word_pieces(hub: Path) -> None:
    tokenizer = Tokenizer.open(hub, "[SEP]")
    vocabulary = Vocabulary.of(tokenizer)
    names = AutoTokenizer.from_pretrained(hub).convert_tokens_to_ids(SPECIAL)
    assert vocabulary.special_ids == tuple(names[place] for place in (2, 3, 4, 0))
    tokens = tokenizer.encode_ids("the unreadable river. then").astype(np.int64)
    pieces = AutoTokenizer.from_pretrained(hub).convert_ids_to_tokens(tokens.tolist())
    assert any(piece.startswith("##") for piece in pieces)
    assert vocabulary.word_starts(tokens).tolist() == [
        not piece.startswith("##") for piece in pieces
    ]
    assert vocabulary.ends_sentence[tokens].tolist() == [piece == "." for piece in pieces]


def test_a_bert_of_our_own_is_written_with_its_special_tokens(
    dataset: Path, tmp_path: Path
) -> None:
    config = small_config(dataset, MODEL, **TRAIN | {"iterations": 4, "precision": "fp32"})
    run = train(config, tmp_path / "runs").path
    out = export_checkpoint(run, tmp_path / "exported")
    model, tokenizer = BertForPreTraining.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size == len(tokenizer) == 294
    newest = max((run / "checkpoints").iterdir())
    ours = PairEncoder.of(newest).pair("the old river", "walks over stone", 32)
    theirs = tokenizer("the old river", "walks over stone")
    assert ours.tokens == theirs["input_ids"]
    assert theirs["token_type_ids"].index(1) == ours.second_start
    again = small_config(
        dataset, MODEL, init_from=str(import_checkpoint(out, tmp_path / "again")), **TRAIN
    )
    with pytest.raises(BadInput, match="has another tokenizer than the dataset"):
        resolve(again, 1)


def test_a_bert_whose_norms_come_first_is_not_written(dataset: Path, tmp_path: Path) -> None:
    run = train(
        small_config(dataset, {"family": "bert"}, **TRAIN | {"iterations": 4}), tmp_path / "runs"
    ).path
    with pytest.raises(
        BadInput,
        match=(
            r"cannot be written for transformers: its options are layer_norm_order='rearranged' .*,"
            " and a model of transformers has layer_norm_order='original' "
        ),
    ):
        export_checkpoint(run, tmp_path / "exported")


def test_a_bert_without_a_tokenizer_file_is_refused(
    hub: Path, pieces: Path, tmp_path: Path
) -> None:

    bare = Path(shutil.copytree(hub, tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    start = import_checkpoint(bare, tmp_path / "imported")
    with pytest.raises(BadInput, match=r"has no tokenizer/tokenizer\.json, so its tokens"):
        resolve(small_config(pieces, MODEL, init_from=str(start), **TRAIN), 1)
