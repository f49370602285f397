"""From results.json's content to what people read: report.html, report.md, the pictures, the table on the terminal.

`document` says everything once, as a list of blocks of plain text; HTML and Markdown are two ways to write them down.
"""

import html
import json
import re
from pathlib import Path
from typing import Any, Literal

import vl_convert
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lab import charts
from lab.answers import claims, finding, growing, join, p_text, plural, span, uneven, verdict
from lab.charts import Design, Panels, Results, head_counts, speed_of
from lab.page import CHARTS, SORTING, Cell, Rows, data_script, escape, page, table
from runtime.errors import plain
from runtime.runs import write_whole

TREND = """Is the difference growing or closing? No test stands behind these words. (Here and in the curves losses are \
over the part of the validation split that is evaluated during training: they differ a little from the final ones.)"""

Block = tuple[Any, ...]  # its kind, which `to_html` lists, and what belongs to it
CAPTIONS = {
    "loss": "Validation loss during training, mean over seeds; bands are one standard deviation to either side.",
    "difference": "Loss minus the reference's at the end of training: the mean with its 95% interval, and below it "
    "each seed in grey. An interval that crosses the dashed line holds 0.",
    "difference-curve": "The same difference during training, with its 95% interval; early ones may leave the picture.",
    "pareto": "Loss against the memory that decoding keeps for a token; error bars are one standard deviation over "
    "seeds. The dashed line is the Pareto front: for a hollow design another one has a lower mean loss in the same or "
    "fewer bytes, be the difference detected or not.",
    "decode": "Decoding speed against the tokens already in the cache; error bars span slowest and fastest round. "
    "Hollow points, and grey ground, lie where batch x context < 6 n_embd and no gain is to be expected.",
    "training": "Training speed, measured apart from the runs; error bars go from the slowest to the fastest round.",
    "heads": "Loss (with one standard deviation over seeds) and training speed against the number of heads, where "
    "every head has a K and V of its own.",
}


def number(value: float | None, form: str = ",") -> Cell:
    """A cell that sorts as a number; a dash where there is none."""
    return ("-" if value is None else format(value, form)), value


def setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def loss_cell(loss: dict[str, Any]) -> Cell:
    """Mean ± standard deviation, sorted by the mean."""
    mean, sd = number(loss["mean"], ".4f"), loss["sd"]
    return mean if sd is None else (f"{mean[0]} ± {sd:.4f}", loss["mean"])


def pair_cells(pair: dict[str, Any] | None) -> dict[str, Cell]:
    """Difference, interval and p of a comparison with the baseline."""
    pair = pair or {}
    interval, p = pair.get("interval"), pair.get("p_holm")
    return {
        "difference": number(pair.get("mean"), "+.4f"),
        "95% interval": (span(interval), interval[0]) if interval else number(None),
        "p (Holm)": number(None) if p is None else (p_text(p), p),
    }


def full_table(results: Results) -> Rows:
    """Every figure of every design."""
    rows: Rows = []
    for d in results["designs"]:
        pair, speed = d["against_baseline"] or {}, speed_of(results).get(d["name"])
        rows.append({
            "design": d["name"], "loss ± sd": loss_cell(d["loss"]), "seeds": number(d["loss"]["n"]),
            "bits/byte": number(d["bits_per_byte"], ".4f"), **pair_cells(pair),
            "smallest detectable": number(pair.get("smallest_detectable"), ".4f"),
            "verdict": verdict(d, results["baseline"]), "heads": number(d["n_head"]),
            "K/V heads": number(d["n_kv_head"]), "head width": number(d["head_dim"]),
            "parameters": number(d["parameters"]),
            "without embeddings": number(d["parameters_without_embeddings"]),
            "training FLOPs/token": number(d["flops_per_token"]),
            "cache bytes/token": number(d["cache_bytes_per_token"]),
            "allocated": number(d["cache_bytes_allocated"], ",.0f"), "learning rate": number(d["learning_rate"], "g"),
        })  # fmt: skip
        if results["speed"]:
            rate = speed["training"]["tokens_per_s"]["median"] if speed else None
            largest = max(speed["decode"], key=lambda c: c["batch"] * c["context"]) if speed else None
            decoded = largest["tokens_per_s"]["median"] if largest else None
            rows[-1]["training tokens/s"] = number(rate, ",.0f")
            rows[-1]["decoded tokens/s, largest size"] = number(decoded, ",.0f")
    return rows


