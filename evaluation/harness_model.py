"""This engine as a model of lm-evaluation-harness, and Megatron-LM's protocols as its tasks:
`mlm-eval harness`.

Only releases after 0.4.13 look for models in the entry points of other packages. For older ones the
model `mlm` is put into the registry here and the folder of task files onto the path; then
lm-evaluation-harness's own command line runs.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlm_repro.evaluation.checkpoints import open_checkpoint
from mlm_repro.evaluation.evaluate import score_shared
from mlm_repro.evaluation.generate import generate
from mlm_repro.evaluation.models.places import Place
from mlm_repro.evaluation.protocol import Request, Scores, Tokens, with_first
from mlm_repro.evaluation.settings import Sampling, Settings
from mlm_repro.evaluation.tasks.heldout import SURROGATE
from mlm_repro.evaluation.windows import megatron_windows, sliding_windows
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.config import parse_config
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.extras import import_extra

TASK_FILES = Path(__file__).parent / "harness_tasks"
NEW_TOKENS = 256
"""Largest number of tokens in an answer to a task without a limit (lm-evaluation-harness's
default)."""
FORMATS = {"auto": None, "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""lm-evaluation-harness's name of a number format → value of the setting `dtype`."""
TOGETHER = 16
"""Largest batch of prompts if no batch size is given."""


