"""A training job for lent machines: its manifest, and the Slurm and torchrun scripts that train
until it is complete.

The scripts' text is in `templates/`. Imports no torch.
"""

import json
import math
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.costs import checkpoint_bytes, written_bytes
from mlm_repro.engine.parallel.layout import layout_of
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.experiments.simulator.cluster import load_cluster
from mlm_repro.experiments.simulator.goodput import (
    FAILURES_PER_GPU_HOUR,
    RESTART_SECONDS,
    WRITTEN_BYTES_PER_SECOND,
    Failures,
    format_days,
)
from mlm_repro.experiments.simulator.planner import OWN
from mlm_repro.experiments.simulator.simulate import Prediction, simulate
from mlm_repro.experiments.simulator.workload import Workload
from mlm_repro.lineage.atomic import write_text
from mlm_repro.lineage.config import Config
from mlm_repro.lineage.errors import BadInput, cause
from mlm_repro.lineage.lock import check_place, claim
from mlm_repro.lineage.progress import format_bytes, format_duration
from mlm_repro.lineage.shipped import Shipped, find_file

TEMPLATES = Path(__file__).parent / "templates"
ATTEMPTS_WITHOUT_PROGRESS = 3
"""Limit on attempts of a job in a row that write no checkpoint, were not told to stop and end in
the same iteration.

A fault of the program comes back in the same iteration; a fault of the hardware does not.
"""
MOST_ATTEMPTS_WITHOUT_PROGRESS = 10
"""Limit on attempts in a row that write no checkpoint and were not told to stop, whatever iteration
they end in."""
MEETING = (
    '--node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}"'
)
"""Options of torchrun by which the ranks of several nodes find each other; on a single node
torchrun chooses a port itself."""
NODES = "--nodelist=nodes"
"""Placeholder for the nodes of an attempt, which the script chooses."""
TIME_LIMIT = r"(\d+-)?\d{1,3}(:[0-5]\d){2}"


HOST = re.compile(r"(\w[\w.-]*@)?\w[\w.:-]*", re.ASCII)
"""Regular expression of a host for `ssh`, with or without a user. Such a host cannot pass for an
option and has no character that a shell interprets."""


