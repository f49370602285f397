"""The learning rate's path and the optimiser's groups (runtime/optim.py)."""

import pytest
import torch

from model import GPT, ModelConfig
from runtime.optim import learning_rate, load_optimizer_tensors, make_optimizer, optimizer_tensors
from runtime.runs import TrainConfig


def path(**settings):
    config = TrainConfig(learning_rate=1.0, **settings)
    return [learning_rate(step, config) for step in range(config.max_steps + 3)]


def test_the_first_step_is_above_zero_and_warm_up_ends_at_the_peak():
    assert path(max_steps=20, warmup_steps=4)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert path(max_steps=20, warmup_steps=0)[0] == 1.0


@pytest.mark.parametrize(
    ("schedule", "middle"),
    [
        ("linear", 1 - 0.9 * 0.5),
        ("cosine", 0.1 + 0.9 * 0.5),
        ("trapezoid", 1.0),  # flat until step 60
    ],
)
def test_each_schedule_goes_from_the_peak_to_final_lr_and_stays(schedule, middle):
    rates = path(max_steps=100, warmup_steps=0, final_lr=0.1, schedule=schedule)
    assert rates[0] == 1.0
    assert rates[50] == pytest.approx(middle)
    assert rates[100:] == pytest.approx([0.1] * 3)
    assert all(a >= b for a, b in zip(rates, rates[1:], strict=False))


def test_cosine_and_trapezoid_at_a_quarter_from_the_end():
    assert path(max_steps=100, warmup_steps=0, final_lr=0.0, schedule="cosine")[75] == pytest.approx(0.1464466)
    assert path(max_steps=100, warmup_steps=0, final_lr=0.0, schedule="trapezoid")[80] == pytest.approx(0.5)


def test_warm_up_as_long_as_the_decay_is_defined_and_longer_is_refused():
    assert path(max_steps=10, warmup_steps=10, final_lr=0.1)[8:12] == pytest.approx([0.9, 1.0, 1.0, 0.1])
    with pytest.raises(ValueError, match="warmup_steps 11 is more than decay_steps 10"):
        TrainConfig(max_steps=10, warmup_steps=11)


def test_decay_may_end_before_the_run():
    rates = path(max_steps=20, decay_steps=10, warmup_steps=0, final_lr=0.5)
    assert rates[5] == pytest.approx(0.75)
    assert rates[10:] == pytest.approx([0.5] * 13)


@pytest.fixture
def model():
    return GPT(ModelConfig(n_layer=1, n_head=2, n_embd=8, vocab_size=5, norm="layernorm", bias=True))


def test_every_parameter_is_optimised_once_and_only_matrices_decay(model):
    optimizer = make_optimizer(model, TrainConfig())
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()} and len(grouped) == len(set(grouped))
    for group in optimizer.param_groups:
        assert all((p.dim() >= 2) == (group["weight_decay"] > 0) for p in group["params"])


def test_adamw_follows_its_paper(model):
    """One step by hand: m = (1 - b1) g, v = (1 - b2) g^2, both unbiased, so the update is lr * g / |g|."""
    config = TrainConfig(learning_rate=0.01, weight_decay=0.1)
    optimizer = make_optimizer(model, config)
    before = model.embed.weight.detach().clone()
    loss = model(torch.tensor([[0, 1, 2]]), torch.tensor([[1, 2, 3]]))
    loss.backward()
    gradient = model.embed.weight.grad.clone()
    optimizer.step()
    expected = before * (1 - 0.01 * 0.1) - 0.01 * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(model.embed.weight.detach(), expected, atol=1e-6, rtol=0)


def test_it_is_torchs_adamw_to_the_last_bit(model):
    """Over several steps, and with a parameter that has no gradient."""
    twin = GPT(model.config)
    config = TrainConfig(learning_rate=0.01, weight_decay=0.1)
    ours = make_optimizer(model, config)
    groups = [
        {"params": [p for p in twin.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in twin.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=0.01, betas=(config.beta1, config.beta2), fused=True)
    for step in range(3):
        ids = torch.randint(5, (2, 9), generator=torch.Generator().manual_seed(step))
        for one, optimizer in ((model, ours), (twin, theirs)):
            one(ids[:, :-1], ids[:, 1:]).backward()
            one.head.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_the_optimisers_state_survives_a_round_trip(model):
    def step(optimizer):
        model(torch.tensor([[0, 1, 2]]), torch.tensor([[1, 2, 3]])).backward()
        optimizer.step()
        optimizer.zero_grad()

    first = make_optimizer(model, TrainConfig())
    step(first)
    saved = {name: value.clone() for name, value in optimizer_tensors(model, first).items()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(first)
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    second = make_optimizer(model, TrainConfig())
    load_optimizer_tensors(model, second, saved)
    step(second)
    assert all(torch.equal(p, after[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_average_of_the_weights_is_the_one_of_its_definition(model, kind):
    """a <- a + max(1 - decay, 9 / (10 + step)) (p - a), from the weights after the first update on."""
    optimizer = make_optimizer(model, TrainConfig(optimizer=kind, learning_rate=0.1, ema_decay=0.4))
    name, expected = "blocks.0.attn.w_q.weight", None
    p = model.get_parameter(name)
    for step in range(8):
        model(torch.tensor([[0, 1, 2]]), torch.tensor([[1, 2, 3]])).backward()
        optimizer.step()
        optimizer.average(step)
        optimizer.zero_grad()
        expected = p.detach().clone() if expected is None else expected + max(0.6, 9 / (10 + step)) * (p - expected)
        before = p.detach().clone()
        with optimizer.averaged():
            torch.testing.assert_close(p.detach(), expected.detach())
            assert torch.equal(optimizer_tensors(model, optimizer)[f"{name}/training"], before)
        assert torch.equal(p, before)
    assert not torch.allclose(p, expected)


def test_without_an_average_the_weights_stay_as_they_are(model):
    optimizer = make_optimizer(model, TrainConfig())
    before = model.embed.weight.detach().clone()
    optimizer.average(0)
    with optimizer.averaged():
        assert torch.equal(model.embed.weight, before) and not optimizer_tensors(model, optimizer)
