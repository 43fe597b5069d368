"""torch's parameter groups over a model's parameters, each with its own damping."""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from ekfac import checks
from ekfac.curvature.blocks import Block
from ekfac.optim import options
from ekfac.optim.base import copied
from ekfac.optim.engine import Engine
from ekfac.optim.options import FLAT, GROUPS, LARGEST, RULE_OPTIONS
from ekfac.optim.statistics import takeover
from ekfac.optim.step_size.adaptive_damping import Adaptation, AdaptiveDamping

Groups = Iterable[dict[str, Any]] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]

#: Options that hold for the whole model and cannot be set by a group.
SAME_FOR_ALL = {*FLAT, *GROUPS, *RULE_OPTIONS, "scaling", "damping_mode", "refresh_every", "grad_scaler"}


#: Key in the first group of a state dict for state that belongs to no parameter: torch.distributed.checkpoint keeps
#: what is in groups. Live groups have it too, but empty: a flattened state dict keeps only keys that they have.
EXTRA = "ekfac"


class Grouped(torch.optim.Optimizer):
    """A torch optimizer over a model's parameters, whose damping can be a function of the step or adapt.

    Groups hold the current damping as a number, so that checkpoints stay plain data; functions are kept elsewhere.

    Args:
        model: The model.
        params: Groups over its parameters, or parameters that form one group; all, even frozen ones, by default.
        defaults: Options of groups that do not set their own.
    """

    engine: Engine
    #: All arguments as they were given, for copies.
    _arguments: dict[str, Any]

    def __init__(self, model: nn.Module, params: Groups | None, defaults: dict[str, Any]) -> None:
        self.model = model
        self._damping_functions: dict[int, Callable[[int], float]] = {}
        self._adaptation: Adaptation | None = None
        #: The group of every trained parameter, the parameters that the default decay spares, and the version of
        #: partition and groups that both were computed for.
        self._group_of: dict[nn.Parameter, int] = {}
        self._spared: set[Tensor] = set()
        self._indexed: tuple[int, ...] = ()
        #: lr and damping of each group when they were last checked: schedulers and users write there.
        self._checked: dict[int, tuple[Any, Any]] = {}
        self._group_defaults = defaults
        defaults = {**defaults, "damping": self._as_function(defaults["damping"])}
        check_update_options(defaults)
        import_compiler()
        groups = as_groups(model.parameters() if params is None else params)
        named = [self._named_group(group, defaults, index) for index, group in enumerate(groups)]
        super().__init__(named, {**defaults, "damping": options.damping("damping", defaults["damping"])})
        self.param_groups[0][EXTRA] = {}

    def _all_parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _named_group(self, group: dict[str, Any], defaults: dict[str, Any], index: int) -> dict[str, Any]:
        """Check a group, name its parameters, and replace a damping function by its current value."""
        names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        given = group["params"]
        items = [given] if isinstance(given, Tensor) else list(given)
        parameters = [item[1] if isinstance(item, tuple) else item for item in items]
        for p in parameters:
            if not isinstance(p, Tensor):
                raise TypeError(f"params contains {checks.shown(p)}, which is not a parameter of the model")
            if p not in names:
                raise ValueError(
                    f"params contains a tensor of shape {tuple(p.shape)} that is not a parameter of the model. "
                    "Allowed: its parameters. To train those of a loss or of another network too, pass both as the "
                    "model: nn.ModuleList([model, loss])"
                )
        if "weight_decay" in group:
            group.setdefault("decay_vectors", True)
            group.setdefault("cautious_decay", False)
        group.setdefault("lr_named", "lr" in group)
        if "betas" in group:
            group.setdefault("betas_named", True)
        damping = self._as_function(group.get("damping", defaults["damping"]))
        check_update_options({**defaults, **group, "damping": damping})
        if callable(damping):
            self._damping_functions[index] = damping
            group["damping"] = options.damping("damping", damping)
        group["params"] = [(names[p], p) for p in parameters]
        return group

    def _use_derivative_defaults(self, groups: Iterable[dict[str, Any]]) -> None:
        """Switch to the defaults for losses with derivatives, where the user set none: no decay, and the rule's betas.

        Weight decay would pull the solution of the equation towards zero.
        """
        rule, changed = self.engine.elementwise.rule, set[nn.Parameter]()
        old: Any = self.defaults.get("betas")
        new = rule.derivative_betas
        for group in groups:
            if group["cautious_decay"] and group["weight_decay"] == self.defaults["weight_decay"]:
                group["weight_decay"] = 0.0
            if new is not None and not group.get("betas_named", True) and group["betas"] == old:
                group["betas"] = new
                changed.update(group["params"])
        if new is None or not changed:
            return
        self.engine.executor.join()  # a refresh may be carrying means into a new basis
        partition = self.engine.partition
        states: list[tuple[nn.Parameter, Any]] = [(b.key, partition.states.get(b.key)) for b in partition.blocks]
        states += [(parameters[0], state) for (_, parameters), state in partition.put_away.items()]
        for p, state in states:
            if state is not None and p in changed:
                rule.change_betas(state, old, new)

    def _as_function(self, damping: Any) -> Any:
        """Wrap an :class:`AdaptiveDamping` as the function that all groups share; return any other damping as it is."""
        if not isinstance(damping, AdaptiveDamping):
            return damping
        if self._adaptation is None:
            self._adaptation = Adaptation(damping)
        if self._adaptation.settings != damping:
            raise ValueError(f"damping={damping!r} beside {self._adaptation.settings!r}: all groups must share one")
        return self._adaptation

    @staticmethod
    def _follow_replacements(me: weakref.ref[Grouped]) -> Callable[[dict[nn.Parameter, nn.Parameter]], None]:
        """Return a callback that puts the model's replaced parameters, and their names, into the groups."""

        def replace(new: dict[nn.Parameter, nn.Parameter]) -> None:
            if (grouped := me()) is not None:
                names = {p: name for name, p in grouped.model.named_parameters()}
                for group in grouped.param_groups:
                    group["params"] = [new.get(p, p) for p in group["params"]]
                    known = zip(group["params"], group["param_names"], strict=True)
                    group["param_names"] = [names.get(p, name) for p, name in known]
                grouped._indexed = ()

        return replace

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters of the model, with options of their own, as in torch."""
        if not hasattr(self, "engine"):
            super().add_param_group(param_group)
            return
        index = len(self.param_groups)
        try:
            (group,) = as_groups([param_group])
            super().add_param_group(self._named_group(group, self._group_defaults, index))
            self._check_damping_within_layers(self.engine.partition.blocks_of(self._all_parameters()))
        except ValueError:
            del self.param_groups[index:]
            self._damping_functions.pop(index, None)
            self._adaptation = self._adapts()
            raise
        self.engine.collector.set_parameters(self._all_parameters())
        takeover.register(self.engine.collector)
        if self.engine.schedule.derivatives:
            self._use_derivative_defaults(self.param_groups[index:])

    def _saved_groups(self, given: Any) -> list[dict[str, Any]]:
        """Check the groups of a checkpoint, and add options that older versions did not have."""
        if not isinstance(given, list) or not all(isinstance(group, Mapping) for group in given):
            raise ValueError(f"state_dict, 'param_groups': is of type {type(given).__name__}. Allowed: a list of dicts")
        theirs, mine = [group.get("params") for group in given], [group["params"] for group in self.param_groups]
        if not all(isinstance(indices, (list, tuple)) for indices in theirs):
            raise ValueError("state_dict, 'param_groups': a group without 'params'. Allowed: lists of numbers")
        if list(map(len, theirs)) != list(map(len, mine)):
            sizes = [", ".join(str(len(group)) for group in groups) for groups in (theirs, mine)]
            raise ValueError(f"state_dict has groups of {sizes[0]} parameters, this optimizer of {sizes[1]}")
        missing = {name: value for name, value in self.param_groups[0].items() if name in self._group_defaults}
        missing |= {"decay_vectors": True, "cautious_decay": False, "lr_named": False}  # as in older versions
        if "betas_named" in self.defaults:
            missing["betas_named"] = True
        groups = []
        for place, (group, own) in enumerate(zip(given, self.param_groups, strict=True)):
            names = own.get("param_names")
            found = {**missing, "param_names": names, **group}
            found.pop("ekfac", None)
            try:
                if found["param_names"] != names:
                    raise ValueError(f"param_names={found['param_names']!r} must be this group's, {names}")
                check_update_options(found)
                for name in ("decay_vectors", "cautious_decay", "lr_named", "betas_named"):
                    checks.flag(name, found.get(name, True))
            except (ValueError, TypeError) as error:
                raise ValueError(f"state_dict, 'param_groups', group {place}: {error}") from None
            groups.append(found)
        flat = [index for group in groups for index in group["params"]]
        if not all(isinstance(index, (int, str)) for index in flat) or len(set(flat)) < len(flat):
            raise ValueError("state_dict, 'param_groups': 'params' must be numbers, each of them once")
        return groups

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self.engine.collector.follow()
        new = memo[id(self)] = object.__new__(type(self))  # before the model is copied: it may refer to this
        model = copied(self.model, memo)
        parameters = dict(model.named_parameters())
        if gone := [name for group in self.param_groups for name in group["param_names"] if name not in parameters]:
            raise RuntimeError(
                f"parameters {checks.listed(gone)} are no longer part of the model, so {type(self).__name__} cannot be "
                "copied: construct another one for the current model"
            )
        groups = []
        for index, group in enumerate(self.param_groups):
            settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            if index in self._damping_functions:
                function = self._damping_functions[index]
                settings["damping"] = function.settings if isinstance(function, Adaptation) else function
            groups.append({"params": [parameters[name] for name in group["param_names"]], **settings})
        new.__init__(model, params=groups, **self._arguments)  # type: ignore[misc]
        new.engine.attach_scaler(self.engine.options.grad_scaler)
        new.load_state_dict(self.state_dict())
        return new

    def _check_damping_within_layers(self, blocks: list[Block]) -> None:
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        for block in blocks:
            values = {group_of[p]["damping"] for p in block.parameters.values()}
            if len(values) > 1:
                raise ValueError(
                    f"damping={sorted(values)} within layer '{block.name}': the parameters of a layer must agree"
                )

    def _index(self) -> None:
        """Find the group of every trained parameter."""
        partition = self.engine.partition
        trained = set(partition.parameters)
        self._group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"] if p in trained}
        tables = (m.weight for m in self.engine.model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
        self._spared = {*tables, *(p for p in trained if p.dim() < 2)}
        self._check_damping_within_layers(partition.blocks)

    def _adapts(self) -> Adaptation | None:
        """Return the adaptive damping, if any group uses it."""
        return self._adaptation if self._adaptation in self._damping_functions.values() else None

    def _check_group(self, index: int) -> None:
        """Update a group's damping from its function, and check the group's lr and damping."""
        group = self.param_groups[index]
        if index in self._damping_functions:
            applied = self.engine.schedule.applied_steps
            group["damping"] = options.damping("damping", self._damping_functions[index], applied)
        checks.number("lr", group["lr"], least=0, most=LARGEST)
        options.damping("damping", group["damping"])
        self._checked[index] = group["lr"], group["damping"]


def import_compiler() -> None:
    """Import torch._dynamo, as torch's optimizers do at their first use, but in a separate thread.

    torch keeps an exception raised during this import. Its traceback would keep the importing frames alive, and with
    them the first optimizer and its model.
    """
    if "torch._dynamo" not in sys.modules:
        thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
        thread.start()
        thread.join()


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Return a list of groups, dicts with "params"; plain or named parameters form a single group."""
    allowed = "Allowed: a list of dicts, each with 'params', or of parameters of the model"
    if isinstance(params, (Tensor, dict, str)) or not isinstance(params, Iterable):
        raise TypeError(f"params is of type {type(params).__name__}. {allowed}")
    items = list(params)
    if not items:
        raise ValueError(f"params is empty. {allowed}")
    if not any(isinstance(item, dict) for item in items):
        items = [{"params": items}]
    for item in items:
        if not isinstance(item, dict) or "params" not in item:
            shown = f"keys {list(item)}" if isinstance(item, dict) else f"type {type(item).__name__}"
            raise ValueError(f"params contains a group of {shown}. {allowed}")
        if fixed := sorted(SAME_FOR_ALL & set(item)):
            raise ValueError(f"params: a group cannot set {fixed[0]}, which is the same for the whole model")
    return [dict(item) for item in items]


def check_update_options(values: dict[str, Any]) -> None:
    """Check the options of the update, of the defaults or of a group."""
    checks.number("lr", values["lr"], least=0, most=LARGEST)
    options.damping("damping", values["damping"])
    checks.number("momentum", values["momentum"], least=0, below=1)
    checks.number("weight_decay", values["weight_decay"], least=0, most=LARGEST)
    if "betas" in values:
        checks.decays("betas", values["betas"])
    for name in ("nesterov", "decoupled_weight_decay", "maximize"):
        checks.flag(name, values[name])
    if values["nesterov"] and not values["momentum"]:
        raise ValueError(f"nesterov=True needs momentum > 0, not momentum={values['momentum']!r}")