class Job(Config):
    """Content of job.toml: a training of `model` on `dataset` as work for machines that are lent
    for a limited time, with `ranks_per_node` ranks on each of `nodes` nodes. The scripts for Slurm
    and torchrun are written from it; only Slurm ends an attempt at `time_limit`."""

    name: str
    """Name of the job, which its files have too."""
    model: str
    """A shipped model, such as 8.3b, or a TOML file, as `mlm-experiment plan` takes it."""
    overrides: tuple[str, ...] = ()
    """Overrides for `mlm-train --set`, such as the layout: `parallel.tp=8`."""
    dataset: Path
    """Dataset directory made by `mlm-data run`."""
    runs: Path = Path("runs")
    """Folder of run directories, which all nodes see."""
    nodes: PositiveInt
    ranks_per_node: PositiveInt
    gpus: bool = True
    """True if each rank of the job has a GPU."""
    cores_per_rank: PositiveInt = 8
    """Cores that Slurm gives each rank."""
    exclusive: bool = True
    """True if Slurm gives the job whole nodes, with all their memory."""
    join_seconds: PositiveInt = 300
    """Seconds for which a rank waits for the others to start."""
    disk_mb_per_second: PositiveFloat = WRITTEN_BYTES_PER_SECOND / 1e6
    """Rate in MB/s at which each rank writes while all ranks write; a checkpoint's time is planned
    by it."""
    checkpoint_minutes: PositiveFloat | None = None
    """Minutes of training from one checkpoint to the next; by default the interval that loses the
    least to failures (Daly 2006)."""
    failures_per_gpu_hour: NonNegativeFloat = FAILURES_PER_GPU_HOUR
    """Failures that end an attempt, for each rank and hour; by default Llama 3's (arXiv:2407.21783,
    Section 3.3.4)."""
    restart_seconds: PositiveFloat = RESTART_SECONDS
    """Seconds from a failure to the first iteration after it."""
    spare_nodes: NonNegativeInt = 0
    """Further nodes that Slurm reserves: after a node has failed, the next attempt runs on a spare
    one."""
    cluster: str = ""
    """A shipped cluster, or a TOML file: the job is then checked to fit it, and its time
    predicted."""
    time_limit: str = "24:00:00"
    """Limit of one attempt, `hours:minutes:seconds` or `days-hours:minutes:seconds`; attempts
    repeat."""
    signal_seconds: PositiveInt = 600
    """Seconds before the time limit at which the ranks are told to stop; an iteration and two
    checkpoints must fit in."""
    hosts: Path | None = None
    """File with one host for each node, one a line. `torchrun.sh` is then started once and starts
    itself on all hosts by ssh."""
    container: str = ""
    """Image in which the ranks run (Slurm with pyxis), with this package installed; none by
    default."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.container and not re.fullmatch(r"[\w/][\w./:@#+-]*", self.container, re.ASCII):
            raise ValueError(
                f"container = {self.container!r} is no name that Slurm's options can carry: begin"
                " it with a letter, a digit, _ or /, and go on with these or . : @ # + -"
            )
        if not re.fullmatch(r"\w[\w.-]*", self.name, re.ASCII):
            raise ValueError(
                f"name = {self.name!r} cannot name files: letters, digits, '-', '_' and '.' can, if"
                " the first is a letter, a digit or '_'"
            )
        if not re.fullmatch(TIME_LIMIT, self.time_limit, re.ASCII):
            raise ValueError(
                f"time_limit = {self.time_limit!r} is neither hours:minutes:seconds, such as"
                " 24:00:00, nor days-hours:minutes:seconds, with at most three digits of hours and"
                " two of minutes and of seconds, 00 to 59"
            )
        if self.signal_seconds >= (limit := self.limit_seconds):
            raise ValueError(
                f"signal_seconds = {self.signal_seconds} is not below time_limit, which is {limit}"
                " s: lower it or raise the limit"
            )
        return self

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    def host_names(self) -> list[str]:
        """Return a list of the names of hosts in the file whose path is this job's setting `hosts`,
        or an empty list if the setting is not set; the ranks meet at the first host. Raises
        BadInput if that file is missing or cannot be read, or unless it has one valid name for each
        node."""
        try:
            names = self.hosts.read_text(encoding="utf-8").split() if self.hosts else []
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"{self.hosts}, the job's file of `hosts`, cannot be read: {cause(error)}; set"
                " hosts to a text file with the name of one host a line for each node"
            ) from error
        if self.hosts and len(names) != self.nodes:
            raise BadInput(
                f"{self.hosts} names {len(names)} hosts, and nodes = {self.nodes}: name one host a"
                " line for each node"
            )
        if odd := [name for name in names if not HOST.fullmatch(name)]:
            raise BadInput(
                f"{self.hosts} has {odd[0]!r}, which is not a host's name such as node1 or"
                " user@node1: correct it in that file"
            )
        return names

    @property
    def limit_seconds(self) -> int:
        """The time limit of one attempt of this job, in seconds, an int."""
        *days, hours, minutes, seconds = map(int, re.split("[-:]", self.time_limit))
        return ((sum(days) * 24 + hours) * 60 + minutes) * 60 + seconds

    def config(self) -> RunConfig:
        """Return the RunConfig of the job's training. Raises BadInput if the model or an override
        is not valid, or if the training's layout does not divide over the job's ranks."""
        config = read_run_config(self.model, self.overrides)
        layout_of(config, self.ranks)
        return config

    @property
    def python(self) -> str:
        """The path of the Python interpreter that runs the ranks, this process's own, or just
        `python` in a container."""
        return "python" if self.container else sys.executable


def predicted_iteration(job: Job) -> Prediction | None:
    """Return the Prediction of an iteration on the job's cluster with this engine's software; None
    if the job names no cluster.

    Raises BadInput with the reason if the job's model, an override, the layout or the cluster is
    not valid, or if the job does not fit the cluster.
    """
    config = job.config()
    if not job.cluster:
        return None
    cluster = load_cluster(job.cluster, OWN)
    if job.ranks_per_node > (have := int(cluster.constants.gpus_per_node.value)):
        raise BadInput(
            f"{job.name}: ranks_per_node = {job.ranks_per_node} is more than the {have} GPUs of a"
            f" node of {job.cluster}"
        )
    prediction = simulate(cluster, [Workload.of_run(config, job.ranks)], config)[0]
    if prediction.reason:
        raise BadInput(
            f"{job.name} cannot run on {job.nodes} nodes of {job.cluster}: {prediction.reason};"
            " give the job another model or layout, more nodes or another cluster"
        )
    return prediction


def failures_of(job: Job) -> Failures:
    """Return a Failures, all in seconds: the job's mean time between failures, infinite if its rate
    of failures is 0; the times that the rank that writes most takes to write its part of a
    checkpoint beside training, and to copy that part while training pauses; and the job's time of a
    restart. Raises BadInput if the job's model, an override or the layout is not valid."""
    config = job.config()
    dp = layout_of(config, job.ranks).dp
    written = written_bytes(config.model, config.train.precision, config.parallel, dp)
    return Failures.of(
        job.ranks,
        written,
        1e6 * job.disk_mb_per_second,
        job.restart_seconds,
        job.failures_per_gpu_hour,
    )


