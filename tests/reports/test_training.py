"""The page of one training says what its files say, whatever became of the run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.data_pipeline.files import dataset_digest
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.run.files import METRICS
from mlm_repro.lineage.atomic import write_json, write_text
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.run import RunDirectory
from mlm_repro.reports.training import SHOWN, Trainings, render_trainings
from tests.commands import call
from tests.reports.browser import BROWSER, browse
from tests.reports.reproduction import HOSTILE, data_card, evaluation, ledger, write_reproduction
from tests.reports.test_page import Outline, rows_of

SUMMARY = {
    "parameters": 50_000,
    "iterations": 8,
    "tokens": 8192,
    "train_seconds": 75,
    "tokens_per_second": 1234.5,
}


def step(number: int, loss: float, **more: Any) -> dict[str, Any]:
    """A line of metrics."""
    return {
        "kind": "train",
        "iteration": number,
        "samples": 8 * number,
        "loss": loss,
        "learning_rate": 1e-3 / number,
        "gradient_norm": 0.5 + number,
        "seconds": 0.1,
        "tokens_per_second": 1000.25 + number,
        "model_tflops": 0.1,
        **more,
    }


def validation(number: int, loss: float) -> dict[str, Any]:
    """A line of metrics."""
    return {
        "kind": "validation",
        "iteration": number,
        "samples": 8,
        "loss": loss,
        "perplexity": 2.0**loss,
    }


LINES = [
    validation(0, 7.0),
    *(step(number, 7 - number / 3) for number in range(1, 9)),
    validation(8, 4.625),
]


def write_training(
    root: Path,
    lines: list[dict[str, Any]] = LINES,
    family: str = "gpt2",
    is_complete: bool = True,
    **recipe: Any,
) -> Path:
    """A training with a checkpoint, and its dataset, below `root`; `recipe` are settings of
    `train`."""
    data = root / "words"
    if not data.exists():
        write_text(data / "dataset.json", json.dumps(data_card()))
        write_text(data / "ledger.json", json.dumps(ledger()))
        seal(data)
    values = {
        "name": "own",
        "model": {"family": family, "num_layers": 2, "hidden_size": 32, "num_heads": 4},
        "train": {"iterations": 8, "precision": "fp32", **recipe},
        "data": {"dataset": str(data)},
    }
    config = parse_config(values, RunConfig, "the test").model_dump(mode="json")
    run = RunDirectory.begin(root, "own", "training", config, {"dataset": dataset_digest(data)})
    run.note_attempt(0, {"tp": 1, "pp": 1}, 2)
    (run.path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(run.path / "checkpoints" / "iter_0000008" / "index.json", {"of": str(root)})
    seal(run.path / "checkpoints" / "iter_0000008")
    if is_complete:
        write_json(run.path / "summary.json", SUMMARY)
        seal(run.path)
    return run.path


def page_of(run: Path) -> str:
    """The page's text."""
    return render_trainings(Trainings([run]))


def test_the_numbers_are_those_of_the_metrics_and_the_page_stands_alone(tmp_path: Path) -> None:
    html = page_of(run := write_training(tmp_path))
    assert page_of(run) == html
    rows = rows_of(html)
    for line in LINES:
        names = ("samples", "loss", "learning_rate", "gradient_norm", "tokens_per_second")
        wanted = (
            [line[name] for name in names]
            if line["kind"] == "train"
            else [8, line["loss"], line["perplexity"]]
        )
        (row,) = (
            row[1:]
            for row in rows
            if row[0] == str(line["iteration"]) and len(row) == len(wanted) + 1
        )
        assert [float(cell) for cell in row] == wanted
    assert "After 8 of 8 iterations the training loss is 4.33 and the validation loss 4.62." in html
    for fact in (
        "gpt2, ",
        "8,192",
        "tp 1, pp 1, dp 2",
        "1:15",
        "1,234 tokens/s",
        "complete and unchanged, digest",
    ):
        assert fact in html, fact
    assert {"data-ledger", "loss", "learning-rate", "gradient-norm", "throughput"} <= set(
        re.findall('id="([^"]+)"', html)
    )
    outline = Outline(html)
    assert outline.balanced
    assert all(place.startswith(("#", "data:")) for place in outline.references)
    assert HOSTILE.split()[0] not in html
    assert "figures/" not in html


