"""Models of Hugging Face divided by transformers' plan or by ours, against the whole model and
transformers."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from mlm_repro.engine.cli import app
from mlm_repro.engine.formats.model_shards import (
    STYLES,
    Division,
    TensorPlan,
    divide,
    load_rank,
    make_plan,
    merge_model,
    outputs,
    read_model,
    shard_model,
    some_tokens,
)
from mlm_repro.engine.launch.forked import run_forked
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.lineage.digest import seal
from mlm_repro.lineage.errors import BadInput, IntegrityFailure
from tests.architecture.rooms import ROOT

transformers = pytest.importorskip("transformers")
NEIGHBOURS = ROOT / "docs" / "neighbours.md"

DECODER = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "max_position_embeddings": 32,
}
HEADS4 = {name: value for name, value in DECODER.items() if name != "num_key_value_heads"} | {
    "num_attention_heads": 4
}
T5 = {"vocab_size": 101, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", T5),
    "t5-gated-untied": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            "vocab_size": 101,
            "d_model": 48,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 32,
            "max_position_embeddings": 64,
        },
    ),
    "bert": ("BertForMaskedLM", HEADS4),
    "bert-body": ("BertModel", HEADS4),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 101, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "llama": ("LlamaForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", DECODER | {"head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", DECODER),
    "neox": ("GPTNeoXForCausalLM", HEADS4),
    "opt": (
        "OPTForCausalLM",
        {
            "vocab_size": 101,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "ffn_dim": 64,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 48,
            "max_position_embeddings": 64,
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", DECODER),
    "falcon": (
        "FalconForCausalLM",
        {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
}


def make(name: str, **changed: Any) -> nn.Module:
    """A model with weights, biases and norms drawn, so that nothing in it is zero or one."""
    kind, values = MODELS[name]
    model = getattr(transformers, kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made: nn.Module = model(model.config_class(**values | changed))
        for parameter in made.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return made.eval()


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def save(name: str, **changed: Any) -> Path:
        make(name, **changed).save_pretrained(tmp_path / name, max_shard_size="60kB")  # type: ignore[operator]
        return tmp_path / name

    return save


def of_rank(
    whole: nn.Module, plan: TensorPlan
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """The outputs of a rank's part, and the gradients of their squares."""
    part = divide(copy.deepcopy(whole), plan, build_mesh(Layout(tp=plan.tp)).tp)
    logits = part(**some_tokens(part))[0]
    logits.square().mean().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in part.named_parameters()}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "falcon"])
def test_parts_give_the_outputs_and_gradients_of_the_whole_model(name: str, tp: int) -> None:
    whole = make(name).double()
    plan = make_plan(whole, tp)
    logits = whole(**some_tokens(whole))[0]
    ranks = run_threads(partial(of_rank, whole, plan), tp)
    logits.square().mean().backward()
    for rank, (answers, gradients) in enumerate(ranks):
        torch.testing.assert_close(answers, logits.detach(), rtol=0, atol=1e-12)
        for parameter, weight in whole.named_parameters():
            if weight.grad is not None:
                expected = plan.part(parameter, weight.grad, rank)
                torch.testing.assert_close(gradients[parameter], expected, rtol=0, atol=1e-12)