def saved_seconds(job: Job) -> float:
    """Return the seconds of training from one checkpoint to the next: the interval that the job
    states, else the one that loses the least, which is infinite for a job that never fails.

    Raises BadInput if the stated interval is so long that a rank fails, on average, before the next
    checkpoint is written, or if the job's model, an override or the layout is not valid.
    """
    failures = failures_of(job)
    interval = 60 * job.checkpoint_minutes if job.checkpoint_minutes else failures.best_interval
    if job.checkpoint_minutes and interval + failures.checkpoint > failures.mean:
        best = format_duration(failures.best_interval)
        raise BadInput(
            f"{job.name}: one of its {job.ranks:,} ranks fails every"
            f" {format_duration(failures.mean)}, so with checkpoint_minutes ="
            f" {job.checkpoint_minutes:g} most attempts save nothing: leave it out or give about"
            f" {best}, which loses the least"
        )
    return interval


def describe_job(job: Job) -> str:
    """Return a text on the job: ranks, layout, a checkpoint's size and time, the interval between
    checkpoints and the share of time that failures leave, these two unless the job's rate of
    failures is 0; with a named cluster also the simulated time and number of attempts.

    Raises BadInput for a job that is not valid or does not fit its cluster, for a stated interval
    in which a rank fails on average, and if two checkpoints, with a cluster also an iteration, do
    not fit between the stop signal and the time limit. With a cluster it is also raised if a rank
    fails, on average, before an iteration and a checkpoint end.
    """
    config = job.config()
    failures = failures_of(job)
    interval = saved_seconds(job)
    layout = layout_of(config, job.ranks)
    line = (
        f"{job.name}: {job.nodes} node{'s' if job.nodes > 1 else ''} × {job.ranks_per_node} ranks, "
        f"tp {layout.tp} × pp {layout.pp} × dp {layout.dp}, at most {job.time_limit} at a time"
    )
    rate = 1e6 * job.disk_mb_per_second
    size = format_bytes(checkpoint_bytes(config.model, config.train.precision))
    line += (
        f"\na checkpoint of {size}, about {format_bytes(failures.checkpoint * rate)} by the rank"
        " that writes most, "
    )
    line += f"{format_duration(failures.checkpoint)} beside training at {format_bytes(rate)}/s"
    prediction = predicted_iteration(job)
    # Two checkpoints may have to end: one being written when the signal comes, one after it.
    needed = 2 * failures.checkpoint + (prediction.high_seconds if prediction else 0)
    if needed > job.signal_seconds:
        raise BadInput(
            f"{job.name}: two checkpoints of {failures.checkpoint:.0f} s, with a cluster also an"
            f" iteration, do not fit into signal_seconds = {job.signal_seconds}: give at least"
            f" {math.ceil(needed)}"
        )
    if prediction and prediction.seconds + failures.checkpoint > failures.mean:
        raise BadInput(
            f"{job.name}: one of its {job.ranks:,} ranks fails every"
            f" {format_duration(failures.mean)}, before an iteration of {prediction.seconds:.0f} s"
            " and a checkpoint end: no attempt would get further; lower failures_per_gpu_hour if"
            " the cluster is better, or use fewer ranks"
        )
    share = 1.0
    if math.isfinite(interval + failures.mean):
        share = failures.share(interval)
        line += f"\n{failures.describe(interval)}"
    if prediction is None:
        return line
    low, high = (
        config.train.iterations * iteration / share
        for iteration in (prediction.low_seconds, prediction.high_seconds)
    )
    usable = job.limit_seconds - job.signal_seconds
    attempts = sorted(
        {round(all_ / failures.mean) + math.ceil(all_ / usable) for all_ in (low, high)}
    )
    return (
        f"{line}\nsimulated on {job.cluster}: {prediction.seconds:.4g} s an iteration,"
        f" {format_days(low, high)} to {format_days(high)} in all,"
        f" {' to '.join(map(str, attempts))} attempt{'s' if attempts[-1] > 1 else ''}"
    )


