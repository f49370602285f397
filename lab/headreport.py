"""From the study of heads to what people read: the page's content, heads.json, and a table on the terminal."""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data.tokenizer import Tokenizer
from lab.answers import plural
from lab.charts import to_svg
from lab.headstudy import DEFINITIONS, UNNAMED
from lab.taps import Seen, shares
from model import GPT
from runtime.settings import as_dict

W_O_FLOATS = 125_000  # of all runs: about two thirds of a megabyte in the page


class Part(NamedTuple):
    """One run: the opened model, what it did on the text that is drawn, and the study of its heads."""

    name: str
    model: GPT
    tokenizer: Tokenizer
    meta: dict[str, Any]
    ids: torch.Tensor
    told: str  # what text it was measured on
    seen: Seen
    study: dict[str, Any]

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        config = self.model.config
        return config.n_head // (config.n_kv_head or config.n_head)

    @property
    def loss(self) -> str:
        """The loss, of answers the share that is right, and what these are over."""
        loss, right, tokens = (self.study[name] for name in ("loss", "right", "tokens"))
        if right is None:
            return f"loss {loss:.4f} nats a token ({plural(tokens, 'token')} in {self.told})"
        return f"loss {loss:.4f} nats an answer, {right:.1%} right ({plural(tokens, 'answer')} in {self.told})"


def saved(parts: Sequence[Part]) -> dict[str, Any]:
    """heads.json's content; what is nan has no value there."""
    runs = [
        {"run": p.name, "step": p.meta["step"], "dataset": p.meta["dataset"]["name"],
         "settings": as_dict(p.model.config), "measured": p.told, **p.study}
        for p in parts
    ]  # fmt: skip
    text = json.dumps({"format": 1, "definitions": DEFINITIONS, "runs": runs})
    return json.loads(text, parse_constant=lambda name: None)


