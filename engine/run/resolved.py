"""A run before it trains: its recipe with the vocabulary of its dataset, its layout, and what both
cost.

Every command resolves its run once and passes it on: dry run, training, resume, `to-megatron`,
plans. Imports no torch.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mlm_repro.data_pipeline.files import named_datasets
from mlm_repro.data_pipeline.tokens.tokenizer import FILE_NAME
from mlm_repro.engine.config import (
    FORMER_RECORDS,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    Seam,
    TrainConfig,
    TwinScale,
)
from mlm_repro.engine.costs import (
    RankMemory,
    checkpoint_bytes,
    flops_per_token,
    fullest_rank,
    parameter_count,
    tokens_trained,
    written_bytes,
)
from mlm_repro.engine.data.dataset import DatasetFacts
from mlm_repro.engine.family import family_of
from mlm_repro.engine.optim.schedule import end_of_schedule
from mlm_repro.engine.parallel.layout import Layout, layout_of, split_layers
from mlm_repro.engine.pipeline.schedule import check_schedule, ideal_bubble
from mlm_repro.engine.run.files import read_steps
from mlm_repro.engine.run.loggers import LOGGERS
from mlm_repro.engine.twin import shrink
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.chain import CONFIG, checkpoint_path, iteration_of, resolve_checkpoint
from mlm_repro.lineage.config import load_config, override_config, parse_config
from mlm_repro.lineage.digest import by_digest, is_sealed, read_digest, sha256_file, sha256_json
from mlm_repro.lineage.environment import available_cores, list_gpus
from mlm_repro.lineage.errors import BadInput, IntegrityFailure, UserError
from mlm_repro.lineage.files import Manifest, read_object
from mlm_repro.lineage.run import MANIFEST, RunDirectory, asked_for, identity_in
from mlm_repro.lineage.shipped import Shipped, find_file

SCHEMA = 1
"""Version of the meaning of a training's settings. Raise it when a default or the arithmetic behind
a key changes."""
PLACES = frozenset({"data", "parallel", "record"})
"""Names of the sections of the configuration that do not change the result: where a run takes place
and which records it writes."""
FIRST_RELEASE = {
    "initial_loss_scale": 2.0**32,
    "decay_iterations": None,
    "init_from": None,
    "continues": None,
}
"""Dict key → value of the section `[train]` that holds for a manifest of the first release, which
left these keys out. Its fp16 began at another loss scale."""


@dataclass(frozen=True)
class StartingPoint:
    """The checkpoint from which a run starts: with its weights alone (`kind` is init_from) or with
    its whole state (`kind` is continues). `place` is its path or, with init_from, that of a run
    whose newest checkpoint is meant; `digest` is the checkpoint's."""

    kind: str
    place: Path
    """Path of the checkpoint, or, with `init_from`, of a run whose newest checkpoint is meant."""
    digest: str