class Model(import_extra("lm_eval.api.model", "eval").TemplateLM):  # type: ignore[misc]
    """Model class through which lm-evaluation-harness scores and continues texts with any
    checkpoint that `mlm-eval` reads, under the name `mlm`. The batch size changes only the last
    bits of a score."""

    backend = "causal"

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        **settings: Any,
    ) -> None:
        """Load the checkpoint at the path or hub name `pretrained`, and print its warnings to
        standard error. `batch_size` None or a text such as `auto` or `auto:4` means as many rows as
        fit; `dtype` is a key of FORMATS or its value, None for the default. `max_length` is a
        longest input other than the context, in tokens; `settings` are settings of `mlm-eval` by
        name, as `--set` takes them, with one rank as the default layout.

        lm-evaluation-harness always passes a device and a largest batch size. The latter is
        ignored, and so are `cuda` and `cuda:0` on a machine without a GPU. Raises BadInput for an
        unknown argument, number format or device, a `max_length` that the model does not take, or a
        checkpoint that is missing or cannot be scored; IntegrityFailure for a damaged one,
        Interrupted if the hub stops answering, HardwareMissing for a model larger than memory.
        """
        super().__init__()
        is_auto = batch_size is None or str(batch_size).startswith("auto")
        values = (
            {"layout": "dp=1"}
            | settings
            | {
                "dtype": FORMATS.get(str(dtype), dtype),
                "batch_size": None if is_auto else batch_size,
                "device": device
                if device not in ("cuda", "cuda:0") or torch.cuda.is_available()
                else None,
            }
        )
        self._settings = parse_config(values, Settings, "--model_args of mlm")
        place = Place.find(Path(pretrained), self._settings.vocab)
        self._loaded = open_checkpoint(place, self._settings).within(max_length)
        for note in self._loaded.notes:
            print(f"warning: {note}", file=sys.stderr)
        self.tokenizer = self._loaded.tokenizer

    @property
    def eot_token_id(self) -> int:
        """Id of the tokenizer's end-of-text token."""
        return self.tokenizer.end_of_text

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that begins a document. lm-evaluation-harness takes the token as the
        context of a text that has none."""
        return self.tokenizer.document_start

    @property
    def tokenizer_name(self) -> str:
        """Hexadecimal digest of the tokenizer's files, by which lm-evaluation-harness names its
        cache of requests."""
        return self.tokenizer.digest

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return a list of the token ids of a text, with the tokenizer's first tokens before them
        unless `add_special_tokens` is False. A lone surrogate is read as U+FFFD."""
        tokens = self.tokenizer.encode(SURROGATE.sub("\ufffd", string))
        return tokens if add_special_tokens is False else with_first(self.tokenizer, tokens)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return a list of the log-likelihood of each request's text in nats, in the requests'
        order; 0 for an empty string. The text is the first of the request's `args`.

        A string is scored whole, in disjoint windows after the token that begins a document. An
        object with `text` and `stride` is scored in Megatron-LM's sliding windows, without its
        first token, and raises BadInput if it has no other token or if the stride, which is for a
        window of 1024 tokens, is longer than the window. The answers also go into
        lm-evaluation-harness's cache.
        """
        requests_of_texts = [self._windows(request.args[0]) for request in requests]
        scored = iter(self._score([windows for windows in requests_of_texts if windows]))
        answers = [
            -math.fsum(next(scored).nll) if windows else 0.0 for windows in requests_of_texts
        ]
        return self._kept("loglikelihood_rolling", [request.args for request in requests], answers)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a list of the continuation of each request's prompt as text, in the requests'
        order. A request's `args` are its prompt and its settings. A continuation ends before a stop
        or end-of-text, or after the settings' `max_gen_toks` tokens, by default 256. A prompt
        that leaves no room for them in the context loses its beginning. Decoding is greedy unless
        the settings have a temperature.

        Greedy prompts of one length and the same settings are continued together. The answers also
        go into lm-evaluation-harness's cache. Raises BadInput if the new tokens leave no room for a
        prompt, the settings leave no token to draw, or the model is one that cannot generate.
        """
        prompts = [self._prompt(*request.args) for request in requests]
        alike: dict[tuple[int, str], list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            alike[len(prompts[number]), repr(request.args[1])].append(number)
        answers = [""] * len(requests)
        for numbers in alike.values():
            settings = requests[numbers[0]].args[1]
            # A sampled prompt is alone: its answer then depends on no other prompt.
            size = 1 if settings.get("temperature") else self._settings.batch_size or TOGETHER
            for start in range(0, len(numbers), size):
                batch = numbers[start : start + size]
                texts = self._generate([prompts[number] for number in batch], settings)
                for number, text in zip(batch, texts, strict=True):
                    answers[number] = text
        return self._kept("generate_until", [request.args for request in requests], answers)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return, for each request (pair of texts, tokens of the context, tokens of the
        continuation), a pair: the log-likelihood of the continuation in nats, and True if each of
        its tokens is the model's most likely one. A request longer than the model's context loses
        its beginning. The answers also go into lm-evaluation-harness's cache. Raises BadInput if a
        continuation is empty, is longer than the context or has no token before it."""
        if not requests:
            return []
        context = self._loaded.model.seq_length
        cut = [([*before, *after][-context - 1 :], len(after)) for _, before, after in requests]
        made = [[Request(np.asarray(tokens, dtype=np.int64), count)] for tokens, count in cut]
        answers = [
            (-float(scores.nll[0]), bool(scores.all_greedy[0])) for scores in self._score(made)
        ]
        return self._kept("loglikelihood", [asked for asked, *_ in requests], answers)

    def _windows(self, text: str | JSON) -> list[Request]:
        """Return a list of the requests of a text: rolling windows for a string, none for an empty
        one; for an object with `text` and `stride`, Megatron-LM's sliding windows of at most 1024
        tokens, which begin a stride apart. The stride is for windows of 1024, and shorter in
        proportion in a shorter context. Raises BadInput for an object with fewer than two tokens or
        a stride that is longer than the window."""
        context = self._loaded.model.seq_length
        if isinstance(text, str):
            return Request.rolling(self.tok_encode(text, False), self.prefix_token_id, context)
        tokens: Tokens = np.asarray(self.tok_encode(text["text"]), dtype=np.int64)
        windows = sliding_windows(len(tokens), *megatron_windows(context, text["stride"]))
        return [Request.of_window(tokens, window) for window in windows]

    def _score(self, request_lists: Sequence[Sequence[Request]]) -> list[Scores]:
        return score_shared(self._loaded, request_lists, self._settings, "harness")

    def _prompt(self, context: str, settings: JSON) -> list[int]:
        """Return a list of the token ids of the prompt `context`, cut at the left so that the new
        tokens fit the model's context. `settings` are the request's; `max_gen_toks` in them is the
        number of new tokens, by default 256. An empty prompt becomes the token that begins a
        document. Raises BadInput if the new tokens fill the context."""
        limit = int(settings.get("max_gen_toks", NEW_TOKENS))
        if (room := self._loaded.model.seq_length - limit) < 1:
            raise BadInput(
                f"{limit} new tokens, max_gen_toks of the task or else 256, leave no room for a"
                " prompt in the model's context: set fewer by --gen_kwargs max_gen_toks=NUMBER"
            )
        return self.tok_encode(context)[-room:] or [self.prefix_token_id]

    def _generate(self, prompts: Sequence[Sequence[int]], settings: JSON) -> list[str]:
        """Return a list of the continuation of each prompt, given as token ids, as text, without
        end-of-text and cut before its first stop. `settings` of one request hold for all prompts:
        the stops in `until`, a text or a list; the most new tokens in `max_gen_toks`, by default
        256; and `temperature`, `top_k` and `top_p`. Without a temperature, or with 0, decoding is
        greedy and the last two are ignored; otherwise each call draws from the same seed. All
        prompts have one length. Raises BadInput for settings that leave no distribution and for a
        model that cannot generate."""
        until = settings.get("until") or []
        end = self.eot_token_id
        temperature = float(settings.get("temperature") or 0.0)
        sampling = (
            Sampling(temperature, settings.get("top_k"), settings.get("top_p"))
            if temperature
            else None
        )
        limit = int(settings.get("max_gen_toks", NEW_TOKENS))
        answers = []
        for tokens in generate(self._loaded.model, prompts, limit, end, sampling):
            answer = self.tokenizer.decode(tokens[:-1] if tokens[-1:] == [end] else tokens)
            for stop in [until] if isinstance(until, str) else until:
                answer = answer.split(stop)[0] if stop else answer
            answers.append(answer)
        return answers

    def _kept(self, kind: str, keys: Sequence[Any], answers: list[Any]) -> list[Any]:
        """Put each answer into lm-evaluation-harness's cache, under the requests' type `kind` and
        the request's key, and return `answers`. `keys` has the key of each answer, in order."""
        for key, answer in zip(keys, answers, strict=True):
            self.cache_hook.add_partial(kind, key, answer)
        return answers


def run_harness(arguments: Sequence[str]) -> None:
    """Run lm-evaluation-harness's own command line on `arguments`, with the model `mlm` registered,
    and with this suite's tasks unless the arguments have `--include_path`. Replaces `sys.argv`.

    Raises BadInput if it is not installed, and for the user's mistakes that it reports.
    """
    registry = import_extra("lm_eval.api.registry", "eval")
    registry.model_registry.register("mlm", target=f"{__name__}:Model")
    has_path = any(word.startswith("--include_path") for word in arguments)
    where = [] if has_path else ["--include_path", str(TASK_FILES)]
    sys.argv = ["lm_eval", *arguments, *where]
    try:
        import_extra("lm_eval.__main__", "eval").cli_evaluate()
    # lm-evaluation-harness raises these for its user's mistakes.
    except (ValueError, KeyError, FileNotFoundError) as error:
        message = str(error).partition("\n")[0].strip("'")
        raise BadInput(
            f"lm-evaluation-harness reports a mistake in its arguments or files: {message}"
        ) from error
