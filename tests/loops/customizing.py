"""Optimizers of a user's own, step hooks, and steps that were patched."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
)

from tests.loops.program import Items, Program, adagrad, draw, loop, loss_of, plain, train


class Mine(torch.optim.Adagrad):
    """A bare subclass."""


class OnceOften(torch.optim.SGD):
    """SGD that also shrinks every row, if it has something to shrink by."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])


class Lazy(torch.optim.Optimizer):
    """Moments of the rows that have a gradient, and of no others."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                slow = state.setdefault("slow", torch.zeros_like(parameter))
                gradient = parameter.grad.to_dense()
                rows = gradient.flatten(1).any(1) if gradient.ndim > 1 else gradient != 0
                slow[rows] = slow[rows] * 0.9 + gradient[rows]
                parameter[rows] -= group["lr"] * slow[rows]


class Moments(torch.optim.Optimizer):
    """Moments of its own that keep moving rows; writes through ``.data``, clears gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                slow = self.state[parameter].setdefault("slow", torch.zeros_like(parameter.data))
                slow.data.mul_(0.9).add_(parameter.grad.data)
                parameter.data.add_(slow, alpha=-group["lr"])
                parameter.grad = None


class Wanderer(torch.optim.SGD):
    """Moves random rows besides those of the gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data[torch.randint(0, len(parameter), (3,))] += 1


class Lookahead(torch.optim.Optimizer):
    """Every second step moves slow weights towards the inner optimizer's, and back through
    ``.data``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([p for g in inner.param_groups for p in g["params"]], {"lr": 1.0})
        self.turn = 0

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.turn += 1
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
            if self.turn % 2 == 0:
                slow.lerp_(parameter.detach(), 0.5)
                parameter.data.copy_(slow)


class Sam:
    """Sharpness-aware: climbs, takes the gradient there, comes back by assigning ``.data``."""

    def __init__(self, inner: torch.optim.Optimizer, model: Items) -> None:
        self.inner, self.model = inner, model

    def step(self, ids: torch.Tensor) -> None:
        self.inner.zero_grad()
        loss_of(self.model(ids)).backward()
        old = {}
        with torch.no_grad():
            for parameter in self.model.parameters():
                old[parameter] = parameter.data.clone()
                parameter.add_(parameter.grad, alpha=0.05)
        self.inner.zero_grad()
        loss_of(self.model(ids)).backward()
        for parameter, before in old.items():
            parameter.data = before
        self.inner.step()


@loop
def bare_subclass(rows: int) -> Program:
    """A bare subclass of Adagrad, dense gradients"""
    return plain(rows, lambda model: Mine(model.parameters(), lr=0.1))


@loop
def bare_subclass_sparse(rows: int) -> Program:
    """A bare subclass of Adagrad, sparse gradients"""
    return plain(
        rows,
        lambda m: [Mine(m.tables(), lr=0.1), torch.optim.SGD(m.top.parameters(), lr=0.1)],
        sparse=True,
    )


@loop
def lazy_moments(rows: int) -> Program:
    """An optimizer that keeps moments lazily"""
    return plain(rows, lambda model: Lazy(model.parameters()))


@loop
def lazy_moments_sparse(rows: int) -> Program:
    """An optimizer that keeps moments lazily, sparse gradients"""
    return plain(rows, lambda model: Lazy(model.parameters()), sparse=True)


@loop
def own_moments(rows: int) -> Program:
    """An optimizer with moments that writes through `.data` and clears gradients"""
    return plain(rows, lambda model: Moments(model.parameters()))


@loop
def random_rows(rows: int) -> Program:
    """An optimizer that moves random rows"""
    return plain(rows, lambda model: Wanderer(model.parameters(), lr=0.1))


@loop
def lookahead(rows: int) -> Program:
    """Lookahead around another optimizer"""
    return plain(rows, lambda m: Lookahead(torch.optim.SGD(m.parameters(), lr=0.1)))


@loop
def sam(rows: int) -> Program:
    """SAM: climbs, takes a gradient, comes back by `p.data = old`"""
    model = Items(rows)
    optimizer = adagrad(model)
    around = Sam(optimizer, model)
    return Program(model, [optimizer], lambda t: around.step(draw(rows)))


@loop
def settings_changed_after_trust(rows: int) -> Program:
    """An optimizer of one's own whose `weight_decay` is switched on late"""
    program = plain(rows, lambda m: OnceOften(m.parameters(), lr=0.1))

    def step(t: int) -> None:
        program.optimizers[0].param_groups[0]["weight_decay"] = 0.1 if t >= 16 else 0.0
        program.step(t)

    return Program(program.model, program.optimizers, step)


