"""What a plain step costs the host, without a GPU: steps are "replayed" by nothing, on tiny tensors.

python results/step/speed/host_cost.py [autoencoder|resnet18] [--graphed] [--profile] [--rule per_example]

Milliseconds a step of zero_grad and step, and of what the model's own hooks add to forward and backward; torch's own
calls are those of a CPU, about a fifth of a GPU's.
"""

import contextlib
import cProfile
import gc
import pstats
import sys
import time

import torch
from torch import nn

import ekfac
from ekfac.lab.networks.convolutional import resnet18
from ekfac.lab.networks.paper import autoencoder
from ekfac.optim.cuda import executor, nonfinite, step_graphs
from ekfac.optim.executor import Answer


class Graph:
    def replay(self):
        pass


class Stream:
    cuda_stream = 0


@contextlib.contextmanager
def graph(place, pool, stream, capture_error_mode):
    yield


class Pinned(Answer):
    """One that is there at once."""

    late = True


def run(graphs, engine, inputs, rates, apply):
    inputs.ok = torch.ones((), dtype=torch.float64)


def stand_in():
    torch.cuda.CUDAGraph, torch.cuda.graph, torch.cuda.graph_pool_handle = Graph, graph, lambda: (0, 0)
    torch.cuda.Stream, torch.cuda.current_stream = lambda *a, **k: Stream(), lambda *a: Stream()
    torch.cuda.set_stream, torch.cuda.synchronize = lambda s: None, lambda *a: None
    step_graphs.StepGraphs.run = run
    nonfinite.PinnedReadback = Pinned
    executor.PinnedReadback = Pinned
    import ekfac.optim.statistics.collector as collector

    collector.may_use_rows = lambda block, options: False
    executor.CudaExecutor.graphs_possible = lambda self, device: True
    executor.CudaExecutor.check_finite = lambda self, sizes, wait: (True, self.mask.mask(sizes))
    import ekfac.optim.engine as engine

    engine.make_executor = lambda *given: executor.CudaExecutor(*given[:2], torch.device("cpu"))


def main():
    torch.set_num_threads(1)
    stand_in()
    name = sys.argv[1]
    torch.manual_seed(0)
    model = autoencoder(40) if name == "autoencoder" else resnet18(4)
    x = torch.rand(4, 784) if name == "autoencoder" else torch.rand(2, 3, 32, 32)
    rule = {"scaling": sys.argv[sys.argv.index("--rule") + 1], "damping": 1e-2, "lr": 1e-3} if "--rule" in sys.argv else {}
    opt = ekfac.EKFAC(model, refresh=ekfac.Refresh(factor_every=10**6), refresh_every=10**6, **rule)
    adamw = torch.optim.AdamW(model.parameters(), fused=True)

    from ekfac.optim.cuda import graphed

    graphed.GraphedStep._needs_gradients_alone = lambda self, inputs: (
        not self.optimizer.engine.shares() and self.optimizer.engine.collector.capture.nothing_to_learn()
    )
    whole = ekfac.graphed(opt, lambda x: model(x).square().mean().backward()) if "--graphed" in sys.argv else None

    def step(opt, spent):
        if whole is not None and isinstance(opt, ekfac.EKFAC):
            t = time.perf_counter()
            whole(x)
            spent[0] += time.perf_counter() - t
            return
        t = [time.perf_counter()]
        opt.zero_grad()
        t.append(time.perf_counter())
        loss = model(x).square().mean()
        t.append(time.perf_counter())
        loss.backward()
        t.append(time.perf_counter())
        opt.step()
        t.append(time.perf_counter())
        for i in range(4):
            spent[i] += t[i + 1] - t[i]

    for _ in range(110):
        step(opt, [0] * 4)
    replays = opt.engine.executor.step_graphs.replays
    gc.disable()

    def median(opt, n=60):
        rows = []
        for _ in range(n):
            row = [0.0] * 4
            step(opt, row)
            rows.append(row)
        return [round(1e3 * sorted(r[i] for r in rows)[n // 2], 3) for i in range(4)]

    found = median(opt)
    if "--profile" in sys.argv:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(60):
            step(opt, [0] * 4)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    assert whole is None or whole.replays > 60
    assert opt.engine.executor.step_graphs.replays > replays
    opt.close()
    print(name, "zero_grad, forward, backward, step: EKFAC", found, "AdamW", median(adamw))


if __name__ == "__main__":
    main()
