"""Research prototype: Adam-like step in a Kronecker eigenbasis, all layers of a shape handled together, tensor cores."""
import math, torch
from torch import nn
from torch.nn import functional as F

def qr_warm(A, Q, dt=torch.float64):
    """One orthogonal iteration, batched [L,D,D]; ascending order not needed here: descending first."""
    A = A.to(dt); Q0 = Q; Q = Q.to(dt)
    shift = 1e-7 * A.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    Y = torch.baddbmm(shift * Q, A, Q)
    eye = torch.eye(Y.shape[-1], dtype=dt, device=Y.device)
    for s in (1e-12, 0.0):
        Y = Y / torch.linalg.vector_norm(Y, dim=-2, keepdim=True).clamp_min(1e-300)
        L, info = torch.linalg.cholesky_ex(Y.mT @ Y + s * eye)
        Y = torch.linalg.solve_triangular(L.mT, Y, upper=True, left=False)
    gram = Y.mT @ Y
    lost = (gram - eye).abs().amax((-2, -1))
    out = 1.5 * Y - 0.5 * Y @ gram
    bad = (info != 0) | ~(lost < 1e-3)
    return torch.where(bad[:, None, None], Q0.to(dt), out).float()

def eigh_desc(A):
    v, U = torch.linalg.eigh(A.double() + 1e-12 * torch.eye(A.shape[-1], device=A.device) * A.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None])
    return U.flip(-1).float()

class Side:  # one side of one shape group: factors [L,D,D], basis [L,D,D]
    pass

