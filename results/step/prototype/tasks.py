"""Tasks for research: each gives model, batch(i) -> loss closure input, evaluate()."""
import gzip, lzma, math, os, struct
import numpy as np, torch
from torch import nn
from torch.nn import functional as F
DATA = os.environ.get("RDATA", "data")
dev = "cuda" if torch.cuda.is_available() else "cpu"

def idx(path):
    raw = gzip.open(path).read(); nd = raw[3]; dims = struct.unpack(">" + "I"*nd, raw[4:4+4*nd])
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4+4*nd).reshape(dims).copy())
def mnist(kind):
    d = f"{DATA}/{kind}"
    g = lambda n: idx(f"{d}/{n}.gz")
    return [t.to(dev) for t in (g("train-images-idx3-ubyte"), g("train-labels-idx1-ubyte").long(), g("t10k-images-idx3-ubyte"), g("t10k-labels-idx1-ubyte").long())]
def cifar():
    z = np.load(f"{DATA}/cifar20k.npz") if os.path.exists(f"{DATA}/cifar20k.npz") else None
    if z is None and not os.path.exists(f"{DATA}/cifar10"):
        g = np.random.default_rng(0); z = dict(x=g.integers(0, 255, (20000, 3072), dtype=np.uint8), y=g.integers(0, 10, 20000))
    if z is None:
        import pickle
        xs, ys = [], []
        for i in (1, 2):
            b = pickle.loads(lzma.open(f"{DATA}/cifar10/data_batch_{i}.xz").read(), encoding="latin1"); xs.append(b["data"]); ys += b["labels"]
        z = dict(x=np.concatenate(xs), y=np.array(ys))
    x = torch.from_numpy(z["x"]).view(-1, 3, 32, 32).to(dev).float().div_(255); y = torch.from_numpy(np.asarray(z["y"])).long().to(dev)
    mean, std = x[:15000].mean((0, 2, 3), keepdim=True), x[:15000].std((0, 2, 3), keepdim=True)
    x = (x - mean) / std
    return x[:15000], y[:15000], x[15000:20000], y[15000:20000]

