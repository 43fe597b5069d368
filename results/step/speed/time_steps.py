import gc, os, sys, time, json, torch
sys.path.insert(0, "src"); sys.path.insert(0, "results/step/prototype")
import warnings; warnings.simplefilter("ignore")
import ekfac
from torch import nn
from torch.nn import functional as F
import tasks as T
dev = "cuda"; out = os.environ.get("OUT", ".")
def gpt(layers=8, d=512, vocab=8192): 
    return T.GPT(vocab, 256, d, layers, d // 64)
def run(make, steps, marks, model_fn, batch_fn, loss_fn, profile=None):
    gc.collect(); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats(); base = torch.cuda.memory_allocated()
    torch.manual_seed(0); m = model_fn().to(dev); opt = make(m); times = {}; last = 0; g = torch.Generator(device=dev).manual_seed(1)
    torch.cuda.synchronize(); t0 = time.perf_counter(); hosts = 0.0
    prof = None
    for i in range(1, steps + 1):
        if profile and i == profile[0]:
            prof = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]); torch.cuda.synchronize(); tp = time.perf_counter(); prof.__enter__()
        b = batch_fn(g)
        opt.zero_grad()
        loss_fn(m, b).backward(); opt.step()
        if profile and i == profile[1]:
            torch.cuda.synchronize(); prof.__exit__(None, None, None)
            t0 += time.perf_counter() - tp
            print(prof.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=60))
            print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=60))
        if i in marks:
            torch.cuda.synchronize(); t = time.perf_counter(); times[f"{last}-{i}"] = round((t - t0) / (i - last) * 1e3, 2); t0 = time.perf_counter(); last = i
    times["peak"] = torch.cuda.max_memory_allocated() // 2**20
    if hasattr(opt, "stats"): times["stats"] = {k: v for k, v in opt.stats().items() if k in ("refreshes", "warm_refreshes", "refresh_seconds")}
    del opt, m; times["left"] = (torch.cuda.memory_allocated() - base) // 2**20; gc.collect(); times["left_gc"] = (torch.cuda.memory_allocated() - base) // 2**20
    return times
def adamw(m): return torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True)
def ek(m): return ekfac.EKFAC(m)
def lm(m, b):
    with torch.autocast("cuda", torch.bfloat16): o = m(b[:, :-1])
    return F.cross_entropy(o.float().flatten(0, 1), b[:, 1:].flatten())
CORPUS = os.environ.get("TOKENS")  # the corpus, decompressed; random tokens without it
_tokens = []
def toks(g):
    if not CORPUS: return torch.randint(0, 8192, (64, 257), device=dev, generator=g)
    if not _tokens:
        import numpy; _tokens.append(torch.from_numpy(numpy.fromfile(CORPUS, numpy.uint16)[:-800000].astype(numpy.int64)).to(dev))
    at = torch.randint(0, len(_tokens[0]) - 257, (64, 1), device=dev, generator=g)
    return _tokens[0][at + torch.arange(257, device=dev)]
def img(n, c, s): 
    return lambda g: (torch.randn(n, c, s, s, device=dev, generator=g), torch.randint(0, 10, (n,), device=dev, generator=g))
def ce(amp):
    def f(m, b):
        with torch.autocast("cuda", torch.bfloat16, enabled=amp): o = m(b[0])
        return F.cross_entropy(o.float(), b[1])
    return f
def ae():
    w = [784, 1000, 500, 250, 30]; dims = w + w[-2::-1]; L = []
    for i in range(8): L += [nn.Linear(dims[i], dims[i+1])] + ([nn.Sigmoid()] if i not in (3, 7) else [])
    return nn.Sequential(*L)
def pix(g): return torch.rand(200, 784, device=dev, generator=g)
def bce(m, b): return F.binary_cross_entropy_with_logits(m(b), b, reduction="sum") / len(b)
TASKS = {
 "gpt": (gpt, toks, lm), "gpt92": (lambda: gpt(12, 768), toks, lm),
 "resnet18": (lambda: T.resnet18(64), img(256, 3, 32), ce(True)), "vit": (lambda: T.ViT(), img(256, 3, 32), ce(True)), "ae": (ae, pix, bce),
}
if __name__ == "__main__":
    names = sys.argv[1].split(","); prof = (370, 380) if len(sys.argv) > 2 else None
    for n in names:
        marks = (20, 100, 300, 400)
        for name, mk in (("adamw", adamw), ("ekfac", ek)):
            r = run(mk, 400, marks, *TASKS[n], profile=prof if name == "ekfac" else None)
            print(n, name, json.dumps(r), flush=True)
            open(f"{out}/times.jsonl", "a").write(json.dumps([n, name, r]) + "\n")
