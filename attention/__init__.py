"""The head designs, one file each, behind one contract.

A design is an nn.Module built from a ModelConfig and called as `design(x, rope, cache)`. It has n_head heads of
head_dim numbers, and answers the static questions at the end of `grouped.py`: which other settings it reads (those
that only other designs read are refused), its layout, and what it costs. To be looked into and measured it has

- `weights_tap`, an nn.Identity that its from-scratch path sends all weights (B, n_head, T, S) through,
- `w_o`, a module that takes the heads' outputs side by side (B, T, n_head * head_dim),
- `attend(q, *cached)`, what a decoding step does to the cache: queries (B, n_head, T, width of the first buffer) over
  all that `LayerCache.append` returns.

A new file joins by one line here; the shared tests run over this table.
"""

from typing import Any

from attention.grouped import GroupedAttention
from attention.latent import LatentAttention

DESIGNS: dict[str, Any] = {"grouped": GroupedAttention, "latent": LatentAttention}
