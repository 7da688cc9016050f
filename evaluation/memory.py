"""Scoring a text from end to end by a model that remembers it: disjoint segments, each with the memory of those before.

What stands before a target is its segment and the memory; nothing is computed twice (Dai et al. 2019, Section 3.2).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.families.transformer_xl.model import TransformerXL
from engine.model.microbatch import PipelineInput, Recurrence
from evaluation.protocol import Request, Scores
from evaluation.scoring import ScoringModel, score_rows
from lineage.errors import BadInput


class NoMemory(BadInput):
    """The model has no memory, or is divided."""


def remembering(model: ScoringModel) -> TransformerXL:
    """The network of a model with memory. Raises NoMemory for one without, or one on several ranks."""
    network = model.network
    if not isinstance(network, TransformerXL) or not network.config.transformer_xl.memory_length:
        raise NoMemory("this protocol is for a model with memory: a Transformer-XL with memory_length above 0")
    if model.mesh.layout.world_size > 1:
        raise NoMemory("a text is scored with memory by one rank: leave out --layout")
    return network


@torch.inference_mode()
def score_with_memory(
    model: ScoringModel, segments: Sequence[Request], on_progress: Callable[[int], None] = lambda count: None
) -> Scores:
    """Scores of segments that follow each other: each request scores all its tokens but the first.

    Raises NoMemory as `remembering` does, BadInput for a segment longer than the model's context.
    """
    network = remembering(model)
    if max(len(request.tokens) for request in segments) - 1 > model.seq_length:
        raise BadInput(f"a segment is longer than the model's {model.seq_length} tokens")
    device, states = model.mesh.device, dict[int, torch.Tensor]()
    parts = []
    for request in segments:
        tokens = torch.from_numpy(request.tokens).to(device)[None]
        batch = PipelineInput(tokens[:, :-1], tokens[:, 1:], recurrence=Recurrence(states, states))
        hidden = network.run_stage(batch.tokens, batch)[:, 0]  # [s, h]
        parts.append(score_rows(model, hidden, tokens[0, 1:], None))
        on_progress(1)
    counts = np.array([segment.num_scored for segment in segments], np.int64)
    return Scores._make([*(torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True)), counts])
