"""From results.json's content to what people read: report.html, report.md, the pictures, the table on the terminal.

`document` says everything once, as a list of blocks of plain text; HTML and Markdown are two ways to write them down.
Every sentence about an outcome is chosen by the figures.
"""

import html
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import vl_convert
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lab import charts
from lab.charts import Results, head_counts, speed_of, trained
from lab.page import PAGE

Design = dict[str, Any]
Cell = str | tuple[str, float | None]  # text, or text and the number it is sorted by
Block = tuple[Any, ...]  # ("heading" | "text" | "warning" | "items" | "table" | "picture" | "sample" | "fold", ...)
SAME = 1.1  # times and speeds within this ratio are called about the same
CAPTIONS = {
    "loss": "Validation loss while training, mean over seeds; the band is one standard deviation to either side.",
    "difference": "Loss less the reference's at the end of training: the mean with its 95% interval, and each seed in "
    "grey below it. An interval that crosses the dashed line holds 0.",
    "difference-curve": "The same difference during training, with its 95% interval: is it growing or closing? Early "
    "bands may leave the picture.",
    "pareto": "Loss against the memory that decoding keeps a token, with one standard deviation over seeds. The dashed "
    "line joins the Pareto front; for a hollow design another one has a lower mean loss in as few bytes.",
    "decode": "Decoding speed against what is already in the cache; rules go from the slowest to the fastest round. "
    "Hollow points lie where no gain is to be expected.",
    "training": "Training speed, measured apart from training, designs in turn.",
    "heads": "Loss, and training speed, against the number of heads, each with K and V of its own.",
}


def number(value: float | None, form: str = ",") -> tuple[str, float | None]:
    """A cell that sorts as a number; a dash where there is none."""
    return ("-" if value is None else format(value, form)), value


def p_value(p: float) -> str:
    return "below 0.0001" if p < 0.0001 else f"{p:.4f}"


def span(interval: list[float] | None) -> str:
    return f"{interval[0]:+.4f} to {interval[1]:+.4f}" if interval else "-"


def loss_text(loss: dict[str, Any]) -> tuple[str, float | None]:
    """Mean +- standard deviation, sorted by the mean."""
    mean, sd = loss["mean"], loss["sd"]
    return ("-" if mean is None else f"{mean:.4f}" if sd is None else f"{mean:.4f} +- {sd:.4f}"), mean


def join(parts: Iterable[Any]) -> str:
    """a, b and c."""
    *first, last = map(str, parts)
    return f"{', '.join(first)} and {last}" if first else last


def finding(design: Design, baseline: str) -> str:
    """The difference to the baseline in a sentence, with all that is needed to judge it."""
    pair = design["against_baseline"]
    if pair is None:
        return f"no seed is finished both here and in {baseline}"
    seeds = f"{len(pair['seeds'])} seed" + "s" * (len(pair["seeds"]) != 1)
    text = f"{pair['mean']:+.4f} nats a token against {baseline} ("
    if pair["interval"] is None:
        text += f"{seeds}; fewer than 3 give no interval)"
    else:
        text += f"95% interval {span(pair['interval'])} over {seeds}; adjusted p {p_value(pair['p_holm'])}; "
        text += f"a difference of {pair['smallest_detectable']:.4f} could have been detected)"
    if pair["not_settled"]:
        found = f"; taken by itself the p says: {pair['detected']}" if pair["detected"] else ""
        text += f". Training was too short to settle it: {pair['not_settled']}{found}"
    return text


