"""Translates between Megatron-LM's command line for GPT pre-training and a configuration of this
engine.

`megatron_flags.toml` has the flags with their older names and defaults, from Megatron-LM
`megatron/arguments.py` of v1.0, v2.6 and 2026.
"""

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mlm_repro.data_pipeline.tokens.tokenizer import padded_vocab_size
from mlm_repro.engine.batch_schedule import BatchSchedule
from mlm_repro.engine.config import RunConfig, TrainConfig
from mlm_repro.engine.optim.schedule import end_of_schedule
from mlm_repro.lineage.atomic import JSON
from mlm_repro.lineage.config import flatten, parse_config, read_toml
from mlm_repro.lineage.errors import BadInput, cause

FLAGS = read_toml(Path(__file__).with_suffix(".toml"))
VALUES, SWITCHES, CURRENT_NAMES, SAME = (
    FLAGS[table] for table in ("values", "switches", "former", "same")
)
WRITTEN_SWITCHES = (
    "fp16",
    "bf16",
    "sequence-parallel",
    "use-distributed-optimizer",
    "no-scatter-gather-tensors-in-pipeline",
)
GPT2_VOCABULARY = 50257
WHERE = "the arguments"
ASSIGNMENT = re.compile(
    r"""(?m)^\s*(?:export\s+)?(\w+)=(?:\(([^)]*)\)|"([^"]*)"|'([^']*)'|(\S*))"""
)
"""Regular expression for an assignment in a shell script, with a group for the name and one for
each kind of value: an array, in double or single quotes, plain."""
DATA = re.compile(
    r"((train|valid|test)-)?data-path|data-args-path|split|vocab-file|merge-file|tokenizer-(model|type)|mock-data"
)
"""Regular expression for the names, without dashes, of flags about the data."""
NO_EFFECT, NOTED = (re.compile("|".join(FLAGS[table])) for table in ("no_effect", "noted"))


class Translation(NamedTuple):
    """Translation of a command line of Megatron-LM: the RunConfig `config`, and three sorted lists
    of texts about the flags that did not become settings. `data` has the flags about the data and
    `without_effect` the flags that leave the training the same, each with its values; `missing` has
    sentences about flags without a counterpart, and about `--load` for a training that starts from
    weights."""

    config: RunConfig
    data: list[str]
    """Flags about the data, sorted, each with its values as one text. `mlm-data run` prepares the
    data, and `data.dataset` names the result."""
    without_effect: list[str]
    """Flags that leave the result of the training the same, sorted, each with its values as one
    text."""
    missing: list[str]
    """Sentences, sorted, about flags that have no counterpart and leave the training the same but
    for rounding, and one about `--load` if the training starts from weights."""


class MegatronFlags(NamedTuple):
    """Megatron-LM's flags for a configuration: `words`, a list of the words of a command line, and
    `missing`, a list of sentences about the settings that the flags do not express."""

    words: list[str]
    missing: list[str]
    """Sentences about settings that the flags do not express, with the values that the flags
    imply."""


def script_or_arguments(given: Sequence[str]) -> list[str]:
    """Return a list of words: the arguments `given`, or, if there is only one and it does not begin
    with `--`, the arguments in the shell script at that path, as `read_script` finds them. Raises
    BadInput if the script is unreadable, and as `read_script` does."""
    if len(given) == 1 and not given[0].startswith("--"):
        try:
            return read_script(Path(given[0]).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"{given[0]} cannot be read as a script: {cause(error)}; name a shell script in"
                " UTF-8, or give Megatron-LM's arguments themselves"
            ) from error
    return list(given)


