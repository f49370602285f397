"""What the figures of a comparison say, in sentences that are chosen by the figures."""

from collections.abc import Iterable
from typing import Any

from lab.charts import Design, Results, head_counts, others, speed_of, trained

SAME = 1.1  # speeds within this ratio are called about the same
UNEVEN = 2.0  # rounds of one design that differ by more tell what else the machine did


def p_text(p: float) -> str:
    return "<0.0001" if p < 0.0001 else f"{p:.4f}"


def span(interval: list[float]) -> str:
    return f"{interval[0]:+.4f} to {interval[1]:+.4f}"


def join(parts: Iterable[Any]) -> str:
    """a, b and c."""
    *first, last = map(str, parts)
    return f"{', '.join(first)} and {last}" if first else last


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}" + "s" * (count != 1)


def verdict(design: Design, baseline: str) -> str:
    """The verdict against the baseline, or why there is none."""
    if design["name"] == baseline:
        return "reference"
    if pair := design["against_baseline"]:
        return pair["verdict"]
    return "no seed in common with the reference" if design["runs"] else "no finished run"


def finding(design: Design) -> str:
    """The difference to the baseline and all that is needed to judge it."""
    pair = design["against_baseline"]
    if pair is None:
        return "nothing to compare"
    n = plural(len(pair["seeds"]), "seed")
    text = f"{pair['mean']:+.4f} nats a token"
    if pair["interval"]:
        text += f", 95% interval {span(pair['interval'])} over {n}, adjusted p {p_text(pair['p_holm'])}; {n} find a "
        text += f"true difference of {pair['smallest_detectable']:.4f} eight times in ten at this level of 5%"
    else:
        text += f" over {n}; fewer than 3 give no interval"
    if pair["not_settled"] and pair["detected"]:
        found = "the p by itself finds no difference, and so small a one may change its sign by chance"
        if pair["detected"] != "no difference detected":
            found = f"the p by itself says {pair['detected']}"
        text += f". More training could change this, by the evaluations on the way: {pair['not_settled']} ({found})"
    return text + "."


def growing(design: Design) -> str | None:
    """Whether the difference to the baseline grew or closed over the second half; None for too few seeds to say."""
    curve = (design["against_baseline"] or {"curve": []})["curve"]
    if len(curve) < 2 or curve[-1]["low"] is None:
        return None
    end = curve[-1]
    half = min(curve[:-1], key=lambda point: abs(point["tokens"] - end["tokens"] / 2))
    before, after = half["mean"], end["mean"]
    trend = "growing" if abs(after) > abs(before) else "closing"
    trend = "changed sign" if before * after < 0 else "unchanged" if before == after else trend
    text = f"{trend}, {before:+.4f} after {half['tokens']:,} tokens and {after:+.4f} after {end['tokens']:,}"
    within = end["low"] <= 0 <= end["high"]
    return text + ("; at the end the band holds 0, so this may be chance." if within else ".")


def uneven(results: Results) -> str | None:
    """Why speeds cannot be compared, if the rounds of a design differ too much for that."""
    designs = speed_of(results).values()
    rates = [d["training"]["tokens_per_s"] for d in designs]
    rates += [max(d["decode"], key=lambda c: c["batch"] * c["context"])["tokens_per_s"] for d in designs if d["decode"]]
    most = max((rate["high"] / rate["low"] for rate in rates), default=1.0)
    return f"rounds of one design differ by up to {most:.1f} times: something else ran" if most > UNEVEN else None