def speed_blocks(results: Results) -> list[Block]:
    """Speed of training, of reading a prompt and of decoding, with the shares of what the machine can do."""
    speed = results["speed"]
    if not speed:
        return [("heading", "Speed"), ("text", results["speed_note"] or "Speed was not measured.")]
    grid: dict[tuple[str, int, int], dict[str, Cell]] = {}
    training: Rows = []
    attention: Rows = []
    for name, s in speed["designs"].items():
        for kind in ("decode", "prefill"):
            for c in s[kind]:
                rate, at = c["tokens_per_s"], (kind, c["batch"], c["context"])
                row = grid.setdefault(at, {"tokens/s": kind, "batch": number(at[1]), "context": number(at[2])})
                mark = " *" if not c.get("gain_expected", True) else ""
                row[name] = f"{rate['median']:,.0f} ({rate['low']:,.0f} to {rate['high']:,.0f}){mark}", rate["median"]
        t = s["training"]
        training.append({
            "design": name, "training tokens/s": number(t["tokens_per_s"]["median"], ",.0f"),
            "GFLOP/s": number(t["gflops"], ".1f"), "of the limit": number(t["share_of_matmul"], ".0%"),
            **{f"peak memory, MB: {kind}": number(size, ",.0f") for kind, size in s["peak_memory_mb"].items()},
        })  # fmt: skip
        whole = {(c["batch"], c["context"]): c for c in s["decode"]}
        for a in s["decode_attention"]:
            c = whole[a["batch"], a["context"]]
            attention.append({
                "design": name, "batch": number(a["batch"]), "context": number(a["context"]),
                "cache MB": number(c["cache_mb"], ",.1f"), "whole step, ms": number(c["ms_per_step"]["median"], ".2f"),
                "GB/s": number(c["gb_per_s"], ".1f"), "of the limit": number(c["share_of_read"], ".0%"),
                "attention, ms": number(a["ms"]["median"], ".3f"), "its GB/s": number(a["gb_per_s"], ".1f"),
                "of the ideal": number(a["share_of_ideal"], ".0%"),
                "PyTorch's attention, ms": number(a["sdpa_ms"]["median"], ".3f"),
            })  # fmt: skip
    limits = speed["limits"]
    told = (
        f"Measured after training on {plural(speed['threads'], 'thread')}, designs in turn over {speed['rounds']} "
        "rounds: medians, with the slowest and the fastest round. Decoding makes one token at a time for every sequence"
        f" of the batch; prefill reads a prompt. The limits of this machine: {limits['matmul_gflops']:,.0f} GFLOP/s "
        f"({limits['matmul']}) and {limits['read_gb_per_s']:.1f} GB/s ({limits['read']}); more than 100% of it is read "
        "from the processor's own cache. Speed depends on shapes alone, so contexts beyond the trained one are "
        "measured too."
    )
    if busy := uneven(results):
        told = f"Do not compare these speeds: {busy}. The same command on an idle machine measures them again. {told}"
    return [
        ("heading", "Speed"), ("text", told), ("picture", "decode"), ("text", f"* {speed['decode_gain']}"),
        ("table", list(grid.values())), ("picture", "training"), ("table", training),
        ("text", "In decoding, queries that share a K and V are folded into rows (attention/kernel.py). PyTorch's "
         "attention, below, is scaled_dot_product_attention with enable_gqa on the same tensors."),
        ("fold", "A decoding step, and its attention alone, over as many caches as there are layers", attention),
    ]  # fmt: skip


def rate_blocks(results: Results) -> list[Block]:
    """Each design's learning rate, where it was chosen, and whether a common one orders them otherwise."""
    rates = results["rates"]
    if not rates:
        return []
    chosen = join(f"{name} at {rate:g}" for name, rate in rates["best"].items())
    told = f"Each design trained at the best of {len(rates['tried'])} learning rates, chosen on seed {rates['seed']}, "
    told += f"which is not reported: {chosen}."
    common = f"At one common rate, {rates['common']:g}, the order from the lowest mean loss is "
    common += f"{join(rates['order_at_common'])}, "
    common += f"which differs from {join(rates['order'])} at the best rates." if rates["differs"] else "the same."
    means = {d["name"]: d["loss"]["mean"] for d in results["designs"]}
    for c in rates["at_common"]:
        name, best = c["name"], rates["best"].get(c["name"], rates["common"])
        if best != rates["common"] and c["mean"] is not None and means[name] is not None and c["mean"] < means[name]:
            common += (
                f" For {name} the seed that rates were chosen on misled: it preferred {best:g}, and over the reported "
                f"seeds {rates['common']:g} ends {means[name] - c['mean']:.4f} lower."
            )
    tried: Rows = [
        {"design": name, **{f"loss at {rate:g}": number(losses.get(f"{rate:g}"), ".4f") for rate in rates["tried"]},
         "chosen": number(rates["best"].get(name), "g")} for name, losses in rates["losses"].items()
    ]  # fmt: skip
    at_common: Rows = [
        {"design": c["name"], "loss ± sd": loss_cell(c), **pair_cells({**c, "mean": c["difference"]}),
         "verdict": c["verdict"] or "reference"}
        for c in rates["at_common"]
    ]  # fmt: skip
    return [("heading", "Learning rates"), ("text", told), ("table", tried), ("text", common), ("table", at_common)]


