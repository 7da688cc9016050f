"""Loads checkpoints of this suite, Hugging Face, Megatron-LM or `torch_dist` as models to score
with.

The engine computes GPT-2 and this suite's own models, transformers every other causal language
model.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from mlm_repro.data_pipeline.contamination.testsets import find_gpt2_vocabulary
from mlm_repro.data_pipeline.files import trained_datasets
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer
from mlm_repro.engine.costs import parameter_count
from mlm_repro.engine.formats.vocabulary import VOCABULARY
from mlm_repro.engine.inference import load_for_inference
from mlm_repro.engine.launch.mesh import build_mesh, local_device
from mlm_repro.engine.model.stage_model import CausalModel
from mlm_repro.engine.optim.precision import DTYPES
from mlm_repro.engine.parallel.mesh import ParallelMesh, serial_mesh
from mlm_repro.engine.published import CONFIG, is_megatron
from mlm_repro.evaluation.models.places import SMOLLM2, SMOLLM2_NOTE, Place
from mlm_repro.evaluation.models.pretrained import Pretrained
from mlm_repro.evaluation.protocol import Encoder
from mlm_repro.evaluation.scoring.probes import probe
from mlm_repro.evaluation.scoring.scores import MAX_LOGIT_BYTES, ScoringModel, pack_weights
from mlm_repro.evaluation.scoring.store import Store, open_scores
from mlm_repro.evaluation.settings import Settings
from mlm_repro.lineage.environment import user_cache
from mlm_repro.lineage.errors import BadInput, DataMissing, IntegrityFailure, UserError
from mlm_repro.lineage.files import read_object
from mlm_repro.lineage.records import Kind


@contextmanager
def native_checkpoint(place: Place, vocab: Path | None, heads: int | None) -> Iterator[Path]:
    """Context manager: yield the path of a checkpoint directory of this suite: the directory of
    `place`, or an import of it that is removed after the block. `heads` is the number of attention
    heads, for an imported checkpoint that does not say it; any other imported checkpoint must have
    as many heads.

    The folder `vocab` has the vocabulary for an imported GPT-2, in place of the checkpoint's own.
    Without it a Megatron-LM checkpoint takes the files beside it or else the published GPT-2's,
    which may be downloaded. Raises the errors of imports, such as BadInput for files that are no
    checkpoint or a missing vocabulary, and IntegrityFailure for damaged ones.
    """
    directory = place.directory
    if place.format == "native":
        yield directory
        return
    # Imported only here: torch.distributed's checkpoints, which it reads, take a second to import.
    from mlm_repro.engine import formats
    from mlm_repro.engine.formats.convert import read_published

    if vocab is None and is_megatron(directory) and not (directory / VOCABULARY).is_file():
        with suppress(DataMissing):
            vocab = find_gpt2_vocabulary()[0].parent
    with tempfile.TemporaryDirectory(prefix="mlm-eval-") as temporary:
        imported = Path(temporary) / "imported"
        formats.write_checkpoint(imported, read_published(directory, vocab, heads))
        yield imported


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """Checkpoint as a loaded model, probed if `open_checkpoint` returned it, with its tokenizer,
    the digest of its files and the facts that a result must state about it."""

    directory: Path
    digest: str
    tokenizer: Encoder
    model: ScoringModel
    kind: Kind
    """`scaled` for a small twin of a published model, `measured` for any other."""
    num_parameters: int
    notes: tuple[str, ...] = ()
    """Sentences that warn readers of the numbers that are measured on this checkpoint."""
    backend: str = "engine"
    """Name of the program that computes the model: `engine`, or `transformers: ` with the name of
    the model's class and attention kernel."""
    checked: dict[str, str] = field(default_factory=dict)
    """Subject of each check of the loaded model → sentence on its outcome."""
    loaded: str = ""
    """Hexadecimal SHA-256 of the loaded tensors and the configuration if transformers loaded them,
    while the field `digest` is then computed from the files; empty for a model of the engine."""
    is_open: bool = False
    """True for a model of transformers that also takes inputs longer than its context."""

    def within(self, window: int | None) -> "EvaluatedCheckpoint":
        """Return a copy of this EvaluatedCheckpoint whose longest input is `window` tokens, or this
        object itself if `window` is None.

        A window beyond the context adds a warning to the copy's `notes` and `checked` if the
        attribute `is_open` is true, and raises BadInput otherwise, as a window below 1 does.
        """
        context = self.model.seq_length
        notes = self.notes
        checked = self.checked
        if window is None:
            return self
        if window < 1:
            raise BadInput(f"the longest input is {window} tokens: give at least 1")
        if window > context:
            beyond = f"a window of {window:,} is beyond the model's context of {context:,}"
            if not self.is_open:
                raise BadInput(
                    f"{beyond}, where only models with rotary positions that are not dynamic go:"
                    f" give at most {context:,}"
                )
            warning = (
                f"{beyond}: its positions are computed there too, but it was not made for them"
            )
            notes = (*notes, warning)
            checked = checked | {"window": warning}
        return replace(
            self, model=replace(self.model, seq_length=window), notes=notes, checked=checked
        )

    @property
    def store(self) -> Store:
        """Function that opens this checkpoint's stored scores in the user's cache: `open_scores`
        with the directory and the digests of checkpoint and tokenizer filled in. The function takes
        a dict of everything else that decides an evaluation's scores, and returns a context manager
        that yields its StoredScores, from which scores are read and to which new ones are added."""
        return partial(
            open_scores, user_cache("scores"), self.loaded or self.digest, self.tokenizer.digest
        )

    def training_dataset(self) -> Path:
        """Return the directory of the single dataset that this checkpoint was trained on, as the
        manifest of its run names it. Raises DataMissing if the dataset is not on this machine or
        was changed, or if the checkpoint lies in no run that names a single dataset,
        IntegrityFailure if the run's manifest is damaged."""
        run = self.directory.parent.parent
        try:
            ((dataset, _),) = trained_datasets(run)
        except (BadInput, ValueError) as error:
            raise DataMissing(
                f"checkpoint {self.directory} lies in no run whose manifest names a single dataset:"
                " if it was saved in such a run, put it back into the run's folder `checkpoints`"
            ) from error
        return dataset


