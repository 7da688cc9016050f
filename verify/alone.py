"""Megatron-Core on CPU ranks, and a program that shows a finding; a copy of this file runs without this suite."""

import copy
import hashlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

RUNS: dict[str, Any] = {}
"""Settings of each run by name; the first is the serial one."""
KEY = ""
"""The parameter that is looked at."""
CHECKPOINT = {
    "non_homogeneous_layers": True, "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}  # fmt: skip


def core(name: str) -> Any:
    """Import a module of the package."""
    return import_module(f"megatron.core.{name}")


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
    """Change the package in this process, which must be a rank forked for Megatron-Core alone."""
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
    torch.multiprocessing.get_context = lambda *_: multiprocessing.get_context("fork")  # type: ignore[assignment]
    OnCpu().__enter__()


def plain_layer_norm(make: Any, cls: Any, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Make a layer norm as the package does, of a configuration that its check of sequence parallelism lets pass."""
    plain = copy.copy(config)
    plain.sequence_parallel = plain.persist_layer_norm = False
    norm: torch.nn.Module = make(cls, plain, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def build(values: Mapping[str, Any]) -> Any:
    """GPTModel of this rank, on the groups of its layout."""
    make_it_run_on_cpus()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    groups, tensors = core("parallel_state"), core("tensor_parallel")
    groups.initialize_model_parallel(**values["groups"])
    tensors.model_parallel_cuda_manual_seed(values["seed"])
    kind = getattr(core("transformer.transformer_config"), values["kind"])
    config = kind(**values["config"], finalize_model_grads_func=core("distributed").finalize_model_grads)
    layers = core("models.gpt.gpt_layer_specs").get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization,
        qk_l2_norm=getattr(config, "qk_l2_norm", False),
    )  # fmt: skip
    return core("models.gpt").GPTModel(
        config, layers, pre_process=groups.is_pipeline_first_stage(), post_process=groups.is_pipeline_last_stage(),
        **values["model"],
    )  # fmt: skip


def distribute(values: Mapping[str, Any], module: torch.nn.Module, config: Any) -> tuple[Any, Any, Any]:
    """The module under DistributedDataParallel, its optimizer and its schedule."""
    distributed, optimizers = core("distributed"), core("optimizer")
    model = distributed.DistributedDataParallel(
        config, distributed.DistributedDataParallelConfig(**values["distributed"]), module
    )
    optimizer = optimizers.get_megatron_optimizer(optimizers.OptimizerConfig(**values["optimizer"]), [model])
    schedule = core("optimizer_param_scheduler").OptimizerParamScheduler(optimizer, **values["schedule"])
    return model, optimizer, schedule


class Shard(NamedTuple):
    """A tensor that is like a parameter, or a part of it, and its place in the whole."""

    parameter: str
    """Name of the parameter on this rank."""
    key: str
    """Name of the whole tensor."""
    start: tuple[int, ...]
    value: torch.Tensor
    """The part, with as many dims as the whole; a view of what was given."""


def shards_of(gpt: Any, named: Mapping[str, torch.Tensor]) -> list[Shard]:
    """Shards of tensors like the parameters of these names, which lie in their place while the package is asked."""
    own, held = dict(gpt.named_parameters()), {}
    by_storage: dict[int, str] = {}
    for name, parameter in own.items():
        held[name] = parameter.data
        given = named.get(name, parameter).detach()
        parameter.data = given if given.untyped_storage().nbytes() == given.nbytes else given.clone()
        by_storage[parameter.data.untyped_storage().data_ptr()] = name
    try:
        state = gpt.sharded_state_dict(metadata=CHECKPOINT)
        core("dist_checkpointing.mapping").apply_factories(state)
        shards = []
        for shard in core("dist_checkpointing.dict_utils").nested_values(state):
            if isinstance(value := getattr(shard, "data", None), torch.Tensor):
                owner = by_storage.get(value.untyped_storage().data_ptr(), "")
                if owner in named:
                    value = value.detach()[(None,) * shard.prepend_axis_num]
                    shards.append(Shard(owner, shard.key, tuple(shard.global_offset), value))
        return shards
    finally:
        for name, parameter in own.items():
            parameter.data = held[name]


def checkpoint_of(gpt: Any, optimizer: Any, schedule: Any, is_loading: bool) -> dict[str, Any]:
    """Content of a checkpoint, or, for loading, the places that it goes to."""
    model = gpt.sharded_state_dict(metadata=CHECKPOINT)
    states = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=CHECKPOINT)
    return {"model": model, "optimizer": states, "scheduler": schedule.state_dict()}


def save(path: Path, gpt: Any, optimizer: Any, schedule: Any) -> None:
    """Write the package's own distributed checkpoint; every rank calls it."""
    path.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    core("dist_checkpointing").save(checkpoint_of(gpt, optimizer, schedule, False), str(path))


def restore(path: Path, gpt: Any, optimizer: Any, schedule: Any) -> None:
    """Load the package's own distributed checkpoint."""
    content = core("dist_checkpointing").load(checkpoint_of(gpt, optimizer, schedule, True), str(path))
    for name, part in (("model", gpt), ("optimizer", optimizer), ("scheduler", schedule)):
        part.load_state_dict(content[name])


class Masks(TorchFunctionMode):
    """Drops half of whatever a program passes to dropout, whatever its rate is, and remembers the masks."""

    def __init__(self, modules: Mapping[int, str]) -> None:
        """`modules` are names by the modules' identities."""
        super().__init__()
        self.modules, self.seen = modules, list[tuple[str, bytes, bytes]]()
        """Module, digest of the input and digest of the mask of every dropout."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        x = args[0] if args else kwargs["input"]
        mask = F.dropout(torch.ones_like(x), 0.5)
        frame: Any = sys._getframe()
        while frame and id(frame.f_locals.get("self")) not in self.modules:
            frame = frame.f_back
        digests = (hashlib.sha256(each.detach().float().contiguous().numpy()).digest() for each in (x, mask))
        self.seen.append((self.modules[id(frame.f_locals["self"])] if frame else "", *digests))  # type: ignore[arg-type]
        return x * mask


def backward(model: Any, optimizer: Any, batches: Sequence[Any], take: Callable[[int, torch.Tensor], object]) -> None:
    """Run microbatches of tokens and labels [b, s] as the package's training loop does; `take` has each loss [b, s]."""

    def forward(data: Any, model: Any) -> Any:
        number, (tokens, labels) = next(data)
        positions = torch.arange(tokens.size(1)).expand_as(tokens)
        return model(tokens, positions, None, labels=labels), partial(mean, number)

    def mean(number: int, output: torch.Tensor) -> tuple[Any, ...]:
        take(number, output.detach())
        if model.config.calculate_per_token_loss:
            return output.float().sum(), torch.tensor(output.numel(), dtype=torch.int), {}
        return output.float().mean(), {}

    model.train()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    size, length = batches[0][0].shape
    core("pipeline_parallel").get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter(enumerate(batches)), model=[model], num_microbatches=len(batches),
        seq_length=length, micro_batch_size=size,
    )  # fmt: skip


def show(rank: int, values: Mapping[str, Any], path: Path) -> None:
    """Train one rank for two steps; rank 0 prints how far what it computes of the parameter KEY is from serial."""
    os.environ["RANK"], seen = str(rank), dict[Any, torch.Tensor]()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}.store", rank=rank, world_size=values["ranks"]
    )
    gpt = build(values)
    own = dict(gpt.named_parameters())

    def keep(what: str, named: Mapping[str, torch.Tensor]) -> None:
        seen.update({(what, shard.start): shard.value.clone() for shard in shards_of(gpt, named) if shard.key == KEY})

    keep("initial value", own)
    for shard in shards_of(gpt, own):  # elements that depend on their places in the whole alone
        places = torch.full(shard.value.shape, float(zlib.crc32(shard.key.encode()) % 1000), dtype=torch.float64)
        for dim, (start, size) in enumerate(zip(shard.start, shard.value.shape, strict=True)):
            line = torch.arange(start, start + size, dtype=torch.float64) * (12.9898 + 65.233 * dim)
            places += line.view([-1 if each == dim else 1 for each in range(places.dim())])
        shard.value.copy_(0.2 * places.sin())
    model, optimizer, schedule = distribute(values, gpt, gpt.config)
    optimizer.reload_model_params()
    if values["restores"]:
        restore(path.parent / values["restores"] / "checkpoint", gpt, optimizer, schedule)
    sequences, size, length = values["batch"]
    dp, dp_rank = core("parallel_state").get_data_parallel_world_size(), core("parallel_state").get_data_parallel_rank()
    generator = torch.Generator().manual_seed(values["seed"])
    tokens = torch.randint(values["model"]["vocab_size"], (2, sequences, length + 1), generator=generator)
    begun = int(bool(values["restores"]))
    for iteration in range(begun, 2):
        starts = range(dp_rank * size, sequences, dp * size)
        rows = [tokens[iteration, start : start + size] for start in starts]
        batches, losses = [(row[:, :-1], row[:, 1:]) for row in rows], list[torch.Tensor]()
        backward(model, optimizer, batches, lambda _, loss, to=losses: to.append(loss.clone()))  # type: ignore[misc]
        for start, loss in zip(starts, losses, strict=False):
            seen[f"loss of tokens in step {iteration + 1}", (start, 0)] = loss
        keep(f"gradient {iteration + 1}", {name: each.main_grad for name, each in own.items()})
        seen[f"norm of gradient {iteration + 1}", ()] = torch.tensor(optimizer.step()[1])
        schedule.step(increment=sequences)
        keep(f"value after step {iteration + 1}", own)
        if values["saves"] and iteration == begun:
            save(path / "checkpoint", gpt, optimizer, schedule)
    with Masks({id(each): name for name, each in gpt.named_modules()}) as masks:
        backward(model, optimizer, batches, lambda *_: None)
    planted = {shard.parameter for shard in shards_of(gpt, own) if shard.key == KEY}
    for name, parameter in own.items():
        parameter.main_grad.fill_(name in planted)
    seen["squared norm of ones", ()] = torch.tensor(float(optimizer.step()[1]) ** 2)
    ranks: list[Any] = [None] * values["ranks"]
    torch.distributed.all_gather_object(ranks, (seen, [each[1:] for each in masks.seen if each[0] == KEY]))
    if not rank:
        compare(path, ranks, values["groups"]["tensor_model_parallel_size"])
    torch.distributed.destroy_process_group()