def assert_same(merged: Path, original: Path) -> None:
    """Every tensor bit for bit and in its number format, and every other file but an index of
    weights."""
    tensors = {
        name: t for path in original.glob("*.safetensors") for name, t in load_file(path).items()
    }
    back = load_file(merged / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (back[name].dtype, torch.equal(back[name], tensor)) == (tensor.dtype, True), name
    others = {path.name for path in original.iterdir() if ".safetensors" not in path.name}
    assert {path.name for path in merged.iterdir()} == others | {"model.safetensors"}
    for name in others:
        assert (merged / name).read_bytes() == (original / name).read_bytes(), name


@pytest.mark.parametrize("name", ["t5", "bart", "bert", "bert-body", "gpt2", "llama"])
def test_the_files_run_as_the_whole_model_and_merge_bit_for_bit(
    name: str, saved: Callable[..., Path]
) -> None:
    directory = saved(name)
    whole = outputs(
        getattr(transformers, MODELS[name][0]).from_pretrained(directory).double().eval()
    )
    for tp in (2, 4):
        out = directory.parent / f"tp{tp}"
        *_, checked = shard_model(directory, out, tp)
        assert checked.startswith(f"{tp} ranks answer as the whole model does")
        for said in run_threads(
            lambda out=out, tp=tp: outputs(
                load_rank(out, build_mesh(Layout(tp=tp)).tp, dtype=torch.float64)
            ),
            tp,
        ):
            torch.testing.assert_close(said, whole, rtol=0, atol=1e-12)
        held = sum(tensor.numel() for tensor in load_file(out / "model-tp00.safetensors").values())
        assert held < 1.6 / tp * sum(parameter.numel() for parameter in make(name).parameters())
        assert_same(merge_model(out, directory.parent / f"merged{tp}"), directory)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_number_formats_tied_heads_masks_and_old_names_come_back(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """As transformers writes them today: without the mask, the head's copy and BERT's old names for
    norms."""
    gpt2, bert = tmp_path / "gpt2", tmp_path / "bert"
    make("gpt2").to(dtype).save_pretrained(gpt2, max_shard_size="60kB")  # type: ignore[operator]
    today = {
        gpt2: {n: t for path in gpt2.glob("*.safetensors") for n, t in load_file(path).items()}
    }
    one, *_ = sorted(gpt2.glob("model-*.safetensors"))
    words = today[gpt2]["transformer.wte.weight"]
    added = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12).tril().bool(),
        "lm_head.weight": words.clone(),
    }
    save_file(load_file(one) | added, one, metadata={"made": "here", "format": "pt"})
    index = json.loads((gpt2 / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(added, one.name)
    (gpt2 / "model.safetensors.index.json").write_text(json.dumps(index))
    make("bert").to(dtype).save_pretrained(bert)  # type: ignore[operator]
    (file,) = bert.glob("*.safetensors")
    today[bert] = load_file(file)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in today[bert].items()
    }
    assert old.keys() != today[bert].keys()
    save_file(old, file, metadata={"format": "pt"})
    for directory, tensors in today.items():
        divided, merged = (
            directory.with_name(f"{directory.name}-{end}") for end in ("divided", "merged")
        )
        shard_model(directory, divided, 2)
        merge_model(divided, merged)
        back = load_file(merged / "model.safetensors")
        assert back.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (back[name].dtype, torch.equal(back[name], tensor)) == (dtype, True), name


def test_the_plan_is_the_one_that_transformers_has() -> None:
    """Where transformers has a plan: colwise and rowwise are equal, and so are the norms whose
    gradients are summed."""
    for name in ("llama", "qwen3", "neox"):
        model: Any = make(name)
        plan, theirs = make_plan(model, 2), model._tp_plan
        assert "colwise" in theirs.values()
        for module, how in theirs.items():
            division = plan.parameters[f"{module.replace('*', '1')}.weight"]
            assert division.how == STYLES.get(how, "vocabulary"), module
    summed = {
        name: [d.how for d in make_plan(make(name), 2).parameters.values()].count("summed")
        for name in MODELS
    }
    assert {name: count for name, count in summed.items() if count} == {"qwen3": 4}


def test_fused_projections_are_divided_by_heads() -> None:
    """GPT-2's thirds, NeoX's heads with query, key and value in turn, and T5's bias of each
    head."""
    rows = torch.arange(144)
    thirds = make_plan(make("gpt2"), 2).part("transformer.h.1.attn.c_attn.bias", rows, 0)
    assert thirds.tolist() == [*range(24), *range(48, 72), *range(96, 120)]
    neox = make_plan(make("neox"), 2).part(
        "gpt_neox.layers.1.attention.query_key_value.bias", rows, 0
    )
    assert neox.tolist() == list(range(72))
    plan, bias = (
        make_plan(make("t5"), 4),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    )
    assert plan.part(bias, torch.arange(8).view(2, 4), 1).tolist() == [[1], [5]]


def test_layers_that_a_plan_does_not_divide_plainly_are_copied() -> None:
    """OLMo-2's attention has norms over the whole width: transformers gathers its columns, here it
    is whole."""
    plan = make_plan(make("olmo2"), 2).parameters
    assert not any("self_attn" in name for name in plan)
    assert plan["model.layers.0.mlp.up_proj.weight"].how == "columns"


@pytest.mark.parametrize(
    ("name", "tp", "reason"),
    [
        (
            "falcon",
            2,
            (
                "transformers has no plan of columns and rows for a FalconForCausalLM; without one"
                " only gpt2, bart, "
            ),
        ),
        ("phi3", 2, "transformers has no plan of columns and rows for a Phi3ForCausalLM"),
        (
            "llama",
            3,
            "a LlamaForCausalLM cannot be divided over 3 ranks, and nothing was written: its parts"
            " do not run",
        ),
        (
            "gpt2",
            5,
            "a GPT2LMHeadModel cannot be divided over 5 ranks, and nothing was written: its parts"
            " do not run",
        ),
    ],
)
def test_what_cannot_be_divided_says_why_and_nothing_is_written(
    name: str, tp: int, reason: str, saved: Callable[..., Path]
) -> None:
    directory = saved(name)
    with pytest.raises(BadInput, match=reason):
        shard_model(directory, directory.parent / "out", tp)
    assert [path.name for path in directory.parent.iterdir()] == [name]


def test_weights_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "bert"
    make("bert").save_pretrained(directory)  # type: ignore[operator]
    file = directory / "model.safetensors"
    tensors = load_file(file)
    lost = tensors.pop("bert.encoder.layer.0.output.dense.weight")
    for wrong in (
        tensors,
        tensors | {"bert.encoder.layer.0.output.dense.weight": lost, "more": lost.clone()},
    ):
        save_file(wrong, file, metadata={"format": "pt"})
        with pytest.raises(BadInput, match=r"tensor \S+ is missing, .* \(1 such tensors\)"):
            shard_model(directory, directory.parent / "out", 2)


def trained() -> tuple[bool, list[float]]:
    """Whether both ranks' logits are equal with dropout, and a rank's units that dropout left in
    the last division."""
    whole = make("bart", activation_dropout=0.5, dropout=0.5, attention_dropout=0.5)
    plan, tp = make_plan(whole, 2), build_mesh(Layout(tp=2)).tp
    part = divide(whole.train(), plan, tp, seed=5)
    seen = []
    row: Any = part.get_submodule(
        next(name.removesuffix(".weight") for name in plan.parameters if "fc2.w" in name)
    )
    leave = row.forward
    row.forward = lambda x: (seen.append(x != 0), leave(x))[1]
    torch.manual_seed(7)
    logits = part(**some_tokens(part)).logits.detach()
    return torch.equal(*tp.all_gather(logits[None], dim=0)), seen[0].float().flatten().tolist()


def test_dropout_differs_in_divided_layers_and_agrees_elsewhere() -> None:
    (first_same, first), (second_same, second) = run_forked(trained, 2)
    assert first_same
    assert second_same
    assert 0.3 < sum(first) / len(first) < 0.7
    assert first != second


def test_the_documents_program_generates_what_the_whole_model_does(
    saved: Callable[..., Path],
) -> None:
    """`docs/neighbours.md`, under torchrun, through the command."""
    directory = saved("llama")
    done = CliRunner().invoke(
        app, ["shard-hf", str(directory), str(directory.parent / "divided"), "--tp", "2"]
    )
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (
        0,
        f"written: {directory.parent / 'divided'}",
    )
    program = directory.parent / "generate.py"
    program.write_text(
        re.findall(r'```python title="generate.py"\n(.*?)```', NEIGHBOURS.read_text(), re.DOTALL)[0]
    )
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            program,
        ],
        cwd=directory.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    whole = transformers.LlamaForCausalLM.from_pretrained(directory)
    said = whole.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False).tolist()
    assert ran.stdout.splitlines() == [str(said)], ran.stderr
    done = CliRunner().invoke(
        app, ["export", str(directory.parent / "divided"), str(directory.parent / "merged")]
    )
    assert (done.exit_code, done.stdout) == (0, f"written: {directory.parent / 'merged'}\n")


