"""Calls between two nodes: what travels, what may be called, what comes back."""

from __future__ import annotations

import math
import operator
from typing import Any

import anyio
import pytest
import torch

from auth import AccessDenied, SecretKey, allow_any
from mesh import rpc
from mesh.errors import TransportError
from mesh.rpc import NotExposed, RemoteException, RpcTimeout, Unsendable
from mesh.rpc.names.targets import Target
from mesh.rpc.tensors import parts
from mesh.rpc.wire import Answer, Beside, RefNotes, Request
from tensor_bridge import QuotaExceeded
from tests.mesh import nodes
from tests.mesh.rpc import exposures
from tests.mesh.rpc.exposures import Colour, Pair, Point, Positive
from tests.mesh.rpc.nodes import agents

pytestmark = pytest.mark.anyio

NODE = SecretKey.generate().node_id


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(1 << 63),
        1 << 200,
        -(1 << 64),
        1.5,
        -0.0,
        math.inf,
        2 + 3j,
        "",
        "text",
        "\N{SNOWMAN}" * 5000,
        b"",
        b"\0" * 9999,
        [],
        (),
        {},
        set(),
        [1, [2, (3, {"k": [4]})]],
        {1: "a", ("t", 2): b"b", None: {3, 4}},
        frozenset({1, (2, 3)}),
        torch.float16,
        torch.device("cuda:1"),
        torch.Size([2, 3]),
        Colour.BLUE,
        Pair(1, [Pair("x", None)]),
        Positive(3),
        NODE,
        rpc.WorkerInfo("trainer:0", 3, NODE),
        exposures.echo,
        exposures.Counter,
    ],
    ids=lambda value: type(value).__name__,
)
async def test_values_come_back_as_they_went(value: Any) -> None:
    async with agents(2) as (a, b):
        result = await a.call(b.node_id, exposures.echo, (value,))
        assert type(result) is type(value)
        assert result == value
        if isinstance(value, float):
            assert math.copysign(1, result) == math.copysign(1, value)


async def test_nan_and_nesting() -> None:
    async with agents(2) as (a, b):
        assert math.isnan(await a.call(b.node_id, exposures.echo, (math.nan,)))
        deep: Any = "bottom"
        for _ in range(50):
            deep = [deep]
        assert await a.call(b.node_id, exposures.echo, (deep,)) == deep


async def test_arguments_are_positional_and_by_name() -> None:
    async with agents(2) as (a, b):
        result = await a.call(b.node_id, exposures.echo, (1, "two"), {"three": 3.0})
        assert result == ((1, "two"), {"three": 3.0})


