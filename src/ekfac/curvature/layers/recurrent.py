"""LSTM, GRU and RNN, and their cells: all gates of a layer and direction are one block, time steps are positions.

Hooks cannot see inside them, so a call is recomputed in the backward pass, step by step, with zeros added to the gates'
pre-activations. The gradients of those zeros are exactly the deltas; h is the input and the previous state.

* LSTM and RNN: the gates read W_ih x + b_ih + W_hh h + b_hh, so the two weights and two biases form one matrix, with
  h = (x_t, h_{t-1}, 1, 1).
* GRU: its reset gate multiplies W_hh h + b_hh inside the candidate, so input and state have different deltas and two
  blocks, "ih" and "hh".
* The W_hr of an LSTM with projections is a separate block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ekfac.curvature.factors import no_autocast
from ekfac.curvature.layers.base import Layer, Reading
from ekfac.curvature.layers.linear import LinearLayer

Recurrent = (nn.LSTM, nn.GRU, nn.RNN)
Cells = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)

#: Adds zeros to a tensor and records them together with h: (part, h, tensor).
Tap = Callable[[str, Tensor, Tensor], Tensor]


def suffixes(module: Any) -> list[str]:
    """Return the suffixes of parameters' names, one per layer and direction, in order; "" for a cell."""
    if isinstance(module, nn.RNNCellBase):
        return [""]
    directions = ("", "_reverse") if module.bidirectional else ("",)
    return [f"_l{layer}{direction}" for layer in range(module.num_layers) for direction in directions]


def step(module: Any, suffix: str, x: Tensor, state: tuple[Tensor, ...], weights: Weights, tap: Tap) -> Any:
    """Take one time step of a layer in one direction; return the new state, hidden state first."""
    h = state[0]
    split = isinstance(module, (nn.GRU, nn.GRUCell))
    by_input = weights.product("ih", suffix, x)
    by_state = weights.product("hh", suffix, h)
    if split:
        by_input, by_state = tap("ih" + suffix, x, by_input), tap("hh" + suffix, h, by_state)
        r, z, n = by_input.chunk(3, -1)
        r_h, z_h, n_h = by_state.chunk(3, -1)
        r, z = torch.sigmoid(r + r_h), torch.sigmoid(z + z_h)
        n = torch.tanh(n + r * n_h)
        return (n + z * (h - n),)
    gates = tap(suffix.lstrip("_"), torch.cat([x, h], -1), by_input + by_state)
    if isinstance(module, (nn.RNN, nn.RNNCell)):
        return (torch.relu(gates) if module.nonlinearity == "relu" else torch.tanh(gates),)
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    if getattr(module, "proj_size", 0):
        h = tap("hr" + suffix, h, weights.product("hr", suffix, h))
    return h, c


class Weights:
    """A module's weights and biases, detached, in the dtype of its input."""

    def __init__(self, module: nn.Module, like: Tensor) -> None:
        self._of = {name: p.detach().to(like.dtype) for name, p in module.named_parameters(recurse=False)}

    def product(self, which: str, suffix: str, x: Tensor) -> Tensor:
        """Return W x + b, of the input ("ih"), the state ("hh") or the projection ("hr")."""
        product = x @ self._of[f"weight_{which}{suffix}"].T
        bias = self._of.get(f"bias_{which}{suffix}")
        return product if bias is None else product + bias


