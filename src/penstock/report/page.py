"""`penstock report`: one HTML page that explains a run, or compares several, and needs nothing but a browser.

Everything is in the file: style, data, and the library that draws the charts. Its Content-Security-Policy forbids every
request, so a page that is passed on cannot tell anyone that it was read. Text comes from the runs, and a data row may
hold anything: the template escapes all of it, and charts get theirs as JSON without a single `<`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from penstock.errors import counted, short
from penstock.machine.disk import write_whole, writing
from penstock.recipe.recipe import Recipe, to_dict
from penstock.report.charts import Chart, curve_charts, place_charts, theme
from penstock.report.metrics import Speed, read_row, speeds_of
from penstock.report.runs import RunRecord, overlap, read_runs

PAGE = "report.html"
IMAGES = "report-images"
IMAGE_WIDTH = 760
LANES_EXPLAINED = (
    "In and out carry streamed state, down and up the gradients and weights of host, and cpu are the threads of host. "
    "Weights are those of layers that stream, park the inputs of layers."
)


@dataclass(frozen=True)
class Written:
    """What `penstock report` wrote."""

    page: Path
    images: list[Path]
    left_out: list[str]
    """Files of the runs that are damaged, or lines of them."""


def report(paths: list[Path], *, to: str = "", images: bool = False) -> Written:
    """Read the runs, write the page: into the run's own directory, or in front of you when there are several."""
    import vl_convert  # 30 MB, which only this command needs

    converter: Any = vl_convert  # its annotations ask for an argument that it can do without
    runs = read_runs(paths)
    page = Path(to) if to else (paths[0] / PAGE if len(paths) == 1 else Path(PAGE))
    with writing(page, "file"):
        page.parent.mkdir(parents=True, exist_ok=True)
        write_whole(page, render(runs, converter.javascript_bundle()).encode(errors="backslashreplace"))
    with writing(page.parent / IMAGES, "file"):
        drawn = draw(runs, page.parent / IMAGES, converter) if images else []
    left_out = [f"{run.path}: {what}" for run in runs for what in run.left_out]
    return Written(page, drawn, left_out)


def render(runs: list[RunRecord], library: str) -> str:
    """The page as text. `library` is the JavaScript that draws."""
    source = resources.files("penstock.report") / "page.html.jinja"
    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters["json_script"] = json_script
    curves = curve_charts(runs)
    parts = [_Part.of(run, f"-{number}" if len(runs) > 1 else "") for number, run in enumerate(runs, start=1)]
    charts = curves + [chart for part in parts for chart in part.charts.values()]
    return jinja.from_string(source.read_text(encoding="utf-8")).render(
        title=" · ".join(run.name for run in runs),
        curves=curves,
        parts=parts,
        recipe=_recipe_rows(runs),
        specs={chart.key: chart.spec for chart in charts},
        themes={"light": {**theme(dark=False), "background": "transparent"}, "dark": theme(dark=True)},
        library=library.replace("</script", "<\\/script"),
    )


