"""What `ekfac.graphed` and its graphs take one by one: python results/step/speed/graphed_parts.py autoencoder resnet18

After 330 steps: milliseconds of a step as it is, of one that neither refreshes nor takes anything in, of the host alone,
and of each recorded graph replayed by itself, which includes its launch.
"""

import json
import sys
import time

sys.path[:0] = ["src", "benchmarks"]

import torch
from bench_networks import networks

import ekfac


def timed(function, times, device):
    """Return wall and host milliseconds of a call."""
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(3):
        function()
    sync()
    began = time.perf_counter()
    for _ in range(times):
        function()
    host = time.perf_counter() - began
    sync()
    return round(1e3 * (time.perf_counter() - began) / times, 3), round(1e3 * host / times, 3)


def main():
    """Measure, and print a line a network."""
    tiny = "--tiny" in sys.argv
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in [word for word in sys.argv[1:] if not word.startswith("--")]:
        network, found = networks(tiny)[name], {}
        for kind, options in (
            ("usual", {}),
            ("nothing due", {"refresh_every": 10**6, "refresh": ekfac.Refresh(factor_every=10**6)}),
        ):
            torch.manual_seed(0)
            model, batch = network.make().to(device), tuple(t.to(device) for t in network.batch())
            opt = ekfac.EKFAC(model, **options)

            def backward(*batch, model=model, network=network):
                with torch.autocast(device.type, torch.bfloat16, enabled=network.half):
                    output = model(*batch)
                network.loss(output, batch).backward()

            step = ekfac.graphed(opt, backward)
            for _ in range(3 if tiny else 330):
                step(*batch)
            found[kind] = timed(lambda step=step, batch=batch: step(*batch), 2 if tiny else 80, device)
            if device.type == "cuda":
                executor, fresh = opt.engine.executor, 20
                found[kind + ", host alone"] = timed(lambda: [step(*batch), torch.cuda.synchronize()], fresh, device)
                passes = [timed(one.graph.replay, fresh, device)[0] for one in step._recorded.values()]
                steps = [timed(one.graph.replay, fresh, device)[0] for one in executor.step_graphs._recorded.values()]
                refreshes = [timed(g[0].replay, fresh, device)[0] for g in executor.replays["a refresh"]._graphs.values()]
                found[kind + ", graphs"] = {"pass": passes, "step": steps, "refresh": refreshes}
                found[kind + ", counts"] = {k: v for k, v in opt.stats().items() if "refresh" in k or "seconds" in k}
                found[kind + ", MiB"] = memory(opt)
            opt.close()
            del step, opt, model
        print(name, json.dumps(found), flush=True)


def memory(opt):
    """Return what the optimizer keeps, in MiB, and what is allocated in all."""
    of = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    of["peak"] = torch.cuda.max_memory_allocated()
    executor, seen = opt.engine.executor, set()

    def size(tensors):
        total = 0
        for t in tensors:
            if isinstance(t, torch.Tensor) and t.is_cuda and t.untyped_storage().data_ptr() not in seen:
                seen.add(t.untyped_storage().data_ptr())
                total += t.untyped_storage().nbytes()
        return total

    of["parameters"] = size(opt.engine.partition.parameters)
    of["average"] = size(opt.average.offsets.values())
    for name in ("A", "B", "U_A", "U_B", "S_A", "S_B", "m", "s"):
        of[name] = size(state.get(name) for state in opt.state.values())
    of["places of gradients"] = size(executor.step_graphs._places.values())
    of["places of samples"] = size(t for kept in executor.static_samples.values() for t in kept.tensors())
    for what, replays in executor.replays.items():
        of["places of " + what] = size(replays._places.values())
    pools = {}
    for segment in torch.cuda.memory_snapshot():
        pool = str(segment.get("segment_pool_id"))
        pools[pool] = pools.get(pool, 0) + segment["total_size"]
    return {**{k: round(v / 2**20, 1) for k, v in of.items()}, "pools": {k: round(v / 2**20) for k, v in pools.items()}}


if __name__ == "__main__":
    main()
