"""Fine-tuning: a BERT with one new linear layer, trained with the engine's optimizer, then asked about held-out sets.

Shapes: b sequences, s positions, h hidden, c outputs of the new head.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from engine.checkpoint.checkpoint import load_for_inference
from engine.config import TrainConfig
from engine.families.bert.model import BERT
from engine.launch.mesh import local_device
from engine.model.microbatch import PipelineInput, SentencePairs
from engine.optim.flat import FlatGroup
from engine.optim.gradients import GradientReducer, Reducer
from engine.optim.schedule import learning_rate
from engine.parallel.mesh import ParallelMesh, serial_mesh
from engine.parallel.sharding import sharded_parameters
from engine.rng import Dropout, initial_normal
from engine.step import TrainingStep
from evaluation.finetune.encoding import PairEncoder
from evaluation.finetune.encoding import Sequence as Encoded
from evaluation.finetune.examples import Example, LabelledExample, SpanExample
from evaluation.finetune.metrics import accuracy, squad_scores
from evaluation.finetune.tasks import TASKS, FineTuned
from lineage.errors import BadInput, UserError
from lineage.progress import Progress, announce

LONGEST_ANSWER = 30
"""Tokens of a SQuAD answer, as in BERT's own code."""


@dataclass(frozen=True)
class Recipe:
    """How to fine-tune: AdamW with linear warm-up and fall."""

    epochs: int
    batch_size: int
    learning_rate: float
    warmup_share: float = 0.065
    weight_decay: float = 0.1
    seed: int = 1234


class FineTuneModel(nn.Module):
    """A BERT body and a linear head over its pooled states, [b, c], or over every position, [b, s, c]."""

    def __init__(self, body: BERT, outputs: int, over_positions: bool) -> None:
        super().__init__()
        self.body, self.over_positions = body, over_positions
        self.head = nn.Linear(body.config.hidden_size, outputs)

    def forward(self, batch: PipelineInput) -> torch.Tensor:
        hidden = self.body.run_stage(batch.tokens, batch)  # [s, b, h]
        return self.head(hidden.transpose(0, 1) if self.over_positions else self.body.pooled(hidden))


