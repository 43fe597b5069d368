"""Factors, second moments and preconditioned gradients beside curvlinops and nngeometry, in float64.

Both compute the same matrices for other purposes. Where they are right the numbers must agree; where they are known not
to be, the test says so, shows it, and compares ours with the dense truth.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import oracle
from paper import EKFAC, KFAC, Preconditioner

curvlinops = pytest.importorskip("curvlinops")
nngeometry = pytest.importorskip("nngeometry")
from curvlinops import EKFACLinearOperator, KFACInverseLinearOperator, KFACLinearOperator  # noqa: E402
from nngeometry.layercollection import LayerCollection  # noqa: E402
from nngeometry.metrics import FIM  # noqa: E402
from nngeometry.object import PMatEKFAC, PMatKFAC  # noqa: E402
from nngeometry.object.vector import PVector  # noqa: E402

N, CLASSES, EPSILON = 64, 3, 0.03


class Pooled(nn.Module):
    """A sequence through Linear layers; the model's own output has no sequence left."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inside(x)).mean(1))


class Flattened(Pooled):
    """The same, with examples and positions in one leading dimension while the first layer is applied."""

    def forward(self, x: Tensor) -> Tensor:
        n, s, d = x.shape
        return self.head(torch.tanh(self.inside(x.reshape(n * s, d))).reshape(n, s, -1).mean(1))


def cnn(*first: Any, size: int, **options: Any) -> nn.Sequential:
    conv = nn.Conv2d(2, 3, *first, **options)
    features = conv(torch.zeros(1, 2, size, size)).numel()
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(features, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, CLASSES)), (4,)),
    "mlp without bias": (
        lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, CLASSES, bias=False)),
        (4,),
    ),
    "convolution": (lambda: cnn(3, padding=1, size=4), (2, 4, 4)),
    "strided": (lambda: cnn(3, padding=1, stride=2, size=5), (2, 5, 5)),
    "dilated": (lambda: cnn(2, dilation=2, size=5), (2, 5, 5)),
    "oblong, no bias": (lambda: cnn((2, 3), stride=(2, 1), padding=(1, 0), bias=False, size=4), (2, 4, 4)),
}
SEQUENCES = {"sequence": (Pooled, (6, 4))}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    build, shape = {**MODELS, **SEQUENCES}[name]
    return build().double(), torch.randn(N, *shape, dtype=torch.float64), torch.randint(CLASSES, (N,))