def page_content(parts: Sequence[Part]) -> dict[str, Any]:
    """What lab.headpage.write_page shows."""
    one = len(parts) == 1
    title = f"The heads of {parts[0].name}" if one else "Heads compared: " + ", ".join(p.name for p in parts)
    return {
        "title": title,
        "lead": lead(parts),
        "runs": [run_content(p, W_O_FLOATS // len(parts)) for p in parts],
        "matrices": [matrix(p) for p in parts if p.model.config.n_head > 1],
        "pictures": pictures(parts),
        "tables": [comparison(parts)] * (not one) + [table for p in parts for table in tables(p, one)],
        "definitions": list(DEFINITIONS.items()),
    }


def lead(parts: Sequence[Part]) -> list[str]:
    """What a reader should know first, in sentences."""
    said = []
    for p in parts:
        heads, random = p.study["heads"], p.study["random"]
        most = max(heads, key=lambda h: h["zeroed"]["mean"])
        told = f"{p.name}: {p.loss}. {'' if p.study['right'] is None else likeliest(p)}"
        told += f"Zeroing head {most['head']} of layer {most['layer']} costs most, {spread(most['zeroed'])[0]} nats."
        told += f" Heads with a name: {sum(h['label'] != UNNAMED for h in heads)} of {len(heads)}."
        if random["foretold"]:
            told += f" On random tokens written again and again the loss is {random['first']:.2f} the first time and "
            told += f"{random['repeats']:.2f} on the repeats."
        said.append(told)
    return said


@torch.no_grad()
def likeliest(part: Part) -> str:
    """What the model says after the text that is drawn, as a sentence."""
    logits = part.model(part.ids[None].to(part.model.head.weight.device))[0, -1, : part.tokenizer.vocab_size]
    chance, best = logits.float().softmax(dim=-1).max(dim=-1)
    asked, said = (part.tokenizer.decode(ids).strip() for ids in (part.ids.tolist(), [int(best)]))
    return f'Asked "{asked}", it answers "{said}" with a probability of {chance:.3f}. '


def run_content(part: Part, floats: int) -> dict[str, Any]:
    """A run's maps and its W_O steps; as many of the last tokens for these as `floats` numbers allow, at least one."""
    config, heads = part.model.config, part.study["heads"]
    n_layer, n_head, T, width = part.seen.outputs.shape
    count = min(T, max(1, floats // (n_layer * n_head * (width + config.n_embd))))
    places = list(range(T - count, T))
    kv = f"{plural(config.n_kv_head or n_head, 'K/V head')}, " if part.group > 1 else ""
    return {
        "name": part.name,
        "facts": f"{plural(n_layer, 'layer')}, {plural(n_head, 'head')} of width {width}, {kv}model width "
        f"{config.n_embd}, step {part.meta['step']:,}, {part.meta['dataset']['name']}",
        "tokens": [part.tokenizer.decode([i]) for i in part.ids.tolist()],
        "weights": part.seen.weights.float().numpy(),
        "kv_head_of": [head // part.group for head in range(n_head)],
        "labels": [[heads[layer * n_head + head]["label"] for head in range(n_head)] for layer in range(n_layer)],
        "w_o": None if not config.w_o else {
            "bias": config.bias, "tokens": places,
            "heads": np.stack([part.seen.outputs[:, :, place].numpy() for place in places]),
            "shares": np.stack([shares(part.model, part.seen.outputs, place).numpy() for place in places]),
        },
    }


def cell(value: float | None, form: str) -> tuple[str, float | None]:
    """A cell that sorts as a number; a dash for what has no value."""
    known = value is not None and math.isfinite(value)
    return (format(value, form), value) if known else ("-", None)


def spread(ablation: dict[str, Any]) -> tuple[str, float | None]:
    """A change of the loss with its interval."""
    text, value = cell(ablation["mean"], "+.4f")
    low, high = ablation["interval"] or (None, None)
    return (text if low is None else f"{text} ({low:+.4f} to {high:+.4f})"), value


def matrix(part: Part) -> dict[str, Any]:
    names = [f"{h['layer']}.{h['head']}" for h in part.study["heads"]]
    return {
        "title": f"How different the heads are: {part.name}",
        "text": "Jensen-Shannon divergence between the weights of two heads, in nats: 0 is the same, 0.69 nothing in "
        "common. Heads are layer.head.",
        "names": names, "values": part.study["divergence"], "max": math.log(2),
    }  # fmt: skip


def tables(part: Part, alone: bool) -> list[dict[str, Any]]:
    """All scores of all heads, each beside its chance level; K/V heads; arcs."""
    of = "" if alone else f": {part.name}"
    heads, foretold = part.study["heads"], part.study["random"]["foretold"]
    rows, arc_rows = [], []
    for h in heads:
        place = {"head": f"{h['layer']}.{h['head']}"}
        row: dict[str, Any] = place | {"zeroed": spread(h["zeroed"]), "mean": spread(h["mean"])}
        row |= ({"repeats": spread(h["repeats"])} if foretold else {}) | {"name": h["label"]}
        for name, score in h["scores"].items():
            row[f"{name} (chance {cell(score['chance'], '.2f')[0]})"] = cell(score["value"], ".2f")
        rows.append(row)
        for kind, arc in h["arcs"].items():
            best = part.study["arcs"][kind]
            arc_rows.append(place | {
                "arc": kind, "met": cell(arc["met"], ".2f"),
                "best fixed distance": (f"{best['best_distance']} back: {best['best_distance_met']:.2f}",
                                        best["best_distance_met"]),
                "best fixed word": (f"{best['best_word']}: {best['best_word_met']:.2f}", best["best_word_met"]),
                "weight": cell(arc["weight"], ".2f"),
                "chance": cell(best["chance"], ".2f"),
            })  # fmt: skip
    found = [{"title": f"Every head{of}", "text": "Heads are layer.head. Scores are defined below.", "rows": rows}]
    if part.study["types"]:
        text = "Heads of one type may stand in for each other, so that none is missed alone: all of them zeroed."
        type_rows = [
            {"type": t["type"], "heads": ", ".join(f"{layer}.{head}" for layer, head in t["heads"]),
             "zeroed": spread(t["zeroed"])} | ({"repeats": spread(t["repeats"])} if foretold else {})
            for t in part.study["types"]
        ]  # fmt: skip
        found.append({"title": f"Every type{of}", "text": text, "rows": type_rows})
    if part.study["kv_heads"]:
        text = "What a K/V head is worth with all the query heads that read it: they can only go together."
        kv_rows = [
            {"K/V head": f"{k['layer']}.{k['kv_head']}", "query heads": ", ".join(map(str, k["query_heads"])),
             "zeroed": spread(k["zeroed"]), "mean": spread(k["mean"])}
            for k in part.study["kv_heads"]
        ]  # fmt: skip
        found.append({"title": f"Every K/V head{of}", "text": text, "rows": kv_rows})
    if arc_rows:
        text = DEFINITIONS["arcs"] + " A causal head can only look back, so weights are read at the later word."
        found.append({"title": f"Arcs of sentences{of}", "text": text, "rows": arc_rows})
    return found


def comparison(parts: Sequence[Part]) -> dict[str, Any]:
    rows = []
    for p in parts:
        s, apart = p.study, p.study["apart"]
        rows.append({
            "run": p.name, "loss": cell(s["loss"], ".4f"), "right": cell(s["right"], ".1%"),
            "heads": cell(len(s["heads"]), ""), "apart": cell(apart["all"], ".3f"),
            "apart, same K/V head": cell(apart["same_kv"], ".3f"),
            "apart, other K/V head": cell(apart["other_kv"] if p.group > 1 else None, ".3f"),
        })  # fmt: skip
    filled = [name for name in rows[0] if any(row[name] != ("-", None) for row in rows)]
    text = "Loss in nats. Apart is the divergence between two heads of one layer, in nats, mean over pairs."
    return {"title": "Side by side", "text": text, "rows": [{name: row[name] for name in filled} for row in rows]}


def pictures(parts: Sequence[Part]) -> list[dict[str, str]]:
    """What each head is worth, and the loss as heads go."""
    rows, curve = [], []
    for p in parts:
        for h in p.study["heads"]:
            for how in ("zeroed", "mean"):
                low, high = h[how]["interval"] or (h[how]["mean"], h[how]["mean"])
                rows.append({"run": p.name, "head": f"{h['layer']}.{h['head']}", "how": how, "change": h[how]["mean"],
                             "low": low, "high": high})  # fmt: skip
        curve += [{"run": p.name, "share": point["share"], "loss": point["loss"]} for point in p.study["pruning"]]
    panels = []
    for p in parts:
        base = alt.Chart(alt.Data(values=[row for row in rows if row["run"] == p.name])).encode(
            x=alt.X("head:N", sort=None, title="head (layer.head)"), xOffset="how:N"
        )
        bars = base.mark_bar().encode(
            y=alt.Y("change:Q", title="change of loss, nats"), color=alt.Color("how:N", title=None)
        )
        lines = base.mark_rule(color="#444444").encode(y="low:Q", y2="high:Q")
        panels.append((bars + lines).properties(title=p.name, height=220))
    line = alt.Chart(alt.Data(values=curve)).mark_line(point=True).encode(
        x=alt.X("share:Q", title="share of heads zeroed, least important first", axis=alt.Axis(format=".0%")),
        y=alt.Y("loss:Q", title="loss, nats", scale=alt.Scale(zero=False)),
        color=alt.Color("run:N", title=None),
    )  # fmt: skip
    return [
        {"title": "What each head is worth", "svg": to_svg(panels),
         "caption": "Change of the loss, a head zeroed or replaced by its mean; rules are 95% intervals over windows."},
        {"title": "How many heads are needed", "svg": to_svg([line.properties(height=220)]),
         "caption": "Heads are removed in the order of what each is worth by itself, measured once: what two heads do "
         "for each other is not seen by it."},
    ]  # fmt: skip


def show(parts: Sequence[Part], console: Console) -> None:
    """The table on the terminal: names, the scores most asked for, and what each head is worth."""
    for p in parts:
        console.print(Text(f"{p.name}: {p.loss}"), soft_wrap=True)  # as it is: a name may hold brackets
        table = Table(box=None)
        columns = ("previous token", "duplicate token", "induction", "first token", "entropy")
        for name in ("head", *columns, "zeroed", "name"):
            table.add_column(name, justify="left" if name in ("head", "name") else "right", overflow="fold")
        for h in p.study["heads"]:
            values = [cell(h["scores"].get(name, {}).get("value"), ".2f")[0] for name in columns]
            table.add_row(f"{h['layer']}.{h['head']}", *values, cell(h["zeroed"]["mean"], "+.4f")[0], h["label"])
        chance = [cell(p.study["heads"][0]["scores"].get(name, {}).get("chance"), ".2f")[0] for name in columns]
        table.add_row("chance", *chance, "", "", style="dim")
        console.print(table)