def read_script(text: str) -> list[str]:
    """Return a list of the arguments that the shell script `text` gives to its last call of
    `pretrain_gpt.py`, or of all words of a text that calls no `pretrain_*.py` with flags; up to the
    first word that begins with `;`, `&`, `|` or an output redirection, and without `$@`.

    Nothing is run. Variables and arrays that the script sets are substituted by their last value in
    the text, and other variables by their default, as in `${NAME:-1}`; variables without either
    keep their `$`. Raises BadInput for an open quotation mark, and if the last such call is of
    another program, as of `pretrain_bert.py`.
    """
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)(^|\s)#.*$", r"\1", text))
    text = re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", text)
    known: dict[str, str] = {}

    def expand(words: str) -> str:
        for _ in range(5):  # a variable may contain others
            words = re.sub(
                r"\$\{?(\w+)(?:\[[@*]\]|:-([^}]*))?\}?",
                lambda match: known.get(match[1], match[2] or match[0]),
                words,
            )
        return words

    for match in ASSIGNMENT.finditer(text):
        value = next(value for value in match.groups()[1:] if value is not None)
        known[match[1]] = expand(" ".join(value.split()))
    commands = re.findall(r"""(?m)(pretrain_\w+)\.py["']?[ \t]+(.*--.*?)["' \t]*$""", expand(text))
    program, arguments = commands[-1] if commands else ("pretrain_gpt", text)
    # Another program's flags have the same names and mean another model: `pretrain_bert.py`.
    if not program.startswith("pretrain_gpt"):
        raise BadInput(
            f"the script's last call is of {program}.py, and only a call of pretrain_gpt.py is"
            " translated"
        )
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise BadInput(
            f"the arguments in the script cannot be split into words: {error}; correct its"
            " quotation marks and backslashes"
        ) from error
    end = next((at for at, word in enumerate(words) if re.match(r"[;&|>]|\d>", word)), len(words))
    return [word for word in words[:end] if word != "$@"]


def from_megatron(words: Sequence[str]) -> Translation:
    """Return a Translation: the RunConfig that Megatron-LM would train with the arguments `words`,
    a command line split into words, and lists of texts about the flags that did not become
    settings.

    Raises BadInput for an invalid value, a missing flag, a word before the first flag, and flags
    that are unknown or ask for another model or another training.
    """
    flags = _flags(words)
    shown = {name: " ".join([f"--{name}", *texts]) for name, texts in flags.items()}
    given = _Given(flags)
    schedule = _count_in_batches(given)
    values: dict[str, JSON] = {"model": {}, "train": {"precision": "fp32"}, "parallel": {}}
    settings = {flag["key"]: given.text(name, flag.get("default")) for name, flag in VALUES.items()}
    settings |= {
        switch["key"]: switch["value"] for name, switch in SWITCHES.items() if given.has(name)
    }
    for key, value in settings.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    values["train"] |= {key: value for key, value in schedule.items() if value is not None}
    missing = _derive(values, given)
    loggers = ["tensorboard"] if given.has("tensorboard-dir") else []
    data = []
    without_effect = []
    for name in flags.keys() - given.taken - {"load", "finetune"}:
        if DATA.fullmatch(name):
            data.append(shown[name])
        elif NO_EFFECT.fullmatch(name) or (name in SAME and _equal(SAME[name], flags[name])):
            without_effect.append(shown[name])
        else:
            missing.append(f"{shown[name]} has no counterpart here")
    refused = sorted(
        sentence for sentence in missing if not NOTED.fullmatch(sentence.split()[0].lstrip("-"))
    )
    if refused:
        raise BadInput(
            "these flags are unknown, or ask for another model or another training than this"
            f" program has: {'; '.join(refused)}. Leave them out to translate the others"
        )
    missing += _start(values, given, shown)
    run = {"name": "megatron", **values, "record": {"loggers": loggers}}
    return Translation(
        parse_config(run, RunConfig, WHERE), sorted(data), sorted(without_effect), sorted(missing)
    )


class _Given:
    """Flags of a command line: `flags`, a dict from a name without dashes to its list of values,
    and `taken`, the set of names that the methods were asked for, so that the other flags can be
    reported. The method `has` returns True for a flag that is given; `text` and `number` return the
    flag's value or the caller's default, as text and as a float, and raise BadInput unless there is
    exactly one, which is no shell variable and, for `number`, a finite number."""

    def __init__(self, flags: dict[str, list[str]]) -> None:
        self.flags = dict(flags)
        self.taken = set[str]()

    def has(self, name: str) -> bool:
        """Return True if the flag `name`, written without its dashes, is on the command line. The
        flag counts as read in either case."""
        self.taken.add(name)
        return name in self.flags

    def text(self, name: str, default: str | None = None) -> str:
        """Return the value of the flag `name`, written without its dashes, as text, or `default` if
        the flag is not given, and count the flag as read. Raises BadInput unless there is exactly
        one value, so also if the flag is not given and `default` is None, and for a value that
        begins with `$`, a shell variable."""
        values = [] if default is None else [default]
        if self.has(name):
            values = self.flags[name]
        if len(values) != 1 or values[0].startswith("$"):
            raise BadInput(
                f"--{name} needs one value, and the arguments give it"
                f" {' '.join(values) or 'nothing'}: write a value there, also in place of a shell"
                " variable"
            )
        return values[0]

    def number(self, name: str, default: str | None = None) -> float:
        """Return the value of the flag `name`, written without its dashes, or the text `default` if
        the flag is not given, as a float, and count the flag as read. Raises BadInput unless there
        is exactly one value and it is a finite number."""
        text = self.text(name, default)
        try:
            if math.isfinite(number := float(text)):
                return number
        except ValueError:
            pass
        raise BadInput(f"--{name} is {text!r}, not a finite number")


