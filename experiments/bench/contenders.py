"""Who is measured: layouts of this engine and the peers that run on processor cores."""

from collections.abc import Sequence

from engine.config import ParallelConfig
from experiments.bench.contender import SERIAL, Contender
from lineage.extras import install_command


def contenders() -> list[Contender]:
    """All of them, in the order in which every round measures them: ours and peers in turn."""
    from experiments.bench.ours import build_ours
    from experiments.bench.peers import build_huggingface, build_nanogpt

    return [
        Contender(SERIAL, 1, build_ours, is_ours=True),
        Contender("Hugging Face GPT-2", 1, build_huggingface, needs="transformers"),
        Contender("tp2", 2, build_ours, is_ours=True, parallel=ParallelConfig(tp=2)),
        Contender("Hugging Face GPT-2, DDP", 2, build_huggingface, needs="transformers"),
        Contender("pp2", 2, build_ours, is_ours=True, parallel=ParallelConfig(pp=2), microbatches=2),
        Contender("nanoGPT-style", 1, build_nanogpt),
        Contender("dp2", 2, build_ours, is_ours=True),
        Contender("nanoGPT-style, DDP", 2, build_nanogpt),
        Contender("ZeRO-3 (FSDP2)", 2, build_ours, parallel=ParallelConfig(shard_parameters=True)),
    ]


def left_out(every: Sequence[Contender]) -> dict[str, str]:
    """Those that are not installed, and what installs them."""
    why = f"not installed: {install_command('bench')}"
    return {contender.name: why for contender in every if not contender.is_installed}


NOTES = (
    "tokens/s are those of an iteration: forward, backward, gradient reduction, clipping and AdamW step; of each round "
    "the median of its timed iterations. Ratios are medians over rounds of the ratio within a round.",
    "Every contender has the same initial weights, data, global batch and optimizer settings, runs in its own "
    "processes with one thread each, and is started anew in every round.",
    "Every process has the memory allocator setting that this engine's own command makes (engine/launch/allocator.py).",
    "Hugging Face GPT-2 is transformers' GPT2LMHeadModel in eager mode with its default attention; nanoGPT-style is "
    "written in the benchmark from nanoGPT's published definition. Both use fused torch.optim.AdamW, and with two "
    "ranks torch's DistributedDataParallel. ZeRO-3 is this engine's model under torch's FSDP2.",
    "The limit is of a token's operations with the whole of attention counted, not its causal half alone.",
    "megatron-core: does not run on CPU unmodified",
    "picotron: does not run on CPU unmodified",
)