class FineTuner:
    """One task on one checkpoint; what a training step trains (`engine.step.TrainableModel`)."""

    def __init__(self, name: str, checkpoint: Path, recipe: Recipe, mesh: ParallelMesh | None = None) -> None:
        self.mesh = self.storage_mesh = mesh or serial_mesh(local_device())
        loaded = load_for_inference(checkpoint, self.mesh)
        if not isinstance(loaded.model, BERT):
            raise BadInput(f"{checkpoint} is a {loaded.config.family}; a BERT is fine-tuned on {name}")
        self.task, self.recipe, self.digest = TASKS[name], recipe, loaded.digest
        self.config, self.encoder = loaded.config, PairEncoder.of(loaded.directory)
        self.is_span = name.startswith("squad")
        self.model = FineTuneModel(loaded.model, self.task.outputs, self.is_span).to(self.mesh.device)
        with torch.no_grad():
            head = self.model.head
            head.weight.copy_(initial_normal(recipe.seed, f"{name}.head", tuple(head.weight.shape), 0.02))
            head.bias.zero_()
        self.parameters = [p for p in sharded_parameters(self.model, self.mesh) if not self._is_idle(p.name)]

    def train(self, examples: Sequence[Example], label: str) -> None:
        """Every epoch over the examples, each in its own order."""
        recipe = self.recipe
        features = [feature for example in examples for feature in self._features(example)]
        steps = recipe.epochs * -(-len(features) // recipe.batch_size)
        train = TrainConfig(
            iterations=steps + 1, warmup_iterations=int(recipe.warmup_share * steps), decay="linear",
            learning_rate=recipe.learning_rate, min_learning_rate=0, weight_decay=recipe.weight_decay,
            precision="fp32", global_batch_size=recipe.batch_size, microbatch_size=recipe.batch_size,
        )  # fmt: skip
        training = TrainingStep(self, train)
        self.model.train()
        with Progress(label, steps, "steps") as progress:
            for step, chosen in enumerate(self._shuffled(len(features))):
                batch = [features[number] for number in chosen]
                rows = sum(len(feature.sequences) for feature in batch)
                dropout = Dropout(self.config.dropout, recipe.seed, step, tuple(range(rows)))
                inputs = self._input(batch, dropout if self.config.dropout else None)
                gradient = training.run([inputs], learning_rate(train, step + 1))
                if not gradient.is_finite:
                    raise UserError(f"step {step + 1}: the gradient is no longer a number; try a lower learning rate")
                progress.advance(1, f"loss {gradient.loss:.3f}")

    @torch.no_grad()
    def evaluate(self, examples: Sequence[Example], label: str) -> dict[str, float]:
        """The task's metrics, in percent."""
        self.model.eval()
        spans = [example for example in examples if isinstance(example, SpanExample)]
        if spans:
            with Progress(f"{label}, evaluation", len(spans), "questions") as progress:
                answers = []
                for example in spans:
                    answers.append(self._answer(example))
                    progress.advance()
            return squad_scores(answers, [span.answers for span in spans])
        features = [feature for example in examples for feature in self._features(example)]
        size = self.recipe.batch_size
        predictions: list[int] = []
        with Progress(f"{label}, evaluation", len(features), "examples") as progress:
            for start in range(0, len(features), size):
                batch = features[start : start + size]
                predictions += self._scores(self._input(batch)).argmax(dim=1).tolist()
                progress.advance(len(batch))
        return {"accuracy": accuracy(predictions, [feature.label[0] for feature in features])}

    def reducer(self, groups: Sequence[FlatGroup], measures_noise: bool = False) -> Reducer:
        """What takes the gradients to the optimizer."""
        return GradientReducer(groups, self.mesh, measures_noise)

    def forward_backward(
        self, microbatches: Sequence[PipelineInput], reducer: Reducer, loss_scale: float = 1.0, timeline: object = None
    ) -> torch.Tensor:
        """Sum of (loss × sequences), float64; the gradients go to the reducer."""
        reducer.begin()
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for microbatch in microbatches:
            loss = self._loss(microbatch)
            (loss * loss_scale).backward()
            total += loss.detach().double() * len(microbatch.tokens)
        return total

    def _features(self, example: Example) -> Iterator["Feature"]:
        length = self.config.seq_length
        if isinstance(example, LabelledExample):
            encode = self.encoder.pair if len(example.pairs) == 1 else self.encoder.choice
            yield Feature([encode(*pair, length) for pair in example.pairs], (example.label,))
        else:
            answer = (example.starts[0], example.starts[0] + len(example.answers[0])) if example.answers else None
            for window in self.encoder.windows(example.question, example.context, length):
                yield Feature([window], _span_in(window, answer))

    def _scores(self, inputs: PipelineInput) -> torch.Tensor:
        """Of each class or option, [b, classes]; of each position as start and as end, [b, s, 2]."""
        output = self.model(inputs)
        return output if self.is_span or self.task.outputs > 1 else output.view(len(inputs.targets), -1)

    def _loss(self, inputs: PipelineInput) -> torch.Tensor:
        scores, labels = self._scores(inputs).float(), inputs.targets
        if self.is_span:
            return (F.cross_entropy(scores[..., 0], labels[:, 0]) + F.cross_entropy(scores[..., 1], labels[:, 1])) / 2
        return F.cross_entropy(scores, labels[:, 0])

    def _answer(self, example: SpanExample) -> str:
        """The part of the context whose start and end score best together; empty if [CLS] scores better."""
        best, text, nothing = -float("inf"), "", float("inf")
        for window in self.encoder.windows(example.question, example.context, self.config.seq_length):
            start, end = self._scores(self._input([Feature([window], (0, 0))]))[0].float().T
            first, last = window.second_start, window.second_start + len(window.offsets)
            nothing = min(nothing, float(start[0] + end[0]))
            if first == last:
                continue
            scores = start[first:last, None] + end[None, first:last]
            allowed = torch.ones_like(scores, dtype=torch.bool).triu().tril(LONGEST_ANSWER - 1)
            score, place = scores.masked_fill(~allowed, -float("inf")).flatten().max(0)
            if score > best:
                low, high = divmod(int(place), last - first)
                best, text = float(score), example.context[window.offsets[low][0] : window.offsets[high][1]]
        may_be_empty = self.task is TASKS["squad2"]
        return "" if may_be_empty and nothing > best else text.strip()

    def _input(self, batch: Sequence["Feature"], dropout: Dropout | None = None) -> PipelineInput:
        """Every sequence of the batch, [sequences, s]; the targets are the labels, [b, 1] or [b, 2]."""
        sequences = [encoded for feature in batch for encoded in feature.sequences]
        width = max(len(sequence.tokens) for sequence in sequences)
        tokens = torch.full((len(sequences), width), self.encoder.pad)
        types, is_token = torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.bool)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence.tokens)] = torch.tensor(sequence.tokens)
            types[row, sequence.second_start : len(sequence.tokens)] = 1
            is_token[row, : len(sequence.tokens)] = True
        device = self.mesh.device
        pairs = SentencePairs(types.to(device), is_token.to(device), torch.zeros(len(tokens), dtype=torch.int64))
        labels = torch.tensor([feature.label for feature in batch], device=device)
        return PipelineInput(tokens.to(device), labels, dropout, pairs=pairs)

    def _shuffled(self, count: int) -> Iterator[list[int]]:
        for epoch in range(self.recipe.epochs):
            order = list(range(count))
            random.Random(f"{self.recipe.seed}/{epoch}").shuffle(order)
            yield from (
                order[start : start + self.recipe.batch_size] for start in range(0, count, self.recipe.batch_size)
            )

    def _is_idle(self, name: str) -> bool:
        """Whether a parameter takes no part: the heads of pre-training, and of a span task the pooler."""
        return name.startswith(("body.masked_head.", "body.order_head.", *(["body.pooler."] * self.is_span)))


