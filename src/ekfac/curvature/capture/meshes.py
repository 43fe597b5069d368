"""What layers take and give, made whole: of tensor parallel's pieces, and of tensors in tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Mesh:
    """The processes that compute layers together, all on the same examples; known once a layer was called so."""

    def __init__(self) -> None:
        self._mesh: Any = None

    @property
    def size(self) -> int:
        """How many processes see the same examples."""
        return 1 if self._mesh is None else int(self._mesh.size())

    @property
    def first(self) -> bool:
        """Whether this is the first of them, which speaks for all."""
        return self._mesh is None or not any(self._mesh.get_coordinate())

    def note(self, output: Any) -> None:
        """Remember over which processes a layer's output is spread, if it is."""
        if type(output) is Tensor or not hasattr(output, "device_mesh"):
            return
        if self._mesh is None:
            self._mesh = output.device_mesh
        if self._mesh != output.device_mesh:
            raise ValueError(
                f"layers are spread over two meshes of processes, {self._mesh} and {output.device_mesh}. Allowed: "
                "tensor parallel over one mesh"
            )


def whole(tensor: Any) -> Tensor:
    """Return all of a tensor of which each process has a piece, or a summand; once it has arrived.

    Of a nested one, the rows of all its parts: that examples have unlike numbers of them does not matter to factors.
    """
    if tensor.is_nested:
        return torch.cat(tensor.unbind())
    if type(tensor) is not Tensor:
        tensor = tensor.full_tensor() if hasattr(tensor, "device_mesh") else tensor
        tensor = tensor.wait() if hasattr(tensor, "wait") else tensor
    found: Tensor = tensor
    return found


def gives_out_pieces(module: nn.Module, model: nn.Module) -> bool:
    """Tell whether tensor parallel may give out a module's output in another form than the module computes.

    Where its parameters are merely stored in pieces, by ``fully_shard`` over one dimension, it does not.
    """
    meshes = [p.device_mesh for p in module.parameters(recurse=False) if hasattr(p, "device_mesh")]
    if not meshes:
        return False
    stored = any(hasattr(m, "unshard") for m in model.modules())
    return not stored or any(mesh.ndim > 1 for mesh in meshes)
