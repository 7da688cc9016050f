"""Models that transformers computes, beside a plain loop over transformers' own logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlm_repro.data_pipeline.tokens.tokenizer import END_OF_TEXT
from mlm_repro.evaluation.models.pretrained import PretrainedModel
from tests.commands import Command
from tests.evaluation.conftest import Evaluated

transformers = pytest.importorskip("transformers")
WORDS = [
    "the cat sat on a mat and saw another dog run over green hills while old rivers slept below"
    " é 日本"
]
TEXT = " ".join(WORDS * 12) + "\n"
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "LlamaConfig": GROUPED,
    "MistralConfig": GROUPED | {"sliding_window": 32},
    "Qwen2Config": GROUPED,
    "Gemma2Config": GROUPED | {"head_dim": 8, "final_logit_softcapping": 3.0},
    "GPTNeoXConfig": SIZES,
    "OPTConfig": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 16,
    },
    "GPT2Config": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "tie_word_embeddings": False,
        "activation_function": "relu",
    },
}


def byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet
    )
    backend.train_from_iterator([TEXT], trainer)
    end = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **end)


def byte_fallback() -> Any:
    """As SentencePiece's of LLaMA: a space before every text, bytes for what is not known, a first
    token."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    backend: Any = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer: Any = trainers.BpeTrainer(vocab_size=300, special_tokens=special, max_token_length=6)
    backend.train_from_iterator([TEXT.replace("日本", "")], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def made(folder: Path, kind: str, rows: int = 0, **settings: Any) -> Path:
    """A random model of a kind, with rows of its embedding that stand for no sub-word."""
    tokenizer = byte_fallback() if kind in ("LlamaConfig", "MistralConfig") else byte_level()
    torch.manual_seed(1)
    size = max(tokenizer.get_vocab().values()) + 1 + rows
    config = getattr(transformers, kind)(vocab_size=size, **(KINDS.get(kind, GROUPED) | settings))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.inference_mode()
def loop(directory: Path, window: int, stride: int, dtype: torch.dtype) -> list[float]:
    """Negative log-likelihood of each window."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    ids, real, losses, scored = torch.tensor(tokenizer(TEXT).input_ids), len(tokenizer), [], 1
    for start in range(0, len(ids), stride):
        stop = min(start + window + 1, len(ids))
        if stop > scored:
            logits = model(ids[None, start : stop - 1]).logits[0, scored - stop :, :real].double()
            losses.append(-logits.log_softmax(-1).gather(1, ids[scored:stop, None]).sum().item())
        scored = stop
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_scores_as_a_plain_loop(
    kind: str, tmp_path: Path, mlm_eval: Command
) -> None:
    directory, file = made(tmp_path / "model", kind, rows=3), tmp_path / "text.txt"
    file.write_text(TEXT)
    for dtype, name, window, stride in (
        (torch.float32, "fp32", 64, 2),
        (torch.bfloat16, "bf16", 48, 40),
    ):
        asked = (
            "--window",
            window,
            "--stride",
            stride,
            "--set",
            f"dtype={name}",
            "--samples",
            tmp_path / "samples.jsonl",
        )
        mlm_eval(
            "perplexity",
            file,
            "--ckpt",
            directory,
            "--set",
            "workers=1",
            "--set",
            "batch_size=1",
            *asked,
            ends=0,
        )
        lines = (tmp_path / "samples.jsonl").read_text().splitlines()
        losses = [-sum(json.loads(line)["log_probabilities"]) for line in lines]
        assert losses == pytest.approx(loop(directory, window, stride, dtype), abs=1e-5)


def test_a_model_that_reads_its_own_weights_is_scored_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP

    monkeypatch.setattr(
        LlamaMLP, "forward", lambda self, x: x @ self.up_proj.weight.T @ self.down_proj.weight.T
    )
    theirs = LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **GROUPED)).eval()
    model, tokens = PretrainedModel(theirs), torch.arange(50)[None]
    expected = theirs(tokens).logits
    model.pack_weights()
    assert not any(parameter.is_mkldnn for parameter in theirs.parameters())
    assert torch.equal(model.logits(model(tokens))[:, 0], expected[0])


def test_both_programs_agree_on_a_gpt2(
    made_passes_for_published: object, tmp_path: Path, evaluated: Evaluated, mlm_eval: Command
) -> None:
    usual = {"tie_word_embeddings": True, "activation_function": "gelu_new"}
    directory = made(tmp_path / "model", "GPT2Config", rows=3, **usual)
    for name in ("wikitext103", "wikitext103-huggingface", "lambada"):
        ours, theirs = (
            evaluated(name, "--ckpt", directory, "--limit", 4, "--set", f"backend={each}")
            for each in ("engine", "transformers")
        )
        assert theirs["perplexity"] == pytest.approx(ours["perplexity"], rel=1e-5)
        assert any("3 rows of the embedding" in warning for warning in theirs["warnings"])
    prompt = (
        "generate",
        "--ckpt",
        directory,
        "--prompt",
        "the cat",
        "--max-new-tokens",
        9,
        "--set",
    )
    assert (
        mlm_eval(*prompt, "backend=engine", ends=0).out
        == mlm_eval(*prompt, "backend=transformers", ends=0).out
    )


def test_texts_as_they_are(tmp_path: Path, evaluated: Evaluated) -> None:
    directory = made(tmp_path / "model", "Qwen2Config")
    plain = "the cat sat on a mat\nand saw another dog\n" * 3
    texts = {
        "lf.txt": (plain.encode(), ""),
        "bom.txt": (b"\xef\xbb\xbf" + plain.encode(), "byte order mark is left out"),
        "crlf.txt": (
            plain.replace("\n", "\r\n").encode(),
            "6 line ends of CRLF are scored as they stand",
        ),
        "japanese.txt": ("日本語の文です。".encode() * 40, "it has no perplexity by words"),
        "surrogate.jsonl": (rb'{"text": "hello \ud83d world"}', "read as U+FFFD in document 1"),
        "array.json": (b'[{"text": "hello world"}, "one two"]', "has 18 sub-words"),
        "end.txt": (
            f"{plain}{END_OF_TEXT}{plain}".encode(),
            "stands in it 1 times: each is one token",
        ),
    }
    losses = {}
    for name, (content, said) in texts.items():
        (tmp_path / name).write_bytes(content)
        result = evaluated("perplexity", tmp_path / name, "--ckpt", directory)
        assert any(said in warning for warning in result["warnings"]) or not said, result[
            "warnings"
        ]
        assert result["bits_per_byte"] > 0
        assert (result["perplexity"] is None) == (name == "japanese.txt")
        losses[name] = result["loss_per_token"]
    assert losses["bom.txt"] == losses["lf.txt"] != losses["crlf.txt"]


def spoil_config(**values: Any) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        content = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(content | values))

    return spoil


def spoil_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return spoil


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (spoil_config(model_type="t5"), 2, "does not predict tokens from the earlier ones alone"),
        (
            spoil_config(
                auto_map={"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Z"}, model_type="own"
            ),
            2,
            "model",
        ),
        (spoil_config(vocab_size=200), 6, "has ids up to"),
        (spoil_config(hidden_size=2**20, intermediate_size=2**22), 4, "parameters"),
        (spoil_weights(lambda tensors: tensors.pop(NORM)), 6, f"tensor '{NORM}' is missing"),
        (spoil_weights(lambda tensors: tensors[NORM].fill_(float("nan"))), 6, "not finite"),
        (lambda directory: (directory / "tokenizer.json").unlink(), 2, "okenizer"),
    ],
)
def test_what_cannot_be_scored_is_one_sentence(
    damage: Callable[[Path], object], code: int, words: str, tmp_path: Path, mlm_eval: Command
) -> None:
    directory = made(tmp_path / "model", "Qwen2Config")
    damage(directory)
    (tmp_path / "text.txt").write_text(TEXT)
    done = mlm_eval(
        "perplexity", tmp_path / "text.txt", "--ckpt", directory, "--set", "workers=1", ends=code
    )
    assert words in done.error
    assert len(done.error.strip().splitlines()) == 1


def test_names_of_a_compiled_model_lose_their_prefix(tmp_path: Path, evaluated: Evaluated) -> None:
    directory, file = made(tmp_path / "model", "Qwen2Config"), tmp_path / "text.txt"
    file.write_text(TEXT)
    before = evaluated("perplexity", file, "--ckpt", directory)["perplexity"]
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {f"_orig_mod.{name}": t for name, t in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert evaluated("perplexity", file, "--ckpt", directory)["perplexity"] == before
