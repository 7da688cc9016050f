"""A training scores its checkpoints by `mlm-eval`, and is otherwise the training that it would be
without."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.run import scores
from mlm_repro.engine.run.files import Evaluation, read_evaluations, read_metrics
from mlm_repro.engine.run.resolved import resolve
from mlm_repro.evaluation.protocol import SourceText
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.config import override_config
from mlm_repro.lineage.errors import BadInput
from mlm_repro.verify.recomputed import RunCheck
from mlm_repro.verify.replay import replay
from tests.engine.conftest import write_dataset
from tests.engine.small_run import mlm_train, small_config, train, write_toml
from tests.engine.test_loggers import read_tensorboard
from tests.evaluation.conftest import Evaluated

SHORT = {"iterations": 4, "warmup_iterations": 1, "validation_interval": 4}

SCRIPT = """#!{python}
import sys
from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS
from mlm_repro.evaluation.cli import main
file = TEST_SETS["lambada"]
TEST_SETS["lambada"] = file.model_copy(update={{"sha256": "{digest}"}})
main()
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "words")


@pytest.fixture
def made_program(
    made_passes_for_published: SourceText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """`mlm-eval` beside this Python takes the made LAMBADA for the published one."""
    program = tmp_path / "bin" / "mlm-eval"
    program.parent.mkdir()
    program.write_text(
        SCRIPT.format(python=sys.executable, digest=TEST_SETS["lambada"].sha256), encoding="utf-8"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    return program


def asking(data: Path, *records: str, **recipe: Any) -> RunConfig:
    settings = ["record.evaluate=lambada", *records]
    return override_config(small_config(data, **SHORT | recipe), settings)


def without_times(run: Path) -> list[JSON]:
    timed = ("seconds", "tokens_per_second", "model_tflops")
    return [
        {name: value for name, value in line.items() if name not in timed}
        for line in read_metrics(run)
        if line["kind"] != "evaluation"
    ]


def test_scores_are_those_of_the_command_and_the_training_is_the_same(
    data: Path, made_program: Path, evaluated: Evaluated, tmp_path: Path
) -> None:
    config = asking(data, "record.loggers=tensorboard", checkpoint_interval=2)
    run = train(config, tmp_path / "runs").path
    lines = read_evaluations(run)
    assert [line.iteration for line in lines] == [2, 4]
    for line in lines:
        place = run / "checkpoints" / f"iter_{line.iteration:07}"
        result = evaluated("run", "lambada", "--ckpt", place)
        assert line.scores == {
            "lambada accuracy": result["accuracy"],
            "lambada perplexity": result["perplexity"],
        }
    assert lines[0].scores["lambada perplexity"] != lines[1].scores["lambada perplexity"]
    assert ("evaluation/lambada perplexity", 4) in {place[:2] for place in read_tensorboard(run)}
    plain = train(small_config(data, **SHORT, checkpoint_interval=2), tmp_path / "plain").path
    assert without_times(run) == without_times(plain)
    assert [text.replace(str(run), "") for text in RunCheck(run).broken] == [
        text.replace(str(plain), "") for text in RunCheck(plain).broken
    ]
    replay(run, 1)


def test_one_rank_of_two_scores_and_a_session_that_was_killed_meanwhile_is_made_up_for(
    data: Path, made_program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = asking(data, checkpoint_interval=2)

    def killed(run: Path, iteration: int, protocol: str) -> Evaluation:
        if iteration == 4:
            raise RuntimeError("killed")
        return score(run, iteration, protocol)

    score = scores.score_checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(scores, "score_checkpoint", killed)
        with pytest.raises(RuntimeError, match="killed"):
            run_threads(train, 2, config, tmp_path)
    path = resolve(config, 2).begin(tmp_path).path
    assert [line.iteration for line in read_evaluations(path)] == [2]
    run_threads(train, 2, config, tmp_path)
    assert [line.iteration for line in read_evaluations(path)] == [2, 4]


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        ("lambada", "lambada/lambada_test.jsonl is not here and the Hugging Face hub cannot be"),
        ("lambda", "unknown protocol 'lambda'; did you mean 'lambada'?"),
    ],
)
def test_what_cannot_be_scored_is_said_before_training(
    protocol: str, said: str, data: Path, tmp_path: Path
) -> None:
    toml = write_toml(tmp_path / "small.toml", data, **SHORT)
    nowhere = {"MLM_DATA_DIR": str(tmp_path), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    words = (f"--set=record.evaluate={protocol}", "--ranks", 2, "--runs", tmp_path / "runs")
    for more in (["--dry-run"], []):
        code, out, err = mlm_train("run", toml, *words, *more, **nowhere)
        sentences = [line for line in err.splitlines() if not line.startswith("cost: ")]
        assert (code, out, len(sentences)) == (2, "", 1), err
        assert sentences[0].startswith(f"error: {said}")
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


def test_a_failed_evaluation_is_a_warning(
    data: Path, made_program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = made_program.read_text()
    made_program.write_text(
        script.replace("\nmain()", "\nif 'run' in sys.argv: sys.exit('error: no')\nmain()")
    )
    run = train(asking(data), tmp_path / "runs")
    assert run.is_complete
    assert read_evaluations(run.path) == []
    assert "warning: lambada gives no scores after 4: no\n" in capfd.readouterr().err


def test_a_bert_is_refused(data: Path) -> None:
    with pytest.raises(BadInput, match=r"record\.evaluate is not for family = 'bert'"):
        override_config(asking(data), ["model.family=bert"])


def test_test_files_are_found_without_a_model(
    made_program: Path, made_data: Path, mlm_eval: Any
) -> None:
    done = mlm_eval("check", "lambada", "wikitext103-raw", ends=0)
    assert [Path(line).is_file() for line in done.out.splitlines()] == [True, True]
    assert json.dumps(str(made_data))[1:-1] in done.out
