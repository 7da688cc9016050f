"""Megatron-Core's GPTModel, its data order, optimizer, clipping and schedule, on CPU ranks, as an engine.

`make_it_run_on_cpus` changes the imported package from outside, in the process of a rank; no file of it is edited.
"""

import copy
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

from engine.compare.recorder import RankPlace, Recorder, read_names
from engine.data.batches import place_groups
from engine.optim.precision import DTYPES
from lineage.errors import BadInput
from lineage.extras import import_extra
from verify.engines import Engine, Named, Work
from verify.parity import ParityLayout

PATCHES = (
    "tensors that it makes on `cuda` or moves there are made and stay on the CPU, and their type says cuda",
    "torch.cuda.current_device is the CPU, streams and events of torch.cuda wait for nothing",
    "the generator states that it keeps for dropout are those of the CPU's generator",
    "torch.compile, with which it fuses bias and GeLU, leaves functions as they are",
    "the router of experts finds the name te_general_gemm, as None, without Transformer Engine",
    "its layer norm without Apex and Transformer Engine takes sequence parallelism, with its gradients marked",
)
"""Descriptions of the changes, for the notes of a result."""
TRIED = "0.16.1"
SEED = 1234


def core(name: str) -> Any:
    """Import a module of the package. Raises BadInput if the package is missing or its names changed."""
    import_extra("megatron.core", "test")
    try:
        return import_module(f"megatron.core.{name}")
    except ImportError as error:
        raise _moved(error) from error


def _moved(error: Exception) -> BadInput:
    return BadInput(
        f"megatron-core {version('megatron-core')} has other names than the version tried, {TRIED}: {error}"
    )


def config_class(fields: Mapping[str, Any]) -> Any:
    """Class of the package's configuration that has the fields."""
    name = "MLATransformerConfig" if fields.get("multi_latent_attention") else "TransformerConfig"
    return getattr(core("transformer.transformer_config"), name)


