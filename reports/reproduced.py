"""The exhibits of a reproduction: whatever it has numbers for."""

from functools import partial

from lineage.records import Kind
from reports import data_card, findings, tables
from reports.curves import Curve, build_curves, model_order
from reports.evaluations import evaluations_data, evaluations_tables
from reports.exhibit import Exhibit
from reports.load import Reproduction


def reproduction_exhibits(reproduction: Reproduction) -> dict[str, Exhibit]:
    """Each exhibit by its name; what has no numbers is absent."""
    exhibits = [*_figure_6(reproduction), *_training_loss(reproduction), *_tables(reproduction), *_data(reproduction)]
    return {exhibit.name: exhibit for exhibit in exhibits}


def figure_6_curves(reproduction: Reproduction) -> list[Curve]:
    """Validation perplexity over training, published and ours."""
    records = reproduction.select("2019/figure-6", "validation_perplexity")
    return build_curves(records, model_order(reproduction))


def own_kind(reproduction: Reproduction) -> Kind:
    """What the numbers are that were made here."""
    return "scaled" if reproduction.summary.mode == "scaled" else "measured"


def _figure_6(reproduction: Reproduction) -> list[Exhibit]:
    from reports.figures import figure_6

    curves = figure_6_curves(reproduction)
    if not curves:
        return []
    return [
        Exhibit(
            "2019-figure-6",
            "Validation perplexity against iterations",
            findings.ordering_caption(curves),
            tables.records_data(reproduction.select("2019/figure-6", "validation_perplexity")),
            make_command(reproduction, "figure-6"),
            partial(figure_6.draw, curves),
            findings.figure_6_alt(curves),
        )
    ]


def _training_loss(reproduction: Reproduction) -> list[Exhibit]:
    from reports.figures import training_loss

    records = reproduction.select("2019/training-loss", "training_loss")
    curves = build_curves(records, model_order(reproduction))
    if not curves:
        return []
    return [
        Exhibit(
            "training-loss",
            "Training loss against iterations",
            [findings.training_loss_caption(curves)],
            tables.records_data(records),
            make_command(reproduction, "training-loss"),
            partial(training_loss.draw, curves),
            findings.training_loss_alt(curves),
        )
    ]


def _tables(reproduction: Reproduction) -> list[Exhibit]:
    exhibits = []
    benchmarks = reproduction.select("2019/table-3")
    if benchmarks:
        data, command = tables.records_data(benchmarks), make_command(reproduction, "table-3")
        shown = tables.comparison_tables(benchmarks)
        exhibits.append(Exhibit("2019-table-3", "WikiText-103 and LAMBADA", (), data, command, tables=shown))
    drawn = {("2019/figure-6", "validation_perplexity"), ("2019/training-loss", "training_loss")}
    further = [
        record
        for record in reproduction.records
        if record.experiment != "2019/table-3" and (record.experiment, record.quantity) not in drawn
    ]
    if further:
        data, command = tables.records_data(further), make_command(reproduction, "validation")
        exhibits.append(Exhibit("further-numbers", "Further numbers", (), data, command, tables=(data,)))
    if reproduction.evaluations:
        evaluated, command = evaluations_data(reproduction.evaluations), make_command(reproduction, "table-3")
        shown = evaluations_tables(reproduction.evaluations, model_order(reproduction))
        exhibits.append(Exhibit("evaluations", "Evaluations by convention", (), evaluated, command, tables=shown))
    if reproduction.summary.models:
        models, kind = reproduction.summary.models, own_kind(reproduction)
        data, shown = tables.models_data(models, kind), tables.models_tables(models, kind)
        command = make_command(reproduction, "models")
        exhibits.append(Exhibit("models", "Published and trained shapes", (), data, command, tables=shown))
    return exhibits


def _data(reproduction: Reproduction) -> list[Exhibit]:
    from reports.figures import ledger_funnel, near_duplicates

    ledger = reproduction.ledger
    if not ledger:
        return []
    command = make_command(reproduction, "data-ledger", "ledger")
    exhibits = [
        Exhibit(
            "data-ledger",
            "What each stage kept and dropped",
            ["Solid: kept after the stage. Hatched: dropped by the stage."],
            tables.ledger_data(ledger),
            command,
            partial(ledger_funnel.draw, ledger.stages),
            findings.funnel_alt(ledger),
            (tables.attrition_table(ledger),),
        )
    ]
    banding = ledger.near_duplicates
    if banding:
        exhibits.append(
            Exhibit(
                "near-duplicates",
                "Near-duplicates: what the banding finds",
                data_card.banding_caption(banding),
                data_card.banding_data(banding),
                command,
                partial(near_duplicates.draw, banding),
                data_card.banding_alt(banding),
            )
        )
    return exhibits


def make_command(reproduction: Reproduction, *names: str) -> str:
    """The command that makes the numbers again, as the summary gives it; empty if it gives none."""
    commands = reproduction.summary.commands
    for name in names:
        for key in (name, f"2019/{name}"):
            if key in commands:
                return commands[key]
    return ""
