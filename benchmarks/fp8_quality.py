"""What fp8 products do to training: the same runs with both kinds of products, and the error of single gradients.

    python benchmarks/fp8_quality.py train DIR [--seeds 1,2,3] [--matmuls bf16,fp8] [field=value ...]
    python benchmarks/fp8_quality.py gradients DIR [field=value ...]
    python benchmarks/fp8_quality.py layers DIR [field=value ...]
    python benchmarks/fp8_quality.py summary DIR [--beside FILE]         DIR/fp8_quality.txt
    python benchmarks/fp8_quality.py plot DIR [--beside FILE]            and DIR/fp8_quality.svg

The first three add lines to DIR/fp8_quality.jsonl, fp8_gradients.jsonl and fp8_layers.jsonl. Fields are those of a
recipe; without any, the demo. `train` makes `max_steps` steps with bf16 and with fp8 products for each seed, which
orders the data, and evaluates on some rows of it, the same for all seeds (`validation` is their share). What counts is
the difference between the two beside the spread between seeds. A model that was trained in fp8 is evaluated in fp8, as
it was trained, and once more in bf16, as it is exported. A line is written as soon as a run ends; what a file has is
not run again. `gradients` makes one backward with each and compares the gradient of every weight, layer by layer, with
those of fp32; `init=random` is a model of random weights and tokens. `layers` computes the loss of a pretrained model
with the products of one layer after the other left in bf16: which of them should be? On a CPU fp8 is emulated, and the
rows say so. `--beside` takes what DIR does not have from the rows of another run, and the summary says so. Needs
matplotlib to plot.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from importlib import resources
from importlib.metadata import version
from pathlib import Path

import torch
import yaml
from transformers import PreTrainedModel

from penstock.data.loader import MicroBatch
from penstock.engine.packed import PackedModel
from penstock.engine.trial import full_batch
from penstock.machine.hardware import describe, pick_device, pick_dtype
from penstock.model.load import load_config, load_model, load_tokenizer
from penstock.model.matmul import set_matmul
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import FP8_ENDS, Recipe, to_dict, with_values
from penstock.report.console import Console
from penstock.run.train import train

DEMO = dataclasses.replace(PRESETS["demo"], batch_size=2, max_length=128, max_steps=200, validation=0.1, prompt=None)
MATMULS = ("bf16", "fp8")
SAME = {"smol": "smollm2", "SmolLM2-135M-Instruct.Q4_1": "smollm2"}
"""Names of one file: the first is that of the rows of November 2026, the second the one it is published with."""


def recipe_of(words: list[str]) -> Recipe:
    """`preset=NAME`, if any, with the other fields over it."""
    values = dict(word.split("=", 1) for word in words)
    base = PRESETS[values.pop("preset")] if "preset" in values else DEMO
    return with_values(base, {name: yaml.safe_load(text) for name, text in values.items()}, "command line")


def lines(path: Path) -> list[dict]:
    """Of a file, with one name for one model."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{**row, "model": SAME.get(row["model"], row["model"])} for row in rows]


def add(path: Path, row: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def about(recipe: Recipe, device: torch.device) -> dict:
    kept = ("model", "data", "max_steps", "batch_size", "max_length", "lr", "states", "dtype", "init", "shape")
    return {
        "machine": describe(device),
        "emulated": device.type == "cpu",
        "torch": version("torch"),
        "fp8_ends": FP8_ENDS,
        **{name: to_dict(recipe)[name] for name in kept},
        **{name: SAME.get(known, known) for name in ("model", "data") for known in [Path(getattr(recipe, name)).name]},
    }


def rows_of(recipe: Recipe) -> list[dict]:
    demo = Path(str(resources.files("penstock.demo") / "examples.jsonl"))
    text = (demo if recipe.data == "demo" else Path(recipe.data)).read_text(encoding="utf-8")
    return json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]


def parted(recipe: Recipe, place: Path) -> Recipe:
    """The rows of a JSON or JSONL file in two: what is evaluated on must not depend on the seed."""
    rows = rows_of(recipe)
    every = round(1 / recipe.validation)
    parts = {"eval": rows[::every], "train": [row for number, row in enumerate(rows) if number % every]}
    for name, part in parts.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    files = {"data": str(place / "train.jsonl"), "eval_data": str(place / "eval.jsonl")}
    return dataclasses.replace(recipe, validation=0.0, **files)


