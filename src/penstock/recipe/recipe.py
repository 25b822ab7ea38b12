"""The recipe: everything that defines a run, in one flat frozen dataclass.

YAML keys and command-line flags are these fields and nothing else, so there is one name, one type and one rule for each
setting. Nested sections were rejected: they give every setting two spellings. Every rule about a value is checked here,
before anything is read or written.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin

from penstock.errors import RecipeError, did_you_mean
from penstock.recipe.familiar import FAMILIAR, translated


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A run: which model, which data, how it is trained, where it goes."""

    name: str = "run"
    """Name of the run."""
    output_dir: str = ""
    """Where the run is written. Empty: runs/NAME."""

    model: str = "demo"
    """Hub name, local directory, .gguf file, or `demo` (embedded)."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    tokenizer: str | None = None
    """Where the tokenizer comes from, if not from the model. `demo` is the embedded one."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` builds the architecture only, for benchmarks and tests."""
    shape: str | None = None
    """With --init random: changes to the architecture, such as num_hidden_layers=2,hidden_size=64."""
    trust_remote_code: bool = False
    """Run Python code that comes with a Hub model. Off, since it can do anything."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where the model runs. `auto`: the GPU if there is one."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Working precision of weights and arithmetic; masters are fp32 anyway. `auto`: bf16 on a GPU, and on a
    CPU that has instructions for it."""
    bind_cores: bool = True
    """Keep each of several ranks to its share of the cores near its GPU. --no-bind-cores lets them run anywhere."""
    reduce_dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision in which several ranks add up their gradients. Those of fp32 weights are added in fp32 anyway."""
    attention: Literal["auto", "varlen", "sdpa", "eager", "flash_attention_2"] = "auto"
    """How attention is computed. All of them respect example boundaries; `auto` is varlen."""
    recompute: str = "auto"
    """What backward computes again instead of keeping it: none, full, or selected, which is what takes much memory for
    little time. selected:N does so in the first N layers; full:N takes these whole and of the others what selected
    takes. `auto` takes what the plan finds fastest."""
    compile: bool = True
    """Compile the decoder layers of models over 100 M parameters on a GPU: faster steps after a start of half a minute;
    results differ by rounding."""
    mode: Literal["superoffload", "zerooffload"] = "superoffload"
    """`superoffload` hides updates under the arithmetic; `zerooffload`, the baseline, makes them after backward."""
    homes: str = "auto"
    """Where optimizer state lives: auto, gpu, stream, host, or shares such as gpu=0.5,stream=0.3,host=0.2."""
    update: Literal["auto", "after-norm", "in-backward"] = "auto"
    """When weights are updated. `auto`: after the global norm is known, or in backward if nothing is clipped."""
    cpu_adam_cores: float = 0.9
    """Share of the cores that update state in the home `host`, or that DeepSpeed's SuperOffload takes for CPUAdam."""

    engine: Literal["penstock", "deepspeed"] = "penstock"
    """What runs the steps: ours, or DeepSpeed ZeRO-3, which is installed apart."""
    offload_ratio: float = 1.0
    """Engine deepspeed: share of the optimizer state that is on the host; the rest is on the GPU."""
    bucket_size: int = 400_000_000
    """Engine deepspeed: elements that are reduced at once, and elements that are updated at once."""
    param_offload: Literal["none", "cpu", "nvme"] = "none"
    """Engine deepspeed: where the weights lie while they are not used. `none`: on the GPU."""
    nvme_path: str | None = None
    """Engine deepspeed: directory on a local disk for --param-offload nvme."""
    deepspeed_config: str | None = None
    """Engine deepspeed: a JSON file whose values replace those of the generated configuration."""

    data: str = "demo"
    """A JSON, JSONL, CSV or Parquet file, a directory of them, a Hub data set, or `demo` (embedded)."""
    data_split: str = "train"
    """Split of a Hub data set."""
    data_format: Literal["auto", "alpaca", "messages", "prompt-completion", "text"] = "auto"
    """Form of the rows. `auto` tells it from the columns."""
    data_percent: float = 100.0
    """Share of the examples that is used, in percent; chosen by the seed, or the first ones with --no-shuffle."""
    template: Literal["auto", "chat", "alpaca", "none"] = "auto"
    """Text around the turns. `auto`: the tokenizer's chat template if it has one, else Alpaca's headings."""
    end_token: str | None = None
    """Token that ends a response, if not the tokenizer's end token."""
    train_on_prompt: bool = False
    """Train on prompts too, not only on responses and their end token."""
    max_length: int = 4096
    """Tokens in a row; a longer example is handled by --too-long. 0: as many as the longest example has, up to 4096 and
    to what the model and the memory have room for."""
    too_long: Literal["truncate", "drop", "refuse"] = "truncate"
    """What happens to an example over max_length. Each is counted and reported."""
    packing: bool = True
    """Put several examples into one row. --no-packing pads each to the longest of its micro-batch; where layers are
    compiled, as on a GPU, to max_length."""
    shuffle: bool = True
    """Mix the order in every epoch. --no-shuffle keeps the order of the file."""
    validation: float = 0.0
    """Share of the examples held out to measure the evaluation loss, from 0 to 0.5."""
    eval_data: str | None = None
    """A file or Hub data set to evaluate on, instead of a held-out share."""
    eval_split: str = "test"
    """Split of a Hub data set that is evaluated on."""

    batch_size: int = 4
    """Rows in a step."""
    micro_batch_size: int = 0
    """Rows that a GPU runs at once; their gradients are added up. 0: all that it has of a step."""
    epochs: float = 1.0
    """Passes over the data."""
    max_steps: int = 0
    """Stop after this many steps. 0: as many as the epochs take."""
    lr: float = 1e-5
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises from zero, from 0 to 1."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.01
    """AdamW's weight decay; not applied to norms and biases."""
    states: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of AdamW's moments; masters are fp32 anyway. `fp32` is exact and takes 10 bytes a parameter, with masters.
    `bf16` takes 6 and `int8` 4: stochastic rounding, without bias but with noise, so that the run is another."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm. 0: never."""
    skip_limit: int = 10
    """A step with a gradient that is not finite is skipped; this many in a row end the run."""
    seed: int = 42
    """Seed of the order of the data and of random weights."""
    deterministic: bool = False
    """Use only operations that give the same bits every time, also where that is slower."""
    eval_every: int = 0
    """Steps between evaluations. 0: at the end only."""
    log_every: int = 1
    """Steps between lines on the console; metrics.jsonl has every step."""
    save_every: int = 0
    """Steps between checkpoints. 0: at the end, and when the run is interrupted."""
    keep: int = 2
    """Checkpoints that are kept, the newest ones. 0: none is ever saved, and an interrupted run cannot go on."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest evaluation loss too, however old it is. It is saved when it is found."""
    patience: int = 0
    """End the run early after this many evaluations in a row without a new lowest loss. 0: never."""
    prompt: str | None = None
    """A question that the model answers before and after training."""
    track: str = ""
    """Where metrics go beside metrics.jsonl: tensorboard, wandb, trackio, or several with commas."""
    project: str = "penstock"
    """Project of wandb and trackio; the run there has the name of this one."""
    tags: str = ""
    """Tags of the run in wandb and trackio, with commas."""

    def __post_init__(self) -> None:
        for field, rule, remedy in _broken_rules(self):
            raise RecipeError(rule, where=f"{field} = {getattr(self, field)!r}", remedy=remedy)

    @property
    def run_dir(self) -> Path:
        """Where the run is written."""
        return Path(os.path.expanduser(self.output_dir or f"runs/{self.name}"))

    @property
    def track_list(self) -> list[str]:
        """The trackers that are named."""
        return _words(self.track)

    @property
    def tag_list(self) -> list[str]:
        """The tags."""
        return _words(self.tags)

    @property
    def rows_at_once(self) -> int:
        """Rows in a micro-batch, with one rank."""
        return self.rows_on(1)

    def rows_on(self, ranks: int) -> int:
        """Rows in a micro-batch of each of so many ranks: no more than its share of a step."""
        share = -(-self.batch_size // ranks)
        return min(self.micro_batch_size or share, share)


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def _broken_rules(r: Recipe) -> list[tuple[str, str, str]]:
    """(field, rule, remedy) of every rule that the values break."""
    numbers = {name: getattr(r, name) for name in FIELDS if isinstance(getattr(r, name), float)}
    checks: list[tuple[bool, str, str, str]] = [
        *((math.isfinite(v), f, "must be a finite number", "Such as 0.5 or 1e-5.") for f, v in numbers.items()),
        (bool(r.name.strip()) and "/" not in r.name, "name", "must be a word without '/'", "A path is --output-dir."),
        (r.lr > 0, "lr", "must be positive", "A usual value is 1e-5."),
        (r.eps > 0, "eps", "must be positive", "A usual value is 1e-8."),
        (r.weight_decay >= 0, "weight_decay", "must not be negative", "0 switches it off."),
        (0 <= r.warmup <= 1, "warmup", "must be between 0 and 1", "It is a share of the steps: 0.05 warms up for 5 %."),
        (all(0 <= b < 1 for b in r.betas), "betas", "each must be at least 0 and under 1", "Usual: 0.9 0.999."),
        (r.max_grad_norm >= 0, "max_grad_norm", "must not be negative", "0 switches clipping off."),
        (r.epochs > 0, "epochs", "must be positive", "1 is one pass over the data; 0.5 is half of one."),
        (r.max_steps >= 0, "max_steps", "must not be negative", "0 means as many as the epochs take."),
        (r.batch_size >= 1, "batch_size", "must be at least 1", "It is the number of rows in a step."),
        (r.micro_batch_size >= 0, "micro_batch_size", "must not be negative", "0 means all of a step."),
        (r.micro_batch_size <= r.batch_size, "micro_batch_size", f"is over batch_size {r.batch_size}", "Lower it."),
        (r.max_length == 0 or r.max_length >= 2, "max_length", "must be at least 2, or 0",
         "A token is predicted from the one before it; 0 takes the length from the data."),
        (0 < r.data_percent <= 100, "data_percent", "must be over 0 and at most 100", "10 uses a tenth of them."),
        (0 <= r.validation <= 0.5, "validation", "must be between 0 and 0.5", "It is a share: 0.05 holds out 5 %."),
        (not (r.validation and r.eval_data), "validation", "does not go with eval_data", "Leave one of them out."),
        (r.eval_every >= 0, "eval_every", "must not be negative", "0 evaluates at the end only."),
        (not r.eval_every or bool(r.validation or r.eval_data), "eval_every", "there is nothing to evaluate on",
         "Hold examples out with --validation 0.05, or name a file with --eval-data."),
        (r.log_every >= 1, "log_every", "must be at least 1", "1 shows every step; --quiet shows none."),
        (r.save_every >= 0, "save_every", "must not be negative", "0 saves at the end and when interrupted."),
        (r.keep >= 0, "keep", "must not be negative", "0 saves no checkpoints at all."),
        (not r.save_every or r.keep >= 1, "save_every", "does not go with keep = 0", "Leave one of them out."),
        (not r.keep_best or r.keep >= 1, "keep_best", "does not go with keep = 0", "Leave one of them out."),
        (not r.keep_best or r.eval_every >= 1, "keep_best", "needs evaluations while the run goes on",
         "Such as --eval-every 50 --validation 0.05."),
        (r.patience >= 0, "patience", "must not be negative", "0 never ends a run early."),
        (not r.patience or r.eval_every >= 1, "patience", "needs evaluations while the run goes on",
         "Such as --eval-every 50 --validation 0.05."),
        (r.skip_limit >= 1, "skip_limit", "must be at least 1", "10 is the default."),
        (0 <= r.seed < 2**32, "seed", "must be between 0 and 4294967295", "42 is the default."),
        (_RECOMPUTE.fullmatch(r.recompute) is not None, "recompute",
         "must be auto, none, selected, full, or one of the last two with a number of layers", "Such as selected:8."),
        (not r.shape or r.init == "random", "shape", "needs random weights", "Add --init random."),
        (0 < r.cpu_adam_cores <= 1, "cpu_adam_cores", "must be over 0 and at most 1", "It is a share of the cores."),
        (r.update != "in-backward" or not r.max_grad_norm, "update", "the global norm is not known in backward",
         "Add --max-grad-norm 0, or leave it at auto."),
        (r.mode != "zerooffload" or r.homes in ("auto", "host"), "homes", "zerooffload keeps all state in host",
         "Leave one of them out."),
        (r.mode != "zerooffload" or r.update != "in-backward", "update", "zerooffload updates after backward",
         "Leave one of them out."),
        *_deepspeed_rules(r),
        (parse_homes(r.homes) is not None, "homes",
         "must be auto, gpu, stream, host, or shares of them that add up to 1", "Such as gpu=0.5,stream=0.3,host=0.2."),
        (set(r.track_list) <= set(TRACKERS), "track", f"must be among {', '.join(TRACKERS)}", "Several with commas."),
        (bool(r.project.strip()), "project", "must not be empty", "Leave it out for penstock."),
    ]  # fmt: skip
    return [(field, rule, remedy) for ok, field, rule, remedy in checks if not ok]


def _deepspeed_rules(r: Recipe) -> list[tuple[bool, str, str, str]]:
    """(kept, field, rule, remedy) of the fields that only the engine `deepspeed` reads, and of those it cannot."""
    ours, theirs = r.engine == "penstock", r.engine == "deepspeed"
    only = [
        name for name in ("param_offload", "nvme_path", "deepspeed_config") if getattr(r, name) not in ("none", None)
    ]
    not_saved = theirs and (r.mode == "superoffload" or r.param_offload == "nvme")
    use_ours = "Leave it out, or use --engine penstock."
    return [
        *((not ours, name, "only the engine deepspeed knows it", "Add --engine deepspeed.") for name in only),
        (0 <= r.offload_ratio <= 1, "offload_ratio", "must be between 0 and 1", "It is a share: 0.8 offloads 80 %."),
        (r.bucket_size >= 1, "bucket_size", "must be positive", "The reference has 400000000."),
        ((r.param_offload == "nvme") == bool(r.nvme_path), "nvme_path", "goes with param_offload = nvme, and only then",
         "Set both, or neither."),
        (not theirs or r.homes == "auto", "homes", "DeepSpeed has no homes; its share on the host is offload_ratio",
         use_ours),
        (not theirs or r.update == "auto", "update", "DeepSpeed chooses this itself", use_ours),
        (not theirs or r.states == "fp32", "states", "DeepSpeed keeps fp32 moments", use_ours),
        (not not_saved or not r.keep_best, "keep_best", "DeepSpeed cannot save this run", use_ours),
        (not not_saved or not r.save_every, "save_every", "DeepSpeed cannot save this run: SuperOffload keeps moments "
         "in a worker process, and weights on NVMe are in no checkpoint",
         "Use --engine penstock, or --mode zerooffload without --param-offload nvme."),
    ]  # fmt: skip


def parse_homes(text: str) -> str | dict[str, float] | None:
    """`auto` or one home as it is, shares as a dictionary, None for anything else."""
    if text in ("auto", *HOMES):
        return text
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            shares[name.strip()] = float(number)
        except ValueError:
            return None
    known = set(shares) <= set(HOMES) and len(shares) == text.count(",") + 1
    whole = all(share > 0 for share in shares.values()) and math.isclose(sum(shares.values()), 1, abs_tol=0.005)
    return shares if known and whole else None


Recompute = Literal["none", "selected", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selected", "full")
"""From most memory to least."""
_RECOMPUTE = re.compile(r"auto|none|(selected|full)(:[0-9]+)?")


def recompute_by_layer(recompute: str, num_layers: int) -> list[Recompute]:
    """What is computed again of every layer. `auto`, if nobody has planned, is nothing."""
    word, _, count = ("none" if recompute == "auto" else recompute).partition(":")
    place = RECOMPUTES.index(cast(Recompute, word))
    first = int(count) if count else num_layers
    if first > num_layers:
        raise RecipeError(
            f"the model has {num_layers} layers", where=f"recompute = {recompute}", remedy=f"Use {word} for all."
        )
    return [RECOMPUTES[place] if number < first else RECOMPUTES[place - 1] for number in range(num_layers)]


TRACKERS = ("tensorboard", "wandb", "trackio")
HOMES = ("gpu", "stream", "host")
FIELDS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Recipe)}


