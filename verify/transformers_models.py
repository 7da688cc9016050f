"""Engine of a small causal model of transformers on its own DistributedConfig, for `mlm-verify
layouts transformers`."""

import ast
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.config import read_toml
from mlm_repro.lineage.errors import BadInput, did_you_mean
from mlm_repro.lineage.extras import import_extra
from mlm_repro.verify.parity import SERIAL, ParityLayout
from mlm_repro.verify.programs import HeldTraining

NONE_NEAR = "none is like it"
TABLES = read_toml(Path(__file__).with_name("small.toml"))
SMALL = TABLES["transformers"]
"""Values that make a model small, by the name of the configuration's field."""
ROWS = 8
LENGTH = 12


@contextmanager
def training(texts: Mapping[str, str], seed: int, microbatches: int) -> Iterator[HeldTraining]:
    """Context manager: yield the HeldTraining of a small causal model of transformers, on a random
    batch in `microbatches` on every rank. The model is saved with initial values drawn by `seed` in
    a folder that lasts as long as the block, and each rank loads its part. `texts` has fields of
    the model's configuration as texts by name, among them the architecture, `model_type`.
    Afterwards torch's generator is seeded with `seed`, and transformers reports errors alone.

    Raises BadInput if transformers is missing, for an architecture that is not a causal one of
    transformers, for a field that its configuration does not have, and for a model that
    transformers cannot build.
    """
    transformers, _, _ = (
        import_extra(name, "bench")  # once, before ranks are forked
        for name in (
            "transformers",
            "transformers.distributed",
            "torch.distributed.tensor.parallel",
        )
    )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = configured(transformers, texts)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        try:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
            model.save_pretrained(folder)
        except Exception as error:
            raise BadInput(
                f"transformers builds no {config.model_type}, so correct the fields of its"
                f" configuration or take another model: {type(error).__name__}: {error}"
            ) from error
        yield HeldTraining(Loaded(Path(folder)), batch_of(seed), token_loss, microbatches)


def configured(transformers: Any, texts: Mapping[str, str]) -> Any:
    """Return transformers' configuration of a small model without dropout; `texts` has fields of it
    as texts by name, which replace its own: among them its architecture, `model_type`. Raises
    BadInput if transformers has no causal architecture of that name, for a field that the
    architecture does not have, and for an architecture that cannot be made small."""
    kind, sizes = sizes_of(transformers, texts)
    try:
        return type(transformers.CONFIG_MAPPING[kind]().get_text_config())(**sizes)
    except Exception as error:
        raise BadInput(
            f"{kind} cannot be made small: {type(error).__name__}: {error}".splitlines()[0]
        ) from error


def sizes_of(transformers: Any, texts: Mapping[str, str]) -> tuple[str, JSON]:
    """Return an architecture's `model_type` and the settings of its small configuration, a dict by
    name, in which every dropout is 0. `texts` maps names of fields to texts: `model_type`, and
    settings that replace the small ones, dropouts too, and are read as Python literals where that
    is possible. Raises BadInput for a `model_type` that is no causal architecture of transformers,
    or for a field that its configuration does not have."""
    fields = dict(texts)
    kind = fields.pop("model_type", "")
    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if kind not in causal:
        raise BadInput(
            f"transformers has no causal architecture --with model_type={kind}:"
            f" {did_you_mean(kind, causal, NONE_NEAR)}"
        )
    config = transformers.CONFIG_MAPPING[kind]().get_text_config()
    known = config.to_dict()
    sizes: JSON = {name: value for name, value in SMALL.items() if known.get(name) is not None}
    if "qk_rope_head_dim" in sizes:
        # Latent attention rotates a part of a head, and makes keys and values for every head.
        sizes |= {name: value for name, value in TABLES["latent"].items() if name in known}
    sizes |= {name: 0.0 for name in known if name.endswith(("dropout", "pdrop")) and known[name]}
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if isinstance(known.get(name), list):
            sizes[name] = [*dict.fromkeys(known[name]), *known[name]][:2]
    sizes |= TABLES["architectures"].get(config.model_type, {})
    for name, text in fields.items():
        if not hasattr(config, name):
            raise BadInput(f"{kind} has no field {name!r}: {did_you_mean(name, known, NONE_NEAR)}")
        sizes[name] = literal(text)
    return kind, sizes