def _count_in_batches(given: _Given) -> JSON:
    """Return a dict name → value of the settings of `[train]` for clock, warm-up and decay, counted
    in batches; None for a setting that keeps its default. Sets in `given` the flags
    --global-batch-size, if it is missing, to --micro-batch-size, and --train-iters, if
    --train-samples is given, to the number of whole batches in it.

    The rules are Megatron-LM's (`training.py`: `update_train_iters`,
    `get_optimizer_param_scheduler`). Raises BadInput for settings that its `arguments.py` refuses,
    so that no schedule is guessed, and for a flag that is missing or not a number.
    """
    flags = given.flags
    flags.setdefault("global-batch-size", [given.text("micro-batch-size")])
    ramp = flags["rampup-batch-size"] if given.has("rampup-batch-size") else None
    recipe = {
        "global_batch_size": given.text("global-batch-size"),
        "microbatch_size": given.text("micro-batch-size"),
        "rampup_batch_size": ramp,
    }
    batches = BatchSchedule(parse_config(recipe, TrainConfig, WHERE))
    batch = given.number("global-batch-size")
    in_samples = given.has("train-samples")
    unit, other, size = ("samples", "iters", batch) if in_samples else ("iters", "samples", 1)
    names = ("lr-decay", "lr-warmup", "lr-wsd-decay")
    mixed = [f"--{name}-{other}" for name in names if given.has(f"{name}-{other}")]
    if mixed:
        raise BadInput(
            f"{mixed[0]} does not go with --train-{unit}: Megatron-LM takes all lengths of the"
            f" schedule in one unit, here --…-{unit}"
        )
    if ramp and not in_samples:
        raise BadInput(
            "--rampup-batch-size needs --train-samples: Megatron-LM refuses it with --train-iters"
        )
    total = given.number(f"train-{unit}") / size
    if in_samples:  # the last batch, if it is not whole, is left out
        samples = int(total * batch)
        flags["train-iters"] = [str(batches.whole_iterations(samples))]
        reached = batches.samples_before(int(flags["train-iters"][0])) / batch
    else:
        reached = total
    counted = {
        name: given.number(f"{name}-{unit}") / size for name in names if given.has(f"{name}-{unit}")
    }
    end = counted.get("lr-decay", total)
    warmup = counted.get("lr-warmup", 0.0)
    if given.has("lr-warmup-fraction"):
        if "lr-warmup" in counted:
            raise BadInput(
                f"--lr-warmup-fraction does not go with --lr-warmup-{unit}: leave out one of them,"
                " as Megatron-LM demands"
            )
        warmup = given.number("lr-warmup-fraction") * end
    return {
        "clock": "samples",
        "decay_iterations": end if end != reached else None,
        "warmup_iterations": warmup,
        "wsd_iterations": counted.get("lr-wsd-decay"),
    }


