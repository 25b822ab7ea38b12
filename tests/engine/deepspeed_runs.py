"""Real DeepSpeed in a process of its own: `python deepspeed_runs.py RESULT.json`, alone or under torchrun.

DeepSpeed keeps a process group and patches torch for the rest of its process, so it never runs inside pytest's. Every
scenario is trained by both engines from the same weights on the same rows; the tests compare what is written here.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch

from penstock.engine.deepspeed import DeepSpeedEngine
from penstock.engine.meeting import joined
from penstock.engine.native import NativeEngine
from penstock.engine.ranks import find_world
from penstock.engine.trial import full_batch
from penstock.model.attention import stock_attention
from penstock.model.load import load_config, load_model
from penstock.recipe.presets import PRESETS

HEADS = "num_attention_heads=4,num_key_value_heads=2"
SHAPES = {
    "llama-8b": HEADS,
    "gpt-oss-20b": f"{HEADS},head_dim=8,num_local_experts=4,num_experts_per_tok=2",
    "qwen3-30b-a3b": f"{HEADS},head_dim=8,num_experts=4,num_experts_per_tok=2,moe_intermediate_size=16",
}
STEPS = 5
WHOLE = '{"zero_optimization": {"stage3_param_persistence_threshold": 0}}'
"""Tiny weights are kept gathered by default: with this, every one of them is cut and gathered."""

SCENARIOS = {
    "plain": {},
    "bf16": {"dtype": "bf16"},
    "clipped": {"max_grad_norm": 2.0},  # some steps and not others: AdamW hardly sees a constant factor
    "not_clipped": {"max_grad_norm": 0.0},
    "decayed": {"weight_decay": 2.0},
    "betas": {"betas": (0.5, 0.9), "eps": 1e-3},
    "reduced_in_fp32": {"dtype": "bf16", "reduce_dtype": "fp32"},
    "accumulated": {"micro_batch_size": 1},
    "uneven": {"micro_batch_size": 1, "batch_size": 3},  # of two ranks one has nothing left for its last micro-batch
    "recomputed": {"recompute": "full"},
    "tied": {"tied": True},
    "sub_groups": {"bucket_size": 1000},
    "own_json": {"own": WHOLE},
    "own_json_recomputed": {"own": WHOLE, "recompute": "full", "bucket_size": 1000},
    "params_on_host": {"param_offload": "cpu", "own": WHOLE},
    "leaves": {"leaf_module": "LlamaMLP", "own": WHOLE},
    "gpt_oss": {"preset": "gpt-oss-20b", "own": WHOLE},
    "qwen3_moe": {"preset": "qwen3-30b-a3b", "own": WHOLE},
}

ON_ONE_RANK = ("plain", "bf16", "clipped", "accumulated", "sub_groups", "gpt_oss")


def scenarios(ranks):
    """One rank cuts, gathers and reduces nothing, so that few of them can go wrong there alone."""
    return {name: changes for name, changes in SCENARIOS.items() if ranks > 1 or name in ON_ONE_RANK}


def recipe_of(changes, directory):
    changes = dict(changes)
    preset, own = changes.pop("preset", "llama-8b"), changes.pop("own", None)
    tied = ",tie_word_embeddings=true" if changes.pop("tied", False) else ""
    if own:
        path = directory / "own.json"
        path.write_text(own)
        changes["deepspeed_config"] = str(path)
    shape = f"num_hidden_layers=2,hidden_size=32,intermediate_size=48,vocab_size=300,{SHAPES[preset]}{tied}"
    fixed = {"init": "random", "dtype": "fp32", "batch_size": 4, "max_length": 12, "recompute": "none"}
    fixed |= {"mode": "zerooffload", "engine": "deepspeed"}
    return dataclasses.replace(PRESETS[preset], shape=shape, **(fixed | changes))


def rows_of(rank, ranks, recipe, num_rows=None):
    """Rows with 11, 8, 5 and 2 trained tokens; a rank's every ranks-th of them, in micro-batches.

    All ranks have the same number of these. One that has no rows left gets a padding token, as from the loader.
    """
    num_rows, at_once = num_rows or recipe.batch_size, recipe.rows_at_once
    batch = full_batch(4, 12, 300)
    rows = []
    for number in range(num_rows):
        alone, keep = full_batch(1, 12, 300), 11 - 3 * number
        ids = batch.input_ids[number : number + 1]
        rows.append(
            dataclasses.replace(
                alone, input_ids=ids, targets=ids[0, 1 : keep + 1], target_index=torch.arange(keep), num_trained=keep
            )
        )
    own, most = rows[rank::ranks], len(rows[::ranks])
    return [one_batch(own[i : i + at_once]) for i in range(0, most, at_once)]


def one_batch(rows):
    if not rows:
        none = torch.empty(0, dtype=torch.int64)
        return dataclasses.replace(full_batch(1, 1, 300), target_index=none, targets=none, num_tokens=0, num_trained=0)
    return dataclasses.replace(
        full_batch(len(rows), 12, 300),
        input_ids=torch.cat([row.input_ids for row in rows]),
        targets=torch.cat([row.targets for row in rows]),
        target_index=torch.cat([row.target_index + 12 * i for i, row in enumerate(rows)]),
        num_trained=sum(row.num_trained for row in rows),
    )


def build(kind, recipe):
    world = (find_world(),)
    if kind is NativeEngine:
        recipe, world = (
            dataclasses.replace(
                recipe, engine="penstock", deepspeed_config=None, param_offload="none", leaf_module=None
            ),
            (),
        )
    model = load_model(recipe, load_config(recipe), torch.device("cpu"), lambda _: None)
    return kind(model, recipe, lambda _: None, *world)


def train(engine, batches, steps=STEPS, first=1):
    """Losses and norms; the learning rate is another in every step."""
    results, trained = [], sum(batch.num_trained for batch in batches)
    if not isinstance(engine, NativeEngine):  # which the first rank runs by itself
        trained = int(find_world().total(torch.tensor(trained)))
    for step in range(first, first + steps):
        engine.begin(1e-2 * step / STEPS)
        for number, batch in enumerate(batches, start=1):
            engine.accumulate(batch, trained, last=number == len(batches))
        result = engine.step()
        results.append([result.loss, result.grad_norm, result.skipped])
    return results


def compare(changes, directory):
    world, recipe = find_world(), recipe_of(changes, directory)
    found = {}
    for name, kind in (("ours", NativeEngine), ("theirs", DeepSpeedEngine)):
        if name == "ours" and not world.first:
            continue
        rank, ranks = (world.rank, world.size) if name == "theirs" else (0, 1)
        engine = build(kind, recipe)
        found[name] = train(engine, rows_of(rank, ranks, recipe))
        one_by_one = dataclasses.replace(recipe, micro_batch_size=1)
        found[f"{name}_eval"] = engine.evaluate(rows_of(rank, ranks, one_by_one, 3))
        found[f"{name}_state"] = [dataclasses.asdict(unit) for unit in engine.placement()]
        found[f"{name}_leaves"] = [type(m).__name__ for m in engine.model.modules() if getattr(m, "_z3_leaf", False)]
        found[f"{name}_memory"] = [dataclasses.asdict(use) for use in engine.memory()]
        engine.release()
        found[f"{name}_weights"] = [p.detach().float() for p in engine.model.parameters()]
    if world.first:
        ours, theirs = found.pop("ours_weights"), found.pop("theirs_weights")
        start = [p.detach().float() for p in build(NativeEngine, recipe).model.parameters()]
        found["moved"] = max(float((p - q).abs().max()) for p, q in zip(ours, start, strict=True))
        apart = torch.cat([(p - q).abs().view(-1) for p, q in zip(ours, theirs, strict=True)]).sort().values
        found["apart"], found["mostly_apart"] = float(apart[-1]), float(apart[-1 - len(apart) // 10_000])
    return found


def bits(engine):
    return [(t.name, torch.cat([p.clone() for p in t.pieces])) for g in engine.saved_tensors().values() for t in g]


def same(a, b):
    return all(name == other and torch.equal(x, y) for (name, x), (other, y) in zip(a, b, strict=True))


def resume(directory):
    """Five steps at once, and two, saved, restored into another engine, and three more."""
    world, recipe = find_world(), recipe_of({"dtype": "bf16", "own": WHOLE}, directory)
    batches = rows_of(world.rank, world.size, recipe)
    straight, first = build(DeepSpeedEngine, recipe), build(DeepSpeedEngine, recipe)
    train(straight, batches)
    train(first, batches, 2)
    second = build(DeepSpeedEngine, recipe)
    for (_, saved), tensor in zip(bits(first), (t for g in second.saved_tensors().values() for t in g), strict=True):
        for piece, part in zip(tensor.pieces, saved.split([len(p) for p in tensor.pieces]), strict=True):
            piece.copy_(part)
    second.restored()
    restored = same(bits(first), bits(second))
    train(second, batches, 3, first=3)
    return {
        "restored": restored,
        "same": same(bits(straight), bits(second)),
        "moved": not same(bits(first), bits(second)),
    }


def not_finite(directory):
    """A step whose loss is not a number on the last rank, between good ones."""
    world, recipe = find_world(), recipe_of({}, directory)
    batches = rows_of(world.rank, world.size, recipe)
    engine = build(DeepSpeedEngine, recipe)
    train(engine, batches, 2)
    before, loss_sum = bits(engine), engine._loss_sum
    if world.rank == world.size - 1:
        engine._loss_sum = lambda batch: loss_sum(batch) * float("nan")
    bad = train(engine, batches, 1)
    engine._loss_sum = loss_sum
    unchanged = same(before, bits(engine))
    return {"skipped": bad[0][2], "unchanged": unchanged, "after": train(engine, batches, 1), "bad": repr(bad)}


def broken_end(directory):
    """Everything that DeepSpeed does at its end fails: the weights are whole, and the model runs without it."""
    world, recipe, said = find_world(), recipe_of({"own": WHOLE}, directory), []
    batches = rows_of(world.rank, world.size, recipe)
    good, bad = build(DeepSpeedEngine, recipe), build(DeepSpeedEngine, recipe)
    for engine in (good, bad):
        train(engine, batches, 2)
    bad._say = said.append

    class Worker:
        def close(self):
            raise TimeoutError("the worker is gone")

    def fail():
        raise AttributeError("nothing like it")

    bad._zero.superoffload_cpu_optimizer, bad.engine.destroy = Worker(), fail
    for engine in (good, bad):
        engine.release()
    same = all(torch.equal(p, q) for p, q in zip(good.model.parameters(), bad.model.parameters(), strict=True))
    with stock_attention(bad.model), torch.no_grad():
        logits = bad.model(torch.arange(8)[None]).logits if world.first else torch.zeros(1)
    return {"same": same, "said": said, "finite": bool(logits.isfinite().all())}


def main(result):
    directory = Path(f"{result}.files-of-{find_world().rank}")  # which another rank writes nothing to
    directory.mkdir(exist_ok=True)
    with joined(find_world(), torch.device("cpu")):
        found = {name: compare(changes, directory) for name, changes in scenarios(find_world().size).items()}
        found |= {"resume": resume(directory), "not_finite": not_finite(directory)}
        found["broken_end"] = broken_end(directory)
    if find_world().first:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
