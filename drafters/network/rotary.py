"""Rotary position embedding of a drafter's layers, with the rope scaling of its config. Frequencies are bit-identical
to those of transformers."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Rotary:
    """Rotary position embedding. It is not an `nn.Module`, so that frequencies are not rounded with the weights."""

    def __init__(self, target: Mapping[str, Any], head_dim: int) -> None:
        """Read the rope scaling from a transformers config. Raises ValueError for an unsupported rope type."""
        frequencies, self._scale = _frequencies(target, head_dim)
        self._frequencies = torch.cat([frequencies, frequencies])  # [rotated]

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines at these positions. # positions [...] int64 -> both [..., rotated]"""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None] * self._frequencies
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


def _frequencies(target: Mapping[str, Any], dim: int) -> tuple[Tensor, float]:
    """Return radians per position and the scale of cosines and sines. Files of older transformers versions have
    `rope_theta` and `rope_scaling` in place of `rope_parameters`. # -> [rotated / 2]"""
    theta = {"rope_theta": target.get("rope_theta", 10_000.0)}
    rope = theta | dict(target.get("rope_scaling") or target.get("rope_parameters") or {})
    dim = int(dim * rope.get("partial_rotary_factor", 1.0))  # the other columns of a head are not rotated
    periods = rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)
    scaling = rope.get("rope_type", rope.get("type", "default"))
    trained = rope.get("original_max_position_embeddings", target.get("max_position_embeddings"))
    trained = target.get("original_max_position_embeddings", trained)
    if scaling == "default":
        return 1.0 / periods, 1.0
    if scaling == "linear":
        return 1.0 / periods / rope["factor"], 1.0
    if scaling == "llama3":
        return _llama3(1.0 / periods, rope, trained), 1.0
    if scaling == "yarn":
        factor = rope["factor"] or target["max_position_embeddings"] / trained
        return _yarn(periods, rope, factor, trained), _yarn_scale(rope, factor)
    if scaling == "longrope":
        longest = target["max_position_embeddings"]
        chosen = rope["long_factor" if longest > trained else "short_factor"]
        return 1.0 / (torch.tensor(chosen) * periods), _longrope_scale(rope, longest, trained)
    supported = "default, linear, llama3, yarn, longrope"
    raise ValueError(f"drafter config: unsupported rope_type {scaling!r}; supported: {supported}")


def _llama3(frequencies: Tensor, rope: Mapping[str, Any], trained: int) -> Tensor:
    """Scale the frequencies as Llama 3: divide long wavelengths by the factor, and blend between two bounds.
    # [dim / 2] -> [dim / 2]"""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    divided = torch.where(wavelengths > trained / low, frequencies / factor, frequencies)
    share = (trained / wavelengths - low) / (high - low)
    blended = (1 - share) * divided / factor + share * divided
    between = (wavelengths >= trained / high) & (wavelengths <= trained / low)
    return torch.where(between, blended, divided)


def _yarn(periods: Tensor, rope: Mapping[str, Any], factor: float, trained: int) -> Tensor:
    """Divide low frequencies by the factor, with a ramp over dimensions (YaRN,
    arXiv 2309.00071, section 3.2). # [dim / 2] -> [dim / 2]"""
    dim = 2 * len(periods)

    def dimension(turns: float) -> float:
        return (dim * math.log(trained / (turns * 2 * math.pi))) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    kept = 1 - ((torch.arange(len(periods), dtype=torch.float) - low) / width).clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    """Return the scale of cosines and sines (YaRN, section 3.4)."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    weight, divisor = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(weight) / scale(divisor) if weight and divisor else scale(1)


def _longrope_scale(rope: Mapping[str, Any], longest: int, trained: int) -> float:
    """Return the scale of cosines and sines (LongRoPE, arXiv 2402.13753, as in transformers)."""
    factor = rope.get("factor") or longest / trained
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