class Task:
    amp = False; floor = 0.0
    def epochs_index(self, n, batch, epochs, seed):
        g = torch.Generator().manual_seed(seed + 1000)
        for e in range(epochs):
            p = torch.randperm(n, generator=g).to(dev)
            for i in range(n // batch): yield p[i*batch:(i+1)*batch]

class AE(Task):
    """relu auto-encoder on Fashion-MNIST or the paper's sigmoid one on MNIST."""
    def __init__(self, kind="fashion-mnist", act=nn.ReLU, widths=(1000, 500, 250, 30), bn=False, epochs=20, batch=200, seed=0, scale=1.0):
        xtr, _, xte, _ = mnist(kind); self.x = xtr.flatten(1).float() / 255; self.v = xte.flatten(1).float() / 255
        w = [784] + [max(4, int(a*scale)) for a in widths]; dims = w + w[-2::-1]; L = []
        torch.manual_seed(seed)
        for i in range(len(dims) - 1):
            lin = nn.Linear(dims[i], dims[i+1]); nn.init.xavier_uniform_(lin.weight); nn.init.zeros_(lin.bias); L.append(lin)
            if i != len(w) - 2 and i != len(dims) - 2:
                if bn: L.append(nn.BatchNorm1d(dims[i+1]))
                L.append(act())
        self.model = nn.Sequential(*L).to(dev); self.epochs, self.batch, self.seed = epochs, batch, seed
        ent = lambda x: -(torch.xlogy(x, x) + torch.xlogy(1-x, 1-x)).sum(1).mean().item()
        self.floor_train, self.floor = ent(self.x), ent(self.v)
        self.steps = epochs * (len(self.x) // batch)
    def batches(self): return self.epochs_index(len(self.x), self.batch, self.epochs, self.seed)
    def loss(self, ix):
        x = self.x[ix]; return F.binary_cross_entropy_with_logits(self.model(x), x, reduction="sum") / len(x)
    @torch.no_grad()
    def evaluate(self):
        self.model.eval(); r = {}
        for n, x, fl in (("train", self.x, self.floor_train), ("val", self.v, self.floor)):
            r[n] = sum(F.binary_cross_entropy_with_logits(self.model(b), b, reduction="sum").item() for b in x.split(5000)) / len(x) - fl
        self.model.train(); return r

def conv(i, o, k=3, s=1, g=1): return nn.Conv2d(i, o, k, s, k // 2, groups=g, bias=False)
class Basic(nn.Module):
    def __init__(self, i, o, s):
        super().__init__(); self.a, self.n1, self.b, self.n2 = conv(i, o, 3, s), nn.BatchNorm2d(o), conv(o, o), nn.BatchNorm2d(o)
        self.s = nn.Sequential(conv(i, o, 1, s), nn.BatchNorm2d(o)) if (s != 1 or i != o) else nn.Identity()
    def forward(self, x): return F.relu(self.s(x) + self.n2(self.b(F.relu(self.n1(self.a(x))))))
def resnet18(w=64):
    L, i = [conv(3, w), nn.BatchNorm2d(w), nn.ReLU()], w
    for k, o in enumerate((w, 2*w, 4*w, 8*w)):
        for j in range(2): L.append(Basic(i, o, 2 if (k and not j) else 1)); i = o
    return nn.Sequential(*L, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 10))
class Inv(nn.Module):
    def __init__(self, i, o, s=1, t=4):
        super().__init__(); h = i*t
        self.f = nn.Sequential(conv(i, h, 1), nn.BatchNorm2d(h), nn.ReLU6(), conv(h, h, 3, s, h), nn.BatchNorm2d(h), nn.ReLU6(), conv(h, o, 1), nn.BatchNorm2d(o)); self.r = s == 1 and i == o
    def forward(self, x): return x + self.f(x) if self.r else self.f(x)
class Images(Task):
    def __init__(self, kind, seed=0, epochs=None, batch=256, scale=1.0):
        torch.manual_seed(seed); self.kind = kind
        if kind == "resnet18": self.data = cifar(); self.amp = True; self.model = resnet18(int(64*scale)); epochs = epochs or 16
        if kind == "vit": 
            self.data = cifar(); self.amp = True; self.model = ViT(); epochs = epochs or 16
        if kind == "depthwise":
            a, b, c, d = mnist("fashion-mnist"); f = lambda x: ((x.float()/255 - 0.286) / 0.353)[:, None]
            self.data = f(a), b, f(c), d; W = [int(w*scale) for w in (32, 32, 64, 64, 128, 128)]
            s = [1, 2, 1, 2, 1]
            self.model = nn.Sequential(conv(1, W[0]), nn.BatchNorm2d(W[0]), nn.ReLU6(), *[Inv(W[i], W[i+1], s[i]) for i in range(5)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(W[-1], 10)); epochs = epochs or 8
        self.model.to(dev); self.epochs, self.batch, self.seed = epochs, batch, seed
        self.steps = epochs * (len(self.data[0]) // batch)
        self.g = torch.Generator(device=dev).manual_seed(seed)
    def batches(self): return self.epochs_index(len(self.data[0]), self.batch, self.epochs, self.seed)
    def loss(self, ix):
        x, y = self.data[0][ix], self.data[1][ix]
        if self.kind in ("resnet18", "vit"):
            n = len(x); flip = torch.rand(n, generator=self.g, device=dev) < 0.5
            x = torch.where(flip[:, None, None, None], x.flip(3), x); x = F.pad(x, (4,)*4)
            o = torch.randint(0, 9, (2, n), generator=self.g, device=dev); r = torch.arange(32, device=dev)
            x = x[torch.arange(n, device=dev)[:, None, None], :, (o[0][:, None] + r)[:, :, None], (o[1][:, None] + r)[:, None, :]].permute(0, 3, 1, 2).contiguous()
        with torch.autocast(dev, torch.bfloat16, enabled=self.amp): out = self.model(x)
        return F.cross_entropy(out.float(), y)
    @torch.no_grad()
    def evaluate(self):
        self.model.eval(); r = {}
        for n, x, y in (("train", *self.data[:2]), ("val", *self.data[2:])):
            l = c = 0.0
            for i in range(0, len(x), 2500):
                with torch.autocast(dev, torch.bfloat16, enabled=self.amp): o = self.model(x[i:i+2500]).float()
                l += F.cross_entropy(o, y[i:i+2500], reduction="sum").item(); c += (o.argmax(1) == y[i:i+2500]).sum().item()
            r[n] = l / len(x); r[n + "_acc"] = 100 * c / len(x)
        self.model.train(); return r

class Attn(nn.Module):
    def __init__(self, d, h, bias=False, causal=True, drop=0.0):
        super().__init__(); self.q, self.o, self.h, self.c, self.p = nn.Linear(d, 3*d, bias=bias), nn.Linear(d, d, bias=bias), h, causal, drop
    def forward(self, x):
        B, T, D = x.shape; q, k, v = self.q(x).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.c, dropout_p=self.p if self.training else 0.0)
        return F.dropout(self.o(y.transpose(1, 2).reshape(B, T, D)), self.p, self.training)
class BlockT(nn.Module):
    def __init__(self, d, h, bias=False, causal=True, drop=0.0):
        super().__init__(); self.n1, self.a, self.n2 = nn.LayerNorm(d, bias=bias), Attn(d, h, bias, causal, drop), nn.LayerNorm(d, bias=bias)
        self.u, self.d, self.p = nn.Linear(d, 4*d, bias=bias), nn.Linear(4*d, d, bias=bias), drop
    def forward(self, x):
        x = x + self.a(self.n1(x)); return x + F.dropout(self.d(F.gelu(self.u(self.n2(x)))), self.p, self.training)
class GPT(nn.Module):
    def __init__(self, V=8192, T=256, d=512, L=8, h=8, drop=0.0, tied=True):
        super().__init__(); self.e, self.pos = nn.Embedding(V, d), nn.Embedding(T, d)
        self.blocks = nn.ModuleList(BlockT(d, h, drop=drop) for _ in range(L)); self.n, self.head, self.p = nn.LayerNorm(d, bias=False), nn.Linear(d, V, bias=False), drop
        self.head.weight = self.e.weight
        for n, p in self.named_parameters():
            if p.dim() == 2: nn.init.normal_(p, std=0.02 / (math.sqrt(2*L) if n.endswith((".o.weight", ".d.weight")) else 1))
    def forward(self, x):
        x = F.dropout(self.e(x) + self.pos(torch.arange(x.shape[1], device=x.device)), self.p, self.training)
        for b in self.blocks: x = b(x)
        return self.head(self.n(x))
class ViT(nn.Module):
    def __init__(self, d=192, L=6, h=3, p=4):
        super().__init__(); self.patch = nn.Conv2d(3, d, p, p); self.pos = nn.Parameter(torch.randn(1, (32//p)**2, d)*0.02)
        self.blocks = nn.Sequential(*[BlockT(d, h, True, False) for _ in range(L)]); self.n, self.head = nn.LayerNorm(d), nn.Linear(d, 10)
    def forward(self, x): return self.head(self.n(self.blocks(self.patch(x).flatten(2).transpose(1, 2) + self.pos)).mean(1))
class Text(Task):
    amp = True
    def __init__(self, kind="bpe", steps=1200, seed=0, B=64, T=256, **kw):
        if kind == "bpe":
            t = torch.from_numpy(np.frombuffer(lzma.open(f"{DATA}/text/dictionary-kernel-bpe8192.u16.xz").read(), np.uint16).astype(np.int64)); n = len(t) - 800_000; V = 8192
        else:
            s = open(f"{DATA}/text/tinyshakespeare.txt").read(); ch = sorted(set(s)); m = {c: i for i, c in enumerate(ch)}; t = torch.tensor([m[c] for c in s]); n = int(0.9*len(t)); V = 65
            kw = dict(d=384, L=6, h=6, drop=0.2, **kw)
        torch.manual_seed(seed)
        self.t, self.val = t[:n].to(dev), t[n:].to(dev); self.model = GPT(V=V, T=T, **kw).to(dev); self.steps, self.B, self.T = steps, B, T; self.seed = seed
    def batches(self):
        g = torch.Generator(device=dev).manual_seed(self.seed)
        for _ in range(self.steps): yield torch.randint(0, len(self.t) - self.T - 1, (self.B,), generator=g, device=dev)
    def ce(self, t, ix):
        w = t[ix[:, None] + torch.arange(self.T + 1, device=dev)]
        with torch.autocast(dev, torch.bfloat16): o = self.model(w[:, :-1])
        return F.cross_entropy(o.float().flatten(0, 1), w[:, 1:].flatten())
    def loss(self, ix): return self.ce(self.t, ix)
    @torch.no_grad()
    def evaluate(self):
        self.model.eval(); g = torch.Generator(device=dev).manual_seed(7)
        ls = [self.ce(self.val, torch.randint(0, len(self.val) - self.T - 1, (self.B,), generator=g, device=dev)).item() for _ in range(20)]
        self.model.train(); return {"val": sum(ls) / len(ls)}
TASKS = {
 "ae": lambda **k: AE(**k), "ae_bn": lambda **k: AE(bn=True, **k), "ae_paper": lambda **k: AE("mnist", nn.Sigmoid, **k),
 "resnet18": lambda **k: Images("resnet18", **k), "depthwise": lambda **k: Images("depthwise", **k), "vit": lambda **k: Images("vit", **k),
 "gpt": lambda **k: Text("bpe", **k), "char": lambda **k: Text("char", **{"steps": 1700, **k}),
}
