"""Train a BERT with one new linear layer by the engine's training step, then evaluate it on
held-out sets.

A BERT reads pairs of texts as [CLS] first [SEP] second [SEP]. A checkpoint of this suite has
GPT-2's kind of tokenizer; the special tokens follow its entries. An imported BERT keeps its
WordPiece vocabulary.

Shapes: b sequences, s positions, h hidden, c outputs of the new head.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer as Backend
from tokenizers.implementations import BertWordPieceTokenizer
from torch import Tensor, nn

from mlm_repro.data_pipeline.tokens.special_tokens import SPECIAL_TOKENS
from mlm_repro.data_pipeline.tokens.tokenizer import FILE_NAME, special_ids
from mlm_repro.engine.config import SERIAL, ModelConfig, TrainConfig
from mlm_repro.engine.families.bert.model import BERT
from mlm_repro.engine.finetune.tasks import (
    TASKS,
    FineTuneRecipe,
    LabelledExample,
    SpanExample,
    TaskExample,
    squad_scores,
)
from mlm_repro.engine.inference import load_for_inference
from mlm_repro.engine.launch.mesh import local_device
from mlm_repro.engine.model.microbatch import PipelineInput, SentencePairs
from mlm_repro.engine.model.stage_model import StageModel
from mlm_repro.engine.optim.schedule import learning_rate
from mlm_repro.engine.parallel.mesh import ParallelMesh, serial_mesh
from mlm_repro.engine.pipeline.executor import PartitionedModel
from mlm_repro.engine.rng import Dropout, initial_normal
from mlm_repro.engine.step import TrainingStep
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.chain import read_newest
from mlm_repro.lineage.errors import BadInput, Diverged
from mlm_repro.lineage.progress import Progress, announce

LONGEST_ANSWER = 30
"""Longest answer to a question of SQuAD, in tokens (BERT's own code)."""
LONGEST_QUESTION = 64
"""Largest number of tokens that are kept of a question of SQuAD (BERT's own code); fewer if the
model's sequences are short."""
LONGEST_OPTION = 128
"""Largest number of tokens that are kept of a question of RACE with an option (Megatron-LM's code);
fewer if the model's sequences are short."""
STRIDE = 128
"""Largest number of tokens from the start of a window of a long context to the start of the
next."""
Scores = list[list[Tensor]]
"""Scores of examples, as `FineTuner.scores` returns them: for each example a list of tensors, one
with the scores of its classes or options, or one [s, 2] for each window of a span's context."""


class EncodedPair(NamedTuple):
    """Two texts as the token ids of [CLS] first [SEP] second [SEP], with the position of the second
    text's first token in them, and the characters (begin, end) of each of the second text's tokens
    in that text."""

    tokens: list[int]
    second_start: int
    """Position of the second text's first token."""
    offsets: list[tuple[int, int]]
    """(begin, end) in characters of each token of the second text, within that text."""


@dataclass(frozen=True)
class PairEncoder:
    """Encoder of text pairs for a BERT: a tokenizer of Hugging Face's library `tokenizers`, and the
    ids of [CLS], [SEP] and the padding token. `pair` encodes two short texts, `windows` a question
    with a long context."""

    backend: Any
    cls: int
    sep: int
    pad: int

    @classmethod
    def of(cls, checkpoint: Path) -> "PairEncoder":
        """Return a PairEncoder with the tokenizer of a checkpoint's directory: the first that
        exists of tokenizer/tokenizer.json, huggingface/tokenizer.json and huggingface/vocab.txt.
        Raises BadInput if none exists, and the error of the library `tokenizers` if the file is
        damaged. If the tokenizer lacks a special token, all special tokens get ids after the
        tokenizer's last."""
        original = checkpoint / "huggingface"
        candidates = (
            checkpoint / "tokenizer" / FILE_NAME,
            original / FILE_NAME,
            original / "vocab.txt",
        )
        if (path := next(filter(Path.is_file, candidates), None)) is None:
            raise BadInput(
                f"{checkpoint} has no tokenizer: there is no {FILE_NAME} in its folders tokenizer"
                " and huggingface, and no huggingface/vocab.txt; import the weights from a"
                " directory with one"
            )
        read: Any = BertWordPieceTokenizer if path.suffix == ".txt" else Backend.from_file
        backend = read(str(path))
        start, end, _, padding = special_ids(backend)
        return cls(backend, start, end, padding)

    def pair(self, first: str, second: str, length: int) -> EncodedPair:
        """Return the texts `first` and `second` as an EncodedPair, [CLS] first [SEP] second [SEP],
        of at most `length` tokens; while there are more, the text that then has more tokens, or the
        second if both have equally many, loses its last token."""
        a = self._encode(first)
        b = self._encode(second)
        room = length - 3
        sizes = [len(a.ids), len(b.ids)]
        while sum(sizes) > room:
            sizes[sizes[1] >= sizes[0]] -= 1
        return self._join(a.ids[: sizes[0]], b.ids[: sizes[1]], b.offsets[: sizes[1]])

    def windows(
        self, question: str, context: str, length: int, longest: int = LONGEST_QUESTION
    ) -> Iterator[EncodedPair]:
        """Yield an EncodedPair for each window of the text `context`, in order: the text
        `question`, then the window, at most `length` tokens together with [CLS] and [SEP]. Windows
        begin at most 128 tokens (STRIDE) apart and overlap, and the last one ends with the context.
        An empty context gives one window.

        The question is cut at `longest` tokens, 64 by default, or at half of the sequence if that
        is shorter.
        """
        question_ids = self._encode(question).ids[: min(longest, (length - 3) // 2)]
        text = self._encode(context)
        room = length - 3 - len(question_ids)
        for start in range(0, max(len(text.ids), 1), min(STRIDE, max(room // 2, 1))):
            yield self._join(
                question_ids, text.ids[start : start + room], text.offsets[start : start + room]
            )
            if start + room >= len(text.ids):
                return

    def _encode(self, text: str) -> Any:
        return self.backend.encode(text, add_special_tokens=False)

    def _join(self, a: list[int], b: list[int], offsets: list[tuple[int, int]]) -> EncodedPair:
        return EncodedPair([self.cls, *a, self.sep, *b, self.sep], len(a) + 2, list(offsets))


@dataclass(frozen=True)
class FineTuned:
    """Result of a fine-tuning: its task, the checkpoint's name and digest, the recipe, the sizes of
    the sets, the seconds that it took, and three dicts of metrics in percent by held-out set:
    `of_members`, each training's, `metrics`, their medians, and `ensemble`, the metrics of the
    trainings' mean scores."""

    task: str
    checkpoint: str
    """Last part of the path that the user gave, a checkpoint's or a run's."""
    checkpoint_digest: str
    recipe: JSON
    examples: dict[str, int]
    """Set, `train` included → number of its examples."""
    metrics: dict[str, dict[str, float]]
    """Held-out set → dict of metrics in percent by name: the medians over the trainings."""
    seconds: float
    """Seconds for all trainings and evaluations together."""
    of_members: dict[str, list[dict[str, float]]]
    """Held-out set → list of the metrics in percent of each training, in the order of the seeds."""
    ensemble: dict[str, dict[str, float]]
    """Held-out set → metrics in percent of the mean of the trainings' scores."""


class Feature(NamedTuple):
    """Input of the model made from an example, or from one window of its context: `sequences`, a
    list of one EncodedPair or of one for each option, and `label`, a tuple of one index, of the
    class or option, or of a span's first and last position, 0 and 0 if the answer is not in the
    window."""

    sequences: list[EncodedPair]
    """List of one EncodedPair, or of one for each option."""
    label: tuple[int, ...]
    """Tuple of the index of the class or option; or of the first and last position of a span, 0 and
    0 if the answer is not in the window."""


class FineTuneModel(StageModel):
    """A BERT `body` with a new linear head of `outputs` outputs, whose weights the caller sets. The
    output is scores of b examples. With `over_positions` they are [b, s, 2], for the start and the
    end of a span at each position; an example is one sequence, and `outputs` is 2. Otherwise they
    are [b, c]. For c classes, an example is one sequence, and `outputs` is c. For c options, an
    example is c sequences, one for each option, which come one after the other in the input, and
    `outputs` is 1.

    The targets of a PipelineInput have a row for each example here: [b, 1], the index of the class
    or option, or with `over_positions` [b, 2], the first and the last position of the span. Without
    `over_positions`, the method `run_stage` takes b from their number of rows. The loss is the
    examples' mean cross-entropy; for spans it is the mean of two such losses, for the start and for
    the end.
    """

    def __init__(self, body: BERT, outputs: int, over_positions: bool) -> None:
        super().__init__(body.config, body.mesh)
        self.body = body
        self.over_positions = over_positions
        self.head = nn.Linear(body.config.hidden_size, outputs)

    def build(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        """Build nothing, although the base class asks for modules: the constructor is given the
        body and makes the head."""

    def run_stage(self, inputs: Tensor, batch: PipelineInput) -> Tensor:
        hidden = self.body.run_stage(inputs, batch)  # [s, b, h]
        if self.over_positions:
            return self.head(hidden.transpose(0, 1))
        return self.head(self.body.pooled(hidden)).view(len(batch.targets), -1)

    def batch_loss(self, hidden: Tensor, batch: PipelineInput) -> Tensor:
        scores = hidden.float()
        outputs = (scores[..., 0], scores[..., 1]) if self.over_positions else (scores,)
        losses = [
            F.cross_entropy(output, batch.targets[:, column])
            for column, output in enumerate(outputs)
        ]
        return torch.stack(losses).mean()


class FineTuner:
    """Trainer of the task `name`, a key of TASKS, by the FineTuneRecipe `recipe`, whose seed draws
    the new head of a BERT. `checkpoint` is the BERT's directory, or a run's for its newest
    checkpoint. All is on this process's device alone, in fp32. The method `train` trains on
    examples, `scores` returns their scores, and `metrics` computes the task's metrics from scores.

    The constructor raises BadInput if there is no checkpoint, or if it is not a BERT, has no
    tokenizer, or has a vocabulary without room for the special tokens, and IntegrityFailure if the
    checkpoint is damaged.
    """

    def __init__(self, name: str, checkpoint: Path, recipe: FineTuneRecipe) -> None:
        self.mesh = serial_mesh(local_device())
        loaded, self.encoder = read_newest(
            checkpoint, lambda c: (load_for_inference(c, self.mesh), PairEncoder.of(c))
        )
        if not isinstance(loaded.model, BERT):
            raise BadInput(
                f"{checkpoint} is a {loaded.config.family}, and only a BERT can be fine-tuned for"
                f" {name}"
            )
        encoder = self.encoder
        if max(encoder.cls, encoder.sep, encoder.pad) >= loaded.config.vocab_size:
            raise BadInput(
                f"the tokenizer of {checkpoint} gives one of {', '.join(SPECIAL_TOKENS)} an id"
                " beyond the model's vocabulary: import the weights from a directory with their own"
                " tokenizer"
            )
        self.task = TASKS[name]
        self.recipe = recipe
        self.digest = loaded.digest
        self.is_span = name.startswith("squad")
        self.model = FineTuneModel(loaded.model, self.task.outputs, self.is_span).to(
            self.mesh.device
        )
        with torch.no_grad():
            head = self.model.head
            head.weight.copy_(
                initial_normal(recipe.seed, f"{name}.head", tuple(head.weight.shape), 0.02)
            )
            head.bias.zero_()
        # The heads of pre-training get no gradient here, so they leave before the optimizer is
        # built.
        del loaded.model.masked_head, loaded.model.order_head
        if self.is_span:
            del loaded.model.pooler

    def train(self, examples: Sequence[TaskExample], label: str) -> None:
        """Train the model on the examples for the recipe's epochs, shuffled anew in each, with a
        new optimizer; every window of a long context counts as an example. Prints the progress to
        standard error, with `label` before it. The model is left in training mode. Raises Diverged
        if a loss or gradient is not finite."""
        recipe = self.recipe
        size = self.recipe.batch_size
        features = list(chain.from_iterable(map(self.features, examples)))
        steps = recipe.epochs * -(-len(features) // size)
        # One iteration more than there are steps: the last step's rate would otherwise be 0.
        train = TrainConfig(
            iterations=steps + 1,
            warmup_iterations=int(recipe.warmup_share * steps),
            decay="linear",
            learning_rate=recipe.learning_rate,
            min_learning_rate=0,
            weight_decay=recipe.weight_decay,
            precision="fp32",
            global_batch_size=size,
            microbatch_size=size,
        )
        batches = []
        for epoch in range(recipe.epochs):
            order = list(features)
            random.Random(f"{recipe.seed}/{epoch}").shuffle(order)
            batches += [order[start : start + size] for start in range(0, len(order), size)]
        training = TrainingStep(PartitionedModel([self.model], SERIAL, self.mesh), train)
        self.model.train()
        with Progress(label, steps, "steps") as progress:
            for step, batch in enumerate(batches):
                rows = sum(len(feature.sequences) for feature in batch)
                dropout = Dropout(self.model.config.dropout, recipe.seed, step, tuple(range(rows)))
                inputs = self._input(batch, dropout if self.model.config.dropout else None)
                gradient = training.run([inputs], learning_rate(train, step + 1))
                if not gradient.is_finite:
                    raise Diverged(
                        f"fine-tuning ends at step {step + 1}, because the loss or gradient is not"
                        " finite, and keeps nothing: try a lower --set learning_rate="
                    )
                progress.advance(1, f"loss {gradient.loss:.3f}")

    @torch.no_grad()
    def scores(self, examples: Sequence[TaskExample], label: str) -> Scores:
        """Return a list of the examples' scores, in order: the new head's outputs, before any
        softmax. Each is a list of fp32 tensors on the host: one tensor with the scores of the
        classes or options, or for a span a tensor [s, 2] for each window of the context. Prints the
        progress to standard error, with `label` before it. The model is left in evaluation mode."""
        self.model.eval()
        scored = []
        with Progress(f"{label}, evaluation", len(examples), "examples") as progress:
            for start in range(0, len(examples), self.recipe.batch_size):
                batch = examples[start : start + self.recipe.batch_size]
                features = [list(self.features(example)) for example in batch]
                if self.is_span:
                    scored += [
                        [self._scores([window])[0] for window in windows] for windows in features
                    ]
                else:
                    scored += [[row] for row in self._scores([feature for (feature,) in features])]
                progress.advance(len(batch))
        return scored

    def metrics(self, examples: Sequence[TaskExample], scores: Scores) -> dict[str, float]:
        """Return the task's metrics, a dict name → percent, for examples and what the method
        `scores` returned for them: `exact_match` and `f1` for spans, else `accuracy`. The answer
        with the best score counts. There must be an example."""
        both = list(zip(examples, scores, strict=True))
        if self.is_span:
            spans = [
                (example, score) for example, score in both if isinstance(example, SpanExample)
            ]
            answers = list(starmap(self._answer, spans))
            return squad_scores(answers, [example.answers for example, _ in spans])
        right = [
            int(row.argmax()) == example.label
            for example, (row,) in both
            if isinstance(example, LabelledExample)
        ]
        return {"accuracy": 100 * sum(right) / len(right)}

    def ensemble(self, members: Sequence[Scores]) -> Scores:
        """Return the mean of `members`, several trainings' scores of the same examples, in the form
        of one training's: for classes or options the mean of their probabilities, as in
        Megatron-LM's script, for spans the mean of raw scores."""
        stacks = [
            [torch.stack(tensors) for tensors in zip(*member_scores, strict=True)]
            for member_scores in zip(*members, strict=True)
        ]
        return [
            [
                (member_scores if self.is_span else member_scores.softmax(dim=-1)).mean(dim=0)
                for member_scores in stack
            ]
            for stack in stacks
        ]

    def features(self, example: TaskExample) -> Iterator[Feature]:
        """Yield the example as Features, inputs of the model: one Feature, with long texts cut, if
        the example has a class or options, or else one Feature for each window of the context in
        which a span is to be found. A span's label is where its first answer lies in the window, or
        (0, 0) if there is no answer or the window lacks a part of it."""
        length = self.model.config.seq_length
        if isinstance(example, LabelledExample):
            if len(example.pairs) == 1:
                pairs = [self.encoder.pair(*example.pairs[0], length)]
            else:
                pairs = [
                    next(self.encoder.windows(*pair, length, LONGEST_OPTION))
                    for pair in example.pairs
                ]
            yield Feature(pairs, (example.label,))
        else:
            answer = (
                (example.starts[0], example.starts[0] + len(example.answers[0]))
                if example.answers
                else None
            )
            for window in self.encoder.windows(example.question, example.context, length):
                yield Feature([window], _span_in(window, answer))

    def _answer(self, example: SpanExample, windows: list[Tensor]) -> str:
        """Return the answer to the question of `example` as text: the part of the context with the
        best sum of start and end score, at most 30 tokens (LONGEST_ANSWER). `windows` has the
        scores [s, 2] of each window of the context, in order. The answer is empty if the context
        has no tokens or, in SQuAD 2.0, if in every window the start and end score of [CLS] have a
        larger sum than the scores of the best part."""
        best = -float("inf")
        text = ""
        nothing = float("inf")
        encoded = self.encoder.windows(
            example.question, example.context, self.model.config.seq_length
        )
        for window, positions in zip(encoded, windows, strict=True):
            start, end = positions.T
            first = window.second_start
            last = window.second_start + len(window.offsets)
            nothing = min(nothing, float(start[0] + end[0]))
            if first == last:
                continue
            scores = start[first:last, None] + end[None, first:last]
            allowed = torch.ones_like(scores, dtype=torch.bool).triu().tril(LONGEST_ANSWER - 1)
            score, best_index = scores.masked_fill(~allowed, -float("inf")).flatten().max(0)
            if score > best:
                low, high = divmod(int(best_index), last - first)
                best = float(score)
                text = example.context[window.offsets[low][0] : window.offsets[high][1]]
        return "" if self.task is TASKS["squad2"] and nothing > best else text.strip()

    def _scores(self, features: Sequence[Feature]) -> Tensor:
        batch = self._input(features)
        return self.model.run_stage(batch.tokens, batch).float().cpu()

    def _input(self, batch: Sequence[Feature], dropout: Dropout | None = None) -> PipelineInput:
        """Return a batch of features as a PipelineInput on the device: token ids [sequences, s] of
        all sequences of each feature in turn, padded to the longest, with their segments and a mask
        that is False at padding, and the labels [b, 1], or [b, 2] for spans, one row for each
        feature, as targets. `dropout` is for these sequences; without it nothing is dropped."""
        pairs = list(chain.from_iterable(feature.sequences for feature in batch))
        tokens = torch.full((len(pairs), max(len(pair.tokens) for pair in pairs)), self.encoder.pad)
        types = torch.zeros_like(tokens)
        is_token = torch.zeros_like(tokens, dtype=torch.bool)
        for row, pair in enumerate(pairs):
            tokens[row, : len(pair.tokens)] = torch.tensor(pair.tokens)
            types[row, pair.second_start : len(pair.tokens)] = 1
            is_token[row, : len(pair.tokens)] = True
        device = self.mesh.device
        kinds = SentencePairs(
            types.to(device), is_token.to(device), torch.zeros(len(tokens), dtype=torch.int64)
        )
        labels = torch.tensor([feature.label for feature in batch], device=device)
        return PipelineInput(tokens.to(device), labels, dropout, pairs=kinds)


def _span_in(window: EncodedPair, answer: tuple[int, int] | None) -> tuple[int, int]:
    """Return (first, last), the positions in a window's token ids of the first and the last token
    of `answer`, which is given as its character range (begin, end) in the context. They are (0, 0)
    if there is no answer or the window does not have the whole of it."""
    if answer is None:
        return 0, 0
    start = next(
        (n for n, (low, high) in enumerate(window.offsets) if low <= answer[0] < high), None
    )
    end = next((n for n, (low, high) in enumerate(window.offsets) if low < answer[1] <= high), None)
    return (
        (0, 0)
        if start is None or end is None
        else (window.second_start + start, window.second_start + end)
    )


def finetune(
    name: str,
    checkpoint: Path,
    sets: Mapping[str, Sequence[TaskExample]],
    recipe: FineTuneRecipe,
    members: int = 1,
) -> FineTuned:
    """Fine-tune a BERT checkpoint, or the newest of a run, for the task `name`, a key of TASKS, by
    `recipe` on the set `train` of `sets`, a dict name → examples, evaluate it on the other sets,
    and return a FineTuned; the trained weights are not kept. Prints the cost and the progress to
    standard error. Raises BadInput if there is no checkpoint, or if it is not a BERT, has no
    tokenizer or no room for the special tokens; IntegrityFailure for a damaged one, and Diverged if
    a loss or gradient is not finite.

    `members` trainings are made, with seeds from the recipe's on. With several, the metrics are
    medians, as the 2019 paper's over five; the metrics of the members' mean scores are reported
    beside them.
    """
    begun = time.monotonic()
    held_out = {split: examples for split, examples in sets.items() if split != "train"}
    announce(
        f"{members} x {recipe.epochs} epochs of {len(sets['train']):,} examples,"
        f" {recipe.batch_size} a step",
        f"then {sum(map(len, held_out.values())):,} held-out examples",
    )
    scores: dict[str, list[Scores]] = {split: [] for split in held_out}
    for number in range(members):
        tuner = FineTuner(
            name, checkpoint, recipe.model_copy(update={"seed": recipe.seed + number})
        )
        label = f"{name}, seed {tuner.recipe.seed}" if members > 1 else name
        tuner.train(sets["train"], label)
        for split, examples in held_out.items():
            scores[split].append(tuner.scores(examples, f"{label} {split}"))
    of_members = {}
    medians = {}
    ensemble = {}
    for split, examples in held_out.items():
        of_members[split] = members_metrics = [
            tuner.metrics(examples, member) for member in scores[split]
        ]
        medians[split] = {
            name: median(metrics[name] for metrics in members_metrics)
            for name in members_metrics[0]
        }
        ensemble[split] = tuner.metrics(examples, tuner.ensemble(scores[split]))
    sizes = {split: len(examples) for split, examples in sets.items()}
    return FineTuned(
        name,
        checkpoint.name,
        tuner.digest,
        recipe.model_dump(),
        sizes,
        medians,
        time.monotonic() - begun,
        of_members,
        ensemble,
    )


def describe(result: FineTuned) -> str:
    """Return a FineTuned as text of several lines: one with the task, the number of training
    examples and the recipe, then one for each held-out set with its number of examples and its
    metrics. After several trainings these are medians, and the number of trainings and the metrics
    of the ensemble follow in the line."""
    recipe = ", ".join(
        f"{name.replace('_', ' ')} {value:g}" for name, value in result.recipe.items()
    )
    lines = [f"{result.task}: {result.examples['train']:,} examples; {recipe}"]
    for split, metrics in result.metrics.items():
        values = ", ".join(f"{name} {value:.2f} %" for name, value in metrics.items())
        lines.append(f"{split}: {result.examples[split]:,} examples; {values}")
        if len(members := result.of_members[split]) > 1:
            mean = ", ".join(
                f"{name} {value:.2f} %" for name, value in result.ensemble[split].items()
            )
            lines[-1] += f", median of {len(members)} seeds; ensemble of them: {mean}"
    return "\n".join(lines)
