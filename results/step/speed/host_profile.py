"""Where a step's time and memory go on a GPU: host and kernels, by kind of step, AdamW and EKFAC in turns.

python results/step/speed/host_profile.py [ae,gpt,vit,resnet18]     (about 75 s on an H200)

Writes to $OUT: host_profile.txt (all that is printed), host_profile.json (the numbers).
"""

import cProfile
import gc
import io
import json
import os
import pstats
import sys
import time
from collections import Counter, defaultdict

sys.argv, ARGS = ["x", "none"], sys.argv[1:]
exec(open("results/step/speed/time_steps.py").read().split("if __name__")[0])  # the networks and their batches

OUT = os.environ.get("OUT", ".")
LOG = open(f"{OUT}/host_profile.txt", "w")
FOUND = {}
BEGUN = time.perf_counter()


def say(*words):
    text = " ".join(str(w) for w in words)
    print(text, flush=True)
    LOG.write(text + "\n")
    LOG.flush()


def kind_of(opt):
    """Name what the coming step does besides the plain step."""
    if not hasattr(opt, "engine"):
        return "plain"
    s, covered = opt.engine.schedule, opt.engine.partition.covered
    refresh = any(s.renews(b) for b in covered)  # those between two steps count as the step before
    takes = any(s.takes_factors(b) for b in covered)
    return ("stats" if takes else "plain") + ("+refresh" if refresh else "")


def state_bytes(opt):
    """Add up the storages of an optimizer's state."""
    storages = [t.untyped_storage() for s in opt.state.values() for t in s.values() if torch.is_tensor(t)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def measure(name, label, make):
    model_fn, batch_fn, loss_fn = TASKS[name]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    m = model_fn().to(dev)
    opt = make(m)
    g = torch.Generator(device=dev).manual_seed(1)
    found = {}

    def step(parts=None):
        b = batch_fn(g)
        t = [time.perf_counter()]
        opt.zero_grad()
        t.append(time.perf_counter())
        loss = loss_fn(m, b)
        t.append(time.perf_counter())
        loss.backward()
        t.append(time.perf_counter())
        opt.step()
        t.append(time.perf_counter())
        if parts is not None:
            parts.append([1e3 * (y - x) for x, y in zip(t, t[1:])])

    marks, at = (20, 100, 300, 400), time.perf_counter()
    last, steps = 0, 400 if label == "ekfac" else 200
    for i in range(1, steps + 1):
        step()
        if i in marks:
            torch.cuda.synchronize()
            now = time.perf_counter()
            found[f"{last}-{i}"] = round(1e3 * (now - at) / (i - last), 3)
            last, at = i, now
    found["peak"] = torch.cuda.max_memory_allocated() // 2**20
    found["allocated"] = torch.cuda.memory_allocated() // 2**20
    found["reserved"] = torch.cuda.memory_reserved() // 2**20
    if label == "ekfac":
        found["state"] = state_bytes(opt) >> 20
        found["replays"] = opt.engine.executor.step_graphs.replays
        found["recorded"] = len(opt.engine.executor.step_graphs._recorded)
    # The host alone: the device is idle when a step begins.
    host = defaultdict(list)
    for _ in range(40):
        kind, parts = kind_of(opt), []
        torch.cuda.synchronize()
        step(parts)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        host[kind].append([*parts[0], 1e3 * (time.perf_counter() - launched)])
    for kind, rows in host.items():
        rows.sort(key=sum)
        mid = [round(sorted(c)[len(c) // 2], 3) for c in zip(*rows)]
        found[f"host {kind}"] = dict(zip(("zero_grad", "forward", "backward", "step", "then device"), mid), steps=len(rows))
    say("==", name, label, json.dumps(found))
    FOUND[f"{name} {label}"] = found
    if label == "ekfac":
        p = cProfile.Profile()
        p.enable()
        for _ in range(40):
            step()
        p.disable()
        torch.cuda.synchronize()
        for order, rows in (("tottime", 45), ("cumtime", 45)):
            text = io.StringIO()
            pstats.Stats(p, stream=text).sort_stats(order).print_stats(rows)
            say(text.getvalue())
    # Kernels and launches by kind of step.
    seen, kernels = Counter(), {}
    for _ in range(21 if label == "ekfac" else 2):
        kind = kind_of(opt)
        if seen[kind] >= 1:
            step()
            continue
        seen[kind] += 1
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            step()
            torch.cuda.synchronize()
        times, calls = Counter(), Counter()
        for e in prof.key_averages():
            t = e.self_device_time_total
            (times if t else calls)[e.key] += t or e.count
            if t:
                calls["kernels"] += e.count
                calls["n:" + e.key] = e.count
        launches = {k: v for k, v in calls.items() if k.startswith("cu") or k == "kernels"}
        kernels[kind] = times, calls
        say("--", name, label, kind, "device ms", round(sum(times.values()) / 1e3, 3), json.dumps(launches))
    del opt, m, step
    found["left"] = (torch.cuda.memory_allocated() - base) / 2**20
    gc.collect()
    found["left after collection"] = (torch.cuda.memory_allocated() - base) / 2**20
    say("memory left, MiB", found["left"], "after a collection", found["left after collection"])
    return kernels


for name in (ARGS[0] if ARGS else "ae,gpt,vit,resnet18").split(","):
    theirs = measure(name, "adamw", adamw)["plain"]
    ours = measure(name, "ekfac", ek)
    for kind, (times, calls) in ours.items():
        more = Counter({k: t - theirs[0].get(k, 0) for k, t in times.items()})
        more.update({k: -t for k, t in theirs[0].items() if k not in times})
        say("++", name, kind, "more than AdamW by kernel, ms and calls; in sum", round(sum(more.values()) / 1e3, 3))
        for key, t in sorted(more.items(), key=lambda item: -abs(item[1]))[:26]:
            say(f"   {t / 1e3:8.3f} ms {calls['n:' + key] - theirs[1]['n:' + key]:6d}  {key[:150]}")
    say("seconds so far", round(time.perf_counter() - BEGUN, 1))
json.dump(FOUND, open(f"{OUT}/host_profile.json", "w"), indent=1)
