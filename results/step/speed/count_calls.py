"""How many kernels the graph of a plain step holds, counted on a CPU: aten calls that are no views, by operator.

python results/step/speed/count_calls.py [--fused]

The auto-encoder of eight layers, the step as ``StepGraphs.run`` records it. With ``--fused`` the rule counts as the
three launches that it is on a GPU; they are not run.
"""

import collections
import itertools
import sys
from dataclasses import replace

sys.path.insert(0, "src")

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ekfac
from ekfac.optim.cuda.executor import CudaExecutor
from ekfac.optim.cuda.step_graphs import at_places, numbers_of, tensors_of

#: Calls that launch nothing.
FREE = ("empty", "new_empty", "view", "alias", "detach", "expand", "select", "slice", "split", "unbind",
        "unsqueeze", "squeeze", "transpose", "permute", "as_strided", "t.", "_unsafe_view", "reshape", "item",
        "_local_scalar", "lift_fresh")  # fmt: skip


class Count(TorchDispatchMode):
    """Count calls by name."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).removeprefix("aten.")
        if not name.startswith(FREE) and not (name.startswith("_to_copy") and not args[0].numel()):
            self.calls[name] += 1
        return function(*args, **(kwargs or {}))


def auto_encoder():
    """Return the auto-encoder of eight layers."""
    widths = [784, 1000, 500, 250, 30]
    dims, layers = widths + widths[-2::-1], []
    for i, (a, b) in enumerate(itertools.pairwise(dims)):
        layers += [nn.Linear(a, b)] + ([nn.Sigmoid()] if i not in (3, 7) else [])
    return nn.Sequential(*layers)


def main():
    """Count the calls of a plain step."""
    torch.manual_seed(0)
    model = auto_encoder()
    opt = ekfac.EKFAC(model)
    for t in range(4):
        x = torch.rand(20, 784)
        opt.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        if t < 3:
            opt.step()
    engine = opt.engine
    engine.executor = executor = CudaExecutor(engine.options, True, torch.device("cpu"))
    engine.refresher.executor = engine.collector.executor = executor
    if "--fused" in sys.argv:
        from ekfac.optim.cuda import fused

        fused.DEVICES.add("cpu")
        fused.runs_on = lambda *_: True
        fused.launch = launched
    kept = []

    def take(given, inputs, rates, apply):
        inputs = replace(inputs, calls={}, samples={}, sums={})
        known, numbers = {}, torch.tensor([float(v) for v in numbers_of(inputs, rates)], dtype=torch.float64)
        placed, placed_rates = at_places(inputs, rates, known, iter(numbers.unbind()), True)
        torch._foreach_copy_(list(tensors_of(placed)), list(tensors_of(inputs)))
        with torch.no_grad(), Count() as count:
            executor.step_graphs.run(engine, placed, placed_rates, apply)
        kept.append(count.calls)
        return True

    executor.replay = take
    engine.schedule.takes_factors = lambda block: False
    opt.step()
    for name, calls in sorted(kept[0].items(), key=lambda item: -item[1]):
        print(f"{calls:5d}  {name}")
    print(f"{sum(kept[0].values()):5d}  in all")


def launched(rule, state, step):
    """Stand in for three launches."""
    for _ in range(3):
        torch.ops.aten.zero_(step.g.new_empty(1))
    return torch.empty_like(step.g)


if __name__ == "__main__":
    main()
