"""Faults that engines really had, as changes of a running Megatron-Core."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mlm_repro.verify.megatron_core import core

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def forget_layernorm_gradients(patch: Patch) -> None:
    """What each rank saw of the sequence is not added up."""
    finalize = core("distributed.finalize_model_grads")
    patch.setattr(finalize, "_allreduce_non_tensor_model_parallel_grads", lambda *_: None)


def forget_tied_embedding(patch: Patch) -> None:
    """First and last stage do not add up what they share."""
    patch.setattr(
        core("distributed.finalize_model_grads"), "_allreduce_word_embedding_grads", lambda *_: None
    )


def sum_tied_embedding_twice(patch: Patch) -> None:
    finalize = core("distributed.finalize_model_grads")
    once = finalize._allreduce_word_embedding_grads
    patch.setattr(
        finalize, "_allreduce_word_embedding_grads", lambda *args: (once(*args), once(*args))
    )


def sum_over_data_parallel_ranks(patch: Patch) -> None:
    """Gradients are added up and not averaged."""
    groups = core("distributed.param_and_grad_buffer")._ParamAndGradBucketGroup
    start = groups.start_grad_sync

    def planted(self: Any, *args: Any, **kwargs: Any) -> None:
        for bucket in self.buckets:
            bucket.gradient_scaling_factor = 1.0
        start(self, *args, **kwargs)

    patch.setattr(groups, "start_grad_sync", planted)


def forget_data_parallel_ranks(patch: Patch) -> None:
    groups = core("distributed.param_and_grad_buffer")._ParamAndGradBucketGroup
    patch.setattr(groups, "finish_grad_sync", lambda *_, **__: None)


def seed_alike(patch: Patch) -> None:
    """Attention's masks are the same on every tensor-parallel rank."""
    seeds = core("tensor_parallel")
    seed = seeds.model_parallel_cuda_manual_seed
    patch.setattr(seeds, "model_parallel_cuda_manual_seed", lambda number: seed(number, tp_rank=0))


def seed_apart(patch: Patch) -> None:
    """The residual stream's masks are those of each rank, though all hold the same stream."""
    seeds = core("tensor_parallel")
    seed, rank = seeds.model_parallel_cuda_manual_seed, torch.distributed.get_rank
    patch.setattr(
        seeds,
        "model_parallel_cuda_manual_seed",
        lambda number: (seed(number), torch.manual_seed(number + rank())),
    )


def mask_words(patch: Patch) -> None:
    """The mask of padded rows begins eight rows early."""
    entropy = core("tensor_parallel.cross_entropy").VocabParallelCrossEntropy
    largest = entropy.calculate_logits_max

    def planted(logits: torch.Tensor) -> Any:
        is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        padding = torch.arange(logits.size(-1)) >= logits.size(-1) - 8 * is_last
        return largest(logits.float().masked_fill(padding, -1e4))

    patch.setattr(entropy, "calculate_logits_max", staticmethod(planted))


def add_bias_on_every_rank(patch: Patch) -> None:
    row = core("tensor_parallel.layers").RowParallelLinear
    forward = row.forward

    def planted(self: Any, x: torch.Tensor) -> Any:
        return forward(self, x)[0] + torch.distributed.get_world_size() * self.bias, None

    patch.setattr(row, "forward", planted)


def decay_biases(patch: Patch) -> None:
    patch.setattr(core("optimizer"), "get_standard_config_overrides", lambda **_: {})


def clip_by_local_norm(patch: Patch) -> None:
    norm = lambda gradients, **_: float(torch.nn.utils.get_total_norm(gradients))  # noqa: E731
    patch.setattr(core("optimizer.optimizer"), "get_grad_norm_fp32", norm)


def take_stale_microbatch(patch: Patch) -> None:
    """The last stage computes what came before again."""
    messages = core("pipeline_parallel.p2p_communication").P2PCommunicator
    seen: list[Any] = []

    def keep(receive: Callable[..., Any], stale: int) -> Callable[..., Any]:
        def planted(*args: Any) -> Any:
            seen.append(receive(*args))
            return [one if one is None else one.detach().requires_grad_() for one in seen[-stale]]

        return planted

    patch.setattr(messages, "recv_forward", keep(messages.recv_forward, 1))
    patch.setattr(
        messages, "send_backward_recv_forward", keep(messages.send_backward_recv_forward, 2)
    )


def resume_schedule(patch: Patch) -> None:
    """A state is loaded into a schedule that has already moved on, and is added to it."""
    schedule = core("optimizer_param_scheduler").OptimizerParamScheduler
    step = schedule.step

    def planted(self: Any, increment: int) -> None:
        step(self, increment)
        if increment and "loaded" not in vars(self):
            self.loaded = True
            self.load_state_dict(self.state_dict())

    patch.setattr(schedule, "step", planted)


