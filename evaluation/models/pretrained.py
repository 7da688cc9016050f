"""Causal language models that transformers loads, behind the interface of the engine's models.

A directory or hub name of any architecture of `AutoModelForCausalLM`: safetensors, .bin files read
as weights alone, or one GGUF file. Code that comes with a model is never run. Only scored rows go
through the output layer.

Shapes: b requests, s inputs, q positions of a request, h hidden, v rows of the output layer.
"""

import hashlib
import math
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from mlm_repro.engine.kernels.products import linear
from mlm_repro.engine.model.cache import rows_at
from mlm_repro.engine.published import CONFIG
from mlm_repro.engine.torch_names import onednn
from mlm_repro.evaluation.models.places import Place, weight_files
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.digest import sha256_file, sha256_json
from mlm_repro.lineage.environment import available_cores, memory_bytes
from mlm_repro.lineage.errors import BadInput, HardwareMissing, IntegrityFailure, UserError
from mlm_repro.lineage.extras import import_extra
from mlm_repro.lineage.files import one_line, read_object
from mlm_repro.lineage.remembered import answers_on_files

EXTRA = "transformers"
WRAPPED = "_orig_mod."
"""Prefix of the names of weights that torch.compile saved."""
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Configuration keys that may hold the number of layers."""
MOST_LAYERS = 10_000
"""Largest number of layers accepted: transformers makes a list entry and then a module for each."""
CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)
UNLIMITED = 2048
"""Context, in tokens, of an architecture that states no longest input."""
CHECKED = 8
"""Number of tokens on which the output layer is compared with the whole model, and a merged adapter
with an unmerged one."""
MERGED = {4: 1e-4, 2: 0.05}
"""Size in bytes of a logit's number format → largest accepted change of a logit by merging an
adapter, as a share of the largest logit."""


class PretrainedTokenizer:
    """A model's own tokenizer, which transformers loads, with the interface that tasks use. It
    recognises special tokens that occur literally in a text."""

    def __init__(self, theirs: Any, files: dict[str, str]) -> None:
        self._theirs = theirs
        self.digest = sha256_json(files)
        ids = set(theirs.get_vocab().values())
        self.vocab_size = max(ids) + 1
        alone = self.encode("a text")
        added = list(theirs("a text", verbose=False).input_ids)
        starts = (at for at in range(len(added)) if alone and added[at : at + len(alone)] == alone)
        around = ((added[:at], added[at + len(alone) :]) for at in starts)
        self.first_tokens, self.last_tokens = map(tuple, next(around, ((), ())))
        """Tokens that the tokenizer puts before and after every text. Scoring uses only the
        first."""
        end = theirs.eos_token_id if theirs.eos_token_id is not None else theirs.bos_token_id
        self.end_of_text: int = theirs.sep_token_id or 0 if end is None else end
        start = theirs.bos_token_id if theirs.bos_token_id is not None else self.end_of_text
        self.document_start: int = start
        special = {
            str(added_token): token
            for token, added_token in theirs.added_tokens_decoder.items()
            if added_token.special
        }
        self.special_tokens = {self.decode([self.end_of_text]): self.end_of_text} | special

    def encode(self, text: str) -> list[int]:
        """Return a list of the token ids of a text, without the tokens that the tokenizer would
        add."""
        ids: list[int] = self._theirs(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return a list of token ids for each text, without the tokens that the tokenizer would
        add."""
        return [self.encode(text) for text in texts]

    def spell_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return a list of token ids for each text, where a literal special token is spelled in
        sub-words like any other text. The tokenizer adds no tokens."""
        settings = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return [self._theirs(text, **settings).input_ids for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a sequence of token ids: special tokens are in it, and no space is
        cleaned up."""
        numbers = [int(token) for token in ids]
        return str(
            self._theirs.decode(
                numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


class PretrainedModel(nn.Module):
    """A model of transformers, `theirs`, which the caller has put into evaluation mode, with the
    interface by which scoring uses the engine's models. Its states are the inputs of its output
    layer, or its logits if that layer alone does not produce them; the attribute `cuts` is False
    then. The constructor runs the model once or twice on test tokens to set `cuts`."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs
        self.config = theirs.config
        self.num_parameters = sum(parameter.numel() for parameter in theirs.parameters())
        self._head = theirs.get_output_embeddings()
        self._some = (
            torch.arange(CHECKED, device=theirs.device)[None]
            % theirs.config.get_text_config().vocab_size
        )
        with torch.inference_mode():
            logits = self._run(self._some)[1]
            self.cuts = self._head is not None and self._head_is_whole(logits)

    def _head_is_whole(self, logits: Tensor) -> bool:
        """Return True if the output layer alone turns its inputs into `logits` [1, q, v], which the
        whole model computed of the test tokens, within 1e-5. False also if the model fails when it
        is run without that layer."""
        try:
            states = self._run(self._some, cuts=True)[0]
        # A model that reshapes its logits cannot do so with the empty ones of a cut layer.
        except (RuntimeError, IndexError, ValueError):
            return False
        return states is not None and torch.allclose(
            self._head(states).float(), logits.float(), atol=1e-5
        )

    @torch.inference_mode()
    def pack_weights(self) -> None:
        """Put float32 weights of this model's plain linear layers, except the output layer, into
        oneDNN's order, in place, and run the model once on test tokens. Weights on a GPU, or on a
        CPU without AVX-512 or oneDNN, keep their order. If that run fails with a RuntimeError,
        because the model reads a weight itself, all weights are put back. Products of several rows
        get faster, products of a single row slower. The last bits change."""
        modules = [
            layer
            for layer in self.theirs.modules()
            if type(layer) is nn.Linear and layer is not self._head
        ]
        plain = {layer: layer.weight for layer in modules if layer.weight.dtype == torch.float32}
        for module, weight in plain.items():
            module.weight = packed(weight)
            vars(module)["forward"] = partial(_multiply, module)
        try:
            self._run(self._some)
        except RuntimeError:
            for module, weight in plain.items():
                module.weight = weight
                del vars(module)["forward"]

    @property
    def kernel(self) -> str:
        """Name of the model's class and of its implementation of attention, as one text such as
        `GPT2LMHeadModel, sdpa attention`: the last bits of scores depend on both."""
        return (
            f"{type(self.theirs).__name__}, {getattr(self.config, '_attn_implementation', None)}"
            " attention"
        )

    @property
    def length_switch(self) -> int:
        """Longest input, in tokens, whose positions are read in one way, while longer ones are read
        in another (longrope); 0 without such a switch."""
        switches = (
            rope["original_max_position_embeddings"]
            for rope in self._ropes
            if rope["rope_type"] == "longrope"
        )
        return int(next(switches, 0))

    @property
    def computes_positions(self) -> bool:
        """True if this model's positions are rotary and each is computed by itself, so that inputs
        may exceed the context.

        A dynamic position depends on the longest input before it; a table of learned positions ends
        with the context.
        """
        kinds = {rope["rope_type"] for rope in self._ropes}
        return bool(kinds) and "dynamic" not in kinds

    @property
    def _ropes(self) -> list[JSON]:
        """List of the settings of rotary positions in the configuration, each a dict: one, or one
        for each kind of layer. Empty for a model without such positions."""
        rope = getattr(self.config.get_text_config(), "rope_parameters", None) or {}
        return [
            settings
            for settings in (rope, *rope.values())
            if isinstance(settings, dict) and "rope_type" in settings
        ]

    @property
    def hidden_size(self) -> int:
        """Length of a state vector of this model: the output layer's input length, or the size of
        the vocabulary if states are logits."""
        return int(
            self._head.weight.size(1) if self.cuts else self.config.get_text_config().vocab_size
        )

    def forward(self, inputs: Tensor, cache: Any = None) -> Tensor:
        """Return the states [s, b, h] of token ids [b, s], h being the attribute `hidden_size`: the
        output layer's inputs, or, if the attribute `cuts` is False, the logits [s, b, v] in their
        place. With `cache`, a cache of transformers, the tokens continue the cached ones and are
        added to it; by default there is none."""
        settings = {} if cache is None else {"past_key_values": cache, "use_cache": True}
        states, logits = self._run(inputs, cuts=self.cuts, **settings)
        return (logits if states is None else states).transpose(0, 1)

    def hidden_states_at(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Run the model on token ids [b, s] and return the states [q, b, h] at the indices
        `positions` [b, q] of inputs: the output layer's inputs or, if the attribute `cuts` is
        False, the logits themselves."""
        return rows_at(self.forward(inputs), positions)

    def new_cache(self) -> Any:
        """Return an empty key-value cache of transformers for this model."""
        return import_extra("transformers", EXTRA).DynamicCache(config=self.config)

    def logits(self, states: Tensor) -> Tensor:
        """Turn states [..., h] into logits [..., v] by the output layer. If this model's states are
        logits already, return a copy of them."""
        return self._head(states) if self.cuts else states.clone()

    def _run(
        self, inputs: Tensor, cuts: bool = False, **settings: Any
    ) -> tuple[Tensor | None, Tensor]:
        """Run the model on token ids [b, s] and return a pair. If the argument `cuts` is True, the
        model must have an output layer, and the pair is the inputs of that layer, [b, s, h], and
        empty logits. If it is False, or if the model does not call that layer, the pair is None and
        the logits, [b, s, v]. `settings` are further keyword arguments of the model's call."""
        states = []

        def cut(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            states.append(given[0])
            return (given[0][:, :0],)

        handle = self._head.register_forward_pre_hook(cut) if cuts else None
        try:
            logits = self.theirs(input_ids=inputs, **{"use_cache": False, **settings}).logits
        finally:
            if handle:
                handle.remove()
        return (states[0] if states else None), logits


def packed(weight: Tensor) -> nn.Parameter:
    """Return a layer's weight as a parameter without a gradient. On a CPU with AVX-512 and oneDNN,
    a weight in float32 or bfloat16 is copied into oneDNN's own order, which only the function
    `linear` of engine/kernels/products.py takes. Any other weight keeps its order and is not
    copied."""
    is_ordered = (
        onednn and weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    )
    ordered = (
        onednn._reorder_linear_weight(weight.detach(), None) if is_ordered else weight.detach()
    )
    return nn.Parameter(ordered, requires_grad=False)


def _multiply(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


class Pretrained:
    """A transformers model and its tokenizer, loaded from a checkpoint's place and checked. The
    attributes `model` and `tokenizer` are ready to score: the model is on its device, with dropout
    off. `context` is the number of inputs that its configuration states, UNLIMITED if it states
    none; if `is_open` is true, the model also takes longer inputs. `checked` is a dict from the
    subject of a check to a sentence for the user on its outcome; `warnings` is a list of sentences
    on what is ignored or read in another way. `digest` is the hexadecimal SHA-256 of the files, and
    `loaded` that of the configuration and the tensors that were loaded."""

    def __init__(self, place: Place, dtype: torch.dtype, device: torch.device) -> None:
        """Load the model and tokenizer of `place`, which `Place.find` returned, with weights in
        `dtype` on `device`, into the attributes `model` and `tokenizer`, examine both, and silence
        transformers' messages. Raises BadInput for a model that cannot be read this way or a
        missing package, IntegrityFailure for damaged files, HardwareMissing, before weights are
        read, for a model larger than memory."""
        self.directory = place.directory
        self._adapter = place.adapter
        library = import_extra("transformers", EXTRA)
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
        self._weights = weight_files(self.directory, place.gguf)
        self._settings: JSON = {"local_files_only": True, "trust_remote_code": False}
        self.checked: dict[str, str] = {}
        """Subject of a check of the model or its files → sentence on its outcome."""
        self.warnings: list[str] = []
        """Sentences on parts of the model or its files that are ignored or read in another way."""
        if self._weights[0].suffix == ".gguf":
            import_extra("gguf", "smollm2")
            self._settings["gguf_file"] = self._weights[0].name
        stated_config = (
            read_object(self.directory / CONFIG) if (self.directory / CONFIG).is_file() else {}
        )
        too_many = [
            stated_config[key]
            for key in LAYER_KEYS
            if isinstance(stated_config.get(key), int) and stated_config[key] > MOST_LAYERS
        ]
        if too_many:
            raise BadInput(
                f"{self.directory / CONFIG} says {too_many[0]:,} layers, and a model of more than"
                f" {MOST_LAYERS:,} is not loaded: correct that file, or name another model"
            )
        config = self._read(library.AutoConfig, "configuration")
        self._check_kind(library, config, stated_config)
        self._check_size(library, config, dtype, device)
        theirs = self._read(library.AutoTokenizer, "tokenizer")
        self.tokenizer = PretrainedTokenizer(theirs, self._digests(False))
        if self.tokenizer.vocab_size > (rows := config.get_text_config().vocab_size):
            ids = (
                f"the tokenizer of {self.directory} has ids up to {self.tokenizer.vocab_size - 1:,}"
            )
            raise IntegrityFailure(
                f"{ids}, but the model has an embedding of {rows:,} rows: one of the two is of"
                " another model, so copy the whole directory again"
            )
        if padding := rows - self.tokenizer.vocab_size:
            left = (
                f"{padding:,} rows of the embedding stand for no sub-word: they are left out of the"
                " softmax"
            )
            self._say("padding", f"{left}, in which transformers' own loop has them")
        if last := self.tokenizer.last_tokens:
            put = f"the tokenizer puts {self.tokenizer.decode(last)!r} after every text"
            self._say(
                "last tokens",
                f"{put}: it is left out, and programs that leave it there score it too",
            )
        if getattr(config, "n_ctx", 0) and self._weights[0].suffix == ".gguf":
            # transformers leaves n_positions of a GPT-2 from GGUF at its default, 1,024.
            config.n_positions = config.n_ctx
        self._settings["config"] = config
        loaded = self._adapted(self._load(library, dtype))
        self.loaded = self._examine(loaded)
        """Hexadecimal SHA-256 of the configuration and of the tensors that were loaded."""
        try:
            self.model = PretrainedModel(loaded.to(device).eval())
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise BadInput(
                f"{self.directory} is loaded but fails inside transformers: {one_line(error)}; try"
                " a fresh copy of the model, or another release of transformers"
            ) from error
        whole = "equals the whole model on scored rows"
        own = "the model's own logits, which it changes"
        self.checked["output layer"] = whole if self.model.cuts else own
        lengths = (getattr(config.get_text_config(), key, None) for key in CONTEXT_KEYS)
        stated = next(
            (length for length in lengths if isinstance(length, int) and length > 0), None
        )
        self.context = stated or UNLIMITED
        self.is_open = not stated or self.model.computes_positions
        """True for a model that also takes inputs longer than its context."""

    @cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 over names and digests of the checkpoint's files: its weights, all
        .json, .txt and .model files beside them, and every file of its adapter, in place of a file
        of the same name."""
        return sha256_json(self._digests(True))

    def _digests(self, with_weights: bool) -> dict[str, str]:
        """Return a dict file name → hexadecimal SHA-256. The files are all .json, .txt and .model
        files in the model's directory but config.json, and a GGUF file, which has the tokenizer in
        it.

        With `with_weights` also config.json, all weights and the adapter's files, which replace
        files of the same name. All digests are cached.
        """
        files = [
            path
            for path in sorted(self.directory.iterdir())
            if path.suffix in (".json", ".txt", ".model")
        ]
        files = [path for path in files if with_weights or path.name != CONFIG]
        chosen = (
            [*files, *self._weights]
            if with_weights or self._weights[0].suffix == ".gguf"
            else files
        )
        if with_weights and self._adapter:
            chosen += sorted(self._adapter.iterdir())
        with answers_on_files("weights", "SHA-256", sha256_file) as digest_of_file:
            return {path.name: digest_of_file(path) for path in chosen if path.is_file()}

    def _read(self, reader: Any, what: str) -> Any:
        """Return the configuration or the tokenizer in the directory of this model's checkpoint as
        the transformers class `reader` loads it. `what` is its name in errors. Raises BadInput if
        it cannot be read."""
        try:
            return reader.from_pretrained(self.directory, **self._settings)
        except Exception as error:  # the library raises errors of many kinds
            raise self._explained(error, what) from error

    def _explained(self, error: Exception, what: str) -> UserError:
        """Return, without raising it, an error whose message says in one sentence that `what`, such
        as `weights`, could not be read because of `error`: BadInput if packages are missing or the
        model needs code of its own, otherwise IntegrityFailure for weights and BadInput for all
        else."""
        if "trust_remote_code" in str(error) or "custom code" in str(error):
            return BadInput(f"{self.directory} needs code of its own, which is never run here")
        if isinstance(error, ImportError):
            return BadInput(
                f"to read the {what} of {self.directory} a package is missing: {one_line(error)}"
            )
        kind = IntegrityFailure if what == "weights" else BadInput
        return kind(
            f"the {what} of {self.directory} cannot be read by transformers: {one_line(error)}"
        )

    def _check_kind(self, library: Any, config: Any, stated: JSON) -> None:
        """Raise BadInput if transformers has no causal language model of the type of `config`, the
        model's configuration, or if `config` is an encoder-decoder's. That the model sees earlier
        tokens alone is not checked. If `stated`, the content of the model's config.json as a dict,
        names modeling code, which is never run, append a sentence that warns of this to this
        object's list `warnings` and put it into the dict `checked`, under `modeling code`.
        `library` is the module transformers."""
        names = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if config.model_type not in names or config.is_encoder_decoder:
            kind = f"{self.directory} is a {config.model_type}"
            raise BadInput(
                f"{kind}, which does not predict tokens from the earlier ones alone: give a causal"
                " language model"
            )
        if stated.get("auto_map"):
            own = (
                "modeling code that comes with it is never run: transformers' own"
                f" {config.model_type} computes it"
            )
            self._say("modeling code", own)

    def _say(self, what: str, outcome: str) -> None:
        """Store `outcome`, a sentence on the outcome of a check, in the dict attribute `checked`
        under `what`, the check's subject, and append the same sentence to the list attribute
        `warnings`."""
        self.checked[what] = outcome
        self.warnings.append(outcome)

    def _check_size(
        self, library: Any, config: Any, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise HardwareMissing if the weights of a model of `config`, in `dtype`, are larger than
        the memory of `device`, and BadInput if transformers cannot build such a model. No memory is
        taken for weights."""
        try:
            with torch.device("meta"):
                count = library.AutoModelForCausalLM.from_config(
                    config, trust_remote_code=False
                ).num_parameters()
        except Exception as error:  # the library raises errors of many kinds
            raise self._explained(error, "configuration") from error
        is_gpu = device.type == "cuda"
        size = count * dtype.itemsize / 2**30
        available = (
            torch.cuda.mem_get_info(device)[1] if is_gpu else memory_bytes() or math.inf
        ) / 2**30
        if size > available:
            needed = f"{count:,} parameters, {size:,.1f} GiB in {str(dtype).removeprefix('torch.')}"
            raise HardwareMissing(
                f"{self.directory} has {needed}, and the {'GPU' if is_gpu else 'machine'} has"
                f" {available:,.1f} GiB: take a larger one, or --set dtype=bf16, half of float32"
            )

    def _load(self, library: Any, dtype: torch.dtype, **renamed: Any) -> Any:
        """Return the transformers model of this checkpoint on the CPU, with its weights in `dtype`;
        the weights of a quantised model may stay in their own formats. Raises IntegrityFailure if a
        tensor is missing, of another shape or belongs to another model, or if the weights cannot be
        read, and BadInput if a package is missing or the model needs code of its own.

        Names that torch.compile prefixed are read without the prefix: this method then calls itself
        with `renamed`, which other callers leave out. Unused tensors and quantisation are noted in
        `checked` and `warnings`.
        """
        # Read now, because the library may remove it while loading.
        scheme = self._settings["config"].to_dict().get("quantization_config")
        try:
            model, report = library.AutoModelForCausalLM.from_pretrained(
                self.directory,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **self._settings,
                **renamed,
            )
        except Exception as error:  # the library raises errors of many kinds
            raise self._explained(error, "weights") from error
        missing = sorted(report["missing_keys"])
        left = sorted(report["unexpected_keys"])
        if missing and not renamed and any(name.startswith(WRAPPED) for name in left):
            self._say("names", f"{WRAPPED!r} of torch.compile is left out of the weights' names")
            return self._load(library, dtype, key_mapping={f"^{WRAPPED}": ""})
        others = [
            f"tensor {name!r} is {[*theirs]} in the file and {[*ours]} in the model of its"
            " configuration"
            for name, theirs, ours in sorted(report["mismatched_keys"])
        ]
        if wrong := [f"tensor {name!r} is missing" for name in missing] + others:
            raise IntegrityFailure(
                f"{self.directory}: {wrong[0]} ({len(wrong)} such), so the weights are incomplete"
                " or of another model than the configuration: copy both again"
            )
        self.checked["weights"] = "the file's tensors are the model's"
        if left:
            foreign = [name for name in left if name.startswith(f"{model.base_model_prefix}.")]
            unused = (
                f"tensor {(foreign or left)[0]!r} is in the file, but not in the model of its"
                f" configuration ({len(left)} such)"
            )
            if foreign:
                raise IntegrityFailure(
                    f"{self.directory}: {unused}, so weights and configuration do not belong"
                    " together: save both again from one model"
                )
            self._say("weights", f"{unused}; it is left out")
        if scheme := scheme or model.config.to_dict().get("quantization_config"):
            is_read = all(parameter.dtype == dtype for parameter in model.parameters())
            formats = f"read into {dtype}" if is_read else "computed in its own formats"
            method = getattr(scheme.get("quant_method"), "value", scheme.get("quant_method"))
            self._say("quantisation", f"its configuration says {method}: weights are {formats}")
        return model

    def _adapted(self, model: Any) -> Any:
        """Merge the adapter that the checkpoint's place has, if any, into the weights of `model`, a
        transformers model, which are changed, and return the model; without an adapter return it as
        it is.

        The merged model's logits are compared with the unmerged one's; if they are the same but for
        rounding, the attributes `checked` and `warnings` get a sentence about the merge. Raises
        BadInput if they differ by more, or if peft is missing or cannot merge the adapter. An
        output layer that shares the embedding's weights gets its own first, since an adapter may
        change one of the two.
        """
        if not self._adapter:
            return model
        tokens = {
            "input_ids": torch.arange(CHECKED)[None] % model.config.get_text_config().vocab_size
        }
        try:
            with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
                warnings.simplefilter("ignore")
                adapted = (
                    import_module("peft").PeftModel.from_pretrained(model, self._adapter).eval()
                )
                beside = model(**tokens, use_cache=False).logits
                head = model.get_output_embeddings()
                if head.weight is model.get_input_embeddings().weight:
                    getattr(head, "base_layer", head).weight = nn.Parameter(head.weight.clone())
                merged = adapted.merge_and_unload()
                differs = (
                    merged(**tokens, use_cache=False).logits - beside
                ).abs().max() / beside.abs().max()
        except Exception as error:  # the library raises errors of many kinds
            raise BadInput(
                f"the adapter {self._adapter} cannot be scored, because peft cannot merge it into"
                f" the model's weights: {one_line(error)}; take another adapter, or the model"
                " without it"
            ) from error
        if not differs <= MERGED[beside.itemsize]:
            raise BadInput(
                f"the adapter {self._adapter} cannot be scored: merged into the model's weights it"
                " gives other logits than beside them; take another adapter, or the model without"
                " it"
            )
        self._say(
            "adapter",
            f"the adapter of {self._adapter.name} is merged into the weights, with the same logits",
        )
        return merged

    def _examine(self, model: Any) -> str:
        """Return the hexadecimal SHA-256 of a transformers model's configuration and of the tensors
        of its `state_dict`, where a shared tensor counts once. Raises IntegrityFailure for a
        floating-point tensor of more than 8 bits with values that are not finite."""

        def digest(name: str, tensor: Tensor) -> tuple[str, str]:
            is_number = tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel()
            # aminmax passes NaN on, and takes a tenth of the time of isfinite on every element.
            if is_number and not torch.stack(torch.aminmax(tensor)).isfinite().all():
                raise IntegrityFailure(
                    f"{self.directory}: tensor {name!r} holds values that are not finite numbers:"
                    " the training diverged, or the file is damaged; evaluate an earlier checkpoint"
                    " or an undamaged copy"
                )
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return (
                name,
                f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content.data).hexdigest()}",
            )

        tied = {
            (tensor.data_ptr(), tensor.shape): (name, tensor)
            for name, tensor in model.state_dict().items()
        }
        with ThreadPoolExecutor(available_cores()) as pool:
            digests = dict(pool.map(lambda pair: digest(*pair), tied.values()))
        return sha256_json({**digests, "": model.config.to_json_string(use_diff=False)})