TENSORS = {
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "ints": lambda: torch.arange(12).reshape(3, 4),
    "view": lambda: torch.arange(24).reshape(4, 6)[1:, ::2],
    "transposed": lambda: torch.randn(5, 7).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "bool": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: torch.randn(9).bfloat16(),
    "complex": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "float8": lambda: torch.randn(8).to(torch.float8_e4m3fn),
    "large": lambda: torch.randn(300, 1000),
    "larger": lambda: torch.randint(0, 255, (3 << 20,), dtype=torch.uint8),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
async def test_tensors_come_back_as_they_went(make: Any) -> None:
    tensor = make()
    async with agents(2) as (a, b):
        result = await a.call(b.node_id, exposures.echo, (tensor,))
        assert result.dtype == tensor.dtype
        assert result.shape == tensor.shape
        plain = torch.complex64 if tensor.is_complex() else torch.float64
        assert torch.equal(result.to(plain), tensor.to(plain))


async def test_a_tensor_given_twice_is_one_tensor_there() -> None:
    tensor = torch.randn(100_000)
    async with agents(2) as (a, b):
        first, second = await a.call(b.node_id, exposures.echo, (tensor, tensor))
        assert first is second


async def test_gradients_parameters_and_sparse_tensors_keep_what_they_are() -> None:
    async with agents(2) as (a, b):
        leaf = torch.randn(3, requires_grad=True)
        assert (await a.call(b.node_id, exposures.echo, (leaf,))).requires_grad
        parameter = torch.nn.Parameter(torch.randn(3))
        result = await a.call(b.node_id, exposures.echo, (parameter,))
        assert type(result) is torch.nn.Parameter
        assert torch.equal(result, parameter)
        sparse = torch.sparse_coo_tensor(
            [[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3), check_invariants=True
        )
        result = await a.call(b.node_id, exposures.echo, (sparse,))
        assert result.layout is torch.sparse_coo
        assert torch.equal(result.to_dense(), sparse.to_dense())


async def test_a_dataclass_with_a_tensor_travels() -> None:
    async with agents(2) as (a, b):
        point = await a.call(b.node_id, exposures.echo, (Point(1.0, torch.ones(3)),))
        assert type(point) is Point
        assert point.x == 1.0
        assert torch.equal(point.y, torch.ones(3))


def _cycle() -> list[Any]:
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    return cycle


def _deep() -> Any:
    deep: Any = 1
    for _ in range(100):
        deep = (deep,)
    return deep


REFUSED = {
    "class": (exposures.Unregistered(), "args[1]['k']", "register_type"),
    "lambda": (lambda: 1, "args[1]['k']", "does not travel"),
    "method": (exposures.Counter().add, "args[1]['k']", "does not travel"),
    "module": (math, "args[1]['k']", "does not travel"),
    "meta": (torch.empty(3, device="meta"), "args[1]['k']", "empty_like"),
    "cycle": (_cycle(), "args[1]['k'][0]['again']", "contains itself"),
    "deep": (_deep(), "args[1]['k'][0][0]", "64 levels"),
    "many": (list(range(40_000)), "args[1]['k']", "tensors"),
    "surrogate": ("\ud800", "args[1]['k']", "Unicode"),
    "integer": (1 << 20_000, "args[1]['k']", "digits"),
}


@pytest.mark.parametrize(("value", "path", "advice"), REFUSED.values(), ids=REFUSED)
async def test_what_does_not_travel_is_refused_before_it_is_sent(
    value: Any, path: str, advice: str
) -> None:
    async with agents(2) as (a, b):
        sent = a._node.endpoint.connections[0].info.bytes_sent
        with pytest.raises(Unsendable) as caught:
            await a.call(b.node_id, exposures.echo, (1, {"k": value}))
        assert path in str(caught.value)
        assert advice in str(caught.value)
        assert a._node.endpoint.connections[0].info.bytes_sent == sent


async def test_a_result_that_does_not_travel_is_an_error_of_the_call() -> None:
    async with agents(2) as (a, b):
        with pytest.raises(Unsendable, match=r"the result\[1\]\['deep'\]") as caught:
            await a.call(b.node_id, exposures.unsendable)
        assert "result of call of function" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "builtins.eval",
        "tests.mesh.rpc.exposures.torch",
        "tests.mesh.rpc.exposures.dataclasses",
        "tests.mesh.rpc.exposures.running",
        "tests.mesh.rpc.exposures.Any",
        "tests.mesh.rpc.exposures.Counter._hidden",
        "tests.mesh.rpc.test_calls.agents",
        "torch.load",
        "torch.save",
        "torch.ops",
        "torch.from_file",
    ],
)
async def test_what_is_not_exposed_can_not_be_called(name: str) -> None:
    async with agents(2) as (a, b):
        with pytest.raises(NotExposed):
            await a.call(b.node_id, name, ("x",))
        assert await a.call(b.node_id, "tests.mesh.rpc.exposures.echo", ("x",)) == "x"


async def test_functions_without_a_name_are_refused_here() -> None:
    async with agents(2) as (a, b):
        for function in (lambda: 1, exposures.Counter(1).add, operator.itemgetter(1)):
            with pytest.raises(rpc.RpcError, match="no name"):
                await a.call(b.node_id, function)
        with pytest.raises(TypeError):
            await a.call(b.node_id, 3)  # type: ignore[arg-type]


