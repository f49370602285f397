"""heads.html: what each attention head does, as one file that fetches nothing and stays under 5 MB.

Here the weights are packed, all text is escaped, and what does not move is written down; `headscript` draws the maps
and W_O. What does not fit is left out, and notes on the page say so.
"""

import base64
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from lab.headscript import SCRIPT, STYLE
from lab.page import SORTING, data_script, escape, page, table
from runtime.errors import plain
from runtime.runs import write_whole

WHOLE = 3_000_000  # weights that a page holds one by one; with more it keeps of every row
LARGEST = 8  # its largest ones, and of every head a picture of at most
BLOCKS = 64  # blocks to a side
LIMIT = 5_000_000  # bytes of the page
FEWEST = 16  # tokens; a text is not cut below them
W_O_LIMIT = 1_200_000  # bytes of all W_O numbers; in the page they take a third more
MATRIX = 300  # names to a side, about half a megabyte

HOW = """Each small picture is one head. From top to bottom stand the tokens that look, from left to right those that \
are looked at, and a deeper colour is more weight. Choose a head by a click or with the arrow keys; then point at its \
map or at the text, which shows in colour where the chosen token looks. With the map in focus, left and right choose \
the token."""
LEGEND = """<p class="small">weight 0<span class="bar weight"></span>1 (the middle of the scale is 0.25)</p>"""


def squeeze(numbers: np.ndarray) -> str:
    """Numbers as text: their bytes, compressed (zlib, what a browser calls deflate), in base64."""
    return base64.b64encode(zlib.compress(numbers.tobytes(), 9)).decode()


def pack_whole(weights: np.ndarray) -> dict[str, Any]:
    """All weights of (heads, T, T): of each head the lower triangle, row by row, a byte round(255 w) each."""
    rows, keys = np.tril_indices(weights.shape[-1])
    return {"kept": 0, "maps": squeeze(np.stack([in_bytes(head[rows, keys]) for head in weights]))}


