"""Who scores the same requests: this engine, the plain loop over full logits, lm-evaluation-harness, and transformers,
which generates too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from data_pipeline.tokens.tokenizer import Tokenizer
from engine.config import ModelConfig
from engine.formats import Imported, write_checkpoint
from engine.formats.convert import export_checkpoint
from engine.model.gpt2 import GPT2
from engine.parallel.mesh import serial_mesh
from evaluation.generate import generate
from evaluation.inference import pack_weights
from evaluation.protocol import Request
from evaluation.scoring import ScoringModel, score
from lineage.extras import import_extra


@dataclass(frozen=True)
class Answer:
    """Of each request: negative log-likelihood in nats, and whether all its tokens were the likeliest."""

    nll: NDArray[np.float64]
    all_greedy: NDArray[np.bool_]


Score = Callable[[Sequence[Request], int | None], Answer]
"""(requests, rows per forward pass) → answer. Only our own batch size may be left to the program."""


def initial_network(config: ModelConfig, dtype: torch.dtype = torch.float32) -> GPT2:
    """A model with initial weights, always the same."""
    network = GPT2(config, serial_mesh()).eval()
    network.initialize(1234)
    return network.to(dtype)


def our_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> ScoringModel:
    """The same as an evaluation loads it."""
    network = initial_network(config, dtype)
    pack_weights(network)
    return scoring_model(network)


def scoring_model(network: GPT2) -> ScoringModel:
    """A network to score and generate with, its weights as they are."""
    config, dtype = network.config, next(network.parameters()).dtype
    return ScoringModel(network, config.vocab_size, config.seq_length, config.hidden_size, dtype)


def ours(model: ScoringModel) -> Score:
    """This engine in this process."""

    def run(requests: Sequence[Request], batch_size: int | None) -> Answer:
        scores = score(model, requests, batch_size, workers=1)
        return Answer(scores.nll, scores.all_greedy)

    return run


def plain_loop(network: GPT2) -> Score:
    """Megatron-LM's evaluation loop: float logits and log-softmax at every position, then those that count.

    `tasks/zeroshot_gpt2/evaluate.py` of Megatron-LM v1.0, on our network as it is trained, with its fused attention.
    Requests of one batch have the same length.
    """

    @torch.inference_mode()
    def run(requests: Sequence[Request], batch_size: int | None) -> Answer:
        nll: list[float] = []
        greedy: list[bool] = []
        size = batch_size or 1
        for first in range(0, len(requests), size):
            batch = requests[first : first + size]
            tokens = torch.from_numpy(np.stack([request.tokens for request in batch]))
            targets = tokens[:, 1:]
            hidden = network.hidden_states(tokens[:, :-1])
            logits = network.logits(hidden)[..., : network.config.vocab_size].float().transpose(0, 1)  # [b, s, v]
            log_probabilities = F.log_softmax(logits, dim=-1).gather(2, targets[..., None]).squeeze(2)
            is_best = logits.argmax(dim=-1) == targets
            for row, request in enumerate(batch):
                nll.append(-log_probabilities[row, -request.num_scored :].double().sum().item())
                greedy.append(bool(is_best[row, -request.num_scored :].all()))
        return Answer(np.array(nll), np.array(greedy))

    return run


def export_model(network: GPT2, tokenizer: Tokenizer, folder: Path) -> Path:
    """The model as a Hugging Face directory below `folder`."""
    weights = {name: tensor.detach() for name, tensor in network.named_parameters()}
    write_checkpoint(folder / "ours", Imported("benchmark", network.config, weights, tokenizer, origin={}))
    return export_checkpoint(folder / "ours", folder / "theirs")


def harness(directory: Path, seq_length: int) -> Score:
    """lm-evaluation-harness's Hugging Face backend in fp32, from the tokens on: its batching, forward and softmax."""
    import_extra("transformers.utils.logging", "eval").disable_progress_bar()
    program = import_extra("lm_eval.models.huggingface", "eval").HFLM(
        pretrained=str(directory), device="cpu", dtype="float32", max_length=seq_length, batch_size=1
    )  # fmt: skip

    def run(requests: Sequence[Request], batch_size: int | None) -> Answer:
        program.batch_size_per_gpu = batch_size or 1
        asked = [
            (("", ""), request.tokens[: -request.num_scored].tolist(), request.tokens[-request.num_scored :].tolist())
            for request in requests
        ]
        answers = program._loglikelihood_tokens(asked, disable_tqdm=True)
        return Answer(-np.array([value for value, _ in answers]), np.array([greedy for _, greedy in answers]))

    return run


def transformers_model(directory: Path) -> Any:
    """The exported model by transformers, in fp32."""
    loaded = import_extra("transformers", "eval").GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float32)
    return loaded.eval()


def transformers_loop(model: Any) -> Score:
    """The loop of transformers' page on perplexity: full logits of each window, and of those that count the softmax."""

    @torch.inference_mode()
    def run(requests: Sequence[Request], batch_size: int | None) -> Answer:
        nll: list[float] = []
        greedy: list[bool] = []
        for request in requests:
            tokens, count = torch.from_numpy(request.tokens), request.num_scored
            logits = model(tokens[None, :-1], use_cache=False).logits[0, -count:].float()
            targets = tokens[-count:]
            nll.append(F.cross_entropy(logits, targets, reduction="none").double().sum().item())
            greedy.append(bool((logits.argmax(dim=-1) == targets).all()))
        return Answer(np.array(nll), np.array(greedy))

    return run


def our_tokens(model: ScoringModel, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """What this engine says after the prompts."""
    return generate(model, prompts, new, None)


@torch.inference_mode()
def their_tokens(model: Any, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """What transformers says with its cache."""
    ids = torch.tensor([list(prompt) for prompt in prompts])
    said: list[list[int]] = model.generate(
        ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new, do_sample=False,
        pad_token_id=0, eos_token_id=None,
    )[:, ids.size(1) :].tolist()  # fmt: skip
    return said
