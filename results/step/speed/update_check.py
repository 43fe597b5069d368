"""On a GPU: the kernel of the update against torch's lists, on the GPT's parameters: results and time.

python results/step/speed/update_check.py     (some 20 s); prints, and writes $OUT/update_check.txt
"""

import os
import sys

sys.argv = ["x", "none"]
exec(open("results/step/speed/time_steps.py").read().split("if __name__")[0])  # the networks and their batches

from ekfac.optim.cuda import update  # noqa: E402

LOG = open(os.environ.get("OUT", ".") + "/update_check.txt", "w")


def say(*words):
    print(*words, flush=True)
    print(*words, file=LOG, flush=True)


def timed(graph):
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(50):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) / 50 * 1e3, 1)


@torch.no_grad()
def main():
    for name in ("gpt", "vit", "resnet18"):
        found, times = {}, {}
        for label in ("kernel", "lists"):
            torch.manual_seed(0)
            model = TASKS[name][0]().to(dev)
            opt = ekfac.EKFAC(model)
            parameters = list(model.parameters())
            steps = {p: torch.randn_like(p) for p in parameters}
            opt.average.offsets = {p: 0.1 * torch.randn_like(p) for p in parameters}
            lr, ok, c = (torch.tensor(v, dtype=torch.float64, device=dev) for v in (0.01, 1.0, 0.1))
            inputs = ekfac.optim.types.StepInputs({}, {}, {}, ok=ok)
            say(name, label, "runs", update.runs_on(parameters[0].device))

            def take(table=None, opt=opt, steps=steps, parameters=parameters, lr=lr, ok=ok, c=c, inputs=inputs):
                if label == "kernel":
                    rows = update.rows_of(opt.param_groups, steps, opt.average.offsets, {p for p in parameters if p.dim() < 2})
                    update.launch(rows, [lr], ok, c, None if table is None else table.of(rows))
                    return
                opt.average.before_update(parameters)
                opt._update_parameters(opt.param_groups[0], steps, lr, inputs)
                opt.average.after_update(parameters, c, ok)

            take()
            found[label] = [t.detach().clone() for t in (*parameters, *opt.average.offsets.values())]
            table, graph = update.Table(len(parameters), torch.device(dev)), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                take(table)
            table.fill()
            times[label] = timed(graph)
            opt.close()
        worst = max(float((a - b).abs().max()) for a, b in zip(found["kernel"], found["lists"], strict=True))
        numbers = sum(p.numel() for p in parameters)
        say(name, "numbers", numbers, "microseconds", times, "apart by at most", worst,
            "TB/s of 5 passes", round(20 * numbers / times["kernel"] / 1e6, 2))  # fmt: skip


if __name__ == "__main__":
    main()