def compare(path: Path, ranks: Sequence[Any], tp: int) -> None:
    """Print how far copies on several ranks, and the whole and the serial run, are apart."""
    parts: dict[str, dict[Any, torch.Tensor]] = {}
    for seen, _ in ranks:
        for (what, start), value in seen.items():
            if not torch.equal(first := parts.setdefault(what, {}).setdefault(start, value), value):
                print(f"{path.name}: copies of the {what} differ by {(first - value).abs().max():.2g}")
    whole = {what: _joined(shards) for what, shards in parts.items()}
    if not (before := path.parent / "serial.json").exists():
        before.write_text(json.dumps({what: value.tolist() for what, value in whole.items()}))
    serial = {what: torch.tensor(value) for what, value in json.loads(before.read_text()).items()}
    for what, value in whole.items():
        if what.startswith("squared norm") and "initial value" in serial:
            print(f"{path.name}: the {what} is {value:.4f}, and must be {serial['initial value'].numel()}")
        elif what in serial and path.name != "serial" and not what.startswith("initial"):
            apart, size = (value - serial[what]).abs().max(), serial[what].abs().max()
            print(f"{path.name}: the {what} differs by {apart:.2g} from the serial one, of at most {size:.2g}")
    for (x, mask), (other, other_mask) in zip(ranks[0][1], ranks[tp - 1][1], strict=True):
        if (x == other) != (mask == other_mask):
            print(f"{path.name}: masks are {'equal' if mask == other_mask else 'different'} where inputs are not")


def _joined(parts: Mapping[tuple[int, ...], torch.Tensor]) -> torch.Tensor:
    """A whole tensor of its parts by their begins."""
    ends = [torch.tensor(start) + torch.tensor(part.shape) for start, part in parts.items()]
    whole = torch.full(tuple(torch.stack(ends).amax(0).int().tolist()), torch.nan)
    for start, part in parts.items():
        whole[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))] = part
    return whole


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, values in RUNS.items():
            torch.multiprocessing.start_processes(
                show, (values, Path(folder) / name), values["ranks"], start_method="fork"
            )