def decode_gain(results: Results, design: Design, reference: Design) -> str | None:
    """How much faster the design decodes than the reference, at the largest cell and over the grid."""
    speed = speed_of(results)
    if design["name"] not in speed or reference["name"] not in speed:
        return None
    cells, others = (
        {(c["batch"], c["context"]): c for c in speed[d["name"]]["decode"]} for d in (design, reference)
    )
    ratios = {k: c["tokens_per_s"]["median"] / others[k]["tokens_per_s"]["median"] for k, c in cells.items() if k in others}
    if not ratios:
        return None
    (batch, context), ratio = max(ratios.items(), key=lambda item: (item[0][0] * item[0][1], item[0]))
    speeds = [f"{c[batch, context]['tokens_per_s']['median']:,.0f}" for c in (cells, others)]
    text = f"at batch {batch} and context {context:,} it decodes {ratio:.2f} times as fast as {reference['name']} "
    text += f"({speeds[0]} against {speeds[1]} tokens/s), over all {len(ratios)} measured sizes {min(ratios.values()):.2f} "
    text += f"to {max(ratios.values()):.2f} times"
    below = sum(not cells[k]["gain_expected"] for k in ratios)
    return text + (f" ({below} of them so small that no gain is to be expected)" if below else "")


def full_heads(results: Results, design: Design) -> Design | None:
    """The design with as many heads, each with K and V of its own; the baseline first."""
    alike = [d for d in trained(results) if d["n_head"] == d["n_kv_head"] == design["n_head"]]
    alike = [d for d in alike if d["head_dim"] == design["head_dim"] and d["n_embd"] == design["n_embd"]]
    return min(alike, key=lambda d: (not d["name"] == results["baseline"], len(d["changes"]))) if alike else None


def same_compute(results: Results, family: list[Design]) -> str:
    """Head count against FLOPs and measured training time."""
    counts = join(sorted({d["n_head"] for d in family}))
    flops = sorted({d["flops_per_token"] for d in family})
    if len(flops) == 1:
        text = f"By count it holds: with {counts} heads training takes {flops[0]:,} FLOPs a token every time. "
    else:
        text = f"By count it does not hold for these designs: with {counts} heads training takes {flops[0]:,} to "
        text += f"{flops[-1]:,} FLOPs a token. "
    speeds = {d["name"]: speed_of(results)[d["name"]]["training"]["tokens_per_s"]["median"]
              for d in family if d["name"] in speed_of(results)}  # fmt: skip
    if len(speeds) < 2:
        return text + f"The time was not measured: {results['speed_note'] or 'no speed of two of them'}."
    fast, slow = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    ratio = speeds[fast] / speeds[slow]
    judged = "In time it holds as well" if ratio < SAME else "In time it does not hold"
    measured = f"{fast} trains on {speeds[fast]:,.0f} tokens/s and {slow} on {speeds[slow]:,.0f}"
    return text + f"{judged}: {measured}, {ratio:.2f} times the time a token."


def several_heads(results: Results, family: list[Design]) -> str:
    """Head count against loss: does one head do worse than several?"""
    by_count = [f"{d['n_head']} ({d['name']}) {d['loss']['mean']:.4f}" for d in family]
    best, most = min(family, key=lambda d: d["loss"]["mean"]), family[-1]
    text = f"Mean loss by number of heads: {join(by_count)}. "
    several = [d for d in family if d["n_head"] > 1]
    one = family[0] if family[0]["n_head"] == 1 else None
    if one is None or not several:
        text += "There is no design of one head among them, so this comparison does not answer it. "
    else:
        rival = min(several, key=lambda d: (not d["name"] == results["baseline"], d["loss"]["mean"]))
        asked, sign = (rival, "better") if one["name"] == results["baseline"] else (one, "worse")
        pair = asked["against_baseline"]
        if pair is None or not (one["name"] == results["baseline"] or rival["name"] == results["baseline"]):
            gap = one["loss"]["mean"] - rival["loss"]["mean"]
            text += f"One head ends {gap:+.4f} from {rival['name']}, without an interval: neither is the reference. "
        else:
            judged = {
                sign: "It holds here: several heads have the lower loss",
                "no difference detected": "No difference between one head and several is detected here",
                "not settled at this length": "This training length does not settle it",
                "too few seeds for a verdict": "There are too few seeds to tell",
            }.get(pair["verdict"], "It does not hold here: one head has the lower loss")
            text += f"{judged}: {asked['name']} {finding(asked, results['baseline'])}. "
    if best is not most:
        gap = most["loss"]["mean"] - best["loss"]["mean"]
        text += f"More heads are not always better: {most['name']} ends {gap:.4f} above {best['name']}."
    return text.strip()