def test_scores_of_its_checkpoints_are_curves(tmp_path: Path) -> None:
    run = write_training(tmp_path, is_complete=False)
    for number, perplexity in ((4, 96.0), (8, None)):
        result = {"accuracy": number / 16, "perplexity": perplexity}
        write_json(run / "scores" / f"iter_{number:07}" / "lambada.json", result)
    exhibits = Trainings([run]).exhibits
    for name, values in (("accuracy", [(4, 0.25), (8, 0.5)]), ("perplexity", [(4, 96.0)])):
        (panel,) = exhibits[f"lambada-{name}"].panels
        (curve,) = panel.layers
        assert [(point.x, point.value) for point in curve.points] == values
    assert "At the end: lambada accuracy: 0.50." in page_of(run)


@pytest.mark.parametrize("family", ["gpt2", "bert", "transformer-xl"])
@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], "No iteration of 8 is recorded."),
        ([validation(0, 7.0)], "No iteration of 8 is recorded."),
        (
            LINES[:4],
            "After 3 of 8 iterations the training loss is 6.00 and the validation loss 7.00.",
        ),
        (
            [step(1, 7.0), step(2, 9.5, gradient_norm=None, skipped=True)],
            "It began at 7.00: this training diverged.",
        ),
        ([step(1, 7.0, gradient_norm=None)], "After 1 of 8 iterations the training loss is 7.00."),
    ],
)
def test_an_unfinished_run_is_told_as_far_as_it_came(
    lines: list[dict[str, Any]], sentence: str, family: str, tmp_path: Path
) -> None:
    html = page_of(write_training(tmp_path, lines, family, is_complete=False))
    assert sentence in html
    assert "unfinished: it was stopped" in html
    assert ("Updates left out" in html) == any(line.get("skipped") for line in lines)
    assert f"{family}, " in html


def test_a_resumed_run_names_each_layout(tmp_path: Path) -> None:
    run = write_training(tmp_path, is_complete=False)
    RunDirectory(run).note_attempt(3, {"tp": 1, "pp": 1}, 2)
    RunDirectory(run).note_attempt(5, {"tp": 2, "pp": 1}, 2)
    assert "tp 1, pp 1, dp 2; from iteration 6 tp 2, pp 1, dp 1" in page_of(run)


def test_many_iterations_become_means_with_their_range(tmp_path: Path) -> None:
    run = write_training(
        tmp_path,
        [validation(0, 7.0), *(step(number, 5 + number % 2) for number in range(1, 3 * SHOWN + 2))],
    )
    html = page_of(run)
    assert "Points are means of 4 iterations, the band their least and greatest." in html
    assert "93 of 1201 recorded iterations" in html
    assert [row[0] for row in rows_of(html) if len(row) == 6][-1] == f"{3 * SHOWN + 1}"


def test_results_and_text_of_its_own_checkpoints_are_shown(tmp_path: Path) -> None:
    run, other = write_training(tmp_path / "mine"), write_training(tmp_path / "others")
    own, foreign = (
        json.loads((each / "checkpoints/iter_0000008/COMPLETE").read_bytes())["digest"]
        for each in (run, other)
    )
    for place, digest in (("own", own), ("foreign", foreign)):
        text = {"prompt": "Once", "continuation": f" {place} <b>", "checkpoint_digest": digest}
        write_json(run.parent / f"{place}-text.json", text)
        write_json(
            run.parent / f"{place}-all.json",
            {"results": {"lambada": evaluation(place, checkpoint_digest=digest, blocks=[])}},
        )
    write_json(run.parent / "list.json", {"results": [1]})
    (run.parent / "cut.json").write_text("{")
    html = page_of(run)
    assert "<strong>Once</strong> own &lt;b&gt;" in html
    assert [row[1] for row in rows_of(html) if "own-all-lambada" in row] == ["own"]
    assert "foreign" not in html


def test_data_that_is_elsewhere_is_named(tmp_path: Path) -> None:
    run = write_training(tmp_path)
    shutil.rmtree(tmp_path / "words")
    assert "words is not here, or was built anew since." in page_of(run)


def test_a_changed_run_and_what_is_no_training_are_refused(tmp_path: Path) -> None:
    run = write_training(tmp_path)
    with (run / METRICS).open("a") as file:
        file.write(json.dumps(step(9, 1.0)) + "\n")
    done = call({}, "mlm-report", "run", run, "--out", tmp_path)
    assert done.code == 6
    assert "was changed after" in done.err
    assert not (tmp_path / f"{run.name}.html").exists()
    for wrong in (write_reproduction(tmp_path), tmp_path, tmp_path / "absent"):
        done = call({}, "mlm-report", "run", wrong)
        assert done.code == 2
        (line,) = done.err.splitlines()
        assert re.search("reproduction, not a training run|is not a run directory", line)


def above(number: float) -> list[dict[str, Any]]:
    """The lines, with losses higher by `number`."""
    return [line | {"loss": line["loss"] + number} for line in LINES]


