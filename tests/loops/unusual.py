"""Programs that are rare and real: options of torch's optimizers, wrappers, averages, threads."""

from __future__ import annotations

import copy
import tempfile
import threading
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.sgd import sgd
from torch.optim.swa_utils import SWALR, AveragedModel

from tests.loops.program import (
    WIDTH,
    Items,
    Program,
    adagrad,
    draw,
    loss_of,
    odd,
    plain,
    train,
)

_OPTIM = torch.optim


@odd
def adam_capturable(rows: int) -> Program:
    """Adam with a rate that is a tensor, `foreach=False`"""
    return plain(rows, lambda m: _OPTIM.Adam(m.parameters(), lr=torch.tensor(0.01), foreach=False))


@odd
def adagrad_with_decaying_rate(rows: int) -> Program:
    """Adagrad with `lr_decay`, `initial_accumulator_value`, `foreach=True`"""
    return plain(
        rows,
        lambda m: _OPTIM.Adagrad(
            m.parameters(), lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5, foreach=True
        ),
    )


@odd
def sgd_foreach(rows: int) -> Program:
    """SGD with `foreach=True`, momentum and dampening"""
    return plain(
        rows,
        lambda m: _OPTIM.SGD(m.parameters(), lr=0.1, momentum=0.5, dampening=0.1, foreach=True),
    )


@odd
def adafactor(rows: int) -> Program:
    """Adafactor"""
    return plain(rows, lambda model: _OPTIM.Adafactor(model.parameters(), lr=0.1))


@odd
def muon(rows: int) -> Program:
    """Muon for the tables"""
    return plain(
        rows,
        lambda m: [
            _OPTIM.Muon(m.tables(), lr=0.1, weight_decay=0.0),
            _OPTIM.SGD(m.top.parameters(), lr=0.1),
        ],
    )


@odd
def adamax_then_nothing(rows: int) -> Program:
    """Training stops for some saves, and goes on"""
    program = plain(rows, lambda m: _OPTIM.Adam(m.parameters(), lr=0.01))

    def step(t: int) -> None:
        if t < 5 or t > 14:
            program.step(t)

    return Program(program.model, program.optimizers, step)


@odd
def stochastic_weight_averaging(rows: int) -> Program:
    """SWA: `AveragedModel`, `SWALR`, and the averaged weights taken over"""
    model = Items(rows)
    averaged = AveragedModel(model)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.05)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        averaged.update_parameters(model)
        schedule.step()
        if t % 8 == 0:
            with torch.no_grad():
                for own, mean in zip(model.parameters(), averaged.parameters(), strict=True):
                    own.copy_(mean)

    return Program(model, [optimizer], step)


@odd
def row_state_of_ones_own(rows: int) -> Program:
    """`optimizer.state[p]` gets entries of one's own, is replaced, and loses them"""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        state = optimizer.state[model.item.weight]
        if t == 5:
            state["seen"] = torch.zeros(rows)
        if t >= 5:
            state.setdefault("seen", torch.zeros(rows))[(t * 37) % rows] += 1
        if t == 11:
            state["sum"] = state["sum"] * 2
        if t == 17:
            del state["seen"]

    return Program(model, [optimizer], step)


@odd
def row_state_emptied(rows: int) -> Program:
    """`optimizer.state.clear()` in mid-run (a warm restart)"""
    program = plain(rows, lambda m: _OPTIM.Adam(m.parameters(), lr=0.01))

    def step(t: int) -> None:
        if t in (8, 16):
            program.optimizers[0].state.clear()
        program.step(t)

    return Program(program.model, program.optimizers, step)


@odd
def foreach_edits(rows: int) -> Program:
    """`torch._foreach_*` on the weights"""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        if t % 4 == 0:
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 0.9)
                ones = [torch.ones_like(weight) for weight in model.tables()]
                torch._foreach_lerp_(model.tables(), ones, 0.1)
                torch._foreach_copy_([model.user.weight], [model.user.weight + 1])

    return Program(model, [optimizer], step)


