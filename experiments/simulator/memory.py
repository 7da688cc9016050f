"""Peak memory of every pipeline rank, from the engine's closed forms and its schedule. Imports no torch."""

from engine.config import RunConfig
from engine.costs import PARAMETER_BYTES, activation_bytes_per_layer
from engine.pipeline.stages import split_layers
from experiments.simulator.timeline import Order


def rank_peak_bytes(config: RunConfig, order: Order, state_bytes_per_parameter: float) -> list[float]:
    """Bytes each pipeline rank holds at its fullest.

    State is parameters, gradients and optimizer of the rank's layers, of the embedding on the first rank and of its
    tied copy on the last. Activations are those of the forward passes that wait for their backward (2021 paper,
    Section 2.2), with recomputation the whole of one layer more, and on the last rank the logits in single precision.
    """
    model, train, parallel = config.model, config.train, config.parallel
    h, tp, pp = model.hidden_size, parallel.tp, parallel.pp
    stages = split_layers(model.num_layers, pp, parallel.chunks)
    scale = PARAMETER_BYTES[train.precision].weight / 2
    kept = scale * activation_bytes_per_layer(model, train.microbatch_size, parallel)
    whole = activation_bytes_per_layer(model, train.microbatch_size, parallel.model_copy(update={"recompute": "none"}))
    working = scale * whole if parallel.recompute != "none" else 0.0
    logits = 4.0 * train.microbatch_size * model.seq_length * model.padded_vocab_size / tp
    peaks = []
    for rank in range(pp):
        layers = sum(len(stage.layers) for stage in stages[rank::pp])
        parameters = layers * (12 * h * h + 13 * h) / tp
        if rank in (0, pp - 1):
            parameters += (model.padded_vocab_size / tp + model.seq_length) * h
        state = parameters * state_bytes_per_parameter
        waiting = order.in_flight[rank] * kept * layers / parallel.chunks
        peaks.append(state + waiting + working + (logits if rank == pp - 1 else 0.0))
    return peaks