def smaller_cache(results: Results, design: Design, reference: Design) -> str:
    """Cache bytes by formula and as allocated, and decode speed, of one K/V head against one for every head."""
    size, full, allocated = (design["cache_bytes_per_token"], reference["cache_bytes_per_token"],
                             design["cache_bytes_allocated"])  # fmt: skip
    holds = "It holds" if size * design["n_head"] == full * design["n_kv_head"] else "It does not hold"
    text = f"{holds}: {design['name']} keeps {size:,} bytes a token where {reference['name']} with its {design['n_head']} "
    text += f"heads keeps {full:,}, {full / size:.2f} times as many; "
    agrees = "as many as" if allocated == size else "not the number that"
    text += f"a cache really allocated takes {allocated:,.0f}, {agrees} the formula says. "
    gain = decode_gain(results, design, reference)
    return text + (f"As to speed, {gain}." if gain else f"Decoding speed: {results['speed_note'] or 'not measured'}.")


def trade(results: Results, design: Design, reference: Design) -> str:
    """What sharing K and V costs in loss and brings in memory and speed."""
    pair, mean = design["against_baseline"], reference["loss"]["mean"]
    if reference["name"] == results["baseline"] and pair:
        difference = pair["mean"]
        loss = f"{pair['verdict']}, {finding(design, reference['name'])}"
    else:
        difference = design["loss"]["mean"] - mean
        loss = f"{difference:+.4f} nats a token against {reference['name']} in the mean, without an interval because "
        loss += f"the reference of this comparison is {results['baseline']}"
    size, full = design["cache_bytes_per_token"], reference["cache_bytes_per_token"]
    text = f"Loss: {loss}. That is {difference / mean:+.2%} of the loss, for {1 - size / full:.0%} less cache "
    text += f"({size:,} against {full:,} bytes a token)"
    gain = decode_gain(results, design, reference)
    return text + (f"; {gain}." if gain else f". Decoding speed: {results['speed_note'] or 'not measured'}.")


def claims(results: Results) -> list[Block]:
    """The claims that these designs can answer, each with what was measured."""
    blocks: list[Block] = []

    def answer(claim: str, items: list[tuple[str, str]]) -> None:
        if items:
            blocks.extend([("subheading", claim), ("items", items)])

    families = head_counts(results).items()
    shared = [(d, full_heads(results, d)) for d in trained(results) if d["n_kv_head"] < d["n_head"]]
    pairs = [(d, reference) for d, reference in shared if reference]
    answer(
        "Spreading attention over more heads costs about the same compute, however many there are.",
        [(label, same_compute(results, family)) for label, family in families],
    )
    answer(
        "One head has one pattern of attention at a position; several heads hold several relations at once.",
        [(label, several_heads(results, family)) for label, family in families],
    )
    answer(
        "With one K and V for all heads (multi-query attention) the cache shrinks by the number of heads.",
        [(d["name"], smaller_cache(results, d, reference)) for d, reference in pairs if d["n_kv_head"] == 1],
    )
    answer(
        "Sharing K and V among heads gives up little quality for a large gain in the cost of decoding.",
        [(d["name"], trade(results, d, reference)) for d, reference in pairs],
    )
    return [("heading", "Four claims about heads, and what was measured"), *blocks] if blocks else []