@odd
def functional_optimizer(rows: int) -> Program:
    """`torch.optim.sgd.sgd(params, grads, ...)` and `adagrad(...)`, the functions"""
    model = Items(rows)

    def step(t: int) -> None:
        grads = torch.autograd.grad(loss_of(model(draw(rows))), list(model.parameters()))
        with torch.no_grad():
            sgd(
                list(model.parameters()),
                list(grads),
                [None] * len(grads),
                weight_decay=0.0,
                momentum=0.0,
                lr=0.1,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )

    return Program(model, [], step)


@odd
def weight_norm(rows: int) -> Program:
    """`parametrizations.weight_norm` put on an embedding in mid-run, and taken off"""
    model = Items(rows)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        if t == 7:
            parametrizations.weight_norm(model.item)
        if t == 16:
            nn.utils.parametrize.remove_parametrizations(model.item, "weight")
        optimizer.param_groups[0]["params"] = list(model.parameters())
        train(model, optimizer, lambda: loss_of(model(draw(rows))))

    return Program(model, [optimizer], step)


@odd
def orthogonal(rows: int) -> Program:
    """`parametrizations.orthogonal`, `spectral_norm` on a small table"""
    model = Items(rows)
    parametrizations.spectral_norm(model.user)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)
    return Program(
        model, [optimizer], lambda t: train(model, optimizer, lambda: loss_of(model(draw(rows))))
    )


@odd
def other_type(rows: int) -> Program:
    """`model.double()` in mid-run, with a new optimizer state"""
    model = Items(rows)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        if t == 8:
            model.double()
        loss = lambda: (model(draw(rows)) - 1).square().mean()  # noqa: E731
        train(model, optimizer, loss)

    return Program(model, [optimizer], step)