def write_launch_files(job: Job, out: Path) -> tuple[Path, Path]:
    """Write `slurm.sh` and `torchrun.sh` into the folder `out`, and `jobset.yaml` if the job has a
    container, replacing earlier ones. Return the paths of the two scripts, in this order. `out`
    stays reserved for this command until it ends.

    Raises BadInput if they cannot be written, if another command has reserved `out`, if `slurm.sh`
    is there and is no Slurm script, or for a job that no script can carry.
    """
    slurm = out / "slurm.sh"
    torchrun = out / "torchrun.sh"
    check_place("--out", slurm, "#SBATCH")
    claim(out)
    write_text(slurm, slurm_script(job, out))
    write_text(torchrun, torchrun_script(job, out))
    if job.container:
        write_text(out / "jobset.yaml", jobset(job, out))
    return slurm, torchrun


def slurm_script(job: Job, out: Path) -> str:
    """Return the text of the job's script for `sbatch`; `out` is the folder of its files. Nothing
    is written.

    Before the time limit Slurm signals only the batch shell. The script passes the signal on with
    `scancel`, because `srun` itself would kill the ranks. They write a checkpoint and end with exit
    code 7, and the job is queued again. Raises BadInput for a job or a file of hosts that is not
    valid, and for a folder whose name a batch script cannot carry, or the job's container cannot
    mount.
    """
    folder = str(out.resolve())
    if any(not character.isprintable() for character in folder):
        raise BadInput(
            f"{folder!r} cannot stand in a batch script: give --out a folder whose path has no"
            " control characters"
        )
    quoted = folder.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    sizes = [f"--ntasks-per-node={job.ranks_per_node}", f"--cpus-per-task={job.cores_per_rank}"]
    command = [
        "srun",
        NODES,
        f"--nodes={job.nodes}",
        f"--ntasks={job.ranks}",
        "--kill-on-bad-exit=1",
        "--label",
        *sizes,
    ]
    if job.container:
        mounts = ",".join(f"{folder}:{folder}" for folder in _mounted(job, out))
        command += [
            f"--container-image={job.container}",
            f"--container-workdir={Path.cwd()}",
            f"--container-mounts={mounts}",
        ]
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes + job.spare_nodes}",
        "--no-kill",
        *sizes,
        f"--gpus-per-node={job.ranks_per_node}" if job.gpus else "",
        *(("--exclusive", "--mem=0") if job.exclusive else ()),
        f"--time={job.time_limit}",
        f"--signal=B:TERM@{job.signal_seconds}",
        "--requeue",
        "--open-mode=append",
        f'--output="{quoted}/slurm-%j.txt"',
    ]
    head = [f"#SBATCH {option}" for option in options if option]
    # `-P` keeps Python from importing modules of the folder that the job starts in.
    words = shlex.join([*command, job.python, "-P", "-m"])
    return _script(head, "slurm.sh", words.replace(NODES, '--nodelist="$nodes"'), job, out)


def _mounted(job: Job, out: Path) -> list[Path]:
    """Return a list, resolved and sorted, of the folders that the job's ranks read or write: runs,
    launch files (`out`), dataset, the run they start from, the working directory and the folder of
    the model's file. A folder inside another one of them is left out. Raises BadInput for a path
    with a comma or a colon, which a container cannot mount, and the errors of the job's method
    `config`."""
    origin = job.config().train.init_from
    needed = {
        path.resolve() for path in (job.runs, out, job.dataset, *([Path(origin)] if origin else ()))
    }
    needed |= {Path.cwd(), find_file(job.model, Shipped.MODEL).resolve().parent}
    folders = sorted(folder for folder in needed if needed.isdisjoint(folder.parents))
    if unfit := next((folder for folder in folders if re.search("[,:]", str(folder))), None):
        raise BadInput(
            f"a container cannot mount {unfit}, which the job needs, as its path has a comma or a"
            " colon: rename it or use another folder"
        )
    return folders


