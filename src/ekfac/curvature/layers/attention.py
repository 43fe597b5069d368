"""The projections of ``nn.MultiheadAttention``, which calls ``F.linear`` directly, without triggering hooks.

The packed projection is one matrix of 3 x embedding rows. If query, key and value are the same tensor, all rows have
the same input. If they differ, each call concerns only some of the rows; the others get no gradient from it. Separate
projections (``kdim``, ``vdim``) are a block each, and so is their joint bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ekfac.curvature.layers.base import Layer
from ekfac.curvature.layers.linear import LinearLayer


class ProjectionLayer(LinearLayer):
    """One of the projections of ``nn.MultiheadAttention``."""

    seen_through_linear = True

    def __init__(self, module: nn.Module, roles: frozenset[str], *, sua: bool = False, part: str = "") -> None:
        self.part = part
        super().__init__(module, roles)

    @classmethod
    def parts(cls, module: nn.Module) -> Mapping[str, Sequence[str]]:
        out = {"out_proj": ("out_proj.weight", "out_proj.bias")}
        if module.in_proj_weight is not None:
            return {"in_proj": ("in_proj_weight", "in_proj_bias")} | out
        separate = {name: (f"{name}_weight",) for name in ("q_proj", "k_proj", "v_proj")}
        return {**separate, "in_proj_bias": ("in_proj_bias",), **out}

    @classmethod
    def of_part(cls, module: nn.Module, part: str, roles: frozenset[str], *, sua: bool = False) -> Layer:
        return cls(module, roles, part=part)

    def layout(self) -> tuple[Mapping[str, int], Sequence[str], int]:
        names = self.parts(self.module)[self.part]
        parameters = {name: self.module.get_parameter(name) for name in names if self.has(name)}
        biases = [name for name in names if name.endswith("bias")]
        widths = {name: p.shape[1] for name, p in parameters.items() if name not in biases}
        return widths, biases, len(next(iter(parameters.values())))

    def has(self, name: str) -> bool:
        """Return whether the module has this parameter: biases are optional."""
        owner, _, last = name.rpartition(".")
        return self.module.get_submodule(owner)._parameters.get(last) is not None
