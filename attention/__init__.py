"""The head designs, one file each, behind one contract.

A design is an nn.Module built from a ModelConfig, called as `design(x, rope, cache)`, that also answers the
static questions at the end of `grouped.py`: the settings it reads, its layout, and what it costs. To be looked into it
shows two places: `weights_tap`, an nn.Identity that its from-scratch path sends all weights (B, n_head, T, S) through,
and `w_o`, a module that takes the heads' outputs side by side (B, T, n_head * width).
A new file joins by one line here; the shared tests run over this table.
"""

from attention.grouped import GroupedAttention

DESIGNS = {"grouped": GroupedAttention}
