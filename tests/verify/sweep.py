"""The table of docs/layouts.md: `python -m tests.verify.sweep [SEED …]` holds Megatron-Core against its serial run."""

import sys
import time
from collections.abc import Iterator
from importlib.metadata import version

import torch

from mlm_repro.lineage.errors import BadInput
from mlm_repro.verify.layouts import LayoutFinding, examine, run_serial
from mlm_repro.verify.parity import parse_layout
from mlm_repro.verify.subjects import subject

SEEDS = [int(seed) for seed in sys.argv[1:]] or [1, 2, 3]
DENSE, EXPERTS = "tp2 tp2-sp pp2 dp2 dp2-zero1", "tp2-sp pp2 dp2 ep2"
MOE = "num_moe_experts=4 add_bias_linear=False"
CELLS = {
    "": f"{DENSE} tp2-pp2 cp2", "qk_layernorm=True": DENSE, "num_query_groups=2": DENSE, "normalization=RMSNorm": DENSE,
    "activation_func=silu gated_linear_unit=True add_bias_linear=False": DENSE, "position_embedding_type=rope": DENSE,
    "share_embeddings_and_output_weights=False": DENSE, "softmax_type=learnable": DENSE,
    "softmax_type=off-by-one": DENSE, "attention_output_gate=True": DENSE,
    "add_bias_linear=False add_qkv_bias=True": DENSE, "calculate_per_token_loss=True": DENSE,
    "window_size=(4,0)": DENSE, "multi_latent_attention=True": DENSE, "mtp_num_layers=1": DENSE,
    MOE: f"{EXPERTS} tp2-ep2-sp", f"{MOE} moe_token_dispatcher_type=alltoall": EXPERTS,
    f"{MOE} moe_shared_expert_intermediate_size=64": EXPERTS,
    f"{MOE} moe_router_score_function=sigmoid moe_router_enable_expert_bias=True": EXPERTS,
    f"{MOE} moe_aux_loss_coeff=0.1": EXPERTS,
    f"{MOE} moe_aux_loss_coeff=0.1 moe_router_load_balancing_type=global_aux_loss": EXPERTS,
}  # fmt: skip
"""Fields, and the layouts that they are tried on."""


def sweep(fields: str, layouts: str) -> Iterator[tuple[str, str]]:
    """Each layout with its cell of the table."""
    findings: dict[str, list[LayoutFinding]] = {name: [] for name in layouts.split()}
    refused: dict[str, str] = {}
    for seed in SEEDS:
        try:
            with subject("megatron-core", fields.split(), seed) as (kind, work):
                chosen = [parse_layout(name) for name in findings if name not in refused]
                for each in examine(run_serial(kind, work), chosen):
                    findings.setdefault(each.outcome.layout.name, []).extend(each.findings)
                    refused |= {each.outcome.layout.name: each.cannot_run} if each.cannot_run else {}
        except BadInput as error:
            refused |= dict.fromkeys(findings, str(error).removeprefix("the serial run cannot run here: "))
    for name, wrong in findings.items():
        probes = dict.fromkeys(each.probe for each in wrong)
        places = len({each.parameter for each in wrong})
        text = "healthy"
        if wrong:
            text = f"**{', '.join(probes)}**: `{wrong[0].parameter}`" + f" and {places - 1} more" * (places > 1)
        yield name, f"cannot run: {refused[name][:110]}" if name in refused else text


def main() -> None:
    """Write the page's table to standard output."""
    torch.set_num_threads(1)
    start, rows, healthy = time.monotonic(), [], 0
    for fields, layouts in CELLS.items():
        groups: dict[str, list[str]] = {}
        for name, text in sweep(fields, layouts):
            groups.setdefault(text, []).append(name)
        healthy += len(set(groups.get("healthy", [])) - {"serial"})
        rows += [
            f"| {f'`{fields}`' if fields else 'as it is'} | {', '.join(names)} | {text} |"
            for text, names in groups.items()
        ]
        print(rows[-1], file=sys.stderr, flush=True)
    done = f"seeds {', '.join(map(str, SEEDS))}, {time.monotonic() - start:.0f} s on CPUs; healthy: {healthy} cells"
    print(f"megatron-core {version('megatron-core')}, {done}.\n")
    print("\n".join(["| fields | layouts | what the probes say |", "|---|---|---|", *rows]))


if __name__ == "__main__":
    main()