def growing(design: Design) -> str | None:
    """Whether the difference to the baseline grew or closed over the second half of training."""
    curve = (design["against_baseline"] or {"curve": []})["curve"]
    if len(curve) < 2:
        return None
    end = curve[-1]
    half = min(curve[:-1], key=lambda point: abs(point["tokens"] - end["tokens"] / 2))
    trend = "growing" if abs(end["mean"]) > abs(half["mean"]) else "closing"
    trend = "changed sign" if half["mean"] * end["mean"] < 0 else "unchanged" if half["mean"] == end["mean"] else trend
    text = f"{trend}: {half['mean']:+.4f} after {half['tokens']:,} tokens, {end['mean']:+.4f} after {end['tokens']:,}"
    if end["low"] is not None and end["low"] <= 0 <= end["high"]:
        text += "; the interval at the end holds 0, so that may be chance"
    return text


def full_table(results: Results) -> Block:
    """Every figure of every design."""
    largest = max((c["batch"] * c["context"], c["batch"], c["context"]) for s in speed_of(results).values()
                  for c in s["decode"]) if speed_of(results) else None  # fmt: skip
    rows = []
    for d in results["designs"]:
        pair = d["against_baseline"] or {}
        verdict = "reference" if d["name"] == results["baseline"] else pair.get("verdict", "-")
        row: dict[str, Cell] = {
            "design": d["name"], "heads": number(d["n_head"]), "K/V heads": number(d["n_kv_head"]),
            "head width": number(d["head_dim"]), "parameters": number(d["parameters"]),
            "without embeddings": number(d["parameters_without_embeddings"]),
            "training FLOPs/token": number(d["flops_per_token"]),
            "cache bytes/token": number(d["cache_bytes_per_token"]),
            "allocated": number(d["cache_bytes_allocated"], ",.0f"), "learning rate": number(d["learning_rate"], "g"),
            "seeds": number(d["loss"]["n"]), "loss +- sd": loss_text(d["loss"]),
            "bits/byte": number(d["bits_per_byte"], ".4f"), "difference": number(pair.get("mean"), "+.4f"),
            "95% interval": (span(pair.get("interval")), (pair.get("interval") or [None])[0]),
            "p (Holm)": number(pair.get("p_holm"), ".4f"),
            "smallest detectable": number(pair.get("smallest_detectable"), ".4f"), "verdict": verdict,
        }  # fmt: skip
        if largest:
            speed = speed_of(results).get(d["name"])
            cells = {(c["batch"], c["context"]): c for c in speed["decode"]} if speed else {}
            at = cells.get(largest[1:])
            row["training tokens/s"] = number(speed["training"]["tokens_per_s"]["median"] if speed else None, ",.0f")
            name = f"decoded tokens/s at {largest[1]} x {largest[2]:,}"
            row[name] = number(at["tokens_per_s"]["median"] if at else None, ",.0f")
            row["peak MB training"] = number(speed["peak_memory_mb"]["training"] if speed else None, ",.0f")
        rows.append(row)
    return "table", list(rows[0]), [list(row.values()) for row in rows]