def open_checkpoint(
    place: Place, settings: Settings, row_by_row: bool = False
) -> EvaluatedCheckpoint:
    """Load the checkpoint, of any format, that `place` states with the backend that `settings`
    name, probe it, and return it as an EvaluatedCheckpoint. Every rank of the settings' layout
    calls it. With `row_by_row` the weights are laid out for one row at a time.

    Without a backend the engine computes checkpoints of this suite and of Megatron-LM, and in other
    formats each GPT-2 that it can; transformers computes every other model, after a warning on
    standard error if that is a GPT-2. If the checkpoint was removed meanwhile, its run's newest is
    loaded.

    Raises BadInput for files that are no checkpoint, a model that cannot be scored and settings
    that the backend does not take; ExtraMissing, a BadInput, if transformers, or gguf for a GGUF
    file, is needed and missing; IntegrityFailure for damaged files; and HardwareMissing if
    transformers is to load a model larger than memory.
    """
    evaluated = _load(place, settings, row_by_row)
    try:
        model, checked = probe(evaluated.model, evaluated.loaded or evaluated.digest)
    except BadInput as error:
        raise BadInput(f"{place.asked} cannot be scored: {error}") from error
    notes = (
        *evaluated.notes,
        *([checked["row by row"]] if model.is_alone or model.length_switch else []),
    )
    return replace(evaluated, model=model, checked=evaluated.checked | checked, notes=notes)


def _load(place: Place, settings: Settings, row_by_row: bool) -> EvaluatedCheckpoint:
    """Load, as `open_checkpoint` does, the checkpoint that `place` states, with the backend, layout
    and number format that `settings` name, and return it as an EvaluatedCheckpoint that is not
    probed. With `row_by_row` the weights are laid out for one row of a batch at a time. If the
    checkpoint's directory was removed meanwhile, the run's newest checkpoint is loaded. The first
    rank prints a warning to standard error if transformers computes a GPT-2 that the engine cannot.
    Raises BadInput for unfit settings or files that are no checkpoint, IntegrityFailure for damaged
    files, HardwareMissing for a model of transformers larger than memory."""
    mesh = build_mesh(settings.layout)
    directory = place.directory
    dtype = DTYPES[settings.dtype] if settings.dtype else None
    if settings.device and mesh.layout.world_size == 1:
        mesh = serial_mesh(_device(settings.device))
    is_ours = place.format != "transformers"
    if settings.backend == "transformers" and is_ours:
        raise BadInput(
            f"{directory} is not a Hugging Face directory: leave out --set backend=transformers, or"
            " make one, of this suite's checkpoint by `mlm-train export`, of another program's by"
            " `mlm-train import` and then `export`"
        )
    if settings.backend != "transformers" and (
        is_ours or settings.backend == "engine" or place.is_gpt2
    ):
        try:
            with native_checkpoint(place, settings.vocab, settings.heads) as native:
                return load_checkpoint(native, mesh, row_by_row, dtype)
        except (OSError, UserError) as reason:
            # A training may have removed the checkpoint meanwhile: its run's newest is found anew.
            if not directory.is_dir():
                return _load(Place.find(place.asked, settings.vocab), settings, row_by_row)
            if not isinstance(reason, BadInput):
                raise
            if is_ours or settings.backend == "engine":
                raise
            if mesh.is_first:
                print(
                    "warning: transformers computes this model, because the engine cannot:"
                    f" {reason}",
                    file=sys.stderr,
                )
    if mesh.layout.tp * mesh.layout.pp > 1 or settings.vocab or settings.heads:
        raise BadInput(
            f"{directory} is computed by transformers, which takes no tp, pp, vocab or heads: leave"
            " them out"
        )
    loaded = Pretrained(place, dtype or torch.float32, mesh.device)
    network = loaded.model
    tokenizer = loaded.tokenizer
    if not row_by_row:
        network.pack_weights()
    sizes = tokenizer.vocab_size, loaded.context, network.hidden_size
    model = ScoringModel(network, *sizes, dtype or torch.float32, mesh, network.length_switch)
    notes = [*loaded.warnings, *[SMOLLM2_NOTE] * (str(place.asked) == SMOLLM2)]
    return EvaluatedCheckpoint(
        directory,
        loaded.digest,
        tokenizer,
        model,
        "measured",
        network.num_parameters,
        tuple(notes),
        f"transformers: {network.kernel}",
        loaded.checked,
        loaded.loaded,
        loaded.is_open,
    )


