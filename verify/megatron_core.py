"""Megatron-Core's GPTModel, its data order, optimizer, clipping and schedule, on CPU ranks, as an engine."""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mlm_repro.engine.compare.recorder import Recorder, read_names
from mlm_repro.engine.data.batches import place_groups
from mlm_repro.engine.optim.precision import DTYPES
from mlm_repro.lineage.errors import BadInput
from mlm_repro.lineage.extras import import_extra
from mlm_repro.verify import alone
from mlm_repro.verify.alone import Shard, core
from mlm_repro.verify.engines import Engine, Named, Weights, Work
from mlm_repro.verify.parity import ParityLayout

PATCHES = (
    "tensors that it makes on `cuda` or moves there are made and stay on the CPU, and their type says cuda",
    "torch.cuda.current_device is the CPU, streams and events of torch.cuda wait for nothing",
    "the generator states that it keeps for dropout are those of the CPU's generator",
    "torch.compile, with which it fuses bias and GeLU, leaves functions as they are",
    "the router of experts finds the name te_general_gemm, as None, without Transformer Engine",
    "the processes that write its checkpoints are forked",
    "its layer norm without Apex and Transformer Engine takes sequence parallelism, with its gradients marked",
)
TRIED = "0.16.1"
SEED = 1234


def config_class(fields: Mapping[str, Any]) -> Any:
    """Class of the package's configuration that has the fields."""
    name = "MLATransformerConfig" if fields.get("multi_latent_attention") else "TransformerConfig"
    return getattr(core("transformer.transformer_config"), name)


def values_of(work: Work, layout: ParityLayout) -> dict[str, Any]:
    """Settings of a rank, with the fields that the work sets, under the package's own names as `alone` takes them."""
    model, train = work.config.model, work.config.train
    dtype, batch, sharded = DTYPES[train.precision], train.global_batch_size, layout.shard_optimizer
    sizes = {
        "tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp, "expert_model_parallel_size": layout.ep,
    }  # fmt: skip
    config = sizes | dict(  # noqa: C408  # the package's names
        num_layers=model.num_layers, hidden_size=model.hidden_size, num_attention_heads=model.num_heads,
        hidden_dropout=model.dropout, attention_dropout=model.dropout, layernorm_epsilon=1e-5,
        init_method_std=model.init_std, sequence_parallel=layout.sequence_parallel, params_dtype=dtype,
        pipeline_dtype=dtype, bf16=dtype == torch.bfloat16, bias_activation_fusion=True, bias_dropout_fusion=True,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False,
        use_cpu_initialization=False,
    )  # fmt: skip
    gpt = {"vocab_size": model.padded_vocab_size, "max_sequence_length": model.seq_length,
           "share_embeddings_and_output_weights": True, "position_embedding_type": "learned_absolute"}  # fmt: skip
    optimizer = dict(  # noqa: C408
        optimizer="adam", lr=train.learning_rate, min_lr=train.min_learning_rate, weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1, adam_beta2=train.adam_beta2, adam_eps=train.adam_epsilon,
        clip_grad=train.clip_gradient, bf16=dtype == torch.bfloat16, params_dtype=dtype,
        use_distributed_optimizer=sharded,
    )  # fmt: skip
    schedule = dict(  # noqa: C408
        init_lr=0.0, max_lr=train.learning_rate, min_lr=train.min_learning_rate,
        lr_warmup_steps=train.warmup_iterations * batch, lr_decay_steps=train.iterations * batch,
        lr_decay_style=train.decay, start_wd=train.weight_decay, end_wd=train.weight_decay, wd_incr_steps=0,
        wd_incr_style="constant",
    )  # fmt: skip
    distributed = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": sharded}
    kind = config_class(work.fields)

    def given(taker: Any) -> dict[str, Any]:
        return {name: value for name, value in work.fields.items() if name in inspect.signature(taker).parameters}

    return {
        "seed": SEED, "groups": sizes, "kind": kind.__name__, "config": config | given(kind),
        "model": gpt | given(core("models.gpt").GPTModel),
        "distributed": distributed | given(core("distributed").DistributedDataParallelConfig),
        "optimizer": optimizer | given(core("optimizer").OptimizerConfig), "schedule": schedule,
    }  # fmt: skip


