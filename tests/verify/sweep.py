"""Sweeps of the layouts' tables: `python -m tests.verify.sweep
megatron-core|pairs|transformers|healthy|torch FILE [SEED …]`.

A row of FILE, one JSON object a line, is a release of a program, its fields, its microbatches, a
layout and a seed, with what came of it. A sweep goes on where FILE ends, and prints its rows as a
table at the end. `healthy` are sixty cells of transformers in which nothing was found.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from mlm_repro.lineage.errors import BadInput
from mlm_repro.verify.layouts import examine, run_serial
from mlm_repro.verify.parity import parse_layout
from mlm_repro.verify.subjects import Asked, subject

DENSE, EXPERTS = "tp2 tp2-sp pp2 dp2 dp2-zero1", "tp2-sp pp2 dp2 ep2"
MOE = "num_moe_experts=4 add_bias_linear=False"
CELLS = {
    "": f"{DENSE} tp2-pp2 cp2",
    "qk_layernorm=True": DENSE,
    "num_query_groups=2": DENSE,
    "normalization=RMSNorm": DENSE,
    "activation_func=silu gated_linear_unit=True add_bias_linear=False": DENSE,
    "position_embedding_type=rope": DENSE,
    "share_embeddings_and_output_weights=False": DENSE,
    "softmax_type=learnable": DENSE,
    "softmax_type=off-by-one": DENSE,
    "attention_output_gate=True": DENSE,
    "add_bias_linear=False add_qkv_bias=True": DENSE,
    "calculate_per_token_loss=True": DENSE,
    "window_size=(4,0)": DENSE,
    "multi_latent_attention=True": DENSE,
    "mtp_num_layers=1": DENSE,
    "overlap_grad_reduce=True overlap_param_gather=True": "dp2-zero1",
    MOE: f"{EXPERTS} tp2-ep2-sp",
    f"{MOE} moe_token_dispatcher_type=alltoall": EXPERTS,
    f"{MOE} moe_shared_expert_intermediate_size=64": EXPERTS,
    f"{MOE} moe_router_score_function=sigmoid moe_router_enable_expert_bias=True": EXPERTS,
    f"{MOE} moe_aux_loss_coeff=0.1": EXPERTS,
    f"{MOE} moe_aux_loss_coeff=0.1 moe_router_load_balancing_type=global_aux_loss": EXPERTS,
    f"{MOE} moe_expert_capacity_factor=1.0": EXPERTS,
}
"""Fields of Megatron-Core, and the layouts that they are tried on."""
PAIRED = (
    "qk_layernorm=True",
    "num_query_groups=2",
    "calculate_per_token_loss=True",
    "moe_aux_loss_coeff=0.1",
    "moe_z_loss_coeff=0.01",
    "moe_shared_expert_intermediate_size=64",
    "softmax_type=learnable",
    "position_embedding_type=rope",
    "share_embeddings_and_output_weights=False",
)
"""Fields of a model with experts that are set two at a time."""
BY_DESIGN = {
    "moe_expert_capacity_factor": "tokens are dropped among those of a rank",
    "model_type=phimoe": "its router draws random numbers, others on ranks with other tokens",
}
"""Fields with which another layout computes something else by design."""
BLOCKS = {
    "": "tp2 tp2-sp fsdp2 dp2 dp2-fsdp2 fsdp2-tp2 pp2",
    "tied=True": "fsdp2 dp2",
    "schedule=GPipe": "pp2",
    "schedule=Interleaved1F1B": "pp2",
    "schedule=InterleavedZeroBubble": "pp2",
    "schedule=ZBVZeroBubble": "pp2",
    "schedule=DualPipeV": "pp2",
    "gradient_divide_factor=2": "dp2 fsdp2",
    "reduce_dtype=float16 gradient_divide_factor=2": "dp2 fsdp2",
    "reduce_dtype=float32 gradient_divide_factor=2": "dp2 fsdp2",
    "reduce_dtype=bfloat16 gradient_divide_factor=2": "dp2 fsdp2",
}
HEALTHY = (
    "arcee",
    "cohere",
    "ernie4_5",
    "exaone",
    "gemma",
    "gemma2",
    "glm",
    "glm4",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "helium",
    "llama",
    "mistral",
    "mixtral",
)
"""Architectures of transformers in which nothing was found."""
PACKAGES = {"pairs": "megatron-core", "healthy": "transformers"}
"""The package of a sweep with a name of its own."""


def cells(what: str) -> Iterator[tuple[str, str, int, str]]:
    """Program, fields, microbatches and layouts of each group of cells."""
    if what == "megatron-core":
        yield from ((what, fields, 0, layouts) for fields, layouts in CELLS.items())
    elif what == "pairs":
        yield from (
            ("megatron-core", f"{MOE} {' '.join(pair)}", 0, "tp2-sp dp2")
            for pair in combinations(PAIRED, 2)
        )
    elif what == "torch":
        yield from (
            (what, fields, count, layouts) for fields, layouts in BLOCKS.items() for count in (1, 2)
        )
    else:
        for kind in HEALTHY if what == "healthy" else architectures():
            yield from (
                ("transformers", f"model_type={kind}", count, "tp2 fsdp2") for count in (1, 2)
            )
    if what == "transformers":
        yield "transformers", "model_type=glm4_moe use_qk_norm=True", 1, "tp2"
        for kind in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"):
            yield "transformers", f"model_type={kind}", 1, "ep2 tp2-ep2 dp2-fsdp2"


def architectures() -> list[str]:
    """Causal models of transformers with a tensor-parallel plan."""
    import transformers

    found = []
    for kind in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config = transformers.CONFIG_MAPPING[kind]
        text = getattr(config, "sub_configs", {}).get("text_config", config)
        if getattr(text, "base_model_tp_plan", None):
            found.append(kind)
    return found


def rows(group: tuple[str, str, int, str], seed: int) -> Iterator[dict[str, Any]]:
    """What came of each layout of a group."""
    program, fields, count, layouts = group
    found, design = (
        dict[str, tuple[str, str]](),
        [why for name, why in BY_DESIGN.items() if name in fields],
    )
    try:
        with subject(Asked(program, fields.split(), count), seed) as (kind, work, _, _):
            for each in examine(
                run_serial(kind, work), [parse_layout(name) for name in layouts.split()]
            ):
                wrong = "; ".join(str(finding).partition(": ")[2] for finding in each.findings)
                state = "cannot run" if each.cannot_run else "finding" if wrong else "healthy"
                state = "by design" if wrong and design else state
                name = each.outcome.layout.name
                found[name] = state, design[0] if state == "by design" else each.cannot_run or wrong
    except BadInput as error:
        found = dict.fromkeys(layouts.split(), ("cannot run", str(error)))
    for name, (state, text) in found.items():
        if name != "serial":
            yield {
                "program": program,
                "release": version(program),
                "fields": fields,
                "microbatches": count,
                "seed": seed,
                "layout": name,
                "state": state,
                "text": text,
            }


def table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows, those with the same fields and the same result in one."""
    groups: dict[tuple[str, int, str, str], list[str]] = {}
    for line in lines:
        text = line["text"][:160].replace("|", "/") if line["state"] != "healthy" else ""
        groups.setdefault((line["fields"], line["microbatches"], line["state"], text), []).append(
            line["layout"]
        )
    yield "| fields | microbatches | layouts | |"
    yield "|---|---|---|---|"
    for (fields, count, state, text), layouts in groups.items():
        names, said = ", ".join(dict.fromkeys(layouts)), f"{state}: {text}" if text else state
        yield (
            f"| {f'`{fields}`' if fields else 'as it is'} | {count or 'usual'} | {names} | {said} |"
        )


def main() -> None:
    """Go through the cells that FILE lacks."""
    what, file, seeds = sys.argv[1], Path(sys.argv[2]), [int(seed) for seed in sys.argv[3:]] or [1]
    torch.set_num_threads(1)
    start = time.monotonic()
    package = PACKAGES.get(what, what)
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    others = {line.get("release", "of no known release") for line in lines} - {version(package)}
    if others:
        sys.exit(
            f"{file} is a sweep of {package} {others.pop()}, and {version(package)} is installed:"
            " name another file"
        )
    done = {(line["program"], line["fields"], line["microbatches"], line["seed"]) for line in lines}
    with file.open("a", encoding="utf-8") as log:
        for seed in seeds:
            for group in cells(what):
                if (*group[:3], seed) not in done:
                    for line in rows(group, seed):
                        lines.append(line)
                        log.write(json.dumps(line, ensure_ascii=False) + "\n")
                        log.flush()
    states = [line["state"] for line in lines]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    told = f"seeds {', '.join(map(str, seeds))}, {time.monotonic() - start:.0f} s"
    print(f"{package} {version(package)}, {told}: {counts}\n")
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
