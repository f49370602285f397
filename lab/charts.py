"""The pictures of a comparison, drawn with altair from results.json's content.

Every picture is a list of panels as wide as what holds them; the page puts each into a box of its own, and an SVG
file sets them side by side. Designs keep one colour and one shape in all of them.
"""

from typing import Any

import altair as alt
import vl_convert

from runtime.errors import plain

Results = dict[str, Any]
Design = dict[str, Any]
Panels = list[Any]  # altair charts

# Okabe and Ito's colours for all kinds of colour vision, a grey in place of black, which a dark page would swallow.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]
GREY = "#888888"  # of helping lines: reads on white and on black


def theme(text: str, grid: str) -> dict[str, Any]:
    """Vega-Lite's config with the colours of text and of grid lines."""
    font = "system-ui, sans-serif"
    words = {"labelColor": text, "titleColor": text, "labelFont": font, "titleFont": font, "titleFontWeight": "normal"}
    return {
        "background": "transparent",
        "axis": {**words, "gridColor": grid, "domainColor": GREY, "tickColor": GREY, "labelLimit": 130},
        "legend": {**words, "orient": "bottom", "labelLimit": 120, "symbolSize": 90, "symbolOpacity": 1, "columns": 5},
        "title": {"color": text, "font": font, "fontSize": 13, "anchor": "start", "limit": 280},
        "rule": {"color": text},
        "view": {"stroke": None},
        "range": {"category": PALETTE, "symbol": SHAPES},
    }


def others(results: Results, design: Design) -> str:
    """How a design differs from the baseline apart from its heads, and from what follows them; "" if in nothing."""
    follows = {"n_head", "n_kv_head"}
    base = next(d for d in results["designs"] if d["name"] == results["baseline"])
    follows |= {"head_dim"} if design["n_head"] * design["head_dim"] == base["n_head"] * base["head_dim"] else set()
    follows |= {"d_ff"} if results["match"] == "params" else set()  # made to fit
    follows |= {"learning_rate"} if results["rates"] else set()  # each design's best
    return ", ".join(plain(f"{key} {value}") for key, value in sorted(design["changes"].items()) if key not in follows)


def head_counts(results: Results) -> dict[str, list[Design]]:
    """Designs that differ in n_head alone, each head with K and V of its own, by what else sets them apart.

    Each list is sorted by n_head and holds at least two numbers of heads.
    """
    families: dict[str, list[Design]] = {}
    for design in sorted(trained(results), key=lambda d: d["n_head"]):
        if design["n_kv_head"] == design["n_head"]:
            families.setdefault(others(results, design), []).append(design)
    return {label: family for label, family in families.items() if len({d["n_head"] for d in family}) > 1}


def trained(results: Results) -> list[Design]:
    """The designs with a finished run."""
    return [d for d in results["designs"] if d["runs"]]


def speed_of(results: Results) -> dict[str, dict[str, Any]]:
    """What was measured of each design's speed; empty where nothing was."""
    return results["speed"]["designs"] if results["speed"] else {}


def front(designs: list[Design]) -> list[Design]:
    """The Pareto front by fewest cache bytes: no other design has a lower mean loss with as few bytes."""
    best: list[Design] = []
    for design in sorted(designs, key=lambda d: (d["cache_bytes_per_token"], d["loss"]["mean"])):
        if not best or design["loss"]["mean"] < best[-1]["loss"]["mean"]:
            best.append(design)
    return best


def draw(results: Results) -> dict[str, Panels]:
    """All pictures for which there are figures, by the name of their file."""
    names = [d["name"] for d in results["designs"]]
    pictures = {
        "loss": _loss(results, names),
        "difference-curve": _difference_curve(results, names),
        "difference": _difference(results, names),
        "pareto": _pareto(results, names),
        "decode": _decode(results, names),
        "training": _training(results, names),
        "heads": _heads(results),
    }
    return {name: [p.properties(width="container") for p in panels] for name, panels in pictures.items() if panels}


