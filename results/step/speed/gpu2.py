"""On a GPU: replayed steps are those that would be run; what a hook costs; what stays after ``del``.

python results/step/speed/gpu2.py     (about 25 s on an H200); prints, and writes $OUT/gpu2.txt
"""

import copy
import gc
import os
import sys
import time
import traceback
import warnings
import weakref

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, "src")
sys.path.insert(0, "results/step/prototype")
import tasks as T

import ekfac

warnings.simplefilter("always")
LOG = open(os.environ.get("OUT", ".") + "/gpu2.txt", "w")


def say(*words):
    print(*words, flush=True)
    print(*words, file=LOG, flush=True)


def ae(widths=(40, 60, 30, 8)):
    w = list(widths)
    dims, layers = w + w[-2::-1], []
    for a, b in zip(dims, dims[1:]):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


CASES = {
    "ae": (ae, lambda g: torch.rand(50, 40, generator=g), lambda m, x: (m(x) - x).square().mean()),
    "resnet": (lambda: T.resnet18(8), lambda g: torch.randn(16, 3, 16, 16, generator=g), lambda m, x: F.cross_entropy(m(x), torch.arange(16, device=x.device) % 10)),
    "vit": (lambda: T.ViT(d=24), lambda g: torch.randn(8, 3, 32, 32, generator=g), lambda m, x: F.cross_entropy(m(x), torch.arange(8, device=x.device) % 10)),
    "gpt": (lambda: T.GPT(64, 16, 32, 3, 2), lambda g: torch.randint(0, 64, (8, 16), generator=g), lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten())),
}


def train(name, steps, dtype, **options):
    make, batch, loss = CASES[name]
    torch.manual_seed(0)
    m = make().to("cuda", dtype)
    opt = ekfac.EKFAC(m, **options)
    losses = []
    for t in range(steps):
        x = batch(torch.Generator().manual_seed(t)).cuda()
        x = x.to(dtype) if x.is_floating_point() else x
        if t % 25 == 17 and x.is_floating_point():
            x[0].fill_(float("nan"))
        opt.zero_grad()
        value = loss(m, x)
        value.backward()
        if t % 10 == 3:
            nn.utils.clip_grad_norm_(m.parameters(), 1e-2)
        opt.step()
        losses.append(value.detach())
    return m, opt, torch.stack(losses)


def equal():
    for name in CASES:
        with torch.backends.cudnn.flags(deterministic=True):
            m1, o1, l1 = train(name, 150, torch.float64, eps=1e-4)
            m2, o2, l2 = train(name, 150, torch.float64, eps=1e-4, cuda_graphs=False)
        worst = max(float((p - q).abs().max() / q.abs().max().clamp(min=1e-12)) for p, q in zip(m1.parameters(), m2.parameters()))
        x = o1.engine.executor
        kinds = [len(s.inputs.samples) for s in x.step_graphs._recorded.values()]
        s1, s2 = o1.stats(), o2.stats()
        say("equal", name, "largest relative difference", worst, "replays", x.step_graphs.replays, "graphs with so many samples", kinds,
            "refresh graphs", len(x.replays["a refresh"]._graphs), "skipped", s1["skipped_steps"], s2["skipped_steps"],
            "warm", s1["warm_refreshes"], s2["warm_refreshes"], "drift", s1["residual_drift"], s2["residual_drift"], "places open", x.places.open)


def hooks():
    for name, make, batch in (("ae", lambda: ae((784, 1000, 500, 250, 30)), lambda: torch.rand(200, 784, device="cuda")),
                              ("vit", T.ViT, lambda: torch.randn(64, 3, 32, 32, device="cuda"))):
        m = make().cuda()
        for what in ("none", "params", "params emptied", "output", "output and callback", "none"):
            handles = []
            if what.startswith("params"):
                handles = [p.register_post_accumulate_grad_hook(lambda p: None) for p in m.parameters()]
                if what.endswith("emptied"):
                    for h in handles:
                        h.hooks_dict_ref().clear()
            rows = []
            for _ in range(30):
                out = m(batch())
                if what.startswith("output"):
                    queue = torch.autograd.Variable._execution_engine.queue_callback
                    out.register_hook((lambda d: queue(lambda: queue(lambda: None))) if what.endswith("callback") else (lambda d: None))
                loss = out.square().mean()
                torch.cuda.synchronize()
                t = time.perf_counter()
                loss.backward()
                rows.append(time.perf_counter() - t)
                m.zero_grad()
            for h in handles:
                h.remove()
            say("hooks", name, what, "backward ms", round(1e3 * sorted(rows)[15], 3))


def left():
    for turn in range(4):
        gc.collect()
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        gc.disable()
        m, opt, losses = train("vit" if turn % 2 else "ae", 60, torch.float32)
        e = opt.engine
        refs = {"opt": opt, "model": m, "engine": e, "executor": e.executor, "collector": e.collector, "capture": e.collector.capture, "graphs": e.executor.step_graphs,
                "refresher": e.refresher, "recorded": next(iter(e.executor.step_graphs._recorded.values())), "partition": e.partition,
                "watch": e.collector.watch, "parameter": next(m.parameters()), "U_A": next(s.U_A for s in opt.state.values() if "U_A" in s)}
        refs = {k: weakref.ref(v) for k, v in refs.items()}
        del opt, m, e, losses
        torch.cuda.synchronize()
        now = (torch.cuda.memory_allocated() - base) / 2**20
        alive = [k for k, r in refs.items() if r() is not None]
        say("left", turn, "MiB", round(now, 2), "alive", alive)
        for k in alive[:3]:
            for holder in gc.get_referrers(refs[k]())[:4]:
                say("    ", k, "held by", type(holder).__name__, str(holder)[:160].replace("\n", " "))
        gc.collect()
        gc.enable()
        say("left", turn, "after a collection", round((torch.cuda.memory_allocated() - base) / 2**20, 2), "alive", [k for k, r in refs.items() if r() is not None])


for part in (equal, hooks, left):
    t = time.perf_counter()
    try:
        part()
    except Exception:
        say(traceback.format_exc())
    say(part.__name__, "seconds", round(time.perf_counter() - t, 1))
