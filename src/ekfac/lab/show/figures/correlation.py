"""Correlation of gradients in parameter space and in the Kronecker-factored eigenbasis."""

from __future__ import annotations

import base64
from typing import Any

import numpy
import torch
from matplotlib.figure import Figure
from torch import Tensor

import ekfac
from ekfac.lab.show.figures import style
from ekfac.lab.show.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.show.figures.measure import Subject

UNITS, INPUTS = 5, 50


def draw(request: Request) -> Figure:
    """Draw |correlation| of 250 parameters of the 2nd layer: 5 units by 50 inputs; 5 by 50 axes in the eigenbasis."""
    found = request.measured("correlation", lambda: measure(request))
    figure, panels = style.panels(1, 2, height=3.2, width=6.5)
    names = {"parameter_space": "in parameter space", "eigenbasis": "in EKFAC's eigenbasis"}
    for axis, (name, heading) in zip(panels, names.items(), strict=True):
        shades = numpy.frombuffer(base64.b64decode(found["shades"][name]), numpy.uint8)
        size = shades.reshape(UNITS * INPUTS, UNITS * INPUTS) / 255
        image = axis.imshow(size, cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(f"{heading}\nmean off the diagonal {found[name]:.3f}")
        axis.set_xticks(range(0, 251, 50))
        axis.set_yticks(range(0, 251, 50))
        axis.grid(False)
        axis.set_xlabel("coordinate")
    figure.colorbar(image, ax=panels, label="|correlation| of gradients", shrink=0.85, aspect=25)
    subject = f"classifier on {request.dataset}, {UNITS * INPUTS} parameters of the 2nd layer"
    figure.suptitle(f"In the eigenbasis, gradients are nearly uncorrelated\n({subject})")
    return figure


def measure(request: Request) -> dict[str, Any]:
    """Return the mean magnitude off the diagonal in both bases, and both matrices in the 256 shades of the picture."""
    steps, examples = (150, 1000) if request.quick else (300, 4000)
    subject = Subject("classifier", request)
    subject.steps(steps)
    layer = subject.layer(2)
    sample = subject.sample(examples)
    G, kfac = (subject.fisher(name, sample, [layer]) for name in ("block", "kfac"))
    weight = torch.arange(UNITS * INPUTS)
    # In the eigenbasis [out, in + 1], eigenvalues are ascending, so the leading axes are the last ones of each side.
    shape = next(iter(kfac.spectrum().values())).shape[-2:]
    axes_out = torch.arange(shape[0] - UNITS, shape[0]).flip(0)
    axes_in = torch.arange(shape[1] - INPUTS, shape[1]).flip(0)
    places = (axes_out[:, None] * shape[1] + axes_in).flatten()
    matrices = {
        "parameter_space": ekfac.correlation(G, {f"{layer}.weight": weight}),
        "eigenbasis": ekfac.correlation(G, {layer: places}, basis=kfac),
    }
    shades = {name: (matrix.abs().clamp(max=1) * 255).round().byte().cpu() for name, matrix in matrices.items()}
    return {
        **{name: mean_off_diagonal(matrix) for name, matrix in matrices.items()},
        "steps": steps,
        "examples": examples,
        "shades": {name: base64.b64encode(shade.numpy().tobytes()).decode() for name, shade in shades.items()},
    }


def mean_off_diagonal(matrix: Tensor) -> float:
    """Return the mean magnitude of a matrix's off-diagonal entries."""
    size = matrix.abs()
    return float((size.sum() - size.diagonal().sum()) / (size.numel() - len(size)))


FIGURES.add("correlation", FigureSpec("gradient correlation of 250 parameters, in both bases", draw))
