"""Fewer K/V heads out of many: from a trained MHA to GQA or MQA (Ainslie et al. 2023, section 2.1).

The new K/V head g takes the place of the old heads g * n .. g * n + n - 1, n old ones for each new one. As everywhere,
a projection's rows are its heads one under the other, head_dim rows each; a bias is one column more.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

HOWS = ("mean", "first", "random", "aligned")
ROUNDS = 20  # of aligning heads to their mean; it settles sooner


def regroup(layer: Mapping[str, Tensor], fresh: Mapping[str, Tensor], how: str, head_dim: int, rotary: bool
            ) -> dict[str, Tensor]:  # fmt: skip
    """The parameters of one grouped block with the K/V heads of `fresh`, a block of the new layout just initialised.

    mean: each new head is the mean of the old ones. first: the first of them. random: as initialised. aligned: the mean
    after the old heads were turned onto each other, their queries (for keys) and their columns of w_o (for values)
    turned with them, which leaves the old model as it was. Exact where the old heads are copies of one another, and
    with `aligned` also where they are turned copies. All in float64 until the end.
    """
    if how == "random":
        return {name: fresh[name] if name.startswith(("w_k", "w_v")) else value for name, value in layer.items()}
    q, k, v = (heads(layer, name, head_dim) for name in ("w_q", "w_k", "w_v"))  # (heads, head_dim, n_embd [+ 1])
    n_kv_head = fresh["w_k.weight"].shape[0] // head_dim
    n = len(k) // n_kv_head
    new = dict(layer)
    if how == "aligned":
        k_turns, v_turns = turns(k, n, rotary), turns(v, n, False)  # (heads, head_dim, head_dim)
        each = len(q) // len(k)  # query heads that read one old K/V head
        k, v = k_turns @ k, v_turns @ v
        store(new, "w_q", k_turns.repeat_interleave(each, dim=0) @ q)
        # A head's value v becomes R v, so that its columns of w_o become w_o R^T.
        columns = layer["w_o.weight"].double().unflatten(1, (len(q), head_dim))  # (n_embd, n_head, head_dim)
        columns = torch.einsum("ehd,hcd->ehc", columns, v_turns.repeat_interleave(each, dim=0))
        new["w_o.weight"] = columns.flatten(1).to(layer["w_o.weight"])
    choose: Callable[[Tensor], Tensor] = (lambda group: group[:, 0]) if how == "first" else (lambda g: g.mean(dim=1))
    store(new, "w_k", choose(k.unflatten(0, (n_kv_head, n))))
    store(new, "w_v", choose(v.unflatten(0, (n_kv_head, n))))
    return new


def heads(layer: Mapping[str, Tensor], name: str, head_dim: int) -> Tensor:
    """A projection's heads, float64 (heads, head_dim, n_embd), or n_embd + 1 with its bias."""
    weight = layer[f"{name}.weight"].double()
    if f"{name}.bias" in layer:
        weight = torch.cat((weight, layer[f"{name}.bias"].double()[:, None]), dim=1)
    return weight.unflatten(0, (-1, head_dim))


def store(layer: dict[str, Tensor], name: str, found: Tensor) -> None:
    """Put a projection's heads back where `heads` took them from."""
    old, rows = layer[f"{name}.weight"], found.flatten(0, 1)
    layer[f"{name}.weight"] = rows[:, : old.shape[1]].to(old)
    if f"{name}.bias" in layer:
        layer[f"{name}.bias"] = rows[:, -1].to(old)


def turns(found: Tensor, n: int, rotary: bool) -> Tensor:
    """For every head (head_dim, columns) the rotation that brings it nearest to the mean of its group of n.

    Nearest in the sum of squares, the groups' means and the rotations found in turn (generalised Procrustes, Gower
    1975). Rotary positions turn pairs (i, i + head_dim / 2), each by an angle of its own; only what turns the same
    pairs commutes with that, so that each pair is turned by one angle then.
    """
    groups = found.unflatten(0, (-1, n))  # (n_kv_head, n, head_dim, columns)
    width = found.shape[1]
    turn = torch.eye(width, dtype=found.dtype).expand(*groups.shape[:2], width, width)
    mean = groups[:, :1]  # the first head, to begin with
    for _ in range(ROUNDS):
        if rotary:
            z, goal = (torch.complex(*part.chunk(2, dim=2)) for part in (groups, mean))  # (.., width / 2, columns)
            product = (z.conj() * goal).sum(dim=-1)  # (n_kv_head, n, width / 2)
            angle = product.angle()
            cos, sin = torch.diag_embed(angle.cos()), torch.diag_embed(angle.sin())
            turn = torch.cat((torch.cat((cos, -sin), dim=-1), torch.cat((sin, cos), dim=-1)), dim=-2)
        else:
            u, _, vh = torch.linalg.svd(mean @ groups.transpose(-2, -1))  # Schoenemann 1966
            turn = u @ vh
        mean = (turn @ groups).mean(dim=1, keepdim=True)
    return turn.flatten(0, 1)
