"""Generation token by token: what transformers generates, at every layout."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2LMHeadModel, TopKLogitsWarper, TopPLogitsWarper
from typer.testing import CliRunner

from mlm_repro.engine.formats import Imported, write_checkpoint
from mlm_repro.engine.formats.convert import export_checkpoint
from mlm_repro.engine.launch.mesh import build_mesh
from mlm_repro.engine.launch.threads import run_threads
from mlm_repro.engine.parallel.layout import Layout
from mlm_repro.engine.parallel.sharding import sharded_parameters
from mlm_repro.evaluation.checkpoints import load_checkpoint
from mlm_repro.evaluation.cli import app
from mlm_repro.evaluation.evaluate import Settings
from mlm_repro.evaluation.generate import generate, generate_text
from mlm_repro.evaluation.models.places import Place
from mlm_repro.evaluation.settings import Sampling
from mlm_repro.lineage.errors import BadInput
from tests.evaluation.standins import sentences, tiny_config, tiny_gpt2

PROMPTS = [[5, 17, 40], [299], list(range(1, 20))]
TOGETHER = [list(range(1, 20)), list(range(40, 21, -1)), [7] * 19]
SAMPLED = [
    Sampling(seed=1),
    Sampling(0.7, 20, None, 2),
    Sampling(1.3, None, 0.8, 3),
    Sampling(2.0, 50, 0.9, 4),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer

    model = tiny_gpt2(tiny_config(vocab_size=300))
    tensors = {p.name: p.local.detach() for p in sharded_parameters(model, model.mesh)}
    out = tmp_path_factory.mktemp("generate") / "checkpoint"
    tokenizer = Tokenizer.train(sentences(40), 300)
    write_checkpoint(
        out, Imported("tiny", model.config, tensors, tokenizer, {"format": "this test"})
    )
    return out


@pytest.fixture(scope="module")
def theirs(checkpoint: Path) -> GPT2LMHeadModel:
    return GPT2LMHeadModel.from_pretrained(
        export_checkpoint(checkpoint, checkpoint.parent / "exported")
    ).eval()


def their_tokens(
    model: GPT2LMHeadModel, prompts: list[list[int]], new: int, sampling: Sampling | None
) -> list[list[int]]:
    ids = torch.tensor(prompts)
    choice = {"do_sample": False}
    if sampling:
        torch.manual_seed(sampling.seed)
        choice = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p or 1.0,
        }
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, pad_token_id=0, **choice
    )
    return found[:, ids.size(1) :].tolist()


def generate_on(layout: Layout, checkpoint: Path) -> list[list[int]]:
    model = load_checkpoint(checkpoint, build_mesh(layout)).model
    return [
        tokens
        for prompts in ([PROMPTS[0]], [PROMPTS[1]], TOGETHER)
        for sampling in (None, SAMPLED[1])
        for tokens in generate(model, prompts, 12, None, sampling)
    ]


@pytest.mark.parametrize(
    "prompts", [*([prompt] for prompt in PROMPTS), TOGETHER], ids=["3", "1", "19", "3 of 19"]
)
def test_tokens_are_those_of_transformers(
    prompts: list[list[int]], checkpoint: Path, theirs: GPT2LMHeadModel
) -> None:
    loaded, end = load_checkpoint(checkpoint), theirs.generation_config.eos_token_id
    for sampling in (None, *SAMPLED):
        expected = their_tokens(theirs, prompts, 12, sampling)
        cut = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in expected]
        assert generate(loaded.model, prompts, 12, end, sampling) == cut


def test_beyond_the_context_each_token_follows_from_the_last_that_fit(
    checkpoint: Path, theirs: GPT2LMHeadModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """As nanoGPT's loop does it, with transformers' model; from a short prompt and from one that is
    too long."""
    model = load_checkpoint(checkpoint).model
    for prompt in (PROMPTS[0], [number % 290 for number in range(3, 45)]):
        ids = torch.tensor([prompt])
        for _ in range(40):
            with torch.no_grad():
                logits = theirs(ids[:, -32:]).logits[0, -1]
            ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
        assert generate(model, [prompt], 40, None) == ids[:, len(prompt) :].tolist()
        assert "each one follows from the last 32 alone" in capsys.readouterr().err


def test_layouts_generate_the_same(checkpoint: Path) -> None:
    expected = generate_on(Layout(), checkpoint)
    for layout in (Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(tp=2, pp=2)):
        for tokens in run_threads(generate_on, layout.world_size, layout, checkpoint):
            assert tokens == expected


def test_generation_ends_with_end_of_text(checkpoint: Path) -> None:
    model = load_checkpoint(checkpoint).model
    whole, *others = generate(model, TOGETHER, 12, None)
    end = whole[3]
    assert all(end not in tokens for tokens in others)
    assert generate(model, TOGETHER, 12, end) == [whole[: whole.index(end) + 1], *others]


@settings(max_examples=50)
@given(
    st.lists(st.integers(-30, 30), min_size=1, max_size=12),
    st.floats(0.2, 5),
    st.none() | st.integers(1, 15),
    st.none() | st.floats(0.05, 1.0),
)
def test_what_is_left_to_draw_from_is_what_transformers_leaves(
    logits: list[int], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    scores = torch.tensor([logits], dtype=torch.float32) / 4
    expected = scores / temperature
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p and top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = Sampling(temperature, top_k, top_p).probabilities(scores[0])
    torch.testing.assert_close(found, expected.softmax(-1)[0], rtol=0, atol=0)


def test_the_command(checkpoint: Path, tmp_path: Path) -> None:
    arguments = [
        "generate",
        "--ckpt",
        str(checkpoint),
        "--prompt",
        "the cat",
        "--max-new-tokens",
        "5",
    ]
    done = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert done.stdout == f"the cat{found['continuation']}\nwritten: {tmp_path / 'out.json'}\n"
    assert len(found["tokens"]) == 5
    assert found["sampling"] is None
    assert found["checkpoint_digest"] == load_checkpoint(checkpoint).digest
    sampled = [
        CliRunner().invoke(app, [*arguments, "--temperature", "3", "--seed", seed]).output
        for seed in "112"
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    from_theirs = [
        *arguments[:2],
        str(export_checkpoint(checkpoint, tmp_path / "theirs")),
        *arguments[3:],
    ]
    assert CliRunner().invoke(app, from_theirs).stdout == f"the cat{found['continuation']}\n"


def test_an_empty_prompt_begins_a_document(checkpoint: Path) -> None:
    loaded = load_checkpoint(checkpoint)
    found = generate_text(Place.find(checkpoint), "", 4, None, Settings())
    assert [found.tokens] == generate(
        loaded.model, [[loaded.tokenizer.end_of_text]], 4, loaded.tokenizer.end_of_text
    )


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"temperature": 0.0}, "a temperature of 0.0 is not above 0"),
        ({"temperature": float("nan")}, "a temperature of nan is not above 0"),
        ({"top_k": 0}, "top-k = 0 leaves no token"),
        ({"top_p": 0.0}, "top-p = 0.0 is not above 0"),
        ({"top_p": 1.5}, "top-p = 1.5 is not above 0 and at most 1"),
    ],
)
def test_settings_that_leave_nothing_are_refused(values: dict[str, float], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        Sampling(**values)  # type: ignore[arg-type]


def test_what_cannot_be_continued_is_refused(checkpoint: Path) -> None:
    with pytest.raises(BadInput, match="name tp and pp alone"):
        generate_text(Place.find(checkpoint), "the", 4, None, Settings(layout=Layout(dp=2)))
