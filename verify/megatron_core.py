"""Engine of Megatron-Core: its GPTModel, data order, optimizer, clipping and schedule, on CPU
ranks."""

import copy
import inspect
import logging
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, partialmethod
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

from mlm_repro.engine.compare.recorder import Recorder, read_names
from mlm_repro.engine.data.batches import place_groups
from mlm_repro.engine.optim.precision import DTYPES
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.extras import import_extra
from mlm_repro.verify.engines import Engine, Named, Shard, Weights, Work, saved_buffers
from mlm_repro.verify.parity import ParityLayout

PATCHES = (
    (
        "tensors that it makes on `cuda` or moves there are made and stay on the CPU, and their"
        " type says cuda"
    ),
    "torch.cuda.current_device is the CPU, streams and events of torch.cuda wait for nothing",
    "the generator states that it keeps for dropout are those of the CPU's generator",
    "torch.compile, with which it fuses bias and GeLU, leaves functions as they are",
    "the router of experts finds the name te_general_gemm, as None, without Transformer Engine",
    "the processes that write its checkpoints are forked",
    "attention without Transformer Engine takes values of another head size than keys",
    (
        "on context-parallel ranks it gathers the sequence, attends over all of it, and keeps its"
        " own part"
    ),
    "the exchange of the experts' tokens has their numbers as lists",
    (
        "its layer norm without Apex and Transformer Engine takes sequence parallelism, with its"
        " gradients marked"
    ),
)
TRIED = "0.16.1"
SEED = 1234
CHECKPOINT = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


def core(name: str) -> Any:
    """Import and return a module of megatron.core by the rest of its name, such as `models.gpt`."""
    return import_module(f"megatron.core.{name}")