@loop
def rate_raised_after_trust(rows: int) -> Program:
    """An optimizer of one's own whose rate is zero while it is observed"""
    program = plain(rows, lambda m: OnceOften(m.parameters(), lr=0.1, weight_decay=0.1))

    def step(t: int) -> None:
        program.optimizers[0].param_groups[0]["lr"] = 0.1 if t >= 16 else 0.0
        program.step(t)

    return Program(program.model, program.optimizers, step)


@loop
def another_unknown_after_trust(rows: int) -> Program:
    """A second optimizer of one's own, after the first one was observed"""
    model = Items(rows)
    first = Mine(model.parameters(), lr=0.1)
    second = Wanderer(model.item.parameters(), lr=0.1)

    def step(t: int) -> None:
        train(model, first if t < 16 else second, lambda: loss_of(model(draw(rows))))

    return Program(model, [first], step)


def _hooked(rows: int, optimizer: torch.optim.Optimizer, model: Items) -> Program:
    return Program(
        model,
        [optimizer],
        lambda t: train(model, optimizer, lambda: loss_of(model(draw(rows)))),
    )


@loop
def step_hook_that_writes(rows: int) -> Program:
    """Step hooks: a post hook that clamps weights"""
    model = Items(rows)
    optimizer = adagrad(model)

    def clamp(*args: Any) -> None:
        with torch.no_grad():
            model.item.weight[::7].clamp_(-0.5, 0.5)
            model.item.weight[rows // 2 + 3] += 1

    optimizer.register_step_post_hook(clamp)
    return _hooked(rows, optimizer, model)


@loop
def step_hook_that_clears_gradients(rows: int) -> Program:
    """Step hooks: `zero_grad(set_to_none=False)` in a post hook"""
    model = Items(rows)
    optimizer = adagrad(model)
    optimizer.register_step_post_hook(lambda *args: optimizer.zero_grad(set_to_none=False))
    return _hooked(rows, optimizer, model)


@loop
def step_hook_that_drops_gradients_fused(rows: int) -> Program:
    """Step hooks: `zero_grad()` in a post hook of a fused optimizer"""
    model = Items(rows)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True)
    optimizer.register_step_post_hook(lambda *args: optimizer.zero_grad())
    return _hooked(rows, optimizer, model)


class _Global:
    """A hook of all optimizers that clears gradients; ends with the program."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.handle = register_optimizer_step_post_hook(self.clear)
        # Before everybody else's, as if it had been there first.
        _global_optimizer_post_hooks.move_to_end(self.handle.id, last=False)

    def clear(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if optimizer is self.optimizer:
            optimizer.zero_grad(set_to_none=False)


@loop
def global_hook_that_clears_gradients(rows: int) -> Program:
    """`register_optimizer_step_post_hook`: a hook of all optimizers"""
    model = Items(rows)
    optimizer = adagrad(model)
    hook = _Global(optimizer)
    program = _hooked(rows, optimizer, model)
    return Program(model, [optimizer], program.step, hook.handle.remove)


@loop
def patched_step(rows: int) -> Program:
    """`optimizer.step` replaced by a function that does more"""
    model = Items(rows)
    optimizer = adagrad(model)
    inner = optimizer.step

    def patched(*args: Any, **kwargs: Any) -> None:
        inner(*args, **kwargs)
        with torch.no_grad():
            model.item.weight[torch.randint(0, rows, (5,))] *= 0.5
        optimizer.zero_grad(set_to_none=False)

    optimizer.step = patched  # type: ignore[method-assign]
    return _hooked(rows, optimizer, model)


@loop
def patched_class(rows: int) -> Program:
    """`SGD.step` of the class replaced by a function that does more"""
    model = Items(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        own = torch.optim.SGD.step

        def patched(self: torch.optim.SGD, closure: Any = None) -> None:
            own.__wrapped__(self, closure)  # type: ignore[attr-defined]
            with torch.no_grad():
                model.item.weight[torch.randint(0, rows, (5,))] *= 0.5

        torch.optim.SGD.step = torch.optim.Optimizer.profile_hook_step(patched)  # type: ignore
        try:
            train(model, optimizer, lambda: loss_of(model(draw(rows))))
        finally:
            torch.optim.SGD.step = own  # type: ignore[method-assign]

    return Program(model, [optimizer], step)


@loop
def step_that_raises(rows: int) -> Program:
    """A step that raises half way, and training that goes on"""

    class Failing(torch.optim.SGD):
        turn = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.turn += 1
            if self.turn % 4 == 0:
                self.param_groups[0]["params"][0].data[rows - self.turn] = 1.0
                raise RuntimeError("half way")
            super().step(closure)

    model = Items(rows)
    optimizer = Failing(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        try:
            train(model, optimizer, lambda: loss_of(model(draw(rows))))
        except RuntimeError as error:
            assert str(error) == "half way"

    return Program(model, [optimizer], step)
