"""The slow, dense truth that the library is compared with.

It is written from the definitions alone, in the paper's symbols, with dense matrices and plain loops; it
shares no code with the library and imports nothing from it. Use it in float64.

How h and delta are found: while a model is observed, every layer's forward is replaced by one that adds a
tensor of zeros to the layer's output. The derivative of the loss with respect to those zeros is the layer's
output gradient; no hook is involved. The receptive fields of a convolution are the outputs of a depthwise
convolution of the same geometry whose kernel is one at a single tap and zero elsewhere, one tap after
another.

Shapes: a layer's gradient is [G, O, C]: G groups, O outputs of a group, C columns. h is [N, S, G, C] and
delta is [N, S, G, O]. The columns of a layer are its weight's, in the weight's own order, then one for the
bias; a norm layer has one unit a group, its scale and its shift as two outputs, and one column. Under SUA
they are ordered tap by tap, and the channel basis U_A is repeated for every tap. Attention, recurrent layers
and their like are written out in ``oracle_wholes.py``; each of their products is a ``Part``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from oracle_wholes import RECURRENT, WHOLES, parts, plain_forward

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CHANNEL_NORMS = (nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LAST_DIM_NORMS = (nn.LayerNorm, nn.RMSNorm)
NORMS = CHANNEL_NORMS + LAST_DIM_NORMS
COVERED = (nn.Linear, nn.Embedding, *CONVOLUTIONS, *TRANSPOSED, *NORMS)

TORCHS = ("belief", "adam", "rmsprop", "adagrad")

Loss = Callable[[nn.Module, Any], Tensor]


# -------------------------------------------------------------------------------------- per-example gradients


def per_example_gradients(model: nn.Module, loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Gradient of every example's own loss, by torch.func.

    Name -> [N, *shape]. Examples must not interact.
    """
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    fixed |= {name: b.detach() for name, b in model.named_buffers()}

    def of_one(trained: dict[str, Tensor], x_n: Tensor, y_n: Tensor) -> Tensor:
        output = functional_call(model, {**trained, **fixed}, (x_n.unsqueeze(0),))
        return loss(output, y_n.unsqueeze(0))

    return vmap(grad(of_one), in_dims=(None, 0, 0))(parameters, x, y)


def dense_fisher(gradients: Tensor) -> Tensor:
    """G = mean over n of vec(g_n) vec(g_n)^T, from gradients of shape [N, ...]; row-major vec."""
    flat = gradients.flatten(1)
    return flat.T @ flat / len(flat)


# ------------------------------------------------------------------------------------------- layers: h, delta