def speed_blocks(results: Results) -> list[Block]:
    """Speed of decoding, reading a prompt and training, with the shares of what the machine can do."""
    speed = results["speed"]
    if not speed:
        return [("heading", "Speed"), ("text", f"There are no speeds: {results['speed_note'] or 'not measured'}.")]
    limits, rows, extra = speed["limits"], [], []
    shared: dict[tuple[str, int, int], list[Cell]] = {}
    for name, s in speed["designs"].items():
        for kind in ("decode", "prefill"):
            for c in s[kind]:
                rate = c["tokens_per_s"]
                mark = " *" if not c.get("gain_expected", True) else ""
                text = f"{rate['median']:,.0f} ({rate['low']:,.0f} to {rate['high']:,.0f}){mark}"
                shared.setdefault((kind, c["batch"], c["context"]), []).append((text, rate["median"]))
        t, memory = s["training"], s["peak_memory_mb"]
        last = max(s["decode"], key=lambda c: c["batch"] * c["context"])
        rows.append([name, number(t["tokens_per_s"]["median"], ",.0f"), number(t["gflops"], ".1f"),
                     number(t["share_of_matmul"], ".0%"), number(last["cache_mb"], ",.1f"), number(last["gb_per_s"], ".1f"),
                     number(last["share_of_read"], ".0%"), *(number(memory[k], ",.0f") for k in memory)])  # fmt: skip
        extra += [[name, number(a["batch"]), number(a["context"]), number(a["ms"]["median"], ".3f"),
                   number(a["gb_per_s"], ".1f"), number(a["share_of_ideal"], ".0%"), number(a["sdpa_ms"]["median"], ".3f")]
                  for a in s["decode_attention"]]  # fmt: skip
    names = list(speed["designs"])
    grid = [[kind, number(batch), number(context), *cells] for (kind, batch, context), cells in sorted(shared.items())]
    told = f"Measured after training on {speed['threads']} threads, designs in turn, {speed['rounds']} rounds: medians, and "
    told += "the slowest and fastest round. Decoding is one token at a time for every sequence of the batch; prefill reads "
    told += "a prompt. This machine's limits: "
    told += f"{limits['matmul_gflops']:,.0f} GFLOP/s ({limits['matmul']}), {limits['read_gb_per_s']:.1f} GB/s ({limits['read']})."
    memory_heads = [f"peak MB, {key}" for key in next(iter(speed["designs"].values()))["peak_memory_mb"]]
    blocks: list[Block] = [
        ("heading", "Speed"), ("text", told), ("picture", "decode"),
        ("text", f"* {speed['decode_gain']}"), ("table", ["tokens/s of", "batch", "context", *names], grid),
        ("picture", "training"),
        ("table", ["design", "training tokens/s", "GFLOP/s", "of the limit", "largest cache, MB", "decoding GB/s",
                   "of reading", *memory_heads], rows),
    ]  # fmt: skip
    if extra:
        head = ["design", "batch", "context", "ms", "GB/s", "of the ideal", "PyTorch's kernel, ms"]
        blocks += [("text", "One decode step of attention alone, over separate caches:"), ("table", head, extra)]
    return blocks


def rate_blocks(results: Results) -> list[Block]:
    """Each design's learning rate, where it was chosen, and whether a common one orders them otherwise."""
    rates = results["rates"]
    if not rates:
        return []
    rows = [[name, *(number(losses.get(f"{rate:g}", losses.get(str(rate))), ".4f") for rate in rates["tried"]),
             number(rates["best"].get(name), "g")] for name, losses in rates["losses"].items()]  # fmt: skip
    told = f"Every design trained at its own best of {len(rates['tried'])} rates, chosen on seed {rates['seed']}, which is "
    told += "not among the seeds reported: "
    told += join(f"{name} at {rate:g}" for name, rate in rates["best"].items()) + "."
    at = f"At the common rate {rates['common']:g} the order from the lowest mean loss is "
    at += f"different: {join(rates['order_at_common'])} instead of {join(rates['order'])}." if rates["differs"] else (
        f"the same: {join(rates['order'])}.")  # fmt: skip
    common = [[c["name"], loss_text(c), number(c["difference"], "+.4f"), (span(c["interval"]), (c["interval"] or [None])[0]),
               number(c["p_holm"], ".4f"), c["verdict"] or "reference"] for c in rates["at_common"]]  # fmt: skip
    head = ["design", "loss +- sd", "difference", "95% interval", "p (Holm)", "verdict"]
    tried = ["design", *(f"loss at {rate:g}" for rate in rates["tried"]), "chosen"]
    return [("heading", "Learning rates"), ("text", told), ("table", tried, rows), ("text", at), ("table", head, common)]


