"""Edits of sealed results, each sealed anew up to the page as an honest change would be: all are named."""

import json
import shutil
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from experiments.catalogue import find_experiment
from experiments.reproduce.files import ReproductionSummary
from experiments.reproduce.reproduction import derived_records
from experiments.runner import run_experiment
from lineage.digest import seal, sha256_json
from lineage.errors import UserError
from lineage.files import read_document
from lineage.records import write_records
from lineage.run import RunDirectory, identity_of
from reports import page
from tests.architecture.rooms import ROOT
from tests.chaos.job import leave_figures_blank
from tests.commands import call
from tests.experiments.test_sealed_before import PACKED
from tests.reports.reproduction import build_page
from verify.kinds import KINDS
from verify.recomputed import RunCheck

Edit = Callable[[Any], object]
MODEL = "355m"
KEPT = ROOT / "results" / "ablations"


class Forged(NamedTuple):
    """Copies that a test may change: a reproduction, the runs it was made of, an experiment on its page."""

    reproduction: Path
    training: Path
    dataset: Path
    experiment: Path

    @property
    def report(self) -> Path:
        return self.reproduction / "report"

    def seal(self) -> None:
        """Seal everything from the innermost up."""
        for directory in (self.dataset, *sorted((self.training / "checkpoints").iterdir()), self.training,
                          self.experiment, self.reproduction):  # fmt: skip
            if directory.is_dir():
                seal(directory)

    def publish(self, *experiments: Path) -> None:
        """Make the page say what the files say now."""
        build_page(self.reproduction, runs=experiments)


def in_runs(runs: Path) -> Forged:
    patterns = ("reproduce-355m-*", "355m-tiny-*", "tiny-*", "experiment-2021-figure-6-*")
    return Forged(*(next(runs.glob(pattern)) for pattern in patterns))


