import os, sys, time, torch
sys.path.insert(0, "src")
from ekfac.curvature.eigensolvers import orthogonal_iteration
dev = "cuda"
torch.manual_seed(0)
def t(f, n=5, w=2):
    for _ in range(w): f()
    torch.cuda.synchronize(); a = torch.cuda.Event(enable_timing=True); b = torch.cuda.Event(enable_timing=True)
    h = time.perf_counter(); a.record()
    for _ in range(n): f()
    b.record(); hh = (time.perf_counter() - h) / n * 1e3
    torch.cuda.synchronize(); return f"{a.elapsed_time(b)/n:8.3f} ms (host {hh:6.2f})"
def fac(g, d, dt=torch.float32):
    x = torch.randn(g, 4096, d, device=dev) * torch.logspace(0, -3, d, device=dev); return (x.mT @ x / 4096).to(dt)
def qr1(A, Q, dt=torch.float64):  # one CholeskyQR pass + Newton
    A = A.to(dt); Q = Q.to(dt); Y = A @ Q
    eye = torch.eye(Y.shape[-1], dtype=dt, device=dev)
    Y = Y / torch.linalg.vector_norm(Y, dim=-2, keepdim=True)
    L, info = torch.linalg.cholesky_ex(Y.mT @ Y + 1e-12 * eye)
    Y = torch.linalg.solve_triangular(L.mT, Y, upper=True, left=False)
    return 1.5 * Y - 0.5 * Y @ (Y.mT @ Y)
if __name__ == "__main__":
    print(torch.__version__, torch.cuda.get_device_name())
    try:
        import triton; print("triton", triton.__version__)
    except Exception as e: print("no triton", e)
    for d in (512, 1024, 1536, 2048):
        A = fac(1, d)
        print("eigh f32", d, t(lambda: torch.linalg.eigh(A), 2, 1), "f64", t(lambda: torch.linalg.eigh(A.double()), 2, 1), flush=True)
    for g, d in ((1, 512), (8, 512), (16, 512), (1, 1024), (8, 1024), (1, 1536), (8, 1536), (1, 2048), (4, 2048), (8, 2048), (1, 4096)):
        A = fac(g, d); U = torch.linalg.qr(torch.randn(g, d, d, device=dev))[0]; D = A.double(); Q = U.double()
        Y = D @ Q; M = Y.mT @ Y + torch.eye(d, device=dev, dtype=torch.float64)
        L = torch.linalg.cholesky_ex(M)[0]
        print("iter", g, d, t(lambda: orthogonal_iteration(A, U)), "| 1 pass", t(lambda: qr1(A, U)), "| mm64", t(lambda: D @ Q), "chol", t(lambda: torch.linalg.cholesky_ex(M)), "trsm", t(lambda: torch.linalg.solve_triangular(L.mT, Y, upper=True, left=False)), "mm32", t(lambda: A @ U), "qr32", t(lambda: torch.linalg.qr(A), 2, 1), flush=True)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    for o, i in ((1536, 512), (2048, 512), (512, 2048), (512, 512)):
        G = torch.randn(8, o, i, device=dev); UA = torch.randn(8, i, i, device=dev); UB = torch.randn(8, o, o, device=dev)
        g16, a16, b16 = (x.bfloat16() for x in (G, UA, UB))
        print("project", o, i, "tf32", t(lambda: UB.mT @ G @ UA), "bf16", t(lambda: b16.mT @ g16 @ a16), flush=True)
    s, m, g = (torch.rand(8, 2048, 512, device=dev) for _ in range(3))
    def belief():
        k = m / 0.9; usual = (k.square() + s / 0.9).sum((1, 2), keepdim=True)
        f = (100 * usual / g.square().sum((1, 2), keepdim=True)).sqrt().clamp(max=1)
        seen = g * f; noise = seen - k; m.lerp_(seen, 0.05); mean = m / 0.9
        sq = noise.square_().mul_(0.975).add_(mean.square_().mul_(0.05)).clamp_(max=1e30); s.lerp_(sq, 0.05)
        root = (s / 0.9).sqrt_().add_(1e-8); x = (m / 0.9).div_(root); return x / x.square().mean((1, 2), keepdim=True).sqrt().clamp(min=1)
    print("belief eager", t(belief))
    try:
        c = torch.compile(belief); st = time.perf_counter(); c(); torch.cuda.synchronize(); print("compile s", time.perf_counter() - st, t(c))
    except Exception as e: print("compile failed", str(e)[:300])