async def test_operators_may_be_called_as_they_are() -> None:
    async with agents(2) as (a, b):
        result = await a.call(b.node_id, torch.add, (torch.ones(2), 1))
        assert torch.equal(result, torch.full((2,), 2.0))
        result = await a.call(b.node_id, torch.zeros, (2, 3), {"dtype": torch.int32})
        assert torch.equal(result, torch.zeros(2, 3, dtype=torch.int32))
        with pytest.raises(RuntimeError, match="size of tensor"):
            await a.call(b.node_id, torch.add, (torch.ones(2), torch.ones(3)))


async def test_an_operator_is_not_run_if_its_result_is_too_large() -> None:
    async with agents(2) as (a, b):
        for function, args in (
            (torch.zeros, (1 << 40,)),
            (torch.outer, (torch.ones(1 << 18), torch.ones(1 << 18))),
            (torch.full, ((1 << 20, 1 << 20), 1.0)),
            (torch.broadcast_to, (torch.ones(1), (1 << 20, 1 << 20))),
            (torch.add, (torch.ones(1 << 18, 1), torch.ones(1, 1 << 18))),
            (torch.diag, (torch.ones(1), 1 << 20)),
            (torch.masked_select, (torch.ones(1 << 16, 1), torch.ones(1, 1 << 16).bool())),
            (torch.max, (torch.ones(1 << 18, 1), torch.ones(1, 1 << 18))),
            (torch.sum, (torch.ones(1 << 32, 0), 1)),
            (torch.matmul, (torch.ones(1 << 18, 0), torch.ones(0, 1 << 18))),
            (torch.where, (torch.ones(1 << 26, dtype=torch.bool),)),
        ):
            with pytest.raises(QuotaExceeded, match="bytes"):
                await a.call(b.node_id, function, args)
        with pytest.raises(NotExposed):
            await a.call(b.node_id, torch.add, (torch.ones(2), 1), {"out": torch.ones(2)})


async def test_exceptions_keep_class_message_and_traceback() -> None:
    async with agents(2) as (a, b):
        for function, args in ((exposures.fail, ("value",)), (exposures.fail_async, ())):
            with pytest.raises(ValueError, match="as was expected") as caught:
                await a.call(b.node_id, function, args)
            assert str(caught.value) == "as was expected"
            (note,) = caught.value.__notes__
            assert b.node_id.short in note
            assert 'raise ValueError("as was expected")' in note
        with pytest.raises(KeyError) as missing:
            await a.call(b.node_id, exposures.fail, ("key",))
        assert missing.value.args == ("missing",)


async def test_an_exception_of_no_known_class_is_told_by_its_name() -> None:
    async with agents(2) as (a, b):
        with pytest.raises(RemoteException, match="first 2") as caught:
            await a.call(b.node_id, exposures.fail, ("picky",))
        assert caught.value.type_name == "tests.mesh.rpc.exposures.PickyError"
        assert caught.value.message == "first 2"
        assert "in fail" in caught.value.remote_traceback


async def test_what_would_end_a_loop_is_an_error_of_the_call() -> None:
    async with agents(2) as (a, b):
        for function, args, match in (
            (exposures.fail, ("exit",), "SystemExit: 3"),
            (exposures.fail, ("interrupt",), "KeyboardInterrupt"),
            (exposures.fail, ("base",), "BaseException: of no kind"),
            (exposures.exit_async, (), "SystemExit: 3"),
        ):
            for node in (a, b):
                with pytest.raises(RuntimeError, match=match):
                    await a.call(node.node_id, function, args)
            with pytest.raises(RuntimeError, match=match):
                await (await a.remote(b.node_id, function, args)).fetch()
        assert await a.call(b.node_id, exposures.echo, (1,)) == 1


async def test_coroutines_run_in_the_loop() -> None:
    async with agents(2) as (a, b):
        assert await a.call(b.node_id, exposures.count_to, (5,)) == 5


