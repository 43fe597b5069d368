"""Milliseconds of single steps after step 200, the device waited for: `python distribution.py vit,resnet18`."""
import sys, time, warnings
warnings.simplefilter("ignore"); sys.path.insert(0, "results/step/speed")
import torch, time_steps as T
for name in sys.argv[1].split(","):
    model, batch, loss = T.TASKS[name]
    for label, make in (("adamw", T.adamw), ("ekfac", T.ek)):
        torch.manual_seed(0); m = model().cuda(); opt = make(m); g = torch.Generator(device="cuda").manual_seed(1); rows = []
        for i in range(260):
            b = batch(g); torch.cuda.synchronize(); t0 = time.perf_counter()
            opt.zero_grad(); l = loss(m, b); t1 = time.perf_counter(); l.backward(); t2 = time.perf_counter(); opt.step(); t3 = time.perf_counter()
            torch.cuda.synchronize(); t4 = time.perf_counter()
            if i >= 200: rows.append([round(1e3 * x, 1) for x in (t1 - t0, t2 - t1, t3 - t2, t4 - t3)])
        print(name, label, "forward, backward, step, waiting:", flush=True)
        for k in range(0, 20): print("   ", *rows[k])
        print("    mean", [round(sum(r[j] for r in rows) / len(rows), 2) for j in range(4)])
        if label == "ekfac": print("   ", {k: round(v, 3) for k, v in opt.stats().items()})