def decode_gain(results: Results, design: Design, reference: Design) -> tuple[float | None, str]:
    """How many times as fast the design decodes as the reference at the largest size measured, and this in words."""
    cells, full = ({(c["batch"], c["context"]): c for c in speed_of(results).get(d["name"], {"decode": []})["decode"]}
                   for d in (design, reference))  # fmt: skip
    ratios = {k: cells[k]["tokens_per_s"]["median"] / full[k]["tokens_per_s"]["median"] for k in cells if k in full}
    if not ratios:
        return None, "decoding speed was not measured"
    if busy := uneven(results):
        return None, f"decoding speed cannot be told ({busy})"
    batch, context = largest = max(ratios, key=lambda k: (k[0] * k[1], k))
    rate, other = (f"{c[largest]['tokens_per_s']['median']:,.0f}" for c in (cells, full))
    text = f"at batch {batch} and context {context:,} it decodes {ratios[largest]:.2f} times as fast as "
    text += f"{reference['name']} ({rate} against {other} tokens/s)"
    if len(ratios) > 1:
        low, high = min(ratios.values()), max(ratios.values())
        text += f", and {low:.2f} to {high:.2f} times over the {len(ratios)} sizes measured"
    below = sum(not cells[k]["gain_expected"] for k in ratios)
    small = f", {below} of them so small" if len(ratios) > 1 else ", a size so small"
    return ratios[largest], text + (f"{small} that no gain is to be expected" if below else "")


def same_compute(results: Results, family: list[Design]) -> str:
    """Head count against FLOPs by count and against measured training time."""
    counts, flops = join(sorted({d["n_head"] for d in family})), sorted({d["flops_per_token"] for d in family})
    if len(flops) == 1:
        text = f"By count it holds: with {counts} heads alike, training takes {flops[0]:,} FLOPs a token. "
    else:
        text = f"By count it does not hold: with {counts} heads, from {flops[0]:,} to {flops[-1]:,} FLOPs a token. "
    speeds = {d["name"]: speed_of(results)[d["name"]]["training"]["tokens_per_s"]["median"]
              for d in family if d["name"] in speed_of(results)}  # fmt: skip
    if len(speeds) < 2:
        return text + "The time was not measured."
    if busy := uneven(results):
        return f"{text}In time it cannot be told: {busy}."
    fast, slow = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    ratio = speeds[fast] / speeds[slow]
    text += "In time it holds as well: " if ratio < SAME else "In time it does not hold: "
    text += f"{fast} trains on {speeds[fast]:,.0f} tokens/s and {slow} on {speeds[slow]:,.0f}, so that a token takes "
    return text + f"{ratio:.2f} times as long."


def several_heads(results: Results, family: list[Design]) -> str:
    """Head count against loss: does one head do worse than several?"""
    base, best, most = results["baseline"], min(family, key=lambda d: d["loss"]["mean"]), family[-1]
    losses = [f"{d['loss']['mean']:.4f} with {plural(d['n_head'], 'head')} ({d['name']})" for d in family]
    more = ""
    if best["n_head"] != most["n_head"] and best["loss"]["sd"] is not None:  # one seed says nothing of this
        gap = most["loss"]["mean"] - best["loss"]["mean"]
        more = f" More heads are not always better: {most['name']} ends {gap:.4f} above {best['name']}"
        known = verdict(most, base) if best["name"] == base else ""
        more += f" ({known})." if known else "."
    text = f"Mean losses: {join(losses)}. "
    one, several = family[0], [d for d in family if d["n_head"] > 1]
    if one["n_head"] != 1:
        return text + "No design among them has a single head, so that one head against several is not answered." + more
    rival = min(several, key=lambda d: (d["name"] != base, d["loss"]["mean"]))
    if base not in (one["name"], rival["name"]):
        gap = one["loss"]["mean"] - rival["loss"]["mean"]
        return f"{text}One head ends {gap:+.4f} from {rival['name']}, with no interval: neither is the reference.{more}"
    asked = rival if one["name"] == base else one
    judged = {
        "better" if one["name"] == base else "worse": "It shows here: several heads have the lower loss",
        "no difference detected": "No difference between one head and several is detected here",
        "not settled at this length": "This length of training does not settle it",
        "too few seeds for a verdict": "There are too few seeds to tell",
        "no seed in common with the reference": "It cannot be told",
    }.get(verdict(asked, base), "It does not show here: one head has the lower loss")
    return f"{text}{judged}. {asked['name']} against {base}: {finding(asked)}{more}"