def test_a_wrong_plan_answers_otherwise(
    saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interleaved thirds of GPT-2's projection: the check of outputs finds what the plan would have
    hidden."""

    def wrong(model: nn.Module, tp: int) -> TensorPlan:
        plan = make_plan(model, tp)
        for name in plan.parameters:
            if "c_attn" in name:
                plan.parameters[name] = Division("columns", plan.parameters[name].dim)
        return plan

    monkeypatch.setattr("mlm_repro.engine.formats.model_shards.make_plan", wrong)
    with pytest.raises(BadInput, match="its parts give other outputs than the whole, by"):
        shard_model(saved("gpt2"), saved("gpt2").parent / "out", 2)


def test_bad_directories(saved: Callable[..., Path]) -> None:
    directory = saved("llama")
    out = directory.parent / "out"
    shard_model(directory, out, 2)
    with pytest.raises(BadInput, match="divided over 2 ranks, and 1 were started"):
        load_rank(out, build_mesh(Layout()).tp)
    (out / "plan.json").write_text(
        json.dumps(json.loads((out / "plan.json").read_text()) | {"parameters": 3})
    )
    with pytest.raises(IntegrityFailure, match=r"plan\.json was changed"):
        merge_model(out, directory.parent / "merged")
    seal(out)
    with pytest.raises(IntegrityFailure, match=r"plan\.json does not fit its schema"):
        load_rank(out, build_mesh(Layout()).tp)
    with pytest.raises(BadInput, match="there is no directory"):
        shard_model(directory / "none", directory.parent / "other", 2)
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["Path"]})
    )
    with pytest.raises(BadInput, match="cannot build the model of"):
        shard_model(directory, directory.parent / "other", 2)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stated", ["float16", "float32", None])
def test_weights_are_read_in_the_format_of_their_files(
    stored: torch.dtype, stated: str | None, tmp_path: Path
) -> None:
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    whole = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(stored)
    whole.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": stated}), encoding="utf-8")
    weights = read_model(tmp_path).state_dict()
    for name, weight in whole.state_dict().items():
        assert weights[name].dtype == weight.dtype == stored
        assert torch.equal(weights[name], weight)
