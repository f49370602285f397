"""Where a model runs and in which number format: chosen by itself, said, and never swapped in silence."""

import contextlib

import torch

from runtime.errors import UserError


def pick_device(name: str = "auto", number: int | None = None) -> torch.device:
    """The device asked for, or the best there is; UserError if it is not there.

    Of several GPUs it is the one with this number, if the name does not say.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, present in there.items() if present)
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None and number is not None:
            device = torch.device(name := f"cuda:{number}")
    except RuntimeError:
        raise UserError(f'device "{name}" is not known; use auto, cpu, cuda, cuda:1 or mps') from None
    if not there.get(device.type, False) or (device.index or 0) >= max(1, torch.cuda.device_count()):
        found = ", ".join(kind for kind, present in there.items() if present)
        raise UserError(f'device "{name}" is not on this machine; there is {found}')
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format of matrix products: auto is bfloat16 on GPUs that have it and float32 elsewhere.

    UserError for bfloat16 where the hardware lacks it: emulated, it would run a hundred times slower.
    """
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        features = torch.cpu.get_capabilities() if device.type == "cpu" else {}
        has_bfloat16 = any(features.get(f, False) for f in ("amx_bf16", "avx512_bf16", "bf16"))
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and has_bfloat16 else torch.float32
    if name == "bfloat16" and not has_bfloat16:
        raise UserError(f"dtype bfloat16 is not supported by this {device.type}; use --dtype float32")
    return getattr(torch, name)


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Mixed precision for the forward pass; nothing at all in float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def describe_device(device: torch.device, dtype: torch.dtype, compiled: bool) -> str:
    """One phrase such as "cpu, 2 threads, float32"."""
    threads = torch.get_num_threads()
    what = f"cpu, {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else str(device)
    if device.type == "cuda":
        what += f" ({torch.cuda.get_device_name(device)})"
    return f"{what}, {str(dtype).removeprefix('torch.')}{', compiled' if compiled else ''}"
