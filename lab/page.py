"""What report.html and heads.html share: the frame with its looks, sortable tables, and the drawing of charts."""

import html
import json
import re
from typing import Any

from runtime.errors import plain

Cell = str | tuple[str, float | None]  # text, or text and the number that it is sorted by
Rows = list[dict[str, Cell]]

FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'@@EVAL@@; img-src data:">
<title>@@TITLE@@</title>
<style>
:root { color-scheme: light dark; --text: #1f2328; --soft: #59636e; --back: #ffffff; --line: #d8dde3; --box: #f5f7f9;
  --warn: #fff3d6; --accent: #0072b2 }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --soft: #a3abb4; --back: #16181d; --line: #373b42;
  --box: #1f2228; --warn: #453611; --accent: #56b4e9 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1040px; padding: 20px 16px 60px; background: var(--back); color: var(--text);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .6em }
h2 { font-size: 1.25rem; margin: 2.2em 0 .6em; padding-top: .8em; border-top: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 1.3em 0 .4em }
p { max-width: 75ch }
ul { padding-left: 1.2em; max-width: 80ch }
li { margin: .35em 0 }
.lead { font-size: 1.1rem }
.warning { background: var(--warn); padding: .7em 1em; border-radius: 6px }
figure { margin: 1.2em 0 2em }
figcaption { color: var(--soft); font-size: .9rem; max-width: 80ch; margin-top: .5em }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); gap: 18px }
.chart, .chart.vega-embed { display: block; width: 100%; min-width: 0; overflow: hidden }
.scroll { overflow-x: auto; margin: .8em 0; border: 1px solid var(--line); border-radius: 6px }
table { border-collapse: separate; border-spacing: 0; font-size: .875rem; width: 100%; overflow-wrap: normal }
th, td { padding: .4em .7em; text-align: left; white-space: nowrap }
td { border-top: 1px solid var(--line) }
td:first-child { position: sticky; left: 0; background: var(--back); max-width: 40vw; overflow: hidden;
  text-overflow: ellipsis }
th.n { text-align: right }
td.n { text-align: right; font-variant-numeric: tabular-nums }
thead { background: var(--box) }
th button { all: unset; cursor: pointer; font-weight: 600; white-space: nowrap }
th button:focus-visible, summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px }
th button::after { content: " \\2195"; opacity: .35 }
th[aria-sort=ascending] button::after { content: " \\2191"; opacity: 1 }
th[aria-sort=descending] button::after { content: " \\2193"; opacity: 1 }
pre { background: var(--box); padding: .9em 1em; border-radius: 6px; white-space: pre-wrap; font-size: .85rem }
details { margin: .8em 0 }
summary { cursor: pointer; font-weight: 600 }
@@STYLE@@</style>
</head>
<body>
<h1>@@TITLE@@</h1>
@@BODY@@
@@SCRIPTS@@
</body>
</html>
"""

# Draws the charts of #data, whenever width or theme change; wants vegaEmbed, which compiles functions.
CHARTS = """
const {specs, themes} = JSON.parse(document.getElementById("data").textContent)
const dark = matchMedia("(prefers-color-scheme: dark)")
async function draw() {
  const theme = dark.matches ? "dark" : "light"
  for (const [id, spec] of Object.entries(specs)) {
    const box = document.getElementById(id), config = structuredClone(themes[theme])
    config.legend.columns = Math.max(1, Math.floor(box.clientWidth / 150))  // a legend does not wrap by itself
    await vegaEmbed(box, spec, {actions: false, renderer: "svg", config, tooltip: {theme}})
  }
  document.body.dataset.drawn = theme
}
let wait, width = innerWidth
dark.addEventListener("change", draw)
addEventListener("resize", () => {
  if (width !== innerWidth) { width = innerWidth; clearTimeout(wait); wait = setTimeout(draw, 150) }
})
draw()
"""

SORTING = """
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0]
  heads.forEach((head, i) => head.firstElementChild.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") === "ascending" ? -1 : 1
    heads.forEach(other => other.removeAttribute("aria-sort"))
    head.setAttribute("aria-sort", up > 0 ? "ascending" : "descending")
    const value = row => row.cells[i].dataset.value ?? row.cells[i].textContent
    const sorted = [...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)]
      if (x === "" || y === "") return (x === "") - (y === "")  // what has no figure stays below
      return up * (isNaN(x) || isNaN(y) ? x.localeCompare(y, "en", {numeric: true}) : x - y)
    })
    body.append(...sorted)
  }))
}
"""


def page(title: str, body: str, scripts: list[str], style: str = "", evaluates: bool = False) -> str:
    """A whole page that fetches nothing; body is HTML. `evaluates`: a script of it compiles functions."""
    pieces = {"TITLE": escape(title), "BODY": body, "STYLE": style, "EVAL": " 'unsafe-eval'" * evaluates}
    pieces["SCRIPTS"] = "\n".join(f"<script>{script}</script>" for script in scripts)
    return re.sub("@@([A-Z]+)@@", lambda found: pieces[found[1]], FRAME)


def escape(text: str) -> str:
    """HTML that shows a name or a sentence, whatever it holds."""
    return html.escape(plain(text))


def data_script(name: str, data: Any) -> str:
    """Data that scripts of the page read by its id; no text in it can end the script."""
    text = json.dumps(data).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def table(rows: Rows) -> str:
    """A table that sorts by a click on a head; a cell that the first row does not have is left out."""

    def cell(c: Cell) -> str:
        if isinstance(c, str):
            return f"<td>{escape(c)}</td>"
        return f'<td class="n" data-value="{"" if c[1] is None else c[1]}">{escape(c[0])}</td>'

    heads = [(key, "" if isinstance(c, str) else ' class="n"') for key, c in rows[0].items()]
    top = "".join(
        f'<th scope="col"{kind}><button type="button">{escape(key)}</button></th>' for key, kind in heads
    )
    lines = "".join(f"<tr>{''.join(cell(row.get(key, '-')) for key in rows[0])}</tr>" for row in rows)
    parts = f"<thead><tr>{top}</tr></thead><tbody>{lines}</tbody>"
    return f'<div class="scroll" tabindex="0"><table>{parts}</table></div>'
