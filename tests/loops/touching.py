"""Ways of using a table: lookups, products, tied weights, models that are compiled or copied."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.loops.program import (
    BATCH,
    WIDTH,
    Items,
    Program,
    adagrad,
    draw,
    loop,
    loss_of,
    train,
)


def _by(rows: int, loss: Callable[[Items], torch.Tensor], *, sparse: bool = False) -> Program:
    model = Items(rows, sparse=sparse)
    optimizer = adagrad(model)
    return Program(model, [optimizer], lambda t: train(model, optimizer, lambda: loss(model)))


@loop
def module_call(rows: int) -> Program:
    """`model.item(ids)`, dense gradients"""
    return _by(rows, lambda model: loss_of(model(draw(rows))))


@loop
def module_call_sparse(rows: int) -> Program:
    """`model.item(ids)`, `sparse=True`"""
    return _by(rows, lambda model: loss_of(model(draw(rows))), sparse=True)


@loop
def embedding_bag(rows: int) -> Program:
    """`nn.EmbeddingBag` with offsets"""
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(rows, WIDTH, mode="mean", sparse=True)})
    optimizer = adagrad(model)
    offsets = torch.arange(0, BATCH, 4)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model["bag"](draw(rows), offsets).sum(1)))

    return Program(model, [optimizer], step)


@loop
def functional_embedding(rows: int) -> Program:
    """`F.embedding(ids, weight)`"""

    def loss(model: Items) -> torch.Tensor:
        ids = draw(rows)
        return loss_of(model.score(F.embedding(ids, model.item.weight), ids))

    return _by(rows, loss)


@loop
def indexed_weight(rows: int) -> Program:
    """`weight[ids]`"""

    def loss(model: Items) -> torch.Tensor:
        ids = draw(rows)
        return loss_of(model.score(model.item.weight[ids], ids))

    return _by(rows, loss)


@loop
def positives_and_negatives(rows: int) -> Program:
    """Positives by a module call and sampled negatives by `weight[ids]`, in one step"""

    def loss(model: Items) -> torch.Tensor:
        users = model.user(torch.arange(BATCH))
        positives = (model.item(draw(rows)) * users).sum(1)
        negatives = (model.item.weight[draw(rows, 5 * BATCH)].view(5, BATCH, -1) * users).sum(2)
        return F.softplus(negatives - positives).mean()

    return _by(rows, loss)


@loop
def dense_product(rows: int) -> Program:
    """`weight @ x`: every row in every step"""

    def loss(model: Items) -> torch.Tensor:
        scores = model.item.weight @ model.user(torch.tensor([1]))[0]
        return scores[: rows // 2].square().mean()

    return _by(rows, loss)


@loop
def tied_weights(rows: int) -> Program:
    """Tied weights: `decoder.weight = encoder.weight`"""
    model = nn.ModuleDict({"encoder": nn.Embedding(rows, WIDTH), "decoder": nn.Linear(WIDTH, rows)})
    model["decoder"].weight = model["encoder"].weight
    optimizer = adagrad(model)

    def step(t: int) -> None:
        ids = draw(rows, 4)
        train(
            model,
            optimizer,
            lambda: model["decoder"](model["encoder"](ids))[:, : rows // 3].square().mean(),
        )

    return Program(model, [optimizer], step)


@loop
def two_modules_one_parameter(rows: int) -> Program:
    """Two modules with one parameter"""
    model = nn.ModuleDict({"left": nn.Embedding(rows, WIDTH), "right": nn.Embedding(rows, WIDTH)})
    model["right"].weight = model["left"].weight
    optimizer = adagrad(model)

    def step(t: int) -> None:
        train(
            model,
            optimizer,
            lambda: (model["left"](draw(rows)) * model["right"](draw(rows))).sum(),
        )

    return Program(model, [optimizer], step)


@loop
def two_parameters_one_storage(rows: int) -> Program:
    """Two parameters with one memory: `decoder.weight.data = encoder.weight.data`"""
    model = nn.ModuleDict(
        {"encoder": nn.Embedding(rows, WIDTH), "decoder": nn.Linear(WIDTH, rows, bias=False)}
    )
    model["decoder"].weight.data = model["encoder"].weight.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        ids = draw(rows, 4)
        train(
            model,
            optimizer,
            lambda: model["decoder"](model["encoder"](ids))[:, t % 7 : rows : 97].square().mean(),
        )

    return Program(model, [optimizer], step)


@loop
def flat_parameters(rows: int) -> Program:
    """Weights that are views of one flat buffer, which is what the optimizer has"""
    model = Items(rows)
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    at = 0
    for parameter in model.parameters():
        parameter.data = flat.data[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    optimizer = torch.optim.SGD([flat], lr=0.1)

    def step(t: int) -> None:
        model.zero_grad()
        loss_of(model(draw(rows))).backward()
        flat.grad = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        optimizer.step()

    return Program(model, [optimizer], step)


@loop
def max_norm(rows: int) -> Program:
    """`nn.Embedding(max_norm=1.0)`"""
    model = Items(rows, max_norm=1.0)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        with torch.no_grad():
            model(draw(rows))  # also an evaluation rewrites rows
        train(model, optimizer, lambda: loss_of(model(draw(rows))))

    return Program(model, [optimizer], step)


@loop
def functional_max_norm(rows: int) -> Program:
    """`F.embedding(ids, weight, max_norm=1.0)`"""

    def loss(model: Items) -> torch.Tensor:
        ids = draw(rows)
        return loss_of(model.score(F.embedding(ids, model.item.weight, max_norm=1.0), ids))

    return _by(rows, loss)


@loop
def l2_of_all_rows(rows: int) -> Program:
    """An L2 term on a whole table"""
    return _by(
        rows, lambda model: loss_of(model(draw(rows))) + 1e-3 * model.item.weight.square().sum()
    )


@loop
def l2_of_looked_up_rows(rows: int) -> Program:
    """An L2 term on the rows that were looked up"""

    def loss(model: Items) -> torch.Tensor:
        ids = draw(rows)
        items = model.item(ids)
        return loss_of(model.score(items, ids)) + 1e-3 * items.square().sum()

    return _by(rows, loss)


@loop
def functional_call_of_module(rows: int) -> Program:
    """`torch.func.functional_call` and `torch.func.grad`; weights written with `copy_`"""
    model = Items(rows)

    def loss(parameters: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return loss_of(functional_call(model, parameters, (ids,)))

    def step(t: int) -> None:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        gradients = torch.func.grad(loss)(parameters, draw(rows))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(parameter - 0.1 * gradients[name])

    return Program(model, [], step)


@loop
def gradient_checkpointing(rows: int) -> Program:
    """Gradient checkpointing (`torch.utils.checkpoint`)"""
    return _by(rows, lambda model: loss_of(checkpoint(model, draw(rows), use_reentrant=False)))


def _compiled(rows: int, backend: str) -> Program:
    torch._dynamo.reset()
    model = Items(rows)
    optimizer = adagrad(model)
    compiled = torch.compile(model, backend=backend)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(compiled(draw(rows))))

    return Program(model, [optimizer], step)


@loop
def compiled_eager(rows: int) -> Program:
    """`torch.compile(model, backend="eager")`"""
    return _compiled(rows, "eager")


@loop
def compiled_aot(rows: int) -> Program:
    """`torch.compile(model, backend="aot_eager")`"""
    return _compiled(rows, "aot_eager")


@loop
def copied_model(rows: int) -> Program:
    """A deep copy of the model and its optimizer is trained beside it"""
    model = Items(rows, max_norm=1.0)
    optimizer = adagrad(model)
    others: list[tuple[Items, torch.optim.Optimizer]] = []

    def step(t: int) -> None:
        if not others:
            other = copy.deepcopy(model)
            others.append((other, adagrad(other)))
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        other, its_optimizer = others[0]
        train(other, its_optimizer, lambda: loss_of(other(draw(rows))))

    return Program(model, [optimizer], step)


@loop
def pickled_model(rows: int) -> Program:
    """The model is pickled in mid-run (`torch.save(model)`), its copy trained beside it"""
    model = Items(rows, max_norm=1.0)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        if t == 5:
            stream = io.BytesIO()
            torch.save(model, stream)
            stream.seek(0)
            other = torch.load(stream, weights_only=False)
            train(other, adagrad(other), lambda: loss_of(other(draw(rows))))

    return Program(model, [optimizer], step)


@loop
def another_thread(rows: int) -> Program:
    """Training in another thread than the Checkpointer's"""
    inner = module_call(rows)

    def step(t: int) -> None:
        thread = threading.Thread(target=inner.step, args=(t,))
        thread.start()
        thread.join()

    return Program(inner.model, inner.optimizers, step)
