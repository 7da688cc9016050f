"""Two processes of this engine against one of its own: tokens per second of wall clock."""

from statistics import median

from engine.config import ModelConfig
from engine.launch.allocator import keep_large_buffers
from engine.model.stages import split_layers
from experiments.bench.contender import SERIAL, TOLERANCE, Contender
from experiments.bench.contenders import contenders
from experiments.bench.sizes import BenchSize, read_size
from experiments.bench.timing import Timed, differing_losses, on_ranks, ratio, series, time_contender
from lineage.benchmark import Case
from lineage.progress import Progress


def measure_layouts(rounds: int) -> tuple[Case, list[str]]:
    """Rates of our layouts at size tiny in fp32, in turn, with ratios and goals; whose losses differ."""
    size = read_size("tiny")
    ours = [contender for contender in contenders() if contender.is_ours]
    timed: dict[str, list[Timed]] = {contender.name: [] for contender in ours}
    with Progress("layouts", rounds * len(ours), "measurements") as progress:
        for _ in range(rounds):
            for contender in ours:
                timed[contender.name].append(on_ranks(contender.name, contender.ranks, _timed, contender, size)[0])
                progress.advance(1, contender.name)
    return summarize_layouts(size, timed)


def summarize_layouts(size: BenchSize, timed: dict[str, list[Timed]]) -> tuple[Case, list[str]]:
    """The same from what was timed of each layout, in rounds."""
    rates = {name: [size.tokens / median(sample.seconds) for sample in many] for name, many in timed.items()}
    ideal = pipeline_ideal(size.model, 2)
    name = "two processes, tiny fp32"
    case = Case(
        name=name,
        series=[series(layout, "rate", "tokens/s", *many) for layout, many in rates.items()],
        ratios=[
            ratio("tp2, × one process", rates["tp2"], rates[SERIAL], goal=1.85),
            ratio("dp2, × one process", rates["dp2"], rates[SERIAL], goal=1.75),
            ratio("pp2, of the ideal", rates["pp2"], [ideal * rate for rate in rates[SERIAL]], goal=0.90),
        ],
        setting={"pp2_ideal": round(ideal, 4)},
    )
    return case, differing_losses(
        name, {layout: [sample.losses for sample in many] for layout, many in timed.items()}, TOLERANCE
    )


def pipeline_ideal(model: ModelConfig, stages: int) -> float:
    """How many times faster than one process a pipeline can be: all operations by those of its largest stage."""
    layer = 12 * model.hidden_size**2 + model.seq_length * model.hidden_size
    head = model.vocab_size * model.hidden_size
    each = [
        len(stage.layers) * layer + (head if stage.is_last else 0)
        for stage in split_layers(model.num_layers, stages, 1)
    ]
    return sum(each) / max(each)


def _timed(contender: Contender, size: BenchSize) -> Timed:
    keep_large_buffers()
    return time_contender(contender, size, [0.0])[0]
