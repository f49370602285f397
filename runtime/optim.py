"""The optimiser and its learning rate."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from model import GPT
from runtime.errors import UserError
from runtime.muon import muon


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) and, for groups marked `muon`, Muon.

    The kernels are those that torch.optim.AdamW calls. It is not used itself, since to make one imports PyTorch's
    compiler, which takes a third of the time from the start of train.py to its first step.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], ema_decay: float = 0.0):
        self.param_groups, self.betas, self.ema_decay = groups, betas, ema_decay
        self.state: dict[Tensor, dict[str, Tensor]] = {p: {} for group in groups for p in group["params"]}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            lr, weight_decay = group["lr"], group["weight_decay"]
            if group["muon"]:
                means = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
                muon(params, means, lr, weight_decay, self.betas[0])
                continue
            for p in params:
                if "step" not in self.state[p]:
                    self.state[p]["step"] = torch.zeros((), device=p.device)
                    self.state[p] |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            states = [self.state[p] for p in params]
            means, squares, steps = ([state[k] for state in states] for k in ("exp_avg", "exp_avg_sq", "step"))
            adamw(
                params, [p.grad for p in params], means, squares, [], steps, amsgrad=False, maximize=False,
                beta1=self.betas[0], beta2=self.betas[1], lr=lr, weight_decay=weight_decay, eps=1e-8,
                # One kernel for all parameters: on a CPU and at this size the plain loop costs a tenth of a step.
                fused=bool(params) and params[0].device.type in ("cpu", "cuda"),
            )  # fmt: skip

    def zero_grad(self) -> None:
        for p in self.state:
            p.grad = None

    @torch.no_grad()
    def average(self, step: int) -> None:
        """Move the average of the weights towards them after the update that `step` others came before.

        Source: running averages as in Szegedy et al. 2015 (arXiv 1512.00567); that the first steps count for more,
        TensorFlow's ExponentialMovingAverage.
        """
        if self.ema_decay:
            averages = [self.state[p].setdefault("average", p.clone()) for p in self.state]
            torch._foreach_lerp_(averages, list(self.state), max(1 - self.ema_decay, 9 / (10 + step)))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model's weights are their averages, if there are any, and the state keeps those in training."""
        self.exchange("average", "training")
        try:
            yield
        finally:
            self.exchange("training", "average")

    def exchange(self, taken: str, left: str) -> None:
        """Give the weights the values that the state has by the first name; the former ones stay by the second."""
        for p, state in self.state.items():
            if taken in state:
                p.data, state[left] = state.pop(taken), p.data


def make_optimizer(model: GPT, config: Any) -> Optimizer:
    """AdamW, or Muon for the matrices of the blocks and AdamW for the rest.

    Matrices and tables decay, vectors (norms, biases) do not.
    """
    matrices = [p for p in model.blocks.parameters() if p.dim() >= 2]
    in_blocks = set(matrices)
    tables = [p for p in model.parameters() if p.dim() >= 2 and p not in in_blocks]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, "muon": config.optimizer == "muon"},
        {"params": tables, "weight_decay": config.weight_decay, "muon": False},
        {"params": vectors, "weight_decay": 0.0, "muon": False},
    ]
    groups = [group | {"lr": config.learning_rate} for group in groups]
    return Optimizer(groups, (config.beta1, config.beta2), config.ema_decay)


def learning_rate(step: int, config: Any) -> float:
    """The rate of the step that follows `step` finished ones: up to the peak in warmup_steps, above zero from
    the first step on, then down to final_lr times the peak at decay_steps, where it stays.

    The way down is linear, a half cosine (cosine), or flat until the last 40% and then linear (trapezoid).
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    flat = max(config.warmup_steps, 0.6 * config.decay_steps if config.schedule == "trapezoid" else 0)
    progress = min(1.0, max(0.0, (step - flat) / max(1, config.decay_steps - flat)))
    if config.schedule == "cosine":
        progress = 0.5 * (1 - math.cos(math.pi * progress))
    return config.learning_rate * (1 - (1 - config.final_lr) * progress)


def optimizer_tensors(model: GPT, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimiser's state under the parameters' names: "blocks.0.attn.w_q.weight/exp_avg" and so on.

    To be called where the model's weights are their averages, for a checkpoint in which they are.
    """
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(
    model: GPT, optimizer: Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` gave; UserError if it does not fit, which no kernel would notice."""
    orthogonal = {p for group in optimizer.param_groups if group["muon"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        prefix = f"{name}/"
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        found = {key: (value.shape, value.dtype) for key, value in state.items()}
        wanted = {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
        if parameter in orthogonal:
            wanted = {"momentum": parameter.shape}
        if optimizer.ema_decay:
            wanted["training"] = parameter.shape
        if tensors and found != {key: (shape, torch.float32) for key, shape in wanted.items()}:
            raise UserError(f"the optimiser's state of {name} does not fit it: use another checkpoint")
        optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}
    optimizer.exchange("training", "average")