def to_svg(panels: Panels) -> str:
    """The panels side by side, at most three in a row, on white."""
    width = 640 if len(panels) == 1 else 300
    sized = [panel.properties(width=width) for panel in panels]
    # Bars beside each other are as wide as their own panel's axis wants them.
    joined = alt.concat(*sized, columns=3).resolve_scale(xOffset="independent")
    spec = (sized[0] if len(sized) == 1 else joined).to_dict()
    spec["config"] = theme("#222222", "#E5E5E5") | {"background": "white", "padding": 12}
    spec["config"]["legend"]["columnPadding"] = 30  # the reader's font may be wider than the one measured here
    return vl_convert.vegalite_to_svg(spec, allowed_base_urls=[])


def _chart(rows: list[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.Data(values=rows))


def _tips(**titles: str) -> list[alt.Tooltip]:
    """What hovering shows: field="title", or field="title|format" of a number."""
    parts = {field: title.partition("|") for field, title in titles.items()}
    return [
        alt.Tooltip(f"{field}:Q", title=title, format=form) if form else alt.Tooltip(f"{field}:N", title=title)
        for field, (title, _, form) in parts.items()
    ]


def _log(field: str, title: str, values: list[float], pad: float) -> alt.X:
    scale = alt.Scale(type="log", nice=False, domain=[min(values) / pad, max(values) * pad])
    axis = alt.Axis(values=sorted(set(values)), format=",", labelOverlap=True)
    return alt.X(f"{field}:Q", title=f"{title} (log scale)", scale=scale, axis=axis)


def _points(
    rows: list[dict[str, Any]],
    names: list[str],
    x: alt.X,
    y: alt.Y,
    tips: list[alt.Tooltip],
    *,
    by: str = "design",
    legend: bool = True,
    line: bool = True,
    band: bool = False,
) -> Any:
    """Points of rows with mean, low and high, their spread as rules or as a band, and a line through each of `by`."""
    look: dict[str, Any] = {"title": None, "scale": alt.Scale(domain=names)} | ({} if legend else {"legend": None})
    base = _chart(rows).encode(x=x, color=alt.Color(f"{by}:N", **look))
    layers = [
        base.mark_point(opacity=1, size=70, strokeWidth=2, clip=True).encode(
            y=y,
            shape=alt.Shape(f"{by}:N", **look),
            fillOpacity=alt.condition("datum.hollow", alt.value(0), alt.value(1)),
            fill=alt.Fill(f"{by}:N", **look),
            tooltip=tips,
        ),
    ]
    if line:
        layers.insert(0, base.mark_line(clip=True).encode(y=y))
    if spread := _spread(rows):
        marks = base.properties(data=alt.Data(values=spread))
        marks = marks.mark_area(opacity=0.22, clip=True) if band else marks.mark_rule(strokeWidth=2)
        layers.insert(0, marks.encode(y=alt.Y("low:Q", scale=y["scale"]), y2="high:Q"))
    return alt.layer(*layers)


def _spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row.get("low") is not None]


def _y(title: str | None, **scale: Any) -> alt.Y:
    return alt.Y("mean:Q", title=title, scale=alt.Scale(**scale), axis=alt.Axis(tickCount=6))


LOSS = "validation loss, nats a token"
ROUNDS = {"low": "slowest round|,.0f", "high": "fastest round|,.0f"}
NO_UNIT = "datum.value ? datum.label : 0"  # 0, not 0k
TOKENS = alt.X("tokens:Q", title="training tokens seen", axis=alt.Axis(format="~s", tickCount=5, labelExpr=NO_UNIT))
ZERO: dict[str, Any] = {"color": GREY, "strokeDash": [4, 3]}


def _deviation(design: Design) -> dict[str, Any]:
    """Name, mean loss and, of two seeds and more, the mean less and plus the standard deviation."""
    row = {"design": design["name"], "n_head": design["n_head"], "bytes": design["cache_bytes_per_token"]}
    row |= design["loss"]
    return row if row["sd"] is None else row | {"low": row["mean"] - row["sd"], "high": row["mean"] + row["sd"]}