@dataclass
class Layer:
    """One layer, or several of one kind that share their parameters.

    ``weight`` and ``bias`` name those that train. ``inside`` is the module that uses the layer without calling it.
    """

    modules: list[nn.Module]
    weight: str | None
    bias: str | None
    sua: bool = False
    inside: nn.Module | None = None

    @property
    def key(self) -> str:
        """The parameter under which an optimizer keeps the state of this layer."""
        key = self.weight or self.bias
        assert key is not None
        return key

    @property
    def module(self) -> nn.Module:
        return self.modules[0]

    @property
    def names(self) -> list[str]:
        return [name for name in (self.weight, self.bias) if name is not None]

    @property
    def is_norm(self) -> bool:
        return isinstance(self.module, NORMS)

    def is_turned(self, module: nn.Module) -> bool:
        """Whether a module uses the layer's weight with rows and columns exchanged."""
        return isinstance(module, nn.Embedding) and isinstance(self.module, nn.Linear)

    @property
    def taps(self) -> int:
        """How many times the channel basis is repeated: the kernel's taps under SUA, else 1."""
        if not (self.sua and self.weight):
            return 1
        return int(torch.tensor(self.module.kernel_size).prod())

    @property
    def bias_apart(self) -> bool:
        """Whether the bias column has a basis of its own, [1], as under SUA."""
        return self.sua and self.bias is not None and self.weight is not None

    # -------------------------------------------------------------- between parameters' shapes and [G, O, C]

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Gradients by parameter name -> [G, O, C]."""
        m, parts = self.module, []
        if self.is_norm:
            return torch.stack([tensors[name].reshape(-1) for name in self.names], -1).unsqueeze(-1)
        groups = getattr(m, "groups", 1)
        if self.weight:
            w = tensors[self.weight]
            if isinstance(m, nn.Linear):
                w = w.unsqueeze(0)
            elif isinstance(m, nn.Embedding):
                w = w.T.unsqueeze(0)
            else:
                if isinstance(m, TRANSPOSED):  # torch: [in, out / groups, *kernel]
                    w = w.reshape(groups, w.shape[0] // groups, w.shape[1], -1).transpose(1, 2)
                else:  # torch: [out, in / groups, *kernel]
                    w = w.reshape(groups, w.shape[0] // groups, w.shape[1], -1)
                w = (w.transpose(2, 3) if self.sua else w).flatten(2)
            parts.append(w)
        if self.bias:
            parts.append(tensors[self.bias].reshape(groups, -1, 1))
        return torch.cat(parts, -1)

    def unpack(self, block: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of pack; ``like`` gives the shapes."""
        m, out = self.module, {}
        if self.is_norm:
            return {name: block[:, i, 0].reshape(like[name].shape) for i, name in enumerate(self.names)}
        if self.weight:
            shape = like[self.weight].shape
            w = block[..., : block.shape[-1] - 1] if self.bias else block
            if isinstance(m, nn.Embedding):
                w = w[0].T
            elif isinstance(m, CONVOLUTIONS + TRANSPOSED):
                kernel = tuple(m.kernel_size)
                taps = int(torch.tensor(kernel).prod())
                if self.sua:
                    w = w.reshape(*w.shape[:2], taps, -1).transpose(2, 3)
                else:
                    w = w.reshape(*w.shape[:2], -1, taps)
                if isinstance(m, TRANSPOSED):
                    w = w.transpose(1, 2)
            out[self.weight] = w.reshape(shape)
        if self.bias:
            out[self.bias] = block[..., -1].reshape(like[self.bias].shape)
        return out

    # ---------------------------------------------------------------------------------- h and delta of a call

    def positions(self, module: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """A call's h [L, S, G, C] and delta [L, S, G, O] from its input and its output's gradient.

        L is the leading dimension of the call. For a norm layer h is 1 and delta is the pair (delta x^,
        delta) of scale and shift.
        """
        length = x.shape[0]
        if self.is_turned(module):
            tied = Layer([module], self.weight, None)
            tokens, vectors = tied.positions(module, x, gradient)
            return F.pad(vectors, (0, 1)) if self.bias else vectors, tokens
        if self.is_norm:
            d = _positions_first(module, gradient)
            of_scale = d * _positions_first(module, _normalised(module, x))
            pair = ([of_scale] if self.weight else []) + ([d] if self.bias else [])
            delta = torch.stack(pair, -1)
            return torch.ones_like(delta[..., :1]), delta
        if isinstance(module, nn.Linear):
            length = length if x.dim() > 1 else 1  # a single vector is one row
            h = x.reshape(length, -1, 1, x.shape[-1])
            delta = gradient.reshape(length, -1, 1, gradient.shape[-1])
        elif isinstance(module, nn.Embedding):
            h = F.one_hot(x, module.num_embeddings).to(gradient.dtype)
            h = h.reshape(length, -1, 1, module.num_embeddings)
            delta = gradient.reshape(length, -1, 1, gradient.shape[-1])
            if module.padding_idx is not None:  # such a position has no gradient and counts for nothing
                live = 1 - h[..., module.padding_idx : module.padding_idx + 1]
                h, delta = h * live, delta * live
        else:
            h = receptive_fields(module, x)  # [L, S, G, I, T]
            h = (h.transpose(3, 4) if self.sua else h).flatten(3)
            flat = gradient.flatten(2).transpose(1, 2)
            delta = flat.reshape(length, flat.shape[1], module.groups, -1)
        columns = ([h] if self.weight else []) + ([torch.ones_like(h[..., :1])] if self.bias else [])
        return torch.cat(columns, -1), delta


@dataclass
class Part(Layer):
    """Parameters of a module with several products that are the columns of one matrix, side by side.

    ``columns`` has the width of each and its name in the model, None where it is not trained; weights come before
    biases. The other fields are not used but for ``modules``.
    """

    columns: list[tuple[str | None, int]] = field(default_factory=list)
    first: str = ""

    @property
    def key(self) -> str:
        return self.first

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.columns if name is not None]

    @property
    def is_norm(self) -> bool:
        return False

    @property
    def taps(self) -> int:
        return 1

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        found = []
        for name, width in self.columns:
            if name is not None:
                t = tensors[name].T if isinstance(self.module, nn.EmbeddingBag) else tensors[name]
                found.append(t.reshape(t.shape[0], width))
        return torch.cat(found, 1)[None]

    def unpack(self, block: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        out, at = {}, 0
        for name, width in self.columns:
            if name is not None:
                piece = block[0, :, at : at + width]
                piece = piece.T if isinstance(self.module, nn.EmbeddingBag) else piece
                out[name], at = piece.reshape(like[name].shape), at + width
        return out

    def positions(self, module: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        pieces = x.split([width for _, width in self.columns], -1)
        h = torch.cat([piece for piece, (name, _) in zip(pieces, self.columns, strict=True) if name is not None], -1)
        return h.reshape(len(x), -1, 1, h.shape[-1]), gradient.reshape(len(x), -1, 1, gradient.shape[-1])


def receptive_fields(module: nn.Module, x: Tensor) -> Tensor:
    """What every weight of a (transposed) convolution is multiplied with.

    [L, positions, groups, channels, taps].
    """
    channels = module.in_channels
    geometry: dict[str, Any] = {name: getattr(module, name) for name in ("stride", "padding", "dilation")}
    if isinstance(module, TRANSPOSED):
        geometry["output_padding"] = module.output_padding
    probe = type(module)(
        channels,
        channels,
        module.kernel_size,
        groups=channels,
        bias=False,
        padding_mode=module.padding_mode,
        dtype=x.dtype,
        **geometry,
    )
    fields = []
    for tap in itertools.product(*(range(k) for k in module.kernel_size)):
        with torch.no_grad():
            probe.weight.zero_()
            probe.weight[(slice(None), slice(None), *tap)] = 1
            fields.append(probe(x).flatten(2))
    stacked = torch.stack(fields, -1)  # [L, channels, positions, taps]
    length, _, positions, taps = stacked.shape
    return stacked.transpose(1, 2).reshape(length, positions, module.groups, channels // module.groups, taps)


def _normalised(module: nn.Module, x: Tensor) -> Tensor:
    """What a norm layer multiplies with its scale."""
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, eps=module.eps)
    if module.training or module.running_mean is None:
        return F.batch_norm(x, None, None, training=True, eps=module.eps)
    return F.batch_norm(x, module.running_mean, module.running_var, training=False, eps=module.eps)


def _positions_first(module: nn.Module, x: Tensor) -> Tensor:
    """A norm layer's tensor as [L, S, units]."""
    if isinstance(module, LAST_DIM_NORMS):
        units = int(torch.tensor(module.normalized_shape).prod())
        return x.reshape(x.shape[0], -1, units)
    return x.reshape(*x.shape[:2], -1).transpose(1, 2)


def find_layers(
    model: nn.Module,
    *,
    sua: bool = False,
    exclude: Iterable[str] = (),
    trained: Iterable[str] | None = None,
    through: bool = False,
) -> list[Layer]:
    """The layers that have a block; ``trained`` are the names of the parameters that are (all by default).

    A weight under weight or spectral norm has one if ``through``: the parameter of its shape. Modules that share a
    weight are one layer; biases that they do not share are layers of their own, with h = 1.
    """
    exclude = set(exclude)
    chosen = None if trained is None else set(trained)
    names = {
        id(p): name for name, p in model.named_parameters() if p.requires_grad and (chosen is None or name in chosen)
    }
    layers: dict[int, Layer] = {}
    own: list[tuple[nn.Module, str | None]] = []
    wholes: list[Layer] = []
    for name, module in model.named_modules():
        if name in exclude:
            continue
        if isinstance(module, WHOLES):
            wholes += _parts_of(module, names)
        if not isinstance(module, COVERED):
            continue
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if through and isinstance(module, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)):
            weight = normed(module)
        weight_name, bias_name = names.get(id(weight)), names.get(id(bias))
        if weight_name is None and bias_name is None:
            continue
        shared = id(weight if weight_name else bias)
        if shared in layers and isinstance(layers[shared].module, nn.Embedding) and isinstance(module, nn.Linear):
            # An embedding tied to an output layer is a use of that layer with rows and columns exchanged.
            layers[shared] = Layer([module, *layers[shared].modules], weight_name, bias_name)
        elif shared in layers:
            layers[shared].modules.append(module)
            if not isinstance(module, nn.Embedding):
                own.append((module, bias_name))
        else:
            convolution = isinstance(module, CONVOLUTIONS + TRANSPOSED)
            layers[shared] = Layer([module], weight_name, bias_name, sua=sua and convolution)
            owner = model.get_submodule(name.rpartition(".")[0])
            layers[shared].inside = owner if isinstance(owner, nn.MultiheadAttention) else None
    for module, bias_name in own:
        joint = layers[id(module.weight)]
        if joint.bias != bias_name:
            lines = [m for m in joint.modules if not isinstance(m, nn.Embedding)]
            layers |= {id(m.bias): Layer([m], None, names.get(id(m.bias))) for m in lines}
            joint.bias = None
    return [layer for layer in layers.values() if layer.names] + wholes


def normed(module: nn.Module) -> Tensor | None:
    """What weight norm or spectral norm makes the weight of, in its shape; else the weight itself."""
    made = getattr(module, "parametrizations", {})
    if "weight" not in made or len(made["weight"]) != 1:
        return module.weight
    name = {"_WeightNorm": "original1", "_SpectralNorm": "original"}.get(type(made["weight"][0]).__name__)
    return None if name is None else getattr(made["weight"], name)


def _parts_of(module: nn.Module, names: Mapping[int, str]) -> Iterator[Part]:
    """The parts of a whole that train; of one that has parameters made of others, or drops numbers, nothing."""
    drops = isinstance(module, RECURRENT) and module.num_layers > 1 and module.dropout > 0
    if nn.utils.parametrize.is_parametrized(module) or drops:
        return
    for part, columns in parts(module).items():
        found = [(names.get(id(getattr(module, name))), width) for name, width in columns]
        # Its state is kept under the first, by the sides of a recurrent layer: weight and bias, then weight and bias.
        order = sorted(zip(found, columns, strict=True), key=lambda both: "_hh" in both[1][0])
        trained = [name for (name, _), _ in order if name is not None]
        if trained:
            yield Part([module], part, None, columns=found, first=trained[0])


@dataclass
class Observation:
    """What a step's forwards and backwards showed.

    The number of examples, gradients, and (h, delta) by layer; how many positions each example has, where they differ.
    """

    n: int
    gradients: dict[str, Tensor]
    calls: dict[str, tuple[Tensor, Tensor]]
    lengths: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def _zeros_added(layers: Sequence[Layer]) -> Iterator[dict[str, list[tuple[nn.Module, Tensor, Tensor]]]]:
    """While open, every call of a layer adds zeros to its output.

    They are recorded beside the call's input.
    """
    record: dict[str, list[tuple[nn.Module, Tensor, Tensor]]] = {layer.key: [] for layer in layers}

    def replacement(module: nn.Module, key: str) -> Callable[..., Tensor]:
        original = module.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            before = x.detach().clone()
            output = original(x, *args, **kwargs)
            zeros = torch.zeros_like(output, requires_grad=True)
            record[key].append((module, before, zeros))
            return output + zeros

        return forward

    def tap_of(module: nn.Module) -> Callable[[str, Tensor, Tensor], Tensor]:
        own = {layer.weight: layer for layer in layers if isinstance(layer, Part) and layer.module is module}

        def tap(part: str, h: Tensor, y: Tensor) -> Tensor:
            if part not in own:
                return y
            zeros = torch.zeros_like(y, requires_grad=True)
            record[own[part].key].append((module, h.detach().clone(), zeros))
            return y + zeros

        return tap

    wholes = [layer.inside for layer in layers if layer.inside is not None]  # which call their layers by no forward
    try:
        for module in wholes:
            module.forward = plain_forward(module, tap_of(module))
        for layer in layers:
            for module in layer.modules:
                whole = isinstance(layer, Part)
                module.forward = plain_forward(module, tap_of(module)) if whole else replacement(module, layer.key)
        yield record
    finally:
        for module in (*wholes, *(module for layer in layers for module in layer.modules)):
            module.__dict__.pop("forward", None)


def observe(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Any],
    layers: Sequence[Layer],
    *,
    loss_reduction: str = "mean",
    count: Callable[[Any], int] = lambda batch: len(batch[0]),
) -> Observation:
    """Forward and backward over the micro-batches of one step.

    Several calls of a layer in one forward are positions of the same examples; separate micro-batches are
    separate examples. N counts the examples of all micro-batches. Under a mean loss delta is N times the
    output gradient; under a sum the gradient of the parameters is divided by N.
    """
    n = sum(count(batch) for batch in batches)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients: dict[str, Tensor] = {}
    pieces: dict[str, list[tuple[Tensor, Tensor]]] = {layer.key: [] for layer in layers}
    shapes: dict[str, set[tuple[int, bool]]] = {layer.key: set() for layer in layers}
    for batch in batches:
        with _zeros_added(layers) as record:
            value = loss(model, batch)
        zeros = [z for calls in record.values() for _, _, z in calls]
        found = torch.autograd.grad(value, [*parameters.values(), *zeros], allow_unused=True)
        for name, g in zip(parameters, found[: len(parameters)], strict=True):
            if g is not None:
                gradients[name] = gradients[name] + g if name in gradients else g
        of_zeros = {id(z): g for z, g in zip(zeros, found[len(parameters) :], strict=True)}
        for layer in layers:
            h_calls, delta_calls, turned = [], [], []
            for module, x, z in record[layer.key]:
                g = of_zeros[id(z)]
                if g is None or not len(x):
                    continue
                h, delta = layer.positions(module, x, g)
                h_calls.append(h)
                delta_calls.append(delta)
                turned.append(layer.is_turned(module))
            if len(set(turned)) == 2:
                _balance(h_calls, delta_calls, turned)
            here = count(batch)
            if all(len(h) % here == 0 for h in h_calls):
                # A leading dimension of k N is N examples of k positions each, example after example.
                h_calls = [h.reshape(here, -1, *h.shape[2:]) for h in h_calls]
                delta_calls = [delta.reshape(here, -1, *delta.shape[2:]) for delta in delta_calls]
            elif not layer.is_norm:
                # Positions that belong to no example: all of them side by side. Only sums over them are defined.
                h_calls = [h.flatten(0, 1)[None] for h in h_calls]
                delta_calls = [delta.flatten(0, 1)[None] for delta in delta_calls]
            if h_calls:
                pieces[layer.key].append((torch.cat(h_calls, 1), torch.cat(delta_calls, 1)))
                shapes[layer.key].add((pieces[layer.key][-1][0].shape[1], all(len(h) == here for h in h_calls)))
    scale = n if loss_reduction == "mean" else 1
    calls, lengths = {}, {}
    for layer in layers:
        found_here = pieces[layer.key]
        if layer.is_norm:  # only an example's sum has a part in anything
            found_here = [(h[:, :1], delta.sum(1, keepdim=True)) for h, delta in found_here]
        elif len(shapes[layer.key]) > 1 and all(aligned for _, aligned in shapes[layer.key]):
            # Some examples have more positions than others, which get some where nothing is.
            longest = max(h.shape[1] for h, _ in found_here)
            lengths[layer.key] = torch.cat([torch.full((len(h),), h.shape[1]) for h, _ in found_here])
            found_here = [(pad_positions(h, longest), pad_positions(delta, longest)) for h, delta in found_here]
        elif len(shapes[layer.key]) > 1:  # positions of some micro-batches belong to no example: all side by side
            found_here = [(h.flatten(0, 1)[None], delta.flatten(0, 1)[None]) for h, delta in found_here]
            found_here = [tuple(torch.cat(both, 1) for both in zip(*found_here, strict=True))]
        if found_here:
            h, delta = (torch.cat(both) for both in zip(*found_here, strict=True))
            calls[layer.key] = h, delta * scale
    if loss_reduction == "sum":
        gradients = {name: g / n for name, g in gradients.items()}
    return Observation(n, gradients, calls, lengths)


