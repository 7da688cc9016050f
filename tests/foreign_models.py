"""Valid files of models in this engine's and in others' formats, and how they are read."""

import shutil
from collections.abc import Callable
from pathlib import Path

from mlm_repro.engine.formats.convert import (
    export_checkpoint,
    import_checkpoint,
    read_published,
    write_card,
)
from mlm_repro.engine.formats.model_shards import merge_model, shard_model
from mlm_repro.engine.inference import load_for_inference
from mlm_repro.engine.megatron_flags import from_megatron, script_or_arguments
from mlm_repro.evaluation.models.hub_models import RECORD, Fetched, is_as_fetched
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.files import write_document
from tests.damage import PICKLE, SAFETENSORS, TORCH
from tests.engine.test_formats_checkpoint import write_rough
from tests.engine.test_formats_megatron import save, save_core
from tests.reader import Reader, bytes_at


def exported(folder: Path) -> Path:
    write_rough(folder / "ours")
    return export_checkpoint(folder / "ours", folder / "huggingface")


def of_export(name: str) -> Callable[[Path], Path]:
    return lambda folder: exported(folder) / name


def of_core(name: str) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        exported(folder)
        return save_core(folder / "core", load_for_inference(folder / "ours").model) / name  # type: ignore[arg-type]

    return prepare


def published(root: str) -> Callable[[Path], object]:
    """The weights of the directory of that name that a file is in, with the exported vocabulary."""

    def read(path: Path) -> object:
        directory = next(parent for parent in path.parents if parent.name == root)
        vocabulary = directory.parent / "huggingface"
        return read_published(directory, vocabulary if vocabulary.is_dir() else None)

    return read


def megatron(name: str, zipped: bool = True) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        exported(folder)
        return (
            save(folder / "megatron", load_for_inference(folder / "ours").model, 3, zipped=zipped)
            / name
        )  # type: ignore[arg-type]

    return prepare


def read_imported(path: Path) -> object:
    """As an export describes it: its card is written."""
    seal(path.parent)
    out = path.parent.parent / "card"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    write_card(out, load_for_inference(path.parent, as_stored=True))
    return None


def divided(folder: Path) -> Path:
    exported(folder)
    shard_model(folder / "huggingface", folder / "divided", 1)
    return folder / "divided" / "model-tp00.safetensors"


def merge(path: Path) -> object:
    checkpoint = path.parent
    seal(checkpoint)
    out = checkpoint.parent / "merged"
    shutil.rmtree(out, ignore_errors=True)
    return merge_model(checkpoint, out)


def fetched(folder: Path) -> Path:
    write_document(
        folder / RECORD, Fetched(repository="a/b", commit="c", files={"config.json": "0" * 64})
    )
    return folder / RECORD


SCRIPT = b"""#!/bin/bash
GPUS=8
ARGS="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
TRAIN=(--micro-batch-size 4 --global-batch-size 512 --lr 0.00015 --train-iters 500000 --lr-decay-style cosine)
torchrun --nproc_per_node $GPUS pretrain_gpt.py $ARGS ${TRAIN[@]} --min-lr 1e-5 --lr-warmup-fraction .01 --fp16
"""  # noqa: E501


RANK = "iter_0000070/mp_rank_00/model_optim_rng.pt"
READERS = (
    Reader("Megatron-LM rank", megatron(RANK), published("megatron"), 5, TORCH),
    Reader(
        "Megatron-LM rank before torch 1.6", megatron(RANK, zipped=False), published("megatron"), 5
    ),
    Reader(
        "Megatron-LM tracker",
        megatron("latest_checkpointed_iteration.txt"),
        published("megatron"),
        5,
    ),
    Reader("torch_dist metadata", of_core(".metadata"), published("core"), 5, PICKLE),
    Reader("torch_dist common", of_core("common.pt"), published("core"), 5, TORCH),
    Reader("torch_dist tensors", of_core("__0_0.distcp"), published("core"), 5),
    Reader("Hugging Face config", of_export("config.json"), published("huggingface"), 10),
    Reader(
        "Hugging Face weights",
        of_export("model.safetensors"),
        published("huggingface"),
        10,
        SAFETENSORS,
    ),
    Reader("Hugging Face vocabulary", of_export("vocab.json"), published("huggingface"), 10),
    Reader("Hugging Face merges", of_export("merges.txt"), published("huggingface"), 10),
    Reader(
        "imported config",
        lambda folder: import_checkpoint(exported(folder), folder / "imported") / "config.json",
        read_imported,
        5,
    ),
    Reader("divided model", divided, merge, 5, SAFETENSORS),
    Reader("hub record", fetched, lambda path: is_as_fetched(path.parent, "a/b"), 50),
    Reader(
        "Megatron-LM script",
        bytes_at("pretrain.sh", SCRIPT),
        lambda path: from_megatron(script_or_arguments([str(path)])),
        100,
    ),
)
