"""Keeps curves, timelines and examples of a reproduction's runs, small enough for a page."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, harmonic_mean

from engine.run.files import METRICS, SUMMARY, TIMELINE, Step, Validation, read_steps, read_validations
from evaluation.cloze import split_last_word
from evaluation.schema import Sample
from experiments.files import EXAMPLES
from experiments.reproduce.files import Answers, AnswersHead
from experiments.reproduce.steps import samples_file
from lineage.atomic import write_text
from lineage.environment import list_gpus
from lineage.run import RunDirectory

CURVE_POINTS = 200
"""Blocks of iterations that a run's metrics are averaged over."""
CONTEXT_CHARACTERS = 60
"""Characters of a passage that are kept before its last word."""


def keep_training(training: RunDirectory, folder: Path) -> None:
    """Put a run's summary, timeline and metrics into `folder`, the metrics as means of blocks of iterations.

    Losses, rates and norms are means over the block that ends at `iteration`; tokens/s and TFLOP/s are those of the
    whole block's work in the whole block's time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SUMMARY, TIMELINE):
        if (training.path / name).is_file():
            shutil.copyfile(training.path / name, folder / name)
    steps = read_steps(training.path)
    block = max(len(steps) // CURVE_POINTS, 1)
    lines: list[Step | Validation] = [_mean(steps[start : start + block]) for start in range(0, len(steps), block)]
    lines += read_validations(training.path)
    lines.sort(key=lambda line: line.iteration)
    write_text(folder / METRICS, "".join(line.to_line() for line in lines))


def keep_examples(directory: Path, evaluations: Mapping[str, Path]) -> None:
    """Write examples.jsonl of a reproduction's `directory` from the samples behind each model's last-word result.

    The samples are then removed, also those that an earlier call left when it was killed. A first line has the task
    and the models, then one line an example: `index`, the `context`'s end, the `target`, and for each model whether it
    was `correct` and the target's `log_probability` in nats. Only examples that every model was asked for.
    """
    if not (directory / EXAMPLES).is_file():
        write_text(directory / EXAMPLES, _examples(evaluations))
    for folder in {samples_file(path).parent for path in evaluations.values()}:
        if folder.is_dir():
            shutil.rmtree(folder)


def _examples(evaluations: Mapping[str, Path]) -> str:
    samples = {model: _read_samples(samples_file(path)) for model, path in evaluations.items()}
    common = set.intersection(*(set(examples) for examples in samples.values()))
    lines = []
    for index in sorted(common):
        answers = [examples[index] for examples in samples.values()]
        context, target = split_last_word(answers[0].text)
        end = " ".join(context[-CONTEXT_CHARACTERS:].split())
        example = Answers(
            index=index,
            context=f"…{end}" if len(context) > CONTEXT_CHARACTERS else end,
            target=target,
            correct=[bool(answer.correct) for answer in answers],
            log_probability=[round(sum(answer.log_probabilities), 2) for answer in answers],
        )
        lines.append(example.to_line())
    task = next(iter(next(iter(samples.values())).values())).task if common else ""
    return AnswersHead(task=task, models=list(samples)).to_line() + "".join(lines)


def matrix_gflops(ranks: int) -> float | None:
    """Rate of fp32 matrix products on this many ranks of this machine, in GFLOP/s; None on GPUs."""
    if list_gpus():
        return None
    from engine.launch.forked import run_forked
    from experiments.iterations import gemm_gflops

    return round(float(run_forked(gemm_gflops, ranks, ranks)[0]), 2)


def _mean(steps: Sequence[Step]) -> Step:
    norms = [step.gradient_norm for step in steps if step.gradient_norm is not None]
    return Step(
        kind="train",
        iteration=steps[-1].iteration,
        loss=fmean(step.loss for step in steps),
        learning_rate=fmean(step.learning_rate for step in steps),
        gradient_norm=fmean(norms) if norms else None,
        loss_scale=fmean(step.loss_scale for step in steps),
        seconds=fmean(step.seconds for step in steps),
        tokens_per_second=harmonic_mean([step.tokens_per_second for step in steps]),
        model_tflops=harmonic_mean([step.model_tflops for step in steps]),
    )


def _read_samples(path: Path) -> dict[int, Sample]:
    lines = path.read_bytes().splitlines()
    return {sample.index: sample for sample in map(Sample.model_validate_json, lines)}