def torchrun_script(job: Job, out: Path) -> str:
    """Return the text of the bash script torchrun.sh, which starts the job's ranks by torchrun,
    attempt after attempt, until the training is complete or is stopped, or another attempt is of no
    use; `out` is the folder of its files. The script is to be started on every node, on each of
    several with its number from 0 in NODE_RANK and the first node's address in MASTER_ADDR
    (MASTER_PORT is 29500 by default); or once and without these variables if the job names its
    hosts, which the script reaches by ssh. Nothing is written. Raises BadInput if the job or its
    file of hosts is not valid.

    SIGTERM and Ctrl-C stop the ranks after the iteration in progress, with a checkpoint.
    """
    launcher = shlex.join(
        [
            job.python,
            "-P",
            "-m",
            "torch.distributed.run",
            f"--nnodes={job.nodes}",
            f"--nproc-per-node={job.ranks_per_node}",
            f"--shutdown-timeout={job.signal_seconds}",
        ]
    )
    meeting = "--standalone" if job.nodes == 1 else MEETING
    where = "Once" if job.hosts else "On every node: NODE_RANK=0 MASTER_ADDR=first-node"
    head = [f"# {where} bash torchrun.sh"] if job.nodes > 1 else []
    return _script(head, "torchrun.sh", f"{launcher} {meeting}", job, out)


def jobset(job: Job, out: Path) -> str:
    """Return the text, YAML, of a Kubernetes JobSet for the job, which must have a container. Each
    pod mounts the job's folders from the node that it runs on, under the paths that they have on
    this machine, and runs `torchrun.sh` of the folder `out`. Nothing is written. Raises BadInput
    for a job that is not valid and a folder that cannot be mounted."""
    folders = [*enumerate(map(str, _mounted(job, out)))]
    name = f"mlm-{re.sub('[^a-z0-9]+', '-', job.name.lower())}".rstrip("-")
    values = {
        "name": name,
        "first": f"{name}-ranks-0-0.{name}",
        "nodes": job.nodes,
        "image": job.container,
        "bound": MOST_ATTEMPTS_WITHOUT_PROGRESS,
        "signal_seconds": job.signal_seconds,
        "script": str((out / "torchrun.sh").resolve()),
        "limits": {"nvidia.com/gpu": job.ranks_per_node} if job.gpus else {},
        "mounts": [
            {"name": "memory", "mountPath": "/dev/shm"},  # by default 64 MB, too few for NCCL
            *({"name": f"folder-{number}", "mountPath": path} for number, path in folders),
        ],
        "volumes": [
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
            *({"name": f"folder-{number}", "hostPath": {"path": path}} for number, path in folders),
        ],
    }
    text = (TEMPLATES / "jobset.yaml").read_text(encoding="utf-8")
    # JSON is YAML too, and quotes every text.
    return _filled(text, {key: json.dumps(value) for key, value in values.items()})


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"{{ ([\w-]+) }}", lambda match: values[match[1]], text)


def _script(head: list[str], body: str, launcher: str, job: Job, out: Path) -> str:
    """Return the text of a bash script: `#!/bin/bash`, the lines of `head`, such as #SBATCH
    options, then files of `templates/` filled with this job's values. The first file is
    attempts.sh, and the last the one that `body` names, slurm.sh or torchrun.sh; hosts.sh is
    between them for a torchrun.sh whose job names its hosts. `launcher` is the text of the command
    that starts the ranks; `out` is the folder of torchrun.sh, in which the script keeps its own
    files too. Raises BadInput if the job, its file of hosts or its interval between checkpoints is
    not valid."""
    names = ("failed", "last-failure", "idle", "bad-node-", "flight-", "pid-")
    paths = {name: out.resolve() / name for name in names}
    paths |= {
        "here": Path.cwd(),
        "run": job.runs.resolve() / job.config().name,
        "script": out.resolve() / "torchrun.sh",
    }
    model = find_file(job.model, Shipped.MODEL).resolve()
    minutes = saved_seconds(job) / 60
    stated = [f"record.checkpoint_minutes={minutes:.4g}"] if math.isfinite(minutes) else []
    options = [
        f"--set={item}"
        for item in (*job.overrides, f"data.dataset={job.dataset.resolve()}", *stated)
    ]
    runs = job.runs.resolve()
    words = ["mlm_repro.engine.cli", "run", str(model), *options, f"--runs={runs}"]
    values = {name: shlex.quote(str(path)) for name, path in paths.items()} | {
        "train": f'mlm_repro.experiments.launch.rank "$failed" {shlex.join(words)}',
        "hosts": shlex.join(job.host_names()),
        "launcher": launcher,
        "join_seconds": str(job.join_seconds),
        "nodes": str(job.nodes),
        "most": str(ATTEMPTS_WITHOUT_PROGRESS),
        "bound": str(MOST_ATTEMPTS_WITHOUT_PROGRESS),
    }
    parts = ("attempts.sh", *(["hosts.sh"] if job.hosts and body == "torchrun.sh" else []), body)
    text = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in parts)
    return "\n".join(["#!/bin/bash", *head, _filled(text, values)])