async def test_a_call_that_takes_too_long_is_given_up() -> None:
    async with agents(2) as (a, b):
        exposures.let_go.clear()
        try:
            with pytest.raises(RpcTimeout, match="timeout") as caught:
                await a.call(b.node_id, exposures.hold, timeout=0.2)
            assert b.node_id.short in str(caught.value)
            assert exposures.running.acquire(timeout=1)
        finally:
            exposures.let_go.set()
        assert await a.call(b.node_id, exposures.echo, (1,), timeout=0) == 1
        for wrong in (-1, math.nan, math.inf):
            with pytest.raises(rpc.RpcError, match="timeout"):
                await a.call(b.node_id, exposures.echo, (1,), timeout=wrong)


async def test_the_loss_of_the_peer_ends_a_call_without_a_limit() -> None:
    async with agents(2) as (a, b):
        exposures.let_go.clear()
        try:
            async with anyio.create_task_group() as tasks:

                async def call() -> None:
                    with pytest.raises(TransportError, match=r"^call of function") as caught:
                        await a.call(b.node_id, exposures.hold, timeout=0)
                    assert b.node_id.short in str(caught.value)

                tasks.start_soon(call)
                await nodes.eventually(lambda: exposures.running.acquire(blocking=False))
                for connection in b._node.endpoint.connections:
                    connection.abort(reason="gone")
        finally:
            exposures.let_go.set()


async def test_a_call_to_itself_gets_copies() -> None:
    async with agents(2) as (a, _):
        tensor = torch.ones(3)
        result = await a.call(a.node_id, exposures.echo, ([tensor, "x"],))
        assert torch.equal(result[0], tensor)
        assert result[0].data_ptr() != tensor.data_ptr()
        with pytest.raises(ValueError, match="expected"):
            await a.call(a.node_id, exposures.fail, ("value",))


async def test_a_peer_without_the_scope_calls_nothing() -> None:
    async with agents(2, last=allow_any(("tensor", "node"))) as (a, b):
        with pytest.raises(AccessDenied):
            await a.call(b.node_id, exposures.echo, (1,))
        with pytest.raises(AccessDenied):
            await a.call(b.node_id, exposures.echo, (torch.ones(100_000),))
        assert await b.call(a.node_id, exposures.echo, (1,)) == 1


async def test_many_calls_at_once_are_all_answered() -> None:
    async with agents(2) as (a, b):
        results: dict[int, Any] = {}

        async def one(number: int) -> None:
            results[number] = await a.call(b.node_id, exposures.echo, (number,))

        async with anyio.create_task_group() as tasks:
            for number in range(300):
                tasks.start_soon(one, number)
        assert results == {number: number for number in range(300)}


async def test_answers_that_nobody_fetches_take_room_and_are_refused_beyond_it() -> None:
    async with agents(2) as (a, b):
        b.service._room._max_bytes_per_peer = 1_000_000
        connection = a._node.endpoint.connections[0]
        target = Target("function", "tests.mesh.rpc.exposures.make")
        items: list[Any] = [["t", 1], 100_000, ["d", 0]]
        request = Request(target, items, Beside(), 5.0)
        for _ in range(2):
            answer = Answer.decode(await connection.call("rpc.call", request.encode()))
            assert answer.key
        with pytest.raises(QuotaExceeded):
            await connection.call("rpc.call", request.encode())
        await a.tell(b.node_id, RefNotes(left=(answer.key,)))
        assert (await a.call(b.node_id, exposures.make, (100_000,))).numel() == 100_000


async def test_an_answer_takes_room_until_it_has_been_fetched_however_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on, send = anyio.Event(), anyio.Event(), parts.serve_send

    async def slowly(*args: Any) -> None:
        begun.set()
        await go_on.wait()
        await send(*args)

    async with agents(2) as (a, b):
        monkeypatch.setattr(parts, "serve_send", slowly)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.call, b.node_id, exposures.make, (100_000,))
            await begun.wait()
            assert b.service._room.used == 400_000
            go_on.set()
        await nodes.eventually(lambda: not b.service._room.used)
