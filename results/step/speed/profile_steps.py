import sys; sys.argv = ["x", "none"]
exec(open("results/step/speed/time_steps.py").read().split('if __name__')[0])
import cProfile, pstats
for n in ("ae", "gpt"):
    mf, bf, lf = TASKS[n]; torch.manual_seed(0); m = mf().to(dev); opt = ek(m); g = torch.Generator(device=dev).manual_seed(1)
    def step(): b = bf(g); opt.zero_grad(); l = lf(m, b); l.backward(); opt.step()
    for _ in range(110): step()
    torch.cuda.synchronize(); t = time.perf_counter()
    for _ in range(40): step()
    h = time.perf_counter() - t
    torch.cuda.synchronize(); print(n, "ms", (time.perf_counter() - t) / 40 * 1e3, "host", h / 40 * 1e3)
    pr = cProfile.Profile(); pr.enable()
    for _ in range(40): step()
    pr.disable(); torch.cuda.synchronize()
    s = pstats.Stats(pr); s.sort_stats("cumtime").print_stats(60)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as p:
        for _ in range(20): step()
        torch.cuda.synchronize()
    ev = [e for e in p.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    ev.sort(key=lambda e: -e.self_device_time_total); tot = sum(e.self_device_time_total for e in ev)
    print(n, "CUDA ms per step", tot / 20e3)
    for e in ev[:30]: print(f"{e.self_device_time_total/20e3:8.3f} ms  {e.count/20:7.1f}  {e.key[:100]}")