def smaller_cache(results: Results, design: Design, reference: Design) -> str:
    """Cache bytes by formula and as allocated, and decoding speed, of one K and V for all heads."""
    size, full, heads = design["cache_bytes_per_token"], reference["cache_bytes_per_token"], design["n_head"]
    allocated = design["cache_bytes_allocated"]
    text = "It holds: " if full == size * heads else "It does not hold: "
    text += f"{design['name']} keeps {size:,} bytes a token and {reference['name']}, with a K and V for each of the "
    text += f"{heads} heads, {full:,}, {full / size:g} times as much. "
    takes = "just that" if allocated == size else f"{allocated:,.0f} instead"
    return f"{text}A cache allocates {takes}. As to speed, {decode_gain(results, design, reference)[1]}."


def trade(results: Results, design: Design, reference: Design) -> str:
    """What sharing K and V costs in loss and brings in memory and speed."""
    base, pair = results["baseline"], design["against_baseline"]
    if pair and reference["name"] == base:
        change, interval = pair["mean"], f"95% interval {span(pair['interval'])}" if pair["interval"] else "no interval"
        settled = {
            "worse": "So the loss is real",
            "better": "So nothing is lost",
            "no difference detected": "So no loss was found, though a small one can be missed",
            "not settled at this length": "So the loss is not settled at this length of training",
        }.get(pair["verdict"], "So whether anything is lost is open, for want of seeds")
    else:
        change = design["loss"]["mean"] - reference["loss"]["mean"]
        interval = f"no interval, because the reference is {base}"
        settled = "So whether anything is lost is open"
    size, full = design["cache_bytes_per_token"], reference["cache_bytes_per_token"]
    ratio, gain = decode_gain(results, design, reference)
    brings = "decoding gets no faster at the largest size measured" if ratio else "what speed it brings is not known"
    brings = "decoding does get faster at the largest size measured" if ratio and ratio >= SAME else brings
    text = f"Loss against {reference['name']} {change:+.4f} nats a token ({interval}), or "
    text += f"{change / reference['loss']['mean']:+.2%}; cache {full / size:g} times smaller ({size:,} against "
    return text + f"{full:,} bytes a token); {gain}. {settled}, and {brings}."


def full_heads(results: Results, design: Design) -> Design | None:
    """The design that differs only in giving each of as many heads a K and V of its own."""
    found = [d for d in trained(results) if d["n_kv_head"] == d["n_head"] == design["n_head"]]
    alike = (d for d in found if d["head_dim"] == design["head_dim"] and others(results, d) == others(results, design))
    return next(alike, None)


def claims(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """The common claims about heads that these designs can answer: [(claim, [(design or group, answer)])]."""
    families = head_counts(results).items()
    shared = [(d, full_heads(results, d)) for d in trained(results) if d["n_kv_head"] < d["n_head"]]
    pairs = [(d, reference) for d, reference in shared if reference]
    answered = {
        "Spreading attention over more heads costs about the same compute, however many there are.": [
            (label, same_compute(results, family)) for label, family in families
        ],
        "One head holds one pattern of attention at a position; several heads hold several relations at once, "
        "and so should predict the text better.": [
            (label, several_heads(results, family)) for label, family in families
        ],
        "One K and V for all heads (multi-query attention) shrinks the cache by the number of heads.": [
            (d["name"], smaller_cache(results, d, reference)) for d, reference in pairs if d["n_kv_head"] == 1
        ],
        "Sharing K and V among heads gives up little quality for a large gain in the cost of decoding.": [
            (d["name"], trade(results, d, reference)) for d, reference in pairs
        ],
    }
    return [(claim, items) for claim, items in answered.items() if items]
