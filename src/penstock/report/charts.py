"""The charts of the report, as Vega-Lite specifications.

Vega-Lite was chosen since one wheel without dependencies (vl-convert-python) has all of it: the JavaScript to embed
(0.9 MB; plotly's is 4.7), and SVG and PNG of the same charts without a browser. Its interpreter needs no `eval`, so the
page can forbid everything that is not in it. Drawing by hand was rejected; so were pictures made in Python, which can
neither be read off with a pointer nor follow the reader's colours and width.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from penstock.report.runs import RunRecord, exposed

Spec = dict[str, Any]

MOST_POINTS = 1500
"""Points of one line; longer runs are averaged down to it, so that a page stays small however long a run was."""
RUN_COLOURS = ["#3b76c4", "#d97706", "#2f9e77", "#b4508f", "#7c6bd6", "#8a7a3b"]
HOME_COLOURS = {"gpu": "#3b76c4", "stream": "#2f9e77", "host": "#d97706"}
MEMORY_COLOURS = {
    "weights": "#64748b", "state: beside the weights": HOME_COLOURS["gpu"],
    **{f"state: {home}": colour for home, colour in HOME_COLOURS.items()},
    "streamed weights": "#94a3b8", "slots of weights": "#94a3b8", "parked inputs": "#b4508f",
    "gradients, activations": "#7c6bd6", "this process, the rest": "#b8c0c8",
}  # fmt: skip
LANES = {
    "forward": ("model", "forward"),
    "backward": ("model", "backward"),
    "wait": ("model", "waiting: exposed"),
    "in": ("in", "streamed state"),
    "update": ("update", "update"),
    "out": ("out", "streamed state"),
    "down": ("down", "gradients and weights"),
    "cpu": ("cpu", "update"),
    "moments": ("cpu", "moments"),
    "up": ("up", "gradients and weights"),
    "weights": ("weights", "gradients and weights"),
    "park": ("park", "saved inputs"),
}
"""Row and colour of every lane of the tape."""
STEP_AXIS = {"format": ",d", "tickMinStep": 1, "tickCount": {"expr": "max(3, floor(width / 90))"}}
SPAN_COLOURS = {
    "forward": "#9db8dc", "backward": "#5f87bd", "waiting: exposed": "#d14343", "streamed state": "#2f9e77",
    "update": "#d97706", "moments": "#e8b06a", "gradients and weights": "#7c6bd6", "saved inputs": "#8a94a0",
}  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """One chart: `key` names it in the page and as an image, `title` says what is shown."""

    key: str
    title: str
    spec: Spec
    note: str = ""


def theme(*, dark: bool) -> Spec:
    """Vega's config: the page's own colours, few lines, no frame."""
    ink, faint, grid = ("#e6e8eb", "#9aa3ad", "#2b3138") if dark else ("#1d2329", "#5c6670", "#e7eaed")
    font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
    return {
        "background": "transparent" if dark else "white",
        "font": font,
        "view": {"stroke": None},
        "axis": {
            "labelColor": faint, "titleColor": faint, "gridColor": grid, "domain": False, "ticks": False,
            "labelPadding": 6, "titlePadding": 8, "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11,
        },
        "axisX": {"grid": False, "domain": True, "domainColor": grid},
        "legend": {
            "labelColor": ink, "titleColor": faint, "orient": "top", "direction": "horizontal", "title": None,
            "labelFontSize": 12, "symbolType": "square", "symbolSize": 90, "offset": 6, "columnPadding": 14,
            "labelLimit": 260,
        },
        "line": {"strokeWidth": 2, "strokeJoin": "round", "strokeCap": "round"},
    }  # fmt: skip


def curve_charts(runs: list[RunRecord]) -> list[Chart]:
    """What a run is judged by, all runs in one picture."""
    charts = [
        Chart("loss", "Loss by step", _loss(runs), _loss_note(runs)),
        Chart("lr", "Learning rate by step", _line(runs, "lr", "learning rate", number=".1e")),
        Chart("norm", "Gradient norm before clipping", _line(runs, "grad_norm", "norm", number=".3~g")),
        Chart("throughput", "Tokens a second", _line(runs, "tokens_per_s", "tokens/s", number=",.0f", zero=True)),
    ]
    return [chart for chart in charts if any(run.steps for run in runs)]


def place_charts(run: RunRecord, suffix: str) -> list[Chart]:
    """Where the bytes of one run lived, and how one of its steps went."""
    charts: list[Chart] = []
    if run.memory:
        charts.append(Chart(f"memory{suffix}", "Memory by place", _memory(run)))
    if run.placement:
        charts.append(Chart(f"homes{suffix}", "Where every byte of optimizer state lives, by unit", _homes(run)))
    if run.timeline.get("spans"):
        charts.append(Chart(f"timeline{suffix}", f"Step {run.timeline['step']} on the lanes", _timeline(run)))
    return charts


# --- curves -----------------------------------------------------------------------------------------------------------


def _loss(runs: list[RunRecord]) -> Spec:
    smooth = _window(runs)
    layers: list[Spec] = [
        _layer(_points(runs, "loss"), "loss", "loss", width=1, opacity=0.35 if smooth > 1 else 1.0),
    ]
    if smooth > 1:
        window = [{"op": "mean", "field": "loss", "as": "mean"}]
        frame = [-(smooth // 2), smooth // 2]
        mean: Spec = {"window": window, "frame": frame, "groupby": ["run"], "sort": [{"field": "step"}]}
        layers.append({**_layer(_points(runs, "loss"), "mean", "loss", width=2.2), "transform": [mean]})
    evals = [
        {"run": run.name, "step": row["step"], "eval_loss": row["eval_loss"]}
        for run in runs
        for row in run.evals
        if row["eval_loss"] is not None
    ]
    if evals:
        held_out = _layer(evals, "eval_loss", "evaluation loss", width=1.5, dash=[5, 3])
        held_out["mark"] |= {"point": {"filled": True, "size": 45}}
        layers.append(held_out)
    return _chart({"layer": layers, "height": 260}, runs)


def _loss_note(runs: list[RunRecord]) -> str:
    smooth = _window(runs)
    parts = [f"bold: mean of {smooth} steps"] if smooth > 1 else []
    parts += ["dashed, with points: evaluation loss"] if any(run.evals for run in runs) else []
    return "; ".join(parts)


def _window(runs: list[RunRecord]) -> int:
    longest = max((min(len(run.steps), MOST_POINTS) for run in runs), default=0)
    return 1 if longest < 40 else 2 * (longest // 40) + 1


def _line(runs: list[RunRecord], column: str, title: str, *, number: str, zero: bool = False) -> Spec:
    layer = _layer(_points(runs, column), column, title, number=number)
    layer["encoding"]["y"]["scale"] = {"zero": zero}
    return _chart({**layer, "height": 170}, runs)


def _layer(
    points: list[Spec],
    column: str,
    title: str,
    *,
    width: float = 1.8,
    opacity: float = 1.0,
    dash: list[int] | None = None,
    number: str = ".4~g",
) -> Spec:
    mark: Spec = {"type": "line", "strokeWidth": width, "opacity": opacity, "tooltip": True}
    if dash:
        mark["strokeDash"] = dash
    if len(points) == 1:
        mark["point"] = True  # a line of one point cannot be seen
    axis = {"format": "~s" if number == ",.0f" else number, "tickCount": 5}
    return {
        "data": {"values": points},
        "mark": mark,
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "title": "step", "axis": STEP_AXIS},
            "y": {"field": column, "type": "quantitative", "title": None, "scale": {"zero": False}, "axis": axis},
            "tooltip": [
                {"field": "run", "title": "run"},
                {"field": "step", "type": "quantitative", "format": ",d"},
                {"field": column, "type": "quantitative", "title": title, "format": number},
            ],
        },
    }


def _chart(spec: Spec, runs: list[RunRecord]) -> Spec:
    """With a colour for every run, and a legend only where there is something to tell apart."""
    names = [run.name for run in runs]
    colour: Spec = {"field": "run", "type": "nominal", "scale": {"domain": names, "range": RUN_COLOURS}}
    colour["legend"] = {"symbolType": "stroke", "symbolStrokeWidth": 3, "symbolOpacity": 1} if len(runs) > 1 else None
    for part in spec.get("layer", [spec]):
        part["encoding"]["color"] = colour
    return _sized(spec)


def _sized(spec: Spec) -> Spec:
    return {"width": "container", **spec}


def _points(runs: list[RunRecord], column: str) -> list[Spec]:
    """(run, step, value) of every step, or of the means of so many steps that the line stays short."""
    found: list[Spec] = []
    for run in runs:
        rows = [(row["step"], value) for row in run.steps if (value := _value(row, column)) is not None]
        stride = -(-len(rows) // MOST_POINTS)
        for first in range(0, len(rows), max(1, stride)):
            part = rows[first : first + stride]
            found.append({"run": run.name, "step": part[-1][0], column: statistics.fmean(v for _, v in part)})
    return found


def _value(row: dict[str, Any], column: str) -> float | None:
    if column == "tokens_per_s":
        return float(row["tokens"] / row["step_seconds"]) if row["step_seconds"] else None
    value = row[column]
    return None if value is None else float(value)


# --- places -----------------------------------------------------------------------------------------------------------


def _memory(run: RunRecord) -> Spec:
    totals = {"gpu": run.environment.get("gpu_bytes", 0), "host": run.environment.get("host_bytes", 0)}
    parts = [
        {"place": _of_total(use["place"], totals), "part": use["part"], "GiB": use["num_bytes"] / 2**30}
        for use in run.memory
        if use["num_bytes"]
    ]
    known = list(dict.fromkeys(str(part["part"]) for part in parts))
    return _sized({
        "data": {"values": parts},
        "mark": {"type": "bar", "height": {"band": 0.62}, "cornerRadius": 2, "tooltip": True},
        "encoding": {
            "y": {"field": "place", "type": "nominal", "title": None, "sort": None},
            "x": {"field": "GiB", "type": "quantitative", "title": "GiB", "axis": {"grid": True, "tickCount": 6}},
            "color": {"field": "part", "type": "nominal", "sort": None, "legend": {"columns": 3},
                      "scale": {"domain": known, "range": [MEMORY_COLOURS.get(part, "#b4508f") for part in known]}},
            "order": {"field": "index"},
            "tooltip": [{"field": "part"}, {"field": "GiB", "type": "quantitative", "format": ".3~f"}],
        },
        "transform": [{"window": [{"op": "row_number", "as": "index"}]}],
        "height": 46 * len({part["place"] for part in parts}),
    })  # fmt: skip


def _of_total(place: str, totals: dict[str, int]) -> str:
    return f"{place} ({totals[place] / 2**30:.0f} GiB)" if totals.get(place) else place


def _homes(run: RunRecord) -> Spec:
    units = list(dict.fromkeys(unit["unit"] for unit in run.placement))
    biggest = max(unit["num_bytes"] for unit in run.placement)
    scale, unit_name = (2**30, "GiB") if biggest >= 2**29 else (2**20, "MiB")
    on_cpu = bool(run.environment) and not run.environment.get("gpu_bytes")
    names = {home: "beside the weights" if home == "gpu" and on_cpu else home for home in HOME_COLOURS}
    values = [
        {
            "unit": unit["unit"],
            "home": names[unit["home"]],
            "size": unit["num_bytes"] / scale,
            "rank": list(HOME_COLOURS).index(unit["home"]),
        }
        for unit in run.placement
    ]
    return _sized({
        "data": {"values": values},
        "mark": {"type": "bar", "width": {"band": 0.78}, "tooltip": True},
        "encoding": {
            "x": {"field": "unit", "type": "nominal", "sort": units, "title": "units, in the order of forward",
                  "axis": {"labelAngle": -50 if len(units) > 6 else 0, "labelOverlap": True, "labelLimit": 90}},
            "y": {"field": "size", "type": "quantitative", "title": unit_name, "axis": {"tickCount": 5}},
            "color": {"field": "home", "type": "nominal",
                      "scale": {"domain": list(names.values()), "range": list(HOME_COLOURS.values())}},
            "order": {"field": "rank"},
            "tooltip": [{"field": "unit"}, {"field": "home"},
                        {"field": "size", "type": "quantitative", "title": unit_name, "format": ",.3~f"}],
        },
        "height": 220,
    })  # fmt: skip


def _timeline(run: RunRecord) -> Spec:
    spans = [
        {"row": LANES[span["lane"]][0], "what": LANES[span["lane"]][1], "start": span["start"], "end": span["end"]}
        for span in run.timeline["spans"]
        if span["lane"] in LANES and span["lane"] != "wait"
    ]
    row, kind = LANES["wait"]  # drawn last, over the forward that it is part of
    spans += [{"row": row, "what": kind, "start": a, "end": b} for a, b in exposed(run.timeline["spans"])]
    present = {span["row"] for span in spans}
    rows = [row for row in dict.fromkeys(row for row, _ in LANES.values()) if row in present]
    kinds = [kind for kind in SPAN_COLOURS if any(span["what"] == kind for span in spans)]
    return _sized({
        "data": {"values": spans},
        "transform": [{"calculate": "1000 * (datum.end - datum.start)", "as": "ms"}],
        # A hairline in its own colour keeps spans visible that are narrower than a pixel.
        "mark": {"type": "bar", "height": {"band": 0.66}, "strokeWidth": 0.8, "tooltip": True},
        "encoding": {
            "y": {"field": "row", "type": "nominal", "sort": rows, "title": None, "axis": {"labelLimit": 120}},
            "x": {"field": "start", "type": "quantitative", "title": "seconds", "axis": {"grid": True},
                  "scale": {"domain": [0, run.timeline["seconds"]], "nice": False}},
            "x2": {"field": "end"},
            "color": {"field": "what", "type": "nominal", "legend": {"columns": 3},
                      "scale": {"domain": kinds, "range": [SPAN_COLOURS[kind] for kind in kinds]}},
            "stroke": {"field": "what", "type": "nominal", "legend": {"columns": 3},
                       "scale": {"domain": kinds, "range": [SPAN_COLOURS[kind] for kind in kinds]}},
            "tooltip": [{"field": "what", "title": "what"}, {"field": "row", "title": "lane"},
                        {"field": "start", "type": "quantitative", "title": "starts at, s", "format": ".4f"},
                        {"field": "ms", "type": "quantitative", "title": "takes, ms", "format": ",.3~f"}],
        },
        "height": 30 * len(rows),
    })  # fmt: skip
