"""On a GPU: the default rule's own kernels against the rule itself: results, kernels and time.

python results/step/speed/fused_check.py     (under 25 s on an H200); prints, and writes $OUT/fused_check.txt

With ``--dry`` on a CPU, by Triton's interpreter (TRITON_INTERPRET=1): a few steps of everything that a CPU can do.
"""

import faulthandler
import gc
import os
import sys
import time
import traceback
import warnings

faulthandler.dump_traceback_later(90, exit=True)  # it never hangs
BEGUN = time.perf_counter()
sys.argv, ARGS = ["x", "none"], sys.argv[1:]
exec(open("results/step/speed/time_steps.py").read().split("if __name__")[0])  # the networks and their batches

from ekfac.optim.cuda import fused  # noqa: E402
from ekfac.optim.methods import damping  # noqa: E402
from ekfac.optim.methods.belief import Belief  # noqa: E402
from ekfac.optim.methods.eigenbasis import EigenMethod  # noqa: E402
from ekfac.optim.types import BlockStep, EigenState, GroupRates  # noqa: E402

warnings.simplefilter("always")
DRY = "--dry" in ARGS
if DRY:
    dev = "cpu"
    fused.DEVICES.add("cpu")
LOG = open(os.environ.get("OUT", ".") + "/fused_check.txt", "w")
#: G, O, C and how many blocks.
SHAPES = [(1, 1, 1, 1), (1, 30, 251, 1), (3, 7, 33, 5)]
if not DRY:
    SHAPES += [(1, 1000, 785, 1), (1, 512, 2049, 8), (1, 1, 512, 17), (9, 64, 65, 4), (1, 8192, 512, 1)]


def say(*words):
    print(*words, flush=True)
    print(*words, file=LOG, flush=True)


def wait():
    if not DRY:
        torch.cuda.synchronize()


class Uncovered:
    covered = False


def take(method, state, step):
    method.project(Uncovered, state, step)
    method.update_scaling(state, step)
    return method.rescale(Uncovered, state, step)


def step_of(t, shape, base, dtype):
    groups, out, columns, blocks = shape
    g = 0.3 * base + torch.randn(base.shape, generator=torch.Generator(dev).manual_seed(t), device=dev)
    g *= 1e4 if t == 20 else 1.0
    bad = t % 7 == 5
    if bad:
        g[0, 0, 0] = torch.nan
    number = {"dtype": torch.float64, "device": dev}
    rates = GroupRates(0.1, 0.1, betas=(torch.tensor(0.95, **number), 0.95))
    return BlockStep(
        g.to(dtype), torch.tensor(64.0, **number), rates, torch.tensor(float(not bad), **number), blocks=blocks
    )


def apart(x, y):
    return float((x.double() - y.double()).abs().max() / y.double().abs().max().clamp(min=1e-300))


def methods():
    plain = EigenMethod(Belief(), damping.plain)
    return plain, fused.fused(plain)


def agreement():
    plain, kernels = methods()
    steps = 8 if DRY else 50
    for shape in SHAPES:
        groups, out, columns, blocks = shape
        base = torch.randn(groups * blocks, out, columns, device=dev)
        states = {name: EigenState() for name in ("kernels", "again", "plain", "float64")}
        worst = [0.0, 0.0]
        for t in range(steps):
            x = take(kernels, states["kernels"], step_of(t, shape, base, torch.float32))
            used = kernels._takes
            again = take(kernels, states["again"], step_of(t, shape, base, torch.float32))
            y = take(plain, states["plain"], step_of(t, shape, base, torch.float32))
            z = take(plain, states["float64"], step_of(t, shape, base, torch.float64))
            worst = [max(worst[0], apart(x, z)), max(worst[1], apart(y, z))]
            assert torch.equal(x, again), "not deterministic"
        mine, rule, truth = states["kernels"], states["plain"], states["float64"]
        found = {n: (apart(mine[n], truth[n]), apart(rule[n], truth[n])) for n in ("m", "s")}
        counts = torch.equal(mine.count, truth.count) and torch.equal(mine.examples, truth.examples)
        say("agreement", shape, "used", used, "from float64, kernels and rule: x", worst, found, "counts", counts)


def first_use():
    """Time compiling: Triton keeps what it has compiled on disk, so say whether that was there."""
    _, kernels = methods()
    shape = (1, 4, 4, 1)
    state, base = EigenState(), torch.zeros(1, 4, 4, device=dev)
    take(kernels, state, step_of(0, shape, base, torch.float32))
    wait()
    begun = time.perf_counter()
    take(kernels, state, step_of(1, shape, base, torch.float32))
    wait()
    say("first use: seconds", round(time.perf_counter() - begun, 2), "used", kernels._takes)


