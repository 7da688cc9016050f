"""Results of benchmarks as tables on the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table


def show_parallel(result: dict[str, Any]) -> None:
    """Print the throughput of every contender, the ratios, the physical limit and the notes."""
    console, model = Console(), result["model"]
    console.print(
        f"{result['size']}: {model['num_layers']} layers, {model['hidden_size']} wide, vocabulary "
        f"{model['vocab_size']:,}, {model['global_batch_size']} × {model['seq_length']} tokens; "
        f"rounds: {result['rounds']}",
        highlight=False,
    )
    for heading, ratios in result["ratios"].items():
        dropout = float(heading.removeprefix("dropout "))
        rows = [row for row in result["contenders"] if row["dropout"] == dropout]
        console.print(_throughput(heading, rows, ratios["to_serial"]))
        console.print(_ours_to_peers(heading, rows, ratios["ours_to_peer"]))
    limit = result["limit"]
    for ranks, gflops in limit["gemm_gflops"].items():
        console.print(
            f"Limit of {ranks} thread{'s' if ranks != '1' else ''}: fp32 matrix products reach {gflops:.0f} GFLOP/s, "
            f"at {limit['gflop_per_token'] * 1000:.0f} MFLOP per token {limit['tokens_per_second'][ranks]:,.0f} "
            "tokens/s (share: of this).",
            highlight=False,
        )
    for note in result["notes"]:
        console.print(f"- {note}", highlight=False, markup=False)


def show_pipeline(result: dict[str, Any]) -> None:
    """Print what each schedule took and its idle part, planned and measured."""
    console = Console()
    table = Table(title="Pipeline schedules", title_justify="left")
    table.add_column("schedule")
    for name in ("iteration, ms", "bubble planned", "measured"):
        table.add_column(name, justify="right")
    for one in result["timelines"]:
        planned, measured = _span_and_busiest(one["planned"]), _span_and_busiest(one["measured"])
        bubbles = [f"{span / busiest - 1:.2f}" for span, busiest in (planned, measured)]
        table.add_row(one["schedule"], f"{1000 * measured[0]:,.1f}", *bubbles)
    console.print(table)
    for note in result["notes"]:
        console.print(f"- {note}", highlight=False, markup=False)


def _span_and_busiest(ranks: list[list[list[Any]]]) -> tuple[float, float]:
    """Time to the last end, and what the busiest rank computed of it."""
    return max(rank[-1][4] for rank in ranks), max(sum(end - start for *_, start, end in rank) for rank in ranks)


def _throughput(heading: str, rows: list[dict[str, Any]], to_serial: dict[str, float]) -> Table:
    table = Table(title=f"Training, {heading}", title_justify="left")
    table.add_column("contender")
    for name in ("ranks", "tokens/s", "min–max", "÷ serial", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        name = row["name"] if not row["is_ours"] else f"[bold]{row['name']}[/bold]"
        if schedule := row.get("schedule"):
            name += f" ({schedule}, {row['microbatches']} microbatches)"
        rates = row["tokens_per_second"]
        if not rates:
            table.add_row(name, str(row["ranks"]), row["status"], "", "", "")
            continue
        table.add_row(
            name, str(row["ranks"]), f"{row['median']:,.0f}", f"{min(rates):,.0f}–{max(rates):,.0f}",
            f"{to_serial[row['name']]:.2f}", f"{row['gemm_share']:.0%}",
        )  # fmt: skip
    return table


def _ours_to_peers(heading: str, rows: list[dict[str, Any]], ratios: dict[str, dict[str, float]]) -> Table:
    table = Table(title=f"Ours ÷ peer with as many ranks, {heading}", title_justify="left")
    table.add_column("peer")
    ours = [row["name"] for row in rows if row["is_ours"]]
    for name in ours:
        table.add_column(name, justify="right")
    for row in rows:
        if row["is_ours"]:
            continue
        found = ratios.get(row["name"])
        cells = [f"{found[name]:.2f}" if name in found else "" for name in ours] if found else [row["status"]]
        table.add_row(row["name"], *cells)
    return table


def show_eval(result: dict[str, Any]) -> None:
    """Print how much faster evaluation is than its rivals, what memory it takes, and the notes."""
    console = Console()
    speed = Table(title="Evaluation, processor seconds", title_justify="left")
    for name in ("requests", "model", "rival"):
        speed.add_column(name)
    for name in ("ours", "theirs", "batch", "times faster", "goal"):
        speed.add_column(name, justify="right", no_wrap=True)
    for row in result["comparisons"]:
        named = [f"{row['name']} ({row['requests']})", row["size"], row["rival"]]
        if row["status"] != "measured":
            speed.add_row(*named, row["status"])
            continue
        seconds = row["median_seconds"]
        speed.add_row(
            *named, f"{seconds['ours']:.2f}", f"{seconds['theirs']:.2f}", str(row["batch_size"]),
            f"{row['times_faster']:.2f}", f"{row['goal']:g}{'' if row['reached'] else ' missed'}",
        )  # fmt: skip
    console.print(speed)
    memory = Table(title="Peak memory above the model's", title_justify="left")
    memory.add_column("model")
    for name in ("ours", "plain loop", "its batch", "share", "goal"):
        memory.add_column(name, justify="right")
    for row in result["memory"]:
        peaks = [f"{row['peak_bytes'][name] / 2**20:,.0f} MiB" for name in ("ours", "plain loop")]
        goal = f"{row['goal']:.0%}{'' if row['reached'] else ' missed'}"
        memory.add_row(row["size"], *peaks, str(row["plain_batch_size"]), f"{row['share']:.1%}", goal)
    console.print(memory)
    for note in result["notes"]:
        console.print(f"- {note}", highlight=False, markup=False)


def show_data(result: dict[str, Any]) -> None:
    """Print each stage beside its library, the whole beside the chain, and the notes."""
    console, corpus = Console(), result["corpus"]
    console.print(
        f"{corpus['name']}: {corpus['documents']:,} documents, {corpus['megabytes']:,.1f} MB, "
        f"{corpus['malformed']:,} malformed lines",
        highlight=False,
    )
    table = Table(title="Data pipeline on one core", title_justify="left")
    for name in ("stage", "beside"):
        table.add_column(name)
    for name in ("MB/s", "hours", "× faster", "goal", "compared", "differ"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["stages"]:
        table.add_row(
            row["stage"], row["library"], f"{row['megabytes_per_second']:,.1f}", f"{row['core_hours']:.2f}",
            *_against_goal(row), f"{row['compared']:,}", f"{row['differing']:,}",
        )  # fmt: skip
    whole, peer = result["whole"], result["datatrove"]
    rates = ("", "", "too small", f"{whole['goal']:g}")
    if whole["ratio"] is not None:
        rates = (f"{whole['megabytes_per_second']:,.1f}", f"{whole['core_hours']:.2f}", *_against_goal(whole))
    table.add_row("whole", "their chain", *rates, f"{whole['documents']:,}", f"{whole['differing']:,}")
    if peer["status"] == "measured":
        table.add_row("its equivalents", f"datatrove {peer['version']}", "", "", *_against_goal(peer), "", "")
    console.print(table)
    console.print("- MB/s of text and core-hours for the paper's 174 GB, one core.", highlight=False)
    if peer["status"] != "measured":
        console.print(f"- datatrove: {peer['status']}", highlight=False, markup=False)
    for note in result["notes"]:
        console.print(f"- {note}", highlight=False, markup=False)


def show_data_scale(result: dict[str, Any]) -> None:
    """Print throughput and memory at each size, and whether they stay linear and bounded."""
    console = Console()
    table = Table(title=f"Data pipeline, {result['workers']} workers", title_justify="left")
    for name in ("input MB", "documents", "wall s", "cpu s", "MB/s per core", "peak MB", "bound MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            f"{row['megabytes']:,.0f}", f"{row['documents']:,}", f"{row['seconds']:,.1f}", f"{row['cpu_seconds']:,.1f}",
            f"{row['megabytes_per_second']:.2f}", f"{row['peak_bytes'] / 1e6:,.0f}", f"{row['bound_bytes'] / 1e6:,.0f}",
        )  # fmt: skip
    console.print(table)
    linear = "within" if result["is_linear"] else "NOT within"
    bounded = "within" if result["is_within_bound"] else "NOT within"
    console.print(
        f"Throughput differs by {result['spread']:.1%} between sizes, {linear} 20 %; memory is {bounded} the bound.",
        highlight=False,
    )
    for note in result["notes"]:
        console.print(f"- {note}", highlight=False, markup=False)


def _against_goal(row: dict[str, Any]) -> tuple[str, str]:
    if row["goal"] is None:
        return f"{row['ratio']:.1f}", ""
    return f"{row['ratio']:.1f}", f"{row['goal']:g}{'' if row['ratio'] >= row['goal'] else ' missed'}"
