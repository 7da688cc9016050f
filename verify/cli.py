"""`mlm-verify`: check runs, layouts and the engine itself."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mlm_repro.lineage.atomic import write_text
from mlm_repro.lineage.command import CommandLine, run_command
from mlm_repro.lineage.digest import bytes_below, check_seal, is_sealed
from mlm_repro.lineage.errors import KEEPS_NOTHING, BadInput, Diverged, IntegrityFailure
from mlm_repro.lineage.lock import check_place, claim
from mlm_repro.lineage.progress import announce, format_bytes

app = CommandLine(
    help="Check that runs are unchanged and that layouts and engines agree.", no_args_is_help=True
)

ENGINES = ("megatron-core",)
SUBJECTS = ("megatron-core", "transformers", "torch")
Configuration = Annotated[
    Path, typer.Argument(help="A shipped model, such as 355m, or a TOML file.")
]
Layout = Annotated[
    str,
    typer.Option(help="serial, or a name such as tp2, dp2, tp2-sp, pp2, dp2-zero1."),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: section.key=value.")
]
Iterations = Annotated[
    int, typer.Option("--iterations", min=1, help="Optimizer steps of each training.")
]
Twin = Annotated[
    bool, typer.Option("--twin", help="Shrink the recipe to laptop size by the stated rule.")
]


@app.command()
def run(
    path: Annotated[Path, typer.Argument(help="Run or checkpoint directory.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if something that belongs to it is not here.")
    ] = False,
) -> None:
    """Check every file of a sealed directory against its digest, and every number of a run against
    its inputs.

    A run's identity is computed again. Each input that is on disk is compared with its digest, each
    checkpoint with the one before it, each record with the metrics or evaluation behind it, and the
    report is built anew and compared. In a folder every run is checked; of an unfinished training
    its checkpoints alone. Every difference is named, and so is a file, a key or a name that no run
    of its kind has. It prints the comparisons that were made and those that were not possible.
    """
    path = path.resolve()
    if not path.is_dir():
        raise BadInput(f"{path} is not a directory: name a run, a checkpoint or a folder of runs")
    # Imported late, here and below, so that a mistake is said before torch is loaded.
    from mlm_repro.lineage.chain import broken_links
    from mlm_repro.lineage.kinds import ALWAYS_FREE, parts_within
    from mlm_repro.lineage.run import MANIFEST
    from mlm_repro.verify.recomputed import RunCheck

    inner = [directory for directory in parts_within(path) if is_sealed(directory)]
    announce(f"reads {format_bytes(bytes_below(path))} in {len(inner) + 1} sealed directories")
    for directory in inner:
        print(f"ok {check_seal(directory)[:16]} {directory}")
    is_folder = bool(inner) and not is_sealed(path)
    # A training that is not finished: its checkpoints are sealed, its own directory is not.
    if is_folder and (path / MANIFEST).is_file():
        _refuse(
            [
                *broken_links(path),
                *[
                    f"{path.name} is an unfinished training, of which only the checkpoints can be"
                    " checked: complete it, or leave --strict out"
                ]
                * strict,
            ]
        )
        print(
            f"unfinished {path}: its {len(inner)} checkpoints belong together; its other files are"
            " not sealed yet"
        )
        return
    digest = "" if is_folder else f"{check_seal(path)[:16]} "
    check = RunCheck(path)
    for number, attempt in enumerate(check.manifest.attempts if check.manifest else (), 1):
        print(f"attempt {number} {attempt}")
    if not (is_folder or check.manifest):
        check.absent.append(f"the run that this {check.word} belongs to")
    print(
        f"compared: digests of {len(inner) + 1 - is_folder} sealed directories;"
        f" {'; '.join(check.compared)}"
    )
    for name in dict.fromkeys(check.absent):
        print(f"not compared, as it is not here: {name}")
    for sentence in dict.fromkeys(check.left):
        print(f"not computed again: {sentence}")
    if strict and check.absent:
        check.broken.append(
            f"{path.name} does not pass --strict: {len({*check.absent})} things that belong to it"
            f" are not on this machine and were not compared, first {check.absent[0]}"
        )
    _refuse(check.broken)
    if check.manifest and check.kind:
        print(f"nothing contradicts: {'; '.join((*ALWAYS_FREE, *check.kind.free))}")
    print(f"ok {digest}{path}")


def _refuse(broken: list[str]) -> None:
    """Raise IntegrityFailure with the last sentence in `broken`, and print the ones before it to
    stderr, each after `broken: `. Do nothing if `broken` is empty."""
    for sentence in broken[:-1]:
        print(f"broken: {sentence}", file=sys.stderr)
    if broken:
        raise IntegrityFailure(broken[-1])


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="Sealed training run.")],
    segments: Annotated[
        int | None, typer.Option(min=1, help="How many; at most 3 by default.")
    ] = None,
) -> None:
    """Train randomly drawn segments of a run again; compare metrics, weights and optimizer state
    bit for bit.

    A segment is from one kept checkpoint, or the beginning, to the next. It is trained at the
    layout it was trained at, on a machine of the same numerics identity. Exit code 3 where
    something differs; the first line of the metrics and the first tensor that differ are named.
    """
    from mlm_repro.lineage.run import RunDirectory

    RunDirectory.open(run, "training")
    from mlm_repro.verify.replay import replay as replay_run

    replay_run(run, segments)


@app.command()
def explain(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="Training run, complete or not.")],
    second: Annotated[
        Path, typer.Argument(metavar="RUN_B", help="Training run to compare with it.")
    ],
) -> None:
    """Find the iteration where two training runs part, by how much, and whether settings, rounding
    or a fault explain it.

    Settings, inputs, metrics and checkpoints are compared first. Then the iterations are trained
    again in float64 on one rank. Where a run is farther from that than its number format explains,
    the known faults are tried, and the one that gives the run's numbers is named (exit code 3).
    """
    from mlm_repro.lineage.run import RunDirectory

    if RunDirectory.open(first, "training") == RunDirectory.open(second, "training"):
        raise BadInput(f"{first} and {second} are the same run: name two different runs")
    from mlm_repro.verify.explain import explain as explain_runs
    from mlm_repro.verify.serial_replay import RecordedRun

    explain_runs(RecordedRun(first), RecordedRun(second))


@app.command()
def parallel(
    config: Configuration,
    layouts: Annotated[
        str,
        typer.Option(
            help="all, or names such as tp2,pp2-gpipe,tp2-pp2-dp2-chunks2-sp-recompute.",
        ),
    ] = "all",
    ranks: Annotated[int, typer.Option(min=1, help="Largest number of ranks.")] = 8,
    iterations: Iterations = 3,
    overrides: Overrides = None,
    twin: Twin = False,
    threads: Annotated[
        bool, typer.Option("--threads", help="Run the ranks as threads of this process.")
    ] = False,
) -> None:
    """Train a few iterations serially and on each layout; compare losses, gradients and weights in
    float64.

    The first tensor that differs is named. Without data.dataset the tokens are random.
    """
    from mlm_repro.engine.run.resolved import read_run_config
    from mlm_repro.verify.parity import choose_layouts

    resolved = read_run_config(config, overrides or [], twin)
    choose_layouts(layouts, ranks, resolved)

    from mlm_repro.verify.runner import run_parity

    run_parity(resolved, layouts, ranks, iterations, threads)


@app.command()
def against(
    engine: Annotated[str, typer.Argument(help="megatron-core.")],
    config: Configuration,
    layout: Layout = "serial",
    iterations: Iterations = 20,
    overrides: Overrides = None,
    twin: Twin = False,
    out: Annotated[Path, typer.Option(help="Folder for the sealed run.")] = Path("runs"),
) -> None:
    """Train in this engine and in another from the same weights on the same samples; compare every
    iteration.

    The tolerance is measured on the other engine. Without data.dataset the tokens are random. Exit
    code 3 if a loss, a gradient norm, a learning rate or a weight at the end is beyond it; the
    result is written either way.
    """
    from mlm_repro.engine.run.resolved import read_run_config
    from mlm_repro.lineage.run import MANIFEST
    from mlm_repro.verify.parity import comparable_layout

    if engine not in ENGINES:
        raise BadInput(
            f"there is no engine {engine!r} to compare with; there are: {', '.join(ENGINES)}"
        )
    check_place("--out", out / MANIFEST, "")
    resolved = read_run_config(config, overrides or [], twin)
    comparable_layout(resolved, layout)
    from mlm_repro.experiments.benchmark import setting_lines
    from mlm_repro.verify.against import keep, run_against

    result = run_against(resolved, engine, layout, iterations)
    print(result.title, *setting_lines(result), sep="\n")
    for case in result.cases:
        worst = max(case.ratios, key=lambda ratio: ratio.value)
        print(f"{case.name}: at most {worst.value:.2g} of the tolerance, {worst.name}")
    print(
        *(
            f"- {line}"
            for line in (result.environment.sentence, *result.disagreements, *result.notes)
        ),
        sep="\n",
    )
    name = f"against-{engine}-{resolved.name}-{layout}-{resolved.train.precision}-{iterations}"
    print(f"written: {keep(result, name, resolved, out)}")
    if result.disagreements:
        raise Diverged(
            f"{result.disagreements[0]} ({len(result.disagreements)} such differences, all listed"
            " above)"
        )


@app.command()
def layouts(
    program: Annotated[
        str,
        typer.Argument(
            help="megatron-core, transformers, torch, or a function of yours: PATH.py:build."
        ),
    ],
    fields: Annotated[
        list[str] | None,
        typer.Option("--with", help="Set a field of its configuration: FIELD=VALUE; repeatable."),
    ] = None,
    names: Annotated[
        str, typer.Option("--layouts", help="all, or names such as tp2,tp2-sp,pp2,ep2,fsdp2.")
    ] = "all",
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, help="Microbatches of a step; in float64, of a rank."),
    ] = None,
    spec: Annotated[
        str,
        typer.Option(
            help="Layers of Megatron-Core for its configuration: PATH.py:FUNCTION or"
            " MODULE:FUNCTION."
        ),
    ] = "",
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="Run a Python file first; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and tokens.")] = 1234,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the findings to this file.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for JUnit and SARIF files of what was found."),
    ] = None,
    reproduce: Annotated[
        Path | None,
        typer.Option(help="Folder for a program, without this suite, for each finding."),
    ] = None,
) -> None:
    """Compare a program on each layout with its own serial run, probe by probe.

    Probes are a planted gradient, copies, initial shards, losses, gradients, clipped steps, dropout
    and checkpoints. Tolerances are measured, or float64's. One line names one cause. Exit code 3
    for a finding, each with parameter, layout, value and the required value; 7 if a rank is lost,
    with its layout; 2 if a layout that was named cannot run here.
    """
    check_place("--json", json_file, '"findings"')
    check_place("--out", out and out / "junit.xml", "<testsuite")
    check_place("--reproduce", reproduce and reproduce / "tp2.py", "planted")
    for folder in filter(None, (out, reproduce)):
        claim(folder)

    from mlm_repro.verify.parity import parse_layout

    for name in names.split(",") if names != "all" else ():
        parse_layout(name.strip())
    if program not in SUBJECTS and ".py:" not in program:
        raise BadInput(
            f"{program!r} is not a program that can be compared: name {', '.join(SUBJECTS)}, or a"
            " function of yours, PATH.py:build"
        )
    if (file := program.rpartition(":")[0]) and not Path(file).is_file():
        raise BadInput(f"{file}, which PROGRAM names before the colon, is not a file")
    if spec and program != "megatron-core":
        raise BadInput(
            f"--spec is for the program megatron-core alone: leave it out with {program}"
        )
    if reproduce and imports:
        raise BadInput(
            "--reproduce and --import do not go together, as the programs that --reproduce writes"
            " would not run the imported files: leave one of the two out"
        )
    from mlm_repro.engine.launch.mesh import RankLost
    from mlm_repro.verify.found import write_files
    from mlm_repro.verify.layouts import run_layouts
    from mlm_repro.verify.reproductions import write_reproductions
    from mlm_repro.verify.subjects import Asked

    report = run_layouts(
        Asked(program, fields or [], microbatches or 0, spec, imports or []), names, seed
    )
    if json_file:
        write_text(json_file, report.model_dump_json(indent=1) + "\n")
    written = write_files(report, out) if out else []
    if reproduce:
        written += write_reproductions(report, reproduce)
    for path in written:
        print(f"written: {path}")
    if report.findings:
        raise Diverged(f"{report.findings[0]} ({len(report.findings)} findings, all printed above)")
    if report.lost:
        raise RankLost(
            "; ".join(f"{layout} lost a rank: {why}" for layout, why in report.lost.items())
        )
    if report.cannot_run and (names != "all" or len(report.cannot_run) + 1 == len(report.compared)):
        raise BadInput(
            "; ".join(f"{layout} cannot run: {why}" for layout, why in report.cannot_run.items())
        )
    print(
        f"nothing found: {len(report.compared) - len(report.cannot_run)} layouts compute what the"
        " serial run computes"
    )


def main() -> None:
    """Run the command line of `mlm-verify` and exit with its code. Sets an environment variable, so
    that an interrupted command does not promise to go on where it stopped."""
    # So that an interrupted command does not promise to go on where it stopped.
    os.environ[KEEPS_NOTHING] = "1"
    run_command(app)