def document(results: Results) -> list[Block]:
    """All that the report says."""
    r, base = results, results["baseline"]
    designs, names = r["designs"], [d["name"] for d in r["designs"]]
    rivals = [d for d in trained(r) if not d["name"] == results["baseline"]]
    blocks: list[Block] = []
    if r["first_look"]:
        blocks.append(("warning", "This is a first look: trained too briefly to rely on. Run it again without --quick."))
    blocks += [
        ("text", f"What do {join(names)} lose or gain in validation loss against {base}, what do they cost in memory and "
         "time, and is the difference real?"),
        ("items", [(f"{d['name']}: {(d['against_baseline'] or {}).get('verdict', 'no verdict')}", finding(d, base))
                   for d in rivals]),
    ]  # fmt: skip
    if r["failures"]:
        blocks.append(("warning", f"{len(r['failures'])} of the runs failed and are left out; they are listed below."))
    seeds = f"{len(r['seeds'])} seed" + "s" * (len(r["seeds"]) != 1)
    told = f"Each design was trained with {seeds} ({join(r['seeds'])}) on {r['dataset']['name']} (tokens: "
    told += f"{r['dataset']['tokenizer']}) for {r['max_steps']:,} steps, {r['tokens_seen']:,} tokens, which is "
    told += f"{r['share_of_pass']:.1%} of one pass over the text, at context {r['block_size']}. Losses are of the last step, "
    told += f"over all {r['dataset']['val_tokens']:,} tokens of the validation split, in nats a token: lower is better."
    judged = "Intervals are over seeds: they tell how much the luck of initial values and of data order may have moved a "
    judged += "mean, for this text and this training length, and nothing about another text or longer training. They are "
    judged += "95% t-intervals, unadjusted for the number of designs; the verdict comes from the Holm-adjusted p at 5% over "
    judged += f"all {len(rivals)} comparisons with {base}, so that an interval beside 0 can stand with no difference detected."
    if len(r["seeds"]) < 3:
        judged = f"With {seeds} there is no interval, no p and no verdict: 3 are the fewest. " + judged
    blocks += [("text", told), ("text", judged), *claims(r)]

    blocks += [("heading", "Loss"), ("picture", "loss"), ("picture", "difference"), ("picture", "difference-curve"),
               ("items", [(d["name"], text) for d in rivals if (text := growing(d))])]  # fmt: skip
    blocks += [("heading", "Loss against cache"), ("picture", "pareto")]
    of = {d["name"]: d for d in trained(r)}
    for group in r["equal_cache"]:
        if group := [of[name] for name in group if name in of]:
            rows = [[d["name"], number(d["n_head"]), number(d["n_kv_head"]), number(d["parameters"]), loss_text(d["loss"]),
                     number((d["against_baseline"] or {}).get("mean"), "+.4f"),
                     (d["against_baseline"] or {}).get("verdict", "reference" if d["name"] == results["baseline"] else "-")]
                    for d in group]  # fmt: skip
            head = ["design", "heads", "K/V heads", "parameters", "loss +- sd", "difference", "verdict"]
            text = f"Side by side, with equal cache of {group[0]['cache_bytes_per_token']:,} bytes a token:"
            blocks += [("text", text), ("table", head, rows)]
    if head_counts(r):
        blocks += [("heading", "Number of heads"), ("picture", "heads")]
    blocks += [*speed_blocks(r), ("heading", "All figures"), full_table(r)]
    if pooled := r["pooled"]:
        rows = [[d["name"], number(d["against_baseline"]["mean"], "+.4f"), span(p["interval"]), number(p["p_holm"], ".4f"),
                 number(pooled["design_sd"].get(d["name"]), ".4f")]
                for d in rivals if (p := (d["against_baseline"] or {}).get("pooled"))]  # fmt: skip
        text = f"One analysis of all designs together (seed and design, {pooled['df']} residual degrees of freedom, residual "
        text += f"standard deviation {pooled['residual_sd']:.4f}), as a second opinion; the verdicts do not come from it."
        head = ["design", "difference", "95% interval", "p (Holm)", "residual deviation"]
        blocks += [("heading", "Pooled"), ("text", text), *([("text", pooled["note"])] if pooled["note"] else []),
                   ("table", head, rows)]  # fmt: skip
    blocks += rate_blocks(r)
    kept = "nothing but what a design is" if r["match"] == "width" else "d_ff was adjusted to equal total parameters"
    blocks += [("heading", "What was held equal, and what was adjusted"),
               ("items", [("held equal", s) for s in r["held_equal"]] + [("adjusted", s) for s in r["adjusted"]]
                + [("matched by", f"{r['match']} ({kept})")] + [("note", s) for s in r["notes"]])]  # fmt: skip
    if r["failures"]:
        blocks += [("heading", "Failures"), ("items", [(f"{f['design']}, seed {f['seed']}", f["error"]) for f in r["failures"]])]
    blocks.append(("heading", "A sample of text from each design"))
    blocks += [("sample", d["name"], d["sample"]) for d in designs if d["sample"]]
    keys = dict.fromkeys(key for d in designs for key in d["settings"])
    values = {key: [str(d["settings"].get(key, "-")) for d in designs] for key in keys}
    differing = sorted(keys, key=lambda key: len(set(values[key])) == 1)
    where = [("command", r["command"]), ("made", r["created"]), ("commit", r["git_commit"] or "-"), ("jobs", r["jobs"]),
             ("threads", r["threads"]), *r["machine"].items(), *r["versions"].items()]  # fmt: skip
    blocks += [
        ("heading", "Settings and machine"),
        ("fold", "Machine and versions", ["what", "value"], [[str(k), str(v)] for k, v in where]),
        ("fold", "Every setting, those that differ first", ["setting", *names], [[k, *values[k]] for k in differing]),
    ]
    return blocks