def how_to_read(results: Results, comparisons: int) -> list[Block]:
    """What was run and what an interval and a verdict mean."""
    r, data, seeds = results, results["dataset"], plural(len(results["seeds"]), "seed")
    told = (
        f"Each design was trained with {seeds} ({join(r['seeds'])}) on {data['name']} (tokens: {data['tokenizer']}) "
        f"for {r['max_steps']:,} steps, {r['tokens_seen']:,} tokens, which is {r['share_of_pass']:.1%} of one pass "
        f"over the text, at context {r['block_size']}. Losses are those of the last step over all "
        f"{data['val_tokens']:,} tokens of the validation split, in nats a token: lower is better, and a difference "
        "above 0 is worse than the reference. Differences are taken seed by seed: at one seed all designs saw the same "
        "tokens in the same order, so that their differences may vary less than their losses."
    )
    if probe := data.get("probe"):
        told += (
            f" The best possible loss is known: {probe['floor']:g} on the words that count (the dashed line), and "
            f"{probe['guess']:.4f} for a guess that looks at nothing."
        )
    if r["vary"]:
        told += f" Varied: {'; '.join(f'{name} {join(values)}' for name, values in r['vary'].items())}."
    judged = (
        "Intervals are over seeds: they tell how far the luck of initial values and data order may have moved a mean, "
        "for this text and this training length, and nothing about other texts or longer training. They are 95% "
        "t-intervals, unadjusted for the number of designs; the verdict comes from the Holm-adjusted p, at 5% over "
        f"{plural(comparisons, 'comparison')}, so that an interval may leave 0 out and no difference be detected. "
        'Whatever its p, a verdict reads "not settled at this length" where the mean difference had another sign half '
        "way than at the end, or where the reference's loss still fell by more than 0.05 over the last quarter."
    )
    if len(r["seeds"]) < 3:
        judged = f"With {seeds} there is no interval, no p and no verdict: that takes 3 seeds."
    return [("text", told), ("text", judged)]


