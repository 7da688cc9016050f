"""verify reads to the leaves: forgeries of an earlier review, each sealed anew, and a sample of all
edits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlm_repro.data_pipeline.tokens.token_file import TokenFile
from mlm_repro.experiments.catalogue import find_experiment
from mlm_repro.experiments.sealed import digest_of_numbers
from mlm_repro.lineage.digest import MARKER, check_seal, seal, sha256_json
from mlm_repro.lineage.errors import IntegrityFailure
from mlm_repro.lineage.records import Record, read_records, write_records
from mlm_repro.lineage.run import identity_in
from mlm_repro.verify.recomputed import RunCheck
from tests.chaos.job import write_tiny
from tests.commands import call
from tests.experiments.packed import DATASET, REPRODUCTION, TRAINING, unpack
from tests.experiments.simulated import seal_simulated
from tests.verify.mutator import survivors


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return unpack(tmp_path) / "runs"


def one(runs: Path, pattern: str) -> Path:
    (path,) = runs.glob(pattern)
    return path


def seal_training(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        if not path.is_symlink():
            seal(path)
    seal(run)


def last(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def weights(checkpoint: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    (file,) = checkpoint.glob("model-*")
    save_file({name: change(value) for name, value in load_file(file).items()}, file)


def planted_zeros(run: Path) -> None:
    planted = Path(shutil.copytree(last(run), run / "checkpoints" / "iter_9999999"))
    for name in ("lineage.json", "statistics.json", "probe.json"):
        (planted / name).unlink()
    weights(planted, np.zeros_like)


def look_alike(run: Path) -> None:
    shutil.copytree(last(run), run / "checkpoints" / "iter_９９９９９９９")


def bare(run: Path) -> None:
    for name in ("lineage.json", "statistics.json", "probe.json"):
        (last(run) / name).unlink()
    weights(last(run), np.ones_like)


def scaled_weights(run: Path) -> None:
    weights(last(run), lambda value: value * np.float32(1.001))


def linked(run: Path) -> None:
    elsewhere = run.parent.parent / "elsewhere"
    last(run).rename(elsewhere)
    weights(elsewhere, np.zeros_like)
    seal(elsewhere)
    (run / "checkpoints" / "iter_0000006").symlink_to(elsewhere)


def linked_file(run: Path) -> None:
    (run / "summary.json").rename(run.parent.parent / "summary.json")
    (run / "summary.json").symlink_to(run.parent.parent / "summary.json")


def another_tokenizer(run: Path) -> None:
    for checkpoint in (run / "checkpoints").iterdir():
        path = checkpoint / "tokenizer" / "tokenizer.json"
        values = json.loads(path.read_text())
        first, second, *_ = values["model"]["vocab"]
        vocab = values["model"]["vocab"]
        vocab[first], vocab[second] = vocab[second], vocab[first]
        path.write_text(json.dumps(values))


def divided_losses(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["loss"] /= 3
        if "perplexity" in line:
            line["perplexity"] = float(np.exp(line["loss"]))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((run / "summary.json").read_text())
    final = [line for line in lines if "perplexity" in line][-1]
    summary |= {"validation_loss": final["loss"], "validation_perplexity": final["perplexity"]}
    (run / "summary.json").write_text(json.dumps(summary))


def key_twice(run: Path) -> None:
    text = (run / "summary.json").read_text()
    (run / "summary.json").write_text(text.replace("{", '{"validation_perplexity": 10.81, ', 1))


def of_the_future(run: Path) -> None:
    values = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(
        json.dumps(values | {"created": "9999-01-01T00:00:00+00:00"})
    )


def of_yesterday(run: Path) -> None:
    values = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(values | {"created": "yesterday"}))


@pytest.mark.parametrize(
    "forge",
    [
        planted_zeros,
        look_alike,
        bare,
        scaled_weights,
        linked,
        linked_file,
        another_tokenizer,
        divided_losses,
        key_twice,
        of_the_future,
        of_yesterday,
    ],
)
def test_a_forged_training_is_named_where_it_was_forged(
    forge: Callable[[Path], None], runs: Path
) -> None:
    run = one(runs, TRAINING)
    assert RunCheck(run).broken == []
    forge(run)
    seal_training(run)
    assert RunCheck(run).broken
    done = call({}, "mlm-verify", "run", run)
    assert done.code == 6, done.out


def of_another_run(run: Path) -> None:
    lineage = last(run) / "lineage.json"
    lineage.write_text(json.dumps(json.loads(lineage.read_text()) | {"run": "0" * 64}))


@pytest.mark.parametrize("forge", [planted_zeros, of_another_run])
def test_a_run_is_not_scored_by_a_checkpoint_of_another(
    forge: Callable[[Path], None], runs: Path
) -> None:
    run = one(runs, TRAINING)
    score = ("mlm-eval", "wikitext103", "--limit", "2", "--ckpt")
    call({}, *score, run, ends=0)
    forge(run)
    seal_training(run)
    done = call({}, *score, run)
    assert done.code == 2
    assert f"{last(run)} is not a checkpoint of {run.name}" in done.err


@pytest.mark.parametrize("marker", [{"algorithm": "none"}, {"verified_by": "me"}])
def test_a_seal_has_its_two_keys(marker: dict[str, str], runs: Path) -> None:
    run = one(runs, DATASET)
    values = json.loads((run / MARKER).read_text())
    (run / MARKER).write_text(json.dumps(marker | values))
    with pytest.raises(IntegrityFailure, match="is damaged or was edited"):
        check_seal(run)


def test_weights_that_rotted_below_a_reproduction_are_named(runs: Path) -> None:
    """In place, and nothing is sealed anew."""
    reproduction, training = one(runs, REPRODUCTION), one(runs, TRAINING)
    assert RunCheck(reproduction).broken == []
    weights(last(training), np.ones_like)
    assert any("was changed after" in sentence for sentence in RunCheck(reproduction).broken)


def test_tokens_of_documents_are_drawn_after_the_seal(runs: Path) -> None:
    """Three quarters of the documents become another token, but for those that an even spacing of
    64 would meet."""
    run = one(runs, DATASET)
    tokens = TokenFile(run / "train_text_document")
    starts = np.cumsum(
        [0, *(len(tokens[number]) for number in range(len(tokens.document_index) - 1))]
    )
    data = np.fromfile(run / "train_text_document.bin", dtype=tokens.tokens.dtype)
    for place in range(0, len(starts) - 1, 2):
        data[starts[place] : starts[place + 1] - 1] = 7
    data.tofile(run / "train_text_document.bin")
    card = json.loads((run / "dataset.json").read_text())
    seal(run)
    card["files"]["train_text_document.bin"] = json.loads((run / MARKER).read_text())["files"][
        "train_text_document.bin"
    ]
    (run / "dataset.json").write_text(json.dumps(card))
    seal(run)
    assert any("tokens of document" in sentence for sentence in RunCheck(run).broken)


def test_a_token_that_no_tokenizer_has_is_named_though_no_batch_read_it(runs: Path) -> None:
    run = one(runs, DATASET)
    path = run / "train_text_document.bin"
    data = np.fromfile(path, dtype=TokenFile(path.with_suffix("")).tokens.dtype)
    data[-2] = 65_535
    data.tofile(path)
    seal(run)
    card = json.loads((run / "dataset.json").read_text())
    card["files"][path.name] = json.loads((run / MARKER).read_text())["files"][path.name]
    (run / "dataset.json").write_text(json.dumps(card))
    seal(run)
    assert call({}, "mlm-verify", "run", run).code == 6


def test_a_simulation_is_computed_again_alone_as_in_its_folder(tmp_path: Path) -> None:
    run = seal_simulated(find_experiment("2021/figure-6"), tmp_path)
    path = run.path
    assert RunCheck(path).broken == []
    lines = [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]
    for line in lines:
        line["value"] *= 1.5
        line.update({end: None for end in ("low", "high") if end in line})
    values = json.loads((path / "manifest.json").read_text())
    (path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values["config"]["records"] = digest_of_numbers(read_records(path / "records.jsonl"))
    values["config_digest"] = sha256_json(values["config"])
    values["settings"] = values["settings"] | {"records": values["config"]["records"]}
    values["identity"] = identity_in(values)
    source = f"{values['name']}-{values['identity'][:8]}"
    records = [
        Record(**line | {"digest": values["config_digest"], "source": source}) for line in lines
    ]
    write_records(path / "records.jsonl", records)
    (path / "manifest.json").write_text(json.dumps(values))
    path = path.rename(path.with_name(f"{values['name']}-{values['identity'][:8]}"))
    seal(path)
    assert [
        sentence for sentence in RunCheck(path).broken if "made again it is" not in sentence
    ] == []
    assert RunCheck(path).broken


def test_a_page_of_itself_has_an_end(runs: Path) -> None:
    run = one(runs, REPRODUCTION)
    (run / "report").mkdir()
    (run / "report" / "sources.json").write_text('{"runs": ["."]}')
    (run / "report" / "index.html").write_text("<html></html>")
    seal(run / "report")
    assert any(
        "the run that it belongs to as its input" in sentence for sentence in RunCheck(run).broken
    )


def test_a_run_without_a_seal_in_a_folder_is_listed_and_strictly_a_failure(runs: Path) -> None:
    assert (
        call({}, "mlm-verify", "run", runs, "--strict", ends=0)
        .out.splitlines()[-1]
        .startswith(f"ok {runs}")
    )
    (one(runs, TRAINING) / MARKER).unlink()
    shutil.rmtree(one(runs, REPRODUCTION))
    done = call({}, "mlm-verify", "run", runs, ends=0)
    assert f"{one(runs, TRAINING).name}, which is not sealed" in done.out
    assert call({}, "mlm-verify", "run", runs, "--strict").code == 6


@pytest.mark.parametrize("pattern", [DATASET, TRAINING, REPRODUCTION])
def test_of_a_sample_of_all_edits_none_survives(pattern: str, runs: Path) -> None:
    """Each is sealed anew; what nothing contradicts is printed by the command, and not drawn."""
    made, alive = survivors(runs, [one(runs, pattern).name], 40, seed=78)
    assert (made.total(), alive) == (40, [])


def test_what_verbs_make_one_after_the_other_verifies(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    call({}, "mlm-data", "clean", f"jsonl:{tmp_path / 'corpus.jsonl'}", tmp_path / "clean", ends=0)
    vocabulary = ("--set", "tokenizer.kind=train", "--set", "tokenizer.vocab_size=300")
    call(
        {},
        "mlm-data",
        "tokenize",
        f"documents:{tmp_path / 'clean'}",
        tmp_path / "tokens",
        *vocabulary,
        ends=0,
    )
    for name in ("clean", "tokens"):
        call({}, "mlm-verify", "run", tmp_path / name, "--strict", ends=0)
    for edit, sentence in OF_A_VERB:
        forged = Path(shutil.copytree(tmp_path / "clean", tmp_path / "forged" / "clean"))
        edit(forged)
        seal(forged)
        assert any(sentence in each for each in RunCheck(forged).broken), sentence
        shutil.rmtree(forged)


def in_ledger(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        ledger = json.loads((run / "ledger.json").read_text())
        change(ledger)
        (run / "ledger.json").write_text(json.dumps(ledger))

    return edit


def shard_renamed(run: Path) -> None:
    (run / "shard-00000.jsonl").rename(run / "shard-000001.jsonl")


def shards_added(run: Path) -> None:
    (run / "valid").mkdir()
    shutil.copy(run / "shard-00000.jsonl", run / "valid")


OF_A_VERB: list[tuple[Callable[[Path], None], str]] = [
    (in_ledger(lambda it: it["stages"][-1].update(bytes_out=1)), "documents and bytes"),
    (in_ledger(lambda it: it["stages"][0].update(bytes_in=None)), "bytes into source is None"),
    (in_ledger(lambda it: it["stages"].reverse()), "ledger.json: stages, 1 is clean"),
    (in_ledger(lambda it: it["stages"].pop()), "ledger.json: stages is ['source']"),
    (in_ledger(lambda it: it["splits"]["all"].update(tokens=9)), "of its splits, and tokens, 3"),
    (shard_renamed, "shard-00000.jsonl"),
    (shards_added, "shards is ['shard-00000.jsonl', 'valid/shard-00000.jsonl']"),
]


@pytest.mark.parametrize("more", ['"files": {}', '"digest": "0"', '"files": {}, "digest": "0"'])
def test_a_key_of_a_seal_that_stands_twice_is_named(more: str, runs: Path) -> None:
    """A reader that takes the first of two would see another seal than one that takes the last."""
    run = one(runs, DATASET)
    text = (run / MARKER).read_text()
    (run / MARKER).write_text(text.replace("{", f"{{{more}, ", 1))
    done = call({}, "mlm-verify", "run", run)
    assert (done.code, f"{run.name}/{MARKER}" in done.err or MARKER in done.err) == (6, True)