def to_html(results: Results, panels: dict[str, charts.Panels]) -> str:
    """The page: one file that fetches nothing."""
    e, body, specs = html.escape, [], {}

    def cell(c: Cell) -> str:
        if isinstance(c, str):
            return f"<td>{e(c)}</td>"
        return f'<td class="n" data-value="{"" if c[1] is None else repr(c[1])}">{e(c[0])}</td>'

    def table(head: list[str], rows: list[list[Cell]]) -> str:
        top = "".join(f'<th scope="col"><button type="button">{e(h)}</button></th>' for h in head)
        lines = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
        return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'

    for kind, *parts in document(results):
        match kind:
            case "heading":
                body.append(f"<h2>{e(parts[0])}</h2>")
            case "subheading":
                body.append(f"<h3>{e(parts[0])}</h3>")
            case "text" | "warning":
                body.append(f'<p class="{kind}">{e(parts[0])}</p>')
            case "items":
                lines = "".join(f"<li>{f'<b>{e(term)}</b> ' if term else ''}{e(text)}</li>" for term, text in parts[0])
                body.append(f"<ul>{lines}</ul>")
            case "table":
                body.append(table(*parts))
            case "fold":
                body.append(f"<details><summary>{e(parts[0])}</summary>{table(*parts[1:])}</details>")
            case "sample":
                body.append(f"<h3>{e(parts[0])}</h3><pre>{e(parts[1])}</pre>")
            case "picture" if parts[0] in panels:
                ids = [f"{parts[0]}-{i}" for i in range(len(panels[parts[0]]))]
                specs |= {i: panel.to_dict() for i, panel in zip(ids, panels[parts[0]], strict=True)}
                boxes = "".join(f'<div class="chart" id="{i}"></div>' for i in ids)
                body.append(f'<figure><div class="panels">{boxes}</div><figcaption>{e(CAPTIONS[parts[0]])}</figcaption></figure>')
    themes = {"light": charts.theme("#333333", "#E6E6E6"), "dark": charts.theme("#CCCCCC", "#3A3D44")}
    data = json.dumps({"specs": specs, "themes": themes}).replace("<", "\\u003c")  # no text may end the script
    pieces = {"TITLE": e(" / ".join(d["name"] for d in results["designs"])), "BODY": "\n".join(body), "DATA": data,
              "LIBRARY": vl_convert.javascript_bundle()}  # fmt: skip
    return re.sub("@@([A-Z]+)@@", lambda found: pieces[found[1]], PAGE)


