"""Edits of sealed results, each sealed anew up to the page as an honest change would be: all are
named."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.experiments.catalogue import find_experiment
from mlm_repro.experiments.files import write_runs
from mlm_repro.experiments.reproduce.files import ReproductionSummary
from mlm_repro.experiments.reproduce.reproduction import derived_records, keep_training
from mlm_repro.lineage.digest import seal, sha256_json
from mlm_repro.lineage.errors import UserError
from mlm_repro.lineage.files import read_document
from mlm_repro.lineage.records import write_records
from mlm_repro.lineage.run import RunDirectory, identity_in
from mlm_repro.reports import page
from mlm_repro.verify.recomputed import KINDS, RunCheck
from tests.architecture.rooms import ROOT
from tests.chaos.job import leave_figures_blank
from tests.commands import call
from tests.experiments.packed import join, unpack
from tests.experiments.simulated import seal_simulated
from tests.reports.reproduction import build_page

Edit = Callable[[Any], object]
RESULTS = ROOT / "results"
KEPT = RESULTS / "ablations"
REPRODUCTION, TRAINING, DATA, SIMULATED = RUNS = (
    "reproduce-355m",
    "355m-tiny",
    "tiny",
    "experiment-2021-figure-6",
)
SUMMARY, EVALUATIONS, TRAININGS, RECORDS, PAGE = (
    f"{REPRODUCTION}/{name}"
    for name in ("summary.json", "evaluations.jsonl", "runs.jsonl", "records.jsonl", "report")
)
ZEROS = "0" * 64


def seal_all(runs: Path) -> None:
    """Seal everything from the innermost up."""
    training = (runs / TRAINING).resolve()
    checkpoints = sorted((training / "checkpoints").iterdir())
    for directory in (runs / DATA, *checkpoints, training, runs / SIMULATED, runs / REPRODUCTION):
        seal(directory.resolve())


def publish(runs: Path, *experiments: str) -> None:
    """Make the page say what the files say now."""
    build_page(
        (runs / REPRODUCTION).resolve(), runs=[(runs / name).resolve() for name in experiments]
    )


def broken(run: Path) -> list[str]:
    return RunCheck(run.resolve()).broken


def is_named(sentence: str, run: Path) -> None:
    found = broken(run)
    assert [each for each in found if sentence in each], found


@pytest.fixture(autouse=True)
def _blank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "render_all", page.render_all)  # put back after the test
    leave_figures_blank()


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs: what an earlier version sealed, its reproduction as one of today keeps
    its parts, and a simulated experiment; not to be changed."""
    folder = unpack(tmp_path_factory.mktemp("honest"))
    seal_simulated(find_experiment("2021/figure-6"), folder / "runs")
    reproduction, training = (next((folder / "runs").glob(f"{name}-*")) for name in RUNS[:2])
    join(reproduction)
    write_runs(reproduction, [keep_training(RunDirectory(training))])
    seal(reproduction)
    for name in RUNS[:3]:
        (folder / "runs" / name).symlink_to(next((folder / "runs").glob(f"{name}-*")).name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "render_all", page.render_all)
        leave_figures_blank()
        publish(folder / "runs")
    return folder / "runs"


@pytest.fixture
def runs(honest: Path, tmp_path: Path) -> Path:
    """Copies that a test may change: a reproduction, the runs it was made of, and an experiment."""
    return Path(shutil.copytree(honest, tmp_path / "runs", symlinks=True))


# -- edits
# --------------------------------------------------------------------------------------------------


