"""Any model of Hugging Face divided by the plan that its derivatives give, against the whole model and transformers."""

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
    build_model,
    divide,
    load_rank,
    merge_model,
    outputs,
    read_plan,
    shard_model,
)
from mlm_repro.engine.formats.tensor_plan import (
    Division,
    TensorPlan,
    describe_plan,
    make_plan,
    some_tokens,
    without_numbers,
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

DECODER = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
           "num_key_value_heads": 4, "intermediate_size": 64, "pad_token_id": 0,
           "max_position_embeddings": 32}  # fmt: skip
HEADS4 = {name: value for name, value in DECODER.items() if name != "num_key_value_heads"} | {"num_attention_heads": 4}
T5 = {"vocab_size": 101, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", T5),
    "t5-gated-untied": ("T5ForConditionalGeneration",
                        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("BartForConditionalGeneration",
             {"vocab_size": 101, "d_model": 48, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 32,
              "max_position_embeddings": 64}),
    "bert": ("BertForMaskedLM", HEADS4),
    "bert-body": ("BertModel", HEADS4),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 101, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": ("LlamaForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", DECODER | {"head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", DECODER),
    "neox": ("GPTNeoXForCausalLM", HEADS4),
    "opt": ("OPTForCausalLM", {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2, "ffn_dim": 64,
                               "num_attention_heads": 4, "word_embed_proj_dim": 48, "max_position_embeddings": 64}),
    "olmo2": ("Olmo2ForCausalLM", DECODER),
    "falcon": ("FalconForCausalLM", {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2,
                                     "num_attention_heads": 4}),
}  # fmt: skip


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


def of_rank(whole: nn.Module, plan: TensorPlan) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """The outputs of a rank's part, and the gradients of their squares."""
    part = divide(copy.deepcopy(whole), plan, build_mesh(Layout(tp=plan.tp)).tp)
    logits = part(**some_tokens(part))[0]
    logits.square().mean().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in part.named_parameters()}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
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
                split = plan.splits.get(parameter)
                expected = split.of(weight.grad, rank) if split else weight.grad
                torch.testing.assert_close(gradients[parameter], expected, rtol=0, atol=1e-12)


