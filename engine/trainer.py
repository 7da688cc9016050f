"""The training loop: build, then iterate; everything it does is in its run directory."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Literal

import numpy as np
import torch

from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.engine.checkpoint import checkpoint
from mlm_repro.engine.checkpoint.checkpoint import (
    CheckpointWriter,
    Probe,
    TrainingState,
    describe_computation,
)
from mlm_repro.engine.costs import flops_per_iteration
from mlm_repro.engine.data.batches import place_groups
from mlm_repro.engine.guard.guards import Iteration, PeakMemory, RecentIterations, guards_of
from mlm_repro.engine.inputs import TrainingInputs, ValidationSplit
from mlm_repro.engine.model.microbatch import to_input
from mlm_repro.engine.optim.precision import LossScaler
from mlm_repro.engine.optim.schedule import clock, learning_rate
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.run.files import (
    METRICS,
    SUMMARY,
    Memory,
    Step,
    TrainingSummary,
    Validation,
    read_validations,
)
from mlm_repro.engine.run.loggers import Start, writing_metrics
from mlm_repro.engine.run.resolved import ResolvedRun
from mlm_repro.engine.step import NotFinite, build_step
from mlm_repro.lineage.atomic import sync
from mlm_repro.lineage.chain import checkpoint_path, complete_checkpoints, resolve_checkpoint
from mlm_repro.lineage.errors import Diverged, Interrupted
from mlm_repro.lineage.files import write_document
from mlm_repro.lineage.processes import when_stopped
from mlm_repro.lineage.progress import Progress, announce, format_bytes, format_duration
from mlm_repro.lineage.run import RunDirectory


class Trainer:
    """One rank's share of a training run."""

    def __init__(self, run: ResolvedRun, directory: RunDirectory, mesh: ParallelMesh) -> None:
        """Build the model, and what feeds and watches it. Nothing is computed or loaded before
        `prepare`."""
        self.run, self.directory, self.mesh = run, directory, mesh
        self.config, self.dataset = config, dataset = run.config, run.data
        train = config.train
        self.schedule = BatchSchedule(train)
        self.memory = PeakMemory(mesh.device)
        self.model, self.step = build_step(config.model, train, config.parallel, mesh)
        self.inputs = TrainingInputs(
            config, train.iterations, dataset.token_files("train"), dataset.tokenizer, mesh
        )
        self.validation = ValidationSplit(
            config, dataset.token_files("valid"), mesh, dataset.tokenizer
        )
        self.writer = CheckpointWriter(
            self.model.parameters, self.step.optimizer, self.model.storage_mesh, self.inputs.streams
        )
        self.state, self.recent = TrainingState(), RecentIterations()
        self.updated_samples = 0
        """Samples of the updates so far."""
        self.guards = guards_of(config, self.step, self.memory, self.recent)
        self.rehearsed_seconds = math.nan
        """Estimate of an iteration's time; a sequence of validation takes a third of one of
        training."""
        self.validations: list[Validation] = []
        """Validations so far, on the first rank."""
        self.stop_requested = False
        self.saved, self.is_save_due, self.is_ready = time.monotonic(), False, False

    def prepare(self) -> None:
        """Rehearse an iteration, which changes nothing, and load what the run goes on from. Every
        rank calls it."""
        # first, because a rehearsed update clears the moments that are loaded next
        self._rehearse()
        self._resume()

    def _rehearse(self) -> None:
        parallel = self.config.parallel
        microbatches, most_held = self.inputs.of(self.config.train.iterations - 1), 2 * parallel.pp
        rehearsed = microbatches if parallel.schedule == "gpipe" else microbatches[:most_held]
        computing, updating = self.step.rehearse(rehearsed)
        self.writer.copy()
        waits = parallel.pp - 1  # of a pipeline that fills and drains
        self.rehearsed_seconds = (
            computing * (len(microbatches) + waits) / (len(rehearsed) + waits) + updating
        )
        self.inputs.streams.discard()

    def _resume(self) -> None:
        """Go on from the newest checkpoint, else from the one that the run starts from, if there is
        one."""
        run, own = self.run, (self.model.parameters, self.step.optimizer)
        self.state = checkpoint.resume(
            self.directory.path, *own, lambda probe: self._loss_of(probe.tokens)
        )
        place = checkpoint_path(self.directory.path, self.state.iteration)
        if run.origin and not self.state.iteration:
            place, is_whole = resolve_checkpoint(run.origin.place), run.origin.kind == "continues"
            self.state = checkpoint.start_from(place, run.origin.digest, *own, is_whole)
        if self.state.iteration:
            batch_size, dp = self.schedule.batch_size(self.state.iteration - 1), self.mesh.dp
            groups = place_groups(batch_size, self.config.train.microbatch_size, dp.rank, dp.size)
            layers = [number for chunk in self.model.chunks for number in chunk.stage.layers]
            self.inputs.streams.load(place, groups, layers)
        samples = self.state.updated_samples
        self.updated_samples = (
            self.schedule.samples_before(self.state.iteration) if samples is None else samples
        )
        if self.step.scaler and self.state.loss_scaler:
            self.step.scaler = LossScaler(**self.state.loss_scaler)
        self.recent.seen.extend(self.state.recent)

    def run_to_end(self, loggers: dict[str, Start] | None = None, until: int | None = None) -> None:
        """After `prepare`: run the iterations that are left, then validate, write the summary and
        seal the run.

        Raises Interrupted, with a checkpoint written, when it is stopped by a signal or after
        iteration `until`.
        """
        train, first = self.config.train, self.state.iteration
        begun = time.monotonic() - self.state.seconds
        name, every = self.config.name, self.config.record.log_interval
        progress = Progress(
            name, train.iterations, "iterations", quiet=not self.mesh.is_first, every=every
        )
        seam = train.continues
        earlier = seam.run if seam and seam.iteration == first else None
        metrics = writing_metrics(self.directory.path, first, loggers or {}, progress.note, earlier)
        log: Callable[[Step | Validation], None]
        with (
            metrics if self.mesh.is_first else nullcontext(lambda line: None) as log,
            when_stopped(self._request_stop),
            progress,
            self._saving(),
        ):
            progress.start_at(first)
            self.saved = time.monotonic()
            announce(self._estimate(first))
            self.validations = read_validations(self.directory.path) if self.mesh.is_first else []
            if first == 0:
                log(start := self._validate(0, train.validation_samples))
                self.validations.append(start)
            for number in range(first, train.iterations):
                line, warnings, stop = self.iterate(number)
                if seam and number == seam.iteration:
                    line.warning = f"continues {seam.run} from iteration {number}"
                log(line)
                for warning in warnings:
                    progress.note(warning)
                done = number + 1
                stop |= done == until
                is_last = done == train.iterations
                if is_last or done % train.validation_interval == 0:
                    log(validation := self._validate(done, train.validation_samples))
                    progress.say(self._describe_validation(validation))
                    self.validations.append(validation)
                self.state = TrainingState(
                    done,
                    self.step.optimizer.steps,
                    time.monotonic() - begun,
                    asdict(self.step.scaler) if self.step.scaler else None,
                    tuple(self.recent.seen),
                    self.state.ancestors,
                    self.updated_samples,
                )
                if self.is_ready:
                    self._go_on_saving()
                if is_last or stop or self.is_save_due or done % train.checkpoint_interval == 0:
                    self._save()
                if is_last or stop:
                    self._finish_saving()
                if stop and not is_last:
                    then = f"`mlm-train resume {self.directory.path}` goes on from there"
                    raise Interrupted(
                        f"stopped after iteration {done} of {train.iterations}; {then}"
                    )
                progress.advance(1, self._console(line))
            self._check_updates(progress.note)
            final = self._validate(
                train.iterations, self.validation.num_samples, "final-validation"
            )
            log(final)
            self._check_data()
        peaks = self.mesh.world.gather_objects(self.memory.first_iteration_bytes)
        if self.mesh.is_first:
            path = self.directory.path
            checkpoint.remove_old(path, train.keep_checkpoints)
            run, seconds = self.run, self.state.seconds
            summary = TrainingSummary(
                parameters=run.parameters,
                iterations=train.iterations,
                tokens=run.tokens,
                seed=train.seed,
                layout=run.layout,
                train_seconds=round(seconds, 2),
                tokens_per_second=round(run.tokens / seconds, 1),
                memory=Memory(
                    closed_form_bytes=run.memory.total,
                    measured_bytes=peaks,
                    measured_by=self.memory.measured_by,
                ),
                validation_samples=final.samples,
                validation_loss=final.loss,
                validation_perplexity=final.perplexity,
                checkpoint=complete_checkpoints(path)[-1].name,
            )
            write_document(path / SUMMARY, summary)
            self.directory.complete()
        self.mesh.world.barrier()

    def _estimate(self, first: int) -> str:
        train = self.config.train
        left, sequences = train.iterations - first, self.validation.num_samples
        sequences += (left // train.validation_interval + 1) * min(
            train.validation_samples, sequences
        )
        seconds = self.rehearsed_seconds * (left + sequences / train.global_batch_size / 3)
        cost = f"about {format_duration(seconds)} and {format_bytes(self.memory.bytes())} a rank"
        return f"{cost}, by a rehearsed iteration of {self.rehearsed_seconds:.3g} s"

    def rate(self) -> float:
        """Learning rate of the next update."""
        train = self.config.train
        return learning_rate(train, clock(train, self.step.optimizer.steps, self.updated_samples))

    def iterate(self, number: int) -> tuple[Step, list[str], bool]:
        """Run one optimizer step; returns its metrics, the guards' warnings, and True if a rank was
        asked to stop."""
        for guard in self.guards:
            guard.before(number)
        start = time.monotonic()
        train = self.config.train
        rate = self.rate()
        microbatches = self.inputs.of(number)
        scale = self.step.loss_scale
        minutes, ranks = self.config.record.checkpoint_minutes, self.mesh.world.size
        is_due = (
            minutes is not None
            and self.mesh.is_first
            and time.monotonic() >= self.saved + 60 * minutes
        )
        # Three counts of ranks in one sum.
        place = ranks + 1
        signal = self.stop_requested + place * (is_due + place * self.writer.is_ready)
        gradient = self.step.gradient(microbatches, signal)
        signals, stops = divmod(gradient.signals, place)
        self.is_save_due, self.is_ready = signals % place > 0, signals // place == ranks
        iteration = Iteration(number, self.schedule.batch_size(number), microbatches, gradient)
        skip = sum(guard.skips(iteration) for guard in self.guards) > 0  # every guard is asked
        is_updated = self.step.update(gradient, rate, skip)
        self.updated_samples += is_updated * iteration.batch_size
        self.inputs.streams.commit()
        seconds = time.monotonic() - start
        model, size = self.config.model, iteration.batch_size
        flops = flops_per_iteration(model, train) * size / train.global_batch_size
        iteration.line = Step(
            kind="train",
            iteration=number + 1,
            batch_size=size,
            samples=self.schedule.samples_before(number + 1),
            loss=gradient.loss,
            learning_rate=rate,
            loss_scale=scale,
            seconds=round(seconds, 5),
            gradient_norm=gradient.norm if math.isfinite(gradient.norm) else None,
            tokens_per_second=round(size * model.seq_length / seconds, 1),
            model_tflops=flops / seconds / 1e12,
            skipped=not is_updated,
        )
        warnings = [warning for guard in self.guards if (warning := guard.after(iteration))]
        return iteration.line, warnings, stops > 0

    def _validate(
        self,
        iteration: int,
        num_samples: int,
        kind: Literal["validation", "final-validation"] = "validation",
    ) -> Validation:
        """Mean loss over the first `num_samples` validation sequences, without dropout."""
        mesh, inputs = self.mesh, list(self.validation.inputs(num_samples))
        own = float(sum(len(batch.tokens) for batch in inputs))
        count = round(
            mesh.dp.all_reduce(torch.tensor(own, dtype=torch.float64, device=mesh.device)).item()
        )
        loss = mesh.pp.all_reduce(mesh.dp.all_reduce(self.model.evaluate(inputs))).item() / count
        if not math.isfinite(loss):
            raise NotFinite(f"after iteration {iteration} the validation loss is {loss}")
        perplexity = math.exp(min(loss, 20.0))
        return Validation(
            kind=kind, iteration=iteration, samples=count, loss=loss, perplexity=perplexity
        )

    def _describe_validation(self, now: Validation) -> str:
        """A validation beside the best so far, for the console."""
        said = f"{self.config.name}: validation after {now.iteration:,}: loss {now.loss:.4f}"
        if self.validations:
            best = min(self.validations, key=attrgetter("loss"))
            said += (
                f", lowest {best.loss:.4f} after {best.iteration:,}"
                if best.loss < now.loss
                else ", the lowest"
            )
        return f"{said}, perplexity {now.perplexity:.5g}"

    def _check_data(self) -> None:
        """Raise IntegrityFailure, on every rank, if a file of the dataset was changed since
        training began."""
        with self.mesh.all_or_none():
            if self.mesh.is_first:
                self.dataset.check()

    def _save(self) -> None:
        """Begin to write a checkpoint, after the one that is written, if there is one, is
        complete."""
        self._finish_saving()
        self._check_data()
        for guard in self.guards:
            guard.before_checkpoint()
        probe = Probe(
            tokens=self.validation.probed,
            loss=self._loss_of(self.validation.probed),
            precision=self.config.train.precision,
            computed_on=describe_computation(self.mesh.layout, self.mesh.device),
        )
        if self.mesh.is_first:
            # A power cut must not leave a checkpoint whose iterations have lost their metrics.
            sync(self.directory.path / METRICS)
        self.writer.begin(
            self.directory.path, self.config, self.state, self.dataset.tokenizer, probe
        )
        self.saved = time.monotonic()

    def _go_on_saving(self) -> None:
        if ancestor := self.writer.go_on():
            self.state = replace(self.state, ancestors=(*self.state.ancestors, ancestor))

    def _finish_saving(self) -> None:
        while self.writer.is_writing:
            self._go_on_saving()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Complete the checkpoint that is being written if every rank ends in an error, not if one
        is lost."""
        try:
            yield
        except Diverged:
            self._finish_saving()
            raise
        finally:
            self.writer.close()

    def _loss_of(self, tokens: tuple[tuple[int, ...], ...]) -> float:
        """Mean loss of the current model on samples that are the same for every data-parallel rank,
        without dropout."""
        total = self.model.evaluate([to_input(np.array(tokens, dtype=np.int64), self.mesh)])
        return self.mesh.pp.all_reduce(total).item() / len(tokens)

    def _check_updates(self, note: Callable[[str], None]) -> None:
        """Warn if more than a tenth of the updates were left out. Raises NotFinite if no update was
        made."""
        done, skipped = self.state.iteration, self.state.iteration - self.state.optimizer_steps
        lower = "a lower train.initial_loss_scale or precision = 'bf16' or 'fp32' avoids it"
        why = (
            f"gradients overflowed in fp16: {lower}"
            if self.step.scaler
            else "train.skip_spikes left them out"
        )
        if skipped == done:
            raise NotFinite(
                f"none of the {done} iterations made an update, so nothing was trained: {why}"
            )
        if skipped > done / 10:
            note(f"warning: {skipped} of {done} iterations made no update: {why}")

    def _console(self, line: Step) -> str:
        """The numbers of an iteration that a person watches; rates are those of all ranks
        together."""
        skipped, norm = self.state.iteration - self.state.optimizer_steps, line.gradient_norm
        losses = [loss for loss, _ in self.recent.seen][
            -(self.config.record.log_interval or 20) :
        ] or [line.loss]
        return ", ".join(
            [
                f"loss {sum(losses) / len(losses):.3f}"
                + f" (mean of the last {len(losses)})" * (len(losses) > 1),
                f"gradient norm {'not finite' if norm is None else f'{norm:.3g}'}",
                *([f"loss scale {line.loss_scale:g}"] if self.step.scaler else []),
                *([f"{skipped} skipped"] if skipped else []),
                f"lr {line.learning_rate:.2e}",
                f"{line.seconds:.3g} s/iteration",
                f"{line.tokens_per_second:,.0f} tokens/s",
                f"{line.model_tflops * 1000:.0f} GFLOP/s",
            ]
        )

    def _request_stop(self, number: int) -> None:
        self.stop_requested = True