def to_markdown(results: Results, panels: dict[str, charts.Panels]) -> str:
    """The same in Markdown, with links to the pictures' files."""

    def e(text: str) -> str:
        return re.sub(r"([\\`*_{}\[\]|#~])", r"\\\1", text).replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")

    def table(head: list[str], rows: list[list[Cell]]) -> str:
        lines = [head, ["---"] * len(head), *([c if isinstance(c, str) else c[0] for c in row] for row in rows)]
        return "\n".join("| " + " | ".join(c if c == "---" else e(c) for c in line) + " |" for line in lines)

    out = [f"# {e(' / '.join(d['name'] for d in results['designs']))}"]
    for kind, *parts in document(results):
        match kind:
            case "heading":
                out.append(f"## {e(parts[0])}")
            case "subheading":
                out.append(f"### {e(parts[0])}")
            case "text":
                out.append(e(parts[0]))
            case "warning":
                out.append(f"**{e(parts[0])}**")
            case "items":
                out.append("\n".join(f"- {f'**{e(term)}** ' if term else ''}{e(text)}" for term, text in parts[0]))
            case "table":
                out.append(table(*parts))
            case "fold":
                out += [f"### {e(parts[0])}", table(*parts[1:])]
            case "sample":
                out += [f"### {e(parts[0])}", "\n".join("    " + line for line in parts[1].splitlines())]
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
    for name in CAPTIONS.keys() - panels.keys():
        (folder / f"{name}.svg").unlink(missing_ok=True)
    for name, content in files.items():
        _write(folder / name, content.encode("utf-8", "replace"))
    return [folder / name for name in files]


def _write(path: Path, content: bytes) -> None:
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def show(results: Results, console: Console) -> None:
    """Print what the designs cost and how they compare, as two tables that fit 100 columns."""

    def table(title: str, head: list[str], rows: list[list[str]]) -> None:
        drawn = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
        for i, name in enumerate(head):
            words = i in (0, len(head) - 1) and name in ("design", "verdict")
            drawn.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
        for row in rows:  # a terminal may know ASCII only, and a name may hold markup
            plain = [c.encode(console.encoding, "backslashreplace").decode(console.encoding) for c in row]
            drawn.add_row(*map(Text, plain))
        console.print(drawn)

    costs, verdicts = [], []
    for d in results["designs"]:
        speed = speed_of(results).get(d["name"])
        rate = speed["training"]["tokens_per_s"]["median"] if speed else None
        cells = [number(d["parameters"]), number(d["cache_bytes_per_token"]), loss_text(d["loss"]),
                 number(d["bits_per_byte"], ".4f"), *([number(rate, ",.0f")] if results["speed"] else [])]  # fmt: skip
        costs.append([d["name"], *(text for text, _ in cells)])
        if pair := d["against_baseline"]:
            figures = number(pair["p_holm"], ".4f"), number(pair["smallest_detectable"], ".4f")
            row = [f"{pair['mean']:+.4f}", span(pair["interval"]), *(text for text, _ in figures), pair["verdict"]]
            verdicts.append([d["name"], *row])
    head = ["design", "parameters", "cache B/token", "loss +- sd", "bits/byte"]
    table("", head + ["train tokens/s"] * bool(results["speed"]), costs)
    if verdicts:
        title = f"Against {results['baseline']}, nats a token (95% intervals over seeds, unadjusted)"
        table(title, ["design", "difference", "interval", "p (Holm)", "detectable", "verdict"], verdicts)