def pad_positions(x: Tensor, positions: int) -> Tensor:
    """[L, S, G, C] with zeros behind its positions."""
    return F.pad(x, (0, 0, 0, 0, 0, positions - x.shape[1]))


def _balance(h: list[Tensor], delta: list[Tensor], turned: list[bool]) -> None:
    """Give h of the turned calls the mean square of the others', and take as much from their delta.

    Products delta h^T stay as they are; without it the factors of a tied weight would depend on the loss's
    scale. The bias column counts as it stands, ones or zeros.
    """
    squares = []
    for which in (False, True):
        of = [t.reshape(-1) for t, is_turned in zip(h, turned, strict=True) if is_turned == which]
        squares.append(torch.cat(of).square().mean())
    if not squares[0]:
        return
    scale = (squares[0] / squares[1]).sqrt()
    for i, is_turned in enumerate(turned):
        if is_turned and squares[1]:
            h[i], delta[i] = h[i] * scale, delta[i] / scale
        elif is_turned:  # no gradient has come to them
            delta[i] = 0 * delta[i]


def example_gradients(h: Tensor, delta: Tensor) -> Tensor:
    """g_n = sum over s of delta h^T: [N, G, O, C]."""
    return torch.einsum("nsgo,nsgc->ngoc", delta, h)