def in_bf16(recipe: Recipe) -> float:
    """The evaluation of an exported model with products in bf16: after a step that is too small to change it."""
    run = recipe.run_dir
    exported = dataclasses.replace(
        recipe, model=str(run / "model"), tokenizer=None, matmul="bf16", output_dir=f"{run}-again", max_steps=1,
        eval_every=1, lr=1e-12, warmup=0,
    )  # fmt: skip
    return train(exported, Console(quiet=True)).eval_loss


def quality(directory: Path, seeds: list[int], matmuls: list[str], recipe: Recipe) -> None:
    path, device = directory / "fp8_quality.jsonl", pick_device(recipe.device)
    known, shared = {run_of(row) for row in lines(path)}, about(recipe, device)
    for seed in seeds:
        for matmul in matmuls:
            if run_of({**shared, "seed": seed, "matmul": matmul}) in known:
                continue
            with tempfile.TemporaryDirectory(prefix="fp8-quality-") as place:
                one = parted(recipe, Path(place))
                one = dataclasses.replace(one, seed=seed, matmul=matmul, output_dir=f"{place}/run", keep=0)
                summary = train(one, Console())
                text = (Path(place) / "run" / "metrics.jsonl").read_text()
                evals = (Path(place) / "run" / "eval.jsonl").read_text()
                plain = in_bf16(one) if matmul == "fp8" else summary.eval_loss
            losses = [json.loads(line)["loss"] for line in text.splitlines()]
            evaluated = [[row["step"], row["eval_loss"]] for row in map(json.loads, evals.splitlines())]
            row = {
                **shared,
                "seed": seed,
                "matmul": matmul,
                "eval_loss": summary.eval_loss,
                "eval_loss_in_bf16": plain,
                "last_losses": statistics.mean(losses[-20:]),
                "losses": losses,
                "evals": evaluated,
                "skipped_steps": summary.skipped_steps,
            }
            add(path, row)
            print(f"seed {seed}, {matmul}: evaluation {summary.eval_loss:.5f}, in bf16 {plain:.5f}", flush=True)
    print("\n".join(summary_of(lines(path))))


def run_of(row: dict) -> tuple:
    """What tells one run from another. Which layers stay in bf16 is nothing to a run of which all do."""
    names = ("seed", "matmul", "model", "data", "max_steps")
    return (*(row[name] for name in names), row.get("fp8_ends", 0) if row["matmul"] == "fp8" else 0)


def with_others(directory: Path, beside: Path | None) -> list[dict]:
    """The rows of a directory, and those of another run for the works that it has and the kinds that it lacks."""
    rows = lines(directory / "fp8_quality.jsonl")
    have = {(row["model"], row["data"], row["max_steps"], row["matmul"]) for row in rows}
    works = {work[:3] for work in have}
    for row in lines(beside) if beside else []:
        work = (row["model"], row["data"], row["max_steps"])
        if work in works and (*work, row["matmul"]) not in have:
            rows.append({**row, "beside": True})
    return rows


def summary_of(rows: list[dict]) -> list[str]:
    """Mean evaluation losses, the spread between seeds, and the difference of both kinds seed by seed."""
    found = []
    for work in sorted({(row["model"], row["data"], row["max_steps"]) for row in rows}):
        own = [row for row in rows if (row["model"], row["data"], row["max_steps"]) == work]
        by_kind = {m: {row["seed"]: row["eval_loss"] for row in own if row["matmul"] == m} for m in MATMULS}
        both = sorted(set(by_kind["bf16"]) & set(by_kind["fp8"]))
        if not both:
            continue
        means = {m: statistics.mean(by_kind[m][seed] for seed in both) for m in MATMULS}
        apart = [by_kind["fp8"][seed] - by_kind["bf16"][seed] for seed in both]
        spread = statistics.stdev(by_kind["bf16"][seed] for seed in both) if len(both) > 1 else float("nan")
        in_bf16 = [row["eval_loss_in_bf16"] for row in own if row["matmul"] == "fp8" and "eval_loss_in_bf16" in row]
        after = f", evaluated in bf16 {statistics.mean(in_bf16):.5f}" if in_bf16 else ""
        others = sorted({row["matmul"] for row in own if row.get("beside")})
        others = f"; {' and '.join(others)} from another run" if others else ""
        found.append(
            f"{work[0]}, {work[1]}, {work[2]} steps, {len(both)} seeds: "
            f"bf16 {means['bf16']:.5f}, fp8 {means['fp8']:.5f}{after}; "
            f"fp8 less bf16 by seed {', '.join(f'{value:+.5f}' for value in apart)}; "
            f"standard deviation between seeds {spread:.5f}{others}"
        )
    return found


