"""The head designs, one file each, behind one contract.

A design is an nn.Module built from a ModelConfig, called as `design(x, rope, cache)`, that also answers the
static questions at the end of `grouped.py`: the settings it reads, its layout, and what it costs.
A new file joins by one line here; the shared tests run over this table.
"""

from attention.grouped import GroupedAttention

DESIGNS = {"grouped": GroupedAttention}
