"""Peak memory of the GPT's step by phase: `python results/step/speed/memory.py`."""
import sys, warnings
warnings.simplefilter("ignore"); sys.path.insert(0, "results/step/speed")
import torch, time_steps as T
M = 2**20
for label, make in (("adamw", T.adamw), ("ekfac", T.ek)):
    model, batch, loss = T.TASKS["gpt"]
    torch.manual_seed(0); m = model().cuda(); opt = make(m); g = torch.Generator(device="cuda").manual_seed(1); seen = {}
    for i in range(130):
        b = batch(g); row = []
        for what in ("forward", "backward", "step"):
            torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats()
            if what == "forward": opt.zero_grad(); l = loss(m, b)
            elif what == "backward": l.backward()
            else: opt.step()
            torch.cuda.synchronize(); row.append((torch.cuda.max_memory_allocated() // M, torch.cuda.memory_allocated() // M))
        if i in (0, 1, 5, 15, 25, 26, 30, 60, 105, 106, 120, 129): print(label, i, "peak, held after: forward, backward, step", *row, flush=True)
    print(label, "reserved", torch.cuda.memory_reserved() // M)
    if label == "ekfac":
        sizes = {}
        for state in opt.state.values():
            for name, t in (state.items() if hasattr(state, "items") else ()):
                if torch.is_tensor(t): sizes[name] = sizes.get(name, 0) + t.numel() * t.element_size() / M
        print({k: round(v) for k, v in sizes.items()}, "offsets", round(sum(t.numel() * 4 for t in opt.average.offsets.values()) / M))
    del opt, m, l; torch.cuda.empty_cache()
