"""The recipe: everything that defines a run, in one flat frozen dataclass.

YAML keys and command-line flags are these fields and nothing else, so there is one name, one type and one rule for each
setting. Nested sections were rejected: they give every setting two spellings. Every rule about a value is checked here,
before anything is read or written.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin

from penstock.errors import RecipeError, counted, did_you_mean
from penstock.recipe.familiar import FAMILIAR, translated
from penstock.recipe.rules import broken_rules


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
    rope: str | None = None
    """How examples go beyond the positions that the model knows: yarn:F or linear:F scale its rotary positions by F, in
    the model that is exported too; as-is leaves them as they are. Without it such examples are refused."""
    trust_remote_code: bool = False
    """Run Python code that comes with a Hub model. Off, since it can do anything."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where the model runs. `auto`: the GPU if there is one."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Working precision of weights and arithmetic; masters are fp32 anyway. `auto`: bf16 on a GPU, and on a
    CPU that has instructions for it."""
    matmul: Literal["bf16", "fp8"] = "bf16"
    """In what the linear layers of the decoder multiply. `fp8` casts what goes into their products, forward and
    backward: faster on GPUs from Ada and Hopper on, with less precise gradients. Masters and moments stay exact; the
    first and the last layer, head, routers and experts stay as they are. On a CPU it is emulated."""
    bind_cores: bool = True
    """Keep to the cores near the GPU, of several ranks each to its share. --no-bind-cores lets them run anywhere."""
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
    weights: str = "auto"
    """Where the weights of the decoder layers live: resident (on the GPU), streamed (in host memory, and on the GPU
    while they compute, which computes every layer again in backward), or a number of layers that are streamed, the last
    ones. `auto`: as many as must be."""
    order: Literal["auto", "rows", "layers"] = "auto"
    """How several micro-batches go through the layers: `rows`, one after another, each through all; `layers`, all of
    them through a layer before the next, so that streamed weights cross the link twice a step and not twice a
    micro-batch. Results differ by rounding. `auto`: layers where weights are streamed, on one GPU."""
    inputs: str = "auto"
    """Activations that enter each layer, from which backward computes it again: kept (on the GPU), parked (in host
    memory), or parked:N, those of every N-th layer, from which backward computes N layers again together. Goes with
    streamed weights or the order layers, on one GPU. `auto`: the faster that fits."""
    tile: str = "auto"
    """Tokens of which a layer computes everything but attention at once, so that long rows take less memory: a number,
    or `none` for whole rows. Goes with streamed weights or the order layers, on one GPU. Results differ by rounding.
    `auto`: what the plan finds, `none` where it saves nothing."""
    gpu_memory: str = "auto"
    """The most that the run may take of the GPU's memory, such as 24GB or 22GiB; `auto`: all of it."""
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
    leaf_module: str | None = None
    """Engine deepspeed: classes of modules that ZeRO-3 gathers as one, with commas, as those of experts must be. Known
    without it: GptOssExperts, Qwen3MoeSparseMoeBlock."""
    deepspeed_config: str | None = None
    """Engine deepspeed: a JSON file whose values replace those of the generated configuration."""

    data: str = "demo"
    """A file, a directory, a Hub data set, or `demo` (embedded). Several with commas; shares of the examples as
    a.jsonl:0.7,b.parquet:0.3."""
    data_split: str = "train"
    """Split of a Hub data set, or of a directory that has several."""
    data_stream: bool = False
    """Read a Hub data set while it is tokenized, instead of fetching it first."""
    data_format: Literal["auto", "alpaca", "messages", "prompt-completion", "text"] = "auto"
    """Form of the rows. `auto` tells it from the columns."""
    columns: str = ""
    """Columns by other names, such as question=prompt,answer=completion; an empty name leaves a column out."""
    split_documents: Literal["none", "lines", "blank-lines", "length"] = "none"
    """Plain text as several documents: of a .txt file every line, or what stands between blank lines; or `length`,
    every document over max_length in pieces of it, so that nothing is cut. Without a word, --split-documents is
    blank-lines."""
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
    too_long: Literal["truncate", "split", "drop", "refuse"] = "truncate"
    """What happens to an example over max_length. `split`: it becomes several, each of which begins with the last token
    of the one before, so that every token is trained on as it would be. Examples and tokens are counted and reported.
    """
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
    """Split of a Hub data set, or of a directory, that is evaluated on."""

    batch_size: int = 4
    """Rows in a step."""
    micro_batch_size: int = 0
    """Rows that a GPU runs at once; their gradients are added up. 0: all that it has of a step."""
    accumulate_dtype: Literal["bf16", "fp32"] = "fp32"
    """Precision in which gradients of micro-batches add up; each sum is rounded once. With three or more, `fp32` takes
    4 bytes of GPU memory a parameter and `bf16` takes 2, with an error that grows with their number."""
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
        for field, rule, remedy in broken_rules(self):
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
    def leaf_list(self) -> list[str]:
        """The classes of modules that are gathered as one, beside those that are known."""
        return _words(self.leaf_module or "")

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


def inputs_every(inputs: str) -> int:
    """Layers from one saved input to the next."""
    return int(inputs.partition(":")[2] or 1)


def check_inputs(recipe: Recipe, num_layers: int) -> None:
    """Refuse `parked:N` of a model with fewer than N layers."""
    if inputs_every(recipe.inputs) > num_layers:
        what, remedy = f"the model has {counted(num_layers, 'layer')}", f"Use parked:{num_layers} or a smaller number."
        raise RecipeError(what, where=f"inputs = {recipe.inputs}", remedy=remedy)


def tile_tokens(recipe: Recipe) -> int:
    """Tokens of a tile, 0 for none. `auto`, if nobody has planned, is none."""
    return 0 if recipe.tile in ("auto", "none") else int(recipe.tile)


Recompute = Literal["none", "selected", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selected", "full")
"""From most memory to least."""


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


FP8_ENDS = 1
"""Layers at each end of the decoder whose products stay as they are with `matmul: fp8`."""
FP8_MULTIPLE = 16
"""Both sides of a linear layer are multiples of it, or its products stay as they are too: tensor cores take no other,
and in other shapes the kernel of `model/turned.py` was wrong."""


def fp8_layers(num_layers: int) -> range:
    """Layers whose products run in fp8: all but the first and the last.

    Of the 0.032 that fp8 adds to the loss of SmolLM2-135M, which has thirty, these two add 0.0085: the last alone
    0.0062, more than any other, the first 0.0015, less than nine of the inner ones. The first is left out because
    Megatron-LM's `--first-last-layers-bf16` does so. Two at each end add 0.011, three 0.013
    (benchmarks/results/2026-11-17-h200/fp8/fp8_layers.jsonl, second line).
    """
    return range(FP8_ENDS, max(FP8_ENDS, num_layers - FP8_ENDS))


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
    """`value` as the type of its field. YAML reads 2e-5 as text and 16 as a number; either is taken for the other."""
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
        except (ValueError, OverflowError):  # a whole number has no largest
            pass
    elif hint is str and isinstance(value, int):  # weights: 16
        return str(value)
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
