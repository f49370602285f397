"""The report says what the figures say, fetches nothing, runs nothing of what it is told, and works in a browser."""

import contextlib
import io
import json
import os
import random
import re
from pathlib import Path

import pytest
from browser import opened
from rich.console import Console

from lab import charts, report
from lab.stats import analyse

FIVE = {
    "single-head": (1, 1, 0.09), "mha": (8, 8, 0.0), "mha-16": (16, 16, 0.014), "gqa-2": (8, 2, 0.0),
    "mqa": (8, 1, 0.013),
}  # fmt: skip
HEADS = {f"mha-n_head-{h}": (h, h, e) for h, e in ((1, 0.06), (2, 0.03), (4, 0.01), (8, 0.0), (16, 0.02))}
AWKWARD = '</script><img src=x onerror="document.title=1"><b>&|`*'


def around(median):
    return {"median": median, "low": median * 0.95, "high": median * 1.04}


def make_results(folder, designs=FIVE, seeds=(1, 2, 3), baseline="mha", speed=True, rates=False, **changes):
    """results.json's content for {name: (n_head, n_kv_head, effect on the loss)}, statistics by analyse()."""
    luck, runs = random.Random(1), {}
    for index, (name, (*_, effect)) in enumerate(designs.items()):
        runs[name] = {}
        for seed in seeds:
            path = runs[name][seed] = Path(folder, f"{index}-{seed}.jsonl")
            rows, of_seed = [], 0.01 * seed
            for step in (*range(40, 401, 40), 400):
                progress = min(1, step / 300)
                loss = 1.70 + (1 - progress) ** 2 + effect * progress + of_seed + luck.gauss(0, 0.003)
                rows.append({"step": step, "tokens": step * 1024, "val_loss": loss, "val_bits_per_byte": loss / 0.693,
                             "val_tokens": 99968})  # fmt: skip
            rows[-1]["val_tokens"] = 499809
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    analysis = analyse(runs, baseline)
    entries = []
    for name, (n_head, n_kv_head, _) in designs.items():
        size = 2 * 3 * n_kv_head * (128 // n_head) * 4
        settings = {"n_head": n_head, "n_kv_head": n_kv_head, "head_dim": 128 // n_head, "n_embd": 128}
        h, kv, _ = designs[baseline]
        own = {"n_head": h, "n_kv_head": kv, "head_dim": 128 // h}
        finished = [{"seed": s, "folder": f"x-{s}", "loss": 1.7, "bits_per_byte": 2.4} for s in runs[name]]
        entries.append({
            "name": name, "files": [], "runs": finished,
            "changes": {k: v for k, v in settings.items() if own.get(k, v) != v},
            "settings": settings | {"norm": "layernorm"}, **settings, "learning_rate": 0.003,
            "parameters": 512384 + 3 * 2 * 128 * n_kv_head * (128 // n_head),
            "parameters_without_embeddings": 490000, 
            "flops_per_token": 3000000 + 6 * 6 * 128 * n_kv_head * (128 // n_head),
            "cache_bytes_per_token": size, "cache_bytes_allocated": float(size),
            "sample": f"ROMEO:\n  {AWKWARD} from {name}", **analysis["designs"][name],
        })  # fmt: skip
    sizes = [e["cache_bytes_per_token"] for e in entries]
    groups = [[e["name"] for e in entries if e["cache_bytes_per_token"] == size] for size in sorted(set(sizes))]
    found = {
        "format": 1, "command": "python compare.py <a> & b", "created": "2026-11-30T01:20:00+00:00", "git_commit": None,
        "versions": {"torch": "2.13.0"},
        "machine": {"cpu": "Xeon <1>", "cores": 2, "memory_gb": 23.4, "system": "Linux"},
        "threads": 2, "jobs": 1, "first_look": False,
        "dataset": {"name": "shakespeare", "tokenizer": "char", "train_tokens": 4.8e6, "val_tokens": 499809},
        "max_steps": 400, "tokens_per_step": 1024, "tokens_seen": 409600, "share_of_pass": 0.085, "block_size": 128,
        "seeds": list(seeds), "baseline": baseline, "match": "width", "vary": {}, "held_equal": ["data: the same"],
        "adjusted": [], "notes": ["AdamW and one learning rate for all."], "designs": entries,
        "pooled": analysis["pooled"], "failures": [], "rates": None, "equal_cache": [g for g in groups if len(g) > 1],
        "speed": make_speed(entries) if speed else None, "speed_note": None if speed else "Two jobs ran at once.",
    }  # fmt: skip
    if rates:
        names = list(designs)
        pairs = {e["name"]: e["against_baseline"] or {} for e in entries}
        common = [
            {
                "name": e["name"],
                **{k: e["loss"][k] for k in ("mean", "sd")},
                "difference": pairs[e["name"]].get("mean"),
                **{k: pairs[e["name"]].get(k) for k in ("interval", "p_holm", "verdict")},
            }
            for e in entries
        ]
        found["rates"] = {"seed": 0, "tried": [0.0015, 0.003, 0.006], "common": 0.003,
                          "losses": {n: {"0.0015": 1.9, "0.003": 1.8, "0.006": None} for n in names},
                          "best": dict.fromkeys(names, 0.003), "order": names, "order_at_common": names[::-1],
                          "differs": True, "at_common": common}  # fmt: skip
    return found | changes


def make_speed(entries):
    """Training slows with heads; decoding gains from fewer cache bytes, from batch x context 768 on."""
    designs = {}
    for e in entries:
        ratio = 3072 / e["cache_bytes_per_token"]
        decode = []
        for batch, context in ((1, 128), (1, 512), (1, 2048), (16, 128), (16, 512), (16, 2048)):
            large = batch * context >= 768
            rate = batch * 700 * (1 if not large else ratio ** (0.5 if batch > 1 else 0.1)) / (1 + context / 4096)
            decode.append({"batch": batch, "context": context, "tokens_per_s": around(rate),
                           "ms_per_step": around(1000 * batch / rate),
                           "cache_mb": batch * context * e["cache_bytes_per_token"] / 1e6,
                           "gb_per_s": 11.0, "share_of_read": 0.4, "gain_expected": large})  # fmt: skip
        rate = around(23000 / (1 + 0.03 * e["n_head"]))
        designs[e["name"]] = {
            "training": {"tokens_per_s": rate, "gflops": 60.0, "share_of_matmul": 0.4},
            "prefill": [
                {"batch": 1, "context": 128, "tokens_per_s": around(5e4), "gflops": 50.0, "share_of_matmul": 0.3}
            ],
            "decode": decode,
            "decode_attention": [{"batch": 16, "context": 2048, "caches": 3, "ms": around(6.8 / ratio**0.6),
                                  "gb_per_s": 20.0, "share_of_ideal": 0.5, "sdpa_ms": around(7.0)}],
            "peak_memory_mb": {"start": 250.0, "training": 700.0, "decoding": 420.0},
        }  # fmt: skip
    note = "where batch x context < 6 n_embd no gain is to be expected"
    return {"threads": 2, "device": "cpu", "rounds": 5, "batch": [1, 16], "context": [128, 512, 2048], "train_batch": 8,
            "limits": {"matmul_gflops": 150.0, "read_gb_per_s": 27.0, "matmul": "float32 2048 x 2048", "read": "1 GB"},
            "designs": designs, "decode_gain": note}  # fmt: skip


def text_of(results):
    return report.to_markdown(results, {}).replace("\\", "")


def answer(results, claim, name=""):
    """What the report answers to a claim, for one design or group."""
    section = next(part for part in text_of(results).split("### ") if claim in part.split("\n")[0])
    return next(line for line in section.split("\n")[2:] if line.startswith(f"- **{name}**" if name else "- "))


def verdicts(results, **by_name):
    """Give designs a verdict, as if analyse had found it."""
    for design in results["designs"]:
        if design["name"] in by_name:
            mean, verdict = by_name[design["name"]]
            pair = {"mean": mean, "verdict": verdict, "interval": [mean - 0.001, mean + 0.001], "p_holm": 0.01}
            design["against_baseline"] |= pair | {"smallest_detectable": 0.02, "not_settled": None}
    return results


def test_top_has_question_verdicts_and_what_an_interval_is(tmp_path):
    top, _, _ = text_of(make_results(tmp_path, first_look=True)).partition("## Common claims")
    order = ["first look", "is the difference in loss real?", "- **single-head: worse.** +0.09", "Intervals are over"]
    assert sorted(order, key=top.index) == order
    for said in ("for this text and this training length", "unadjusted", "Holm-adjusted p", "3 seeds (1, 2 and 3)",
                 "409,600 tokens", "8.5% of one pass", "over all 499,809 tokens"):  # fmt: skip
        assert said in top
    assert "first look" not in text_of(make_results(tmp_path))


def test_one_seed_gives_no_interval_and_says_so(tmp_path):
    text = text_of(make_results(tmp_path, seeds=(1,)))
    assert "With 1 seed there is no interval, no p and no verdict" in text
    assert "**mqa: too few seeds for a verdict.**" in text and "95% interval +" not in text


def test_compute_is_equal_by_count_and_time_is_judged_by_what_was_measured(tmp_path):
    results = make_results(tmp_path)
    said = answer(results, "the same compute")  # 23000 / 1.03 and 23000 / 1.48 tokens/s
    assert "By count it holds: with 1, 8 and 16 heads alike" in said and "In time it does not hold" in said
    assert (
        "single-head trains on 22,330 tokens/s and mha-16 on 15,541, so that a token takes 1.44 times as long" in said
    )
    for speed in results["speed"]["designs"].values():
        speed["training"]["tokens_per_s"] = around(20000)
    assert "In time it holds as well" in answer(results, "the same compute")
    results["designs"][0]["flops_per_token"] *= 2
    assert "By count it does not hold" in answer(results, "the same compute")
    without = answer(make_results(tmp_path, speed=False), "the same compute")
    assert "The time was not measured." in without


@pytest.mark.parametrize("part", ["training", "decode"])
def test_speeds_of_a_machine_that_did_something_else_are_not_compared(tmp_path, part):
    results = make_results(tmp_path)
    speed = results["speed"]["designs"]["mqa"][part]
    rate = (speed[-1] if part == "decode" else speed)["tokens_per_s"]
    rate["low"], rate["high"] = rate["median"] / 2, 1.1 * rate["median"]
    why = "rounds of one design differ by up to 2.2 times: something else ran"
    assert f"Do not compare these speeds: {why}. The same command" in text_of(results)
    assert f"In time it cannot be told: {why}." in answer(results, "the same compute")
    assert f"decoding speed cannot be told ({why})" in answer(results, "little quality")
    console = Console(file=io.StringIO(), width=120)
    report.show(results, console)
    assert f"Do not compare the speeds: {why}." in console.file.getvalue()


@pytest.mark.parametrize(
    ("baseline", "found", "said"),
    [
        (
            "mha",
            {"single-head": (0.09, "worse")},
            "It shows here: several heads have the lower loss. single-head against",
        ),
        ("mha", {"single-head": (-0.09, "better")}, "It does not show here"),
        ("mha", {"single-head": (0.01, "no difference detected")}, "No difference between one head and several"),
        ("mha", {"single-head": (0.09, "not settled at this length")}, "This length of training does not settle it"),
        ("single-head", {"mha": (-0.09, "better")}, "It shows here: several heads have the lower loss. mha against"),
        ("single-head", {"mha": (0.09, "worse")}, "It does not show here"),
        ("gqa-2", {}, "neither is the reference"),
    ],
)
def test_one_head_against_several_follows_the_verdict(tmp_path, baseline, found, said):
    results = verdicts(make_results(tmp_path, baseline=baseline), **{k: v for k, v in found.items()})
    assert said in answer(results, "several relations")


def test_more_heads_are_called_better_only_where_they_are(tmp_path):
    assert "More heads are not always better: mha-16 ends 0.01" in answer(make_results(tmp_path), "several relations")
    assert "not always better" not in answer(make_results(tmp_path, seeds=(1,)), "several relations")
    rising = {name: (n, kv, -0.01 * n) for name, (n, kv, _) in FIVE.items()}
    assert "not always better" not in answer(make_results(tmp_path, rising), "several relations")


def test_cache_of_one_kv_head_by_formula_by_allocation_and_in_speed(tmp_path):
    results = make_results(tmp_path)
    said = answer(results, "shrinks the cache", "mqa")
    assert "It holds: mqa keeps 384 bytes a token and mha" in said and "3,072, 8 times as much" in said
    assert "A cache allocates just that." in said
    # 11,200 sqrt(8) / 1.5 against 11,200 / 1.5 tokens/s at the largest size; 1 x 128 and 1 x 512 are below 6 x 128
    assert "at batch 16 and context 2,048 it decodes 2.83 times as fast as mha (21,119 against 7,467 tokens/s)" in said
    assert "1.00 to 2.83 times over the 6 sizes measured, 2 of them so small that no gain is to be expected" in said
    mqa = results["designs"][4]
    mqa["cache_bytes_allocated"], mqa["cache_bytes_per_token"] = 500.0, 400
    said = answer(results, "shrinks the cache", "mqa")
    assert "It does not hold" in said and "A cache allocates 500 instead" in said


@pytest.mark.parametrize(
    ("found", "rate", "said"),
    [
        ((0.0172, "worse"), 1.0, "So the loss is real, and decoding gets no faster at the largest size measured"),
        (
            (0.0001, "no difference detected"),
            3.0,
            "So no loss was found, though a small one can be missed, and decoding does",
        ),
        ((-0.01, "better"), 3.0, "So nothing is lost, and decoding does get faster"),
        (
            (0.01, "not settled at this length"),
            0.5,
            "So the loss is not settled at this length of training, and decoding gets",
        ),
    ],
)
def test_trade_of_loss_for_cache_and_speed_follows_the_figures(tmp_path, found, rate, said):
    results = verdicts(make_results(tmp_path), mqa=found)
    results["designs"][1]["loss"]["mean"] = 1.72
    results["speed"]["designs"]["mqa"]["decode"][-1]["tokens_per_s"]["median"] = 16 * 700 / 1.5 * rate
    text = answer(results, "gives up little", "mqa")
    assert said in text and "cache 8 times smaller (384 against 3,072 bytes a token)" in text
    assert f"{found[0]:+.4f} nats a token (95% interval" in text and f"{rate:.2f} times as fast as mha" in text
    assert found[0] != 0.0172 or "or +1.00%" in text


def test_trade_without_its_reference_as_baseline_has_no_interval(tmp_path):
    said = answer(make_results(tmp_path, baseline="single-head"), "gives up little", "gqa-2")
    assert "no interval, because the reference is single-head" in said and "whether anything is lost is open" in said


def test_claims_without_designs_for_them_are_left_out(tmp_path):
    assert "## Common claims" not in text_of(
        make_results(tmp_path, {"gqa-2": (8, 2, 0.0), "mqa": (8, 1, 0.0)}, baseline="mqa")
    )


def test_growing_or_closing_compares_the_end_with_half_length(tmp_path):
    design = next(d for d in make_results(tmp_path)["designs"] if d["name"] == "mqa")
    for half, end, word in ((0.01, 0.02, "growing"), (-0.02, -0.01, "closing"), (0.01, -0.01, "changed sign")):
        curve = [
            {"tokens": t, "mean": m, "low": m - 0.03, "high": m + 0.03} for t, m in ((40, 9), (50, half), (100, end))
        ]
        design["against_baseline"]["curve"] = curve
        said = report.growing(design)
        assert said.startswith(word) and f"{half:+.4f} after 50 tokens and {end:+.4f} after 100" in said
        assert "this may be chance" in said
    design["against_baseline"]["curve"] = [point | {"low": None, "high": None} for point in curve]
    assert report.growing(design) is None  # a seed or two tell no trend


def test_rates_say_seed_choice_and_whether_the_order_differs(tmp_path):
    results = make_results(tmp_path, rates=True)
    text = text_of(results)
    assert "best of 3 learning rates, chosen on seed 0, which is not reported: single-head at 0.003, mha at" in text
    assert "At one common rate, 0.003, the order from the lowest mean loss is mqa, gqa-2, mha-16, mha and" in text
    assert "and single-head, which differs from single-head, mha, mha-16, gqa-2 and mqa at the best rates" in text
    assert "| mqa | 1.9000 | 1.8000 | - | 0.003 |" in text
    results["rates"]["at_common"][4] |= {
        "mean": 1.75, "sd": 0.01, "difference": 0.05, "interval": [0.01, 0.09], "p_holm": 0.00001, "verdict": "worse"
    }  # fmt: skip
    assert "| mqa | 1.7500 ± 0.0100 | +0.0500 | +0.0100 to +0.0900 | &lt;0.0001 | worse |" in text_of(results)
    assert "misled" not in text
    results["rates"]["best"] = results["rates"]["best"] | {"mqa": 0.001}
    assert "misled" not in text_of(results)  # the common rate ends higher
    results["rates"]["at_common"][4]["mean"] = 1.6
    lower = next(d for d in results["designs"] if d["name"] == "mqa")["loss"]["mean"] - 1.6
    assert f"it preferred 0.001, and over the reported seeds 0.003 ends {lower:.4f} lower" in text_of(results)
    results["rates"] |= {"differs": False}
    assert "mha and single-head, the same." in text_of(results)


def test_equal_cache_failures_settings_and_machine_are_told(tmp_path):
    failures = [{"design": "mqa", "seed": 2, "error": "the loss is not a number"}]
    text = text_of(
        make_results(tmp_path, failures=failures, adjusted=["gqa-2: d_ff 512 -> 560"], vary={"n_head": [1, 2]})
    )
    assert "same cache of 3,072 bytes a token:\n\n| design |" in text
    side = text.split("bytes a token:\n\n")[1].split("\n\n")[0].splitlines()[2:]
    assert [line.split(" | ")[0] for line in side] == ["| single-head", "| mha", "| mha-16"]
    for said in (
        "1 run, listed below", "**mqa, seed 2:** the loss is not a number", "d_ff 512 -> 560", "Varied: n_head 1 and 2",
        "AdamW and one learning rate", "| norm | layernorm | layernorm", "| torch | 2.13.0 |", "Xeon",
    ):  # fmt: skip
        assert said in text
    assert "## Speed\n\nTwo jobs ran at once." in text_of(make_results(tmp_path, speed=False))


def test_the_floor_of_a_probe_is_told_and_drawn(tmp_path):
    results = make_results(tmp_path)
    assert "best possible loss" not in text_of(results)
    before = json.dumps(charts.draw(results)["loss"][0].to_dict())
    results["dataset"]["probe"] = {"floor": 0.125, "guess": 2.7725, "length": 32, "about": "", "seed": 1}
    assert "known: 0.125 on the words that count (the dashed line), and 2.7725 for a guess" in text_of(results)
    assert '"floor": 0.125' in json.dumps(charts.draw(results)["loss"][0].to_dict()) and '"floor"' not in before


def test_small_decode_sizes_are_marked_in_table_and_chart(tmp_path):
    results = make_results(tmp_path)
    rows = [line for line in text_of(results).splitlines() if line.startswith("| decode ")]
    assert [line.count(" *") for line in rows] == [5, 5, 0, 0, 0, 0] and len(rows) == 6
    for panel, hollow, limit in zip(charts.draw(results)["decode"], ({128, 512}, set()), (768, 48), strict=True):
        rows = rows_of(panel.to_dict())
        assert {row["context"] for row in rows if row.get("hollow")} == hollow
        assert [row["to"] for row in rows if "to" in row] == [limit]


def test_charts_hold_the_figures(tmp_path):
    results = make_results(tmp_path)
    drawn = {name: [rows_of(panel.to_dict()) for panel in panels] for name, panels in charts.draw(results).items()}
    mqa = results["designs"][4]
    pair, loss, speed = (
        mqa["against_baseline"],
        mqa["loss"],
        results["speed"]["designs"]["mqa"]["training"]["tokens_per_s"],
    )
    expected = [
        ("loss", 0, {**mqa["curve"][3]}),
        ("difference", 0, {"mean": pair["mean"], "low": pair["interval"][0], "high": pair["interval"][1]}),
        ("difference", 0, {"seed": 2, "mean": pair["differences"][1]}),
        ("difference-curve", 3, {**pair["curve"][5]}),
        ("pareto", 0, {"bytes": 384, "low": loss["mean"] - loss["sd"], "high": loss["mean"] + loss["sd"]}),
        ("training", 0, {"mean": speed["median"], "low": speed["low"], "high": speed["high"]}),
    ]
    for name, panel, values in expected:
        assert any({**row, **values, "design": "mqa"} == row for row in drawn[name][panel]), name
    assert [sorted({row["n_head"] for row in rows}) for rows in drawn["heads"]] == [[1, 8, 16], [1, 8, 16]]


def test_design_without_a_finished_run_and_seeds_that_are_not_shared(tmp_path):
    results = make_results(tmp_path)
    for entry in results["designs"][3:]:
        entry |= {"against_baseline": None, "curve": [], "sample": None}
    results["designs"][4] |= {"runs": [], "loss": {"n": 0, "mean": None, "sd": None}, "bits_per_byte": None}
    text = text_of(results)
    assert "**mqa: no finished run.**" in text and "**gqa-2: no seed in common with the reference.**" in text
    assert {row["design"] for row in rows_of(charts.draw(results)["pareto"][0].to_dict())} == set(FIVE) - {"mqa"}


def rows_of(chart):
    """Every row of data in a chart's specification."""
    deeper = [row for layer in chart.get("layer", []) for row in rows_of(layer)]
    return chart.get("data", {}).get("values", []) + deeper


def test_front_holds_what_no_other_design_beats_in_loss_with_as_few_bytes():
    losses = {"a": (400, 1.8), "b": (800, 1.7), "c": (800, 1.75), "d": (3000, 1.7), "e": (3000, 1.6)}
    designs = [{"name": n, "cache_bytes_per_token": b, "loss": {"mean": m}} for n, (b, m) in losses.items()]
    assert [d["name"] for d in charts.front(designs)] == ["a", "b", "e"]


def test_head_count_curve_joins_designs_that_differ_in_heads_alone(tmp_path):
    results = make_results(tmp_path)
    assert [[d["name"] for d in f] for f in charts.head_counts(results).values()] == [["single-head", "mha", "mha-16"]]
    results["designs"][0]["changes"]["positions"] = "learned"
    results["designs"][4] |= {"n_kv_head": 8, "changes": {"positions": "learned"}}
    families = charts.head_counts(results)
    assert {label: [d["n_head"] for d in family] for label, family in families.items()} == {
        "": [8, 16], "positions learned": [1, 8]
    }  # fmt: skip
    assert "heads" not in charts.draw(make_results(tmp_path, {"mha": (8, 8, 0.0), "mqa": (8, 1, 0.0)}))


def test_awkward_text_is_shown_and_nothing_else(tmp_path):
    name = AWKWARD
    results = make_results(tmp_path, {"mha": (8, 8, 0.0), name: (8, 1, 0.01)})
    page = report.to_html(results, charts.draw(results))
    assert page.count("</script>") == page.count("<script") == 4
    assert "<img" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)  # the chart library's own code has one
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
    assert name in json.dumps(data, ensure_ascii=False).replace('\\"', '"')
    table = report.to_markdown(results, {}).split("## All figures\n\n")[1].split("\n\n")[0].splitlines()
    columns = [len(re.findall(r"(?<!\\)\|", line)) for line in table]
    assert len(set(columns)) == 1 and "<b>" not in "".join(table)
    assert "<b>" not in report.table([{name: name, "a figure": (name, 1.0)}])


def test_terminal_tables_fit_100_columns_and_ascii(tmp_path):
    results = make_results(tmp_path, FIVE | {"[red]größte": (8, 4, 0.001)})
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    report.show(results, Console(file=out, width=100))
    out.flush()
    text = out.buffer.getvalue().decode("ascii")
    assert max(map(len, text.splitlines())) <= 100
    assert "[red]gr\\xf6\\xdfte" in text and "1.8110 +- 0.0095" in text and "22,330" in text
    mqa = [line.split() for line in text.splitlines() if line.split()[:1] == ["mqa"]]
    assert mqa[0][1:3] == ["524,672", "384"] and mqa[1][-3:] == ["no", "difference", "detected"]


def test_report_is_whole_after_an_interruption_and_old_pictures_go(tmp_path, monkeypatch):
    results, replace, seen = make_results(tmp_path), os.replace, []
    out = tmp_path / "out"
    out.mkdir()

    def synced(descriptor):
        seen.append("synced")

    def interrupted(aside, path):
        seen.append(path.name)
        if path.name == "report.html":
            raise KeyboardInterrupt
        replace(aside, path)

    monkeypatch.setattr(charts, "to_svg", lambda panels: "<svg>")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", interrupted)
    (out / "report.html").write_text("the former one")
    with contextlib.suppress(KeyboardInterrupt):
        report.write_report(results, out)
    assert (out / "report.html").read_text() == "the former one" and seen[::2] == ["synced"] * (len(seen) // 2)
    monkeypatch.undo()
    paths = report.write_report(results, out)
    assert {p.name for p in paths} == {p.name for p in out.iterdir()}
    pictures, markdown = [p for p in paths if p.suffix == ".svg"], (out / "report.md").read_text()
    assert {p.stem for p in pictures} == set(report.CAPTIONS)
    assert all(p.read_text().startswith("<svg") and f"]({p.name})" in markdown for p in pictures)
    assert (out / "report.html").stat().st_size <= 5_000_000
    monkeypatch.setattr(charts, "to_svg", lambda panels: "<svg>")
    report.write_report(make_results(tmp_path, speed=False), out)
    assert not (out / "decode.svg").exists() and (out / "loss.svg").exists()


CASES = {
    "five": {"rates": True, "failures": [{"design": "mqa", "seed": 3, "error": "stopped <at> 3"}]},
    "heads": {"designs": HEADS, "baseline": "mha-n_head-8", "seeds": (1, 2, 3, 4, 5)},
    "one seed": {"seeds": (1,), "speed": False, "first_look": True},
    "awkward": {
        "designs": {AWKWARD: (8, 8, 0.0), "x" * 80: (8, 1, 0.01), "ü [b] {{c}}": (8, 2, 0.0)},
        "baseline": AWKWARD,
    },
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request, tmp_path_factory):
    """Results, and the page made of them."""
    folder = tmp_path_factory.mktemp("page")
    results = make_results(folder, **CASES[request.param])
    panels = charts.draw(results)
    path = folder / "report.html"
    path.write_text(report.to_html(results, panels), encoding="utf-8")
    return results, {f"{name}-{i}" for name, drawn in panels.items() for i in range(len(drawn))}, path


@pytest.fixture
def page(browser, case):
    with opened(browser, case[2], drawn="light") as page:
        yield page


def test_every_chart_is_drawn_in_light_and_in_dark(page, case):
    assert page.title().startswith("Head designs compared") and page.locator("img").count() == 0
    for scheme, text in (("light", "#333333"), ("dark", "#CCCCCC")):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_selector(f"body[data-drawn={scheme}]")
        assert {box.get_attribute("id") for box in page.query_selector_all(".chart")} == case[1]
        for name in case[1]:
            marks = page.query_selector_all(f"#{name} svg .mark-symbol path, #{name} svg .mark-rect path")
            assert marks and all(mark.get_attribute("d") for mark in marks), name
            label = page.query_selector(f"#{name} .role-axis-label text")
            assert label.get_attribute("fill") == text
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(255, 255, 255)") == (scheme == "light")


def test_hovering_a_point_shows_its_values(page, case):
    losses = {d["name"]: f"{d['loss']['mean']:.4f}" for d in case[0]["designs"]}
    for point in page.query_selector_all("#pareto-0 .mark-symbol.role-mark path"):
        point.scroll_into_view_if_needed()
        box = point.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2 + 1, box["y"] + box["height"] / 2)
        page.wait_for_selector("#vg-tooltip-element.visible")
        rows = page.query_selector_all("#vg-tooltip-element tr")
        shown = dict(tuple(cell.inner_text() for cell in row.query_selector_all("td")) for row in rows)
        whole = {name if len(name) < 60 else name[:60]: loss for name, loss in losses.items()}  # long ones are cut
        assert shown["loss"] == whole[shown["design"][:60]]
        page.mouse.move(0, 0)
        page.wait_for_selector("#vg-tooltip-element:not(.visible)", state="attached")


def test_tables_sort_by_click_and_by_key_both_ways_and_figures_that_lack_stay_below(page, case):
    def column(name):
        return page.evaluate(
            """name => { const table = [...document.querySelectorAll("h2")].find(h => h.textContent == "All figures")
                 .nextElementSibling.querySelector("table")
               const at = [...table.tHead.rows[0].cells].findIndex(th => th.textContent == name)
               return [[...table.tBodies[0].rows].map(row => row.cells[at].textContent),
                       table.tHead.rows[0].cells[at].ariaSort] }""",
            name,
        )

    heading = "xpath=//h2[.='All figures']/following-sibling::div[1]//th/button"
    buttons = {button.inner_text(): button for button in page.query_selector_all(heading)}
    numbers = sorted({d["parameters"] for d in case[0]["designs"]})
    buttons["parameters"].click()
    values, state = column("parameters")
    assert state == "ascending" and list(dict.fromkeys(values)) == [f"{n:,}" for n in numbers]
    buttons["parameters"].press("Enter")
    values, state = column("parameters")
    assert state == "descending" and list(dict.fromkeys(values)) == [f"{n:,}" for n in reversed(numbers)]
    differences = [d["against_baseline"]["mean"] for d in case[0]["designs"] if d["against_baseline"]]
    for reverse in (False, True):
        buttons["difference"].press("Space")
        expected = [f"{value:+.4f}" for value in sorted(differences, reverse=reverse)]
        assert column("difference")[0] == [*expected, "-"]
    assert column("parameters")[1] is None


def test_phone_scrolls_tables_and_not_the_page(page):
    page.evaluate("delete document.body.dataset.drawn")
    page.set_viewport_size({"width": 380, "height": 800})
    page.wait_for_selector("body[data-drawn]")
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    wide = "svg => svg.clientWidth > svg.closest('.chart').clientWidth"
    cut = f'[...document.querySelectorAll(".chart svg")].some({wide})'
    assert not page.evaluate(cut)
    assert page.evaluate('[...document.querySelectorAll(".scroll")].some(box => box.scrollWidth > box.clientWidth)')