def test_runs_that_differ_in_the_seed_are_one_line_and_others_lines_of_their_own(
    tmp_path: Path,
) -> None:
    low = write_training(tmp_path, above(-0.5), seed=1)
    high = write_training(tmp_path, above(1.0), seed=2)
    other = write_training(tmp_path, above(-1.0), seed=1, learning_rate=0.25)
    shorter = write_training(tmp_path, LINES[:4], is_complete=False, iterations=9)
    page = Trainings([low, other, high, shorter])
    exhibits = page.exhibits
    for name, lines in (("loss", LINES[1:-1]), ("validation-loss", [LINES[0], LINES[-1]])):
        mean, *alone = exhibits[name].panels[0].layers
        assert mean.series == f"{low.name}, mean of 2 seeds"
        assert [(point.x, point.count) for point in mean.points] == [
            (line["iteration"], 2) for line in lines
        ]
        for point, line in zip(mean.points, lines, strict=True):
            numbers = (point.value, point.low, point.high)
            assert numbers == pytest.approx([line["loss"] + part for part in (0.25, -0.5, 1.0)])
        assert [layer.series for layer in alone] == [other.name, shorter.name]
        assert [point.value for point in alone[0].points] == [line["loss"] - 1 for line in lines]
        assert all(point.low is None for point in alone[0].points)
        assert len(alone[1].points) == (3 if name == "loss" else 1)
    html = render_trainings(page)
    runs = [run.name for run in (low, other, high, shorter)]
    rows = rows_of(html)
    start = rows.index(["setting", *runs])
    assert rows[start + 1 : start + 4] == [
        ["train.iterations", "8", "8", "8", "9"],
        ["train.learning_rate", "0.00015", "0.25", "0.00015", "0.00015"],
        ["train.seed", "1", "1", "2", "1234"],
    ]
    sentence = (
        f"Of 3 lines, the one that ends at the lowest validation loss, 3.62, is {other.name}."
    )
    assert sentence in html
    assert Outline(html).balanced
    for run in runs:
        assert f"{run}: " in html


def test_seeds_alone_are_one_line_with_training_and_validation(tmp_path: Path) -> None:
    runs = [write_training(tmp_path, above(seed), seed=seed) for seed in range(3)]
    training, validation = Trainings(runs).exhibits["loss"].panels[0].layers
    assert (training.series, validation.series) == ("training", "validation")
    assert validation.points[-1].value == pytest.approx(LINES[-1]["loss"] + 1)
    assert "3 trainings that differ in the seed alone." in render_trainings(Trainings(runs))


def test_many_iterations_of_several_runs_have_the_band_of_the_runs(tmp_path: Path) -> None:
    lines = [step(number, 5 + number % 2) for number in range(1, 2 * SHOWN + 1)]
    higher = [line | {"loss": line["loss"] + 1} for line in lines]
    runs = [
        write_training(tmp_path, each, seed=seed)
        for seed, each in enumerate((lines, higher, lines))
    ]
    curve = Trainings(runs[:2]).exhibits["loss"].panels[0].layers[0]
    assert len(curve.points) == SHOWN
    assert {(point.value, point.low, point.high) for point in curve.points} == {(6.0, 5.5, 6.5)}


def test_one_page_of_several_runs_is_written_or_refused_in_a_sentence(tmp_path: Path) -> None:
    first, second = (write_training(tmp_path, seed=seed) for seed in (1, 2))
    done = call({}, "mlm-report", "run", first, second, "--out", tmp_path)
    assert Path(done.out.strip()) == tmp_path / f"{first.name}-and-1-more.html"
    (tmp_path / "again").symlink_to(first)
    for wrong, sentence in (
        (tmp_path / "again", f"{first} is named twice: name each run once"),
        (tmp_path / "words", "words is not a run directory"),
    ):
        done = call({}, "mlm-report", "run", first, second, wrong, "--out", tmp_path / "none")
        assert (done.code, not (tmp_path / "none").exists()) == (2, True)
        assert sentence in done.err
        assert len(done.err.splitlines()) == 1


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_page_opens_in_a_browser(tmp_path: Path) -> None:
    done = call({}, "mlm-report", "run", write_training(tmp_path), "--out", tmp_path)
    opened = browse(
        tmp_path / Path(done.out.strip()).name,
        tmp_path / "profile",
        "--window-size=1280,1000",
        "--dump-dom",
    )
    assert "CONSOLE" not in opened.stderr
    assert opened.stdout.count("<svg") == 5
    assert ">Dark page</button>" in opened.stdout