def pack_largest(weights: np.ndarray) -> dict[str, Any]:
    """The largest weights of each row of (heads, T, T), and an overview of each head.

    `maps` are three planes with an entry for every weight kept, in the order of heads and rows, nearest key first: how
    far the key lies before the one just told (for the first: before the query), low byte and high byte, and
    round(255 w). Row i has min(8, i + 1) entries. Planes, as each compresses better alone. `blocks` are the lower
    triangles of each head's picture, a byte round(255 sqrt(mean / peak)) each, means over what a causal head can see.
    """
    T = weights.shape[-1]
    lower, places = np.tri(T, dtype=bool), np.arange(T)[:, None]
    step = -(-T // BLOCKS)
    starts = np.arange(0, T, step)
    triangle = np.tril_indices(len(starts))
    counts = in_blocks(lower.astype(np.float64), starts)[triangle]
    gaps, kept, blocks, peaks = [], [], [], []
    for head in weights:
        seen = np.where(lower, head, -1)
        keys = -np.sort(-np.argpartition(-seen, min(LARGEST, T) - 1, axis=1)[:, :LARGEST], axis=1)
        real = keys <= places  # the first rows have fewer keys; those of the future are sorted to their front
        before = np.minimum(places, np.hstack([places, keys[:, :-1]]))
        gaps.append((before - keys)[real])
        kept.append(in_bytes(np.take_along_axis(head, keys, axis=1)[real]))
        means = in_blocks(head, starts)[triangle] / counts
        peaks.append(float(means.max()))
        blocks.append(in_bytes(np.sqrt(means / peaks[-1])))
    gap = np.concatenate(gaps)
    maps = np.concatenate([(gap % 256).astype(np.uint8), (gap // 256).astype(np.uint8), *kept])
    return {"kept": LARGEST, "maps": squeeze(maps), "blocks": squeeze(np.concatenate(blocks)), "peaks": peaks,
            "side": len(starts), "step": step}  # fmt: skip


def in_bytes(shares: np.ndarray) -> np.ndarray:
    """Numbers from 0 to 1 as bytes, off by at most 1/510."""
    return np.rint(255 * np.clip(shares, 0, 1)).astype(np.uint8)


def in_blocks(square: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Sums over the blocks that begin at `starts`, in both directions."""
    return np.add.reduceat(np.add.reduceat(square, starts, axis=0, dtype=np.float64), starts, axis=1)


def write_page(content: dict[str, Any], path: Path) -> list[str]:
    """Write the page to path, whole or not at all; return what had to be left out of it, as sentences.

    content: title; lead, sentences; runs, each with name, facts, tokens (T strings), weights (n_layer, n_head, T, T)
    lower triangular with rows that sum to 1, kv_head_of (of each query head), labels (of each layer's heads) and w_o,
    None or bias (whether it has one), tokens (k places), heads (k, n_layer, n_head, head_dim) and shares (k, n_layer,
    n_head, n_embd); tables, each with title, text, rows; matrices, each with title, text, names, values and max;
    pictures, each with title, caption and svg, which is trusted; definitions, pairs of a name and a text.
    """
    weights = sum(run["weights"][..., 0, 0].size * math.comb(len(run["tokens"]) + 1, 2) for run in content["runs"])
    longest = max(len(run["tokens"]) for run in content["runs"])
    ways = [(longest, True)] * (weights <= WHOLE) + [(longest, False)]
    while ways[-1][0] // 2 >= FEWEST:
        ways.append((ways[-1][0] // 2, False))
    for tokens, whole in ways:
        text, notes = build(content, tokens, whole)
        text = text.encode("utf-8", "replace").decode()
        if len(text.encode()) < LIMIT:
            break
    write_whole(path, text)
    return notes


def build(content: dict[str, Any], most: int, whole: bool) -> tuple[str, list[str]]:
    """The page of each text's first `most` tokens with all weights or the largest, and notes on what is left out."""
    e = escape
    runs, notes = [], []
    if any(len(run["tokens"]) > most for run in content["runs"]):
        notes.append(f"The maps show the first {most:,} tokens of the text, because more do not fit on a page.")
    if not whole:
        notes.append(
            f"There are more weights than fit on a page: for each token the {LARGEST} largest are kept, and a head's "
            f"picture as a whole has at most {BLOCKS} x {BLOCKS} points, each a mean over a block of tokens."
        )
    small = sum(w["heads"].nbytes + w["shares"].nbytes for run in content["runs"] if (w := run["w_o"])) <= W_O_LIMIT
    if not small:
        notes.append("W_O is left out, because its numbers do not fit on a page.")
    for run in content["runs"]:
        tokens = [str(token) for token in run["tokens"]]
        T, w_o = min(most, len(tokens)), run["w_o"] if small else None
        heads = np.reshape(run["weights"], (-1, len(tokens), len(tokens)))[:, :T, :T]
        runs.append({"name": plain(run["name"]), "facts": plain(run["facts"]), "tokens": tokens[:T], "T": T,
                     "kv": list(run["kv_head_of"]), "labels": run["labels"], "w_o": None,
                     **(pack_whole if whole else pack_largest)(heads)})  # fmt: skip
        if w_o:
            runs[-1]["w_o"] = {"places": [(int(k), tokens[k]) for k in w_o["tokens"]],
                               "width": w_o["heads"].shape[-1], "out": w_o["shares"].shape[-1], "bias": w_o["bias"],
                               **{name: in_floats(w_o[name]) for name in ("heads", "shares")}}  # fmt: skip
    matrices = [m for m in content["matrices"] if len(m["names"]) <= MATRIX]
    if len(matrices) < len(content["matrices"]):
        notes.append(f"Maps of pairs of more than {MATRIX} heads are left out, because they do not fit on a page.")

    body = [f'<p class="lead">{e(line)}</p>' for line in content["lead"]]
    body += [f'<p class="warning note">{e(note)}</p>' for note in notes]
    body.append(f'<h2>Attention</h2><p>{HOW}</p>{LEGEND}<div class="runs" id="runs"></div>')
    if any(run["w_o"] for run in runs):
        body.append('<h2>W_O made visible</h2><div id="w_o"></div>')
    for i, p in enumerate(content["pictures"]):
        svg = with_ids(p["svg"], f"picture-{i}-")
        body.append(f'<h2>{e(p["title"])}</h2><figure><div class="card" tabindex="0">{svg}</div>')
        body.append(f"<figcaption>{e(p['caption'])}</figcaption></figure>")
    for i, m in enumerate(matrices):
        body.append(f'<h2>{e(m["title"])}</h2><p>{e(m["text"])}</p><div id="matrix-{i}"></div>')
    for t in content["tables"]:
        body += [f"<h2>{e(t['title'])}</h2><p>{e(t['text'])}</p>", table(t["rows"]) if t["rows"] else ""]
    if content["definitions"]:
        told = "".join(f"<dt>{e(name)}</dt><dd>{e(text)}</dd>" for name, text in content["definitions"])
        body.append(f"<h2>Definitions</h2><dl>{told}</dl>")
    drawn = [{"names": m["names"], "max": m["max"], "values": in_json(m["values"])} for m in matrices]
    body.append(data_script("heads", {"runs": runs, "matrices": drawn}))
    return page(content["title"], "\n".join(body), [SCRIPT, SORTING], STYLE), notes


def with_ids(svg: str, mark: str) -> str:
    """An SVG file whose ids begin with `mark`: two files may use the same, which one page cannot."""
    # Only in tags: what stands between them is text.
    return re.sub("<[^>]*>", lambda tag: re.sub(r'(\bid="|="url\(#|href="#)', rf"\g<1>{mark}", tag[0]), svg)


def in_floats(numbers: np.ndarray) -> str:
    """Numbers as text: float32, low byte first, in base64."""
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<f4").tobytes()).decode()


def in_json(values: Any) -> list[list[float | None]]:
    """Numbers to four digits after the point; JSON has no word for those that are not finite."""
    return [[round(float(v), 4) if math.isfinite(v) else None for v in line] for line in values]