def literal(text: str) -> Any:
    """Return the value that a text has as a Python literal, such as a number; another text is
    returned as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError):
        return text


class Loaded:
    """Function that is called on every rank with a layout, and returns this rank's part of the
    model that is saved in `folder`, as a module in float64."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, layout: ParityLayout) -> nn.Module:
        """Return this rank's part of the saved model, in float64 and set to training. Every rank of
        `layout` calls it. Raises BadInput for a layout that transformers cannot state, ExtraMissing
        if transformers is missing; errors of transformers pass."""
        transformers = import_extra("transformers", "bench")
        # These implementations compute in float64.
        more: JSON = {
            "attn_implementation": "eager",
            "experts_implementation": "eager",
        }
        if layout != SERIAL:
            more["distributed_config"] = transformers.distributed.DistributedConfig(
                **axes_of(layout)
            )
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float64, **more
        )
        return model.train()


def axes_of(layout: ParityLayout) -> dict[str, int]:
    """Return `layout` as a dict of keyword arguments of transformers' DistributedConfig. `tp_size`,
    `fsdp_size` and `ep_size` are the layout's `tp`, `fsdp` and `ep`. The layout's `dp` counts
    copies of the parts that `fsdp` makes: it becomes `dp_replicate_size`, which is left out if it
    is 1, because transformers before 5.23 has no such argument. With `ep` above 1 and `fsdp` 1,
    `dp` becomes `fsdp_size` instead, and `dp_replicate_size` is left out.

    Raises BadInput for a layout with pp or cp above 1, sequence parallelism, a divided optimizer, a
    schedule other than 1F1B, recomputation or a size of microbatches.
    """
    if (
        layout.pp * layout.cp > 1
        or layout.sequence_parallel
        or layout.shard_optimizer
        or not layout.is_of_ranks
    ):
        raise BadInput(
            "transformers is run with tp, ep, fsdp and dp (copies of what fsdp divides): leave the"
            " other parts out of the layout's name"
        )
    axes = {"tp_size": layout.tp, "fsdp_size": layout.fsdp, "ep_size": layout.ep}
    if layout.ep > 1 and layout.fsdp == 1:
        axes["fsdp_size"] = layout.dp
    elif layout.dp > 1:  # releases before 5.23 have no such argument
        axes["dp_replicate_size"] = layout.dp
    return axes


def batch_of(seed: int) -> dict[str, Tensor]:
    """Return a batch, drawn by `seed`, as a dict for `token_loss`: `input_ids`, `attention_mask`
    and `labels`, int64 tensors [8, 12] with rows of unequal length. Padding and up to 3 tokens of a
    prompt have the label -100, and the last eighth of the vocabulary does not occur. `counted`,
    [8], is the number of labels other than -100 after the first position in the whole batch,
    repeated for each row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, SMALL["vocab_size"] * 7 // 8, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=generator)
    attended = torch.arange(LENGTH) < lengths
    prompt = torch.arange(LENGTH) < torch.randint(0, 4, (ROWS, 1), generator=generator)
    labels = tokens.masked_fill(~attended | prompt, -100)
    return {
        "input_ids": tokens.masked_fill(~attended, 0),
        "attention_mask": attended.long(),
        "labels": labels,
        "counted": (labels[:, 1:] >= 0).sum().expand(ROWS),
    }


def token_loss(model: nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of a microbatch, a scalar to differentiate: the sum of its labels'
    cross-entropies in nats, divided by the number of labels that so many rows have on average in
    the whole batch. The mean of this loss over equal microbatches is the mean over the batch's
    labels. `rows` are some or all rows of what `batch_of` returns, under the same keys."""
    logits = model(
        input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], use_cache=False
    ).logits
    labels = rows["labels"][:, 1:].flatten()
    total = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels, ignore_index=-100, reduction="sum"
    )
    return total * ROWS / (len(labels) // (LENGTH - 1)) / rows["counted"][0]
