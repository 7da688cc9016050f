"""What a loaded model is asked before its first number: planted faults are refused or said, each by
its own probe.

Faults that strangers found have tests elsewhere too: all kinds of models in `test_zoo`; the double
first token in `test_programs`; numbers named by accident in `test_chance`; weights of other formats
by name in `test_hub`; several devices in `test_ranks`; results of unlike tokenizers in
`test_commands`; a tokenizer's own first token in `test_identify`.
"""

import json
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlm_repro.evaluation.models import pretrained
from mlm_repro.evaluation.scoring import probes
from tests.commands import Command
from tests.evaluation.conftest import Evaluated
from tests.evaluation.test_pretrained import TEXT, byte_level, loop, made, spoil_config

transformers = pytest.importorskip("transformers")
SETTINGS = ("--set", "workers=1")
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 8.0, 16.0, 32.0],
    "factor": 4.0,
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def bert(folder: Path) -> Path:
    """A BERT that is no decoder, behind the class for causal models."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.XLMRobertaConfig(vocab_size=300, **sizes)
    )
    model.save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Switch a probe off."""
    monkeypatch.setitem(probes.PROBES, name, lambda model, probed: (model, "not asked"))


def test_a_model_that_sees_the_future_is_refused(
    tmp_path: Path, text: Path, mlm_eval: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    switched = made(
        tmp_path / "gemma", "Gemma3TextConfig", head_dim=8, use_bidirectional_attention=True
    )
    for directory in (bert(tmp_path / "roberta"), switched):
        done = mlm_eval("perplexity", text, "--ckpt", directory, *SETTINGS, ends=2)
        assert "it sees the tokens that it is to predict" in done.error
        assert len(done.error.strip().splitlines()) == 1
    without(monkeypatch, "causal")
    mlm_eval("perplexity", text, "--ckpt", tmp_path / "roberta", *SETTINGS, ends=0)


Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def a_prefix_sees_itself(plain: Forward, layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The first four positions see each other, as a prefix language model's do."""
    y = plain(layer, x)
    return torch.cat([y[:, :4] + y[:, :4].mean(1, keepdim=True), y[:, 4:]], 1)


def a_convolution_pads_both_sides(plain: Forward, layer: Any, x: torch.Tensor) -> torch.Tensor:
    return plain(layer, torch.nn.functional.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2))


def rows_are_normalised_together(plain: Forward, layer: Any, x: torch.Tensor) -> torch.Tensor:
    return plain(layer, x - 0.5 * x.mean(0, keepdim=True))


@pytest.mark.parametrize("leak", [a_prefix_sees_itself, a_convolution_pads_both_sides])
def test_a_leak_between_positions_is_found_wherever_it_is(
    leak: Callable[..., torch.Tensor],
    tmp_path: Path,
    text: Path,
    mlm_eval: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    monkeypatch.setattr(Qwen2MLP, "forward", partialmethod(partial(leak, Qwen2MLP.forward)))
    asked = ("perplexity", text, "--ckpt", made(tmp_path / "model", "Qwen2Config"), *SETTINGS)
    assert "it sees the tokens that it is to predict" in mlm_eval(*asked, ends=2).error
    without(monkeypatch, "causal")
    mlm_eval(*asked, ends=0)


def test_rows_that_are_normalised_together_are_scored_alone(
    tmp_path: Path, text: Path, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    plain = Qwen2MLP.forward
    monkeypatch.setattr(
        Qwen2MLP, "forward", lambda self, x: rows_are_normalised_together(plain, self, x)
    )
    found = evaluated("perplexity", text, "--ckpt", made(tmp_path / "model", "Qwen2Config"))
    assert (found["batch_size"], "one row at a time" in found["checked"]["row by row"]) == (1, True)


def test_a_model_whose_last_row_of_a_batch_is_not_a_number_is_scored_alone(
    tmp_path: Path, text: Path, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    plain = Qwen2MLP.forward

    def lose_last_row(self: Any, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = plain(self, x)
        return torch.cat([rows[:-1], rows[-1:] * float("nan")]) if len(x) > 1 else rows

    monkeypatch.setattr(Qwen2MLP, "forward", lose_last_row)
    found = evaluated("perplexity", text, "--ckpt", made(tmp_path / "model", "Qwen2Config"))
    assert "moves by nan" in found["checked"]["row by row"]
    assert (found["batch_size"], found["perplexity"] > 1) == (1, True)


def test_rotary_positions_go_beyond_the_context_and_learned_ones_do_not(
    tmp_path: Path, text: Path, evaluated: Evaluated, mlm_eval: Command
) -> None:
    directory, asked = made(tmp_path / "rotary", "Qwen2Config"), ("--window", 96, "--stride", 80)
    found = evaluated("perplexity", text, "--ckpt", directory, *asked)
    expected = sum(loop(directory, 96, 80, torch.float32))
    assert found["loss_per_token"] * found["num_scored_tokens"] == pytest.approx(expected, rel=1e-6)
    said = "a window of 96 is beyond the model's context of 64"
    assert said in found["checked"]["window"]
    assert any(said in warning for warning in found["warnings"])
    assert (
        "window"
        not in evaluated("perplexity", text, "--ckpt", directory, "--window", 64)["checked"]
    )
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    others = (
        made(tmp_path / "dynamic", "Qwen2Config", rope_parameters=dynamic),
        made(tmp_path / "opt", "OPTConfig"),
    )
    for other in others:
        done = mlm_eval("perplexity", text, "--ckpt", other, *asked, *SETTINGS, ends=2)
        assert done.error.strip().endswith(
            f"{said}, where only models with rotary positions that are not dynamic go:"
            " give at most 64"
        )


def test_a_model_that_answers_otherwise_the_second_time_is_refused(
    tmp_path: Path, text: Path, mlm_eval: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    plain = Qwen2MLP.forward
    monkeypatch.setattr(
        Qwen2MLP, "forward", lambda self, x: torch.nn.functional.dropout(plain(self, x), 0.2)
    )
    directory = made(tmp_path / "model", "Qwen2Config")
    said = mlm_eval("perplexity", text, "--ckpt", directory, *SETTINGS, ends=2).error
    assert "differ by" in said
    without(monkeypatch, "repeatable")
    without(monkeypatch, "causal")  # noise moves earlier predictions too
    without(monkeypatch, "row by row")
    mlm_eval("perplexity", text, "--ckpt", directory, *SETTINGS, ends=0)


def test_a_model_that_mixes_rows_of_a_batch_gets_one_row_at_a_time(
    tmp_path: Path, text: Path, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    plain = Qwen2MLP.forward
    monkeypatch.setattr(Qwen2MLP, "forward", lambda self, x: plain(self, x) * len(x))
    asked = (
        "perplexity",
        text,
        "--ckpt",
        made(tmp_path / "model", "Qwen2Config"),
        "--window",
        16,
        "--stride",
        16,
    )
    found = evaluated(*asked, "--set", "batch_size=4")
    assert "one row at a time" in found["checked"]["row by row"]
    assert any("one row at a time" in warning for warning in found["warnings"])
    assert found["batch_size"] == 1
    assert found["perplexity"] == evaluated(*asked, "--set", "batch_size=1")["perplexity"]
    without(monkeypatch, "row by row")
    assert evaluated(*asked, "--set", "batch_size=4")["perplexity"] != found["perplexity"]


def test_rows_on_one_side_of_a_longrope_switch_are_together(
    tmp_path: Path, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = made(
        tmp_path / "model",
        "Phi3Config",
        pad_token_id=0,
        original_max_position_embeddings=16,
        rope_parameters=LONGROPE,
    )
    passages = tmp_path / "passages.txt"
    words = TEXT.split()
    passages.write_text("\n".join(" ".join(words[i : i + 2 + i % 13]) for i in range(30)))
    alone, together = (
        evaluated("cloze", passages, "--ckpt", directory, "--set", f"batch_size={size}")
        for size in (1, 30)
    )
    assert together["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-6)
    assert "rows of up to 16 inputs" in together["checked"]["row by row"]
    monkeypatch.setattr(pretrained.PretrainedModel, "length_switch", 0)
    mixed = evaluated("cloze", passages, "--ckpt", directory, "--set", "batch_size=30")
    assert abs(mixed["perplexity"] / alone["perplexity"] - 1) > 1e-3


def test_the_output_layer_is_cut_only_where_it_is_the_whole_model(
    tmp_path: Path, text: Path, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = made(tmp_path / "plain", "Qwen2Config")
    capped = made(tmp_path / "capped", "Gemma2Config")
    outcomes = [
        evaluated("perplexity", text, "--ckpt", each)["checked"]["output layer"]
        for each in (plain, capped)
    ]
    assert "equals the whole model" in outcomes[0]
    assert "which it changes" in outcomes[1]
    monkeypatch.setattr(pretrained.PretrainedModel, "_head_is_whole", lambda self, logits: True)
    wrong = evaluated("perplexity", text, "--ckpt", capped, "--window", 64, "--stride", 64)[
        "loss_per_token"
    ]
    right = sum(loop(capped, 64, 64, torch.float32)) / (len(byte_level()(TEXT).input_ids) - 1)
    assert abs(wrong - right) > 1e-3


def test_a_model_that_reshapes_its_logits_is_scored_uncut(
    tmp_path: Path, text: Path, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = made(tmp_path / "model", "Qwen2Config")
    expected = evaluated("perplexity", text, "--ckpt", directory)["perplexity"]
    model = transformers.Qwen2ForCausalLM
    forward = model.forward

    def reshaping(self: Any, *given: Any, **named: Any) -> Any:
        made_here = forward(self, *given, **named)
        made_here.logits[0, 0]  # an IndexError without rows
        return made_here

    monkeypatch.setattr(model, "forward", reshaping)
    assert evaluated("perplexity", text, "--ckpt", directory)["perplexity"] == pytest.approx(
        expected, rel=1e-6
    )


def test_a_model_that_fails_inside_transformers_is_one_sentence(
    tmp_path: Path, text: Path, mlm_eval: Command
) -> None:
    """Its heads share more keys than there are heads, which is found by computing alone."""
    directory = made(tmp_path / "model", "StableLmConfig", num_key_value_heads=8)
    done = mlm_eval("perplexity", text, "--ckpt", directory, *SETTINGS, ends=2)
    assert f"{directory} is loaded but fails inside transformers: " in done.error
    assert len(done.error.strip().splitlines()) == 1


def test_all_first_tokens_stand_before_a_text(
    tmp_path: Path, text: Path, evaluated: Evaluated
) -> None:
    from tokenizers import processors

    directory = made(tmp_path / "model", "Qwen2Config", rows=8)
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[gMASK]", "<sop>"]})
    ids = tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>"])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=[("[gMASK]", ids[0]), ("<sop>", ids[1])]
    )
    tokenizer.save_pretrained(directory)
    found = evaluated("perplexity", text, "--ckpt", directory, "--window", 64, "--stride", 64)
    assert found["first_tokens"] == ["[gMASK]", "<sop>"]
    assert "'[gMASK]<sop>' before the text" in found["protocol"]
    loaded = transformers.AutoTokenizer.from_pretrained(directory)
    rows = torch.tensor(loaded(TEXT).input_ids)
    assert rows[:2].tolist() == ids
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    total = 0.0
    for start in range(0, len(rows) - 1, 64):
        row = rows[start : start + 65]
        with torch.inference_mode():
            logits = (
                model(input_ids=row[None, :-1]).logits[0, :, : len(loaded)].double().log_softmax(-1)
            )
        losses = -logits.gather(1, row[1:, None])[:, 0]
        total += losses[1 if start == 0 else 0 :].sum().item()
    assert found["num_scored_tokens"] == len(rows) - 2
    assert found["loss_per_token"] == pytest.approx(total / (len(rows) - 2), rel=1e-6)


def test_tokens_after_every_text_are_left_out_and_said(
    tmp_path: Path, text: Path, evaluated: Evaluated
) -> None:
    from tokenizers import processors

    directory = made(tmp_path / "model", "LlamaConfig")
    asked = ("perplexity", text, "--ckpt", directory, "--stride", 16)
    before = evaluated(*asked)
    assert "last tokens" not in before["checked"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    after = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.backend_tokenizer.post_processor = after
    tokenizer.save_pretrained(directory)
    found = evaluated(*asked)
    assert any(
        "puts '</s>' after every text: it is left out" in warning for warning in found["warnings"]
    )
    assert (found["perplexity"], found["first_tokens"]) == (before["perplexity"], ["<s>"])


def test_first_tokens_may_stand_in_every_window(
    tmp_path: Path, text: Path, evaluated: Evaluated
) -> None:
    directory = made(tmp_path / "model", "LlamaConfig", rows=20)
    found = evaluated(
        "perplexity", text, "--ckpt", directory, "--window", 32, "--stride", 8, "--first", "every"
    )
    assert "'<s>' in every window" in found["protocol"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    ids, total, done = torch.tensor(tokenizer(TEXT).input_ids), 0.0, 1
    for start in range(0, len(ids), 8):
        stop = min(start + 32, len(ids))
        if stop > done:
            row = torch.cat([ids[:1] if start else ids[:0], ids[start:stop]])
            with torch.inference_mode():
                logits = (
                    model(input_ids=row[None, :-1])
                    .logits[0, :, : len(tokenizer)]
                    .double()
                    .log_softmax(-1)
                )
            total -= logits.gather(1, row[1:, None])[done - stop :].sum().item()
        done = max(done, stop)
    assert found["loss_per_token"] == pytest.approx(total / (len(ids) - 1), rel=1e-6)


def test_literal_special_tokens_are_counted_and_said(
    tmp_path: Path, text: Path, evaluated: Evaluated
) -> None:
    text.write_text("the cat <unk> sat on <unk> a mat and saw </s> " * 3)
    warnings = evaluated("perplexity", text, "--ckpt", made(tmp_path / "llama", "LlamaConfig"))[
        "warnings"
    ]
    assert "text.txt: <unk> stands in it 6 times: each is one token of its own" in warnings
    assert "text.txt: </s> stands in it 3 times: each is one token of its own" in warnings
    others = evaluated("perplexity", text, "--ckpt", made(tmp_path / "qwen", "Qwen2Config"))[
        "warnings"
    ]
    assert not any("<unk>" in warning for warning in others)


def remove_layer(directory: Path) -> None:
    spoil_config(num_hidden_layers=1, layer_types=None)(directory)


def add_tower(directory: Path, name: str = "tower.weight") -> None:
    tensors = load_file(directory / "model.safetensors") | {name: torch.ones(3)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def remove_layer_and_add_tower(directory: Path) -> None:
    remove_layer(directory)
    add_tower(directory, "a_tower.weight")


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (remove_layer, 6, "is in the file, but not in the model of its configuration"),
        # The tensor that is the reason, though another comes before it.
        (remove_layer_and_add_tower, 6, "tensor 'model.layers.1."),
        (
            add_tower,
            0,
            (
                "'tower.weight' is in the file, but not in the model of its configuration (1 such);"
                " it is left"
            ),
        ),
        (
            spoil_config(auto_map={"AutoModelForCausalLM": "own.Own"}),
            0,
            "modeling code that comes with it is never run",
        ),
        (
            spoil_config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 8}),
            2,
            "package",
        ),
        (
            spoil_config(
                quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
            ),
            2,
            "bitsandbytes",
        ),
        (spoil_config(quantization_config={"quant_method": "awq", "bits": 4}), 2, "gptqmodel"),
        (
            spoil_config(
                quantization_config={"quant_method": "compressed-tensors", "format": "dense"}
            ),
            2,
            "compressed-tensors",
        ),
        (
            spoil_config(quantization_config={"quant_method": "fp8"}),
            0,
            "its configuration says fp8: weights are read into",
        ),
        (
            spoil_config(num_attention_heads=4, num_key_value_heads=3),
            6,
            "is [16] in the file and [24] in the model of its",
        ),
    ],
)
def test_what_the_files_have_and_the_model_does_not_take(
    change: Callable[[Path], object],
    code: int,
    words: str,
    tmp_path: Path,
    text: Path,
    mlm_eval: Command,
) -> None:
    directory = made(tmp_path / "model", "Qwen2Config")
    change(directory)
    done = mlm_eval("perplexity", text, "--ckpt", directory, *SETTINGS, ends=code)
    assert words in done.out + done.err
    assert done.code == 0 or len(done.error.strip().splitlines()) == 1


def adapter(folder: Path, base: str) -> Path:
    """A PEFT directory with a LoRA of one layer, written by hand."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": base,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    torch.manual_seed(3)
    tensors = {
        name.format(layer, part): torch.randn(shape)
        for layer in range(2)
        for part, shape in (("A", (2, 32)), ("B", (32, 2)))
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_adapter_is_refused_where_peft_is_missing(
    tmp_path: Path, text: Path, mlm_eval: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlm_repro.lineage.extras.installed", lambda package: None)
    base = made(tmp_path / "base", "LlamaConfig")
    done = mlm_eval(
        "perplexity", text, "--ckpt", adapter(tmp_path / "adapter", str(base)), *SETTINGS, ends=2
    )
    assert done.error.strip().endswith(
        f"is an adapter of {base}, which peft applies: pip install peft"
    )
    (base / "adapter_config.json").write_text(
        (tmp_path / "adapter" / "adapter_config.json").read_text()
    )
    assert (
        "give each a directory of its own"
        in mlm_eval("perplexity", text, "--ckpt", base, *SETTINGS, ends=2).error
    )


def test_an_adapter_its_base_and_another_base_have_three_numbers(
    tmp_path: Path, text: Path, evaluated: Evaluated
) -> None:
    base = made(tmp_path / "base", "LlamaConfig")
    added = adapter(tmp_path / "adapter", str(base))
    numbers = [
        evaluated("perplexity", text, "--ckpt", each)["perplexity"] for each in (base, added)
    ]
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    numbers += [
        evaluated("perplexity", text, "--ckpt", each)["perplexity"] for each in (added, base)
    ]
    assert len({*numbers}) == 4


def test_an_adapter_of_a_shared_embedding_changes_that_side_alone(
    tmp_path: Path,
    text: Path,
    evaluated: Evaluated,
    mlm_eval: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Merged into weights that embedding and output layer share, it would change both."""
    import peft

    base, added = (
        made(tmp_path / "base", "Qwen2Config", tie_word_embeddings=True),
        tmp_path / "adapter",
    )
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    chosen = peft.LoraConfig(
        r=2, lora_alpha=16, init_lora_weights=False, target_modules=["embed_tokens", "q_proj"]
    )
    torch.manual_seed(1)
    peft.get_peft_model(plain, chosen).save_pretrained(added)
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), added
    ).eval()
    ids = torch.tensor(byte_level()(TEXT).input_ids)[None, :65]
    with torch.inference_mode():
        logits = model(input_ids=ids[:, :-1]).logits[0].double().log_softmax(-1)
    text.write_text(byte_level().decode(ids[0]))
    found = evaluated("perplexity", text, "--ckpt", added)
    assert found["loss_per_token"] == pytest.approx(
        -logits.gather(1, ids[0, 1:, None]).mean().item(), rel=1e-5
    )
    assert "with the same logits" in found["checked"]["adapter"]
    # Leaves the adapter out.
    monkeypatch.setattr(peft.LoraModel, "merge_and_unload", peft.LoraModel.unload)
    assert (
        "gives other logits"
        in mlm_eval("perplexity", text, "--ckpt", added, *SETTINGS, ends=2).error
    )


def test_the_store_knows_the_tensors_that_were_loaded_and_the_packages(
    tmp_path: Path, text: Path, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded differs though no file does, as where a package changes weights; then a
    package appears."""
    from mlm_repro.evaluation.scoring import scores

    passes: list[int] = []
    plain_pass, plain_load = scores.score_batch, transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        scores, "score_batch", lambda *given: passes.append(1) or plain_pass(*given)
    )
    asked = ("perplexity", text, "--ckpt", made(tmp_path / "model", "LlamaConfig"))
    found = evaluated(*asked)
    probing = len(passes)
    assert evaluated(*asked)["perplexity"] == found["perplexity"]
    again = len(passes) - probing
    assert again == 0, "neither what was found by the probes nor scores are made again"

    def changed(*given: Any, **named: Any) -> Any:
        model, said = plain_load(*given, **named)
        model.model.norm.weight.data *= 1.5
        return model, said

    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", changed)
        assert evaluated(*asked)["perplexity"] != found["perplexity"]
    assert evaluated(*asked)["perplexity"] == found["perplexity"]
    before = len(passes)
    monkeypatch.setattr(scores, "installed_packages", lambda: ["another-1.0"])
    evaluated(*asked)
    assert len(passes) - before == probing


def test_the_record_names_what_computed_it(
    tmp_path: Path, text: Path, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlm_repro.evaluation import evaluate

    present = {"transformers", "numba", "gptqmodel", "bitsandbytes", "compressed-tensors"}
    monkeypatch.setattr(evaluate, "installed", lambda name: "1.0" if name in present else None)
    found = evaluated(
        "perplexity", text, "--ckpt", made(tmp_path / "model", "LlamaConfig"), "--stride", 16
    )
    packages = found["environment"]["packages"]
    assert {name for name, version in packages.items() if version == "1.0"} == present
    assert not {"gguf", "peft"} & packages.keys()
    assert found["checkpoint"] == "model"
    assert found["backend"] == "transformers: LlamaForCausalLM, sdpa attention"
    assert (found["window"], found["stride"], found["first_tokens"], found["batch_size"]) == (
        64,
        16,
        ["<s>"],
        None,
    )
    assert found["checked"].keys() == {"weights", "output layer", *probes.PROBES}


def test_files_of_other_kinds(
    tmp_path: Path, text: Path, evaluated: Evaluated, mlm_eval: Command, oracle: Path
) -> None:
    """A vocabulary in vocab.txt, and GGUF files: one of several must be named, and has the other
    format's number."""
    directory = made(tmp_path / "model", "GPT2Config")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(TEXT.split()))]
    (directory / "vocab.txt").write_text("\n".join(words))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer"})
    )
    assert (
        evaluated("perplexity", text, "--ckpt", directory, "--set", "backend=transformers")[
            "perplexity"
        ]
        > 1
    )
    folder = tmp_path / "gguf"
    folder.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes((oracle / "model.gguf").read_bytes())
    several = mlm_eval("perplexity", text, "--ckpt", folder, *SETTINGS, ends=2)
    assert "several GGUF files: give the path of the one to score (a.gguf, b.gguf)" in several.error
    one, other = (
        evaluated("perplexity", text, "--ckpt", each, "--window", 16)
        for each in (folder / "a.gguf", oracle / "model")
    )
    assert one["loss_per_token"] == pytest.approx(other["loss_per_token"], rel=1e-6)
    assert (
        one["checked"]["quantisation"]
        == "its configuration says gguf: weights are read into torch.float32"
    )


def test_a_file_of_weights_is_digested_once(
    tmp_path: Path, text: Path, evaluated: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is remembered until its inode, size or time of change is another."""
    directory, digested = made(tmp_path / "model", "Qwen2Config"), list[str]()
    plain = pretrained.sha256_file
    monkeypatch.setattr(
        pretrained, "sha256_file", lambda path: digested.append(path.name) or plain(path)
    )
    first, again = (
        evaluated("perplexity", text, "--ckpt", directory)["checkpoint_digest"] for _ in range(2)
    )
    assert digested.count("model.safetensors") == 1
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    changed = evaluated("perplexity", text, "--ckpt", directory)["checkpoint_digest"]
    assert digested.count("model.safetensors") == 2
    assert first == again != changed


def test_no_digit_is_cut_off_where_a_terminal_is_narrow(
    made_passes_for_published: object,
    tmp_path: Path,
    mlm_eval: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    directory, kept = made(tmp_path / "model", "Qwen2Config"), tmp_path / "kept.json"
    for words in (
        ("all", "--ckpt", directory, "--limit", 2, *SETTINGS, "--json", kept),
        ("compare", kept, kept),
    ):
        done = mlm_eval(*words, ends=0)
        assert "…" not in done.out
        assert "wikitext103" in done.out
    assert "95 % interval" in done.out


def test_what_a_device_cannot_do_is_said(
    tmp_path: Path,
    text: Path,
    mlm_eval: Command,
    evaluated: Evaluated,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlm_repro.evaluation.scoring import scores

    directory = made(tmp_path / "model", "Qwen2Config")
    refused = mlm_eval("perplexity", text, "--ckpt", directory, "--set", "device=mps", ends=2)
    assert "device mps is not supported: give cpu or cuda" in refused.error
    asked = ("perplexity", text, "--ckpt", directory, "--window", 16, "--stride", 16)
    expected, plain, most = evaluated(*asked)["perplexity"], scores.score_batch, 4

    def small(model: Any, requests: Any, banned: Any) -> Any:
        if len(requests) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(model, requests, banned)

    monkeypatch.setattr(scores, "score_batch", small)
    monkeypatch.setattr(scores, "installed_packages", lambda: ["another-1.0"])
    done = mlm_eval(
        *asked, "--set", "batch_size=9", *SETTINGS, "--json", tmp_path / "small.json", ends=0
    )
    assert "do not fit into memory: 4 are tried" in done.err
    assert json.loads((tmp_path / "small.json").read_text())["perplexity"] == pytest.approx(
        expected, rel=1e-6
    )
    most = 0
    done = mlm_eval(*asked, "--set", "batch_size=7", *SETTINGS, ends=4)
    assert "do not fit into the memory of cpu" in done.error
