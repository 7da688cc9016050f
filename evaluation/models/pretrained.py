"""Causal language models that transformers loads, behind the interface of the engine's models.

A directory or hub name of any architecture of `AutoModelForCausalLM`: safetensors, .bin files read as weights alone, or
one GGUF file. Code that comes with a model is never run. Only scored rows go through the output layer.

Shapes: b requests, s inputs, q positions of a request, h hidden, v rows of the output layer.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mlm_repro.engine.kernels.products import linear
from mlm_repro.engine.model.cache import rows_at
from mlm_repro.engine.published import CONFIG
from mlm_repro.engine.torch_names import onednn
from mlm_repro.evaluation.models.places import weight_files
from mlm_repro.lineage.digest import sha256_file, sha256_json
from mlm_repro.lineage.environment import memory_bytes
from mlm_repro.lineage.errors import BadInput, HardwareMissing, IntegrityFailure
from mlm_repro.lineage.extras import import_extra
from mlm_repro.lineage.files import read_object

EXTRA = "transformers"
WRAPPED = "_orig_mod."
"""Prefix of the names of weights that torch.compile saved."""
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length")
UNLIMITED = 2048
"""Context of an architecture without a longest input."""
CHECKED = 8
"""Tokens on which the output layer is compared with the whole model."""


class PretrainedTokenizer:
    """The tokenizer that comes with a model, which recognises special tokens that stand in a text."""

    def __init__(self, theirs: Any, files: dict[str, str]) -> None:
        self._theirs = theirs
        self.digest = sha256_json(files)
        ids = set(theirs.get_vocab().values())
        self.vocab_size = max(ids) + 1
        added = theirs.build_inputs_with_special_tokens([]) if not theirs.is_fast else theirs("").input_ids
        beginning = [token for token in added if token != theirs.eos_token_id or token == theirs.bos_token_id]
        self.first_token: int | None = beginning[0] if beginning else None
        end = theirs.eos_token_id if theirs.eos_token_id is not None else theirs.bos_token_id
        self.end_of_text: int = theirs.sep_token_id or 0 if end is None else end
        start = theirs.bos_token_id if theirs.bos_token_id is not None else self.end_of_text
        self.document_start: int = start if self.first_token is None else self.first_token

    def encode(self, text: str) -> list[int]:
        """The ids of a text; nothing is added."""
        ids: list[int] = self._theirs(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def encode_ids(self, text: str) -> NDArray[np.int32]:
        """The ids as an array."""
        return np.asarray(self.encode(text), np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        numbers = [int(token) for token in ids]
        return str(self._theirs.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class PretrainedModel(nn.Module):
    """A model of transformers. States are the inputs of its output layer; its logits where it changes these."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs, self.config = theirs, theirs.config
        self.num_parameters = sum(parameter.numel() for parameter in theirs.parameters())
        self._head = theirs.get_output_embeddings()
        self._some = torch.arange(CHECKED, device=theirs.device)[None] % theirs.config.get_text_config().vocab_size
        with torch.inference_mode():
            logits = self._run(self._some)[1]
            self._cuts = self._head is not None
            states = self._run(self._some, cuts=True)[0] if self._cuts else None
            self._cuts = states is not None and torch.allclose(self._head(states).float(), logits.float(), atol=1e-5)

    @torch.inference_mode()
    def pack_weights(self) -> None:
        """Put float32 weights of plain linear layers into oneDNN's order, unless the model reads a weight itself.

        Products of several rows get faster, products of a single row slower. The last bits change.
        """
        modules = [each for each in self.theirs.modules() if type(each) is nn.Linear and each is not self._head]
        plain = {each: each.weight for each in modules if each.weight.dtype == torch.float32}
        if not onednn or self.theirs.device.type != "cpu":
            return
        for module, weight in plain.items():
            module.weight = nn.Parameter(onednn._reorder_linear_weight(weight.detach(), None), requires_grad=False)
            vars(module)["forward"] = partial(_multiply, module)
        try:
            self._run(self._some)
        except RuntimeError:
            for module, weight in plain.items():
                module.weight = weight
                del vars(module)["forward"]

    @property
    def hidden_size(self) -> int:
        """Length of a state."""
        return int(self._head.weight.size(1) if self._cuts else self.config.get_text_config().vocab_size)

    def forward(self, inputs: Tensor, cache: Any = None) -> Tensor:
        """Token ids [b, s] → states [s, b, h]; with transformers' cache the tokens are those after it."""
        settings = {} if cache is None else {"past_key_values": cache, "use_cache": True}
        states, logits = self._run(inputs, cuts=self._cuts, **settings)
        return (logits if states is None else states).transpose(0, 1)

    def hidden_states_at(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """The states at positions [b, q], [q, b, h]."""
        return rows_at(self.forward(inputs), positions)

    def new_cache(self) -> Any:
        """An empty cache of keys and values."""
        return import_extra("transformers", EXTRA).DynamicCache(config=self.config)

    def logits(self, states: Tensor) -> Tensor:
        """States [..., h] → logits [..., v]."""
        made: Tensor = self._head(states) if self._cuts else states.clone()
        return made

    def _run(self, inputs: Tensor, cuts: bool = False, **settings: Any) -> tuple[Tensor | None, Tensor]:
        """Inputs of the output layer, if it is to be cut off, and the logits, which are none then."""
        states: list[Tensor] = []

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


def _multiply(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


class Pretrained:
    """A model of transformers with its tokenizer, loaded from a directory."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises BadInput for a model that cannot be read this way, IntegrityFailure for damaged files, HardwareMissing
        for one that is larger than memory, before its weights are read."""
        self.directory, library = directory, import_extra("transformers", EXTRA)
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
        weights = weight_files(directory)
        self._settings: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        if weights[0].suffix == ".gguf":
            import_extra("gguf", "smollm2")
            self._settings["gguf_file"] = weights[0].name
        config = self._read(library.AutoConfig, "configuration")
        self._check_kind(library, config)
        self._check_size(library, config, dtype, device)
        theirs = self._read(library.AutoTokenizer, "tokenizer")
        self.tokenizer = PretrainedTokenizer(theirs, self._digests(weights, False))
        if self.tokenizer.vocab_size > (rows := config.get_text_config().vocab_size):
            ids = f"the tokenizer of {directory} has ids up to {self.tokenizer.vocab_size - 1:,}"
            raise IntegrityFailure(f"{ids}, but the model has an embedding of {rows:,} rows")
        self.padding = rows - self.tokenizer.vocab_size
        self.model = PretrainedModel(self._load(library, dtype).to(device).eval())
        lengths = (getattr(config.get_text_config(), key, None) for key in CONTEXT_KEYS)
        self.context = next((length for length in lengths if isinstance(length, int) and length > 0), UNLIMITED)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the SHA-256s of configuration, weights and tokenizer."""
        return sha256_json(self._digests(weight_files(self.directory), True))

    def _digests(self, weights: Sequence[Path], with_weights: bool) -> dict[str, str]:
        files = [path for path in sorted(self.directory.iterdir()) if path.suffix in (".json", ".txt", ".model")]
        files = [path for path in files if with_weights or path.name != CONFIG]
        chosen = [*files, *weights] if with_weights or weights[0].suffix == ".gguf" else files
        return {path.name: sha256_file(path) for path in chosen if path.is_file()}

    def _read(self, reader: Any, what: str) -> Any:
        try:
            return reader.from_pretrained(self.directory, **self._settings)
        except Exception as error:  # the library raises errors of many kinds
            raise self._explained(error, what) from error

    def _explained(self, error: Exception, what: str) -> Exception:
        first = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        if "trust_remote_code" in str(error) or "custom code" in str(error):
            return BadInput(f"{self.directory} needs code of its own, which is never run here")
        if isinstance(error, ImportError):
            return BadInput(f"the {what} of {self.directory} needs a library: {first}")
        return BadInput(f"the {what} of {self.directory} cannot be read by transformers: {first}")

    def _check_kind(self, library: Any, config: Any) -> None:
        names = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        said = read_object(self.directory / CONFIG) if (self.directory / CONFIG).is_file() else {}
        made, kind = (said.get("architectures") or [""])[0], config.model_type
        sees_all = kind in ("bert", "roberta", "electra") and not getattr(config, "is_decoder", False)
        if kind not in names or config.is_encoder_decoder or sees_all:
            raise BadInput(f"{self.directory} is a {made or kind}, which does not predict tokens from earlier ones")

    def _check_size(self, library: Any, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        with torch.device("meta"), suppress(ImportError):
            empty = library.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            count = sum(parameter.numel() for parameter in empty.parameters())
        needed = count * dtype.itemsize
        here = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else memory_bytes()
        if here and needed > here:
            size = f"{needed / 2**30:,.1f} GiB in {str(dtype).removeprefix('torch.')}"
            has = f"the {'GPU' if device.type == 'cuda' else 'machine'} has {here / 2**30:,.1f} GiB"
            raise HardwareMissing(f"{self.directory} has {count:,} parameters, {size}, and {has}")

    def _load(self, library: Any, dtype: torch.dtype, **renamed: Any) -> Any:
        try:
            model, said = library.AutoModelForCausalLM.from_pretrained(
                self.directory, dtype=dtype, output_loading_info=True, **self._settings, **renamed
            )
        except Exception as error:  # the library raises errors of many kinds
            raise IntegrityFailure(str(self._explained(error, "weights"))) from error
        missing = sorted(said["missing_keys"])
        if missing and not renamed and any(name.startswith(WRAPPED) for name in said["unexpected_keys"]):
            print(f"warning: {WRAPPED!r} of torch.compile is left out of the weights' names", file=sys.stderr)
            return self._load(library, dtype, key_mapping={f"^{WRAPPED}": ""})
        if missing or said["mismatched_keys"]:
            name = missing[0] if missing else next(iter(said["mismatched_keys"]))[0]
            what = f"tensor {name!r} is {'missing' if missing else 'of another shape'}"
            count = max(len(missing), len(said["mismatched_keys"]))
            raise IntegrityFailure(f"{self.directory}: {what} ({count} such tensors)")
        for name, parameter in model.named_parameters():
            if not torch.isfinite(parameter).all():
                raise IntegrityFailure(f"{self.directory}: tensor {name!r} holds values that are not finite numbers")
        return model