@dataclass(frozen=True)
class ResolvedRun:
    """A run with everything that decides its result and its cost: its RunConfig, the facts of its
    dataset, its Layout, and the checkpoint that it starts from, None for random weights. Without a
    dataset it can be described but not trained. Its properties give its parameters, tokens and
    memory, and the method `begin` its directory."""

    config: RunConfig
    """RunConfig of the run, with the vocabulary of its dataset."""
    dataset: DatasetFacts | None
    """Facts about the run's dataset; None if the configuration names no dataset. Such a run can be
    described but not trained."""
    layout: Layout
    origin: StartingPoint | None = None
    """StartingPoint of the run, the checkpoint that it starts from; None for random weights."""
    begun: RunDirectory | None = None
    """The RunDirectory in which to resume; None for a run whose directory follows from its
    settings."""

    @cached_property
    def parameters(self) -> int:
        """Number of the whole model's trainable parameters. The vocabulary is the padded one, but
        for a Transformer-XL with cutoffs the real one."""
        return parameter_count(self.config.model)

    @cached_property
    def tokens(self) -> int:
        """Number of token ids in all samples that the whole training reads, repeated ones included;
        samples of a run that the training continues count too."""
        return tokens_trained(self.config.model, self.config.train)

    @cached_property
    def memory(self) -> RankMemory:
        """A RankMemory: memory in bytes, by its parts, of the pipeline rank that needs the most, in
        closed form; with the copy for a checkpoint if this machine has no GPU."""
        fullest = fullest_rank(
            self.config.model, self.config.train, self.config.parallel, self.layout.dp
        )
        return fullest if list_gpus() else fullest._replace(copied=self.written_bytes)

    @cached_property
    def written_bytes(self) -> int:
        """Estimate of the bytes of one checkpoint that the rank with the largest share writes, and
        copies to the host's memory for that. Tensors are written whole, so it may be up to one
        tensor's state more."""
        return written_bytes(
            self.config.model, self.config.train.precision, self.config.parallel, self.layout.dp
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the tensors of one checkpoint of the whole model and its optimizer, over all
        ranks."""
        return checkpoint_bytes(self.config.model, self.config.train.precision)

    def flops(self, causal: bool = False) -> float:
        """Return as a float the number of floating-point operations (FLOPs) in the matrix products
        of the whole training on all ranks, with those of a run that it continues. Recomputation
        does not count. Attention counts in full, or with `causal` its causal half alone."""
        return self.tokens * flops_per_token(self.config.model, causal=causal)

    @property
    def data(self) -> DatasetFacts:
        """The DatasetFacts of the dataset that the run trains on, such as its files, tokenizer and
        digest: the attribute `dataset`, already read. Raises BadInput if that is None, because the
        configuration names no dataset."""
        if self.dataset is None:
            raise BadInput(
                "data.dataset is not set: make a dataset with `mlm-data run` and name its"
                " directory with --set data.dataset=DIRECTORY"
            )
        return self.dataset

    @property
    def parents(self) -> dict[str, str]:
        """Dict name → digest of the run's inputs: `dataset`, for a blend each of its datasets too
        (`dataset 1` and on), and the checkpoint that the run starts from, as `init_from` or
        `continues`. Raises BadInput if the configuration names no dataset."""
        return self.data.parents | ({self.origin.kind: self.origin.digest} if self.origin else {})

    def _epochs(self) -> str:
        """Return as the end of a sentence, ", 1.5 epochs", the number of passes over this run's
        training split that its tokens make, together with the tokens of a run that it continues; an
        empty text without a dataset. Raises BadInput or IntegrityFailure for a token file that is
        missing or damaged."""
        if not self.dataset:
            return ""
        available = sum(len(file.tokens) for file, _ in self.data.token_files("train"))
        return f", {self.tokens / available:.3g} epochs"

    def check_validation(self) -> None:
        """Raise BadInput if this run has no dataset, or one whose validation split is missing or
        too short for a sequence or for the model's family: a Transformer-XL needs text for its
        streams, a BERT two sentences in a document. Raises IntegrityFailure for a damaged token
        file. Nothing is returned."""
        from mlm_repro.engine.data.batches import validation_text

        config = self.config
        files = self.data.token_files("valid")
        validation_text(files, config.model.seq_length)
        family_of(config.model).validation_order(config, files, self.data.tokenizer)

    @property
    def _asked(self) -> Manifest:
        """The Manifest with which this run would begin, without time and environment. Raises
        BadInput if the configuration names no dataset."""
        described = self.config.model_dump(mode="json")
        settings = settings_of(self.config)
        return asked_for(
            self.config.name, "training", described, self.parents, PLACES, settings, SCHEMA
        )

    def directory(self, root: Path) -> RunDirectory:
        """Return the RunDirectory for this run below the folder `root`, whether it was begun or
        not; nothing is written. Raises BadInput if the configuration names no dataset, or the run's
        name is too long or leads to a run of another kind, and IntegrityFailure if the manifest of
        the run with that name cannot be read."""
        return RunDirectory.find(root, self._asked)

    def begin(self, root: Path) -> RunDirectory:
        """Return the RunDirectory of this run: the one to resume in, or the one below the folder
        `root`, which is made and begun if it is new.

        The name below `root` follows from what the run computes. A run that was begun before is
        therefore found again, and the trainer resumes from its newest checkpoint
        (`mlm_repro.engine.checkpoint.checkpoint.resume`). For a new run, a note printed to stderr
        names the runs of the same recipe that have an older identity. Raises BadInput if the
        configuration names no dataset, the run's name is too long or leads to a run of another
        kind, or the directory cannot be made or holds other work; IntegrityFailure if the manifest
        of the run with that name cannot be read.
        """
        if self.begun:
            return self.begun
        run = self.directory(root).begun(self._asked)
        if run.is_new:
            self._note_earlier_identities(root, run.path)
        return run

    def _note_earlier_identities(self, root: Path, own: Path) -> None:
        """Print to standard error a note for each training directly in the folder `root`, other
        than the one in the directory `own`, that was begun with this run's name, settings and
        inputs: that it is the same work under an older identity, and complete, or which command
        resumes it. Notes are in order of the directories' names; runs that cannot be read get none.
        """
        for path in sorted(root.glob(f"{self.config.name}-*")):
            with suppress(UserError):
                run = RunDirectory.open(path, "training")
                same = settings_of(read_config(run)) == settings_of(self.config)
                if same and run.manifest["parents"] == self.parents and path != own:
                    end = (
                        "complete"
                        if run.is_complete
                        else f"unfinished: `mlm-train resume {path}` goes on with it"
                    )
                    print(
                        f"note: {path} is the same work under an older identity, {end}",
                        file=sys.stderr,
                    )

    def check_not_longer(self, root: Path) -> None:
        """Raise BadInput if the run at `root`/name, this run's name, is complete and has the same
        settings but fewer iterations, in an error that names `--continue`; or if it is of another
        kind, or has settings that this program refuses. Raises IntegrityFailure if its manifest is
        damaged. Nothing is checked if this run continues another, or if the one there is unfinished
        or missing. Nothing is returned."""
        named = root / self.config.name
        train = self.config.train
        if not is_sealed(named) or train.continues or not (named / MANIFEST).is_file():
            return
        theirs = read_config(RunDirectory.open(named, "training"))
        length = theirs.train.iterations
        as_long = theirs.train.model_copy(
            update={"iterations": train.iterations, "continues": None}
        )
        same = settings_of(theirs.model_copy(update={"train": as_long})) == settings_of(self.config)
        if same and length < train.iterations:
            raise BadInput(
                f"{named} is complete with {length} iterations, and this recipe has"
                f" {train.iterations}: --continue {named} trains the rest, with its optimizer; to"
                " begin anew, give the run another name with --set name=…"
            )

    def describe(self) -> str:
        """Return the text of a dry run, of several lines: the configuration as JSON, the digest of
        its settings that are not defaults, and its costs, such as parameters, FLOPs and memory.
        Raises BadInput or IntegrityFailure for a token file of its dataset that is missing or
        damaged."""
        memory = self.memory
        whole = self.flops()
        causal = self.flops(causal=True)
        computing = memory.state + memory.activations
        parallel = self.config.parallel
        train = self.config.train
        layout = self.layout
        decay = (
            "constant"
            if train.decay == "constant"
            else f"{train.decay} to {train.min_learning_rate:g}"
        )
        microbatches = train.global_batch_size // (train.microbatch_size * layout.dp)
        bubble = ideal_bubble(parallel.schedule, parallel.pp, parallel.chunks, microbatches)
        half = f", {causal:.3e} with its causal half" if causal != whole else ""
        return "\n".join(
            [
                self.config.model_dump_json(indent=2),
                f"config digest      {sha256_json(settings_of(self.config))}",
                f"parameters         {self.parameters:,}",
                f"tokens             {self.tokens:,}{self._epochs()}",
                f"FLOPs              {whole:.3e} with attention counted whole{half}",
                (
                    f"learning rate      {train.learning_rate:g} after {train.warmup_iterations:,}"
                    f" iterations of warm-up, then {decay} at {end_of_schedule(train):,.10g},"
                    f" counted in {train.clock}"
                ),
                (
                    f"layout             tp {layout.tp} × pp {layout.pp} × dp {layout.dp} ="
                    f" {layout.world_size} ranks, {microbatches} microbatches each,"
                    f" {parallel.schedule} schedule with a bubble of {100 * bubble:.1f} %"
                ),
                (
                    f"memory per rank    {computing:,} bytes, {computing / 2**30:.2f} GiB: model"
                    f" and optimizer {memory.state / 2**30:.2f}, activations"
                    f" {memory.activations / 2**30:.2f}, of pipeline rank {memory.rank}"
                ),
                (
                    f"checkpoint         {self.checkpoint_bytes / 2**30:.2f} GiB, written beside"
                    f" training from copies of {self.written_bytes / 2**30:.2f} GiB a rank in the"
                    " host's memory"
                ),
            ]
        )

    def describe_work(self, iterations_done: int = 0) -> str:
        """Return as a phrase such as "1,000 iterations, 1.0e+18 FLOPs on 8 ranks" the work of this
        run that remains after its first `iterations_done` iterations."""
        train = self.config.train
        ranks = self.layout.world_size
        left = train.iterations - iterations_done
        flops = self.flops() * left / train.iterations
        return f"{left:,} iterations, {flops:.1e} FLOPs on {ranks} ranks"


def resolve(
    config: RunConfig, ranks: int | None = None, origin: StartingPoint | None = None
) -> ResolvedRun:
    """Return the ResolvedRun of a configuration, with its dataset, layout and starting point, on
    `ranks` ranks. Their default number is the largest among which the batch can be divided and for
    which this machine has GPUs, or cores if it has no GPU, but at least tp × pp. The dataset gives
    the vocabulary. With `origin` given, or without a dataset, the vocabulary stays as configured
    and no starting point is looked up.

    Raises DataMissing, IntegrityFailure or BadInput for a dataset or starting point that is
    missing, incomplete or does not fit, and BadInput as `checked_layout` does, such as for a layout
    that does not divide the ranks, the model or the batch.
    """
    dataset = None
    if config.data.dataset is not None:
        dataset = DatasetFacts.read(config.data.dataset)
        if origin is None:
            config = config.model_copy(update={"model": dataset.resize(config.model)})
            config, origin = _start_from(config, dataset.tokenizer)
    return ResolvedRun(
        config, dataset, checked_layout(config, ranks or default_ranks(config)), origin
    )


def checked_layout(config: RunConfig, ranks: int) -> Layout:
    """Return the Layout of a run on `ranks` ranks in all: the configured tensor and pipeline
    parallelism, all other ranks data-parallel. Raises BadInput if the layout does not divide the
    ranks, the model's sizes, the model's layers or the batch's microbatches, does not fit the
    pipeline schedule, is one that the model's family or ZeRO stage 3 does not allow, or allows no
    growing batch and the configured batch grows."""
    layout = layout_of(config, ranks)
    parallel = config.parallel
    split_layers(config.model.num_layers, layout.pp, parallel.chunks)
    microbatches = config.train.batch_in_microbatches // layout.dp
    check_schedule(parallel.schedule, layout.pp, parallel.chunks, microbatches)
    return layout


def _start_from(config: RunConfig, tokenizer: Path) -> tuple[RunConfig, StartingPoint | None]:
    """Return a pair: the configuration with the padded vocabulary of the checkpoint that the
    training starts from, and the StartingPoint of that checkpoint; the configuration unchanged and
    None if the training starts from none. With `train.continues` that checkpoint is the one of the
    stated iteration, with `train.init_from` a run's newest or the one named. `tokenizer` is the
    folder of the dataset's tokenizer.

    Raises BadInput if the checkpoint has another tokenizer, none, or another shape; dropout and
    `init_std` may differ. Raises BadInput or IntegrityFailure for a checkpoint that is missing or
    unreadable.
    """
    seam = config.train.continues
    source = seam.run if seam else config.train.init_from
    if source is None:
        return config, None
    checkpoint = checkpoint_path(source, seam.iteration) if seam else resolve_checkpoint(source)
    theirs = parse_config(
        read_object(checkpoint / CONFIG).get("model", {}), ModelConfig, str(checkpoint / CONFIG)
    )
    ours = config.model.model_copy(update={"padded_vocab_size": theirs.padded_vocab_size})
    values = ours.model_dump()
    for name, other in theirs.model_dump(exclude={"dropout", "init_std"}).items():
        if other != values[name]:
            raise BadInput(
                f"the weights of {source}, from which this run starts, are of another model:"
                f" model.{name} is {other} there and {values[name]} in this run: set it alike, or"
                " start from other weights"
            )
    own = checkpoint / "tokenizer" / FILE_NAME
    if not own.is_file():
        raise BadInput(
            f"{source}, from which this run starts, has no tokenizer/{FILE_NAME}, so its tokens are"
            " unknown: import the weights again, from a directory that has a tokenizer"
        )
    if sha256_file(own) != sha256_file(tokenizer / FILE_NAME):
        raise BadInput(
            f"{source}, from which this run starts, has another tokenizer than the dataset"
            f" {config.data.dataset}: make a dataset with `tokenizer.path = '{own}'` in its recipe"
        )
    kind, source = ("continues", checkpoint) if seam else ("init_from", source)
    return config.model_copy(update={"model": ours}), StartingPoint(
        kind, source, read_digest(checkpoint)
    )


def settings_of(config: RunConfig) -> JSON:
    """Return as a dict of plain JSON the run's `name` and, by section, the settings that differ
    from their defaults and affect the result. The sections `data`, `parallel` and `record` are left
    out."""
    return config.model_dump(mode="json", exclude_defaults=True, exclude=set(PLACES))


def read_config(run: RunDirectory) -> RunConfig:
    """Return the RunConfig in the manifest of `run`, a training's RunDirectory, without records and
    loggers of earlier versions; an fp16 run of the first release gets the keys that its manifest
    left out.

    Raises BadInput if there is no manifest, or if this program lacks another key of the manifest's
    configuration or refuses a value in it; IntegrityFailure if the manifest is damaged.
    """
    manifest = run.manifest
    values = manifest["config"]
    if manifest["schema_version"] is None and values.get("train", {}).get("precision") == "fp16":
        values = values | {"train": FIRST_RELEASE | values["train"]}
    # Earlier versions had other records and loggers.
    if isinstance(record := values.get("record"), dict):
        record = {key: value for key, value in record.items() if key not in FORMER_RECORDS}
        record["loggers"] = [name for name in LOGGERS if name in record.get("loggers", ())]
        values = values | {"record": record}
    return parse_config(values, RunConfig, str(run.path / MANIFEST))


def continue_run(config: RunConfig, run: Path) -> RunConfig:
    """Return a copy of `config` that continues the run in the directory `run` from the newest
    checkpoint there: `train.continues` is a Seam with that run's directory, the checkpoint's number
    of iterations and the number of samples in them, and `train.init_from` is None. Prints to stderr
    a note about settings of `[train]` in the earlier run that this program does not know.

    Raises BadInput for anything but a training run, if `train.iterations` is not above that
    checkpoint's number of iterations, for a run without its number of samples in metrics.jsonl, for
    another precision, and for a Transformer-XL, whose streams of text are cut by the number of
    iterations. Raises IntegrityFailure if the run has no complete checkpoint or a damaged file.
    """
    directory = RunDirectory.open(run, "training")
    if config.model.family == "transformer-xl":
        raise BadInput(
            "--continue does not take a transformer-xl: train.iterations divides the text into its"
            " streams, so 20 and 20 iterations would not read what 40 read; --set"
            f" train.init_from={run} starts from its weights"
        )
    stated = directory.manifest["config"].get("train", {})
    if unknown := sorted(stated.keys() - TrainConfig.model_fields.keys()):
        print(
            f"note: {run} has train.{', train.'.join(unknown)}, which this program does not know"
            " and leaves out",
            file=sys.stderr,
        )
    if (precision := stated.get("precision")) != config.train.precision:
        raise BadInput(
            f"{run} was trained in {precision}, in which alone its optimizer can continue: add"
            f" --set train.precision={precision}"
        )
    iteration = iteration_of(resolve_checkpoint(directory.path))
    samples = {step.iteration: step.samples for step in read_steps(directory.path)}.get(iteration)
    if samples is None:
        raise BadInput(
            f"{run}/metrics.jsonl does not say how many samples its {iteration} iterations took,"
            f" which --continue needs: --set train.init_from={run} starts from its weights"
        )
    run = run.with_name(directory.path.name) if run.is_symlink() else run
    seam = Seam(run=run, iteration=iteration, samples=samples)
    values = config.model_dump(mode="json")
    values["train"] |= {"init_from": None, "continues": seam.model_dump(mode="json")}
    return parse_config(values, RunConfig, "--continue")


def default_ranks(config: RunConfig) -> int:
    """Return the number of ranks of a run for which none is given: tp × pp times the largest degree
    of data parallelism that divides the batch's microbatches and needs no more ranks than there are
    GPUs, or processor cores without GPUs. It is tp × pp at least."""
    model_ranks = config.parallel.tp * config.parallel.pp
    available = max((len(list_gpus()) or available_cores()) // model_ranks, 1)
    microbatches = config.train.batch_in_microbatches
    return model_ranks * max(
        dp for dp in range(1, min(available, microbatches) + 1) if microbatches % dp == 0
    )


def read_run_config(
    model: str | Path, overrides: Sequence[str] = (), twin: bool = False
) -> RunConfig:
    """Return the RunConfig of a shipped model, by its name, or of a TOML file, by its path, or the
    twin of either. `overrides` are texts KEY=VALUE.

    With `twin`, overrides of `twin.` are the factors by which the model and its training are
    scaled; all others apply after that. Raises BadInput if there is no such model or file, if the
    file is not TOML, if it or an override has an unknown key or a value that is refused, or if
    `twin` is set and the batch grows; IntegrityFailure if this installation lacks the shipped
    models.
    """
    path = find_file(model, Shipped.MODEL)
    if not twin:
        return load_config(path, RunConfig, overrides)
    factors = [item for item in overrides if item.startswith("twin")]
    scale = override_config(TwinScale(), [item.removeprefix("twin.") for item in factors])
    return override_config(
        shrink(load_config(path, RunConfig), scale), [i for i in overrides if i not in factors]
    )


def read_run(
    model: str | Path,
    overrides: Sequence[str] = (),
    twin: bool = False,
    ranks: int | None = None,
    earlier: Path | None = None,
) -> ResolvedRun:
    """Return the ResolvedRun, on `ranks` ranks, of a shipped model, by its name, or of a TOML file,
    by its path, with the texts KEY=VALUE in `overrides`; with `twin`, of its shrunk twin, as
    `read_run_config` makes it. The run continues the one in the directory `earlier` if that is
    given. Without `ranks` there are as many as this machine has GPUs or cores for.

    Raises the errors of `read_run_config`, `continue_run` and `resolve`, mostly BadInput, and
    BadInput if the file or an override states a vocabulary that its dataset does not have. The
    vocabulary that a twin's rule gives does not count as stated.
    """
    config = read_run_config(model, overrides, twin)
    run = resolve(continue_run(config, earlier) if earlier else config, ranks)
    stated = config.model.vocab_size
    actual = run.config.model.vocab_size
    overridden = any(item.startswith(("model.vocab_size=", "model=")) for item in overrides)
    if stated != actual and (
        overridden or (not twin and "vocab_size" in config.model.model_fields_set)
    ):
        raise BadInput(
            f"model.vocab_size = {stated} contradicts the dataset {config.data.dataset}, with which"
            f" it is {actual}: leave it out of the recipe, or --set model.vocab_size={actual}"
        )
    return run


def resolve_begun(
    directory: RunDirectory, ranks: int | None = None, changed: Sequence[str] = ()
) -> ResolvedRun:
    """Return the ResolvedRun of the training that was begun in `directory`, to be resumed there,
    with the settings KEY=VALUE in `changed`. Without `ranks` and `changed` it has the layout that
    trained last; with `changed` alone, as many ranks as this machine has GPUs or cores for. Its
    dataset and starting point are found by their digests if they have moved. A starting point that
    is not found is no error here: a run with a checkpoint of its own does not need it.

    Raises IntegrityFailure or BadInput if its dataset, its name, its manifest or the meaning of its
    settings has changed since it began, or if `changed` has a setting that is unfit or outside of
    the sections `data`, `parallel` and `record`; DataMissing without its dataset; BadInput as
    `checked_layout` does. Most errors name the command that goes on in a new run.
    """
    manifest = directory.manifest
    path = directory.path
    wrong = next((item for item in changed if item.partition(".")[0] not in PLACES), None)
    if wrong:
        raise BadInput(
            f"`mlm-train resume` takes --set only for the sections {', '.join(sorted(PLACES))}:"
            f" `mlm-train run CONFIG --continue {path} --set {wrong}` goes on in a new run"
        )
    schema = manifest.get("schema_version") or 1  # the first release stated no version
    if schema != SCHEMA:
        raise BadInput(
            f"{path} began with settings that mean something else here (schema {schema} of"
            f" trainings, this program has {SCHEMA}); `mlm-train run CONFIG --continue {path}` goes"
            " on in a new run"
        )
    try:
        config = read_config(directory)
    except BadInput as error:
        raise BadInput(
            f"{error}; `mlm-train run CONFIG --continue {path}` goes on in a new run"
        ) from error
    if layouts := manifest.get("attempts") or manifest.get("layouts"):
        parallel = parse_config(layouts[-1]["parallel"], ParallelConfig, str(path / MANIFEST))
        config = config.model_copy(update={"parallel": parallel})
        ranks = ranks or (None if changed else layouts[-1]["ranks"])
    try:
        original = f"{manifest['name']}-{manifest['identity'][:8]}"
        identity = identity_in(manifest)
        dataset = manifest["parents"]["dataset"]
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityFailure(
            f"{path / MANIFEST} lacks the run's name, identity or dataset, so the run cannot be"
            " resumed: put the original file back"
        ) from error
    if path.name != original:
        raise BadInput(
            f"{path} was renamed: give it its name again with `mv {path}"
            f" {path.with_name(original)}`"
        )
    if manifest["identity"] != identity:
        raise IntegrityFailure(
            f"{path / MANIFEST} was edited after the run began: its identity is not that of its"
            " configuration and inputs; undo the edit to resume"
        )
    # A dataset may have moved since the run began; it is found by its digest.
    locations = tuple((named.place, named.weight) for named in named_datasets(path))
    moved = {"dataset": locations[0][0] if isinstance(config.data.dataset, Path) else locations}
    config = config.model_copy(update={"data": config.data.model_copy(update=moved)})
    config = override_config(config, changed) if changed else config
    seam = config.train.continues
    kind = "continues" if seam else "init_from"
    source = checkpoint_path(seam.run, seam.iteration) if seam else config.train.init_from
    origin = None
    if source and (digest := manifest["parents"].get(kind)):
        where = by_digest(
            source, digest, lambda run: read_digest(resolve_checkpoint(run)), path.parent
        )
        origin = StartingPoint(kind, where or source, digest)
    run = resolve(config, ranks, origin)
    if run.data.digest != dataset:
        raise IntegrityFailure(
            f"the dataset {config.data.dataset} is not the one that {path} began with, by its"
            " digest: put that one back, or go on in a new run with `mlm-train run CONFIG"
            f" --continue {path}`"
        )
    return replace(run, begun=directory)