class OnCpu(TorchFunctionMode):
    """Function mode of torch in which calls with the keyword `device="cuda"` run on the CPU,
    `Tensor.cuda` returns the tensor itself, and the keyword `pin_memory` is left out.
    `Tensor.type()` names a torch.cuda type all the same, of every tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is Tensor.cuda:
            return args[0]
        answer = func(*args, **kwargs)
        if func is Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


def make_it_run_on_cpus() -> None:
    """Change torch and Megatron-Core in this process, for the rest of its life, so that they run on
    CPUs, and silence all Python warnings. The process must be a rank that was forked for
    Megatron-Core alone."""
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    torch.compiler.set_stance("force_eager")
    random = core("tensor_parallel.random")
    norm = core("transformer.torch_norm").WrappedTorchNorm
    attention = core("transformer.dot_product_attention").DotProductAttention
    vars(core("transformer.moe.moe_utils")).setdefault("te_general_gemm", None)
    core("transformer.multi_latent_attention").HAVE_TE = False
    norm.__new__ = partial(plain_layer_norm, norm.__new__)
    attention.__init__ = partialmethod(plain_attention, attention.__init__)
    attention.forward = partialmethod(whole_attention, attention.forward)
    dist.all_to_all_single = partial(listed, dist.all_to_all_single)
    cuda: Any = torch.cuda
    random._get_cuda_rng_state = cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    stream = MagicMock()
    cuda.Stream = cuda.current_stream = cuda.Event = lambda *_, **__: stream
    cuda.stream = lambda *_: nullcontext()
    torch.multiprocessing.get_context = lambda *_: multiprocessing.get_context("fork")  # type: ignore[assignment]
    # Never left: the process ends with the rank.
    OnCpu().__enter__()


def plain_layer_norm(make: Any, cls: Any, config: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Return the layer norm that `make`, the `__new__` of Megatron-Core's WrappedTorchNorm `cls`,
    builds from a copy of the configuration without sequence parallelism and `persist_layer_norm`,
    which `make` refuses. The norm's parameters are marked with the real `sequence_parallel`."""
    plain = copy.copy(config)
    plain.sequence_parallel = plain.persist_layer_norm = False
    norm: nn.Module = make(cls, plain, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def plain_attention(self: Any, make: Any, *args: Any, v_channels: int = 0, **kwargs: Any) -> None:
    """Initialise Megatron-Core's core attention `self` by `make`, the class's own `__init__`, which
    this function replaces. `make` gets the other arguments, with a copy of `config`, which must be
    given by name, without context parallelism, so that every rank has the whole sequence. If
    `v_channels` is not 0, the default, it is the head size of values, which may differ from the
    keys'. `k_channels` is ignored."""
    kwargs.pop("k_channels", None)
    whole = kwargs["config"] = copy.copy(kwargs["config"])
    whole.context_parallel_size = 1
    make(self, *args, **kwargs)
    if v_channels:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def whole_attention(self: Any, attend: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Attend over the whole sequence by `attend`, the forward method that the class of
    Megatron-Core's attention `self` had, which this function replaces, and return its output at
    this rank's positions, [s/cp, b, …]. Each context-parallel rank has the positions that
    `places_of` gives. Queries, keys and values, the first arguments after `attend`, each [s/cp, b,
    heads, d], are gathered, so every rank of the group calls it; other arguments pass unchanged.
    Gradients flow back to all ranks."""
    group = core("parallel_state").get_context_parallel_group()
    if (ranks := group.size()) == 1:
        return attend(self, *args, **kwargs)
    gather = partial(
        core("tensor_parallel.mappings").gather_from_sequence_parallel_region, group=group
    )
    positions = [places_of(len(args[0]) * ranks, ranks, rank) for rank in range(ranks)]
    order = torch.cat(positions).argsort()
    output: Tensor = attend(self, *(gather(part)[order] for part in args[:3]), *args[3:], **kwargs)
    return output[positions[group.rank()]]


def places_of(length: int, ranks: int, rank: int) -> Tensor:
    """Return the positions [s/cp] that rank `rank` of `ranks` context-parallel ones has of a
    sequence of `length`, a multiple of 2 · cp. The sequence is cut into 2 · cp chunks; the rank has
    the chunks with the number `rank`, from 0, counted from the beginning and from the end."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def listed(exchange: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the function `exchange` with the other arguments and return its result; a keyword
    argument that is a tensor, such as the sizes of an exchange between ranks, is given to it as a
    list."""
    return exchange(
        *args,
        **{
            name: each.tolist() if hasattr(each, "tolist") else each
            for name, each in kwargs.items()
        },
    )


def build(values: Mapping[str, Any], spec: Callable[[Any], Any] | None = None) -> Any:
    """Build and return this rank's GPTModel by `values`, the settings that `values_of` gave, with
    the layers that `spec` returns for its configuration, or else by the configuration alone.

    Changes this process as `make_it_run_on_cpus` does, and makes the process groups of the layout;
    where torch has no process group yet, first one of this rank alone. Every rank calls it.
    """
    make_it_run_on_cpus()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = core("parallel_state")
    tensors = core("tensor_parallel")
    groups.initialize_model_parallel(**values["groups"])
    tensors.model_parallel_cuda_manual_seed(values["seed"])
    kind = getattr(core("transformer.transformer_config"), values["kind"])
    config = kind(
        **values["config"], finalize_model_grads_func=core("distributed").finalize_model_grads
    )
    specs = core("models.gpt.gpt_layer_specs")
    extra = JSON()
    settings = {
        "normalization": config.normalization,
        "qk_l2_norm": getattr(config, "qk_l2_norm", False),
    }
    layers = (
        spec(config)
        if spec
        else specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            **taken(settings, specs.get_gpt_decoder_block_spec),
        )
    )
    if getattr(config, "mtp_num_layers", None):
        extra["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(
            config, layers, use_transformer_engine=False
        )
    return core("models.gpt").GPTModel(
        config,
        layers,
        pre_process=groups.is_pipeline_first_stage(),
        post_process=groups.is_pipeline_last_stage(),
        **extra,
        **values["model"],
    )


def taken(values: Mapping[str, Any], taker: Any) -> JSON:
    """Return a dict of the values whose names are parameters of `taker`, a class or a function; its
    parameters differ from release to release."""
    return {
        name: value for name, value in values.items() if name in inspect.signature(taker).parameters
    }


def distribute(values: Mapping[str, Any], module: nn.Module, config: Any) -> tuple[Any, Any, Any]:
    """Wrap a module that `build` made, whose configuration is `config`, in Megatron-Core's
    DistributedDataParallel by the settings that `values_of` gives. Return the wrapped model, its
    optimizer and its schedule. Every rank calls it."""
    distributed = core("distributed")
    optimizers = core("optimizer")
    model = distributed.DistributedDataParallel(
        config, distributed.DistributedDataParallelConfig(**values["distributed"]), module
    )
    optimizer = optimizers.get_megatron_optimizer(
        optimizers.OptimizerConfig(**values["optimizer"]), [model]
    )
    schedule = core("optimizer_param_scheduler").OptimizerParamScheduler(
        optimizer, **values["schedule"]
    )
    return model, optimizer, schedule


def shards_of(gpt: Any, named: Mapping[str, Tensor]) -> list[Shard]:
    """Return this rank's shards of the tensors `named`, which have the names and shapes of `gpt`'s
    parameters or saved buffers: one for each entry of Megatron-Core's checkpoint, none for a buffer
    without an entry. They are views, or copies of tensors that are part of a larger storage. The
    tensors stand in for the parameters while Megatron-Core describes its checkpoint. Raises
    BadInput for a parameter without an entry."""
    own = {**dict(gpt.named_parameters()), **dict(saved_buffers(gpt))}
    held = {}
    by_storage = {}
    for name, parameter in own.items():
        held[name] = parameter.data
        given = named.get(name, parameter).detach()
        parameter.data = (
            given if given.untyped_storage().nbytes() == given.nbytes else given.clone()
        )
        by_storage[parameter.data.untyped_storage().data_ptr()] = name
    try:
        state = gpt.sharded_state_dict(metadata=CHECKPOINT)
        core("dist_checkpointing.mapping").apply_factories(state)
        shards = []
        for shard in core("dist_checkpointing.dict_utils").nested_values(state):
            if isinstance(value := getattr(shard, "data", None), Tensor):
                owner = by_storage.get(value.untyped_storage().data_ptr(), "")
                if owner in named:
                    value = value.detach()[(None,) * shard.prepend_axis_num]
                    shards.append(Shard(owner, shard.key, tuple(shard.global_offset), value))
        parameters = named.keys() & dict(gpt.named_parameters()).keys()
        if left_out := parameters - {shard.parameter for shard in shards}:
            raise BadInput(
                f"`sharded_state_dict` has no entry for {min(left_out)}, so its parts on the ranks"
                " cannot be compared: add it there"
            )
        return shards
    finally:
        for name, parameter in own.items():
            parameter.data = held[name]


def backward(
    model: Any, optimizer: Any, batches: Sequence[Any], take: Callable[[Tensor], object]
) -> None:
    """Zero the gradients and run microbatches of tokens, labels, loss masks and positions, each
    [b, s/cp], forward and backward, as Megatron-Core's training loop does. Every rank calls it.

    Calls `take`, on the last pipeline stage alone, with each microbatch's masked losses [b, s/cp].
    A microbatch's loss is the mean over the tokens of all context-parallel ranks; with
    `calculate_per_token_loss` it is a sum, and Megatron-Core divides by the batch's tokens.
    """
    group = core("parallel_state").get_context_parallel_group()

    def forward(data: Any, model: Any) -> Any:
        tokens, labels, counts, positions = next(data)
        return model(tokens, positions, None, labels=labels), partial(total, counts)

    def total(counts: Tensor, output: Tensor) -> tuple[Any, ...]:
        take(output.detach() * counts)
        loss = (output.float() * counts).sum()
        number = counts.sum()
        if not model.config.calculate_per_token_loss:  # then the ranks' gradients are averaged
            dist.all_reduce(number, group=group)
            loss = loss * group.size()
        return loss, number.int(), {}

    model.train()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    size, length = batches[0][0].shape
    core("pipeline_parallel").get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=length * group.size(),
        micro_batch_size=size,
    )


def config_class(fields: Mapping[str, Any]) -> Any:
    """Return Megatron-Core's class of configuration for `fields`, a dict name → value: the one for
    multi-latent attention if the field `multi_latent_attention` is there and true, or the common
    one."""
    name = "MLATransformerConfig" if fields.get("multi_latent_attention") else "TransformerConfig"
    return getattr(core("transformer.transformer_config"), name)


def values_of(work: Work, layout: ParityLayout) -> JSON:
    """Return a dict of Megatron-Core's settings, by its own names, from the work's configuration,
    its `fields` and the layout; it is the same on every rank. The settings lie in the dicts
    `groups`, the sizes of the parallel groups, `config`, `model`, `distributed`, `optimizer` and
    `schedule`; beside these are `seed` and `kind`, the name of the configuration's class. A field
    is set in each of the dicts that can have it, `schedule` excepted; one that none can have is
    ignored. Number formats are torch's dtypes, so the result cannot be written as JSON."""
    model = work.config.model
    train = work.config.train
    dtype = DTYPES[train.precision]
    batch = train.global_batch_size
    sharded = layout.shard_optimizer
    sizes = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
    }
    config = sizes | dict(  # noqa: C408  # the package's names
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        layernorm_epsilon=1e-5,
        init_method_std=model.init_std,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=False,
    )
    gpt = {
        "vocab_size": model.padded_vocab_size,
        "max_sequence_length": model.seq_length,
        "share_embeddings_and_output_weights": True,
        "position_embedding_type": "learned_absolute",
    }
    optimizer = dict(  # noqa: C408
        optimizer="adam",
        lr=train.learning_rate,
        min_lr=train.min_learning_rate,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_eps=train.adam_epsilon,
        clip_grad=train.clip_gradient,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=sharded,
    )
    schedule = dict(  # noqa: C408
        init_lr=0.0,
        max_lr=train.learning_rate,
        min_lr=train.min_learning_rate,
        lr_warmup_steps=train.warmup_iterations * batch,
        lr_decay_steps=train.iterations * batch,
        lr_decay_style=train.decay,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    distributed = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": sharded}
    kind = config_class(work.fields)
    given = partial(taken, work.fields)
    return {
        "seed": SEED,
        "groups": sizes | given(core("parallel_state").initialize_model_parallel),
        "kind": kind.__name__,
        "config": config | given(kind),
        "model": gpt | given(core("models.gpt").GPTModel),
        "distributed": distributed | given(core("distributed").DistributedDataParallelConfig),
        "optimizer": optimizer | given(core("optimizer").OptimizerConfig),
        "schedule": schedule,
    }


class MegatronCore(Engine):
    """Engine of Megatron-Core on one rank: its GPTModel under DistributedDataParallel, trained by
    its optimizer and schedule. Raises BadInput for a layout with recomputation or a schedule other
    than 1F1B, and for one that sets the microbatch size, `mb`, unless the work's fields set
    `calculate_per_token_loss`. Every rank makes one."""

    patches = PATCHES

    @classmethod
    def prepare(cls) -> None:
        """Import Megatron-Core, so that forked ranks have it. Raises BadInput if it is missing or
        its names changed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_extra("megatron.core", "test")
                for name in (
                    "models.gpt.gpt_layer_specs",
                    "optimizer_param_scheduler",
                    "dist_checkpointing.mapping",
                    "dist_checkpointing.strategies.torch",
                    "datasets.blended_megatron_dataset_builder",
                    "dist_checkpointing.dict_utils",
                ):
                    core(name)
            (
                core("transformer.torch_norm").WrappedTorchNorm,
                core("tensor_parallel.random")._set_cuda_rng_state,
            )
        except (ImportError, AttributeError) as error:
            raise BadInput(
                f"megatron-core {cls.release()} lacks modules or names that this suite uses;"
                f" version {TRIED} has them: {error}"
            ) from error

    @classmethod
    def release(cls) -> str:
        """Return megatron-core's version, as text, as the imported package itself states it: this
        may be a clone on PYTHONPATH, with another version than the installed package."""
        return str(core("package_info").__version__)

    def __init__(self, work: Work, layout: ParityLayout) -> None:
        if layout.schedule != "1f1b" or layout.recompute != "none":
            raise BadInput(
                "megatron-core is run with 1F1B and without recomputation: leave gpipe,"
                " interleaved, chunks, recompute and selective out of the layout's name"
            )
        if layout.mb and not work.fields.get("calculate_per_token_loss"):
            raise BadInput(
                "a layout with mb needs --with calculate_per_token_loss=True: otherwise the loss"
                " is a mean over microbatches and depends on their size"
            )
        self.work = work
        self.layout = layout
        self.train = work.config.train
        values = values_of(work, layout)
        self.module = self.gpt = build(values, work.spec)
        self.config = self.gpt.config
        self.groups = core("parallel_state")
        wrapped = self.gpt.to(self.config.params_dtype)
        if self.config.bf16:
            wrapped = core("transformer.module").Float16Module(self.config, wrapped)
        self.model, self.optimizer, self.scheduler = distribute(values, wrapped, self.config)
        count = work.iterations * self.train.global_batch_size
        self.samples = self._samples(count) if work.tokens else self._random_samples(count)

    def _random_samples(self, count: int) -> list[dict[str, Tensor]]:
        model = self.work.config.model
        generator = torch.Generator().manual_seed(self.train.seed)
        words = model.vocab_size * 7 // 8  # the last rows of the vocabulary are padding
        tokens = torch.randint(words, (count, model.seq_length + 1), generator=generator)
        lengths = torch.randint(
            model.seq_length // 2, model.seq_length + 1, (count, 1), generator=generator
        )
        masks = (torch.arange(model.seq_length) < lengths).float()
        return [
            {"tokens": row[:-1], "labels": row[1:], "loss_mask": mask}
            for row, mask in zip(tokens, masks, strict=True)
        ]

    def _samples(self, count: int) -> Any:
        """Return Megatron-Core's dataset of at least `count` samples, each found by its number,
        over the token files of this engine's attribute `work`, mixed by their weights and shuffled
        by the recipe's seed: a GPTDataset, or a BlendedDataset for several files. Its indices are
        written below the work's scratch folder."""
        config = core("datasets.gpt_dataset")
        model = self.work.config.model
        prefixes = [str(prefix) for prefix, _ in self.work.tokens]
        weights = [weight for _, weight in self.work.tokens] if len(prefixes) > 1 else None
        described = config.GPTDatasetConfig(
            random_seed=self.train.seed,
            sequence_length=model.seq_length,
            blend=(prefixes, weights),
            split="1,0,0",
            path_to_cache=str(self.work.scratch / "index"),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            tokenizer=SimpleNamespace(
                eod=0, pad=None, vocab_size=model.vocab_size, unique_identifiers={}
            ),
        )
        builder = core("datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
        return builder(config.GPTDataset, [count, 0, 0], lambda: True, described).build()[0]

    def shards(self, named: Mapping[str, Tensor]) -> list[Shard]:
        """Return a list with a Shard for each part that this rank holds of the tensors in `named`,
        at the offset that Megatron-Core's checkpoints state; a buffer that these checkpoints leave
        out has no Shard. The tensors have the names and shapes of the network's parameters or saved
        buffers. A Shard's `key` is this suite's name of the whole tensor if the work has token
        files and the suite has a name for it, else Megatron-Core's. Every rank calls it. Raises
        BadInput for a parameter that these checkpoints have no entry for."""
        shards = shards_of(self.gpt, named)
        if not self.work.tokens:
            return shards
        names = read_names("megatron-core")
        return [
            shard._replace(key=names.ours(shard.key, names.parameters, 0) or shard.key)
            for shard in shards
        ]

    def load(self, whole: Weights) -> None:
        super().load(whole)
        self.optimizer.reload_model_params()

    def checkpoint(self, is_loading: bool) -> JSON:
        """Return a dict of this rank's states, which Megatron-Core's `save` writes, or with
        `is_loading` the dict that Megatron-Core's `load` takes to return a checkpoint's values in
        the same form: `model` and `optimizer`, both sharded, and `scheduler`, the state of the
        learning rate's schedule."""
        model = self.gpt.sharded_state_dict(metadata=CHECKPOINT)
        states = self.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=CHECKPOINT
        )
        return {"model": model, "optimizer": states, "scheduler": self.scheduler.state_dict()}

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        core("dist_checkpointing").save(self.checkpoint(False), str(directory))

    def restore(self, directory: Path) -> None:
        content = core("dist_checkpointing").load(self.checkpoint(True), str(directory))
        self.gpt.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.scheduler.load_state_dict(content["scheduler"])

    def backward(self, iteration: int, recorder: Recorder | None) -> float:
        batch = self.train.global_batch_size
        ranks = self.groups.get_context_parallel_group()
        size = self.layout.mb or self.train.microbatch_size
        rank = self.groups.get_data_parallel_rank()
        places = list(place_groups(batch, size, rank, self.layout.dp))
        own = places_of(self.work.config.model.seq_length, ranks.size(), ranks.rank())
        batches = []
        for group in places:
            items = [self.samples[iteration * batch + place] for place in group]
            tensors = [
                torch.stack([item[key] for item in items])[:, own]
                for key in ("tokens", "labels", "loss_mask")
            ]
            batches.append([*tensors, own.expand_as(tensors[0])])
        outputs: list[Tensor] = []  # on the last stage
        backward(self.model, self.optimizer, batches, outputs.append)
        sums = torch.zeros(2, dtype=torch.float64)
        for (first, *_), (_, _, counts, _), output in zip(places, batches, outputs, strict=False):
            sums += torch.stack((output.sum(), counts.sum()))
            if recorder and self.work.tokens:
                recorder.loss(output.sum() / counts.sum(), first, size)
            for part, place in (
                zip(output.chunk(2, 1), own.chunk(2), strict=True) if recorder else ()
            ):
                recorder.show("loss of tokens", part, (first, int(place[0])))  # type: ignore[union-attr]
        dist.all_reduce(sums, group=self.groups.get_data_parallel_group(with_context_parallel=True))
        dist.all_reduce(sums, group=self.groups.get_pipeline_model_parallel_group())
        return float(sums[0] / sums[1])

    def gradients(self) -> Named:
        """Yield a pair of name and gradient for each of this rank's parameters, after `backward`.
        The gradient is reduced, not yet clipped, and has the shape of this rank's parameter. With
        a distributed optimizer, whose ranks have only parts of it, a collective gathers each one:
        every rank must then take all pairs."""
        for name, parameter in self.gpt.named_parameters():
            yield (
                name,
                (
                    self._gathered(parameter, "gradient")
                    if self.layout.shard_optimizer
                    else parameter.main_grad
                ),
            )

    def gradient_of(self, parameter: str) -> Tensor:
        return self.gpt.get_parameter(parameter).main_grad

    def update(self, iteration: int) -> tuple[float, float]:
        """Clip, update and step the scheduler; return the gradient norm before clipping and the
        learning rate of this update. The first update has the rate of step 0; the scheduler counts,
        and `iteration` is not used. Every rank calls it."""
        rate = float(self.optimizer.param_groups[0]["lr"])
        _, norm, _ = self.optimizer.step()
        # Its next forward pass would gather the weights, and they are compared before.
        if self.layout.shard_optimizer and self.model.ddp_config.overlap_param_gather:
            self.model.start_param_sync(force_sync=True)
        self.scheduler.step(increment=self.train.global_batch_size)
        return float(norm), rate

    def norm(self) -> float:
        self.optimizer.prepare_grads()
        # Its step clips by the same number and returns it.
        return float(self.optimizer.get_grad_norm())

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        states = {}
        for chained in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for main, state in chained.optimizer.state.items():
                states[id(main)] = state
        for name, parameter in self.gpt.named_parameters():
            state = states.get(id(getattr(parameter, "main_param", parameter)), {})
            for what in ("exp_avg", "exp_avg_sq"):
                if self.layout.shard_optimizer:
                    yield name, what, self._gathered(parameter, what)
                elif what in state:
                    yield name, what, state[what]

    def _gathered(self, parameter: Tensor, what: str) -> Tensor:
        """Return, in the shape of this rank's `parameter`, its gradient or moment `what`:
        `gradient`, `exp_avg` or `exp_avg_sq`. Works with a distributed optimizer alone:
        data-parallel ranks own parts of the result, which a collective among them gathers."""
        whole = torch.zeros(parameter.shape)
        for owner in self.optimizer.chained_optimizers:
            if parameter in owner.model_param_gbuf_map:
                own = owner._get_model_param_range_map(parameter)["param"]
                if what == "gradient":
                    part = parameter.main_grad.flatten()[own.start : own.end]  # type: ignore[attr-defined]
                else:
                    part = owner._get_main_param_and_optimizer_states(parameter)[what]
                whole.view(-1)[own.start : own.end] = part
        dense = self.groups.get_data_parallel_group(with_context_parallel=True)
        is_dense = getattr(parameter, "allreduce", True)
        dist.all_reduce(
            whole, group=dense if is_dense else self.groups.get_expert_data_parallel_group()
        )
        return whole
