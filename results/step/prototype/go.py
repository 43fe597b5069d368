import sys, json, time, math, os, torch
sys.path.insert(0, os.path.dirname(__file__))
import tasks
from proto import Proto
def build(model, m):
    m = dict(m); n = m.pop("opt")
    if n == "proto": return Proto(model, **m)
    if n == "adamw": return torch.optim.AdamW(model.parameters(), fused=torch.cuda.is_available(), **m)
    if n == "sgd": return torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, **m)
    if n == "muon":
        mats = [p for q, p in model.named_parameters() if p.dim() == 2 and not q.startswith(("e.", "pos", "head"))]; ids = {id(p) for p in mats}
        rest = [p for p in model.parameters() if id(p) not in ids]
        lr, wd = m["lr"], m.get("weight_decay", 0.1)
        a = torch.optim.Muon(mats, lr=lr, weight_decay=wd, adjust_lr_fn=m.get("adj", "match_rms_adamw")); b = torch.optim.AdamW(rest, lr=m.get("lr2", lr), weight_decay=wd, fused=True)
        class Two:
            param_groups = a.param_groups + b.param_groups
            def step(s): a.step(); b.step()
        return Two()
    if n == "ekfac":
        sys.path.insert(0, "src"); import ekfac; return ekfac.EKFAC(model, **m)
    raise ValueError(n)
def run(task, opt, sched="cosine", warm=100, seed=0, tk=None, evals=6, avg=None, label="", out=None, ema=None, gpa=None):
    torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = True
    T = tasks.TASKS[task](seed=seed, **(tk or {})); o = build(T.model, opt); base = [g["lr"] for g in o.param_groups]
    hist, t0, losses = [], time.time(), []
    worst = 0; tt = time.time(); run_l = 0.0
    for i, ix in enumerate(T.batches()):
        f = min(1, (i + 1) / warm) if warm else 1.0
        if sched == "cosine": f *= 0.5 * (1 + math.cos(math.pi * i / T.steps))
        elif sched == "wsd": f *= min(1, (T.steps - i) / (0.3*T.steps))
        elif sched.startswith("pow"):
            _, tau, al = sched.split(":"); f *= (1 + i / float(tau)) ** -float(al)
        for g, b in zip(o.param_groups, base): g["lr"] = b * f
        for p in T.model.parameters(): p.grad = None
        loss = T.loss(ix); loss.backward()
        if avg:
            ps = list(T.model.parameters())
            if i == 0: Z = [p.detach().clone() for p in ps]; X = [p.detach().clone() for p in ps]; wsum = 0.0
            with torch.no_grad(): Y = [p.detach().clone() for p in ps]
            o.step()
            with torch.no_grad():
                w = (f ** 2) * ((i + 1) ** avg.get("r", 0)); wsum += w; c = w / wsum
                torch._foreach_add_(Z, torch._foreach_sub([p.detach() for p in ps], Y))
                torch._foreach_lerp_(X, Z, c)
                for p, x, z in zip(ps, X, Z): p.copy_(z.lerp(x, avg["b"]))
        elif gpa:
            ps = list(T.model.parameters())
            with torch.no_grad():
                if i == 0: Zt = [p.detach().clone() for p in ps]
                Y = [p.detach().clone() for p in ps]
                for p, z in zip(ps, Zt): p.copy_(z)
            o.step()
            with torch.no_grad(): torch._foreach_copy_(Zt, [p.detach() for p in ps])
        else: o.step()
        if ema:
            with torch.no_grad():
                ps = list(T.model.parameters())
                bs = [b for b in T.model.buffers() if b.is_floating_point()]
                if i == 0: E = {k: [p.detach().clone() for p in ps] for k in ema}; EB = {k: [b.clone() for b in bs] for k in ema}
                for k in ema:
                    torch._foreach_lerp_(E[k], Zt if gpa else [p.detach() for p in ps], (k + 1) / (i + k + 1))
                    if bs: torch._foreach_lerp_(EB[k], bs, (k + 1) / (i + k + 1))
                if gpa:
                    for p, x, z in zip(ps, E[ema[0]], Zt): p.copy_(z.lerp(x, gpa))
        if i % 50 == 49:
            l = loss.item(); losses.append(round(l, 4))
            if not math.isfinite(l): break
        if (i + 1) % max(1, T.steps // evals) == 0: hist.append({"step": i+1, "sec": round(time.time()-t0, 1), **{k: round(v, 4) for k, v in T.evaluate().items()}})
    av = {}
    if ema:
        ps = list(T.model.parameters()); keep = [p.detach().clone() for p in ps]; bk = [b.clone() for b in T.model.buffers()]
        bns = [m for m in T.model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
        for k in ema:
            with torch.no_grad(): torch._foreach_copy_(ps, E[k])
            av[f"ema{k}"] = {a: round(b, 4) for a, b in T.evaluate().items()}
            if bns:
                with torch.no_grad():
                    for b, c in zip([b for b in T.model.buffers() if b.is_floating_point()], EB[k]): b.copy_(c)
                av[f"ema{k}avgbn"] = {a: round(b, 4) for a, b in T.evaluate().items()}
                for m in bns: m.reset_running_stats(); m.momentum = None
                T.model.train()
                with torch.no_grad():
                    for j, ix in enumerate(T.batches()):
                        if j >= 20: break
                        T.loss(ix)
                av[f"ema{k}bn"] = {a: round(b, 4) for a, b in T.evaluate().items()}
                with torch.no_grad():
                    for b, c in zip(T.model.buffers(), bk): b.copy_(c)
    r = dict(ema=av, task=task, opt=opt, sched=sched, seed=seed, tk=tk, avg=avg, hist=hist, losses=losses, sec=time.time()-t0, steps=i+1, mem=torch.cuda.max_memory_allocated()/2**20 if torch.cuda.is_available() else 0, label=label, log=getattr(o, "log", {}))
    return r
if __name__ == "__main__":
    jobs = json.load(open(sys.argv[1])); out = sys.argv[2]; k, n = int(sys.argv[3]), int(sys.argv[4]); limit = float(sys.argv[5]); t0 = time.time()
    import fcntl
    while True:   # a shared queue
        with open(out + "/next", "a+") as f:
            fcntl.flock(f, fcntl.LOCK_EX); f.seek(0); j = int(f.read() or 0); f.truncate(0); f.write(str(j+1))
        if j >= len(jobs) or time.time() - t0 > limit: break
        try: r = run(**jobs[j])
        except Exception as e:
            import traceback; r = dict(task=jobs[j]["task"], opt=jobs[j]["opt"], error=traceback.format_exc()[-1500:])
        r["job"] = j
        with open(f"{out}/r{k}.jsonl", "a") as f: f.write(json.dumps(r) + "\n")
        h = r.get("hist") or [{}]; print(k, r["task"], json.dumps(r["opt"]), r.get("sched"), json.dumps(h[-1]), json.dumps(r.get("ema")), round(r.get("sec", 0), 1), "s", r.get("error", "")[-300:], flush=True)
