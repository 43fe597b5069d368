"""Where a step's time goes on a GPU, phase by phase: `python results/step/speed/phases.py gpt,vit,resnet18,ae`.

Kernels of steps 320 to 359 are booked to the part of the optimizer that launched them. Beside it the same training with
AdamW (fused), timed in turns without the profiler.
"""
import bisect, collections, functools, gc, json, os, sys, tempfile, time, warnings

warnings.simplefilter("ignore")
sys.path.insert(0, "src"); sys.path.insert(0, "results/step/speed")
import torch
import time_steps as T
import ekfac
from ekfac.curvature.capture import capture
from ekfac.optim import engine, optimizer
from ekfac.optim.cuda import executor, step_graphs
from ekfac.optim.statistics import collector
from ekfac.optim.step_size import course

out = os.environ.get("OUT", ".")
def mark(owner, name, label=None):
    inner = getattr(owner, name)
    @functools.wraps(inner)
    def outer(*a, **k):
        with torch.profiler.record_function("@" + (label or name)):
            return inner(*a, **k)
    setattr(owner, name, outer)
def marks():
    mark(engine.Engine, "step", "engine.step"); mark(engine.Engine, "finish"); mark(engine.Engine, "settle")
    mark(engine.Engine, "compute_eigenbases"); mark(engine.Engine, "precondition"); mark(engine.Engine, "check_finite")
    mark(collector.Collector, "inputs"); mark(collector.Collector, "_receive", "receive"); mark(collector.Collector, "collect")
    mark(engine.Engine, "update_factors"); mark(collector.Collector, "_before_forward", "before_forward")
    mark(optimizer.Optimizer, "_rates", "rates"); mark(optimizer.Optimizer, "_apply", "apply")
    mark(course.WeightAverage, "end_step"); mark(course.WeightAverage, "before_forward", "to_z")
    mark(step_graphs.StepGraphs, "_replay", "replay"); mark(step_graphs.StepGraphs, "step", "graphs.step")
def run(name, make, steps, profile=None):
    gc.collect(); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
    model_fn, batch_fn, loss_fn = T.TASKS[name]
    torch.manual_seed(0); m = model_fn().cuda(); opt = make(m); g = torch.Generator(device="cuda").manual_seed(1)
    def step():
        b = batch_fn(g); opt.zero_grad()
        with torch.profiler.record_function("@forward"): loss = loss_fn(m, b)
        with torch.profiler.record_function("@backward"): loss.backward()
        with torch.profiler.record_function("@opt"): opt.step()
    found = {}; last = 0; torch.cuda.synchronize(); t0 = time.perf_counter()
    for i in range(1, steps + 1):
        step()
        if i in (20, 100, 300, steps):
            torch.cuda.synchronize(); t = time.perf_counter(); found[f"{last}-{i}"] = round(1e3 * (t - t0) / (i - last), 2); last = i; t0 = time.perf_counter()
    found["peak"] = torch.cuda.max_memory_allocated() // 2**20
    if profile:
        A = torch.profiler.ProfilerActivity
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[A.CPU, A.CUDA]) as prof:
            for _ in range(profile): step()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as d:
            prof.export_chrome_trace(d + "/t.json"); events = json.load(open(d + "/t.json"))["traceEvents"]
        book(name, events, profile)
    return found
def book(name, events, steps):
    ranges = collections.defaultdict(list); launches = {}; host = collections.Counter(); calls = collections.Counter()
    for e in events:
        if e.get("ph") != "X": continue
        if e.get("cat") == "user_annotation" and e["name"].startswith("@"):
            ranges[e["tid"]].append((e["ts"], e["ts"] + e["dur"], e["name"])); host[e["name"]] += e["dur"]; calls[e["name"]] += 1
        elif e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {}):
            launches[e["args"]["correlation"]] = (e["tid"], e["ts"])
    for r in ranges.values(): r.sort()
    starts = {tid: [x[0] for x in r] for tid, r in ranges.items()}
    def phase(tid, ts):
        if tid not in ranges: return "autograd"
        k = bisect.bisect_right(starts[tid], ts) - 1
        while k >= 0:
            if ranges[tid][k][1] >= ts: return ranges[tid][k][2]
            k -= 1
        return "autograd" if not any(x[2] in ("@forward", "@backward") for x in ranges[tid]) else "other"
    dev = collections.Counter(); num = collections.Counter(); top = collections.defaultdict(collections.Counter)
    for e in events:
        if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            tid, ts = launches.get(e["args"].get("correlation"), (None, 0))
            p = phase(tid, ts) if tid is not None else "unknown"
            dev[p] += e["dur"]; num[p] += 1; top[p][e["name"][:90]] += e["dur"]
    print(f"== {name}: device ms a step by phase, kernels a step; host ms a step (inclusive), calls a step")
    for p in sorted({*dev, *host}, key=lambda p: -dev[p]):
        print(f"{p:22s} dev {dev[p]/1e3/steps:7.3f}  kernels {num[p]/steps:7.1f}   host {host[p]/1e3/steps:7.3f}  calls {calls[p]/steps:5.1f}")
        if p.startswith("@") and p not in ("@forward", "@backward"):
            for k, v in top[p].most_common(7): print(f"      {v/1e3/steps:7.3f}  {k}")
    sys.stdout.flush()
if __name__ == "__main__":
    marks()
    for name in sys.argv[1].split(","):
        try:
            for label, make, prof in (("adamw", T.adamw, 0), ("ekfac", T.ek, 40)):
                r = run(name, make, 320 if name != "gpt92" else 160, prof)
                print(name, label, json.dumps(r), flush=True)
                open(f"{out}/phases.jsonl", "a").write(json.dumps([name, label, r]) + "\n")
        except Exception as error:
            print(name, "failed", repr(error)[:500], flush=True)
