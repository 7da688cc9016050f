"""Whether two checkpoints are one model: a task's windows through both, a Hugging Face directory by transformers."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from engine.checkpoint.checkpoint import load_for_inference
from engine.compare.models import Agreement, compare_models, engine_model, transformers_model
from engine.formats.convert import is_huggingface
from engine.model.gpt2 import GPT2
from evaluation.checkpoints import native_checkpoint
from evaluation.protocol import Request
from evaluation.settings import Settings
from lineage.progress import Progress


def compare_windows(first: Path, second: Path, requests: Sequence[Request], settings: Settings) -> Agreement | None:
    """Walk windows in order, until one differs; None where the two are no GPT-2s of one shape.

    Raises what loading raises.
    """
    models = []
    with ExitStack() as stack:
        for path in (first, second):
            native = stack.enter_context(native_checkpoint(path, settings.vocab, settings.heads))
            model = load_for_inference(native).model
            if not isinstance(model, GPT2):
                return None
            theirs = transformers_model(path, model.config) if is_huggingface(path) else None
            models.append(theirs or engine_model(model))
        reference, other = models
        shapes = [{name: tuple(weight.shape) for name, weight in model.weights().items()} for model in models]
        if shapes[0] != shapes[1] or reference.config.num_heads != other.config.num_heads:
            return None
        windows = [(request.tokens, request.num_scored) for request in requests]
        title = f"the same windows through {reference.program} and {other.program}"
        with Progress(title, len(windows), "windows") as progress:
            return compare_models(reference, other, windows, progress.advance)
