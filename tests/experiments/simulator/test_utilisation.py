"""`mlm-experiment mfu`: the numbers of the threads that ask for it, and every rate leads back to the others."""

import json
from pathlib import Path

import pytest

from engine.run.resolved import read_run
from experiments.simulator.cluster import load_cluster
from experiments.simulator.planner import model_of_run
from experiments.simulator.utilisation import Given, token_flops, utilisation
from tests.commands import call

GPT2 = model_of_run(read_run("1.2b"))


def row(text: str, name: str) -> list[str]:
    """GFLOP of a token, TFLOP/s of a GPU and percent of the peak by one convention."""
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


def test_39_tflops_of_2019_are_with_layers_computed_again() -> None:
    """Megatron-LM#27: 528.9 ms on one V100, which the paper's count makes 40.8 TFLOP/s of a batch of 2."""
    text = utilisation(GPT2, load_cluster("dgx-2h-v100"), Given(1, 2, milliseconds=528.9))
    assert row(text, "whole, layers computed again")[1:] == ["40.81", "31.4%"]
    assert row(text, "attention whole")[1:] == ["31.06", "23.9%"]


def test_the_denominator_is_the_dense_peak(tmp_path: Path) -> None:
    """Megatron-LM#1276: 400 TFLOP/s of an H100 are 40 %, not 20. #1565: 420 of Qwen2.5-32B on H200s are 42.5 %."""
    text = utilisation(GPT2, load_cluster("h100"), Given(1, 512, tflops=400.0))
    assert row(text, "attention whole")[1:] == ["400", "40.4%"]
    qwen = {"model_type": "qwen2", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8,
            "num_hidden_layers": 64, "intermediate_size": 27648, "max_position_embeddings": 131072,
            "vocab_size": 152064}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(qwen), encoding="utf-8")
    done = call({}, "mlm-experiment", "mfu", str(path), "--cluster", "h200", "--gpus", "16", "--tflops", "420")
    assert row(done.out, "attention whole")[1:] == ["420", "42.5%"]
    assert "989 TFLOP/s" in done.out


def test_every_rate_leads_to_the_others() -> None:
    cluster = load_cluster("dgx-a100-80g")
    text = utilisation(GPT2, cluster, Given(64, 512, milliseconds=1000.0))
    rate = 512 * 1024.0
    flops = token_flops(GPT2)
    tflops = (flops.parameters + flops.attention) * rate / 64 / 1e12
    assert utilisation(GPT2, cluster, Given(64, 512, tokens_per_second=rate)) == text
    assert utilisation(GPT2, cluster, Given(64, 512, tflops=tflops)) == text


def test_the_parts_of_a_token_s_operations_are_the_closed_forms() -> None:
    w, flops = GPT2.template, token_flops(GPT2)
    assert flops.parameters == 6 * (12 * w.layers * w.hidden**2 + w.vocab * w.hidden)
    assert flops.attention == 12 * w.layers * w.hidden * w.seq
    assert flops.again == 24 * w.layers * w.hidden**2 + flops.attention / 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["1.2b"], "give one of"),
        (["1.2b", "--tflops", "400", "--milliseconds", "3"], "give one of"),
        (["1.2b", "--tflops", "0"], "above 0"),
        (["bert-336m", "--tflops", "40"], "is a bert"),
    ],
)
def test_what_cannot_be_said_is_one_sentence(arguments: list[str], words: str) -> None:
    assert words in call({}, "mlm-experiment", "mfu", *arguments, "--cluster", "h100", ends=2).err