@odd
def shrunk_table(rows: int) -> Program:
    """A table that is resized in place: `weight.data = weight.data[:n].clone()`"""
    model = Items(rows)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        if t == 10:
            model.item.weight.grad = None
            model.item.weight.data = model.item.weight.data[: rows - 64].clone()
        train(model, optimizer, lambda: loss_of(model(draw(rows // 2))))

    return Program(model, [optimizer], step)


@odd
def several_threads(rows: int) -> Program:
    """Two threads train two tables at once, each with its own optimizer"""
    model = Items(rows)
    first = _OPTIM.Adagrad(model.item.parameters(), lr=0.1)
    second = _OPTIM.Adam(model.user.parameters(), lr=0.01)

    def move(table: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(4):
            optimizer.zero_grad()
            table(draw(len(table.weight))).square().sum().backward()
            optimizer.step()

    def step(t: int) -> None:
        threads = [
            threading.Thread(target=move, args=pair)
            for pair in ((model.item, first), (model.user, second))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return Program(model, [first, second], step)


@odd
def hogwild_threads(rows: int) -> Program:
    """Several threads train one table at once (Hogwild), each with its own gradients"""
    model = Items(rows)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)
    replicas = [copy.deepcopy(model) for _ in range(2)]
    for replica in replicas:
        for own, shared in zip(replica.parameters(), model.parameters(), strict=True):
            own.data = shared.data
    optimizers = [_OPTIM.SGD(replica.parameters(), lr=0.1) for replica in replicas]

    def move(replica: Items, own: torch.optim.Optimizer) -> None:
        for _ in range(3):
            train(replica, own, lambda: loss_of(replica(draw(rows))))

    def step(t: int) -> None:
        threads = [
            threading.Thread(target=move, args=pair)
            for pair in zip(replicas, optimizers, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return Program(model, [optimizer], step)


@odd
def uncoalesced(rows: int) -> Program:
    """Sparse gradients put together by hand: uncoalesced, with explicit zeros"""
    model = Items(rows, sparse=True)
    optimizer = _OPTIM.SGD(model.tables(), lr=0.1)

    def step(t: int) -> None:
        for weight in model.tables():
            ids = torch.randint(0, len(weight), (1, 20))
            values = torch.randn(20, WIDTH) * (torch.arange(20) % 3 > 0)[:, None]
            weight.grad = torch.sparse_coo_tensor(ids, values, weight.shape)
        optimizer.step()

    return Program(model, [optimizer], step)


@odd
def compressed_gradients(rows: int) -> Program:
    """A step by hand from sparse gradients: `p.add_(grad, alpha=-lr)`, `index_add_`"""
    model = Items(rows, sparse=True)

    def step(t: int) -> None:
        model.zero_grad()
        loss_of(model(draw(rows))).backward()
        with torch.no_grad():
            grad = model.item.weight.grad.coalesce()  # type: ignore[union-attr]
            model.item.weight.index_add_(0, grad.indices()[0], grad.values(), alpha=-0.1)
            model.user.weight.add_(model.user.weight.grad, alpha=-0.1)

    return Program(model, [], step)


@odd
def padding_and_frequency(rows: int) -> Program:
    """`padding_idx` and `scale_grad_by_freq`"""
    model = Items(rows)
    model.item = nn.Embedding(rows, WIDTH, padding_idx=3, scale_grad_by_freq=True)
    optimizer = adagrad(model)
    return Program(
        model, [optimizer], lambda t: train(model, optimizer, lambda: loss_of(model(draw(rows))))
    )


@odd
def bags(rows: int) -> Program:
    """`nn.EmbeddingBag` with `per_sample_weights`, `mode="max"`, `max_norm`"""
    model = nn.ModuleDict(
        {
            "sum": nn.EmbeddingBag(rows, WIDTH, mode="sum"),
            "max": nn.EmbeddingBag(rows, WIDTH, mode="max"),
            "norm": nn.EmbeddingBag(rows, WIDTH, max_norm=1.0),
        }
    )
    optimizer = adagrad(model)

    def step(t: int) -> None:
        ids = draw(rows).view(-1, 4)
        loss = lambda: loss_of(  # noqa: E731
            (
                model["sum"](ids, per_sample_weights=torch.rand(ids.shape))
                + model["max"](ids)
                + model["norm"](input=ids)
            ).sum(1)
        )
        train(model, optimizer, loss)

    return Program(model, [optimizer], step)


@odd
def gradient_replaced(rows: int) -> Program:
    """`p.grad` replaced by another tensor before the step, and after it"""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        optimizer.zero_grad()
        loss_of(model(draw(rows))).backward()
        weight = model.item.weight
        weight.grad = weight.grad.roll(1, 0)  # type: ignore[union-attr]
        optimizer.step()
        weight.grad = torch.zeros_like(weight)

    return Program(model, [optimizer], step)


@odd
def gradients_in_one_buffer(rows: int) -> Program:
    """Gradients that are views of one buffer (DDP's `gradient_as_bucket_view=True`)"""
    model = Items(rows)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())[::-1]  # the bias first: the others begin at odd places
    buffer = torch.zeros(sum(p.numel() for p in parameters))

    def step(t: int) -> None:
        buffer.zero_()
        for parameter, grad in zip(
            parameters, buffer.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = grad.view_as(parameter)
        loss_of(model(draw(rows))).backward()
        optimizer.step()

    return Program(model, [optimizer], step)


@odd
def one_group_for_each_row_block(rows: int) -> Program:
    """`param_groups` put together anew before every step"""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        group = optimizer.param_groups[0]
        optimizer.param_groups = [
            {**group, "params": [p for p in model.parameters() if p.requires_grad], "lr": 0.1 / t}
        ]
        train(model, optimizer, lambda: loss_of(model(draw(rows))))

    return Program(model, [optimizer], step)


@odd
def apex_like(rows: int) -> Program:
    """Master weights: the optimizer has copies, which are copied back by `.data.copy_`"""
    model = Items(rows)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = _OPTIM.Adam(masters, lr=0.01)

    def step(t: int) -> None:
        model.zero_grad()
        loss_of(model(draw(rows))).backward()
        for master, own in zip(masters, model.parameters(), strict=True):
            master.grad = own.grad.clone()  # type: ignore[union-attr]
        optimizer.step()
        for master, own in zip(masters, model.parameters(), strict=True):
            own.data.copy_(master.data)

    return Program(model, [], step)


@odd
def late_masters(rows: int) -> Program:
    """Master weights copied back by `.data`, after some saves in which nothing trained"""
    inner = apex_like(rows)

    def step(t: int) -> None:
        if t > 12:
            inner.step(t)
        else:
            loss_of(inner.model(draw(rows))).backward()  # gradients are looked at, no more

    return Program(inner.model, [], step)


class Handmade:
    """No ``torch.optim.Optimizer``: momentum in a dict, written through ``.data``."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.slow: dict[Any, torch.Tensor] = {}

    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                slow = self.slow.setdefault(parameter, torch.zeros_like(parameter))
                slow.mul_(0.9).add_(parameter.grad)
                parameter.data.add_(slow, alpha=-0.1)


@odd
def handmade_optimizer(rows: int) -> Program:
    """An optimizer that is no `torch.optim.Optimizer`: `p.data.add_(...)`"""
    model = Items(rows)
    optimizer = Handmade(model.parameters())

    def step(t: int) -> None:
        model.zero_grad()
        loss_of(model(draw(rows))).backward()
        optimizer.step()

    return Program(model, [], step)


@odd
def compiled_whole_step(rows: int) -> Program:
    """`torch.compile` of forward, backward and optimizer in one function"""
    torch._dynamo.reset()
    model = Items(rows)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)

    def whole(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model(ids)).backward()
        optimizer.step()

    compiled = torch.compile(whole, backend="aot_eager")
    return Program(model, [optimizer], lambda t: compiled(draw(rows)))


@odd
def compiled_before(rows: int) -> Program:
    """`torch.compile(optimizer.step)` that ran before the Checkpointer was made"""
    torch._dynamo.reset()
    model = Items(rows)
    optimizer = adagrad(model)
    compiled = torch.compile(lambda: optimizer.step(), backend="aot_eager")

    def step(t: int) -> None:
        optimizer.zero_grad()
        loss_of(model(draw(rows))).backward()
        compiled()

    step(0)
    return Program(model, [optimizer], step)


@odd
def compiled_edit(rows: int) -> Program:
    """A compiled function that edits a table"""
    torch._dynamo.reset()
    model = Items(rows)
    optimizer = adagrad(model)

    @torch.compile(backend="aot_eager")
    def edit(weight: torch.Tensor, row: torch.Tensor) -> None:
        with torch.no_grad():
            weight[row] += 1

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        edit(model.item.weight, torch.tensor([rows - t]))

    return Program(model, [optimizer], step)


@odd
def edited_between_backward_and_step(rows: int) -> Program:
    """An edit between `backward()` and `step()`, and the gradients are then dropped"""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        optimizer.zero_grad()
        loss_of(model(draw(rows))).backward()
        with torch.no_grad():
            model.item.weight[rows - t].zero_()
        if t % 3 == 0:
            optimizer.zero_grad()
        optimizer.step()

    return Program(model, [optimizer], step)


@odd
def tied_later(rows: int) -> Program:
    """Weights that are tied in mid-run: `b.weight = a.weight`"""
    model = Items(rows)
    model.out = nn.Embedding(rows, WIDTH)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        if t == 8:
            model.out.weight = model.item.weight
            optimizer.param_groups[0]["params"] = list(model.parameters())
        ids = draw(rows)
        train(model, optimizer, lambda: loss_of(model.score(model.out(ids), ids) + model(ids)))

    return Program(model, [optimizer], step)


@odd
def file_backed(rows: int) -> Program:
    """A table in a mapped file that others write to (`torch.from_file(shared=True)`)"""
    model = Items(rows)
    file = tempfile.NamedTemporaryFile()  # noqa: SIM115
    memory = torch.from_file(file.name, shared=True, size=rows * WIDTH).view(rows, WIDTH)
    memory.copy_(model.item.weight.detach())
    model.item.weight = nn.Parameter(memory)
    theirs = torch.from_file(file.name, shared=True, size=rows * WIDTH).view(rows, WIDTH)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        theirs[rows - t] = float(t)

    return Program(model, [optimizer], step, file.close)


@odd
def denormals_flushed(rows: int) -> Program:
    """`torch.set_flush_denormal(True)`: tiny numbers become zero when a step touches them"""
    model = Items(rows)
    with torch.no_grad():
        model.item.weight[rows // 2 :] = 1e-40
    optimizer = adagrad(model)

    def step(t: int) -> None:
        if t == 8:
            torch.set_flush_denormal(True)
        train(model, optimizer, lambda: loss_of(model(draw(rows))))

    return Program(model, [optimizer], step, lambda: torch.set_flush_denormal(False))