class Proto(torch.optim.Optimizer):
    def __init__(self, model, lr=3e-3, betas=(0.95, 0.95), wd=0.0, refresh=10, early=10, stat_every=None, rows=4096, fdecay=0.95, kind="kfac",
                 max_dim=4096, carry=True, norm="clip", eps=1e-8, start="zero", warm=True, b2_1d=None, rms=1.0, clip_1d=True, anchor=False, sdec=None, belief=None, nesterov=False, cautious=False, cwd=False, plain_wide=False, lrw=1.0):
        self.o = dict(refresh=refresh, early=early, stat_every=stat_every, rows=rows, fdecay=fdecay, kind=kind, max_dim=max_dim, carry=carry, norm=norm, eps=eps, start=start, b2_1d=b2_1d, rms=rms, anchor=anchor, belief=belief, nesterov=nesterov, cautious=cautious, cwd=cwd, lrw=lrw)
        params = [p for p in model.parameters() if p.requires_grad]
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=wd))
        self.t = 0; self.model = model; self.log = {}
        self.layers, seen = [], set()
        for name, m in model.named_modules():
            if isinstance(m, (nn.Linear, nn.Conv2d)) and m.weight.requires_grad and m.weight not in seen:
                if isinstance(m, nn.Conv2d) and m.groups > 1: continue
                if plain_wide and m.weight.shape[0] > max_dim: continue
                seen.add(m.weight); self.layers.append(self.make(name, m))
        if kind != "identity":
            for l in self.layers: l["m"].register_forward_hook(self.hook(l))
        self.groups = {}
        for l in self.layers: self.groups.setdefault(l["key"], []).append(l)
        self.flat = [p for p in params if not any(p is q for l in self.layers for q in l["ps"])]
        self.gs = {}
    def make(self, name, m):
        W = m.weight; O = W.shape[0]
        if isinstance(m, nn.Conv2d):
            k = W.shape[2] * W.shape[3]; full = W[0].numel(); sua = full > 1024
            I = W.shape[1] if sua else full; taps = k if sua else 1
        else: I, taps, sua = W.shape[1], 1, False
        bias = m.bias is not None and not sua
        if bias: I += 1
        ps = [W] + ([m.bias] if bias else [])
        mx = self.o["max_dim"]
        return dict(name=name, m=m, O=O, I=I, taps=taps, sua=sua, bias=bias, ps=ps, key=(O, I, taps, bias), A=I <= mx and I > 1, B=O <= mx and O > 1, got={})
    # --- statistics
    def hook(self, l):
        def f(m, inp, out):
            if not (torch.is_grad_enabled() and self.due_stats and m.training): return
            x = inp[0].detach()
            if l["A"] and self.o["kind"] == "kfac":
                h = self.rows_in(l, m, x)
                self.put(l, "A", h, bias=l["bias"])
            if l["B"] and self.o["kind"] == "kfac":
                def g(d):
                    d = d.detach()
                    if isinstance(m, nn.Conv2d): d = d.permute(0, 2, 3, 1).reshape(-1, d.shape[1])
                    self.put(l, "B", self.sample(d.reshape(-1, d.shape[-1]), l["O"]), scale=True)
                out.register_hook(g)
        return f
    def sample(self, r, D):
        want = max(self.o["rows"], 2 * D); k = max(1, r.shape[0] // want)
        if k > 1: r = r[int(torch.randint(0, k, (1,)).item())::k]
        return r
    def rows_in(self, l, m, x):
        if isinstance(m, nn.Conv2d):
            if l["sua"]: return self.sample(x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]), l["I"])
            S = (x.shape[2] // m.stride[0]) * (x.shape[3] // m.stride[0]); want = max(self.o["rows"], 2*l["I"]); n = min(len(x), max(8, math.ceil(want / S)))
            o = int(torch.randint(0, max(1, len(x) // n), (1,)).item())
            u = F.unfold(x[o::max(1, len(x)//n)][:n], m.kernel_size, m.dilation, m.padding, m.stride); return self.sample(u.transpose(1, 2).reshape(-1, u.shape[1]), l["I"])
        return self.sample(x.reshape(-1, x.shape[-1]), l["I"])
    def put(self, l, side, r, bias=False, scale=False):
        if bias: r = torch.cat([r, r.new_ones(len(r), 1)], 1)
        if r.dtype == torch.bfloat16 and r.is_cuda:
            M = torch.mm(r.T, r, out_dtype=torch.float32)
        else: M = (r.T @ r).float()
        if scale: pass
        l["got"][side] = l["got"].get(side, 0) + M / len(r)
    @property
    def due_stats(self):
        if self.o["kind"] != "kfac": return False
        se = self.o["stat_every"]
        if se is None: se = max(1, self.o["refresh"] // 4)
        return self.t < 2 * self.o["early"] or self.t % se == 0 
    def due_refresh(self, D=0):
        t, e = self.t, self.o["early"]
        if D > 1024 and t >= e: return t % (5 * self.o["refresh"]) == 0
        if t < e: return True
        if t < 100: return t % max(1, min(5, self.o["refresh"])) == 0
        return t % self.o["refresh"] == 0
    @torch.no_grad()
    def step(self):
        g0 = self.param_groups[0]; lr, (b1, b2), wd = g0["lr"], g0["betas"], g0["weight_decay"]; o = self.o
        self.t += 1; t = self.t - 1; self.t -= 1
        for key, ls in self.groups.items():
            O, I, taps, bias = key
            s = self.gs.setdefault(key, {})
            if ls[0]["ps"][0].grad is None: continue
            W = [l["ps"][0].grad.float().reshape(O, -1) for l in ls]
            G = torch.stack(W) if not bias else torch.stack([torch.cat([w, l["ps"][1].grad.float()[:, None]], 1) for w, l in zip(W, ls)])
            L = len(ls)
            if taps > 1: G = G.view(L, O, I, taps).transpose(2, 3).reshape(L, O * taps, I)  # rows: (o, tap)
            first = "s" not in s
            for side in "AB":
                if not ls[0][side] or o["kind"] == "identity": continue
                M = None
                if o["kind"] == "kfac" and ls[0]["got"].get(side) is not None: M = torch.stack([l["got"].pop(side) for l in ls])
                if o["kind"] == "grad":
                    if side == "A": M = G.mT @ G
                    else:
                        Gb = G.view(L, O, taps * I) if taps == 1 else G.reshape(L, O, taps * I)
                        M = Gb @ Gb.mT
                if M is not None:
                    M = M / M.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(1e-30) if o["kind"] == "kfac" and o.get("unit") else M
                    if side not in s: s[side] = M.clone(); s["w" + side] = 1 - o["fdecay"]; s[side] *= 1 - o["fdecay"]
                    else: s[side].lerp_(M, 1 - o["fdecay"])
            new = {}
            if o["kind"] != "identity":
                for side in "AB":
                    if side not in s: continue
                    if "U" + side not in s: s["U" + side] = eigh_desc(s[side])
                    elif self.due_refresh(s[side].shape[-1]): new[side] = qr_warm(s[side], s["U" + side])
            if new and not first:
                RA = s["UA"].mT @ new["A"] if "A" in new else None
                RB = s["UB"].mT @ new["B"] if "B" in new else None
                s["m"] = self.rot(s["m"], RA, RB, O, taps)
                if o["carry"]: s["s"] = self.rot(s["s"], None if RA is None else RA.square(), None if RB is None else RB.square(), O, taps)
            for side, U in new.items(): s["U" + side] = U
            if new and not first and self.o["anchor"]:
                va = (s["UA"] * (s["A"] @ s["UA"])).sum(-2) if "UA" in s else torch.ones(L, 1, device=G.device)
                vb = (s["UB"] * (s["B"] @ s["UB"])).sum(-2) if "UB" in s else torch.ones(L, 1, device=G.device)
                if taps > 1: vb = vb.repeat_interleave(taps, 1)
                k = (vb[:, :, None] * va[:, None, :]).expand_as(s["s"]).clamp_min(0)
                k = k * (s["s"].sum((1, 2), keepdim=True) / k.sum((1, 2), keepdim=True).clamp_min(1e-30))
                s["s"] = s["s"].lerp(k, self.o["anchor"])
            UA, UB = s.get("UA"), s.get("UB")
            g = self.rot(G, UA, UB, O, taps)
            if first: s["m"] = torch.zeros_like(g); s["s"] = torch.zeros_like(g)
            kap = o["belief"]
            if kap is None:
                s["m"].lerp_(g, 1 - b1); s["s"].lerp_(g.square(), 1 - b2); mh = s["m"] / (1 - b1 ** (t + 1))
            else:
                old = s["m"] / max(1 - b1 ** t, 1e-12) if t else g
                s["m"].lerp_(g, 1 - b1); mh = s["m"] / (1 - b1 ** (t + 1))
                s["s"].lerp_((g - old).square() * ((1 + b1) / 2) + kap * mh.square(), 1 - b2)
            if o["nesterov"]: mh = (b1 * s["m"] + (1 - b1) * g) / (1 - b1 ** (t + 2))
            d = mh / ((s["s"] / (1 - b2 ** (t + 1))).sqrt() + o["eps"])
            if o["cautious"]:
                mk = (d * g > 0).to(d); d = d * mk / mk.mean((1, 2), keepdim=True).clamp_min(0.1)
            r = d.square().mean((1, 2), keepdim=True).sqrt()
            if o["norm"] == "clip": d = d / (r / o["rms"]).clamp_min(1.0)
            elif o["norm"] == "fix": d = d * (o["rms"] / r.clamp_min(1e-12))
            if t % 50 == 0: self.log.setdefault("rms", []).append((t, round(r.mean().item(), 3)))
            P = self.rot(d, None if UA is None else UA.mT, None if UB is None else UB.mT, O, taps)
            if taps > 1: P = P.view(L, O, taps, I).transpose(2, 3).reshape(L, O, I * taps)
            for l, p in zip(ls, P):
                w = l["ps"][0]
                if o["cwd"]:
                    pw = (p[:, :-1] if bias else p).reshape(w.shape); w.sub_(w * (w * pw > 0) * (lr * wd))
                else: w.mul_(1 - lr * wd)
                if bias: w.add_(p[:, :-1].reshape(w.shape), alpha=-lr); l["ps"][1].add_(p[:, -1], alpha=-lr)
                else: w.add_(p.reshape(w.shape), alpha=-lr)
        fl = [p for p in self.flat if p.grad is not None]
        if fl:
            if not hasattr(self, "fm"): self.fm = [torch.zeros_like(p) for p in fl]; self.fs = [torch.zeros_like(p) for p in fl]
            gr = [p.grad for p in fl]; b2f = o["b2_1d"] or b2
            torch._foreach_lerp_(self.fm, gr, 1 - b1); torch._foreach_mul_(self.fs, b2f); torch._foreach_addcmul_(self.fs, gr, gr, 1 - b2f)
            den = torch._foreach_sqrt(torch._foreach_div(self.fs, 1 - b2f ** (t + 1))); torch._foreach_add_(den, o["eps"])
            d = torch._foreach_div(torch._foreach_div(self.fm, 1 - b1 ** (t + 1)), den)
            torch._foreach_mul_([p for p in fl if p.dim() > 1] or [torch.zeros(1)], 1 - lr * wd)
            torch._foreach_add_(fl, d, alpha=-lr * o["lrw"])
        self.t += 1
    @staticmethod
    def rot(X, RA, RB, O, taps):
        if RA is not None: X = X @ RA
        if RB is not None:
            L = X.shape[0]
            X = (RB.mT @ X.reshape(L, O, -1)).view_as(X) if taps > 1 else RB.mT @ X
        return X
