"""Fine-tuning tasks: their published formats, metrics of known value, and a small BERT that learns
from small files."""

import json
import math
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForPreTraining, BertTokenizerFast
from typer.testing import CliRunner

from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.engine.cli import app
from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.families.bert.model import BERT
from mlm_repro.engine.finetune.tasks import (
    FineTuneRecipe,
    LabelledExample,
    SpanExample,
    read_mnli,
    read_qqp,
    read_race,
    read_sets,
    read_squad,
    squad_scores,
    token_f1,
)
from mlm_repro.engine.finetune.train import FineTuner, PairEncoder, describe, finetune
from mlm_repro.engine.formats import Imported, write_checkpoint
from mlm_repro.engine.formats.convert import import_checkpoint
from mlm_repro.engine.parallel.mesh import serial_mesh
from mlm_repro.engine.parallel.sharding import sharded_parameters
from mlm_repro.lineage.errors import BadInput, DataMissing, Diverged
from tests.evaluation.standins import WORDS, sentences, write_run

MNLI_HEAD = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
    "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label"
)
LABELS = ("contradiction", "entailment", "neutral")


def mnli_line(number: int, first: str, second: str, label: str) -> str:
    return "\t".join(
        [
            str(number),
            "1",
            "1n",
            "fiction",
            "( a )",
            "( b )",
            "(ROOT)",
            "(ROOT)",
            first,
            second,
            label,
            label,
        ]
    )


def write_mnli(folder: Path, count: int = 48) -> None:
    """The class is told by one word of the second sentence."""
    folder.mkdir()
    for name, start in (("train", 0), ("dev_matched", 1), ("dev_mismatched", 2)):
        rows = [
            mnli_line(
                n,
                f"{WORDS[n % 7]} {WORDS[n % 5]}",
                f"the {('cat', 'dog', 'mat')[n % 3]} sat",
                LABELS[n % 3],
            )
            for n in range(start, count if name == "train" else 12 + start)
        ]
        (folder / f"{name}.tsv").write_text("\n".join([MNLI_HEAD, *rows]) + "\n", encoding="utf-8")


def squad(questions: list[dict[str, Any]], context: str) -> str:
    return json.dumps(
        {
            "version": "1",
            "data": [{"title": "t", "paragraphs": [{"context": context, "qas": questions}]}],
        }
    )


def write_squad(folder: Path, version: str) -> None:
    folder.mkdir()
    context = "the cat sat on a mat and saw another dog"
    questions = [
        {
            "id": str(n),
            "question": f"who sat {WORDS[n]}",
            "answers": [{"text": "cat", "answer_start": 4}],
        }
        for n in range(6)
    ]
    if version == "v2.0":
        questions += [
            {"id": f"x{n}", "question": f"green hills {n}", "is_impossible": True, "answers": []}
            for n in range(6)
        ]
    for name in ("train", "dev"):
        (folder / f"{name}-{version}.json").write_text(squad(questions, context), encoding="utf-8")


def write_race(folder: Path) -> None:
    for place in ("train/middle", "train/high", "test/middle", "test/high"):
        (folder / place).mkdir(parents=True)
        passage = {
            "id": f"{place}1.txt",
            "article": "the cat sat on a mat",
            "questions": ["the _ sat", "the old"],
            "options": [["cat", "dog", "hills", "rivers"], ["dog", "cat", "old", "below"]],
            "answers": ["A", "B"],
        }
        (folder / place / "1.txt").write_text(json.dumps(passage), encoding="utf-8")


def write_bert(out: Path) -> Path:
    """A small BERT of this suite's own, untrained."""
    config = ModelConfig(
        family="bert",
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        seq_length=24,
        vocab_size=304,
        padded_vocab_size=384,
        dropout=0.0,
        init_std=0.1,
    )
    model = BERT(config, serial_mesh())
    model.initialize(3)
    tensors = {p.name: p.local.detach() for p in sharded_parameters(model, model.mesh)}
    write_checkpoint(
        out,
        Imported(
            "bert", config, tensors, Tokenizer.train(sentences(40), 300), {"format": "this test"}
        ),
    )
    return out


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("finetune") / "bert")


RECIPE = FineTuneRecipe(epochs=12, batch_size=12, learning_rate=5e-3)


def test_mnli_is_learnt_from_its_files(checkpoint: Path, tmp_path: Path) -> None:
    write_mnli(tmp_path / "mnli")
    found = finetune("mnli", checkpoint, read_sets("mnli", tmp_path / "mnli"), RECIPE)
    assert found.examples == {"train": 48, "matched": 12, "mismatched": 12}
    assert found.metrics["matched"]["accuracy"] == found.metrics["mismatched"]["accuracy"] == 100.0