@pytest.fixture(autouse=True)
def _blank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "render_all", page.render_all)  # put back after the test
    leave_figures_blank()


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs: what an earlier version sealed, and a simulated experiment; not to be changed."""
    folder = tmp_path_factory.mktemp("honest")
    with tarfile.open(PACKED) as archive:
        archive.extractall(folder, filter="data")
    run_experiment(find_experiment("2021/figure-6"), folder / "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "render_all", page.render_all)
        leave_figures_blank()
        in_runs(folder / "runs").publish()
    return folder / "runs"


@pytest.fixture
def forged(honest: Path, tmp_path: Path) -> Forged:
    shutil.copytree(honest, tmp_path / "runs", symlinks=True)
    return in_runs(tmp_path / "runs")


# -- edits ---------------------------------------------------------------------------------------------------------


def json_file(path: Path, edit: Edit) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    before = json.dumps(values)
    edit(values)
    assert json.dumps(values) != before
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")


def json_lines(path: Path, edit: Edit) -> None:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    before = json.dumps(lines)
    edit(lines)
    assert json.dumps(lines) != before
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def of(lines: list[dict[str, Any]], quantity: str, kind: str = "scaled") -> list[dict[str, Any]]:
    found = [line for line in lines if (line.get("quantity"), line.get("kind")) == (quantity, kind)]
    assert found
    return found


def records(edit: Edit) -> Callable[[Forged], None]:
    return lambda forged: json_lines(forged.reproduction / "records.jsonl", edit)


def record(quantity: str, kind: str = "scaled", /, **values: Any) -> Callable[[Forged], None]:
    return records(lambda lines: of(lines, quantity, kind)[-1].update(values))


def summary(edit: Edit) -> Callable[[Forged], None]:
    return lambda forged: json_file(forged.reproduction / "summary.json", edit)


def summarised(**values: Any) -> Callable[[Forged], None]:
    return summary(lambda it: it.update(values))


def evaluation(task: str, edit: Edit) -> Callable[[Forged], None]:
    return lambda forged: json_file(forged.reproduction / "evaluations" / f"{MODEL}-{task}.json", edit)


def inside(name: str, edit: Edit) -> Callable[[Forged], None]:
    return lambda forged: (json_lines if name.endswith("l") else json_file)(forged.reproduction / name, edit)


def manifest(run: Path, edit: Edit) -> None:
    """Edit a manifest and make the digests in it again."""

    def change(values: dict[str, Any]) -> None:
        edit(values)
        outside = values["outside_identity"]
        what = {name: value for name, value in values["config"].items() if name not in outside}
        version = values["environment"]["mlm_repro"]
        values["config_digest"] = sha256_json(values["config"])
        values["identity"] = identity_of(values["kind"], what, values["parents"], version)

    json_file(run / "manifest.json", change)


def text(name: str, old: str, new: str) -> Callable[[Forged], None]:
    """Of a file of the report."""

    def edit(forged: Forged) -> None:
        path = forged.report / name
        content = path.read_text(encoding="utf-8")
        assert old in content
        path.write_text(content.replace(old, new, 1), encoding="utf-8")

    return edit


def removed(name: str) -> Callable[[Forged], None]:
    def edit(forged: Forged) -> None:
        path = forged.reproduction / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return edit


def full_size(forged: Forged) -> None:
    """A twin called the published model everywhere that says so."""
    manifest(forged.reproduction, lambda it: it["config"].update(mode="full"))
    summarised(mode="full")(forged)
    for task in ("wikitext103", "lambada"):
        evaluation(task, lambda it: it.update(kind="measured"))(forged)
    records(lambda lines: [line.update(kind="measured") for line in lines if line["kind"] == "scaled"])(forged)


def divided(it: dict[str, Any]) -> None:
    it["perplexity"] /= 10


def all_divided(it: dict[str, Any]) -> None:
    for name in ("perplexity", "original_token_perplexity", "lm_eval_word_perplexity", "subword_perplexity"):
        it[name] /= 10


def trained(name: str, edit: Edit) -> Callable[[Forged], None]:
    return lambda forged: (json_lines if name.endswith("l") else json_file)(forged.training / name, edit)


def weights(forged: Forged) -> None:
    """The last checkpoint's, with its run sealed anew."""
    path = max(forged.training.glob("checkpoints/*/model-*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def tokens(forged: Forged) -> None:
    path = forged.dataset / "train_text_document.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def another_dataset(forged: Forged) -> None:
    manifest(forged.training, lambda it: it["parents"].update(dataset="0" * 64))


def simulated(**values: Any) -> Callable[[Forged], None]:
    return lambda forged: json_lines(forged.experiment / "records.jsonl", lambda lines: lines[0].update(values))


def copied_evaluation(forged: Forged) -> None:
    folder = forged.reproduction / "evaluations"
    shutil.copy(folder / f"{MODEL}-lambada.json", folder / f"{MODEL}-wikitext103.json")


def four_times_the_words(forged: Forged) -> None:
    """A perplexity of 23 million becomes one of 69.5, and what follows from it is made again."""

    def edit(it: dict[str, Any]) -> None:
        for name in ("num_original_tokens", "num_lm_eval_words", "normaliser"):
            it[name] *= 4
        for name in ("perplexity", "original_token_perplexity", "lm_eval_word_perplexity"):
            it[name] **= 1 / 4
        it["log_perplexity_standard_error"] /= 4
        it["token_ratio"] = (it["num_tokens"] - 1) / (it["num_original_tokens"] - 1)

    evaluation("wikitext103", edit)(forged)
    summary = read_document(forged.reproduction / "summary.json", ReproductionSummary)
    write_records(forged.reproduction / "records.jsonl", derived_records(RunDirectory(forged.reproduction), summary))


def right_answers(it: dict[str, Any]) -> None:
    it.update(num_correct=2, accuracy=0.5, standard_error=0.5 / 3**0.5)


def ledger_and_card(edit: Edit) -> Callable[[Forged], None]:
    """The same edit in both files of a dataset."""

    def change(forged: Forged) -> None:
        for name in ("ledger.json", "dataset.json"):
            json_file(forged.dataset / name, edit)

    return change


def older_in_place_of(newer: Path, older: Path) -> None:
    shutil.rmtree(newer)
    shutil.copytree(older, newer)


INSIDE: dict[str, tuple[Callable[[Forged], None], str]] = {
    "perplexity of a record": (
        records(lambda lines: [divided_by_ten(line) for line in of(lines, "heldout_perplexity")]),
        "records.jsonl: 355m ",
    ),
    "accuracy of a record": (
        record("heldout_cloze_accuracy", value=66.51),
        "heldout_cloze_accuracy (scaled): value is 66.51",
    ),
    "validation of a record": (
        record("validation_perplexity", value=9.27),
        "validation_perplexity (scaled): value is 9.27",
    ),
    "loss of a record": (record("training_loss", value=2.5), "training_loss (scaled): value is 2.5"),
    "last perplexity of a record": (record("final_validation_perplexity", value=9.0), "value is 9.0"),
    "kinds of records": (
        records(lambda lines: [line.update(kind="measured") for line in of(lines, "training_loss")]),
        "kind is measured; ",
    ),
    "kind of one record": (
        record("heldout_perplexity", kind="scaled", quantity="wikitext103_perplexity"),
        "quantity is wikitext103_perplexity; ",
    ),
    "a published number": (record("wikitext103_perplexity", "published", value=11.1), "value is 11.1; "),
    "a published number deleted": (
        records(lambda lines: lines.remove(of(lines, "lambada_accuracy", "published")[0])),
        "records.jsonl: 355m ",
    ),
    "a number called published": (record("training_loss", kind="published"), "(published)"),
    "all records of a model": (records(lambda lines: lines.clear()), " is None; what it is made of gives "),
    "a record deleted": (
        records(lambda lines: lines.remove(of(lines, "validation_perplexity")[0])),
        "records.jsonl: 355m ",
    ),
    "two records exchanged": (records(lambda lines: lines.insert(-2, lines.pop())), "records.jsonl: "),
    "a record twice": (records(lambda lines: lines.append(lines[-1])), "; what it is made of gives None"),
    "seed of a record": (record("training_loss", seed=1), "training_loss (scaled): "),
    "run of a record": (record("training_loss", source="355m-tiny-00000000"), "training_loss (scaled): "),
    "digest of a record": (record("heldout_perplexity", digest="0" * 64), "heldout_perplexity (scaled): "),
    "note of a record": (record("heldout_perplexity", note=""), "heldout_perplexity (scaled): "),
    "place of a record": (record("training_loss", x=300000), "x is 300000"),
    "mode": (summarised(mode="full"), "summary.json: mode is full; "),
    "mode and kinds everywhere": (full_size, "355m is called full and is a smaller model"),
    "target": (summarised(target="8.3b"), "summary.json: target is 8.3b"),
    "published shape": (
        summary(lambda it: it["models"][0]["published"].update(hidden_size=16)),
        "published 355m: hidden_size is 16; its recipe gives 1024",
    ),
    "trained shape": (
        summary(lambda it: it["models"][0]["trained"].update(hidden_size=1024)),
        "summary.json: 355m: trained: hidden_size is 1024; 355m-tiny-",
    ),
    "speed": (summary(lambda it: it["models"][0].update(tokens_per_second=1e6)), "summary.json: 355m: "),
    "tokens": (summary(lambda it: it["models"][0].update(tokens=300_000_000)), "summary.json: 355m: "),
    "hardware": (summarised(hardware="512 × V100"), "summary.json: hardware is 512"),
    "commit": (summarised(commit="0" * 40), "summary.json: "),
    "source of the text": (summarised(source="wikipedia"), "summary.json: "),
    "twin rule": (summarised(twin_rule=""), "summary.json: twin_rule is "),
    "command": (summary(lambda it: it["commands"].update(models="make tea")), "a command that makes something else"),
    "checkpoint": (
        summary(lambda it: it["models"][0].update(checkpoint_digest="0" * 64)),
        ".json: checkpoint_digest is ",
    ),
    "no models": (summary(lambda it: it["models"].clear()), "summary.json: models is []; "),
    "run of a model": (
        summary(lambda it: it["models"][0].update(run="other-00000000")),
        "manifest.json: parents",
    ),
    "parents": (
        lambda forged: manifest(forged.reproduction, lambda it: it["parents"].update({"355m-tiny": "0" * 64})),
        " as it is here: its digest differs",
    ),
    "data among the parents": (
        lambda forged: manifest(forged.reproduction, lambda it: it["parents"].update(dataset="0" * 64)),
        "manifest.json: dataset is 0000",
    ),
    "configuration": (
        inside("manifest.json", lambda it: it["config"].update(windows=5000)),
        "the configuration in manifest.json is not the one its digest was made of",
    ),
    "perplexity of an evaluation": (evaluation("wikitext103", divided), "wikitext103.json: perplexity is "),
    "all perplexities of an evaluation": (evaluation("wikitext103", all_divided), "subword_perplexity is "),
    "bits per byte": (
        evaluation("wikitext103", lambda it: it.update(bits_per_byte=0.97)),
        "bits_per_byte is 0.97; its own sums give",
    ),
    "loss of an article": (
        evaluation("wikitext103", lambda it: it["blocks"][0].update(nll=1.0)),
        "loss_per_token is ",
    ),
    "standard error": (
        evaluation("lambada", lambda it: it.update(standard_error=0.5)),
        "standard_error is 0.5; its own sums give",
    ),
    "four times the words": (four_times_the_words, "; its text gives 304"),
    "right answers": (evaluation("lambada", right_answers), "says 2 right answers; examples.jsonl has 0 in 4"),
    "examples of a text": (evaluation("lambada", lambda it: it.update(num_original_tokens=5153)), "its text gives 5"),
    "an older checkpoint's evaluation": (
        evaluation(
            "lambada", lambda it: it.update(checkpoint="355m-tiny-387328e9/iter_0000004", checkpoint_digest="1" * 64)
        ),
        "355m-lambada.json: checkpoint",
    ),
    "kind of an evaluation": (
        evaluation("lambada", lambda it: it.update(kind="measured")),
        "lambada.json: kind is measured",
    ),
    "tokenizer": (evaluation("lambada", lambda it: it.update(tokenizer_digest="0" * 64)), ".json: "),
    "part of a test": (
        evaluation("wikitext103", lambda it: it.update(partial=not it["partial"])),
        "wikitext103.json: partial is ",
    ),
    "another task's evaluation": (copied_evaluation, "355m-wikitext103.json is not what it should be"),
    "no evaluation": (removed(f"evaluations/{MODEL}-lambada.json"), "evaluations is "),
    "a loss that was kept": (
        inside(f"training/{MODEL}/metrics.jsonl", lambda lines: lines[1].update(loss=1.0)),
        f"training/{MODEL}/metrics.jsonl is not what",
    ),
    "an end that was kept": (
        inside(f"training/{MODEL}/summary.json", lambda it: it.update(validation_perplexity=9.3)),
        "perplexity is 9.3; its metrics.jsonl gives",
    ),
    "no curves": (removed("training"), f"{MODEL}/summary.json is not what"),
    "the ledger": (
        inside("ledger.json", lambda it: it["stages"][0].update(documents_out=9)),
        "ledger.json is not what",
    ),
    "the data card": (inside("dataset.json", lambda it: it.update(seed=99)), "dataset.json is not what"),
}
OF_PARENTS: dict[str, tuple[Callable[[Forged], None], str]] = {
    "metrics of the training": (
        trained("metrics.jsonl", lambda lines: lines[1].update(loss=1.0)),
        " as it is here: its digest",
    ),
    "an iteration less": (
        trained("metrics.jsonl", lambda lines: lines.pop(2)),
        "does not have each of 6 iterations once",
    ),
    "end of the training": (
        trained("summary.json", lambda it: it.update(validation_loss=1.0)),
        "loss is 1.0; its metrics.jsonl gives",
    ),
    "recipe of the training": (
        lambda forged: manifest(forged.training, lambda it: it["config"]["train"].update(seed=1)),
        " belongs to another run",
    ),
    "weights": (weights, "355m-tiny-387328e9 as it is here: its digest differs"),
    "tokens": (tokens, "dataset.json: files: train_text_document.bin: sha256 is "),
    "data of the training": (another_dataset, "355m-tiny-387328e9 was not made of tiny-1d71ab2f as it is here"),
    "tokens of the training": (
        trained("summary.json", lambda it: it.update(tokens=10 * it["tokens"])),
        "; its configuration gives ",
    ),
    "rate of the training": (
        trained("summary.json", lambda it: it.update(tokens_per_second=1e6)),
        "its tokens and rate give",
    ),
    "samples of the training": (
        trained("metrics.jsonl", lambda lines: lines[1].update(samples=512)),
        "metrics.jsonl: samples at 1 is 512; its schedule gives 4",
    ),
    "tokens of the dataset": (
        ledger_and_card(lambda it: it["splits"]["train"].update(tokens=10**9)),
        "train_text_document: documents and tokens, 2 is 1000000000; ",
    ),
    "bytes of the dataset": (
        ledger_and_card(lambda it: it["splits"]["valid"].update(bytes=1)),
        "documents and bytes of its splits",
    ),
    "attrition of the dataset": (
        lambda forged: json_file(forged.dataset / "ledger.json", lambda it: it["stages"][4]["dropped"].clear()),
        "ledger.json: documents into deduplicate is ",
    ),
    "ledger of the dataset": (
        lambda forged: json_file(forged.dataset / "ledger.json", lambda it: it.update(source="all")),
        "dataset.json: source is ",
    ),
}
OF_AN_EXPERIMENT: dict[str, tuple[Callable[[Forged], None], str]] = {
    "a simulated number": (simulated(value=163.0), "does not have the numbers that the run was begun with"),
    "a simulated number called measured": (
        simulated(kind="measured", low=None, high=None),
        "is of mode simulate and yet calls",
    ),
    "an older run's files": (
        lambda forged: older_in_place_of(forged.experiment, next(KEPT.glob("experiment-2021-figure-6-measured-*"))),
        "was renamed or copied over another: it began as experiment-2021-figure-6-measured-",
    ),
    "a computed number's source": (simulated(source="another-run"), "has records of another run"),
}
ON_THE_PAGE: dict[str, tuple[Callable[[Forged], None], str]] = {
    "a verdict": (text("index.html", "not-run", "reproduced"), "report/index.html is not what"),
    "a number": (
        text("figures/further-numbers.csv", "scaled,iteration", "measured,iteration"),
        "report/figures/further",
    ),
    "a model": (text("index.html", ">355m<", ">8.3b<"), "report/index.html is not what"),
    "a finding": (text("index.html", "<p>", "<p>Every number was reproduced. "), "report/index.html is not what"),
    "a script": (text("index.html", "</body>", "<script>alert(1)</script></body>"), "report/index.html is not what"),
    "an empty page": (lambda forged: (forged.report / "index.html").write_text(""), "report/index.html is not what"),
    "no page": (lambda forged: (forged.report / "index.html").unlink(), "report/index.html is not what"),
    "a drawing": (lambda forged: next(forged.report.rglob("*.svg")).write_text("<svg>9.3</svg>"), ".svg is not what"),
    "a file more": (lambda forged: (forged.report / "more.html").write_text("9.3"), "report/more.html is not what"),
    "what it was made of": (
        lambda forged: json_file(forged.report / "sources.json", lambda it: it["runs"].append("../gone")),
        "report was made of gone, which is not there",
    ),
    "not said what it was made of": (
        lambda forged: (forged.report / "sources.json").unlink(),
        "sources.json cannot be read",
    ),
}


def divided_by_ten(line: dict[str, Any]) -> None:
    line["value"] /= 10


def as_a_forger_would(run: Path, edit: Edit) -> Path:
    """Edit a manifest, make its digests again as far as it has them, and name the directory after its identity."""
    values = json.loads((run / "manifest.json").read_text())
    edit(values)
    values["config_digest"] = sha256_json(values["config"])
    if "outside_identity" in values:
        what = {key: value for key, value in values["config"].items() if key not in values["outside_identity"]}
        version = values.get("environment", {}).get("mlm_repro", "0.1.0")
        values["identity"] = identity_of(values.get("kind", ""), what, values.get("parents", {}), version)
    else:
        values["identity"] = "0" * 64
    (run / "manifest.json").write_text(json.dumps(values))
    return run.rename(run.with_name(f"{values.get('name', run.name)}-{values['identity'][:8]}"))


def without(key: str) -> Callable[[Path], Path]:
    return lambda run: as_a_forger_would(run, lambda it: it.pop(key))


def lacking(run: Path) -> Path:
    """A file less of those that the kind must have."""
    next(path for path in sorted(run.iterdir()) if path.name in KINDS[kind_in(run)].files).unlink()
    return run


def beside(name: str) -> Callable[[Path], Path]:
    def edit(run: Path) -> Path:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("perplexity 9.3")
        return run

    return edit


def kind_in(run: Path) -> str:
    return str(json.loads((run / "manifest.json").read_text())["kind"])


EVERY_KIND: dict[str, tuple[Callable[[Path], Path], str]] = {
    "unknown kind": (
        lambda run: as_a_forger_would(run, lambda it: it.update(kind="work")), "of which nothing is known"
    ),
    "no identity's sections": (without("outside_identity"), "manifest.json of "),
    "train outside of the identity": (
        lambda run: as_a_forger_would(run, lambda it: it.update(outside_identity=[*it["config"]])),
        " has more outside of its identity than where the run takes place",
    ),
    "a page planted": (beside("page/index.html"), " has page/index.html, which no run of its kind has"),
    "a file less": (lacking, " has no "),
    "renamed": (lambda run: run.rename(run.with_name("8.3b-0123abcd")), "8.3b-0123abcd was renamed or copied over"),
}  # fmt: skip


@pytest.fixture(scope="module")
def kinds(honest: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An honest run of each kind but ladders, whose laws take seconds to fit, and of one of the verbs of mlm-data."""
    cleaned = tmp_path_factory.mktemp("kinds") / "cleaned"
    text = next(honest.glob("tiny-*/documents/train.jsonl"))
    call({}, "mlm-data", "clean", f"jsonl:{text}", cleaned, "--workers", "1", ends=0)
    others = [*in_runs(honest), cleaned, *(ROOT / "results" / "against").iterdir(),
              KEPT / "ablation-forecast-84ff624f", next(KEPT.glob("experiment-*-effects-*"))]  # fmt: skip
    return {kind_in(run): run for run in others}


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize(
    "kind", ["reproduction", "training", "data", "data-clean", "experiment", "ablation", "forecast", "against"]
)
def test_what_no_run_of_its_kind_has_is_named(kind: str, name: str, kinds: dict[str, Path], tmp_path: Path) -> None:
    edit, sentence = EVERY_KIND[name]
    run = edit(Path(shutil.copytree(kinds[kind], tmp_path / kinds[kind].name)))
    shutil.rmtree(run / "report", ignore_errors=True)
    seal(run)
    broken = RunCheck(run).broken
    assert [found for found in broken if sentence in found], broken


def test_what_was_made_honestly_holds(honest: Path) -> None:
    for path in in_runs(honest):
        check = RunCheck(path)
        assert (check.broken, check.absent) == ([], []), path


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "results" / "reproduce-8.3b",
        ROOT / "results" / "ladder",
        *(manifest.parent for manifest in sorted((ROOT / "results").glob("a*/*-*/manifest.json"))[::3]),
    ],
    ids=lambda path: path.name,
)
def test_what_is_kept_of_earlier_versions_holds(path: Path) -> None:
    assert RunCheck(path).broken == []


@pytest.mark.parametrize(("factor", "holds"), [(1 + 1e-13, True), (1 + 1e-6, False)])
def test_a_ladder_fitted_by_another_processor_holds_and_a_changed_rate_does_not(
    tmp_path: Path, factor: float, holds: bool
) -> None:
    ladder = tmp_path / "ladder"
    shutil.copytree(ROOT / "results" / "ladder", ladder)
    json_file(ladder / "ladder.json", lambda it: it["rates"].update(rate=factor * it["rates"]["rate"]))
    seal(ladder)
    broken = RunCheck(ladder).broken
    assert [sentence.partition(" is ")[0] for sentence in broken] == ([] if holds else ["ladder.json: rates: rate"])


OF_A_KIND: dict[str, tuple[Callable[[Path], object], str]] = {
    "ablation-forecast-84ff624f": (
        lambda run: json_file(run / "forecast.json", lambda it: it["bits_per_nat"].append(1)),
        "forecast.json: digest is ",
    ),
    "against-megatron-core-355m-twin-tp2-fp32-500-47b98c48": (
        lambda run: json_file(run / "against.json", lambda it: it["cases"][0]["series"][0]["samples"].reverse()),
        "against.json: differences of the loss, 1 is ",
    ),
    "ladder": (
        lambda run: json_file(
            min((run / "evaluations").iterdir()), lambda it: it["texts"]["wikitext103"].update(bits_per_byte=0.9)
        ),
        "the bits per byte of wikitext103 in ladder are not of the losses beside them",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_A_KIND)
def test_a_sum_that_its_own_parts_contradict_is_named(name: str, tmp_path: Path) -> None:
    edit, sentence = OF_A_KIND[name]
    run = Path(shutil.copytree(next((ROOT / "results").glob(f"**/{name}")), tmp_path / name))
    edit(run)
    seal(run)
    broken = RunCheck(run).broken
    assert [found for found in broken if sentence in found], broken


def is_named(sentence: str, forged: Forged) -> None:
    broken = RunCheck(forged.reproduction).broken
    assert [found for found in broken if sentence in found], broken


@pytest.mark.parametrize("name", INSIDE | OF_PARENTS)
def test_an_edit_sealed_anew_up_to_the_page_is_named(name: str, forged: Forged) -> None:
    edit, sentence = (INSIDE | OF_PARENTS)[name]
    edit(forged)
    forged.seal()
    with suppress(UserError, ValueError, KeyError):  # of what no page can be made of any more
        forged.publish()
    is_named(sentence, forged)


@pytest.mark.parametrize("name", OF_AN_EXPERIMENT)
def test_an_edit_of_an_experiment_is_named(name: str, forged: Forged) -> None:
    edit, sentence = OF_AN_EXPERIMENT[name]
    edit(forged)
    forged.seal()
    broken = RunCheck(forged.experiment).broken
    assert [found for found in broken if sentence in found], broken


def test_an_experiment_on_the_page_that_was_edited_or_is_gone_is_named(forged: Forged) -> None:
    forged.publish(forged.experiment)
    assert RunCheck(forged.reproduction).broken == []
    simulated(value=163.0)(forged)
    forged.seal()
    forged.publish(forged.experiment)
    is_named("does not have the numbers that the run was begun with", forged)
    shutil.rmtree(forged.experiment)
    is_named("report was made of experiment-2021-figure-6-", forged)


@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_an_edit_of_the_page_is_named(name: str, forged: Forged) -> None:
    edit, sentence = ON_THE_PAGE[name]
    edit(forged)
    seal(forged.report)
    is_named(sentence, forged)


def test_the_command_names_every_forgery(forged: Forged) -> None:
    record("training_loss", value=2.5)(forged)
    evaluation("lambada", lambda it: it.update(standard_error=0.5))(forged)
    forged.seal()
    done = call({}, "mlm-verify", "run", forged.reproduction, ends=6, prepare=leave_figures_blank)
    assert "records.jsonl: 355m training_loss (scaled): value is 2.5" in done.err
    assert "standard_error is 0.5; its own sums give" in done.err