def _derive(values: dict[str, JSON], given: _Given) -> list[str]:
    """Set in `values`, a dict section → name → setting that has the values of single flags already,
    the settings that a rule takes from the flags `given`: the ramp-up of the batch, validation
    samples, chunks and their schedule, recomputation, and the sizes of the vocabulary. Remove the
    initial loss scale unless the precision is fp16.

    Return a list with a sentence for each of --attention-dropout, --ffn-hidden-size and
    --max-position-embeddings that is given with another value than this engine derives from other
    flags. Raises BadInput for a flag that is missing or not a number.
    """
    model = values["model"]
    train = values["train"]
    parallel = values["parallel"]
    if train["precision"] != "fp16":
        del train["initial_loss_scale"]
    if rampup := given.flags.get("rampup-batch-size"):
        train["rampup_batch_size"] = rampup
    batches = max(1, int(given.number("eval-iters", "100")))
    train["validation_samples"] = batches * int(given.number("global-batch-size"))
    if given.has(flag := "num-layers-per-virtual-pipeline-stage"):
        layers = given.number("pipeline-model-parallel-size", "1") * given.number(flag)
        parallel["chunks"] = int(given.number("num-layers") // max(layers, 1))
    if str(parallel["chunks"]) != "1":
        parallel["schedule"] = "interleaved"
    if given.flags.get("recompute-method") == ["uniform"] and parallel["recompute"] == "none":
        # `uniform` alone is the older way to ask for full recomputation.
        parallel["recompute"] = "full"
    model["vocab_size"] = int(given.number("vocab-size", str(GPT2_VOCABULARY)))
    tp = int(given.number("tensor-model-parallel-size", "1"))
    multiple = int(given.number("make-vocab-size-divisible-by", "128"))
    model["padded_vocab_size"] = padded_vocab_size(model["vocab_size"], multiple, tp)
    return [
        f"--{name} {given.text(name)} has no counterpart here: {why}"
        for name, must, why in (
            ("attention-dropout", model["dropout"], "it always equals --hidden-dropout"),
            (
                "ffn-hidden-size",
                str(4 * given.number("hidden-size")),
                "it is always four times --hidden-size",
            ),
            ("max-position-embeddings", model["seq_length"], "it always equals --seq-length"),
        )
        if given.has(name) and not _equal(must, [given.text(name)])
    ]


def _start(values: dict[str, JSON], given: _Given, shown: dict[str, str]) -> list[str]:
    """Set `train.init_from` in `values`, a dict section → name → setting, to the text that the
    flags `given` have for --load, and return a list of one sentence, which asks for an imported
    checkpoint there. Without a value of --load, or if it names the folder of --save and --finetune
    is not given, the training starts anew: nothing is set, and the list is empty. `shown` maps each
    flag's name to one text, the flag with its values. Raises BadInput if --load has several values,
    or a shell variable."""
    load = given.flags.get("load")
    if not load or (load == given.flags.get("save") and "finetune" not in given.flags):
        return []  # without a checkpoint there yet, it starts anew; later the same command resumes
    values["train"]["init_from"] = given.text("load")
    whole = (
        ""
        if "finetune" in given.flags
        else "; Megatron-LM also loads optimizer and iteration, here they are new"
    )
    return [
        f"{shown['load']} becomes train.init_from, which takes a checkpoint of this engine: name"
        f" there the one that `mlm-train import` makes of it{whole}"
    ]


def to_megatron(config: RunConfig) -> MegatronFlags:
    """Return a MegatronFlags: the flags with which Megatron-LM trains a RunConfig, as a list of
    words of a command line, and a list of sentences about settings that flags do not express. It is
    the inverse of `from_megatron`.

    Raises BadInput for a model other than GPT-2.
    """
    if config.model.family != "gpt2":
        raise BadInput(
            f"the model is a {config.model.family}, and pretrain_gpt.py, whose flags `to-megatron`"
            " prints, trains only a GPT-2"
        )
    model = config.model
    train = config.train
    parallel = config.parallel
    values = flatten(config.model_dump(mode="json")) | {
        "train.initial_loss_scale": train.initial_loss_scale
    }
    flags = {name: str(values[flag["key"]]) for name, flag in VALUES.items()}
    fits = padded_vocab_size(model.vocab_size, 128, parallel.tp) == model.padded_vocab_size
    flags |= _schedule_flags(train) | {
        "lr-decay-style": train.decay.removeprefix("clipped-"),
        "max-position-embeddings": str(model.seq_length),
        "attention-dropout": str(model.dropout),
        "eval-iters": str(-(-train.validation_samples // train.global_batch_size)),
        "make-vocab-size-divisible-by": str(
            128 if fits else model.padded_vocab_size // parallel.tp
        ),
        "vocab-size": str(model.vocab_size),
    }
    is_written = {
        "train-iters": "train-samples" not in flags,
        "lr-wsd-decay-style": train.decay == "WSD",
        "lr-decay-style": train.decay != "exponential",
        "optimizer": train.optimizer == "adam",
        "num-virtual-stages-per-pipeline-rank": parallel.chunks > 1,
        "recompute-granularity": parallel.recompute != "none",
        "recompute-num-layers": parallel.recompute == "full",
    }
    flags = {name: value for name, value in flags.items() if is_written.get(name, True)}
    if parallel.recompute == "full":
        flags["recompute-method"] = "uniform"
    flags |= {"tensorboard-dir": config.name} if config.record.loggers else {}
    words = []
    for name, value in flags.items():
        words += [f"--{name}", value]
    if train.rampup_batch_size:
        words += ["--rampup-batch-size", *map(str, train.rampup_batch_size)]
    words += ["--load", str(train.init_from), "--finetune"] if train.init_from else []
    switches = {name: SWITCHES[name] for name in WRITTEN_SWITCHES}
    words += [
        f"--{name}" for name, switch in switches.items() if values[switch["key"]] == switch["value"]
    ]
    ours, theirs = (
        flatten(run.model_dump(mode="json")) for run in (config, from_megatron(words).config)
    )
    sections = ("model.", "train.", "parallel.", "record.")
    keys = [
        key for key in sorted(ours) if key.startswith(sections) and ours[key] != theirs.get(key)
    ]
    missing = [
        f"{key} = {ours[key]!r}: with them Megatron-LM has {theirs.get(key)!r}" for key in keys
    ]
    return MegatronFlags(
        words,
        missing
        + ["data.dataset: add --data-path and --split yourself"] * bool(config.data.dataset),
    )


def _schedule_flags(train: TrainConfig) -> dict[str, str]:
    """Return a dict of flags, name without dashes in front → value as text, for the three lengths
    of the learning rate's schedule: `lr-decay`, its whole, `lr-warmup` and `lr-wsd-decay`. A length
    of 0 gives no flag. The names end in `-iters` if the batch does not grow and the lengths are
    whole iterations, else in `-samples`, and `train-samples`, the training's length, comes with
    them. If a length is no whole number of samples, the warm-up is given as `lr-warmup-fraction`,
    its share of the schedule, even if that is 0, and the other lengths are rounded."""
    end = end_of_schedule(train)
    named_lengths = {
        "lr-decay": end,
        "lr-warmup": train.warmup_iterations,
        "lr-wsd-decay": train.wsd_iterations,
    }
    lengths = {name: length for name, length in named_lengths.items() if length}
    batch = train.global_batch_size
    is_exact = all(
        abs(length * batch - round(length * batch)) < 1e-6 for length in lengths.values()
    )
    fraction = {} if is_exact else {"lr-warmup-fraction": repr(lengths.pop("lr-warmup", 0) / end)}
    if not train.rampup_batch_size and all(length % 1 == 0 for length in lengths.values()):
        return fraction | {f"{name}-iters": str(int(length)) for name, length in lengths.items()}
    samples = {"train-samples": str(BatchSchedule(train).samples_before(train.iterations))}
    return (
        samples
        | fraction
        | {f"{name}-samples": str(round(length * batch)) for name, length in lengths.items()}
    )


def _flags(words: Iterable[str]) -> dict[str, list[str]]:
    """Return a dict flag → list of its values as texts, from the words of a command line. A flag
    has its current name, without dashes before it and with a hyphen for each underscore. Its values
    are the text after `=`, if there is one, and the words up to the next flag. A switch has an
    empty list, and a repeated flag its last values. Raises BadInput for a word before the first
    flag."""
    flags = {}
    values = []
    for word in words:
        if match := re.fullmatch(r"--([A-Za-z][\w-]*)(?:=(.*))?", word):
            name = match[1].replace("_", "-")
            values = [] if match[2] is None else [match[2]]
            flags[CURRENT_NAMES.get(name, name)] = values
        elif flags:
            values.append(word)
        else:
            raise BadInput(
                f"{word!r} comes before the first flag: give one script alone, or pretrain_gpt.py's"
                " arguments, which begin with --"
            )
    return flags


def _equal(text: str, values: list[str]) -> bool:
    """Return True if the list `values` has exactly one text, which equals `text`, as text or as a
    number."""
    try:
        return len(values) == 1 and (text == values[0] or float(text) == float(values[0]))
    except ValueError:
        return False