@pytest.mark.parametrize(("task", "version"), [("squad", "v1.1"), ("squad2", "v2.0")])
def test_squad_is_learnt_from_its_files(
    task: str, version: str, checkpoint: Path, tmp_path: Path
) -> None:
    write_squad(tmp_path / "squad", version)
    recipe = FineTuneRecipe(epochs=20, batch_size=6, learning_rate=5e-3)
    found = finetune(task, checkpoint, read_sets(task, tmp_path / "squad"), recipe)
    assert found.metrics["dev"] == {"exact_match": 100.0, "f1": 100.0}


@pytest.mark.parametrize("task", ["mnli", "squad2"])
def test_the_median_and_the_ensemble_are_those_of_the_members(
    task: str, checkpoint: Path, tmp_path: Path
) -> None:
    data = tmp_path / task
    write_mnli(data, 24) if task == "mnli" else write_squad(data, "v2.0")
    recipe = FineTuneRecipe(epochs=2, batch_size=6, learning_rate=5e-3, seed=7)
    sets = read_sets(task, data)
    together = finetune(task, checkpoint, sets, recipe, 3)
    alone = [
        finetune(task, checkpoint, sets, recipe.model_copy(update={"seed": seed}))
        for seed in (7, 8, 9)
    ]
    for split, metrics in together.metrics.items():
        assert together.of_members[split] == [one.metrics[split] for one in alone]
        for name, value in metrics.items():
            assert value == median(one.metrics[split][name] for one in alone)
    assert all(one.ensemble == one.metrics for one in alone)
    assert "median of 3 seeds; ensemble of them: " in describe(together)
    assert "median" not in describe(alone[0])