class OnCpu(TorchFunctionMode):
    """Answers calls that name `cuda` on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        answer = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


def make_it_run_on_cpus() -> None:
    """Apply `PATCHES` in this process, which must be a rank forked for Megatron-Core alone."""
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    torch.compiler.set_stance("force_eager")
    random, norm = core("tensor_parallel.random"), core("transformer.torch_norm").WrappedTorchNorm
    vars(core("transformer.moe.moe_utils")).setdefault("te_general_gemm", None)
    norm.__new__ = partial(plain_layer_norm, norm.__new__)
    cuda: Any = torch.cuda
    random._get_cuda_rng_state = cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    stream = MagicMock()
    cuda.Stream = cuda.current_stream = cuda.Event = lambda *_, **__: stream
    cuda.stream = lambda *_: nullcontext()
    OnCpu().__enter__()


def plain_layer_norm(make: Any, cls: Any, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Make a layer norm as the package does, of a configuration that its check of sequence parallelism lets pass."""
    plain = copy.copy(config)
    plain.sequence_parallel = plain.persist_layer_norm = False
    norm: torch.nn.Module = make(cls, plain, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class MegatronCore(Engine):
    """GPTModel under DistributedDataParallel, with get_megatron_optimizer and OptimizerParamScheduler.

    With `shard_optimizer` the optimizer is its DistributedOptimizer. Every row of the vocabulary takes part in its
    softmax, so the configuration's vocabulary must be as large as its padded one.
    """

    names = read_names("megatron-core")
    package = "megatron-core"
    patches = PATCHES
    modules: tuple[str, ...] = (
        "models.gpt.gpt_layer_specs", "optimizer_param_scheduler", "datasets.blended_megatron_dataset_builder"
    )  # fmt: skip
    """Modules of the package to import before ranks are forked."""

    @classmethod
    def prepare(cls) -> None:
        """Import the package, so that forked ranks have it.

        Raises BadInput if it is not installed or its names changed.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in cls.modules:
                core(name)
        try:
            core("transformer.torch_norm").WrappedTorchNorm.__new__  # noqa: B018
            core("tensor_parallel.random")._get_cuda_rng_state, core("tensor_parallel.random")._set_cuda_rng_state
        except AttributeError as error:
            raise _moved(error) from error

    def __init__(self, work: Work, layout: ParityLayout) -> None:
        if layout.schedule != "1f1b" or layout.recompute != "none":
            raise BadInput("megatron-core is run with 1F1B and without recomputation: name tp, pp, dp, sp or zero1")
        make_it_run_on_cpus()
        self.work, self.layout, self.train = work, layout, work.config.train
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.groups = core("parallel_state")
        self.groups.initialize_model_parallel(
            layout.tp, layout.pp, context_parallel_size=layout.cp, expert_model_parallel_size=layout.ep
        )
        core("tensor_parallel").model_parallel_cuda_manual_seed(SEED)
        first_layer = self.groups.get_pipeline_model_parallel_rank() * (work.config.model.num_layers // layout.pp)
        tp_rank = self.groups.get_tensor_model_parallel_rank()
        self.place = RankPlace(layout.tp, tp_rank, layout.sequence_parallel, first_layer)
        self.config = self._config()
        self.gpt = self._build()
        if work.initial:
            self.load(work.initial)
        module = self.gpt.to(self.config.params_dtype)
        if self.config.bf16:
            module = core("transformer.module").Float16Module(self.config, module)
        self.model = self._distribute(module)
        self.optimizer, self.scheduler = self._optimize()
        self.samples = self._samples()

    def _config(self) -> Any:
        model, layout = self.work.config.model, self.layout
        dtype = DTYPES[self.train.precision]
        values: dict[str, Any] = dict(  # noqa: C408  # the package's names
            num_layers=model.num_layers, hidden_size=model.hidden_size, num_attention_heads=model.num_heads,
            hidden_dropout=model.dropout, attention_dropout=model.dropout, layernorm_epsilon=1e-5,
            init_method_std=model.init_std, tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp, sequence_parallel=layout.sequence_parallel,
            params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16, bias_activation_fusion=True,
            bias_dropout_fusion=True, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
            persist_layer_norm=False, use_cpu_initialization=False,
            finalize_model_grads_func=core("distributed").finalize_model_grads, context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
        )  # fmt: skip
        kind = config_class(self.work.fields)
        return kind(**values | self._given(kind))

    def _given(self, kind: Any) -> dict[str, Any]:
        """Fields that the work sets and `kind` takes."""
        return {name: value for name, value in self.work.fields.items() if name in inspect.signature(kind).parameters}

    def _build(self) -> Any:
        model = self.work.config.model
        layers = core("models.gpt.gpt_layer_specs").get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=False, normalization=self.config.normalization,
            qk_l2_norm=getattr(self.config, "qk_l2_norm", False),
        )  # fmt: skip
        kind = core("models.gpt").GPTModel
        values = {"share_embeddings_and_output_weights": True, "position_embedding_type": "learned_absolute"}
        return kind(
            self.config, layers, model.padded_vocab_size, model.seq_length,
            pre_process=self.groups.is_pipeline_first_stage(), post_process=self.groups.is_pipeline_last_stage(),
            **values | self._given(kind),
        )  # fmt: skip

    def _distribute(self, module: Any) -> Any:
        distributed = core("distributed")
        kind = distributed.DistributedDataParallelConfig
        values = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": self.layout.shard_optimizer}
        config = kind(**values | self._given(kind))
        return distributed.DistributedDataParallel(self.config, config, module)

    def _optimize(self) -> tuple[Any, Any]:
        train, dtype = self.train, self.config.params_dtype
        optimizers = core("optimizer")
        kind = optimizers.OptimizerConfig
        values: dict[str, Any] = dict(  # noqa: C408  # the package's names
            optimizer="adam", lr=train.learning_rate, min_lr=train.min_learning_rate, weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1, adam_beta2=train.adam_beta2, adam_eps=train.adam_epsilon,
            clip_grad=train.clip_gradient, bf16=dtype == torch.bfloat16, params_dtype=dtype,
            use_distributed_optimizer=self.layout.shard_optimizer,
        )  # fmt: skip
        config = kind(**values | self._given(kind))
        optimizer = optimizers.get_megatron_optimizer(config, [self.model])
        batch = train.global_batch_size
        scheduler = core("optimizer_param_scheduler").OptimizerParamScheduler(
            optimizer, init_lr=0.0, max_lr=train.learning_rate, min_lr=train.min_learning_rate,
            lr_warmup_steps=train.warmup_iterations * batch, lr_decay_steps=train.iterations * batch,
            lr_decay_style=train.decay, start_wd=train.weight_decay, end_wd=train.weight_decay, wd_incr_steps=0,
            wd_incr_style="constant",
        )  # fmt: skip
        return optimizer, scheduler

    def _samples(self) -> Any:
        """Build Megatron-Core's GPTDataset over the token files; its BlendedDataset for several."""
        config, model = core("datasets.gpt_dataset"), self.work.config.model
        prefixes = [str(prefix) for prefix, _ in self.work.tokens]
        weights = [weight for _, weight in self.work.tokens] if len(prefixes) > 1 else None
        described = config.GPTDatasetConfig(
            random_seed=self.train.seed, sequence_length=model.seq_length, blend=(prefixes, weights), split="1,0,0",
            path_to_cache=str(Path(prefixes[0]).parent / "index"), reset_position_ids=False,
            reset_attention_mask=False, eod_mask_loss=False,
            tokenizer=SimpleNamespace(eod=0, pad=None, vocab_size=model.vocab_size, unique_identifiers={}),
        )  # fmt: skip
        builder = core("datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
        count = self.work.iterations * self.train.global_batch_size
        return builder(config.GPTDataset, [count, 0, 0], lambda: True, described).build()[0]

    def parameters(self) -> Named:
        return self.gpt.named_parameters()

    def backward(self, iteration: int, recorder: Recorder | None) -> float:
        """Run an iteration as Megatron-Core's pre-training loop does."""
        train, dp = self.train, self.layout.dp
        groups = list(
            place_groups(train.global_batch_size, train.microbatch_size, self.groups.get_data_parallel_rank(), dp)
        )
        starts = [places[0] for places in groups]
        numbers = iter([[iteration * train.global_batch_size + place for place in places] for places in groups])
        end = recorder.watch(self.gpt, starts, len(groups)) if recorder else lambda: None
        losses: list[torch.Tensor] = []
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

        def forward(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
            items = [self.samples[number] for number in next(data)]
            tokens, labels, positions = (
                torch.stack([item[key] for item in items]) for key in ("tokens", "labels", "position_ids")
            )
            return model(tokens, positions, None, labels=labels), mean

        def mean(output: torch.Tensor) -> tuple[Any, ...]:
            loss = output.float().mean()
            if recorder:
                recorder.loss(loss, starts[len(losses)], train.microbatch_size)
            losses.append(loss.detach().double())
            if self.config.calculate_per_token_loss:
                return output.float().sum(), torch.tensor(output.numel(), dtype=torch.int), {}
            return loss, {}

        core("pipeline_parallel").get_forward_backward_func()(
            forward_step_func=forward, data_iterator=numbers, model=[self.model], num_microbatches=len(groups),
            seq_length=self.work.config.model.seq_length, micro_batch_size=train.microbatch_size,
        )  # fmt: skip
        end()
        total = torch.stack(losses).mean() / dp if losses else torch.zeros((), dtype=torch.float64)
        for group in (self.groups.get_data_parallel_group(), self.groups.get_pipeline_model_parallel_group()):
            torch.distributed.all_reduce(total, group=group)
        return total.item()

    def gradients(self) -> Named:
        return ((name, parameter.main_grad) for name, parameter in self.gpt.named_parameters())

    def update(self, iteration: int) -> tuple[float, float]:
        """Update, then step the scheduler: the first update has the rate of step 0."""
        rate = float(self.optimizer.param_groups[0]["lr"])
        _, norm, _ = self.optimizer.step()
        self.scheduler.step(increment=self.train.global_batch_size)
        return float(norm), rate

    def state(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        states = {id(main): state for chained in self.optimizer.chained_optimizers
                  for main, state in chained.optimizer.state.items()}  # fmt: skip
        for name, parameter in self.gpt.named_parameters():
            state = states.get(id(getattr(parameter, "main_param", parameter)), {})
            yield from ((name, what, state[what]) for what in ("exp_avg", "exp_avg_sq") if what in state)
