"""The training loop: build, then iterate; everything it does is in its run directory."""

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.batch_schedule import BatchSchedule
from engine.batches import place_groups
from engine.checkpoint import TrainingState, checkpoint_path, complete_checkpoints, remove_old, save_checkpoint
from engine.config import RunConfig
from engine.costs import flops_per_iteration
from engine.dataset import DatasetFacts
from engine.diagnosis import diagnose
from engine.loggers import Logger, open_loggers
from engine.memory import PeakMemory
from engine.metrics import MetricsLog
from engine.optim.choice import build_optimizer
from engine.optim.noise_scale import NoiseScaleMeter
from engine.optim.schedule import learning_rate
from engine.out_of_memory import explaining_out_of_memory, try_batch
from engine.parallel.layout import layout_of
from engine.parallel.mesh import ParallelMesh, build_mesh
from engine.parallel.rendezvous import check_agreement, join_ranks, launched_world_size, telling_of_lost_ranks
from engine.pipeline.lowering import Interval
from engine.pipeline.microbatch import PipelineInput, to_input
from engine.pipeline.partition import PartitionedModel
from engine.pipeline.timeline import describe_timeline
from engine.precision import DTYPES, LossScaler
from engine.probe import Probe, describe_computation
from engine.replicas import INTERVAL, check_replicas
from engine.resume import resume
from engine.rng import Dropout
from engine.slow_ranks import SlowRanks
from engine.spikes import RecentIterations, describe_spike
from engine.stream_memory import StreamMemory
from engine.training_order import training_batches
from engine.training_run import TIMELINE, begin_run, read_metrics, write_summary
from engine.validation import ValidationSplit
from lineage.atomic import write_text
from lineage.errors import Interrupted, UserError
from lineage.lock import locked
from lineage.progress import Progress
from lineage.run import RunDirectory


class NotFinite(UserError):
    """The loss or the gradient is no longer a number (exit code 3)."""

    exit_code = 3


def train(config: RunConfig, root: Path) -> RunDirectory:
    """Train `config` in its run directory below `root`, going on from the newest checkpoint there.

    A complete run is returned as it is. Raises Interrupted after SIGTERM or Ctrl-C, with a checkpoint written.
    """
    join_ranks()
    with telling_of_lost_ranks():
        check_agreement(config.model_dump(mode="json"))
        config, dataset, run = begin_run(config, root)
        layout = layout_of(config, launched_world_size())
        if layout.world_size > 1:
            torch.set_num_threads(1)
        mesh = build_mesh(layout, config.parallel.sequence_parallel)
        mesh.barrier()
        with alone(run, mesh):
            if not run.is_complete:
                with mesh.together():
                    if os.environ.get("LOCAL_RANK", "0") == "0":
                        dataset.check()
                    loggers = open_loggers(config.record.loggers if mesh.is_first else ())
                with explaining_out_of_memory(config, mesh, "before the first iteration"):
                    trainer = Trainer(config, run, dataset, mesh)
                with explaining_out_of_memory(config, mesh, "while training"):
                    trainer.run_to_end(loggers)
            elif mesh.is_first:
                run.link()
    return run


@contextmanager
def alone(run: RunDirectory, mesh: ParallelMesh) -> Iterator[None]:
    """Keep other commands from training a run not at rest. Raises BadInput, on every rank, if one does already."""
    with ExitStack() as held:
        with mesh.together():
            if mesh.is_first and not run.is_at_rest:
                held.enter_context(locked(run.path))
        yield