def _device(name: str) -> torch.device:
    """Return the torch device called `name`. Raises BadInput for a kind of device other than `cpu`
    and `cuda`, or if this machine does not have the device."""
    if name.partition(":")[0] not in MAX_LOGIT_BYTES:
        raise BadInput(f"device {name} is not supported: give {' or '.join(MAX_LOGIT_BYTES)}")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadInput(
            f"there is no device {name} here, so leave device out or give another:"
            f" {str(error).partition(chr(10))[0]}"
        ) from error
    return device


def load_checkpoint(
    path: Path,
    mesh: ParallelMesh | None = None,
    row_by_row: bool = False,
    dtype: torch.dtype | None = None,
) -> EvaluatedCheckpoint:
    """Load a checkpoint of this suite from the directory `path`, or the newest checkpoint of a run
    there, and return it as an EvaluatedCheckpoint that is not probed. Weights are in `dtype`, or
    else in the number format in which they are stored.

    With a mesh, this rank's part is loaded, and every rank calls this; otherwise the whole model is
    loaded, on the GPU if there is one. Weights are laid out in memory for scoring many rows at a
    time, or with `row_by_row` a single row. Raises BadInput if `path` is no directory or a complete
    one of another kind, its configuration is refused, the mesh does not divide the model, the model
    does not predict each token from earlier ones, or there is no tokenizer or it lacks the token
    that ends a text, and IntegrityFailure if the directory is incomplete or damaged, or its
    tokenizer does not fit the model or restore every text.
    """
    mesh = mesh or serial_mesh(local_device())
    loaded = load_for_inference(path, mesh, as_stored=True)
    if not isinstance(loaded.model, CausalModel):
        raise BadInput(
            f"{path} is a {loaded.config.family}, which does not predict each token from those"
            " before it, so that no protocol can score it: name a checkpoint of another family"
        )
    tokenizer = Tokenizer.load(loaded.directory / "tokenizer")
    if tokenizer.vocab_size != loaded.config.vocab_size:
        sizes = f"{tokenizer.vocab_size} entries and its model {loaded.config.vocab_size}"
        raise IntegrityFailure(
            f"the tokenizer of {loaded.directory} has {sizes}: one of the two was replaced or"
            " damaged, so copy or save the checkpoint again"
        )
    if dtype:
        loaded.model.to(dtype)
    if change := tokenizer.changes():
        raise IntegrityFailure(
            f"the tokenizer of {loaded.directory} does not restore every text, which scores need:"
            f" {change}; if its files were changed, restore them, else score a model with another"
            " tokenizer"
        )
    if not row_by_row:
        pack_weights(loaded.model)
    model = ScoringModel(
        network=loaded.model,
        vocab_size=loaded.config.vocab_size,
        seq_length=loaded.config.seq_length,
        hidden_size=loaded.config.hidden_size,
        dtype=next(loaded.model.parameters()).dtype,
        mesh=mesh,
    )
    kind: Kind = "scaled" if read_object(loaded.directory / CONFIG).get("twin") else "measured"
    return EvaluatedCheckpoint(
        loaded.directory, loaded.digest, tokenizer, model, kind, parameter_count(loaded.config)
    )