def _rounds(design: str, measured: dict[str, float]) -> dict[str, Any]:
    return {"design": design, "mean": measured["median"], "low": measured["low"], "high": measured["high"]}


def _loss(results: Results, names: list[str]) -> Panels:
    rows = [{"design": d["name"], **point} for d in trained(results) for point in d["curve"]]
    tips = _tips(design="design", tokens="tokens|,", mean="loss|.4f", low="less sd|.4f", high="plus sd|.4f", n="seeds")
    if not rows:
        return []
    probe = results["dataset"].get("probe")
    points = _points(rows, names, TOKENS, _y(LOSS, zero=False), tips, band=True)
    if probe:  # its best possible loss is known
        floor = _chart([{"floor": probe["floor"]}]).mark_rule(**ZERO)
        points = floor.encode(y="floor:Q", tooltip=_tips(floor="floor|.4f")) + points
    return [points.properties(height=340)]


def _difference_curve(results: Results, names: list[str]) -> Panels:
    pairs = {d["name"]: d["against_baseline"] for d in trained(results) if d["against_baseline"]}
    curves = {name: pair["curve"] for name, pair in pairs.items() if pair["curve"]}
    # The second half sets the height: early bands are many times as wide, and leave the picture.
    late = [point for curve in curves.values() for point in curve[len(curve) // 2 :]]
    seen = [0.0, *(point[key] for point in late for key in ("mean", "low", "high") if point[key] is not None)]
    edge = 0.06 * (max(seen) - min(seen)) or 0.01
    y = _y("nats a token", domain=[min(seen) - edge, max(seen) + edge])
    tips = _tips(tokens="tokens|,", mean="difference|+.4f", low="from|+.4f", high="to|+.4f", n="seeds")
    zero = _chart([{"zero": 0}]).mark_rule(**ZERO).encode(y="zero:Q")
    panels = []
    for name, curve in curves.items():
        rows = [{"design": name, **point} for point in curve]
        panel = zero + _points(rows, names, TOKENS, y, tips, legend=False, band=True)
        panels.append(panel.properties(height=170, title=name))
    return panels


def _difference(results: Results, names: list[str]) -> Panels:
    means, seeds = [], []
    for design in trained(results):
        if pair := design["against_baseline"]:
            low, high = pair["interval"] or (None, None)
            row = {"design": design["name"], "mean": pair["mean"], "low": low, "high": high, "verdict": pair["verdict"]}
            means.append({**row, "n": len(pair["seeds"])})
            runs = zip(pair["seeds"], pair["differences"], strict=True)
            seeds += [{"design": design["name"], "seed": seed, "mean": value} for seed, value in runs]
    y = alt.Y("design:N", sort=names, title=None)
    x = alt.X("mean:Q", title="difference in loss, nats a token (left is better)", axis=alt.Axis(tickCount=6))
    look: dict[str, Any] = {"scale": alt.Scale(domain=names), "legend": None}
    tips = _tips(design="design", mean="mean|+.4f", low="from|+.4f", high="to|+.4f", n="seeds", verdict="verdict")
    base = _chart(means).encode(y=y, color=alt.Color("design:N", **look))
    dots = base.mark_point(filled=True, opacity=1, size=110)
    each = _chart(seeds).mark_point(filled=True, opacity=0.7, size=30, color=GREY, yOffset=11)
    spread = base.properties(data=alt.Data(values=_spread(means))).mark_rule(strokeWidth=3)
    layers = [
        _chart([{"zero": 0}]).mark_rule(**ZERO).encode(x="zero:Q"),
        *([spread.encode(x="low:Q", x2="high:Q")] if _spread(means) else []),
        dots.encode(x=x, shape=alt.Shape("design:N", **look), tooltip=tips),
        each.encode(x=x, y=y, tooltip=_tips(design="design", seed="seed", mean="difference|+.4f")),
    ]
    return [alt.layer(*layers).properties(height=44 * len(means))] if means else []


def _pareto(results: Results, names: list[str]) -> Panels:
    designs = trained(results)
    if not designs:
        return []
    best = {d["name"] for d in front(designs)}
    rows = [_deviation(d) | {"hollow": d["name"] not in best} for d in designs]
    x = _log("bytes", "cache bytes a token", [row["bytes"] for row in rows], 1.4)
    y = _y(LOSS, zero=False)
    tips = _tips(design="design", bytes="cache bytes a token|,", mean="loss|.4f", sd="sd over seeds|.4f", n="seeds")
    steps = _chart([row for row in rows if not row["hollow"]]).mark_line(interpolate="step-after", **ZERO)
    return [(steps.encode(x=x, y=y) + _points(rows, names, x, y, tips, line=False)).properties(height=320)]


def _decode(results: Results, names: list[str]) -> Panels:
    cells = [(name, cell) for name, speed in speed_of(results).items() for cell in speed["decode"]]
    tips = _tips(design="design", context="context|,", mean="tokens/s|,.0f", **ROUNDS, ms="ms a step|.2f",
                 mb="cache, MB|,.1f", gain="gain")  # fmt: skip
    panels = []
    for batch in sorted({cell["batch"] for _, cell in cells}):
        rows = []
        for name, cell in cells:
            if cell["batch"] == batch:
                row = _rounds(name, cell["tokens_per_s"]) | {"context": cell["context"], "mb": cell["cache_mb"]}
                gain = "to be expected" if cell["gain_expected"] else "not to be expected"
                row |= {"ms": cell["ms_per_step"]["median"], "hollow": not cell["gain_expected"], "gain": gain}
                rows.append(row)
        x = _log("context", "context, tokens", [row["context"] for row in rows], 1.15)
        limit = 6 * min(d["n_embd"] for d in results["designs"]) / batch
        small = _chart([{"context": 1, "to": limit}]).mark_rect(color=GREY, opacity=0.15, clip=True)
        panel = small.encode(x=x, x2="to") + _points(rows, names, x, _y("decoded tokens/s", zero=True), tips)
        panels.append(panel.properties(height=260, title=f"batch {batch}"))
    return panels


def _training(results: Results, names: list[str]) -> Panels:
    rows = [_rounds(name, speed["training"]["tokens_per_s"]) for name, speed in speed_of(results).items()]
    base = _chart(rows).encode(y=alt.Y("design:N", sort=names, title=None))
    color = alt.Color("design:N", scale=alt.Scale(domain=names), legend=None)
    x = alt.X("mean:Q", title="training tokens/s, slowest to fastest round", axis=alt.Axis(tickCount=5))
    tips = _tips(design="design", mean="tokens/s|,.0f", **ROUNDS)
    bars = base.mark_bar(cornerRadiusEnd=3, height={"band": 0.6}).encode(x=x, color=color, tooltip=tips)
    spread = base.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q")
    return [(bars + spread).properties(height=34 * len(rows))] if rows else []


def _heads(results: Results) -> Panels:
    losses, speeds = [], []
    for label, family in head_counts(results).items():
        for d in family:
            row = _deviation(d) | {"curve": label or "nothing else differs", "width": d["head_dim"]}
            losses.append(row)
            if d["name"] in speed_of(results):
                speeds.append(row | _rounds(d["name"], speed_of(results)[d["name"]]["training"]["tokens_per_s"]))
    curves = list(dict.fromkeys(row["curve"] for row in losses))
    panels = []
    for rows, title, y, form in (
        (losses, "loss", _y(LOSS, zero=False), ".4f"),
        (speeds, "training speed", _y("training tokens/s", zero=True), ",.0f"),
    ):
        if rows:
            tips = _tips(design="design", curve="group", n_head="heads", width="width of a head",
                         mean=f"{title}|{form}", low=f"low|{form}", high=f"high|{form}")  # fmt: skip
            x = _log("n_head", "number of heads", [row["n_head"] for row in rows], 1.2)
            panel = _points(rows, curves, x, y, tips, by="curve", legend=len(curves) > 1)
            panels.append(panel.properties(height=240, title=title))
    return panels