def change(path: Path, edit: Edit) -> None:
    """Edit the JSON of a file, the list of lines of one of lines, or the bytes of any other."""
    before = path.read_bytes()
    if path.suffix == ".json":
        values = json.loads(before)
        edit(values)
        path.write_text(json.dumps(values, indent=2), encoding="utf-8")
    elif path.suffix == ".jsonl":
        lines = [json.loads(line) for line in before.splitlines()]
        edit(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    else:
        path.write_bytes(edit(before))  # type: ignore[arg-type]
    assert path.read_bytes() != before


def put(*keys: str | int, **values: Any) -> Edit:
    """Set values of the part of a document that these keys lead to."""

    def edit(it: Any) -> None:
        for key in keys:
            it = it[key]
        it.update(values)

    return edit


def of(lines: list[dict[str, Any]], quantity: str, kind: str = "scaled") -> list[dict[str, Any]]:
    found = [line for line in lines if (line.get("quantity"), line.get("kind")) == (quantity, kind)]
    assert found
    return found


def record(quantity: str, kind: str = "scaled", /, **values: Any) -> Edit:
    return lambda lines: of(lines, quantity, kind)[-1].update(values)


def divided(*names: str) -> Edit:
    return lambda it: it.update({name: it[name] / 10 for name in names})


def cloze(edit: Edit) -> Edit:
    """An edit of the first of the kept evaluations."""
    return lambda lines: edit(lines[0]["result"])


def text(edit: Edit) -> Edit:
    """An edit of the second of the kept evaluations."""
    return lambda lines: edit(lines[1]["result"])


def said(old: str, new: str) -> Edit:
    """Of a page."""
    return lambda text: text.replace(old.encode(), new.encode(), 1)


def flipped(at: int) -> Edit:
    """A bit of a byte of weights or tokens."""
    return lambda data: bytes(byte ^ (number == at % len(data)) for number, byte in enumerate(data))


def remade(edit: Edit) -> Edit:
    """An edit of a manifest that makes the digests in it again, as far as it has them."""

    def whole(it: dict[str, Any]) -> None:
        edit(it)
        it["config_digest"], it["identity"] = sha256_json(it["config"]), ZEROS
        # A configuration that no settings follow from keeps its own.
        with suppress(ValueError, KeyError):
            counted = KINDS[it["kind"]].settings(it["config"])
            it["settings"] = {
                key: value for key, value in counted.items() if key not in it["outside_identity"]
            }
        if "outside_identity" in it:
            it["identity"] = identity_in(it)

    return whole


def manifest(run: str, edit: Edit) -> Callable[[Path], None]:
    return lambda runs: change(runs / run / "manifest.json", remade(edit))


def removed(name: str) -> Callable[[Path], None]:
    def edit(runs: Path) -> None:
        path = runs / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return edit


def full_size(runs: Path) -> None:
    """A twin called the published model everywhere that says so."""
    manifest(REPRODUCTION, put("config", mode="full"))(runs)
    change(runs / SUMMARY, put(mode="full"))
    for of_task in (text, cloze):
        change(runs / EVALUATIONS, of_task(put(kind="measured")))
    change(
        runs / RECORDS,
        lambda lines: [it.update(kind="measured") for it in lines if it["kind"] == "scaled"],
    )


def four_times_the_words(runs: Path) -> None:
    """A perplexity of 23 million becomes one of 69.5, and what follows from it is made again."""

    def edit(it: dict[str, Any]) -> None:
        for name in ("num_original_tokens", "num_lm_eval_words", "normaliser"):
            it[name] *= 4
        for name in ("perplexity", "original_token_perplexity", "lm_eval_word_perplexity"):
            it[name] **= 1 / 4
        it["log_perplexity_standard_error"] /= 4
        it["token_ratio"] = (it["num_tokens"] - 1) / (it["num_original_tokens"] - 1)

    change(runs / EVALUATIONS, text(edit))
    run = RunDirectory((runs / REPRODUCTION).resolve())
    write_records(
        runs / RECORDS, derived_records(run, read_document(runs / SUMMARY, ReproductionSummary))
    )


def both_of_data(edit: Edit) -> Callable[[Path], None]:
    """The same edit in ledger and card of a dataset."""

    def change_both(runs: Path) -> None:
        for name in ("ledger.json", "dataset.json"):
            change(runs / DATA / name, edit)

    return change_both


def copied(runs: Path) -> None:
    change(runs / EVALUATIONS, lambda lines: lines[1].update(result=lines[0]["result"]))


def simulated(**values: Any) -> Callable[[Path], None]:
    return lambda runs: change(runs / SIMULATED / "records.jsonl", put(0, **values))


def last_weights(runs: Path) -> None:
    change(max((runs / TRAINING).glob("checkpoints/*/model-*.safetensors")), flipped(-1))


def older_in_place_of_newer(runs: Path) -> None:
    newer = (runs / SIMULATED).resolve()
    shutil.rmtree(newer)
    shutil.copytree(KEPT / "experiments", newer)


ACCURACY = 0.5 / 3**0.5
OLDER = {"checkpoint": "355m-tiny-387328e9/iter_0000004", "checkpoint_digest": "1" * 64}
MADE_AGAIN: list[tuple[str, Edit, str]] = [
    (
        RECORDS,
        lambda lines: [it.update(value=it["value"] / 10) for it in of(lines, "heldout_perplexity")],
        ": 355m ",
    ),
    (RECORDS, record("training_loss", value=2.5), "training_loss (scaled): value is 2.5"),
    (
        RECORDS,
        lambda lines: [it.update(kind="measured") for it in of(lines, "training_loss")],
        "kind is measured; ",
    ),
    (
        RECORDS,
        record("heldout_perplexity", quantity="wikitext103_perplexity"),
        "quantity is wikitext103_perplexity; ",
    ),
    (RECORDS, record("wikitext103_perplexity", "published", value=11.1), "value is 11.1; "),
    (
        RECORDS,
        lambda lines: lines.remove(of(lines, "lambada_accuracy", "published")[0]),
        "records.jsonl: 355m ",
    ),
    (RECORDS, record("training_loss", kind="published"), "(published)"),
    (RECORDS, lambda lines: lines.clear(), " is None; its inputs give "),
    (RECORDS, lambda lines: lines.insert(-2, lines.pop()), "records.jsonl: "),
    (RECORDS, lambda lines: lines.append(lines[-1]), "; its inputs give None"),
    (SUMMARY, put(mode="full"), "summary.json: mode is full; "),
    (SUMMARY, put(target="8.3b"), "summary.json: target is 8.3b"),
    (
        SUMMARY,
        put("models", 0, "published", hidden_size=16),
        "hidden_size is 16; its recipe gives 1024",
    ),
    (
        SUMMARY,
        put("models", 0, "trained", hidden_size=1024),
        "355m: trained: hidden_size is 1024; 355m-tiny-",
    ),
    (SUMMARY, put("models", 0, tokens_per_second=1e6), "summary.json: 355m: "),
    (SUMMARY, put(twin_rule=""), "summary.json: twin_rule is "),
    (SUMMARY, put("commands", models="make tea"), "a command that does not name its target"),
    (SUMMARY, put("models", 0, checkpoint_digest=ZEROS), "lambada: checkpoint_digest is "),
    (SUMMARY, lambda it: it["models"].clear(), "summary.json: models is []; "),
    (SUMMARY, put("models", 0, run="other-00000000"), "manifest.json: parents"),
    (
        f"{REPRODUCTION}/manifest.json",
        put("config", windows=5000),
        "is not the one its digest was made of",
    ),
    (EVALUATIONS, text(divided("perplexity")), "wikitext103: perplexity is "),
    (
        EVALUATIONS,
        text(
            divided(
                "perplexity",
                "original_token_perplexity",
                "lm_eval_word_perplexity",
                "subword_perplexity",
            )
        ),
        "subword_perplexity is ",
    ),
    (EVALUATIONS, text(put(bits_per_byte=0.97)), "bits_per_byte is 0.97; its own sums give"),
    (EVALUATIONS, text(put("blocks", 0, nll=1.0)), "loss_per_token is "),
    (
        EVALUATIONS,
        text(lambda it: it.update(partial=not it["partial"])),
        "wikitext103: partial is ",
    ),
    (EVALUATIONS, cloze(put(standard_error=0.5)), "standard_error is 0.5; its own sums give"),
    (
        EVALUATIONS,
        cloze(put(num_correct=2, accuracy=0.5, standard_error=ACCURACY)),
        "2 right answers; examples.jsonl has 0 in 4",
    ),
    (EVALUATIONS, cloze(put(num_original_tokens=5153)), "its text gives 5"),
    (EVALUATIONS, cloze(put(**OLDER)), "355m-lambada: checkpoint"),
    (
        EVALUATIONS,
        cloze(put(lambada_accuracy=66.51)),
        ": lambada_accuracy is 66.51; a file of its kind has None",
    ),
    (
        f"{REPRODUCTION}/manifest.json",
        put(verified=True),
        ": verified is True; a file of its kind has None",
    ),
    (EVALUATIONS, cloze(put(kind="measured")), "lambada: kind is measured"),
    (EVALUATIONS, cloze(put(tokenizer_digest=ZEROS)), "lambada: tokenizer_digest is "),
    (TRAININGS, put(0, "metrics", 1, loss=1.0), "kept training 355m: metrics, 2: loss is 1.0; "),
    (
        TRAININGS,
        put(0, "manifest", "config", "train", seed=1),
        "355m: its manifest.json is not the one",
    ),
    (
        TRAININGS,
        put(0, "seal", digest=ZEROS),
        "COMPLETE of 355m is damaged or was edited",
    ),
    (TRAININGS, put(0, "seal", verified=True), "COMPLETE of 355m is damaged or was edited"),
    (
        TRAININGS,
        put(0, "summary", validation_perplexity=9.3),
        "355m: its summary.json is not the one that was sealed",
    ),
    (f"{REPRODUCTION}/ledger.json", put("stages", 0, documents_out=9), "/ledger.json: sha256 is "),
    (f"{REPRODUCTION}/dataset.json", put(seed=99), "/dataset.json: sha256 is "),
    (f"{TRAINING}/metrics.jsonl", put(1, loss=1.0), " as it is here: the digest"),
    (
        f"{TRAINING}/metrics.jsonl",
        lambda lines: lines.pop(2),
        "does not have each of 6 iterations once",
    ),
    (
        f"{TRAINING}/metrics.jsonl",
        put(1, samples=512),
        "metrics.jsonl: samples at 1 is 512; its schedule gives 4",
    ),
    (
        f"{TRAINING}/metrics.jsonl",
        put(1, learning_rate=0.5),
        "learning_rate at 1 is 0.5; its schedule gives 0.0012",
    ),
    (f"{TRAINING}/summary.json", put(validation_loss=1.0), "loss is 1.0; its metrics.jsonl gives"),
    (
        f"{TRAINING}/summary.json",
        lambda it: it.update(tokens=10 * it["tokens"]),
        "; its configuration gives ",
    ),
    (f"{TRAINING}/summary.json", put(tokens_per_second=1e6), "its tokens and rate give"),
    (
        f"{DATA}/train_text_document.bin",
        flipped(0),
        "dataset.json: files: train_text_document.bin: sha256 is ",
    ),
    (
        f"{DATA}/ledger.json",
        lambda it: it["stages"][4]["dropped"].clear(),
        "documents into deduplicate is ",
    ),
    (f"{DATA}/ledger.json", put(source="all"), "dataset.json: source is "),
    (f"{DATA}/dataset.json", put(padded_vocab_size=0), "padded_vocab_size is 0; "),
    (f"{DATA}/dataset.json", put(vocab_size=299), "dataset.json: vocab_size is 299; "),
    (f"{DATA}/dataset.json", put(seed=0), "dataset.json: seed is 0; "),
    (f"{DATA}/dataset.json", put("tokenizer", kind="path"), "kind is path; "),
    (
        f"{DATA}/dataset.json",
        put("near_duplicates", threshold=0.6),
        "dataset.json: near_duplicates: threshold is 0.6; ",
    ),
]
"""File, edit, part of the sentence that names it."""
IN_SEVERAL: list[tuple[Callable[[Path], None], str]] = [
    (full_size, "355m is called full and is a smaller model"),
    (
        manifest(REPRODUCTION, put("parents", **{TRAINING: ZEROS})),
        " as it is here: the digest that the run recorded is another",
    ),
    (manifest(REPRODUCTION, put("parents", dataset=ZEROS)), "manifest.json: dataset is 0000"),
    (four_times_the_words, "; its text gives 304"),
    (copied, "wikitext103 in evaluations.jsonl does not fit its schema"),
    (removed(EVALUATIONS), "wikitext103 in evaluations.jsonl does not fit its schema"),
    (removed(TRAININGS), "kept training 355m is None; "),
    (manifest(TRAINING, put("config", "train", seed=1)), " belongs to another run"),
    (last_weights, "355m-tiny-387328e9 as it is here: the digest that the run recorded is another"),
    (
        manifest(TRAINING, put("parents", dataset=ZEROS)),
        " was not made of tiny-1d71ab2f as it is here",
    ),
    (both_of_data(put("splits", "train", tokens=10**9)), "documents and tokens, 2 is 1000000000; "),
    (both_of_data(put("splits", "valid", bytes=1)), "documents and bytes of its splits"),
]
OF_AN_EXPERIMENT: list[tuple[Callable[[Path], None], str]] = [
    (
        simulated(value=163.0),
        "does not have the numbers whose digest the manifest of experiment-2021-figure-6-",
    ),
    (
        simulated(kind="measured", low=None, high=None),
        "was made in mode simulate, which gives no measured",
    ),
    (simulated(source="another-run"), "has a record that names another run or experiment"),
    (older_in_place_of_newer, "renamed or copied over another: it began as experiments-"),
]
ON_THE_PAGE: list[tuple[str, Edit, str]] = [
    ("index.html", said("not tried", "confirmed"), "report/index.html is not what"),
    ("index.html", said("<p>", "<p>Every number was confirmed. "), "report/index.html is not what"),
    ("index.html", lambda text: b"", "report/index.html is not what"),
    (
        "figures/further-numbers.csv",
        said("scaled,iteration", "measured,iteration"),
        "report/figures/further",
    ),
    ("figures/*.svg", lambda text: b"<svg>9.3</svg>", ".svg is not what"),
    (
        "sources.json",
        lambda it: it["runs"].append("../gone"),
        "report was made of gone, which is not here or not sealed",
    ),
]


@pytest.mark.parametrize(("file", "edit", "sentence"), MADE_AGAIN)
def test_an_edit_sealed_anew_up_to_the_page_is_named(
    file: str, edit: Edit, sentence: str, runs: Path
) -> None:
    test_an_edit_of_several_files_is_named(lambda runs: change(runs / file, edit), sentence, runs)


@pytest.mark.parametrize(("edit", "sentence"), IN_SEVERAL)
def test_an_edit_of_several_files_is_named(
    edit: Callable[[Path], None], sentence: str, runs: Path
) -> None:
    edit(runs)
    seal_all(runs)
    with suppress(UserError, ValueError, KeyError):  # of what no page can be made of any more
        publish(runs)
    is_named(sentence, runs / REPRODUCTION)


OF_THE_FIRST_RELEASE: list[tuple[str, Edit, str]] = [
    (
        "training/355m/metrics.jsonl",
        put(1, loss=1.0),
        "kept training 355m: metrics, 2: loss is 1.0; ",
    ),
    (
        "training/355m/summary.json",
        put(validation_perplexity=9.3),
        "is 9.3; its metrics.jsonl gives",
    ),
    (
        "evaluations/355m-lambada.json",
        put(standard_error=0.5),
        "standard_error is 0.5; its own sums give",
    ),
]


@pytest.mark.parametrize(("file", "edit", "sentence"), OF_THE_FIRST_RELEASE)
def test_an_edit_of_what_the_first_release_kept_is_named(
    file: str, edit: Edit, sentence: str, tmp_path: Path
) -> None:
    (run,) = (unpack(tmp_path) / "runs").glob("reproduce-355m-*")
    change(run / file, edit)
    seal(run)
    is_named(sentence, run)


@pytest.mark.parametrize(("edit", "sentence"), OF_AN_EXPERIMENT)
def test_an_edit_of_an_experiment_is_named(
    edit: Callable[[Path], None], sentence: str, runs: Path
) -> None:
    edit(runs)
    seal_all(runs)
    is_named(sentence, runs / SIMULATED)


def test_an_experiment_on_the_page_that_was_edited_or_is_gone_is_named(runs: Path) -> None:
    publish(runs, SIMULATED)
    assert broken(runs / REPRODUCTION) == []
    OF_AN_EXPERIMENT[0][0](runs)
    seal_all(runs)
    publish(runs, SIMULATED)
    is_named(
        "does not have the numbers whose digest the manifest of experiment-2021-figure-6-",
        runs / REPRODUCTION,
    )
    shutil.rmtree((runs / SIMULATED).resolve())
    is_named("report was made of experiment-2021-figure-6-", runs / REPRODUCTION)


@pytest.mark.parametrize(("file", "edit", "sentence"), ON_THE_PAGE)
def test_an_edit_of_the_page_is_named(file: str, edit: Edit, sentence: str, runs: Path) -> None:
    change(next((runs / PAGE).glob(file)), edit)
    seal(runs / PAGE)
    is_named(sentence, runs / REPRODUCTION)


def test_a_file_of_the_page_more_or_less_is_named(runs: Path) -> None:
    (runs / PAGE / "more.html").write_text("9.3")
    is_named("report/more.html is not what", runs / REPRODUCTION)
    for name in ("index.html", "sources.json"):
        (runs / PAGE / name).unlink()
        is_named(f"{name} ", runs / REPRODUCTION)


def as_a_forger_would(edit: Edit) -> Callable[[Path], Path]:
    """Edit a manifest and name the directory after its new identity."""

    def whole(run: Path) -> Path:
        change(run / "manifest.json", remade(edit))
        values = json.loads((run / "manifest.json").read_text())
        return run.rename(run.with_name(f"{values['name']}-{values['identity'][:8]}"))

    return whole


def lacking(run: Path) -> Path:
    """A file less of those that the kind must have."""
    next(path for path in sorted(run.iterdir()) if path.name in KINDS[kind_in(run)].files).unlink()
    return run


def planted(run: Path) -> Path:
    (run / "page").mkdir()
    (run / "page" / "index.html").write_text("perplexity 9.3")
    return run


def kind_in(run: Path) -> str:
    return str(json.loads((run / "manifest.json").read_text())["kind"])


EVERY_KIND: dict[str, tuple[Callable[[Path], Path], str]] = {
    "unknown kind": (as_a_forger_would(put(kind="work")), "of an unknown kind: "),
    "no identity's sections": (
        as_a_forger_would(lambda it: it.pop("outside_identity")),
        "'outside_identity' is missing",
    ),
    "train outside of the identity": (
        as_a_forger_would(lambda it: it.update(outside_identity=[*it["config"]])),
        " was edited: its `outside_identity` does not name the sections that the identity of such a"
        " run leaves out",
    ),
    "a page planted": (planted, " has page/index.html, which no run of its kind has"),
    "a file less": (lacking, " has no "),
    "renamed": (
        lambda run: run.rename(run.with_name("8.3b-0123abcd")),
        "8.3b-0123abcd was renamed or copied over",
    ),
}


@pytest.fixture(scope="module")
def kinds(honest: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An honest run of each kind, and of one of the verbs of mlm-data."""
    cleaned = tmp_path_factory.mktemp("kinds") / "cleaned"
    text = honest / DATA / "documents" / "train.jsonl"
    call({}, "mlm-data", "clean", f"jsonl:{text}", cleaned, "--workers", "1", ends=0)
    ours = [*((honest / name).resolve() for name in RUNS), cleaned]
    kept = [
        *(RESULTS / "against").iterdir(),
        *(next(KEPT.glob(name)) for name in ("ablation-forecast-*", "*-effects-*", "experiments")),
    ]
    return {kind_in(run): run for run in [*ours, *kept]}


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize(
    "kind",
    [
        "reproduction",
        "training",
        "data",
        "data-clean",
        "experiment",
        "experiments",
        "ablation",
        "forecast",
        "against",
    ],
)
def test_what_no_run_of_its_kind_has_is_named(
    kind: str, name: str, kinds: dict[str, Path], tmp_path: Path
) -> None:
    edit, sentence = EVERY_KIND[name]
    run = edit(Path(shutil.copytree(kinds[kind], tmp_path / kinds[kind].name)))
    shutil.rmtree(run / "report", ignore_errors=True)
    seal(run)
    is_named(sentence, run)


def test_what_was_made_honestly_holds_and_nothing_of_it_is_left_out(kinds: dict[str, Path]) -> None:
    for kind in (
        "reproduction",
        "training",
        "data",
        "data-clean",
        "experiment",
        "forecast",
        "against",
    ):
        check = RunCheck(kinds[kind])
        assert (check.broken, check.absent) == ([], []), kind


@pytest.mark.parametrize(
    "path",
    [
        RESULTS / "reproduce-8.3b",
        *(path.parent for path in sorted(RESULTS.glob("a*/*/manifest.json"))[::3]),
    ],
    ids=lambda path: path.name,
)
def test_what_is_kept_of_earlier_versions_holds(path: Path) -> None:
    assert broken(path) == []


OF_A_KIND: list[tuple[str, str, Edit, str]] = [
    (
        "ablation-forecast-*",
        "forecast.json",
        lambda it: it["bits_per_nat"].append(1),
        ".json: digest is ",
    ),
    (
        "against-megatron-core-355m-twin-tp2-*",
        "against.json",
        lambda it: it["cases"][0]["series"][0]["samples"].reverse(),
        "against.json: differences of the loss, 1 is ",
    ),
    (
        "experiments",
        "records.jsonl",
        put(0, value=1.0),
        "217f54a5: its records.jsonl is not the one that was sealed",
    ),
    (
        "experiments",
        "records.jsonl",
        put(0, source="another"),
        "has records of a run that its runs.jsonl does not keep, another",
    ),
    (
        "experiments",
        "records.jsonl",
        lambda lines: lines.pop(),
        "its records.jsonl is not the one that was sealed",
    ),
    (
        "experiments",
        "runs.jsonl",
        put(0, "manifest", created=""),
        "its manifest.json is not the one that was sealed",
    ),
    (
        "experiments",
        "runs.jsonl",
        lambda lines: lines.pop(0),
        "has records of a run that its runs.jsonl does not keep, experiment-2019-bert-",
    ),
    (
        "experiments",
        "runs.jsonl",
        put(1, refused=[]),
        "its not_run.json is not the one that was sealed",
    ),
    (
        "experiments",
        "runs.jsonl",
        lambda lines: lines[0].pop("seal"),
        " is kept in runs.jsonl without its seal",
    ),
    (
        "against-megatron-core-355m-twin-tp2-*",
        "against.json",
        put("cases", 3, "ratios", 0, less_is_better="true"),
        "less_is_better is true; a file of its kind has True",
    ),
    (
        "against-megatron-core-355m-twin-tp2-*",
        "against.json",
        put("cases", 0, "ratios", 0, value=0.9),
        "share of the tolerance in the loss, 1: value is 0.9; its inputs give 0.04",
    ),
    (
        "against-megatron-core-355m-twin-tp2-*",
        "against.json",
        put("cases", 2, "ratios", 0, goal=2.0),
        "share of the tolerance in the learning rate, 1: goal is 2.0; its inputs give 1.0",
    ),
    (
        "against-megatron-core-355m-twin-tp2-*",
        "against.json",
        put("cases", 3, "ratios", 0, value=1.5, goal=2.0),
        "number of disagreements is 0; ",
    ),
]


@pytest.mark.parametrize(("name", "file", "edit", "sentence"), OF_A_KIND)
def test_a_sum_that_its_own_parts_contradict_is_named(
    name: str, file: str, edit: Edit, sentence: str, tmp_path: Path
) -> None:
    kept = next(RESULTS.glob(f"**/{name}"))
    run = Path(shutil.copytree(kept, tmp_path / kept.name))
    change(min(run.glob(file)), edit)
    seal(run)
    is_named(sentence, run)


def test_the_command_names_every_forgery(runs: Path) -> None:
    change(runs / RECORDS, record("training_loss", value=2.5))
    change(runs / EVALUATIONS, cloze(put(standard_error=0.5)))
    seal_all(runs)
    done = call(
        {},
        "mlm-verify",
        "run",
        (runs / REPRODUCTION).resolve(),
        ends=6,
        prepare=leave_figures_blank,
    )
    assert "records.jsonl: 355m training_loss (scaled): value is 2.5" in done.err
    assert "standard_error is 0.5; its own sums give" in done.err
