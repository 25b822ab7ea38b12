"""Every rule about the values of a recipe, in one table: what holds, and what to do where it does not."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING

from penstock.recipe.lists import parse_columns, parse_homes, parse_parts, parse_size, path_of

if TYPE_CHECKING:
    from penstock.recipe.recipe import Recipe

TRACKERS = ("tensorboard", "wandb", "trackio")
_WEIGHTS = re.compile(r"auto|resident|streamed|[1-9][0-9]*")
_TILE = re.compile(r"auto|none|[1-9][0-9]*")
_ROPE = re.compile(r"as-is|(?:yarn|linear):([0-9]+(?:\.[0-9]+)?)")
_INPUTS = re.compile(r"auto|kept|parked(:[1-9][0-9]*)?")
_RECOMPUTE = re.compile(r"auto|none|(selected|full)(:[0-9]+)?")


def broken_rules(r: Recipe) -> list[tuple[str, str, str]]:
    """(field, rule, remedy) of every rule that the values break."""
    numbers = {name: getattr(r, name) for name in vars(r) if isinstance(getattr(r, name), float)}
    texts = {name: getattr(r, name) for name in vars(r) if isinstance(getattr(r, name), str)}
    rope = _ROPE.fullmatch("as-is" if r.rope is None else r.rope)
    checks: list[tuple[bool, str, str, str]] = [
        *((math.isfinite(v), f, "must be a finite number", "Such as 0.5 or 1e-5.") for f, v in numbers.items()),
        *(("\0" not in v, f, "holds the character of number 0", "No name has it.") for f, v in texts.items()),
        (r.name.strip() not in ("", ".", "..") and "/" not in r.name, "name", "must be a word without '/'",
         "A path is --output-dir."),
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
        (r.data == "" or parse_parts(r.data) is not None, "data",
         "must be names with commas, all of them with a share or none", "Such as a.jsonl:0.7,b.parquet:0.3."),
        (not _lone_share(r.data), "data", "gives a share to one name",
         "Shares are of several, such as a.jsonl:0.7,b.jsonl:0.3; --data-percent 50 takes half of one."),
        (all(p.weight is None for p in parse_parts(r.eval_data or "demo") or ()), "eval_data", "has shares",
         "All of it is evaluated on: leave them out."),
        (parse_columns(r.columns) is not None, "columns", "must be pairs of names, each name once",
         "Such as question=prompt,answer=completion; label= leaves a column out."),
        (0 < r.data_percent <= 100, "data_percent", "must be over 0 and at most 100", "10 uses a tenth of them."),
        (0 <= r.validation <= 0.5, "validation", "must be between 0 and 0.5", "It is a share: 0.05 holds out 5 %."),
        (not (r.validation and r.eval_data), "validation", "does not go with eval_data", "Leave one of them out."),
        (r.eval_every >= 0, "eval_every", "must not be negative", "0 evaluates at the end only."),
        (not r.eval_every or bool(r.validation or r.eval_data) or os.path.isdir(path_of(r.data)),  # with a split for it
         "eval_every", "there is nothing to evaluate on",
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
        (rope is not None, "rope", "must be as-is, or yarn or linear with a factor", "Such as yarn:4."),
        (rope is None or float(rope[1] or "inf") > 1, "rope", "the factor must be greater than 1",
         "Such as yarn:4, for four times as many positions; as-is leaves them as they are."),
        (not r.shape or r.init == "random", "shape", "needs random weights", "Add --init random."),
        (0 < r.cpu_adam_cores <= 1, "cpu_adam_cores", "must be over 0 and at most 1", "It is a share of the cores."),
        (r.update != "in-backward" or not r.max_grad_norm, "update", "the global norm is not known in backward",
         "Add --max-grad-norm 0, or leave it at auto."),
        (r.mode != "zerooffload" or r.homes in ("auto", "host"), "homes", "zerooffload keeps all state in host",
         "Leave one of them out."),
        (r.mode != "zerooffload" or r.update != "in-backward", "update", "zerooffload updates after backward",
         "Leave one of them out."),
        *_streaming_rules(r),
        *_deepspeed_rules(r),
        (parse_homes(r.homes) is not None, "homes",
         "must be auto, gpu, stream, host, or shares of them that add up to 1", "Such as gpu=0.5,stream=0.3,host=0.2."),
        (set(r.track_list) <= set(TRACKERS), "track", f"must be among {', '.join(TRACKERS)}", "Several with commas."),
        (bool(r.project.strip()), "project", "must not be empty", "Leave it out for penstock."),
    ]  # fmt: skip
    return [(field, rule, remedy) for ok, field, rule, remedy in checks if not ok]


def _lone_share(data: str) -> bool:
    parts = parse_parts(data) or ()
    return len(parts) == 1 and parts[0].weight is not None


def _streaming_rules(r: Recipe) -> list[tuple[bool, str, str, str]]:
    """(kept, field, rule, remedy) of weights that flow, and of what goes with them."""
    ours = r.engine == "penstock"
    use_ours = "Leave it out, or use --engine penstock."
    by_layer = r.weights not in ("auto", "resident") or r.order == "layers"
    return [
        (_WEIGHTS.fullmatch(r.weights) is not None, "weights", "must be auto, resident, streamed or a number of layers",
         "Such as streamed, or 16."),
        (r.gpu_memory == "auto" or parse_size(r.gpu_memory) is not None, "gpu_memory", "must be auto or a size",
         "Such as 24GB or 22GiB."),
        (ours or r.weights == "auto", "weights", "DeepSpeed's own is param_offload", use_ours),
        (ours or r.order == "auto", "order", "DeepSpeed chooses this itself", use_ours),
        (_INPUTS.fullmatch(r.inputs) is not None, "inputs", "must be auto, kept, parked, or parked with a number",
         "Such as parked:2, for the inputs of every second layer."),
        (ours or r.inputs == "auto", "inputs", "DeepSpeed chooses this itself", use_ours),
        (_TILE.fullmatch(r.tile) is not None, "tile", "must be auto, none or a number of tokens", "Such as 16384."),
        (ours or r.tile == "auto", "tile", "DeepSpeed chooses this itself", use_ours),
        (r.tile in ("auto", "none") or by_layer, "tile",
         "goes with layers that are computed one by one, on one GPU",
         "On one GPU add --order layers or --weights streamed. On several leave it out."),
        (r.tile in ("auto", "none") or r.attention in ("auto", "varlen"), "tile", "needs varlen attention",
         "Leave one of them out."),
        (r.mode != "zerooffload" or r.weights in ("auto", "resident"), "weights",
         "zerooffload keeps weights on the GPU", "Leave one of them out."),
        (not by_layer or r.recompute in ("auto", "full"), "recompute",
         "streamed weights and the order layers compute every layer again", "Leave it out."),
        (r.inputs == "auto" or by_layer, "inputs",
         "goes with layers that are computed one by one, on one GPU",
         "On one GPU add --order layers or --weights streamed. On several leave it out."),
    ]  # fmt: skip


def _deepspeed_rules(r: Recipe) -> list[tuple[bool, str, str, str]]:
    """(kept, field, rule, remedy) of the fields that only the engine `deepspeed` reads, and of those it cannot."""
    ours, theirs = r.engine == "penstock", r.engine == "deepspeed"
    only = [
        name
        for name in ("param_offload", "nvme_path", "leaf_module", "deepspeed_config")
        if getattr(r, name) not in ("none", None)
    ]
    # A JSON of one's own may decide both; it is read later (`deepspeed_start.check_deepspeed`).
    not_saved = theirs and not r.deepspeed_config and (r.mode == "superoffload" or r.param_offload == "nvme")
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
        (not theirs or r.accumulate_dtype == "fp32", "accumulate_dtype", "DeepSpeed chooses this itself", use_ours),
        (not theirs or r.matmul == "bf16", "matmul", "only the engine penstock has fp8 products", use_ours),
        (not theirs or r.states == "fp32", "states", "DeepSpeed keeps fp32 moments", use_ours),
        (not not_saved or not r.keep_best, "keep_best", "DeepSpeed cannot save this run", use_ours),
        (not not_saved or not r.save_every, "save_every", "DeepSpeed cannot save this run: SuperOffload keeps moments "
         "in a worker process, and weights on NVMe are in no checkpoint",
         "Use --engine penstock, or --mode zerooffload without --param-offload nvme."),
    ]  # fmt: skip