@dataclass(frozen=True)
class Feature:
    """An example, or a window of one, as the model takes it."""

    sequences: list[Encoded]
    """One, or one for each option."""
    label: tuple[int, ...]
    """Class or option; of a span its first and last position, 0 and 0 where the answer is not in the window."""


def _span_in(window: Encoded, answer: tuple[int, int] | None) -> tuple[int, int]:
    """Positions of the first and last token of the characters `answer`, (0, 0) if they are not all in the window."""
    if answer is None:
        return 0, 0
    start = next((n for n, (low, high) in enumerate(window.offsets) if low <= answer[0] < high), None)
    end = next((n for n, (low, high) in enumerate(window.offsets) if low < answer[1] <= high), None)
    return (0, 0) if start is None or end is None else (window.second_start + start, window.second_start + end)


def finetune(name: str, checkpoint: Path, data: Path, recipe: Recipe) -> FineTuned:
    """Fine-tune a BERT checkpoint on the task's training file in `data` and evaluate its held-out files there."""
    begun = time.monotonic()
    task = TASKS[name]
    held_out = {split: list(task.read(data / place)) for split, place in task.held_out.items()}
    examples = list(task.read(data / task.train))
    for split, part in ({"train": examples} | held_out).items():
        if not part:
            raise BadInput(f"{data}: the {split} set of {name} has no example")
    announce(
        f"{recipe.epochs} epochs of {len(examples):,} examples, {recipe.batch_size} a step",
        f"then {sum(map(len, held_out.values())):,} held-out examples",
    )
    tuner = FineTuner(name, checkpoint, recipe)
    tuner.train(examples, name)
    metrics = {split: tuner.evaluate(part, f"{name} {split}") for split, part in held_out.items()}
    sizes = {"train": len(examples)} | {split: len(part) for split, part in held_out.items()}
    return FineTuned(
        name, checkpoint.name, tuner.digest, asdict(recipe), sizes, metrics, time.monotonic() - begun
    )  # fmt: skip