def test_classes_are_averaged_as_probabilities_and_positions_as_scores(checkpoint: Path) -> None:
    """Two members agree against a surer third: by probabilities they win, by scores the third
    would."""
    mnli, squad = (FineTuner(name, checkpoint, RECIPE) for name in ("mnli", "squad"))
    rows = [torch.tensor(row) for row in ([0.0, 2.0, -9.0], [0.0, 2.0, -9.0], [9.0, 0.0, -9.0])]
    example = LabelledExample((("a", "b"),), 1)
    mean = mnli.ensemble([[[row]] for row in rows])
    torch.testing.assert_close(mean[0][0], torch.stack([row.softmax(0) for row in rows]).mean(0))
    assert mnli.metrics([example], mean) == {"accuracy": 100.0}
    assert mnli.metrics([example], [[torch.stack(rows).mean(0)]]) == {"accuracy": 0.0}
    spans = [torch.randn(5, 2, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    torch.testing.assert_close(squad.ensemble([[[each]] for each in spans])[0][0], sum(spans) / 2)


def test_race_is_learnt_from_its_folders(checkpoint: Path, tmp_path: Path) -> None:
    write_race(tmp_path / "race")
    recipe = FineTuneRecipe(epochs=30, batch_size=4, learning_rate=2e-3)
    found = finetune("race", checkpoint, read_sets("race", tmp_path / "race"), recipe)
    assert found.examples == {"train": 4, "middle": 2, "high": 2}
    assert found.metrics["high"]["accuracy"] == 100.0


def write_published(directory: Path, vocabulary: list[str], size: int) -> Path:
    """A small BERT of transformers, untrained, whose model has `size` words, and its vocab.txt."""
    config = BertConfig(
        vocab_size=size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=24,
    )
    BertForPreTraining(config).save_pretrained(directory)
    (directory / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    return directory


def test_a_published_bert_is_fine_tuned_with_its_own_tokenizer(tmp_path: Path) -> None:
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *WORDS,
        "who",
        "un",
        "##seen",
        "hill",
        "##s",
    ]
    theirs = write_published(tmp_path / "theirs", vocabulary, len(vocabulary))
    ours = import_checkpoint(theirs, tmp_path / "ours")
    tokenizer = BertTokenizerFast(str(theirs / "vocab.txt"))
    for first, second in (("The cat sat.", "unseen hills"), ("who", "green " * 30)):
        expected = tokenizer(first, second, truncation="longest_first", max_length=24)
        found = PairEncoder.of(ours).pair(first, second, 24)
        assert found.tokens == expected["input_ids"]
        assert found.second_start == expected["token_type_ids"].index(1)
    write_mnli(tmp_path / "mnli", 12)
    found = finetune(
        "mnli",
        ours,
        read_sets("mnli", tmp_path / "mnli"),
        FineTuneRecipe(epochs=1, batch_size=12, learning_rate=1e-3),
    )
    assert found.examples["train"] == 12


def test_a_special_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    vocabulary = ["[PAD]", "[UNK]", "[MASK]", *WORDS, "[CLS]", "[SEP]"]
    theirs = write_published(tmp_path / "theirs", vocabulary, len(vocabulary) - 1)
    ours = import_checkpoint(theirs, tmp_path / "ours")
    with pytest.raises(BadInput, match="an id beyond the model's vocabulary"):
        FineTuner("mnli", ours, RECIPE)


def test_the_body_learns_without_its_pre_training_heads(checkpoint: Path, tmp_path: Path) -> None:
    write_mnli(tmp_path / "mnli", 12)
    tuner = FineTuner(
        "mnli", checkpoint, FineTuneRecipe(epochs=1, batch_size=12, learning_rate=1e-2)
    )
    before = load_file(checkpoint / "model-tp00-pp000.safetensors")
    tuner.train(read_mnli(tmp_path / "mnli" / "train.tsv"), "mnli")
    body = dict(tuner.model.body.named_parameters())
    assert {name.partition(".")[0] for name in before.keys() - body.keys()} == {
        "masked_head",
        "order_head",
    }
    changed = {name for name, parameter in body.items() if not torch.equal(parameter, before[name])}
    assert {
        "pooler.weight",
        "embedding.token_type_embeddings.weight",
        "layers.0.mlp.dense_h_to_4h.weight",
    } <= changed


def test_a_long_context_is_read_in_windows_that_overlap(checkpoint: Path) -> None:
    encoder = PairEncoder.of(checkpoint)
    context = " ".join(WORDS * 4)
    windows = list(encoder.windows("who sat", context, 24))
    assert len(windows) > 3
    assert all(len(window.tokens) <= 24 for window in windows)
    covered = sorted(
        {place for window in windows for low, high in window.offsets for place in range(low, high)}
    )
    assert covered == list(range(len(context)))
    tuner = FineTuner("squad", checkpoint, RECIPE)
    start = context.rindex("rivers")
    features = list(tuner.features(SpanExample("who sat", context, ("rivers slept",), (start,))))
    spans = [(one.sequences[0], one.label) for one in features if one.label != (0, 0)]
    assert spans
    for window, (first, last) in spans:
        (low, _), (_, high) = (
            window.offsets[place - window.second_start] for place in (first, last)
        )
        assert context[low:high].strip() == "rivers slept"


@pytest.mark.parametrize(
    ("found", "answers"),
    [
        ("the cat", ["cat"]),
        ("The Cat sat!", ["a cat", "cat sat on"]),
        ("dog", ["cat"]),
        ("old\tdog", ["Old  dog."]),
        ("cat cat dog", ["cat dog dog"]),
        ("U.S.", ["US"]),
        ("an-other", ["another", "an other"]),
    ],
)
def test_squad_s_metrics_are_its_script_s(found: str, answers: list[str]) -> None:
    path = Path(str(find_spec("lm_eval").origin)).parent / "tasks" / "qasper" / "metrics.py"  # type: ignore[union-attr]
    spec = spec_from_file_location("squad_script", path)
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    scores = squad_scores([found], [answers])
    assert scores["exact_match"] == 100 * any(
        script.normalize_answer(found) == script.normalize_answer(answer) for answer in answers
    )
    assert scores["f1"] == pytest.approx(
        100 * max(script.f1_abstractive([found], [answer]) for answer in answers)
    )


def test_known_values() -> None:
    """The rules for questions without an answer are those of evaluate-v2.0.py."""
    assert squad_scores(["", "dog", ""], [[], [], ["cat"]]) == {
        "exact_match": 100 / 3,
        "f1": 100 / 3,
    }
    assert token_f1("the cat sat", "cat sat on") == pytest.approx(2 * 2 / 5)
    assert squad_scores(["cat", "dog"], [["a cat"], ["hills", "the dog!"]]) == {
        "exact_match": 100.0,
        "f1": 100.0,
    }


def test_readers_keep_what_the_files_say(tmp_path: Path) -> None:
    write_mnli(tmp_path / "mnli", 4)
    path = tmp_path / "mnli" / "train.tsv"
    path.write_text(
        path.read_text(encoding="utf-8") + mnli_line(9, "x", "y", "-") + "\n", encoding="utf-8"
    )
    assert [example.label for example in read_mnli(path)] == [0, 1, 2, 0]
    qqp = tmp_path / "qqp.tsv"
    head = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    qqp.write_text(
        f'{head}\n1\t2\t3\tWhat "is" it?\tWhat?\t1\n4\t5\t6\tcut off\n7\t8\t9\ta\tb\t0\n',
        encoding="utf-8",
    )
    assert [(one.pairs[0][0], one.label) for one in read_qqp(qqp)] == [
        ('What "is" it?', 1),
        ("a", 0),
    ]
    write_race(tmp_path / "race")
    race = read_race(tmp_path / "race" / "train")
    assert [one.pairs[1][0] for one in race[:2]] == ["the dog sat", "the old cat"]
    assert [one.label for one in race] == [0, 1, 0, 1]
    write_squad(tmp_path / "squad", "v2.0")
    spans = read_squad(tmp_path / "squad" / "dev-v2.0.json")
    assert [len(one.answers) for one in spans] == [1] * 6 + [0] * 6


def test_what_only_published_held_out_files_have_is_read(tmp_path: Path) -> None:
    """MNLI's development files have the labels of five annotators, SQuAD's several answers and
    plausible ones."""
    dev = tmp_path / "dev_matched.tsv"
    labels = ["label1", "label2", "label3", "label4", "label5", "gold_label"]
    head = "\t".join([*MNLI_HEAD.split("\t")[:10], *labels])
    cells = mnli_line(0, 'The "new" rights', "No.", "neutral").split("\t")[:10]
    dev.write_text(
        "\n".join([head, "\t".join([*cells, *["neutral"] * 3, "entailment", "neutral", "neutral"])])
        + "\n"
    )
    (example,) = read_mnli(dev)
    assert example == LabelledExample((('The "new" rights', "No."),), LABELS.index("neutral"))
    answers = [{"text": text, "answer_start": 8} for text in ("on", "on a mat")]
    questions: list[dict[str, Any]] = [
        {
            "question": "Where?",
            "id": "56ddde6b9a695914005b9628",
            "answers": answers,
            "is_impossible": False,
        },
        {
            "plausible_answers": answers[:1],
            "question": "Who?",
            "id": "5ad39d53",
            "answers": [],
            "is_impossible": True,
        },
    ]
    (tmp_path / "dev.json").write_text(squad(questions, "the cat on a mat"), encoding="utf-8")
    assert [one.answers for one in read_squad(tmp_path / "dev.json")] == [("on", "on a mat"), ()]


def test_files_that_are_not_there_or_not_right_are_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=r"there is no file .*dev_matched.tsv"):
        read_sets("mnli", tmp_path)
    with pytest.raises(DataMissing, match="there are no"):
        read_race(tmp_path)
    bad = tmp_path / "bad"
    for reader, text, sentence in (
        (read_mnli, "a\tb\n", "names no column 'sentence1'"),
        (
            read_mnli,
            f"{MNLI_HEAD}\nx\ty\n",
            "line 2 has 2 cells separated by tabs, and the header has 12",
        ),
        (
            read_mnli,
            f"{MNLI_HEAD}\n{mnli_line(1, 'a', 'b', 'maybe')}\n",
            "line 2: gold_label is 'maybe', not one of",
        ),
        (read_squad, "[1]", "is not a SQuAD file"),
        (read_squad, "{", "is not a SQuAD file"),
        (read_squad, '{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "is not a SQuAD file"),
        (
            read_squad,
            squad([{"answers": [{"text": "", "answer_start": math.inf}]}], ""),
            "is not a SQuAD file",
        ),
    ):
        bad.write_text(text, encoding="utf-8")
        with pytest.raises(BadInput, match=sentence):
            reader(bad)
    (tmp_path / "race").mkdir()
    (tmp_path / "race" / "1.txt").write_text('{"article": 1}', encoding="utf-8")
    with pytest.raises(BadInput, match=r"1\.txt line 1 is not a RACE passage"):
        read_race(tmp_path / "race")


def test_a_fine_tuning_that_diverges_ends_as_a_training_that_does(
    checkpoint: Path, tmp_path: Path
) -> None:
    write_mnli(tmp_path / "mnli", 12)
    steep = FineTuneRecipe(epochs=3, batch_size=12, learning_rate=1e38)
    with pytest.raises(Diverged, match="loss or gradient is not finite, and keeps nothing"):
        finetune("mnli", checkpoint, read_sets("mnli", tmp_path / "mnli"), steep)


def test_the_command(checkpoint: Path, tmp_path: Path) -> None:
    write_mnli(tmp_path / "mnli", 12)
    arguments = [
        "finetune",
        "mnli",
        "--ckpt",
        str(checkpoint),
        "--data",
        str(tmp_path / "mnli"),
        "--set",
        "epochs=1",
    ]
    done = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    assert "matched" in done.output
    several = CliRunner().invoke(app, [*arguments, "--ensemble", "2"])
    assert several.output.count("median of 2 seeds") == 2
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["recipe"]["epochs"] == 1
    with pytest.raises(BadInput, match="unknown key 'epoch'"):
        CliRunner().invoke(app, [*arguments, "--set", "epoch=1"], catch_exceptions=False)
    with pytest.raises(BadInput, match="there is no fine-tuning task 'glue'"):
        CliRunner().invoke(app, ["finetune", "glue", *arguments[2:]], catch_exceptions=False)
    with pytest.raises(BadInput, match="is a gpt2"):
        CliRunner().invoke(
            app,
            ["finetune", "mnli", "--ckpt", str(write_run(tmp_path / "runs")), *arguments[4:]],
            catch_exceptions=False,
        )