class RecurrentReading(Reading):
    """Recomputes a call, with the gradients of its gates."""

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the input ``[T, N, in]``, which examples are live at each step, their order, and initial states."""
        given = [*args, *(kwargs[name] for name in ("input", "hx") if name in kwargs)]
        x, hx = given[0], given[1] if len(given) > 1 else None
        live = order = torch.empty(0, device="cpu")
        if isinstance(x, PackedSequence):
            n = int(x.batch_sizes[0])
            order = order if x.sorted_indices is None else x.sorted_indices
            live = (torch.arange(n, device="cpu") < x.batch_sizes[:, None]).to(x.data.device)
            x = x.data.new_zeros(*live.shape, x.data.shape[-1]).masked_scatter(live[..., None], x.data)
        elif isinstance(self.module, nn.RNNCellBase):
            x = x.reshape(1, -1, x.shape[-1])
        elif x.dim() == 2:
            x = x[:, None]
        elif self.module.batch_first:
            x = x.transpose(0, 1)
        states = [] if hx is None else [hx] if isinstance(hx, Tensor) else list(hx)
        states = [s.reshape(-1, x.shape[1], s.shape[-1]) for s in states]
        return [x, live, order, *(s[:, order] if len(order) else s for s in states)]

    def examples(self, kept: Sequence[Tensor]) -> int:
        return kept[0].shape[1]

    def read(self, kept: Sequence[Tensor], grads: Sequence[Tensor | None]) -> dict[str, tuple[Tensor, Tensor]]:
        x, live, order, *states = kept
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        taps: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        time = 0

        def tap(part: str, h: Tensor, value: Tensor) -> Tensor:
            zeros = torch.zeros_like(value, requires_grad=True)
            taps.setdefault(part, []).append((time, h.detach(), zeros))
            return value + zeros

        weights = Weights(self.module, x)
        with torch.enable_grad(), no_autocast(x.device):
            ends = self._initial(x, states)
            for layer, group in enumerate(self._layers()):
                outputs = []
                for at, suffix in enumerate(group, layer * len(group)):
                    state, out = ends[at], [x[0]] * len(x)
                    for time in reversed(range(len(x))) if suffix.endswith("_reverse") else range(len(x)):
                        new = step(self.module, suffix, x[time], state, weights, tap)
                        if len(live):  # examples outside their sequence keep their state
                            here = live[time][:, None]
                            new = tuple(torch.where(here, a, b) for a, b in zip(new, state, strict=True))
                        state = new
                        out[time] = state[0]
                    ends[at] = state
                    outputs.append(torch.stack(out))
                x = torch.cat(outputs, -1)
            results = self._results(x, ends, live, order)
            pairs = [(r, g.to(r.dtype)) for r, g in zip(results, grads, strict=True) if g is not None]
            zeros = [z for calls in taps.values() for _, _, z in calls]
            found = torch.autograd.grad(
                [r.reshape(g.shape) for r, g in pairs], zeros, [g for _, g in pairs], allow_unused=True
            )
        deltas = dict(zip(map(id, zeros), found, strict=True))
        return {part: self._stacked(calls, deltas, live) for part, calls in taps.items()}

    def _layers(self) -> Iterator[list[str]]:
        names = suffixes(self.module)
        each = 2 if getattr(self.module, "bidirectional", False) else 1
        for start in range(0, len(names), each):
            yield names[start : start + each]

    def _initial(self, x: Tensor, states: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the initial state of each layer and direction."""
        m, count = self.module, len(suffixes(self.module))
        if states:
            return [tuple(s[i].to(x.dtype) for s in states) for i in range(count)]
        widths = [getattr(m, "proj_size", 0) or m.hidden_size]
        widths += [m.hidden_size] if isinstance(m, (nn.LSTM, nn.LSTMCell)) else []
        return [tuple(x.new_zeros(x.shape[1], w) for w in widths)] * count

    def _results(self, x: Tensor, ends: list[tuple[Tensor, ...]], live: Tensor, order: Tensor) -> list[Tensor]:
        """Return the tensors that the module returns, in its order and layout."""
        m = self.module
        if isinstance(m, nn.RNNCellBase):
            return list(ends[0])
        last = [torch.stack(s) for s in zip(*ends, strict=True)]
        last = [s[:, order.argsort()] for s in last] if len(order) else last
        if len(live):
            return [x[live], *last]
        return [x.transpose(0, 1) if m.batch_first else x, *last]

    def _stacked(
        self, calls: list[tuple[int, Tensor, Tensor]], deltas: Mapping[int, Tensor | None], live: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return h and delta of all time steps, examples first; for packed sequences, all steps in one row."""
        calls = sorted(calls, key=lambda call: call[0])
        h = torch.stack([h for _, h, _ in calls])
        d = torch.stack([z.detach() if deltas[id(z)] is None else deltas[id(z)] for _, _, z in calls])  # type: ignore
        if len(live):
            return h[live][None], d[live][None]
        return h.transpose(0, 1), d.transpose(0, 1)


class RecurrentLayer(LinearLayer):
    """A part of ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` or one of their cells."""

    reading = RecurrentReading
    takes_half = False
    rough_in_half = True
    unsupported_form = "derived weights, or dropout between its layers, so its calls cannot be recomputed"

    def __init__(self, module: nn.Module, roles: frozenset[str], *, sua: bool = False, part: str = "") -> None:
        self.part = part
        super().__init__(module, roles)

    @classmethod
    def supports(cls, module: nn.Module) -> bool:
        """Return whether a call can be recomputed: not with dropout between layers, which draws random numbers.

        Nor if a weight is not the module's own parameter, such as one computed by weight norm.
        """
        drops = getattr(module, "dropout", 0) > 0 and getattr(module, "num_layers", 1) > 1
        names = [name for part in cls.parts(module).values() for name in part if module.bias or "weight" in name]
        return not drops and all(name in module._parameters for name in names)

    @classmethod
    def parts(cls, module: nn.Module) -> Mapping[str, Sequence[str]]:
        """Return one part per layer and direction (two for a GRU), and one per projection."""
        found: dict[str, Sequence[str]] = {}
        for suffix in suffixes(module):
            both = {which: (f"weight_{which}{suffix}", f"bias_{which}{suffix}") for which in ("ih", "hh")}
            if isinstance(module, (nn.GRU, nn.GRUCell)):
                found |= {which + suffix: names for which, names in both.items()}
            else:
                found[suffix.lstrip("_")] = [*both["ih"], *both["hh"]]
            if getattr(module, "proj_size", 0):
                found["hr" + suffix] = [f"weight_hr{suffix}"]
        return found

    @classmethod
    def of_part(cls, module: nn.Module, part: str, roles: frozenset[str], *, sua: bool = False) -> Layer:
        return cls(module, roles, part=part)

    def layout(self) -> tuple[Mapping[str, int], Sequence[str], int]:
        names = self.parts(self.module)[self.part]
        weights = {name: getattr(self.module, name) for name in names if name.startswith("weight")}
        biases = [name for name in names if name.startswith("bias")]
        return {name: w.shape[1] for name, w in weights.items()}, biases, next(iter(weights.values())).shape[0]