# -------------------------------------------------------------------------------------------------- the maths


def factors(
    h: Tensor,
    delta: Tensor,
    layer: Layer,
    sharing: str = "expand",
    examples: int | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A [G, I, I] and B [G, O, O] of one batch. A norm layer's B is its exact block, its A is one.

    ``examples`` is N where the leading dimension of h is not (positions that belong to no example, or examples
    that do not all come to the layer).
    """
    rows, s = h.shape[:2]
    n = rows if examples is None else examples
    if layer.is_norm:
        g = example_gradients(h, delta)[..., 0]
        return torch.ones(h.shape[2], 1, 1, dtype=h.dtype), torch.einsum("ngo,ngp->gop", g, g) / n
    if sharing == "reduce":
        assert not layer.sua
        h_mean, delta_sum = h.sum(1) / (s if lengths is None else lengths[:, None, None]), delta.sum(1)
        return (
            torch.einsum("ngi,ngj->gij", h_mean, h_mean) / rows,
            torch.einsum("ngo,ngp->gop", delta_sum, delta_sum) / n,
        )
    b = torch.einsum("nsgo,nsgp->gop", delta, delta) / n
    if layer.bias_apart:
        h = h[..., :-1]
    taps = layer.taps
    h = h.reshape(*h.shape[:3], taps, -1)
    terms = rows * s if lengths is None else int(lengths.sum())
    return torch.einsum("nsgti,nsgtj->gij", h, h) / (terms * taps), b


def rounding_alone(calls: Mapping[str, tuple[Tensor, Tensor]], gradients: Mapping[str, Tensor], sharing: str) -> bool:
    """Whether deltas cancel out over positions, or a gradient is zero in exact arithmetic and is not here."""
    sizes = [float(g.abs().max()) for g in gradients.values() if g.numel()]
    if any(0 < size < 1e-13 * max(sizes) for size in sizes):
        return True
    for _, delta in calls.values():
        total = delta.sum(1).abs().amax() if sharing == "reduce" else delta.abs().amax()
        if 0 < float(total) < 1e-13 * float(delta.abs().sum(1).amax()) or 0 < float(delta.abs().amax()) < 1e-13:
            return True
    return False


def eigenbasis(a: Tensor, diagonal: bool) -> Tensor:
    """U of U diag(S) U^T, or the identity for a side that is kept diagonal."""
    if diagonal:
        return torch.eye(a.shape[-1], dtype=a.dtype).expand_as(a).clone()
    return torch.linalg.eigh(a)[1]


def eigenvalues_in(a: Tensor, u: Tensor) -> Tensor:
    """diag(U^T A U), clamped at zero: [G, I]."""
    return torch.diagonal(u.mT @ a @ u, dim1=-2, dim2=-1).clamp(min=0)


def check_basis(a: Tensor, u: Tensor, diagonal: bool, whose: str, tolerance: float = 1e-9) -> None:
    """A basis that the optimizer hands over must be orthonormal and must diagonalise the factor."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    if diagonal:
        torch.testing.assert_close(u, eye.expand_as(u), rtol=0, atol=0)
        return
    torch.testing.assert_close(u.mT @ u, eye.expand_as(u), rtol=0, atol=1e-10)
    rotated = u.mT @ a @ u
    off = rotated - torch.diag_embed(torch.diagonal(rotated, dim1=-2, dim2=-1))
    assert off.abs().max() <= tolerance * a.abs().max() + 1e-300, f"the basis does not diagonalise {whose}"


def over_columns(layer: Layer, per_channel: Tensor) -> Tensor:
    """A basis [G, I, I] as the basis of all columns [G, C, C].

    One copy a tap, and 1 for SUA's bias column.
    """
    blocks = []
    for group in per_channel:
        parts = [group] * layer.taps + ([torch.ones(1, 1, dtype=group.dtype)] if layer.bias_apart else [])
        blocks.append(torch.block_diag(*parts))
    return torch.stack(blocks)


def eigenvalues_over_columns(layer: Layer, s_a: Tensor) -> Tensor:
    """S_A [G, I] at every column: [G, C]; SUA's bias column has A = [1]."""
    parts = [s_a] * layer.taps
    if layer.bias_apart:
        parts.append(torch.ones_like(s_a[:, :1]))
    return torch.cat(parts, -1)


def second_moment(h: Tensor, delta: Tensor, u_a: Tensor, u_b: Tensor, examples: int | None = None) -> Tensor:
    """s*: mean over n of the squares of U_B^T g_n U_A; u_a is the basis of all columns. [G, O, C]."""
    return (u_b.mT @ example_gradients(h, delta) @ u_a).square().sum(0) / (examples or len(h))


def carried(s: Tensor, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """The diagonal, in the new basis, of U diag(s) U^T of the old one.

    By the dense matrices. Bases are (U_A, U_B).
    """
    out = torch.empty_like(s)
    for g in range(s.shape[0]):
        u_old = torch.kron(old[1][g].contiguous(), old[0][g].contiguous())
        u_new = torch.kron(new[1][g].contiguous(), new[0][g].contiguous())
        rotation = u_new.T @ u_old
        out[g] = torch.diagonal(rotation @ torch.diag(s[g].reshape(-1)) @ rotation.T).reshape(s.shape[1:])
    return out


def damped(s: Tensor, eps: float, mode: str, s_a: Tensor | None = None, s_b: Tensor | None = None) -> Tensor:
    """What the gradient is divided by.

    S_A over columns [G, C] and S_B [G, O], absent for a plain diagonal.
    """
    if mode == "plain":
        return s + eps
    if mode == "relative":
        return s + (eps * s.mean()).clamp(min=torch.finfo(s.dtype).tiny)  # a layer without gradient stays put
    if mode == "spectral":
        tiny = torch.finfo(s.dtype).tiny
        if s_a is None or s_b is None:
            return s + (eps * s.max()).clamp(min=tiny)
        lift_a, lift_b = ((eps * x.max(-1, keepdim=True)[0]).clamp(min=tiny**0.5) for x in (s_a, s_b))
        return s + torch.einsum("go,gc->goc", s_b + lift_b, s_a + lift_a) - torch.einsum("go,gc->goc", s_b, s_a)
    assert mode == "factored"
    if s_a is None or s_b is None:
        return s + eps
    return s + eps + eps**0.5 * (s_a.unsqueeze(-2) + s_b.unsqueeze(-1))


def kfac_inverse(g: Tensor, a: Tensor, b: Tensor, eps: float, pi_correction: bool) -> Tensor:
    """(B + sqrt(eps) / pi I)^-1 g (A + pi sqrt(eps) I)^-1 of every group."""
    out = torch.empty_like(g)
    for i in range(len(g)):
        pi = 1.0
        if pi_correction:
            per_a, per_b = a[i].trace() / len(a[i]), b[i].trace() / len(b[i])
            if per_a > 0 and per_b > 0:
                pi = float((per_a / per_b).sqrt())
        left = b[i] + eps**0.5 / pi * torch.eye(len(b[i]), dtype=g.dtype)
        right = a[i] + pi * eps**0.5 * torch.eye(len(a[i]), dtype=g.dtype)
        out[i] = torch.linalg.inv(left) @ g[i] @ torch.linalg.inv(right)
    return out


# ---------------------------------------------------------------------------------------------- the optimizer


@dataclass
class BlockState:
    """A layer's running averages, basis and second moments; U_A and S_A are over all columns."""

    a: Tensor
    b: Tensor
    weight: float = 0.0
    u_a: Tensor | None = None
    u_b: Tensor | None = None
    s_a: Tensor | None = None
    s_b: Tensor | None = None
    s: Tensor | None = None
    s_weight: float = 0.0
    m: Tensor | None = None
    observed: int = 0
    frozen_a: Tensor | None = None
    frozen_b: Tensor | None = None
    fresh: bool = False  #: Whether its last step has renewed the basis, or the inverses.

    @property
    def mean_a(self) -> Tensor:
        return self.a / self.weight

    @property
    def mean_b(self) -> Tensor:
        return self.b / self.weight


Bases = Mapping[str, tuple[Tensor | None, Tensor | None]]


@dataclass
class OracleEKFAC:
    """A dense slow EKFAC (and KFAC, with scaling="inverse"): the weights that each step must give.

    ``step`` takes the micro-batches of a step. ``bases`` are the bases that the optimizer under test used, by
    key, as (U_A, U_B) with shapes [G, I, I] and [G, O, O] or None for a diagonal side: inside a repeated or
    null eigenvalue a basis is not defined by the factor. They are checked against the oracle's own factors
    and taken only when a refresh is due. Without them the oracle decomposes its own factors.
    """

    model: nn.Module
    loss: Loss
    lr: float = 0.01
    scaling: str = "running"
    damping: float | Callable[[int], float] = 1e-3
    damping_mode: str = "plain"
    refresh_every: int = 50
    factor_decay: float = 0.95
    scaling_decay: float | None = None
    on_refresh: str | None = None
    sharing: str = "expand"
    sua: bool = False
    basis: str = "kronecker"
    loss_reduction: str = "mean"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_vectors: bool = True
    cautious_decay: bool = False
    decoupled_weight_decay: bool = True
    maximize: bool = False
    kl_clip: float | None = None
    pi_correction: bool = True
    max_factor_dim: int | None = None
    betas: tuple[float, float] | Callable[[int], tuple[float, float]] = (0.9, 0.999)
    floor: float = 0.005
    spike: float = 10.0
    alpha: float = 0.99
    eps: float = 1e-8
    exclude: Sequence[str] = ()
    trained: Sequence[str] | None = None
    per_parameter: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    count: Callable[[Any], int] = lambda batch: len(batch[0])
    tolerance: float = 1e-9  # of bases that are handed over
    steps: int = 0

    def __post_init__(self) -> None:
        self.layers: list[Layer] = []
        self.blocks: dict[str, BlockState] = {}
        self.diagonals: dict[str, BlockState] = {}
        self.put_away: dict[tuple[str, Any], BlockState] = {}
        self.velocity: dict[str, Tensor] = {}
        self.noise = False  #: Whether a gradient or a B was zero but for rounding, so that no step is defined.
        if self.scaling_decay is None:
            self.scaling_decay = 0.0 if self.scaling == "per_example" else 0.95
        if self.on_refresh is None:
            self.on_refresh = "kronecker" if self.scaling in ("running", "anchored") else "carry"

    def option(self, parameter: str, name: str) -> Any:
        value = self.per_parameter.get(parameter, {}).get(name, getattr(self, name))
        return value(self.steps) if callable(value) else value

    def diagonal_sides(self, layer: Layer, a: Tensor, b: Tensor) -> tuple[bool, bool]:
        """Which sides keep the identity as basis."""
        limit = self.max_factor_dim or 10**9
        everywhere = self.basis == "identity"
        return (
            everywhere or isinstance(layer.module, (nn.Embedding, nn.EmbeddingBag)) or a.shape[-1] > limit,
            everywhere or b.shape[-1] > limit,
        )

    def step(
        self,
        batches: Sequence[Any],
        *,
        bases: Bases | None = None,
        transform: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        statistics: tuple[Loss, Sequence[Any]] | None = None,
    ) -> dict[str, Tensor]:
        """One step on the micro-batches; ``transform`` is what the user does to ``.grad`` (clipping, say).

        ``statistics`` is another loss and its batches, which factors and s* are taken from. A layer whose
        trained parameters have changed since the last step starts anew, or where it was when they were the same.
        """
        before = {layer.key: tuple(layer.names) for layer in self.layers}
        self.layers = find_layers(
            self.model, sua=self.sua, exclude=self.exclude, trained=self.trained, through=self.scaling in TORCHS
        )
        now = {layer.key: tuple(layer.names) for layer in self.layers}
        for key in [key for key in self.blocks if now.get(key) != before.get(key)]:
            self.put_away[key, before.get(key)] = self.blocks.pop(key)
        for key, names in now.items():
            if key not in self.blocks and (key, names) in self.put_away:
                self.blocks[key] = self.put_away.pop((key, names))
        seen = observe(
            self.model, self.loss, batches, self.layers, loss_reduction=self.loss_reduction, count=self.count
        )
        measured = seen
        if statistics is not None:
            measured = observe(
                self.model,
                statistics[0],
                statistics[1],
                self.layers,
                loss_reduction=self.loss_reduction,
                count=self.count,
            )
        parameters = {
            name: p
            for name, p in self.model.named_parameters()
            if p.requires_grad and (self.trained is None or name in self.trained)
        }
        seen.gradients = {name: g for name, g in seen.gradients.items() if name in parameters}
        for name in [name for name in self.diagonals if name not in parameters]:
            self.put_away[name, None] = self.diagonals.pop(name)
        for name in [name for name in parameters if (name, None) in self.put_away]:
            self.diagonals[name] = self.put_away.pop((name, None))
        wanted = dict(seen.gradients) if transform is None else transform(dict(seen.gradients))
        for name in wanted:
            if self.maximize:
                wanted[name] = -wanted[name]
            if not self.option(name, "decoupled_weight_decay"):
                wanted[name] = wanted[name] + self.option(name, "weight_decay") * parameters[name].detach()

        directions: dict[str, Tensor] = {}
        covered: set[str] = set()
        self.noise |= rounding_alone(measured.calls, seen.gradients, self.sharing)
        for layer in self.layers:
            if layer.key in measured.calls and all(name in wanted for name in layer.names):
                covered |= set(layer.names)
                h, delta = measured.calls[layer.key]
                raw, g = layer.pack(self._squared(seen.gradients, wanted)), layer.pack(wanted)
                p = self._block_direction(
                    layer, h, delta, raw, g, seen.n, bases, measured.n, measured.lengths.get(layer.key)
                )
                directions |= layer.unpack(p, wanted)
        for name, g in wanted.items():
            if name not in covered:
                raw = self._squared(seen.gradients, wanted)[name]
                directions[name] = self._diagonal_direction(name, raw, g, seen.n)

        if self.kl_clip is not None:
            total = sum(
                self.option(name, "lr") ** 2 * float((wanted[name] * p).sum()) for name, p in directions.items()
            )
            nu = min(1.0, (self.kl_clip / total) ** 0.5) if total > 0 else 1.0
            directions = {name: nu * p for name, p in directions.items()}

        with torch.no_grad():
            for name, p in directions.items():
                lr, mu = self.option(name, "lr"), self.option(name, "momentum")
                if mu:
                    self.velocity[name] = mu * self.velocity.get(name, torch.zeros_like(p)) + p
                    p = p + mu * self.velocity[name] if self.option(name, "nesterov") else self.velocity[name]
                table = isinstance(self.model.get_submodule(name.rpartition(".")[0]), (nn.Embedding, nn.EmbeddingBag))
                shrinks = self.option(name, "decay_vectors") or (parameters[name].dim() > 1 and not table)
                if shrinks and self.option(name, "decoupled_weight_decay"):
                    part = (
                        (1e3 * p * parameters[name].sign()).clamp(0, 1) if self.option(name, "cautious_decay") else 1.0
                    )
                    parameters[name].mul_(1 - lr * self.option(name, "weight_decay") * part)
                parameters[name].sub_(lr * p)
        self.steps += 1
        return {name: p.detach().clone() for name, p in parameters.items()}

    def _squared(self, gradients: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The gradients whose squares are averaged: as backward left them; Adam-like rules take those of the step."""
        return wanted if self.scaling in TORCHS else gradients

    # --------------------------------------------------------------------------------------------- one layer

    def _block_direction(
        self,
        layer: Layer,
        h: Tensor,
        delta: Tensor,
        raw: Tensor,
        g: Tensor,
        n: int,
        bases: Bases | None,
        n_measured: int,
        lengths: Tensor | None = None,
    ) -> Tensor:
        a, b = factors(h, delta, layer, self.sharing, n_measured, lengths)
        diagonal_a, diagonal_b = self.diagonal_sides(layer, a, b)
        if diagonal_a:
            a = torch.diag_embed(torch.diagonal(a, dim1=-2, dim2=-1))
        if diagonal_b:
            b = torch.diag_embed(torch.diagonal(b, dim1=-2, dim2=-1))
        state = self.blocks.setdefault(layer.key, BlockState(torch.zeros_like(a), torch.zeros_like(b)))
        rho = self.factor_decay
        state.a = rho * state.a + (1 - rho) * n_measured * a
        state.b = rho * state.b + (1 - rho) * n_measured * b
        state.weight = rho * state.weight + (1 - rho) * n_measured
        eps = self.option(layer.key, "damping")
        due = self.steps % self.refresh_every == 0 or (state.s_a is None and state.frozen_a is None)
        state.fresh = due

        if self.scaling == "inverse":
            if due:
                state.frozen_a, state.frozen_b = state.mean_a, state.mean_b
            assert state.frozen_a is not None and state.frozen_b is not None
            return self._kfac_direction(layer, g, state.frozen_a, state.frozen_b, eps)

        if due:
            self._refresh(layer, state, diagonal_a, diagonal_b, bases)
        assert state.u_a is not None and state.u_b is not None
        projected = state.u_b.mT @ raw @ state.u_a
        if self.scaling in TORCHS:
            ratio = self._adaptive(state, projected, state.u_b.mT @ g @ state.u_a)
        elif self.scaling == "anchored":
            ratio = self._anchored(state, projected, state.u_b.mT @ g @ state.u_a, n, eps)
        else:
            self._scale(state, projected, second_moment(h, delta, state.u_a, state.u_b, n_measured), n)
            s = state.s / state.s_weight if self.scaling == "per_example" else state.s
            ratio = (state.u_b.mT @ g @ state.u_a) / damped(s, eps, self.damping_mode, state.s_a, state.s_b)
        return state.u_b @ ratio @ state.u_a.mT

    def _kfac_direction(self, layer: Layer, g: Tensor, a: Tensor, b: Tensor, eps: float) -> Tensor:
        """Every tap by the same two inverses; SUA's bias is a block of its own with A = [1]."""
        parts, width = [], a.shape[-1]
        for tap in range(layer.taps):
            piece = g[..., tap * width : (tap + 1) * width]
            parts.append(kfac_inverse(piece, a, b, eps, self.pi_correction))
        if layer.bias_apart:
            one = torch.ones(g.shape[0], 1, 1, dtype=g.dtype)
            parts.append(kfac_inverse(g[..., -1:], one, b, eps, self.pi_correction))
        return torch.cat(parts, -1)

    def _refresh(
        self, layer: Layer, state: BlockState, diagonal_a: bool, diagonal_b: bool, bases: Bases | None
    ) -> None:
        a, b = state.mean_a, state.mean_b
        u_a, u_b = eigenbasis(a, diagonal_a), eigenbasis(b, diagonal_b)
        if bases is not None:
            given_a, given_b = bases[layer.key]
            u_a = u_a if given_a is None else given_a
            u_b = u_b if given_b is None else given_b
            for given, diagonal, factor in ((given_a, diagonal_a, a), (given_b, diagonal_b, b)):
                assert (given is None) == diagonal or factor.shape[-1] == 1, "a side is wrongly diagonal or not"
            check_basis(a, u_a, diagonal_a, f"A of {layer.key}", self.tolerance)
            check_basis(b, u_b, diagonal_b, f"B of {layer.key}", self.tolerance)
        new = (over_columns(layer, u_a), u_b)
        if state.u_a is not None and state.u_b is not None:
            old = (state.u_a, state.u_b)
            if state.s is not None:
                state.s = carried(state.s, old, new)
            if state.m is not None:
                rotation_a, rotation_b = new[0].mT @ old[0], new[1].mT @ old[1]
                state.m = rotation_b @ state.m @ rotation_a.mT
        state.u_a, state.u_b = new
        state.s_a = eigenvalues_over_columns(layer, eigenvalues_in(a, u_a))
        state.s_b = eigenvalues_in(b, u_b)
        kronecker = state.s_b.unsqueeze(-1) * state.s_a.unsqueeze(-2)
        if self.scaling == "kronecker" or (
            self.scaling in ("running", "anchored") and (state.s is None or self.on_refresh == "kronecker")
        ):
            state.s = kronecker
        elif self.scaling == "per_example" and self.on_refresh == "kronecker":
            state.s, state.s_weight = None, 0.0  # bias correction gives the average's start no weight

    def _scale(self, state: BlockState, g: Tensor, s_star: Tensor, n: int) -> None:
        rho = self.scaling_decay
        assert rho is not None
        if self.scaling == "per_example":
            before = torch.zeros_like(s_star) if state.s is None else state.s
            state.s = rho * before + (1 - rho) * s_star
            state.s_weight = rho * state.s_weight + (1 - rho)
        elif self.scaling == "running":
            state.s = rho * state.s + (1 - rho) * n * g.square()

    def _adaptive(self, state: BlockState, raw: Tensor, g: Tensor) -> Tensor:
        """The default's rule, or torch's Adam, RMSprop or Adagrad, on the coordinates.

        Second moments are fed with the gradient that the step uses.
        """
        if state.s is None or state.m is None:
            state.s, state.m = torch.zeros_like(g), torch.zeros_like(g)
        state.observed += 1
        if self.scaling == "adagrad":
            state.s = state.s + raw.square()
            return g / (state.s.sqrt() + self.eps)
        if self.scaling == "rmsprop":
            state.s = self.alpha * state.s + (1 - self.alpha) * raw.square()
            return g / (state.s.sqrt() + self.eps)
        beta_1, beta_2 = self.betas(self.steps) if callable(self.betas) else self.betas
        if self.scaling == "belief":
            return self._belief(state, raw, g, beta_1, beta_2)
        state.m = beta_1 * state.m + (1 - beta_1) * g
        state.s = beta_2 * state.s + (1 - beta_2) * raw.square()
        mean, square = (x / (1 - b**state.observed) for x, b in ((state.m, beta_1), (state.s, beta_2)))
        return mean / (square.sqrt() + self.eps)

    def _belief(self, state: BlockState, raw: Tensor, g: Tensor, beta_1: float, beta_2: float) -> Tensor:
        """AdaBelief with kappa times the mean's square for a floor, mean square at most 1, and spikes shortened.

        Coordinates in which the mean points against the gradient wait; the others are enlarged to the same length.

        A gradient counts as a spike when its length is more than ``spike`` times sqrt(|m|^2 + sum of s).
        """
        t = state.observed
        noise, factor, usual = torch.zeros_like(g), 1.0, 0.0
        if t > 1:
            mean, square = state.m / (1 - beta_1 ** (t - 1)), state.s / (1 - beta_2 ** (t - 1))
            usual = float(mean.square().sum() + square.sum()) ** 0.5
            if usual > 0 and float(raw.norm()) > self.spike * usual:
                factor = self.spike * usual / float(raw.norm())
            noise = factor * raw - mean
        state.m = beta_1 * state.m + (1 - beta_1) * factor * g
        mean = state.m / (1 - beta_1**t)
        state.s = beta_2 * state.s + (1 - beta_2) * ((1 + beta_1) / 2 * noise**2 + self.floor * mean**2)
        size = ((usual**2 + float(raw.square().sum())) / raw.numel()) ** 0.5
        eps = self.eps * min(1.0, max(size / 1e-6, 1e-10))  # less where gradients are faint
        x = mean / ((state.s / (1 - beta_2**t)).sqrt() + eps)
        # Of a coordinate of the gradient that is zero but for rounding no sign is defined.
        self.noise |= bool(((g != 0) & (g.abs() < 1e-12 * g.abs().max()) & (x.abs() > 1e-8)).any())
        agrees = torch.where(x * g < 0, 0.0, x)
        if float(agrees.norm()) > 0:
            x = agrees * min(2.0, float(x.norm() / agrees.norm()))
        else:
            x = agrees
        return x / max(1.0, float(x.square().mean()) ** 0.5)

    def _anchored(self, state: BlockState, raw: Tensor, g: Tensor, n: int, eps: float) -> Tensor:
        """EKFAC-ra's s; the direction is the mean gradient by sqrt(damped s / N). Spikes are shortened."""
        assert state.s is not None and self.scaling_decay is not None
        if state.m is None:
            state.m = torch.zeros_like(g)
        elif float(raw.square().sum()) > 100 * (usual := float(state.m.square().sum() + state.s.sum() / n)) > 0:
            factor = (100 * usual / float(raw.square().sum())) ** 0.5
            raw, g = factor * raw, factor * g
        state.observed += 1
        state.s = self.scaling_decay * state.s + (1 - self.scaling_decay) * n * raw.square()
        beta = (self.betas(self.steps) if callable(self.betas) else self.betas)[0]
        state.m = beta * state.m + (1 - beta) * g
        mean = state.m / (1 - beta**state.observed)
        return mean / (damped(state.s, eps, self.damping_mode, state.s_a, state.s_b) / n).sqrt()

    # ----------------------------------------------------------------------------- parameters without a block

    def _diagonal_direction(self, name: str, raw: Tensor, g: Tensor, n: int) -> Tensor:
        """``running`` with the identity as basis, started at the first N g^2; it averages where others do not.

        An adaptive rule of the others is the rule here too.
        """
        state = self.diagonals.setdefault(name, BlockState(raw, raw))
        if self.scaling in TORCHS:
            return self._adaptive(state, raw, g)
        rho = self.scaling_decay
        assert rho is not None
        if self.scaling == "anchored":
            state.s = n * raw.square() if state.s is None else state.s
            return self._anchored(state, raw, g, n, self.option(name, "damping"))
        if self.scaling != "running":
            rho = rho or 0.95
        start = n * raw.square() if state.s is None else state.s
        state.s = rho * start + (1 - rho) * n * raw.square()
        return g / damped(state.s, self.option(name, "damping"), self.damping_mode)
