"""Loss against the number of heads on klookup, k = 1, 2, 4, 8: a table, a picture, and what they rest on.

    python -m benchmarks.klookup width                          # heads share the model's width
    python -m benchmarks.klookup dim 4 8 --head_dim 16          # every head is 16 wide; k of 4 and 8 alone

One compare.py for each k, in runs/klookup/NAME-k; flags after these are compare.py's. Runs that are finished are
not trained again. Writes benchmarks/klookup-NAME.json and docs/klookup-NAME.svg, and prints the table.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import altair as alt

from lab.charts import to_svg
from runtime.runs import write_whole

ROOT = Path(__file__).resolve().parent.parent
ORDER = (1, 2, 4, 8)  # of k, and of heads


def compared(name: str, k: int, flags: list[str]) -> dict[str, Any]:
    folder = f"runs/klookup/{name}-{k}"
    heads = [str(n) for n in ORDER]
    command = ["compare.py", "--base", "config/probe/klookup.toml", "--dataset", f"probe-klookup-{k}", *flags,
               "--vary", "n_head", *heads, "--seeds", "3", "--jobs", "2", "--out_dir", folder]  # fmt: skip
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    results = json.loads((ROOT / folder / "results.json").read_text(encoding="utf-8"))
    losses = {d["n_head"]: [run["loss"] for run in d["runs"]] for d in results["designs"]}
    told = results["dataset"]["probe"]
    return {"command": results["command"], "k": k, "floor": told["floor"], "guess": told["guess"], "losses": losses}


def main(name: str, *words: str) -> None:
    numbers = list(itertools.takewhile(str.isdigit, words))
    found = [compared(name, k, list(words[len(numbers):])) for k in [int(n) for n in numbers] or ORDER]
    write_whole(ROOT / f"benchmarks/klookup-{name}.json", json.dumps(found, indent=1) + "\n")
    print(f"| k | guessing | {' | '.join(f'{n} head' + 's' * (n > 1) for n in ORDER)} | floor |")
    print("|---|---|" + "---|" * len(ORDER) + "---|")
    rows = []
    for one in found:
        cells = []
        for n in ORDER:
            losses = one["losses"][n]
            mean = sum(losses) / len(losses)
            cells.append(f"{mean:.3f} ({min(losses):.3f}-{max(losses):.3f})")
            rows += [{"k": f"k = {one['k']}", "heads": str(n), "loss": loss, "floor": one["floor"]} for loss in losses]
        print(f"| {one['k']} | {one['guess']:.3f} | {' | '.join(cells)} | {one['floor']:.3f} |")
    base = alt.Chart().encode(
        x=alt.X("heads:N", sort=None, title="heads", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("loss:Q", title="loss, nats an answer"), color=alt.Color("k:N", title=None),
    )  # fmt: skip
    floor = alt.Chart().mark_rule(strokeDash=[4, 3]).encode(y="mean(floor):Q", color=alt.datum("floor"))
    layers = base.mark_line().encode(y="mean(loss):Q") + base.mark_point(filled=True, size=40) + floor
    chart = alt.layer(*layers.layer, data=alt.Data(values=rows)).properties(width=420, height=240)
    write_whole(ROOT / f"docs/klookup-{name}.svg", to_svg([chart]))


if __name__ == "__main__":
    main(*sys.argv[1:])
