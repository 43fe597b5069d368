"""The paper's diagram of KFAC for a convolution, drawn from a real layer's shapes."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Polygon
from torch import nn

from ekfac.lab.show.figures import style
from ekfac.lab.show.figures.base import FIGURES, FigureSpec, Request
from ekfac.lab.tasks import TASKS

_SUM_A = r"$A=\mathbb{E}\,[\frac{1}{S}\sum_{s} h^{s} h^{s\top}]$"
_SUM_B = r"$B=\mathbb{E}\,[\sum_{s}\delta^{s}\delta^{s\top}]$"

# The offset to the right and up for a unit of depth.
SLANT = (0.45, 0.38)


def draw(request: Request) -> Figure:
    """Draw the second convolution of VGG11: its input, one receptive field, its output, and the factors' sizes."""
    task = TASKS.get("vgg11")
    layers = [m for m in task.build(task.width, False).modules() if isinstance(m, nn.Conv2d)]
    conv, side = layers[1], task.input_shape[-1] // 2
    n_in, n_out, (k_h, k_w) = conv.in_channels, conv.out_channels, conv.kernel_size
    figure = Figure(figsize=(7.5, 3.1))
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _diagram(left, side, n_in, n_out, k_h)
    columns = n_in * k_h * k_w + 1
    right.set_axis_off()
    whole = n_out * columns
    lines = [
        (0.96, r"$G^{(l)} \approx A \otimes B$", 13),
        (0.79, rf"$G$:  $({whole:,})^2$ $=$ {whole**2 / 1e9:.2f} billion entries", 9),
        (0.69, rf"$A$:  $(n_{{in}}\,k_w k_h + 1)^2 = {columns}^2 =$ {columns**2:,}", 9),
        (0.59, rf"$B$:  $(n_{{out}})^2 = {n_out}^2 =$ {n_out**2:,}", 9),
        (0.42, rf"{_SUM_A},   {_SUM_B}", 9),
        (0.25, rf"$s$: one of the $S = {side * side:,}$ positions of the filter", 8),
        (0.16, rf"$h^s$: receptive field at $s$, flattened, and a one: {columns} numbers", 8),
        (0.07, rf"$\delta^s$: gradient of the loss at the output's position $s$: {n_out}", 8),
        (-0.02, "with sharing='expand', the default; the paper uses 'reduce', pairs $(s, s')$", 8),
    ]  # fmt: skip
    for height, text, size in lines:
        right.text(0.0, height, text, fontsize=size, transform=right.transAxes, va="top")
    figure.suptitle(
        f"The factors of a convolution, VGG11's second: {n_out} x {n_in} x {k_h} x {k_w} weights and {n_out} biases"
    )
    return figure


def _diagram(axis: Axes, side: int, n_in: int, n_out: int, k: int) -> None:
    grid = 8
    field, depth_in, depth_out = 3 * 2.4 / grid, 2.2, 3.2
    _box(axis, 0, 0, 2.4, depth_in, style.SKY, 0.25)
    _box(axis, 0.6, 0.9, field, depth_in, style.ORANGE, 0.75)
    _box(axis, 4.6, 0, 2.4, depth_out, style.GREEN, 0.2)
    cell = 2.4 / grid
    _box(axis, 4.6 + 0.6 + cell, 0.9 + cell, cell, depth_out, style.RED, 0.8)
    start = (0.6 + field + depth_in * SLANT[0] * 0.5, 0.9 + field / 2 + depth_in * SLANT[1] * 0.5)
    axis.add_patch(
        FancyArrowPatch(
            start, (4.6 + 0.6 + cell, 0.9 + 1.5 * cell), arrowstyle="-|>", mutation_scale=9, color=style.BLACK
        )
    )
    top = 2.4 + depth_in * SLANT[1]
    axis.text(1.7, top + 0.12, rf"input: $n_{{in}}={n_in}$ channels", ha="center", va="bottom", fontsize=8)
    axis.text(1.2, -0.15, f"{side} x {side}", ha="center", va="top", fontsize=8)
    axis.text(0.55, 0.85, rf"$h^s$: {k} x {k} x {n_in}", ha="left", va="top", fontsize=8, color=style.BLACK)
    axis.text(
        6.5, 2.4 + depth_out * SLANT[1] + 0.12, rf"output: $n_{{out}}={n_out}$", ha="center", va="bottom", fontsize=8
    )
    axis.text(5.8, -0.15, f"{side} x {side}", ha="center", va="top", fontsize=8)
    axis.text(5.25, 0.85, r"$\delta^s$", ha="left", va="top", fontsize=8)
    axis.set_xlim(-0.2, 8.8)
    axis.set_ylim(-0.6, 4.3)
    axis.set_aspect("equal")
    axis.set_axis_off()


def _box(axis: Axes, x: float, y: float, size: float, depth: float, color: str, alpha: float) -> None:
    """Draw a cuboid: its front, top and right faces."""
    dx, dy = depth * SLANT[0], depth * SLANT[1]
    faces = [
        [(x, y), (x + size, y), (x + size, y + size), (x, y + size)],
        [(x, y + size), (x + size, y + size), (x + size + dx, y + size + dy), (x + dx, y + size + dy)],
        [(x + size, y), (x + size + dx, y + dy), (x + size + dx, y + size + dy), (x + size, y + size)],
    ]
    for shade, face in zip((1.0, 0.6, 0.8), faces, strict=True):
        axis.add_patch(Polygon(face, closed=True, facecolor=color, alpha=alpha * shade, edgecolor="none"))
        axis.add_patch(Polygon(face, closed=True, facecolor="none", edgecolor=style.BLACK, linewidth=0.6))


FIGURES.add("convolution", FigureSpec("the factors of a convolution, from a real layer's shapes", draw))