def with_values(base: Recipe, values: dict[str, object], where: str) -> Recipe:
    """`base` with the values of a YAML mapping, each checked against its field's type."""
    hints = typing.get_type_hints(Recipe)
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if key not in FIELDS:
            theirs = {name: value for name, value in values.items() if name in FAMILIAR and name not in FIELDS}
            remedy = did_you_mean(str(key), FIELDS)
            if key in theirs:
                remedy = translated(theirs, lambda field, value: f"{field}: {_yaml(value)}")
            raise RecipeError(f"unknown key {key!r}", where=where, remedy=remedy)
        changes[key] = _coerce(value, hints[key], f"{where}: {key}")
    try:
        return dataclasses.replace(base, **changes)
    except RecipeError as error:
        raise RecipeError(error.what, where=f"{where}: {error.where}", remedy=error.remedy) from None


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _coerce(value: object, hint: Any, where: str) -> Any:
    """`value` as the type of its field. YAML reads 2e-5 as a string, so numbers in strings are taken for numbers."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for arg in args:
            try:
                return _coerce(value, arg, where)
            except RecipeError:
                continue
    elif origin is Literal:
        if value in args:
            return value
        remedy = did_you_mean(str(value), [str(a) for a in args])
        raise RecipeError(f"{value!r} is not one of {', '.join(map(str, args))}", where=where, remedy=remedy)
    elif origin is tuple:
        if isinstance(value, list | tuple) and len(value) == len(args):
            return tuple(_coerce(v, a, where) for v, a in zip(value, args, strict=True))
    elif hint is type(None):
        if value is None:
            return None
    elif hint is bool or isinstance(value, bool):
        if hint is bool and isinstance(value, bool):
            return value
    elif hint is float and isinstance(value, int | float | str):
        try:
            return float(value)
        except ValueError:
            pass
    elif isinstance(value, hint):
        return value
    remedy = "`penstock train --help` says what each field takes."
    raise RecipeError(f"{value!r} is not {_type_name(hint)}", where=where, remedy=remedy)


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "empty"}
    args = get_args(hint)
    if get_origin(hint) is tuple:
        return f"a list of {len(args)} numbers"
    if get_origin(hint) is Literal:
        return " or ".join(map(str, args))
    return " or ".join(_type_name(a) for a in args) if args else names[hint]


def to_dict(recipe: Recipe) -> dict[str, object]:
    """The recipe as plain values, in the order of its fields, ready for YAML or JSON."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(recipe).items()}