def document(results: Results) -> list[Block]:
    """All that the report says."""
    r, base, designs = results, results["baseline"], results["designs"]
    rivals = [d for d in designs if d["name"] != base]
    blocks: list[Block] = []
    if r["first_look"]:
        text = "This is a first look, trained too briefly to rely on. Leave out --quick for an answer."
        blocks.append(("warning", text))
    if rivals:
        names = join(d["name"] for d in rivals)
        lead = f"What do{'es' * (len(rivals) == 1)} {names} lose or gain against {base}, the reference, in validation "
        blocks.append(("lead", lead + "loss, memory and time, and is the difference in loss real?"))
        blocks.append(("items", [(f"{d['name']}: {verdict(d, base)}.", finding(d)) for d in rivals]))
    if r["failures"]:
        blocks.append(("warning", f"Left out, because they failed: {plural(len(r['failures']), 'run')}, listed below."))
    blocks += how_to_read(r, len(rivals))
    if answered := claims(r):
        blocks.append(("heading", "Common claims about attention heads, and what was measured"))
        blocks += [block for claim, items in answered for block in (("subheading", claim), ("items", items))]
    trends = [(d["name"], text) for d in rivals if (text := growing(d))]
    blocks += [("heading", "Loss"), ("picture", "loss"), ("picture", "difference"), ("picture", "difference-curve"),
               *([("text", TREND), ("items", trends)] if trends else []),
               ("heading", "Loss against cache"), ("picture", "pareto")]  # fmt: skip
    named: dict[str, Design] = {d["name"]: d for d in designs}
    for group in r["equal_cache"]:
        rows: Rows = [
            {"design": name, "heads": number(d["n_head"]), "K/V heads": number(d["n_kv_head"]),
             "parameters": number(d["parameters"]), "loss ± sd": loss_cell(d["loss"]),
             **pair_cells(d["against_baseline"]), "verdict": verdict(d, base)}
            for name in group for d in [named[name]]
        ]  # fmt: skip
        size = named[group[0]]["cache_bytes_per_token"]
        blocks += [("text", f"Side by side, with the same cache of {size:,} bytes a token:"), ("table", rows)]
    if head_counts(r):
        blocks += [("heading", "Number of heads"), ("picture", "heads")]
    blocks += [*speed_blocks(r), ("heading", "All figures"), ("table", full_table(r))]
    if pooled := r["pooled"]:
        text = f"All designs in one analysis (seed and design, {pooled['df']} residual degrees of freedom, residual "
        text += f"deviation {pooled['residual_sd']:.4f}), as a second opinion: no verdict comes from it. "
        text += pooled["note"] or ""
        rows = [{"design": d["name"], **pair_cells({"mean": pair["mean"], **pair["pooled"]}),
                 "residual deviation": number(pooled["design_sd"].get(d["name"]), ".4f")}
                for d in rivals if (pair := d["against_baseline"]) and pair["pooled"]]  # fmt: skip
        blocks += [("heading", "Pooled analysis"), ("text", text.strip()), ("table", rows)]
    blocks += rate_blocks(r)
    convention = {"width": "width: what the design files change and nothing else, so that parameters may differ",
                  "params": "params: d_ff was adjusted until total parameters agree"}[r["match"]]  # fmt: skip
    blocks += [("heading", "What was held equal, and what was adjusted"),
               ("items", [("Matched by", convention), *(("Held equal:", text) for text in r["held_equal"]),
                          *(("Adjusted:", text) for text in r["adjusted"] or ["nothing"]),
                          *(("Note:", text) for text in r["notes"])])]  # fmt: skip
    if r["failures"]:
        failed = [(f"{f['design']}, seed {f['seed']}:", f["error"]) for f in r["failures"]]
        blocks += [("heading", "Failures"), ("items", failed)]
    samples = [("sample", d["name"], d["sample"]) for d in designs if d["sample"]]
    blocks += [("heading", "A sample of text from each design"), *samples] if samples else []
    keys = dict.fromkeys(key for d in designs for key in d["settings"])
    settings: Rows = [{"setting": key, **{d["name"]: setting(d["settings"].get(key)) for d in designs}}
                      for key in keys]  # fmt: skip
    settings.sort(key=lambda row: len(set(list(row.values())[1:])) == 1)
    where = {"command": r["command"], "made": r["created"], "commit": r["git_commit"] or "-", "threads": r["threads"],
             "runs at once": r["jobs"], **r["machine"], **r["versions"]}  # fmt: skip
    machine: Rows = [{"what": key, "value": str(value)} for key, value in where.items()]
    return [*blocks, ("heading", "Settings and machine"), ("fold", "Every setting, those that differ first", settings),
            ("fold", "Command, machine and versions", machine)]  # fmt: skip


def title(results: Results) -> str:
    return f"Head designs compared: {join(d['name'] for d in results['designs'])}"


def to_html(results: Results, panels: dict[str, Panels]) -> str:
    """The page: one file that fetches nothing."""
    e = escape
    body: list[str] = []
    specs: dict[str, Any] = {}

    for kind, *parts in document(results):
        match kind:
            case "heading":
                body.append(f"<h2>{e(parts[0])}</h2>")
            case "subheading":
                body.append(f"<h3>{e(parts[0])}</h3>")
            case "lead" | "text" | "warning":
                body.append(f'<p class="{kind}">{e(parts[0])}</p>')
            case "items":
                body.append(f"<ul>{''.join(f'<li><b>{e(term)}</b> {e(text)}</li>' for term, text in parts[0])}</ul>")
            case "table" if parts[0]:
                body.append(table(parts[0]))
            case "fold" if parts[1]:
                body.append(f"<details><summary>{e(parts[0])}</summary>{table(parts[1])}</details>")
            case "sample":
                body.append(f"<h3>{e(parts[0])}</h3><pre>{html.escape(parts[1])}</pre>")
            case "picture" if parts[0] in panels:
                drawn = {f"{parts[0]}-{i}": panel.to_dict() for i, panel in enumerate(panels[parts[0]])}
                boxes = "".join(f'<div class="chart" id="{i}"></div>' for i in drawn)
                caption = f"<figcaption>{e(CAPTIONS[parts[0]])}</figcaption>"
                body.append(f'<figure><div class="panels">{boxes}</div>{caption}</figure>')
                specs |= drawn
    themes = {"light": charts.theme("#333333", "#E6E6E6"), "dark": charts.theme("#CCCCCC", "#3A3D44")}
    body.append(data_script("data", {"specs": specs, "themes": themes}))
    scripts = [vl_convert.javascript_bundle(None), CHARTS, SORTING]
    return page(title(results), "\n".join(body), scripts, evaluates=True)