def forget_backward_all_reduce(patch: Patch) -> None:
    """The gradient of a divided product's input is that of this rank's columns."""
    column = core("tensor_parallel.layers").ColumnParallelLinear
    begin = column.__init__

    def planted(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.allreduce_dgrad, self.disable_grad_reduce = False, True

    patch.setattr(column, "__init__", planted)


def count_copies(patch: Patch) -> None:
    """The norm counts a parameter on each rank that has a copy."""
    patch.setattr(
        core("tensor_parallel"), "param_is_not_tensor_parallel_duplicate", lambda *_, **__: True
    )


def count_tied_embedding_twice(patch: Patch) -> None:
    patch.setattr(core("optimizer.optimizer"), "param_is_not_shared", lambda _: True)


def sum_layernorm_gradients_twice(patch: Patch) -> None:
    finalize = core("distributed.finalize_model_grads")
    once = finalize._allreduce_non_tensor_model_parallel_grads
    patch.setattr(
        finalize,
        "_allreduce_non_tensor_model_parallel_grads",
        lambda *args: (once(*args), once(*args)),
    )


def _after(patch: Patch, owner: Any, method: str, change: Callable[..., Any]) -> None:
    """Call `change` on the object after its method."""
    original = getattr(owner, method)

    def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        change(self)
        return answer

    patch.setattr(owner, method, planted)


def forget_router_gradient(patch: Patch) -> None:
    """Gradients of the router from each part of the sequence are not added up."""
    router = core("transformer.moe.router").TopKRouter
    _after(patch, router, "__init__", lambda self: setattr(self.weight, "sequence_parallel", False))


def begin_routers_apart(patch: Patch) -> None:
    router = core("transformer.moe.router").TopKRouter
    _after(
        patch, router, "__init__", lambda self: self.weight.data.add_(torch.distributed.get_rank())
    )


def forget_scale_of_experts(patch: Patch) -> None:
    """Gradients of experts are those of a sum over data-parallel ranks, not of a mean."""
    groups = core("distributed.param_and_grad_buffer")._ParamAndGradBucketGroup
    start = groups.start_grad_sync

    def planted(self: Any, *args: Any, **kwargs: Any) -> None:
        for bucket in self.buckets:
            if not all(getattr(parameter, "allreduce", True) for parameter in bucket.params):
                bucket.gradient_scaling_factor = 1.0
        start(self, *args, **kwargs)

    patch.setattr(groups, "start_grad_sync", planted)


def keep_updated_weights(patch: Patch) -> None:
    """The distributed optimizer does not gather the parts that other ranks updated."""
    patch.setattr(
        core("distributed").DistributedDataParallel, "start_param_sync", lambda *_, **__: None
    )


def shift_words(patch: Patch) -> None:
    """The second rank misses the first of its words."""
    embedding = core("tensor_parallel.layers").VocabParallelEmbedding
    _after(
        patch,
        embedding,
        "__init__",
        lambda self: setattr(
            self, "vocab_start_index", self.vocab_start_index + bool(self.vocab_start_index)
        ),
    )


def double_gradient_between_stages(patch: Patch) -> None:
    messages = core("pipeline_parallel.p2p_communication").P2PCommunicator
    for method in ("recv_backward", "send_forward_recv_backward"):
        receive = getattr(messages, method)

        def planted(*args: Any, receive: Callable[..., Any] = receive) -> Any:
            gradients = receive(*args)
            return (
                [each if each is None else 2 * each for each in gradients]
                if isinstance(gradients, list)
                else (gradients if gradients is None else 2 * gradients)
            )

        patch.setattr(messages, method, planted)


def lose_final_layernorm(patch: Patch) -> None:
    """The last of several stages loses the gradient of the final layer norm."""
    finalize = core("distributed.finalize_model_grads")
    reduce = finalize._allreduce_word_embedding_grads

    def planted(model: Any, config: Any, *groups: Any) -> None:
        reduce(model, config, *groups)
        for name, parameter in model[0].named_parameters():
            if "final_layernorm" in name and config.pipeline_model_parallel_size > 1:
                parameter.main_grad.zero_()

    patch.setattr(finalize, "_allreduce_word_embedding_grads", planted)


def decay_biases_on_one_rank(patch: Patch) -> None:
    usual = core("optimizer").get_standard_config_overrides
    patch.setattr(
        core("optimizer"),
        "get_standard_config_overrides",
        lambda *args, **kwargs: {} if torch.distributed.get_rank() else usual(*args, **kwargs),
    )


def raise_rate_of_one_rank(patch: Patch) -> None:
    schedule = core("optimizer_param_scheduler").OptimizerParamScheduler
    rate = schedule.get_lr
    patch.setattr(
        schedule, "get_lr", lambda *args: rate(*args) * (1 + torch.distributed.get_rank())
    )


def lose_moments(patch: Patch) -> None:
    """Tensor-parallel ranks begin with moments of 0 after a checkpoint."""

    def forget(optimizer: Any) -> None:
        if core("parallel_state").get_tensor_model_parallel_world_size() > 1:
            for state in optimizer.optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()

    _after(patch, core("optimizer.optimizer").FP32Optimizer, "load_state_dict", forget)


def restart_schedule(patch: Patch) -> None:
    """Several stages begin their schedule anew after a checkpoint."""

    def forget(schedule: Any) -> None:
        if core("parallel_state").get_pipeline_model_parallel_world_size() > 1:
            schedule.num_steps = 0
            schedule.step(0)

    _after(
        patch, core("optimizer_param_scheduler").OptimizerParamScheduler, "load_state_dict", forget
    )
