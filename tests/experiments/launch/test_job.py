"""A manifest says what can run, or is refused with the reason."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from mlm_repro.experiments.launch.job import (
    Job,
    describe_job,
    predicted_iteration,
    slurm_script,
    write_launch_files,
)
from mlm_repro.experiments.launch.rank import name_rank
from mlm_repro.experiments.reproduce.files import LADDER
from mlm_repro.experiments.reproduce.plan import manifest_file
from mlm_repro.lineage.config import load_config, parse_config
from mlm_repro.lineage.errors import BadInput
from tests.commands import call
from tests.experiments.machines import with_gpus

VALUES = {"name": "job", "model": "8.3b", "dataset": "runs/data", "nodes": 32, "ranks_per_node": 16}


def job(**values: Any) -> Job:
    return parse_config(VALUES | values, Job, "the test")


@pytest.mark.parametrize("name", LADDER)
def test_the_shipped_manifests_fit_the_papers_cluster(name: str) -> None:
    shipped = load_config(manifest_file(name), Job)
    prediction = predicted_iteration(shipped)
    assert prediction is not None
    assert shipped.ranks == {"355m": 64, "2.5b": 128, "8.3b": 512}[name]  # 2019 paper, Table 2
    assert "s an iteration" in describe_job(shipped)


def test_an_image_may_be_a_file() -> None:
    assert job(container="/images/torch.sqsh").container == "/images/torch.sqsh"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "a b"}, "'a b'"),
        ({"name": "a\n#SBATCH --nodes=9"}, "cannot name files"),
        ({"container": "image; rm"}, "Slurm's options can carry"),
        ({"time_limit": "1 day"}, "hours:minutes:seconds"),
        (
            {"time_limit": "00:05:00", "signal_seconds": 300},
            "is not below time_limit, which is 300 s",
        ),
        ({"nodes": 0}, "nodes"),
    ],
)
def test_what_slurm_would_misread_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as found:
        job(**values)
    assert words in str(found.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodes": 3, "ranks_per_node": 3}, "tp = 8 does not divide the 9 ranks"),
        (
            {"cluster": "dgx-2h-v100", "overrides": ["parallel.recompute=none"]},
            "GiB of memory; a GPU has 32.0",
        ),
        ({"cluster": "dgx-a100-80g"}, "ranks_per_node = 16 is more than the 8 GPUs of a node"),
    ],
)
def test_a_job_that_cannot_run_is_refused_with_the_reason(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput) as found:
        describe_job(job(**values))
    assert words in str(found.value)


def test_a_checkpoint_is_planned_and_must_fit_before_the_time_limit() -> None:
    """ZeRO's arithmetic for 8.3b: 14 bytes a parameter in all; of a part of an eighth, 2 and a 64th
    of 12."""
    assert (
        "a checkpoint of 116.4 GB, about 2.3 GB by the rank that writes most, 0:23 beside training"
        " at 100.0 MB/s" in describe_job(job())
    )
    with pytest.raises(
        BadInput,
        match="two checkpoints of 2283 s, with a cluster also an iteration, do not fit into",
    ):
        describe_job(job(disk_mb_per_second=1))


def test_a_job_saves_before_it_fails() -> None:
    """512 GPUs fail every 99 h at Llama 3's rate: of 0.5 s a copy, one in 10 minutes loses least; a
    day is too late for 3,072."""
    said = describe_job(job())
    assert "it fails every 4.1 days and is saved every 9:3" in said
    assert "record.checkpoint_minutes=" in slurm_script(job(), Path("out"))
    with pytest.raises(
        BadInput, match=r"fails every 1:57:11, so with checkpoint_minutes = 600 most attempts save"
    ):
        describe_job(
            job(checkpoint_minutes=600, failures_per_gpu_hour=1e-3, disk_mb_per_second=1000)
        )
    with pytest.raises(BadInput, match=r"before an iteration of .* s and a checkpoint end"):
        describe_job(job(cluster="dgx-2h-v100", failures_per_gpu_hour=5.0, disk_mb_per_second=1000))
    never = job(failures_per_gpu_hour=0)
    assert "fails" not in describe_job(never)
    assert "checkpoint_minutes" not in slurm_script(never, Path("out"))
    assert "fails" not in describe_job(job(failures_per_gpu_hour=0, checkpoint_minutes=10))


def test_slurms_ranks_are_named_in_torchruns_words() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    environment = dict(slurm)
    name_rank(environment)
    assert environment == slurm | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    environment = slurm | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    name_rank(environment)
    assert environment["WORLD_SIZE"] == "2"


def test_the_command_writes_the_files_and_says_what_to_do(tmp_path: Path) -> None:
    machine = with_gpus(tmp_path / "bin", 0, 0)
    out = tmp_path / "out here"
    done = call(
        machine, "mlm-experiment", "launch", manifest_file("2.5b"), "--out", out, "--set", "nodes=4"
    )
    assert (done.code, done.err) == (0, "")
    assert "4 nodes × 16 ranks, tp 2 × pp 1 × dp 32" in done.out
    assert f"sbatch '{out}/slurm.sh'" in done.out
    assert sorted(path.name for path in out.iterdir()) == ["slurm.sh", "torchrun.sh"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.toml"], "no job 'nowhere.toml'"),
        ([str(manifest_file("8.3b")), "--set", "nodes=7"], "divide"),
    ],
)
def test_a_refused_job_leaves_nothing(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = call(
        with_gpus(tmp_path / "bin", 0, 0),
        "mlm-experiment",
        "launch",
        *arguments,
        "--out",
        tmp_path / "out",
        ends=2,
    )
    assert words in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("gpus", [True, False])
def test_a_job_in_a_container_is_a_jobset_by_the_published_schema(
    tmp_path: Path, gpus: bool
) -> None:
    """As many pods as nodes, which meet at the first; a field that the schema does not have is
    found."""
    ours = job(
        container="nvcr.io/nvidia/pytorch:24.01-py3",
        gpus=gpus,
        name="8.3B_a",
        runs=tmp_path / "runs",
    )
    write_launch_files(ours, tmp_path / "out")
    written = yaml.safe_load((tmp_path / "out/jobset.yaml").read_text(encoding="utf-8"))
    schema = closed(
        json.loads(Path(__file__).with_name("jobset_schema.json").read_text(encoding="utf-8"))[
            "schema"
        ]
    )
    jsonschema.validate(written, schema)
    pods = written["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (written["metadata"]["name"], pods["completions"], pods["parallelism"]) == (
        "mlm-8-3b-a",
        32,
        32,
    )
    container = pods["template"]["spec"]["containers"][0]
    assert container["command"] == ["bash", str(tmp_path / "out/torchrun.sh")]
    assert container["env"][0] == {
        "name": "MASTER_ADDR",
        "value": "mlm-8-3b-a-ranks-0-0.mlm-8-3b-a",
    }
    assert container["resources"]["limits"] == ({"nvidia.com/gpu": 16} if gpus else {})
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pods["template"]["spec"]["volumes"]}
    assert container["volumeMounts"][0]["mountPath"] == "/dev/shm"
    assert str(tmp_path / "runs") in {mount["mountPath"] for mount in container["volumeMounts"]}
    for wrong in ({"spec": {"replicas": 1}}, {"spec": {"replicatedJobs": [{"name": "ranks"}]}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(written | wrong, schema)


def closed(schema: Any) -> Any:
    """The schema where a name that it does not have is an error, as for `kubectl apply`."""
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: closed(value) if key in ("items", "additionalProperties") else value
        for key, value in schema.items()
    }
    if "properties" in schema:
        kept["properties"] = {name: closed(value) for name, value in schema["properties"].items()}
        kept["additionalProperties"] = False
    return kept