def preconditioned(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> tuple[Preconditioner, dict[str, Tensor]]:
    """Our preconditioner after one step, and the gradients before it; ``.grad`` now holds what it made of them."""
    pre = Preconditioner(model, damping=EPSILON, **options)
    pre.zero_grad()
    F.cross_entropy(model(x), y).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert pre.step()
    pre.close()
    return pre, gradients


def factors_of(pre: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by layer, read from the state."""
    found = {}
    for name, module in pre.model.named_modules():
        state = pre.state.get(getattr(module, "weight", None))
        if state:
            found[name] = (state["A"] / state["factor_weight"], state["B"] / state["factor_weight"])
    return found


def same(one: Tensor, two: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance * float(two.abs().max()))


def differ(one: Tensor, two: Tensor) -> bool:
    return bool((one - two).abs().max() > 0.01 * two.abs().max())


# ------------------------------------------------------------------------------------------------- curvlinops


def curvlinops_of(kind: Any, model: nn.Module, x: Tensor, y: Tensor, sharing: str = "expand") -> Any:
    twin = copy.deepcopy(model)
    return kind(
        twin,
        nn.CrossEntropyLoss(),
        list(twin.parameters()),
        [(x, y)],
        fisher_type="empirical",
        kfac_approx=sharing,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", [*MODELS, *SEQUENCES])
def test_factors_are_curvlinops(name: str, sharing: str) -> None:
    model, x, y = problem(name)
    theirs = curvlinops_of(KFACLinearOperator, model, x, y, sharing)
    theirs.compute_kronecker_factors()
    kept = theirs.state_dict()
    pre, _ = preconditioned(model, x, y, sharing=sharing)
    ours = factors_of(pre)
    assert ours.keys() == kept["input_covariances"].keys()
    for layer, (A, B) in ours.items():
        same(A[0], kept["input_covariances"][layer])
        same(B[0], kept["gradient_covariances"][layer])


@pytest.mark.parametrize("name", [*MODELS, *SEQUENCES])
def test_second_moments_and_preconditioned_gradients_are_curvlinops(name: str) -> None:
    """s* in the eigenbasis, and (EKFAC + epsilon)^-1 times the gradient."""
    model, x, y = problem(name)
    theirs = curvlinops_of(EKFACLinearOperator, model, x, y)
    theirs.compute_eigenvalue_correction()
    corrected = theirs.state_dict()["corrected_eigenvalues"]
    pre, gradients = preconditioned(model, x, y, scaling="per_example")
    for layer, module in model.named_modules():
        if layer in corrected:
            s = corrected[layer]
            s = next(iter(s.values())) if isinstance(s, dict) else s  # a layer without a bias keeps one a parameter
            same(pre.state[module.weight]["s"][0], s, 1e-7)
    inverse = KFACInverseLinearOperator(theirs, damping=EPSILON, use_exact_damping=True)
    expected = inverse @ [g.clone() for g in gradients.values()]
    for p, v in zip(model.parameters(), expected, strict=True):
        same(p.grad, v, 1e-7)


@pytest.mark.parametrize("name", [*MODELS, *SEQUENCES])
def test_the_kfac_step_is_curvlinops(name: str) -> None:
    """Damped factors with the trace correction: (B + sqrt(eps) / pi)^-1 G (A + pi sqrt(eps))^-1."""
    model, x, y = problem(name)
    theirs = curvlinops_of(KFACLinearOperator, model, x, y)
    inverse = KFACInverseLinearOperator(theirs, damping=EPSILON, use_heuristic_damping=True)
    before = [p.detach().clone() for p in model.parameters()]
    opt = KFAC(model, lr=1.0, damping=EPSILON)
    F.cross_entropy(model(x), y).backward()
    expected = inverse @ [p.grad.clone() for p in model.parameters()]
    opt.step()
    for p, old, v in zip(model.parameters(), before, expected, strict=True):
        same(old - p.detach(), v, 1e-7)


@pytest.mark.parametrize("name", ["mlp", "strided"])
def test_the_kronecker_rule_is_curvlinops(name: str) -> None:
    """S_B x S_A + epsilon in the eigenbasis."""
    model, x, y = problem(name)
    inverse = KFACInverseLinearOperator(
        curvlinops_of(KFACLinearOperator, model, x, y), damping=EPSILON, use_exact_damping=True
    )
    _, gradients = preconditioned(model, x, y, scaling="kronecker")
    for p, v in zip(model.parameters(), inverse @ [g.clone() for g in gradients.values()], strict=True):
        same(p.grad, v, 1e-7)


# ------------------------------------------------------------------------------------------------- nngeometry


def nngeometry_of(kind: Any, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Any, nn.Module]:
    """Their matrix of the empirical Fisher: a "regression" whose single output is the loss of the example."""
    twin = copy.deepcopy(model)
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
    matrix = FIM(
        twin,
        loader,
        kind,
        variant="regression",
        function=lambda *batch: F.cross_entropy(twin(batch[0]), batch[1], reduction="none").unsqueeze(1),
        layer_collection=LayerCollection.from_model(twin),
    )
    if kind is PMatEKFAC:
        matrix.update_diag(loader)
    return matrix, twin


def their_solution(matrix: Any, twin: nn.Module, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    collection = matrix.generator.layer_collection
    by_layer = {}
    for key, (name, module) in zip(
        collection.layers, ((n, m) for n, m in twin.named_modules() if hasattr(m, "weight")), strict=True
    ):
        by_layer[key] = tuple(gradients[f"{name}.{role}"] for role, _ in module.named_parameters(recurse=False))
    solved = matrix.solve(PVector(collection, dict_repr=by_layer), regul=EPSILON).to_dict()
    flat = [t for key in collection.layers for t in solved[key]]
    return dict(zip(gradients, flat, strict=True))


@pytest.fixture
def _double() -> Any:
    """Nngeometry makes identities of the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("name", MODELS)
def test_factors_are_nngeometrys(name: str) -> None:
    """It divides B, not A, by the number of positions S; the product of the two is the same."""
    model, x, y = problem(name)
    matrix, _ = nngeometry_of(PMatKFAC, model, x, y)
    pre, _ = preconditioned(model, x, y)
    for (A, B), (a, g) in zip(factors_of(pre).values(), matrix.data.values(), strict=True):
        positions = round(float(a.trace() / A.trace() if A.dim() == 2 else a.trace() / A[0].trace()))
        assert positions == 1 or "mlp" not in name
        same(A[0] * positions, a)
        same(B[0] / positions, g)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("name", MODELS)
def test_second_moments_and_preconditioned_gradients_are_nngeometrys(name: str) -> None:
    model, x, y = problem(name)
    matrix, twin = nngeometry_of(PMatEKFAC, model, x, y)
    pre, gradients = preconditioned(model, x, y, scaling="per_example")
    weights = [m.weight for m in model.modules() if hasattr(m, "weight")]
    for weight, s in zip(weights, matrix.data[1].values(), strict=True):
        same(pre.state[weight]["s"][0], s.view_as(pre.state[weight]["s"][0]), 1e-7)
    for parameter, v in their_solution(matrix, twin, gradients).items():
        same(model.get_parameter(parameter).grad, v, 1e-7)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("name", MODELS)
def test_the_kfac_step_is_nngeometrys(name: str) -> None:
    """With the trace correction it does not matter which of the factors is divided by S."""
    model, x, y = problem(name)
    matrix, twin = nngeometry_of(PMatKFAC, model, x, y)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt = KFAC(model, lr=1.0, damping=EPSILON)
    F.cross_entropy(model(x), y).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    opt.step()
    for parameter, v in their_solution(matrix, twin, gradients).items():
        same(before[parameter] - model.get_parameter(parameter).detach(), v, 1e-7)


# --------------------------------------------------------------------------------- where they are not right


def dense_block(model: nn.Module, x: Tensor, y: Tensor, layer: oracle.Layer) -> Tensor:
    """The empirical Fisher of one layer, in the order of [G, O, C], from per-example gradients by torch.func."""
    gradients = oracle.per_example_gradients(copy.deepcopy(model), F.cross_entropy, x, y)
    each = torch.stack([layer.pack({n: gradients[n][i] for n in layer.names}) for i in range(len(x))])
    return oracle.dense_fisher(each)


def our_dense(pre: Preconditioner, weight: nn.Parameter) -> Tensor:
    """U diag(s) U^T of all groups, as one matrix."""
    state = pre.state[weight]
    blocks = []
    for U_A, U_B, s in zip(state["U_A"], state["U_B"], state["s"], strict=True):
        U = torch.kron(U_B.contiguous(), U_A.contiguous())
        blocks.append(U @ torch.diag(s.reshape(-1)) @ U.T)
    return torch.block_diag(*blocks)


def test_grouped_convolutions_which_curvlinops_averages_over_groups() -> None:
    """It takes the mean of the groups' receptive fields for the input of each; ours is the dense truth's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, CLASSES)).double()
    x, y = torch.randn(N, 4, 3, 3, dtype=torch.float64), torch.randint(CLASSES, (N,))
    pre, _ = preconditioned(model, x, y, scaling="per_example")
    A, B = factors_of(pre)["0"]

    layer = oracle.find_layers(model)[0]
    seen = oracle.observe(model, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), [(x, y)], [layer])
    h, delta = seen.calls[layer.key]
    A_true, B_true = oracle.factors(h, delta, layer)
    same(A, A_true)
    same(B, B_true)

    theirs = curvlinops_of(KFACLinearOperator, model, x, y)
    theirs.compute_kronecker_factors()
    a, g = (theirs.state_dict()[key]["0"] for key in ("input_covariances", "gradient_covariances"))
    blurred = h.mean(2)
    same(a, torch.einsum("nsi,nsj->ij", blurred, blurred) / blurred[..., 0].numel())
    assert differ(a, A[0]) and differ(a, A[1])
    same(torch.stack([g[:2, :2], g[2:, 2:]]), B)

    fisher = dense_block(model, x, y, layer)
    ours = our_dense(pre, model[0].weight)
    same(ours.trace(), fisher.trace())

    operator = curvlinops_of(EKFACLinearOperator, model, x, y)
    vectors = torch.eye(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    dense = operator @ vectors
    rows = [*range(4 * 8), *range(32, 36)]  # the convolution's weight and bias come first
    by_output = [[*(8 * o + c for c in range(8)), 32 + o] for o in range(4)]
    order = [i for output in by_output for i in output]
    assert sorted(order) == rows
    rival = dense[order][:, order]
    assert differ(rival.trace(), fisher.trace())
    assert (ours - fisher).norm() < (rival - fisher).norm()


@pytest.mark.usefixtures("_double")
def test_flattened_sequences_which_nngeometry_takes_for_more_examples() -> None:
    """Every position counts as an example of its own: its KFAC is S times too large, its EKFAC squares before summing.

    On three-dimensional input its Linear layer raises. Ours views [N S, D] as [N, S, D] and meets the dense truth.
    """
    torch.manual_seed(0)
    model, positions = Flattened().double(), 6
    x, y = torch.randn(N, positions, 4, dtype=torch.float64), torch.randint(CLASSES, (N,))
    pooled = Pooled().double()
    pooled.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="3D"):
        nngeometry_of(PMatKFAC, pooled, x, y)

    matrix, _ = nngeometry_of(PMatKFAC, model, x, y)
    a, g = next(iter(matrix.data.values()))
    pre, _ = preconditioned(model, x, y, scaling="per_example")
    A, B = factors_of(pre)["inside"]
    same(torch.kron(g, a), positions * torch.kron(B[0], A[0]))

    layer = oracle.find_layers(model)[0]
    fisher = dense_block(pooled, x, y, layer)
    ours = our_dense(pre, model.inside.weight)
    same(ours.trace(), fisher.trace())
    U = torch.kron(pre.state[model.inside.weight]["U_B"][0], pre.state[model.inside.weight]["U_A"][0])
    same(pre.state[model.inside.weight]["s"].reshape(-1), (U.T @ fisher @ U).diagonal(), 1e-8)
    ekfac, _ = nngeometry_of(PMatEKFAC, model, x, y)
    assert differ(next(iter(ekfac.data[1].values())).sum(), fisher.trace())


def test_a_long_training_keeps_to_them() -> None:
    """After several steps with Algorithm 1 itself the state is still what curvlinops computes afresh."""
    model, x, y = problem("strided")
    opt = EKFAC(model, lr=0.3, damping=EPSILON, scaling="per_example", refresh_every=1, factor_decay=0.0)
    for _ in range(5):
        theirs = curvlinops_of(EKFACLinearOperator, model, x, y)
        inverse = KFACInverseLinearOperator(theirs, damping=EPSILON, use_exact_damping=True)
        before = [p.detach().clone() for p in model.parameters()]
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        expected = inverse @ [p.grad.clone() for p in model.parameters()]
        opt.step()
        for p, old, v in zip(model.parameters(), before, expected, strict=True):
            same((old - p.detach()) / 0.3, v, 1e-6)
