"""Writes a planted gradient that Megatron-Core's norm counts wrongly as a program that needs Megatron-Core alone."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lineage.atomic import write_text
from verify.layouts import LayoutFinding, LayoutsReport
from verify.megatron_core import OnCpu, config_class, core, make_it_run_on_cpus, plain_layer_norm
from verify.parity import parse_layout
from verify.subjects import MODEL, SEQUENCE, VOCABULARY, core_fields

PROGRAM = '''"""{subject}: the squared norm of a gradient of ones in {key} must be {expected:.0f}."""

import copy
import logging
import tempfile
import warnings
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

KEY = {key!r}


def core(name):
    return import_module(f"megatron.core.{{name}}")


{patches}

def run(rank, ranks, tp, pp, cp, ep, sequence_parallel, shard_optimizer, store):
    torch.distributed.init_process_group("gloo", init_method=f"file://{{store}}", rank=rank, world_size=ranks)
    make_it_run_on_cpus()
    groups = core("parallel_state")
    groups.initialize_model_parallel(tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep)
    core("tensor_parallel").model_parallel_cuda_manual_seed(1)
    config = core("transformer.transformer_config").{config}(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
        expert_model_parallel_size=ep, sequence_parallel=sequence_parallel, params_dtype=torch.float32,
        pipeline_dtype=torch.float32, persist_layer_norm=False, **{fields},
    )
    layers = core("models.gpt.gpt_layer_specs").get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, qk_l2_norm=config.qk_l2_norm
    )
    gpt = core("models.gpt").GPTModel(
        config, layers, {vocabulary}, {sequence}, pre_process=groups.is_pipeline_first_stage(),
        post_process=groups.is_pipeline_last_stage(), **{model},
    )
    distributed = core("distributed")
    settings = distributed.DistributedDataParallelConfig(use_distributed_optimizer=shard_optimizer)
    model = distributed.DistributedDataParallel(config, settings, gpt)
    state = gpt.sharded_state_dict(metadata={{"non_homogeneous_layers": True}})
    core("dist_checkpointing.mapping").apply_factories(state)
    shards = core("dist_checkpointing.dict_utils").nested_values(state)
    planted = {{shard.data.data_ptr() for shard in shards if shard.key == KEY}}
    optimizers = core("optimizer")
    settings = optimizers.OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=shard_optimizer)
    optimizer = optimizers.get_megatron_optimizer(settings, [model])
    for parameter in gpt.parameters():
        parameter.main_grad.fill_(parameter.data_ptr() in planted)
    norm = optimizer.step()[1]
    if rank == 0:
        print(f"{{ranks}} ranks: the squared norm is {{norm**2:.4f}}, and must be {expected:.0f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    for place in ((1, 1, 1, 1, 1, False, False), {place}):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run, (*place, f"{{folder}}/store"), place[0])
'''


def write_reproductions(report: LayoutsReport, directory: Path) -> list[Path]:
    """Write a program for each planted gradient that is counted wrongly; return their paths."""
    fields = core_fields([f"{name}={value}" for name, value in report.fields.items()])
    wrong = [each for each in report.findings if each.probe == "planted gradient"]
    paths = [directory / f"{each.layout}-{each.parameter}.py" for each in wrong]
    for finding, path in zip(wrong, paths, strict=True):
        write_text(path, _program(finding, fields, report.subject))
    return paths


def _program(finding: LayoutFinding, fields: Mapping[str, Any], subject: str) -> str:
    layout = parse_layout(finding.layout)
    kind = config_class(fields)
    of_config, of_model = (
        {name: value for name, value in fields.items() if name in inspect.signature(each).parameters}
        for each in (kind, core("models.gpt").GPTModel)
    )
    tied = {"share_embeddings_and_output_weights": True}
    patches = [inspect.getsource(each) for each in (OnCpu, plain_layer_norm, make_it_run_on_cpus)]
    return PROGRAM.format(
        subject=subject, key=finding.parameter, expected=finding.expected, patches="\n\n".join(patches),
        config=kind.__name__, fields=_source(MODEL | of_config), model=_source(tied | of_model), vocabulary=VOCABULARY,
        sequence=SEQUENCE, place=(layout.world_size, layout.tp, layout.pp, layout.cp, layout.ep,
                                  layout.sequence_parallel, layout.shard_optimizer),
    )  # fmt: skip


def _source(values: Mapping[str, Any]) -> str:
    """Python text of a dict; functions are those of torch.nn.functional."""
    shown = (f"{name!r}: {f'torch.nn.functional.{value.__name__}' if callable(value) else repr(value)}"
             for name, value in values.items())  # fmt: skip
    return "{" + ", ".join(shown) + "}"
