"""Training loop of a run: iterations, validations, checkpoints and the summary, all in the run's
directory."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import chain
from operator import attrgetter
from time import monotonic, sleep
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
from mlm_repro.engine.run.scores import start_scoring
from mlm_repro.engine.step import NotFinite, build_step
from mlm_repro.lineage.atomic import sync
from mlm_repro.lineage.chain import checkpoint_path, complete_checkpoints, resolve_checkpoint
from mlm_repro.lineage.errors import Diverged, Interrupted
from mlm_repro.lineage.files import write_document
from mlm_repro.lineage.processes import ended_by, when_stopped
from mlm_repro.lineage.progress import Progress, announce, format_bytes, format_duration
from mlm_repro.lineage.run import RunDirectory

STOP = "stop"
"""Message of a rank that was asked to stop to the others, while they wait for a scoring."""
POLL_SECONDS = 0.2
"""Seconds after which ranks that wait for a scoring look again whether it has ended."""


class Trainer:
    """Trainer of a run on one rank. Every rank makes one and calls, with the others, first
    `prepare`, which rehearses an iteration and loads the checkpoint to begin from, if there is one,
    then `run_to_end`, which iterates, validates, writes checkpoints and seals the run."""

    def __init__(self, run: ResolvedRun, directory: RunDirectory, mesh: ParallelMesh) -> None:
        """Build model, optimizer, inputs, checkpoint writer and guards of this rank of `mesh` for
        `run`, whose files go to `directory`, a RunDirectory that the caller has begun. Every rank
        calls it. No step is computed and no checkpoint read before the method `prepare`. Raises
        BadInput for more pipeline stages than layers, for ZeRO stage 3 over several data-parallel
        ranks that are threads, and for a token file of the dataset that is missing or has too
        little text for the model; IntegrityFailure for one that is damaged."""
        self.run = run
        self.directory = directory
        self.mesh = mesh
        self.config, self.dataset = config, dataset = run.config, run.data
        train = config.train
        self.schedule = BatchSchedule(train)
        # Before the model is built: on a CPU the peak is the growth of resident memory since here.
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
        self.state = TrainingState()
        self.recent = RecentIterations()
        self.updated_samples = 0
        """Number of samples in the updates so far; skipped iterations do not count."""
        self.guards = guards_of(config, self.step, self.memory, self.recent)
        self.rehearsed_seconds = math.nan
        """Seconds of an iteration, as the rehearsal estimates them for the first line that a user
        reads; NaN before `prepare`."""
        self.validations: list[Validation] = []
        """List of the run's Validations, in order, filled by `run_to_end`; the one on the whole
        split is not added. Ranks other than the first have only this session's."""
        self.stop_requested = False
        self.saved = monotonic()
        self.is_save_due = self.is_ready = False

    def prepare(self) -> None:
        """Rehearse an iteration, which allocates memory and measures the time but does not change
        the weights, then load the run's newest checkpoint that can be trusted, or the one that it
        starts from, if there is either. Every rank calls it, once, before `run_to_end`. Raises
        IntegrityFailure if the run has checkpoints and none can be trusted, or if the one to start
        from is damaged; BadInput if one in the run's directory belongs to another run, or if the
        one to start from is missing."""
        # In this order, because a rehearsed update clears the moments that are loaded next.
        self._rehearse()
        self._resume()

    def _rehearse(self) -> None:
        parallel = self.config.parallel
        # The last iteration, because a growing batch is largest there. 1F1B and interleaving never
        # hold more than 2p microbatches, so more would allocate no more; GPipe holds all.
        microbatches = self.inputs.of(self.config.train.iterations - 1)
        most_held = 2 * parallel.pp
        rehearsed = microbatches if parallel.schedule == "gpipe" else microbatches[:most_held]
        computing, updating = self.step.rehearse(rehearsed)
        # The copy for a checkpoint is rehearsed too, with the messages between owners of a divided
        # state.
        self.writer.copy()
        # A pipeline takes p - 1 microbatches longer than its own m, to fill and to drain.
        waits = parallel.pp - 1
        self.rehearsed_seconds = (
            computing * (len(microbatches) + waits) / (len(rehearsed) + waits) + updating
        )
        # The rehearsed text is the last of the training; its memory must not meet the first
        # iteration.
        self.inputs.streams.discard()

    def _resume(self) -> None:
        """Set this trainer's `state` and load weights, optimizer, a Transformer-XL's memory of its
        streams, loss scale and recent losses from the run's newest checkpoint that can be trusted,
        else from that of the run which it continues. A checkpoint that gives initial weights alone
        (`train.init_from`) sets the weights, and all else begins anew at iteration 0, as it does
        without any checkpoint.

        Every rank calls it, after the rehearsal. Raises IntegrityFailure if the run has checkpoints
        and none can be trusted, or if the one to start from is damaged; BadInput if one in the
        run's directory belongs to another run, or if the one to start from is missing.
        """
        origin = self.run.origin
        own = (self.model.parameters, self.step.optimizer)
        state = checkpoint.resume(
            self.directory.path, *own, lambda probe: self._loss_of(probe.tokens)
        )
        place = checkpoint_path(self.directory.path, state.iteration)
        # A checkpoint of its own is further than the origin that it came from.
        if origin and not state.iteration:
            place = resolve_checkpoint(origin.place)
            is_whole = origin.kind == "continues"
            state = checkpoint.start_from(place, origin.digest, *own, is_whole)
        self.state = state
        if state.iteration:
            # Memory belongs to the streams of the last iteration, whose batch may be smaller than
            # the next.
            batch_size = self.schedule.batch_size(state.iteration - 1)
            dp = self.mesh.dp
            groups = place_groups(batch_size, self.config.train.microbatch_size, dp.rank, dp.size)
            layers = list(chain.from_iterable(chunk.stage.layers for chunk in self.model.chunks))
            self.inputs.streams.load(place, groups, layers)
        self._count_samples(state.iteration)
        if self.step.scaler and state.loss_scaler:
            self.step.scaler = LossScaler(**state.loss_scaler)
        # A resumed run must judge spikes by the same losses as one that was never stopped.
        self.recent.seen.extend(state.recent)

    def _count_samples(self, iteration: int) -> None:
        """Set this trainer's `updated_samples` to the number in its attribute `state`, which the
        caller has set to the state after `iteration` iterations. A state that an earlier release
        wrote lacks the number; then it becomes the number of all samples of these iterations."""
        samples = self.state.updated_samples
        # Earlier releases did not store the number; then every iteration counts as an update.
        if samples is None:
            samples = self.schedule.samples_before(iteration)
        self.updated_samples = samples

    def run_to_end(self, loggers: dict[str, Start] | None = None, until: int | None = None) -> None:
        """Run the remaining iterations, with validations, checkpoints, their scores and lines of
        metrics.jsonl, validate on the whole split, write the summary and seal the run; nothing is
        returned. Every rank calls it, after `prepare`; the first one alone writes metrics and
        summary, gives the metrics to `loggers`, a dict name → function that begins a logger's
        session, and prints progress to standard error.

        Raises Interrupted after a checkpoint if a signal or the end of iteration number `until`,
        counted from 1, stops it before the run's end, and without one if a checkpoint cannot be
        written; NotFinite or Diverged as guards, validations and checkpoints do, and NotFinite if
        no iteration changed the weights; and IntegrityFailure if a file of the dataset has changed,
        a token is outside the vocabulary or a checkpoint is not written as it was in memory.
        """
        train = self.config.train
        first = self.state.iteration
        # Earlier sessions count, because the summary states the time of the whole training.
        begun = monotonic() - self.state.seconds
        progress = Progress(
            self.config.name,
            train.iterations,
            "iterations",
            quiet=not self.mesh.is_first,
            every=self.config.record.log_interval,
        )
        seam = train.continues
        # At its first session a continued run takes over the earlier run's curve; later it has it
        # already.
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
            self.saved = monotonic()
            announce(self._estimate(first))
            self.validations = read_validations(self.directory.path) if self.mesh.is_first else []
            if first == 0:
                # Only at iteration 0: a resumed or continued run has this line already.
                start = self._validate(0, train.validation_samples)
                log(start)
                self.validations.append(start)
            elif not earlier:
                # The session before may have ended before its last checkpoint was scored.
                begun += self._score(first, progress)
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
                    validation = self._validate(done, train.validation_samples)
                    log(validation)
                    progress.say(self._describe_validation(validation))
                    self.validations.append(validation)
                self.state = TrainingState(
                    done,
                    self.step.optimizer.steps,
                    monotonic() - begun,
                    asdict(self.step.scaler) if self.step.scaler else None,
                    tuple(self.recent.seen),
                    self.state.ancestors,
                    self.updated_samples,
                )
                # Only when every rank's thread is done, as the signals said: asking earlier would
                # let training wait for the disk.
                if self.is_ready:
                    self._go_on_saving()
                if is_last or stop or self.is_save_due or done % train.checkpoint_interval == 0:
                    self._save()
                    # Waited for here, because after this the process ends, the run is sealed or the
                    # checkpoint is scored.
                    if is_last or stop or self.config.record.evaluate:
                        self._finish_saving()
                    if is_last or not stop:
                        begun += self._score(done, progress)
                if stop and not is_last:
                    raise Interrupted(
                        f"stopped after iteration {done} of {train.iterations}, with a checkpoint"
                        f" of it; `mlm-train resume {self.directory.path}` goes on from there"
                    )
                progress.advance(1, self._console(line))
            # Before the last validation: a training without any update is no result.
            self._check_updates(progress.note)
            final = self._validate(
                train.iterations, self.validation.num_samples, "final-validation"
            )
            log(final)
            self._check_data()
        # After the block, which has closed metrics.jsonl: the seal takes its digest.
        peaks = self.mesh.world.gather_objects(self.memory.first_iteration_bytes)
        if self.mesh.is_first:
            path = self.directory.path
            checkpoint.remove_old(path, train.keep_checkpoints)
            run = self.run
            seconds = self.state.seconds
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

    def _score(self, iteration: int, progress: Progress) -> float:
        """Score the run's sealed checkpoint of `iteration` by those protocols of `record.evaluate`
        whose file of scores is not there, and return the seconds that the scoring took, which do
        not count as training. Every rank calls it, and waits for the first rank, which starts
        mlm-eval. A scoring that fails gives a warning through `progress`. Sets `saved`, so that
        `checkpoint_minutes` count anew. Raises Interrupted if a rank is asked to stop meanwhile."""
        start = monotonic()
        run = self.directory.path
        checkpoint = checkpoint_path(run, iteration)
        for protocol in self.config.record.evaluate:
            progress.say(f"{self.config.name}: scores iteration {iteration:,} by {protocol}")
            process = start_scoring(checkpoint, protocol) if self.mesh.is_first else None
            status = None
            while status is None:
                # A message now and then, because a rank that waits for minutes counts as lost.
                sleep(POLL_SECONDS)
                own = process.poll() if process else 0
                states = self.mesh.world.gather_objects(STOP if self.stop_requested else own)
                status = states[0]
                if STOP in states:
                    if process:
                        process.kill()
                    raise Interrupted(
                        f"stopped while a checkpoint was scored; `mlm-train resume {run}` goes on"
                        " from there"
                    )
            if status:
                progress.note(f"warning: no scores by {protocol}: mlm-eval {ended_by(status)}")
        self.saved = monotonic()
        return self.saved - start

    def _estimate(self, first: int) -> str:
        train = self.config.train
        left = train.iterations - first
        sequences = self.validation.num_samples
        sequences += (left // train.validation_interval + 1) * min(
            train.validation_samples, sequences
        )
        # A validation sequence runs forward alone, a third of forward and backward.
        seconds = self.rehearsed_seconds * (left + sequences / train.global_batch_size / 3)
        cost = f"about {format_duration(seconds)} and {format_bytes(self.memory.bytes())} a rank"
        return f"{cost}, by a rehearsed iteration of {self.rehearsed_seconds:.3g} s"

    def rate(self) -> float:
        """Return the learning rate of the next update, from the numbers of updates and of their
        samples so far."""
        train = self.config.train
        return learning_rate(train, clock(train, self.step.optimizer.steps, self.updated_samples))

    def iterate(self, number: int) -> tuple[Step, list[str], bool]:
        """Run the next iteration, `number`, counted from 0, update the weights unless a guard skips
        the update or the gradient overflows in fp16, and return a tuple: the Step, its line for
        metrics.jsonl; a list of the guards' warnings as texts, without empty ones; and True if a
        rank was asked to stop. Every rank calls it, after `prepare`.

        Logs nothing, and leaves this trainer's `state` to the caller. On a GPU the line's seconds
        do not wait for the update, whose time counts in the next iteration. Raises NotFinite or
        Diverged as the guards do, and IntegrityFailure for a token outside the vocabulary.
        """
        for guard in self.guards:
            guard.before(number)
        start = monotonic()
        train = self.config.train
        rate = self.rate()
        microbatches = self.inputs.of(number)
        scale = self.step.loss_scale
        minutes = self.config.record.checkpoint_minutes or math.inf
        ranks = self.mesh.world.size
        is_due = self.mesh.is_first and monotonic() >= self.saved + 60 * minutes
        # Three counts of ranks in one sum, in base `ranks + 1`. They travel with the loss, so that
        # a stop, a due checkpoint and a finished write cost no collective.
        base = ranks + 1
        signal = self.stop_requested + base * (is_due + base * self.writer.is_ready)
        gradient = self.step.gradient(microbatches, signal)
        signals, stops = divmod(gradient.signals, base)
        self.is_save_due = signals % base > 0
        self.is_ready = signals // base == ranks
        iteration = Iteration(number, self.schedule.batch_size(number), microbatches, gradient)
        # A sum, because `any` stops at the first True, and later guards would miss an iteration.
        skip = sum(guard.skips(iteration) for guard in self.guards) > 0
        is_updated = self.step.update(gradient, rate, skip)
        # Skipped samples do not move the schedule's clock, as in Megatron-LM.
        self.updated_samples += is_updated * iteration.batch_size
        self.inputs.streams.commit()
        seconds = monotonic() - start
        model = self.config.model
        size = iteration.batch_size
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
            # JSON has no infinity.
            gradient_norm=gradient.norm if math.isfinite(gradient.norm) else None,
            tokens_per_second=round(size * model.seq_length / seconds, 1),
            model_tflops=flops / seconds / 1e12,
            skipped=not is_updated,
        )
        warnings = list(filter(None, [guard.after(iteration) for guard in self.guards]))
        return iteration.line, warnings, stops > 0

    def _validate(
        self,
        iteration: int,
        num_samples: int,
        kind: Literal["validation", "final-validation"] = "validation",
    ) -> Validation:
        """Return a Validation, a line of `kind`, by default `validation`, for metrics.jsonl,
        without writing it: mean loss and perplexity, at most e²⁰, of the first `num_samples`
        validation sequences, or of all if there are fewer, without dropout. A Transformer-XL takes
        whole global batches, at least one. `iteration`, the number of finished iterations, is for
        the line. Every rank calls it. Raises NotFinite if the loss is not finite, IntegrityFailure
        for a token outside the vocabulary."""
        mesh = self.mesh
        inputs = list(self.validation.inputs(num_samples))
        # Sums and counts are reduced, not means: ranks may have different numbers of sequences.
        own = float(sum(len(batch.tokens) for batch in inputs))
        count = round(
            mesh.dp.all_reduce(torch.tensor(own, dtype=torch.float64, device=mesh.device)).item()
        )
        loss = mesh.pp.all_reduce(mesh.dp.all_reduce(self.model.evaluate(inputs))).item() / count
        if not math.isfinite(loss):
            raise NotFinite(
                f"training ends, because the validation loss after iteration {iteration} is {loss};"
                " earlier checkpoints are kept"
            )
        # Cut off at e²⁰, as Megatron-LM prints it.
        perplexity = math.exp(min(loss, 20.0))
        return Validation(
            kind=kind, iteration=iteration, samples=count, loss=loss, perplexity=perplexity
        )

    def _describe_validation(self, now: Validation) -> str:
        """Return a phrase for the console about the Validation `now`: the run's name, the
        iteration, the loss and perplexity and, if this trainer's attribute `validations`, to which
        the caller adds `now` afterwards, has earlier ones, the lowest loss with its iteration, or
        that `now` is the lowest itself."""
        text = f"{self.config.name}: validation after {now.iteration:,}: loss {now.loss:.4f}"
        if self.validations:
            best = min(self.validations, key=attrgetter("loss"))
            text += (
                f", lowest {best.loss:.4f} after {best.iteration:,}"
                if best.loss < now.loss
                else ", the lowest"
            )
        return f"{text}, perplexity {now.perplexity:.5g}"

    def _check_data(self) -> None:
        """Raise IntegrityFailure, on every rank, if a file of the dataset differs from its digest.
        Every rank calls it, and the first one reads. A dataset that was not touched since this
        user's last check is not read again."""
        with self.mesh.all_or_none():
            if self.mesh.is_first:
                self.dataset.check()

    def _save(self) -> None:
        """Begin to write a checkpoint of the current state in the run's directory, beside training;
        `_go_on_saving` or `_finish_saving` completes it. One that is still being written is
        completed first.

        Every rank calls it. Raises IntegrityFailure if the dataset was changed, and Diverged if a
        guard finds that replicas differ; no checkpoint is begun then. Raises Interrupted if a
        checkpoint cannot be written; and Diverged or IntegrityFailure if the one still being
        written holds a number that is not finite or is not what was in memory.
        """
        self._finish_saving()
        # Nothing is kept that was trained on a dataset that changed meanwhile.
        self._check_data()
        for guard in self.guards:
            # Replicas that have drifted apart must not be written.
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
        self.saved = monotonic()

    def _go_on_saving(self) -> None:
        if ancestor := self.writer.go_on():
            self.state = replace(self.state, ancestors=(*self.state.ancestors, ancestor))

    def _finish_saving(self) -> None:
        while self.writer.is_writing:
            self._go_on_saving()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Context manager around the training loop: complete a checkpoint in progress if training
        diverges, and give it up after any other error."""
        try:
            yield
        except Diverged:
            # Raised by every rank in the same iteration, so that all can still exchange what the
            # checkpoint needs. After other errors a lost rank would be waited for.
            self._finish_saving()
            raise
        finally:
            self.writer.close()

    def _loss_of(self, tokens: tuple[tuple[int, ...], ...]) -> float:
        """Return the current model's mean loss, without dropout, on `tokens`, samples of token ids,
        [samples, length + 1]. Every rank calls it with the same samples: data-parallel ranks do not
        divide them, and each computes the loss of all. The model is left in evaluation mode."""
        total = self.model.evaluate([to_input(np.array(tokens, dtype=np.int64), self.mesh)])
        return self.mesh.pp.all_reduce(total).item() / len(tokens)

    def _check_updates(self, note: Callable[[str], None]) -> None:
        """Call the function `note` with a warning as text if more than a tenth of the finished
        iterations made no update. Raises NotFinite if none of them made one."""
        done = self.state.iteration
        skipped = done - self.state.optimizer_steps
        lower = "a lower train.initial_loss_scale, or train.precision = 'bf16' or 'fp32', avoids it"
        why = (
            f"gradients overflowed in fp16: {lower}"
            if self.step.scaler
            else "train.skip_spikes left them out"
        )
        if skipped == done:
            raise NotFinite(
                f"none of the {done} iterations changed the weights, so nothing was trained: {why}"
            )
        if skipped > done / 10:
            note(f"warning: {skipped} of {done} iterations did not change the weights: {why}")

    def _console(self, line: Step) -> str:
        """Return an iteration, given as its Step, as text for the progress line: mean loss,
        gradient norm, in fp16 the loss scale, in any precision the number of skipped iterations if
        there are any, learning rate, time and the speed of all ranks together. The mean is over the
        last 20 iterations with a finite loss and norm, or over the last `record.log_interval` of
        them if that is set, at most 128; if there are none it is this iteration's own loss."""
        skipped = self.state.iteration - self.state.optimizer_steps
        norm = line.gradient_norm
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
        # Only noted: the other ranks must hear of it first, with the next loss.
        self.stop_requested = True