def json_script(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin a comment."""
    from markupsafe import Markup

    return Markup(json.dumps(value).replace("<", "\\u003c"))


def draw(runs: list[RunRecord], directory: Path, converter: Any) -> list[Path]:
    """The charts as SVG and PNG, in light colours, for a paper or an issue."""
    directory.mkdir(parents=True, exist_ok=True)
    parts = [place_charts(run, f"-{number}" if len(runs) > 1 else "") for number, run in enumerate(runs, start=1)]
    written: list[Path] = []
    for chart in curve_charts(runs) + [chart for charts in parts for chart in charts]:
        title = {"text": chart.title, "subtitle": chart.note, "anchor": "start", "offset": 12}
        spec = {**chart.spec, "width": IMAGE_WIDTH, "title": title, "config": theme(dark=False), "padding": 16}
        svg = directory / f"{chart.key}.svg"
        write_whole(svg, converter.vegalite_to_svg(spec))
        png = svg.with_suffix(".png")
        write_whole(png, converter.vegalite_to_png(spec, scale=2))
        written += [svg, png]
    return written


# --- what the template is given ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """One run, in words and numbers."""

    run: RunRecord
    facts: list[tuple[str, str]]
    charts: dict[str, Chart]
    overlap: str
    data: list[tuple[str, str]]
    machine: list[tuple[str, str]]
    plan: list[tuple[str, str, str, str]]

    @classmethod
    def of(cls, run: RunRecord, suffix: str) -> _Part:
        charts = {chart.key.removesuffix(suffix): chart for chart in place_charts(run, suffix)}
        return cls(run, _facts(run), charts, _overlap(run), _data(run), _machine(run), _plan(run))


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    """The figures at the top."""
    steps, damaged = run.steps, [("damaged, and left out", ", ".join(run.left_out))] if run.left_out else []
    if not steps:
        return [("steps", "none yet"), *damaged]
    tokens, seconds = sum(row["tokens"] for row in steps), sum(row["step_seconds"] for row in steps)
    skipped = sum(row["skipped"] for row in steps)
    state = sum(unit["num_bytes"] for unit in run.placement)
    found = [
        ("loss", f"{_number(steps[0]['loss'])} → {_number(steps[-1]['loss'])}"),
        ("evaluation loss", _number(run.evals[-1]["eval_loss"]) if run.evals else ""),
        (
            "steps",
            f"{len(steps):,}" + (f", {skipped} skipped" if skipped else "") + ("" if run.ended else ", not ended"),
        ),
        ("tokens a second", f"{tokens / seconds:,.0f}" if seconds else ""),
        *_rates(speeds_of([read_row(row) for row in steps])),
        ("tokens", f"{tokens:,}"),
        ("time in steps", str(timedelta(seconds=round(seconds)))),
        (
            "optimizer state" + (" of the first rank" if steps[-1].get("ranks", 1) > 1 else ""),
            _bytes(state) if state else "",
        ),
        *damaged,
    ]
    return [(name, value) for name, value in found if value]


def _rates(speeds: Sequence[Speed]) -> Iterator[tuple[str, str]]:
    """TFLOP/s, which are those of one rank; by number of ranks if the run was resumed with another."""
    for found in speeds:
        on, each = "", "" if found.ranks == 1 else " of one rank"
        if len(speeds) > 1:
            on = f" on {counted(found.ranks, 'rank')}" if found.ranks else " by an earlier version"
            on = f", {counted(found.steps, 'step')}{on}"
            yield f"tokens a second{on}", f"{found.tokens_per_s:,.0f}"
        yield f"model TFLOP/s{each}{on}", _finite(found.model_tflops)
        yield f"by the reference's formula{on}", _finite(found.reference_tflops)


def _finite(rate: float) -> str:
    """Rows of earlier versions have none."""
    return short(rate) if math.isfinite(rate) else ""


def _plan(run: RunRecord) -> list[tuple[str, str, str, str]]:
    """What was predicted, what was measured, and how far apart they are. The first steps make buffers and kernels."""
    seconds = [row["step_seconds"] for row in run.steps]
    if not (run.plan and seconds):
        return []
    found: list[tuple[str, float, float, Callable[[float], str]]] = []
    found.append(("step", run.plan["step_seconds"], statistics.median(seconds[2:] or seconds), "{:.3g} s".format))
    for place in ("gpu", "host"):
        measured = sum(use["num_bytes"] for use in run.memory if use["place"] == place)
        found.append((f"{place} memory", run.plan[f"{place}_bytes"], measured, _bytes))
    return [
        (what, words(planned), words(real), f"{real / planned - 1:+.0%}")
        for what, planned, real, words in found
        if planned and real
    ]


def _overlap(run: RunRecord) -> str:
    spans = run.timeline.get("spans", [])
    if not spans:
        return ""
    found = overlap(spans)
    if not found.busy:
        exposed = _seconds(found.exposed)
        return f"From step {run.timeline['step']}. The model stood still for an update for {exposed}, in red."
    return (
        f"From the beginning of step {run.timeline['step']} to the end of the next backward. The lanes were busy for "
        f"{_seconds(found.busy)}; the model stood still for an update for {_seconds(found.exposed)}, in red: "
        f"{found.hidden_share:.1%} of the lanes' work was hidden. "
        + LANES_EXPLAINED
        + ("" if run.environment.get("gpu_bytes") else " On a CPU they share the model's cores and hide little.")
    )


def _data(run: RunRecord) -> list[tuple[str, str]]:
    data, train = run.data, run.data.get("train")
    if not train:
        return []
    source, held = data["source"], data.get("evaluation")
    share = train["trained_tokens"] / train["tokens"]
    dropped = sum(note["count"] for note in source["dropped"].values())
    return [
        ("source", f"{run.recipe['data']} ({data['data_format']})"),
        ("examples", f"{train['examples']:,} in {train['rows']:,} rows, {train['fill']:.0%} full"),
        ("tokens an epoch", f"{train['tokens']:,}, {share:.0%} of them trained on"),
        ("held out", f"{held['examples']:,} examples" if held else "nothing"),
        ("cut or dropped", f"{source['truncated']:,} truncated, {dropped:,} dropped of {source['rows']:,} rows"),
        ("columns not used", ", ".join(source.get("unused", {})) or "none"),
        ("fingerprint", data["fingerprint"][:16]),
    ]


def _machine(run: RunRecord) -> list[tuple[str, str]]:
    machine = run.environment
    if not machine:
        return []
    versions = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    found = [
        ("started", machine["started"]),
        ("device", machine["device"]),
        ("processor", f"{machine['processor']}, {machine['cores']} cores, {_bytes(machine['host_bytes'])} of memory"),
        ("system", machine["system"]),
        ("CUDA", machine["cuda"]),
        ("software", f"Python {machine['python']}, {versions}"),
    ]
    return [(name, value) for name, value in found if value]


@dataclass(frozen=True)
class _RecipeRow:
    """A field of the recipe with its value in every run."""

    field: str
    values: list[str]
    differs: bool
    """From run to run, or in a single run from the default."""


def _recipe_rows(runs: list[RunRecord]) -> list[_RecipeRow]:
    default = to_dict(Recipe())
    fields = list(dict.fromkeys(name for run in runs for name in run.recipe))
    rows: list[_RecipeRow] = []
    for name in fields:
        values = [_plain(run.recipe.get(name)) for run in runs]
        differs = len(set(values)) > 1 if len(runs) > 1 else values[0] != _plain(default.get(name))
        rows.append(_RecipeRow(name, values, differs))
    return rows


def _plain(value: object) -> str:
    if value in (None, ""):
        return "–"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _bytes(num_bytes: float) -> str:
    unit, size = next((pair for pair in (("GiB", 2**30), ("MiB", 2**20)) if num_bytes >= pair[1]), ("KiB", 2**10))
    return f"{num_bytes / size:,.1f} {unit}"
