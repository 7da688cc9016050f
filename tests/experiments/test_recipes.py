"""Every recipe of a published training is what the claims about it say."""

import pytest

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.engine.costs import fullest_rank, parameter_count, tokens_trained
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.experiments.catalogue import Claim, every_claim
from mlm_repro.lineage.config import load_config
from mlm_repro.lineage.shipped import Shipped, find_file

CLAIMS: dict[str, Claim] = {claim.id: claim for claim in every_claim()}
V100_BYTES = 32 * 2**30


@pytest.mark.parametrize(
    ("name", "gpus", "scaling"), [("355m", 64, ""), ("2.5b", 128, "2.5b"), ("8.3b", 512, "8.3b")]
)
def test_a_model_of_2019_fits_the_paper_s_gpus_as_the_paper_trained_it(
    name: str, gpus: int, scaling: str
) -> None:
    config = read_run_config(name)
    model, train, parallel = config.model, config.train, config.parallel
    if scaling:
        assert CLAIMS[f"2019/table-1/{scaling}/parameters"].agrees(parameter_count(model) / 1e9)
    assert parallel.recompute == "full"
    dp = gpus // parallel.tp
    assert fullest_rank(model, train, parallel, dp).total < V100_BYTES
    whole = parallel.model_copy(update={"recompute": "none"})
    assert (fullest_rank(model, train, whole, dp).total > V100_BYTES) == (name != "355m")
    assert train.global_batch_size * model.seq_length * 68_507 == pytest.approx(
        float(CLAIMS["2019/text/iterations-per-epoch"].value) * 512 * 1024
    )
    last = max(
        claim.x or 0 for claim in every_claim() if claim.id.startswith(f"2019/figure-6/{name}/")
    )
    assert train.iterations == last
    assert tokens_trained(model, train) == last * 512 * 1024
    assert (train.learning_rate, train.min_learning_rate, train.warmup_iterations) == (
        1.5e-4,
        1e-5,
        3000,
    )
    assert (train.weight_decay, train.clip_gradient, model.dropout, train.precision) == (
        0.01,
        1.0,
        0.1,
        "fp16",
    )


def test_the_small_transformer_xl_has_the_post_s_optimizer() -> None:
    config = read_run_config("transformer-xl-75m")
    train = config.train
    assert CLAIMS["transformer-xl/post/size-bpe"].agrees(parameter_count(config.model) / 1e6)
    assert (train.optimizer, train.warmup_iterations, train.weight_decay) == (
        "lamb-clamped",
        0,
        0.0,
    )
    assert train.adam_epsilon == 1e-6


def test_the_corpus_of_2019_has_its_sources_and_loses_what_the_paper_removed() -> None:
    data = load_config(find_file("megatron-2019", Shipped.RECIPE), DataConfig)
    assert {*data.sources.names} == {"wikipedia", "cc-stories", "realnews", "openwebtext"}
    assert data.decontaminate.test_sets == ("wikitext103",)
    assert (data.deduplicate.rule, data.deduplicate.threshold) == ("megatron-2019", 0.7)
