"""Muon (runtime/muon.py) against the definition by singular values, and against torch.optim.Muon."""

import pytest
import torch

from model import GPT, ModelConfig
from runtime.muon import UPDATE_RMS, orthogonalise
from runtime.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors
from runtime.runs import TrainConfig


@pytest.fixture
def model():
    return GPT(ModelConfig(n_layer=2, n_head=4, n_kv_head=1, n_embd=32, vocab_size=11, block_size=8))


def one_step(model, optimizer, seed=0):
    ids = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(seed))
    model(ids[:, :-1], ids[:, 1:]).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    return gradients


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8)])
def test_singular_vectors_stay_and_singular_values_come_near_one(shape):
    generator = torch.Generator().manual_seed(1)
    G = torch.randn(3, *shape, generator=generator)
    U, S, Vt = torch.linalg.svd(G, full_matrices=False)
    inner = U.mT @ orthogonalise(G) @ Vt.mT  # diagonal where the vectors stayed
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert (inner - torch.diag_embed(values)).abs().max() < 1e-3
    large = values[S / S.norm(dim=-1, keepdim=True) > 0.02]
    assert len(large) > 20 and large.min() > 0.65 and large.max() < 1.25


def test_a_batch_is_its_matrices_one_by_one_and_zero_stays_zero():
    G = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(orthogonalise(G), torch.cat([orthogonalise(g[None]) for g in G]), atol=1e-5, rtol=0)
    assert not orthogonalise(torch.zeros(1, 3, 5)).any()


def test_it_agrees_with_torchs_muon_within_the_error_of_bfloat16():
    """Two steps of both on one matrix, with equal gradients; theirs scales by a fixed number, ours to a fixed rms."""
    generator = torch.Generator().manual_seed(3)
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=64, vocab_size=5))
    config = TrainConfig(optimizer="muon", learning_rate=0.1, weight_decay=0.0, beta1=0.95)
    ours, weight = make_optimizer(model, config), model.blocks[0].mlp.w_in.weight
    theirs_weight = torch.nn.Parameter(weight.detach().clone())
    theirs = torch.optim.Muon([theirs_weight], lr=0.1, weight_decay=0.0, momentum=0.95, nesterov=True)
    for _ in range(2):
        before, theirs_before = weight.detach().clone(), theirs_weight.detach().clone()
        gradient = torch.randn(weight.shape, generator=generator)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        weight.grad, theirs_weight.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
        a, b = (weight - before).flatten(), (theirs_weight - theirs_before).flatten()
        assert torch.cosine_similarity(a, b, dim=0) > 0.9995


def test_an_updates_size_is_the_same_for_every_shape(model):
    optimizer = make_optimizer(model, TrainConfig(optimizer="muon", learning_rate=0.01, weight_decay=0.0))
    for step in range(2):  # the first moves w_o and w_out alone, which begin at zero and hide the rest
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        one_step(model, optimizer, step)
    shapes = set()
    for name, p in model.blocks.named_parameters():
        if p.dim() == 2:
            rms = (p - before[f"blocks.{name}"]).square().mean().sqrt().item()
            assert rms == pytest.approx(0.01 * UPDATE_RMS, rel=1e-3), name
            shapes.add(p.shape)
    assert len(shapes) == 4  # w_q and w_o, the narrow w_k and w_v, w_in, w_out


def test_tables_and_vectors_are_adamws_and_matrices_decay(model):
    config = TrainConfig(optimizer="muon", learning_rate=0.01, weight_decay=0.5)
    optimizer = make_optimizer(model, config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = one_step(model, optimizer)
    g = gradients["embed.weight"]
    expected = before["embed.weight"] * (1 - 0.01 * 0.5) - 0.01 * g / (g.abs() + 1e-8)
    torch.testing.assert_close(model.embed.weight.detach(), expected, atol=1e-6, rtol=0)
    w_q = "blocks.0.attn.w_q.weight"  # its gradient is zero at the first step: only the decay is seen
    assert not gradients[w_q].any()
    torch.testing.assert_close(model.get_parameter(w_q).detach(), before[w_q] * (1 - 0.01 * 0.5))
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))


def test_its_state_survives_a_round_trip(model):
    config = TrainConfig(optimizer="muon")
    first = make_optimizer(model, config)
    one_step(model, first)
    one_step(model, first, 1)
    saved = {name: value.clone() for name, value in optimizer_tensors(model, first).items()}
    assert saved["blocks.0.attn.w_q.weight/momentum"].any() and "embed.weight/exp_avg" in saved
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    one_step(model, first, 2)
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    second = make_optimizer(model, config)
    load_optimizer_tensors(model, second, saved)
    one_step(model, second, 2)
    assert all(torch.equal(p, after[name]) for name, p in model.named_parameters())