class Trainer:
    """One rank's share of a training run."""

    def __init__(self, config: RunConfig, run: RunDirectory, dataset: DatasetFacts, mesh: ParallelMesh) -> None:
        self.config, self.run, self.dataset, self.mesh = config, run, dataset, mesh
        train, model = config.train, config.model
        self.schedule = BatchSchedule(train)
        self.memory = PeakMemory(mesh.device)
        self.peak_bytes = 0
        self.model = PartitionedModel(model, config.parallel, mesh, DTYPES[train.precision], train.seed)
        self.optimizer = build_optimizer(
            self.model.parameters, train, self.model.storage_mesh, config.parallel.shard_optimizer
        )
        self.noise = NoiseScaleMeter(read_metrics(run.path)) if config.record.noise_scale and mesh.dp.size > 1 else None
        self.reducer = self.model.reducer(self.optimizer.groups, measures_noise=self.noise is not None)
        self.scaler = LossScaler() if train.precision == "fp16" else None
        self.streams = StreamMemory(model, mesh)
        self.batches = training_batches(config, dataset.token_files("train"), train.iterations, dataset.tokenizer)
        try_batch(self.model, self.optimizer, self.reducer, self._inputs(train.iterations - 1))
        self.streams.stay()
        self.state = resume(run.path, self.model.parameters, self.optimizer, lambda probe: self._loss_of(probe.tokens))
        if self.state.iteration:
            batch_size = self.schedule.batch_size(self.state.iteration - 1)
            groups = place_groups(batch_size, train.microbatch_size, mesh.dp.rank, mesh.dp.size)
            layers = [number for chunk in self.model.chunks for number in chunk.stage.layers]
            self.streams.load(checkpoint_path(run.path, self.state.iteration), groups, layers)
        if self.scaler and self.state.loss_scaler:
            self.scaler = LossScaler(**self.state.loss_scaler)
        self.slow = SlowRanks(mesh)
        self.recent = RecentIterations(self.state.recent)
        self.validation = ValidationSplit(config, dataset.token_files("valid"), mesh, dataset.tokenizer)
        self.validated = math.nan
        self.stop_requested = False

    def run_to_end(self, loggers: dict[str, Logger] | None = None) -> None:
        """Every iteration that is left, then the final validation, the summary and the run's seal."""
        train, start = self.config.train, time.monotonic()
        before = self.state.seconds
        first = self.state.iteration
        progress = Progress(self.config.name, train.iterations, "iterations", quiet=not self.mesh.is_first)
        described = self.config.model_dump(mode="json")
        log = MetricsLog(self.run.path, first, described, loggers or {}, progress.note) if self.mesh.is_first else None
        write = log.write if log else lambda line: None
        with log or nullcontext(), self._stoppable(), progress:
            progress.start_at(first)
            if first == 0:
                write(self._validate(0, train.validation_samples))
            for iteration in range(first, train.iterations):
                self.slow.begin()
                line, stop = self._iterate(iteration)
                if iteration == first:
                    self.peak_bytes = self.memory.bytes()
                write(line)
                for warning in (describe_spike(line), line.get("warning", ""), self.slow.end()):
                    if warning:
                        progress.note(warning)
                done = iteration + 1
                if done % train.validation_interval == 0 or done == train.iterations:
                    write(self._validate(done, train.validation_samples))
                self.state = TrainingState(
                    done, self.optimizer.steps, before + time.monotonic() - start,
                    self.scaler.state() if self.scaler else None, self.recent.state(), self.state.ancestors,
                )  # fmt: skip
                if done % INTERVAL == 0:
                    check_replicas(self.model.parameters, self.model.storage_mesh)
                if stop or done % train.checkpoint_interval == 0 or done == train.iterations:
                    self._save()
                if stop and done < train.iterations:
                    raise Interrupted(
                        f"stopped after iteration {done} of {train.iterations}; "
                        f"`mlm-train resume {self.run.path}` goes on from there"
                    )
                progress.advance(1, self._console(line))
            final = self._validate(train.iterations, self.validation.num_samples)
            write(final | {"kind": "final-validation"})
        peaks = self.mesh.gather_objects(self.peak_bytes)
        if self.mesh.is_first:
            self._finish(final, peaks)
        self.mesh.barrier()

    def _iterate(self, iteration: int) -> tuple[dict[str, Any], bool]:
        """One optimizer step; returns its metrics and whether some rank was asked to stop."""
        start = time.monotonic()
        train, mesh = self.config.train, self.mesh
        batch_size = self.schedule.batch_size(iteration)
        num_microbatches = batch_size // (train.microbatch_size * mesh.dp.size)
        scale = self.scaler.scale if self.scaler else 1.0
        microbatches = self._inputs(iteration)
        timeline: list[Interval] | None = [] if iteration + 1 == train.iterations else None
        loss_sum = self.model.forward_backward(microbatches, self.reducer, scale, timeline)
        self.reducer.finish(num_microbatches * scale)
        stop = torch.tensor(float(self.stop_requested), dtype=torch.float64, device=mesh.device)
        report = torch.stack([loss_sum, *mesh.tp.all_reduce(torch.stack([stop, self.reducer.local_square]))])
        mesh.pp.all_reduce(mesh.dp.all_reduce(report))
        loss_value = report[0].item() / batch_size
        norm = self.optimizer.gradient_norm()
        rate = learning_rate(train, self.optimizer.steps + 1)
        spike = self.recent.add(loss_value, norm)
        is_finite = math.isfinite(norm) and math.isfinite(loss_value)
        is_skipped = not is_finite or (train.skip_spikes and bool(spike))
        if not is_skipped:
            self.optimizer.step(rate, norm)
        elif not is_finite and (self.scaler is None or not math.isfinite(loss_value)):
            places = list(place_groups(batch_size, train.microbatch_size, mesh.dp.rank, mesh.dp.size))
            where = diagnose(self.model, self.reducer, mesh, microbatches, places, scale)
            raise NotFinite(
                f"iteration {iteration + 1}: loss {loss_value}, gradient norm {norm}; the weights were not updated"
                + (f"; {where}" if where else "")
            )
        self.streams.move_on()
        if self.scaler:
            self.scaler.update(overflow=not math.isfinite(norm))
        seconds = time.monotonic() - start
        flops = flops_per_iteration(self.config.model, train) * batch_size / train.global_batch_size
        line = {
            "kind": "train",
            "iteration": iteration + 1,
            "batch_size": batch_size,
            "samples": self.schedule.samples_before(iteration + 1),
            "loss": loss_value,
            "learning_rate": rate,
            "gradient_norm": norm if math.isfinite(norm) else None,
            "loss_scale": scale,
            "spike": spike,
            "skipped": is_skipped,
            "seconds": round(seconds, 5),
            "tokens_per_second": round(batch_size * self.config.model.seq_length / seconds, 1),
            "model_tflops": flops / seconds / 1e12,
        }
        line |= self.memory.warning()
        if self.noise:
            line |= self.noise.measure(report[2].item() / mesh.dp.size, norm, batch_size, mesh.dp.size)
        if timeline is not None:
            self._write_timeline(iteration + 1, num_microbatches, timeline)
        return line, report[1].item() > 0

    def _inputs(self, iteration: int) -> list[PipelineInput]:
        """This rank's microbatches of `iteration` (from 0), each after what its streams remember."""
        return [
            to_input(
                batch.tokens,
                self.mesh,
                self._dropout(iteration, batch.places),
                self.streams.enter(batch.places),
                batch.pairs,
            )
            for batch in self.batches.microbatches(iteration, self.mesh.dp.rank, self.mesh.dp.size)
        ]

    def _write_timeline(self, iteration: int, num_microbatches: int, mine: list[Interval]) -> None:
        """What the pipeline of the first tensor- and data-parallel ranks computed when."""
        everyone, layout = self.mesh.gather_objects(mine), self.mesh.layout
        if self.mesh.is_first:
            pipeline = [everyone[layout.rank(0, rank, 0)] for rank in range(layout.pp)]
            described = describe_timeline(iteration, self.config.parallel, num_microbatches, pipeline)
            write_text(self.run.path / TIMELINE, json.dumps(described) + "\n")

    def _dropout(self, iteration: int, places: tuple[int, ...]) -> Dropout | None:
        model, train = self.config.model, self.config.train
        return Dropout(model.dropout, train.seed, iteration, places) if model.dropout else None

    def _validate(self, iteration: int, num_samples: int) -> dict[str, Any]:
        """Mean loss over the first `num_samples` validation sequences, without dropout."""
        mesh, inputs = self.mesh, list(self.validation.inputs(num_samples))
        sequences = torch.tensor(float(sum(len(one.tokens) for one in inputs)), dtype=torch.float64, device=mesh.device)
        count = round(mesh.dp.all_reduce(sequences).item())
        loss = mesh.pp.all_reduce(mesh.dp.all_reduce(self.model.evaluate(inputs))).item() / count
        if not math.isfinite(loss):
            raise NotFinite(f"after iteration {iteration} the validation loss is {loss}")
        self.validated = math.exp(min(loss, 20.0))
        return {
            "kind": "validation",
            "iteration": iteration,
            "samples": count,
            "loss": loss,
            "perplexity": self.validated,
        }

    def _save(self) -> None:
        check_replicas(self.model.parameters, self.model.storage_mesh)
        computed_on = describe_computation(self.mesh.layout, self.mesh.device)
        probe = Probe(
            self.validation.probed, self._loss_of(self.validation.probed), self.config.train.precision, computed_on
        )
        self.state = save_checkpoint(
            self.run.path, self.config, self.state, self.model.parameters, self.optimizer, self.model.storage_mesh,
            self.dataset.tokenizer, probe, self.streams,
        )  # fmt: skip

    def _loss_of(self, tokens: tuple[tuple[int, ...], ...]) -> float:
        """Mean loss of the model as it is on samples that every data-parallel rank takes, without dropout."""
        total = self.model.evaluate([to_input(np.array(tokens, dtype=np.int64), self.mesh)])
        return self.mesh.pp.all_reduce(total).item() / len(tokens)

    def _finish(self, final: dict[str, Any], peaks: list[int]) -> None:
        remove_old(self.run.path, self.config.train.keep_checkpoints)
        newest = complete_checkpoints(self.run.path)[-1].name
        measured = {"measured_bytes": peaks, "measured_by": self.memory.measured_by}
        write_summary(self.run.path, self.config, self.mesh.layout, self.state.seconds, measured, final, newest)
        self.run.complete()

    def _console(self, line: dict[str, Any]) -> str:
        return (
            f"loss {line['loss']:.3f}, validation perplexity {self.validated:.1f}, lr {line['learning_rate']:.2e}, "
            f"{line['tokens_per_second']:,.0f} tokens/s, {line['model_tflops'] * 1000:.0f} GFLOP/s"
        )

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Turn SIGTERM and Ctrl-C into a request to stop after the iteration in progress."""

        def request(number: int, frame: object) -> None:
            self.stop_requested = True

        old = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