def assert_same(merged: Path, original: Path) -> None:
    """Every tensor bit for bit and in its number format, and every other file but an index of weights."""
    tensors = {name: t for path in original.glob("*.safetensors") for name, t in load_file(path).items()}
    back = load_file(merged / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (back[name].dtype, torch.equal(back[name], tensor)) == (tensor.dtype, True), name
    others = {path.name for path in original.iterdir() if ".safetensors" not in path.name}
    assert {path.name for path in merged.iterdir()} == others | {"model.safetensors"}
    for name in others:
        assert (merged / name).read_bytes() == (original / name).read_bytes(), name


@pytest.mark.parametrize("name", ["t5", "bart", "bert", "bert-body", "gpt2", "llama"])
def test_the_files_run_as_the_whole_model_and_merge_bit_for_bit(name: str, saved: Callable[..., Path]) -> None:
    directory = saved(name)
    whole = outputs(getattr(transformers, MODELS[name][0]).from_pretrained(directory).double().eval())
    for tp in (2, 4):
        out = directory.parent / f"tp{tp}"
        *_, checked = shard_model(directory, out, tp)
        assert checked.startswith(f"{tp} ranks answer as the whole model does")
        for said in run_threads(
            lambda out=out, tp=tp: outputs(load_rank(out, build_mesh(Layout(tp=tp)).tp, dtype=torch.float64)), tp
        ):
            torch.testing.assert_close(said, whole, rtol=0, atol=1e-12)
        held = sum(tensor.numel() for tensor in load_file(out / "model-tp00.safetensors").values())
        assert held < 1.6 / tp * sum(parameter.numel() for parameter in build_model(directory).parameters())
        assert_same(merge_model(out, directory.parent / f"merged{tp}"), directory)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_number_formats_tied_heads_masks_and_old_names_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    gpt2, bert = tmp_path / "gpt2", tmp_path / "bert"
    make("gpt2").to(dtype).save_pretrained(gpt2, max_shard_size="60kB")  # type: ignore[operator]
    one, *others = sorted(gpt2.glob("model-*.safetensors"))
    words = next(t for path in (one, *others) for n, t in load_file(path).items() if n == "transformer.wte.weight")
    added = {"transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12).tril().bool(), "lm_head.weight": words.clone()}
    save_file(load_file(one) | added, one, metadata={"made": "here"})
    index = json.loads((gpt2 / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(added, one.name)
    (gpt2 / "model.safetensors.index.json").write_text(json.dumps(index))
    make("bert").to(dtype).save_pretrained(bert)  # type: ignore[operator]
    (file,) = bert.glob("*.safetensors")
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
           for name, tensor in load_file(file).items()}  # fmt: skip
    save_file(old, file, metadata={"format": "pt"})
    for directory in (gpt2, bert):
        divided = directory.with_name(f"{directory.name}-divided")
        shard_model(directory, divided, 2)
        assert_same(merge_model(divided, directory.with_name(f"{directory.name}-merged")), directory)


def test_the_plan_is_the_one_that_transformers_has() -> None:
    """Where transformers has a plan: colwise and rowwise are equal, and so are the norms whose gradients are summed."""
    for name in ("llama", "qwen3", "neox"):
        model: Any = make(name)
        plan, theirs = make_plan(model, 2), model._tp_plan
        assert "colwise" in theirs.values()
        for module, how in theirs.items():
            layer = module.replace("*", "1")
            split = plan.splits.get(f"{layer}.weight")
            if how == "replicated_with_grad_allreduce":
                assert f"{layer}.weight" in plan.summed
            else:
                assert split, module
                assert split.how == {"colwise": "columns", "rowwise": "rows"}.get(how, "vocabulary"), module
    assert not make_plan(make("llama"), 2).summed
    assert len(make_plan(make("qwen3"), 2).summed) == 4


def test_fused_projections_are_divided_by_heads() -> None:
    """GPT-2's thirds, Phi-3's unequal thirds and halves, NeoX's heads with query, key and value in turn."""
    attention = {"gpt2": ("transformer.h.1.attn.c_attn", [(0, 24), (48, 72), (96, 120)]),
                 "phi3": ("model.layers.1.self_attn.qkv_proj", [(0, 24), (48, 60), (72, 84)]),
                 "neox": ("gpt_neox.layers.1.attention.query_key_value", [(0, 72)])}  # fmt: skip
    for name, (layer, first) in attention.items():
        assert make_plan(make(name), 2).splits[f"{layer}.weight"].parts[0] == first
    assert make_plan(make("phi3"), 2).splits["model.layers.0.mlp.gate_up_proj.weight"].parts[1] == [(32, 64), (96, 128)]
    bias = make_plan(make("t5"), 4).splits["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    assert (bias.how, bias.dim, bias.parts) == ("heads", 1, [[(rank, rank + 1)] for rank in range(4)])


@pytest.mark.parametrize(
    ("name", "tp", "layer", "reason"),
    [
        ("olmo2", 2, "model.layers.0.self_attn.q_proj", "every rank's part depends on all of it"),
        ("falcon", 2, "transformer.h.0.self_attention.query_key_value", "ranks' parts share heads"),
        ("llama", 3, "model.layers.0.self_attn.q_proj", "ranks' parts share heads"),
        ("llama", 5, "model.layers.1.mlp.up_proj", "5 does not divide model.layers.1.mlp.down_proj's 64 inputs"),
        ("bert", 2, "cls.predictions.transform.dense", "no linear layer follows it"),
    ],
)
def test_what_cannot_be_divided_is_copied_and_says_why(name: str, tp: int, layer: str, reason: str) -> None:
    model = make(name)
    plan = make_plan(model, tp)
    assert f"{layer}.weight" not in plan.splits
    assert reason in plan.copied[layer]
    assert any(without_numbers(reason) in line for line in describe_plan(plan, model))


def trained() -> tuple[bool, list[float]]:
    """Whether both ranks' logits are equal with dropout, and a rank's units that dropout left in the last division."""
    whole = make("bart", activation_dropout=0.5, dropout=0.5, attention_dropout=0.5)
    plan, tp = make_plan(whole, 2), build_mesh(Layout(tp=2)).tp
    part = divide(whole.train(), plan, tp, seed=5)
    seen = []
    row: Any = part.get_submodule(plan.blocks[-1].row)
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


def test_the_documents_program_generates_what_the_whole_model_does(saved: Callable[..., Path]) -> None:
    """`docs/neighbours.md`, under torchrun, through the command."""
    directory = saved("llama")
    done = CliRunner().invoke(app, ["shard-hf", str(directory), str(directory.parent / "divided"), "--tp", "2"])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, f"written: {directory.parent / 'divided'}")
    program = directory.parent / "generate.py"
    program.write_text(re.findall(r'```python title="generate.py"\n(.*?)```', NEIGHBOURS.read_text(), re.DOTALL)[0])
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program],
        cwd=directory.parent, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    whole = transformers.LlamaForCausalLM.from_pretrained(directory)
    said = whole.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=False).tolist()
    assert ran.stdout.splitlines() == [str(said)], ran.stderr
    done = CliRunner().invoke(app, ["export", str(directory.parent / "divided"), str(directory.parent / "merged")])
    assert (done.exit_code, done.stdout) == (0, f"written: {directory.parent / 'merged'}\n")


def test_what_does_not_run_divided_is_refused_and_nothing_written(tmp_path: Path) -> None:
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=101, hidden_size=48, n_layer=1, n_head=4))
    model.save_pretrained(tmp_path / "bloom")
    with pytest.raises(BadInput, match="a BloomForCausalLM cannot be divided: its parts do not run"):
        shard_model(tmp_path / "bloom", tmp_path / "out", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["bloom"]


def test_a_wrong_plan_answers_otherwise(saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved thirds of GPT-2's projection: the check of outputs finds what the plan would have hidden."""

    def wrong(model: nn.Module, tp: int) -> TensorPlan:
        plan = make_plan(model, tp)
        for name, split in plan.splits.items():
            if "c_attn" in name:
                plan.splits[name] = Division("columns", split.dim, [[(0, 72)], [(72, 144)]])
        return plan

    monkeypatch.setattr("mlm_repro.engine.formats.model_shards.make_plan", wrong)
    with pytest.raises(BadInput, match="its parts answer otherwise, by"):
        shard_model(saved("gpt2"), saved("gpt2").parent / "out", 2)


def test_bad_directories(saved: Callable[..., Path]) -> None:
    directory = saved("llama")
    out = directory.parent / "out"
    shard_model(directory, out, 2)
    with pytest.raises(BadInput, match="divided over 2 ranks, not 1"):
        load_rank(out, build_mesh(Layout()).tp)
    (out / "plan.json").write_text(json.dumps(json.loads((out / "plan.json").read_text()) | {"splits": 3}))
    with pytest.raises(IntegrityFailure, match=r"plan\.json was changed"):
        merge_model(out, directory.parent / "merged")
    seal(out)
    with pytest.raises(IntegrityFailure, match=r"plan\.json is not a plan"):
        read_plan(out)
    with pytest.raises(BadInput, match="there is no directory"):
        shard_model(directory / "none", directory.parent / "other", 2)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["Path"]}))
    with pytest.raises(BadInput, match="builds no model of it"):
        shard_model(directory, directory.parent / "other", 2)