def batch_of(recipe: Recipe, vocab_size: int) -> MicroBatch:
    """Full rows: of the texts of a data file, one after another, if the recipe names one, else of random tokens."""
    batch = full_batch(recipe.rows_at_once, recipe.max_length, vocab_size)
    if recipe.init == "random":
        return batch
    texts = (" ".join(value for value in row.values() if isinstance(value, str)) for row in rows_of(recipe))
    ids = torch.tensor(load_tokenizer(recipe)("\n\n".join(texts))["input_ids"][: batch.num_tokens])
    ids = ids.repeat(-(-batch.num_tokens // len(ids)))[: batch.num_tokens].view(batch.input_ids.shape)
    return dataclasses.replace(batch, input_ids=ids, targets=ids[:, 1:].flatten())


def rounded(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """Weights that bf16 has, in this type: of a file in fp32 they come in fp32, and the optimizer would round them."""
    return model.bfloat16().float() if dtype == "fp32" else model.bfloat16()


def gradients(directory: Path, recipe: Recipe) -> None:
    """Relative error of every weight's gradient with products in bf16 and in fp8, against all of it in fp32."""
    device = pick_device(recipe.device)
    recipe = dataclasses.replace(recipe, dtype=pick_dtype(recipe.dtype, device), compile=False, recompute="full")
    config = load_config(recipe)
    batch = batch_of(recipe, config.get_text_config().vocab_size)
    found, losses = {}, {}
    for kind in ("fp32", *MATMULS):
        matmul, dtype = ("fp8" if kind == "fp8" else "bf16"), ("fp32" if kind == "fp32" else recipe.dtype)
        one = dataclasses.replace(recipe, matmul=matmul, dtype=dtype)
        if kind != "fp8":
            # Weights that bf16 has: in fp32 they are the same, and only what is computed differs.
            model = rounded(load_model(dataclasses.replace(one, dtype="bf16"), config, device, print), dtype)
        packed = PackedModel(model, one, print)
        if kind == "fp8":
            set_matmul(model, packed.decoder.layers, "fp8")  # the first and the last too
        loss = packed.loss_sum(batch) / batch.num_trained
        loss.backward()
        losses[kind] = loss.item()
        # To the host: of an 8B model three sets of gradients would not fit beside it.
        found[kind] = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
    errors = {name: {} for name in found["fp32"]}
    for name, exact in found.pop("fp32").items():
        exact = exact.to(device).double()
        for kind in MATMULS:
            ours = found[kind].pop(name).to(device).double()
            cosine = (ours * exact).sum() / (ours.norm() * exact.norm())
            errors[name][kind] = {"error": float((ours - exact).norm() / exact.norm()), "cosine": float(cosine)}
    row = {
        **about(recipe, device),
        "fp8_ends": 0,
        "layers": config.get_text_config().num_hidden_layers,
        "losses": losses,
    }
    add(directory / "fp8_gradients.jsonl", {**row, "gradients": errors})
    print("\n".join(lines_of_errors({**row, "gradients": errors})))


def lines_of_errors(row: dict) -> list[str]:
    """By layer, the mean error of the gradients of its products."""
    losses = ", ".join(f"{loss:.5f} with {kind}" for kind, loss in row["losses"].items())
    found = [f"{row['model']}, {row['layers']} layers, init {row['init']}: loss {losses}"]
    linears = [name for name in row["gradients"] if ".layers." in name and name.endswith("proj.weight")]
    for number in sorted({int(name.split(".layers.")[1].split(".")[0]) for name in linears}):
        own = [row["gradients"][name] for name in linears if f".layers.{number}." in name]
        means = {kind: statistics.mean(one[kind]["error"] for one in own) for kind in MATMULS}
        cosine = statistics.mean(one["fp8"]["cosine"] for one in own)
        found.append(f"layer {number}: error bf16 {means['bf16']:.4f}, fp8 {means['fp8']:.4f} (cosine {cosine:.4f})")
    return found


@torch.no_grad()
def sensitivity(directory: Path, recipe: Recipe) -> None:
    """What each layer's products in fp8 add to the loss of a model that is trained: with and without that layer."""
    device = pick_device(recipe.device)
    recipe = dataclasses.replace(recipe, dtype=pick_dtype(recipe.dtype, device), compile=False, matmul="fp8")
    config = load_config(recipe)
    model = rounded(load_model(recipe, config, device, print), recipe.dtype)
    batch = batch_of(recipe, config.get_text_config().vocab_size)
    packed = PackedModel(model, recipe, print)
    layers = packed.decoder.layers

    def loss_in_bf16_of(*numbers: int) -> float:
        set_matmul(model, layers, "fp8")
        set_matmul(model, [layers[number] for number in numbers], "bf16")
        return packed.loss_sum(batch).item() / batch.num_trained

    everything, count = loss_in_bf16_of(), len(layers)
    none = loss_in_bf16_of(*range(count))
    alone = [everything - loss_in_bf16_of(number) for number in range(count)]
    ends = {k: everything - loss_in_bf16_of(*range(k), *range(count - k, count)) for k in (1, 2, 3)}
    found = {"bf16": none, "fp8": everything, "gained_by_layer": alone, "gained_by_ends": ends}
    row = {**about(recipe, device), "fp8_ends": 0, **found}
    add(directory / "fp8_layers.jsonl", row)
    print(f"{row['model']}, {batch.num_tokens} tokens: loss {none:.5f} with bf16, {everything:.5f} with fp8")
    print("in bf16 one layer gains " + ", ".join(f"{number}: {gain:+.5f}" for number, gain in enumerate(alone)))
    for k, gain in ends.items():
        print(f"the first {k} and the last {k} together: {gain:+.5f} of {everything - none:+.5f}")


def summarize(directory: Path, beside: Path | None) -> list[dict]:
    """Prints and writes the summary of these rows."""
    rows = with_others(directory, beside)
    text = "\n".join(summary_of(rows) or ["no work has rows of both kinds"])
    (directory / "fp8_quality.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return rows


def plot(directory: Path, rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    works = sorted({(row["model"], row["data"]) for row in rows})
    figure, axes = pyplot.subplots(1, len(works), figsize=(6 * len(works), 4), squeeze=False)
    for axis, work in zip(axes[0], works, strict=True):
        for row in (row for row in rows if (row["model"], row["data"]) == work):
            color, style = ("tab:blue", "-") if row["matmul"] == "bf16" else ("tab:orange", "--")
            points = row["evals"]
            label = row["matmul"] if row["seed"] == min(r["seed"] for r in rows) else None
            axis.plot(*zip(*points, strict=True), style, color=color, marker=".", alpha=0.8, label=label)
        axis.set(title=", ".join(work), xlabel="step", ylabel="evaluation loss")
        axis.legend()
    figure.tight_layout()
    figure.savefig(directory / "fp8_quality.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", choices=("train", "gradients", "layers", "summary", "plot"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--matmuls", default=",".join(MATMULS))
    parser.add_argument("--beside", type=Path, metavar="FILE")
    parser.add_argument("fields", nargs="*", metavar="field=value")
    args = parser.parse_intermixed_args()
    if args.job in ("summary", "plot"):
        rows = summarize(args.directory, args.beside)
        if args.job == "plot":
            plot(args.directory, rows)
    elif args.job != "train":
        {"gradients": gradients, "layers": sensitivity}[args.job](args.directory, recipe_of(args.fields))
    else:
        seeds = [int(seed) for seed in args.seeds.split(",")]
        quality(args.directory, seeds, args.matmuls.split(","), recipe_of(args.fields))


if __name__ == "__main__":
    main()