class MegatronCore(Engine):
    """GPTModel under DistributedDataParallel, with get_megatron_optimizer and OptimizerParamScheduler."""

    patches = PATCHES

    @classmethod
    def prepare(cls) -> None:
        """Import the package, so that forked ranks have it. Raises BadInput if it is absent or its names changed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_extra("megatron.core", "test")
                for name in ("models.gpt.gpt_layer_specs", "optimizer_param_scheduler", "dist_checkpointing.mapping",
                             "dist_checkpointing.strategies.torch",
                             "datasets.blended_megatron_dataset_builder", "dist_checkpointing.dict_utils"):  # fmt: skip
                    core(name)
            core("transformer.torch_norm").WrappedTorchNorm.__new__  # noqa: B018
            core("tensor_parallel.random")._get_cuda_rng_state, core("tensor_parallel.random")._set_cuda_rng_state
        except (ImportError, AttributeError) as error:
            has = f"megatron-core {version('megatron-core')} has other names than the version tried"
            raise BadInput(f"{has}, {TRIED}: {error}") from error

    def __init__(self, work: Work, layout: ParityLayout) -> None:
        if layout.schedule != "1f1b" or layout.recompute != "none":
            raise BadInput("megatron-core is run with 1F1B and without recomputation: name tp, pp, dp, sp or zero1")
        self.work, self.layout, self.train = work, layout, work.config.train
        values = values_of(work, layout)
        self.module = self.gpt = alone.build(values)
        self.config, self.groups = self.gpt.config, core("parallel_state")
        wrapped = self.gpt.to(self.config.params_dtype)
        if self.config.bf16:
            wrapped = core("transformer.module").Float16Module(self.config, wrapped)
        self.model, self.optimizer, self.scheduler = alone.distribute(values, wrapped, self.config)
        count = work.iterations * self.train.global_batch_size
        self.samples = self._samples(count) if work.tokens else self._random_samples(count)

    def _random_samples(self, count: int) -> list[dict[str, torch.Tensor]]:
        model, generator = self.work.config.model, torch.Generator().manual_seed(self.train.seed)
        tokens = torch.randint(model.vocab_size, (count, model.seq_length + 1), generator=generator)
        return [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]

    def _samples(self, count: int) -> Any:
        """Build Megatron-Core's GPTDataset over the token files; its BlendedDataset for several."""
        config, model = core("datasets.gpt_dataset"), self.work.config.model
        prefixes = [str(prefix) for prefix, _ in self.work.tokens]
        weights = [weight for _, weight in self.work.tokens] if len(prefixes) > 1 else None
        described = config.GPTDatasetConfig(
            random_seed=self.train.seed, sequence_length=model.seq_length, blend=(prefixes, weights), split="1,0,0",
            path_to_cache=str(self.work.scratch / "index"), reset_position_ids=False,
            reset_attention_mask=False, eod_mask_loss=False,
            tokenizer=SimpleNamespace(eod=0, pad=None, vocab_size=model.vocab_size, unique_identifiers={}),
        )  # fmt: skip
        builder = core("datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
        return builder(config.GPTDataset, [count, 0, 0], lambda: True, described).build()[0]

    def shards(self, named: Mapping[str, torch.Tensor]) -> list[Shard]:
        """Shards where the package's checkpoints put them; in our names if the samples are those of our files."""
        shards = alone.shards_of(self.gpt, named)
        if not self.work.tokens:
            return shards
        names = read_names("megatron-core")
        return [shard._replace(key=names.ours(shard.key, names.parameters, 0) or shard.key) for shard in shards]

    def load(self, whole: Weights) -> None:
        super().load(whole)
        self.optimizer.reload_model_params()

    def save(self, directory: Path) -> None:
        alone.save(directory, self.gpt, self.optimizer, self.scheduler)

    def restore(self, directory: Path) -> None:
        alone.restore(directory, self.gpt, self.optimizer, self.scheduler)

    def backward(self, iteration: int, recorder: Recorder | None) -> float:
        train, dp = self.train, self.layout.dp
        rank = self.groups.get_data_parallel_rank()
        groups = list(place_groups(train.global_batch_size, train.microbatch_size, rank, dp))
        starts = [places[0] for places in groups]
        batches = []
        for places in groups:
            items = [self.samples[iteration * train.global_batch_size + place] for place in places]
            batches.append([torch.stack([item[key] for item in items]) for key in ("tokens", "labels")])
        losses: list[torch.Tensor] = []

        def take(number: int, output: torch.Tensor) -> None:
            losses.append(output.float().mean().double())
            if recorder:
                recorder.loss(output.float().mean(), starts[number], train.microbatch_size)
                recorder.show("loss of tokens", output, (starts[number], 0))

        alone.backward(self.model, self.optimizer, batches, take)
        total = torch.stack(losses).mean() / dp if losses else torch.zeros((), dtype=torch.float64)
        for group in (self.groups.get_data_parallel_group(), self.groups.get_pipeline_model_parallel_group()):
            torch.distributed.all_reduce(total, group=group)
        return total.item()

    def gradients(self) -> Named:
        """Whole gradients; those that a distributed optimizer has in parts are gathered."""
        for name, parameter in self.gpt.named_parameters():
            yield name, self._gathered(parameter, "gradient") if self.layout.shard_optimizer else parameter.main_grad

    def gradient_of(self, parameter: str) -> torch.Tensor:
        return self.gpt.get_parameter(parameter).main_grad

    def update(self, iteration: int) -> tuple[float, float]:
        """Update, then step the scheduler: the first update has the rate of step 0."""
        rate = float(self.optimizer.param_groups[0]["lr"])
        _, norm, _ = self.optimizer.step()
        self.scheduler.step(increment=self.train.global_batch_size)
        return float(norm), rate

    def norm(self) -> float:
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())  # which its step clips by and returns

    def state(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        states = {id(main): state for chained in self.optimizer.chained_optimizers
                  for main, state in chained.optimizer.state.items()}  # fmt: skip
        for name, parameter in self.gpt.named_parameters():
            for what in ("exp_avg", "exp_avg_sq"):
                if self.layout.shard_optimizer:
                    yield name, what, self._gathered(parameter, what)
                elif what in (state := states.get(id(getattr(parameter, "main_param", parameter)), {})):
                    yield name, what, state[what]

    def _gathered(self, parameter: torch.Tensor, what: str) -> torch.Tensor:
        """Gradient or moment of a parameter, whose parts the ranks of a distributed optimizer own; a collective."""
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
        torch.distributed.all_reduce(whole, group=dense if is_dense else self.groups.get_expert_data_parallel_group())
        return whole