def rule_time():
    for shape in () if DRY else SHAPES:
        groups, out, columns, blocks = shape
        base = torch.randn(groups * blocks, out, columns, device=dev)
        found = {}
        for name, method in zip(("plain", "kernels"), methods(), strict=True):
            state, step = EigenState(), step_of(1, shape, base, torch.float32)
            for _ in range(3):
                take(method, state, step)
            wait()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                take(method, state, step)
            graph.replay()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(50):
                graph.replay()
            end.record()
            wait()
            found[name] = round(start.elapsed_time(end) / 50 * 1e3, 1)
        moved = 11 * 4 * base.numel() / found["kernels"] / 1e6
        say("rule alone, in a graph, microseconds", shape, found, "TB/s of 11 passes", round(moved, 2))


def training():
    found = {}
    for turn, enabled in (("kernels", True), ("plain", False), ("again", False)):
        fused.FusedBelief.enabled = enabled
        torch.manual_seed(0)
        m, g = ae().to(dev), torch.Generator(device=dev).manual_seed(1)
        opt = ekfac.EKFAC(m)
        losses = []
        for _ in range(4 if DRY else 60):
            b = torch.rand(200, 784, device=dev, generator=g)
            opt.zero_grad()
            loss = bce(m, b)
            loss.backward()
            opt.step()
            losses.append(loss.detach())
        found[turn] = torch.stack(losses), torch.cat([p.detach().reshape(-1) for p in m.parameters()])
        del opt
    fused.FusedBelief.enabled = True
    truth_losses, truth = found["plain"]
    say("kernels tried, by device and numbers of the rule:", fused._known)
    for turn in ("kernels", "again"):
        losses, weights = found[turn]
        worst = float(((losses - truth_losses) / truth_losses).abs().max())
        say("training of the auto-encoder,", turn, "against plain: losses apart by at most", worst,
            "weights", float((weights - truth).norm() / truth.norm()), "last loss", float(losses[-1]))  # fmt: skip


def kernels_of(step):
    if DRY:
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        wait()
    rows = [e for e in profile.key_averages() if e.self_device_time_total]
    return sum(e.count for e in rows), round(sum(e.self_device_time_total for e in rows) / 1e3, 3)


def plain_now(opt):
    """Tell whether the coming step takes no statistics and renews no basis."""
    if not hasattr(opt, "engine"):
        return True
    s, covered = opt.engine.schedule, opt.engine.partition.covered
    return not any(s.renews(b) or s.takes_factors(b) for b in covered)


def steps_of(name, make, label, warm, seconds):
    model_fn, batch_fn, loss_fn = TASKS[name]
    gc.collect()
    torch.manual_seed(0)
    m = model_fn().to(dev)
    opt, g = make(m), torch.Generator(device=dev).manual_seed(1)
    b = batch_fn(g)

    def step():
        opt.zero_grad()
        loss_fn(m, b).backward()
        opt.step()

    for _ in range(2 if DRY else warm):
        step()
    wait()
    begun, steps = time.perf_counter(), 0
    while steps < 3 or steps % 10 or (time.perf_counter() - begun < seconds and steps < 100):
        step()
        steps += 1
        if DRY or steps % 10 == 0:
            wait()
        if DRY:
            break
    all_ms = 1e3 * (time.perf_counter() - begun) / steps
    plain, count = [], None
    for _ in range(1 if DRY else 20):
        is_plain = plain_now(opt)
        wait()
        at = time.perf_counter()
        if is_plain and count is None and len(plain) >= 3:
            count = kernels_of(step)
            continue
        step()
        wait()
        if is_plain:
            plain.append(1e3 * (time.perf_counter() - at))
    middle = round(sorted(plain)[len(plain) // 2], 3) if plain else None
    say(
        "steps",
        name,
        label,
        "ms a step, back to back",
        round(all_ms, 3),
        "of",
        steps,
        "plain step with waiting",
        middle,
        "its kernels and device ms",
        count,
    )


def whole_steps():
    for name in ["ae"] if DRY else ["ae", "gpt", "resnet18"]:
        for label, make, enabled in (
            ("adamw fused", adamw, True),
            ("ekfac kernels", ek, True),
            ("ekfac plain", ek, False),
        ):
            if DRY and make is adamw:
                continue
            fused.FusedBelief.enabled = enabled
            quick = name == "ae"
            try:
                steps_of(name, make, label, 45 if make is ek else 8, 1.0 if quick or make is adamw else 1.6)
            except Exception:
                say(traceback.format_exc())
        say("seconds so far", round(time.perf_counter() - BEGUN, 1))
    fused.FusedBelief.enabled = True


for part in (first_use, agreement, rule_time, training, whole_steps):
    try:
        part()
    except Exception:
        say(traceback.format_exc())
    say(part.__name__, "done; seconds so far", round(time.perf_counter() - BEGUN, 1))