def to_markdown(results: Results, panels: dict[str, Panels]) -> str:
    """The same in Markdown, with links to the pictures' files."""

    def e(text: str) -> str:
        text = re.sub(r"([\\`*_{}\[\]|#~])", r"\\\1", plain(text)).replace("\n", " ")
        return text.replace("&", "&amp;").replace("<", "&lt;")

    def table(rows: Rows) -> str:
        texts = [[c if isinstance(c, str) else c[0] for c in (row.get(key, "-") for key in rows[0])] for row in rows]
        lines = [list(map(e, rows[0])), ["---"] * len(rows[0]), *(list(map(e, line)) for line in texts)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    out = [f"# {e(title(results))}"]
    for kind, *parts in document(results):
        match kind:
            case "heading":
                out.append(f"## {e(parts[0])}")
            case "subheading":
                out.append(f"### {e(parts[0])}")
            case "lead" | "text":
                out.append(e(parts[0]))
            case "warning":
                out.append(f"**{e(parts[0])}**")
            case "items":
                terms = ((f"**{e(term)}** " if term else "", e(text)) for term, text in parts[0])
                out.append("\n".join(f"- {term}{text}" for term, text in terms))
            case "table" if parts[0]:
                out.append(table(parts[0]))
            case "fold" if parts[1]:
                out += [f"### {e(parts[0])}", table(parts[1])]
            case "sample":
                out += [f"### {e(parts[0])}", "\n".join(f"    {line}" for line in parts[1].splitlines())]
            case "picture" if parts[0] in panels:
                out += [f"![{parts[0]}]({parts[0]}.svg)", CAPTIONS[parts[0]]]
    return "\n\n".join(out) + "\n"


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write the pictures, report.md and report.html into folder, each whole or absent; return their paths.

    Pictures of an earlier report that this one has no figures for are deleted.
    """
    panels = charts.draw(results)
    files = {f"{name}.svg": charts.to_svg(drawn) for name, drawn in panels.items()}
    files |= {"report.md": to_markdown(results, panels), "report.html": to_html(results, panels)}
    for name, content in files.items():
        write_whole(folder / name, content.encode("utf-8", "replace").decode())
    for name in CAPTIONS.keys() - panels.keys():
        (folder / f"{name}.svg").unlink(missing_ok=True)
    return [folder / name for name in files]


def show(results: Results, console: Console) -> None:
    """Print what the designs cost and how they compare, as two tables that fit 100 columns."""

    def say(text: str) -> Text:  # a terminal may know ASCII only, and a name may hold markup
        text = plain(text).replace("±", "+-")
        return Text(text.encode(console.encoding, "backslashreplace").decode(console.encoding))

    full = full_table(results)
    verdicts = [row for row in full if row["verdict"] != "reference"]
    costs = ["design", "parameters", "cache bytes/token", "loss ± sd", "bits/byte"]
    compared = ["design", "difference", "95% interval", "p (Holm)", "smallest detectable", "verdict"]
    about = f"Against {results['baseline']}, nats a token; intervals over seeds, unadjusted; p adjusted"
    short = {"cache bytes/token": "cache/token", "smallest detectable": "detectable"}
    short["training tokens/s"] = "train tok/s"
    parts = [("", costs + ["training tokens/s"] * bool(results["speed"]), full)]
    if verdicts:
        parts.append((f"\n{about}", compared, verdicts))
    for caption, keys, rows in parts:
        console.print(say(caption))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for key in keys:
            head, words = say(short.get(key, key)), {"design": 10, "verdict": 13}.get(key)  # their least width
            side: Literal["left", "right"] = "left" if words else "right"
            table.add_column(head, justify=side, no_wrap=not words, min_width=words, overflow="fold")
        for row in rows:
            table.add_row(*(say(c if isinstance(c, str) else c[0]) for c in (row[key] for key in keys)))
        console.print(table)
    if busy := uneven(results):
        console.print(say(f"\nDo not compare the speeds: {busy}."))
