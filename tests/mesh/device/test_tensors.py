"""What programs do with tensors on a mesh device, compared with the same on the CPU."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from mesh.device.client.forms import Form
from mesh.device.client.tensors import device_of
from mesh.device.errors import DeviceError, OperationFailed, UnsupportedOnDevice
from tensor_bridge import QuotaExceeded
from tests.mesh.device.inprocess import Loopback, open_devices

Opened = tuple[Loopback, list[torch.device]]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        here = one.detach().cpu()
        return here.dtype is other.dtype and torch.equal(here.nan_to_num(), other.nan_to_num())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def views_and_writes(d: Any) -> Any:
    a = torch.zeros(4, 4, device=d)
    b = a.t()[1:3]
    b.add_(1)
    a[0, 0] = 7
    a.view(-1)[5] = 9
    a.diagonal().mul_(2)
    c = a.unfold(0, 2, 1)
    return a, b, c.sum(), a.expand(2, 4, 4)[1, 2:]


def out_arguments(d: Any) -> Any:
    fits, grows = torch.empty(2, device=d), torch.empty(0, device=d)
    x = torch.ones(2, device=d)
    torch.add(x, 1, out=fits)
    torch.add(x, 2, out=grows)
    with torch.inference_mode():
        y, z = torch.ones(2, device=d), torch.zeros(2, device=d)
        torch.ops.aten.mul.out(y, z, out=y)  # what is written is an argument besides
        returned = torch.ops.aten.mul.out(y, y, out=z) is z
    return fits, grows, returned


def indexing(d: Any) -> Any:
    x = torch.arange(12.0, device=d).view(3, 4)
    x[x > 5] = -1
    picked = x[:, torch.tensor([0, 2])]  # an index on the CPU, as torch allows
    return x, picked, x[x < 3], x.nonzero(), x.unique(return_counts=True)


def wrapped_numbers(d: Any) -> Any:
    ints, half = torch.ones(2, dtype=torch.int32, device=d), torch.ones((), device=d).half()
    return (
        *(ints + 2.5, ints + 2, half * 2.0, half + torch.tensor(2.0, dtype=torch.float64)),
        *(ints + torch.tensor(3), ints * True, torch.ones(2, device=d).fill_(True)),
        ints + (1 << 40),
    )


def complex_bits(d: Any) -> Any:
    x = torch.tensor([1 + 2j, 3 - 1j]).to(d)
    y = torch.zeros(2, dtype=torch.complex64, device=d)
    y.conj().copy_(x)
    z = torch.ones(2, 2, dtype=torch.complex64, device=d) * 1j
    product = (z.conj() @ z.conj(), x.conj() @ x, x.conj().clone(), x.conj().imag + 1)
    return x.conj(), x.imag, (x * 2j).real, y, x.conj().imag, product


def devices_and_types(d: Any) -> Any:
    x = torch.tensor([1.5, -2.5]).to(d, torch.float64)
    return x, x.to(torch.int8), x.bfloat16(), x.to(torch.bool), x.to(d) is x


def second_order(d: Any) -> Any:
    x = torch.full((3,), 2.0, device=d, requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    hook = torch.utils.checkpoint.checkpoint(lambda z: (z * 2).relu(), x, use_reentrant=False)
    hook.sum().backward()
    return first, second, x.grad


def transforms(d: Any) -> Any:
    x = torch.arange(3.0, device=d)
    return (
        torch.vmap(lambda a: a * 2)(x),
        torch.func.grad(lambda a: (a * a).sum())(x),
        torch.func.jacrev(lambda a: a * a)(x),
    )


def random_numbers(d: Any) -> Any:
    torch.manual_seed(3)
    first = torch.randn(5, device=d), torch.rand(2, device=d), torch.randperm(6, device=d)
    dropped = F.dropout(torch.ones(32, device=d))
    torch.manual_seed(3)
    again = torch.randn(5, device=d)
    return (
        first,
        dropped,
        again,
        torch.empty(4, device=d).uniform_(),
        torch.randint(9, (3,), device=d),
    )


def resizing(d: Any) -> Any:
    x = torch.arange(4.0, device=d)
    alias = x[1:]
    x.resize_(2)
    x.resize_(2, 3)
    return x.reshape(-1)[:2], alias


def reductions(d: Any) -> Any:
    x = torch.tensor([[3.0, 1.0], [2.0, math.nan]]).to(d)
    values, indices = x[0].topk(1)
    return (
        *(x.nansum(), x[:, 0].max(), x.argmin(), values, indices, x.sort(dim=1).indices),
        *(bool(x.isnan().any()), x[0].equal(x[0]), x.equal(x), x[0].tolist(), len(x)),
        torch.allclose(x[0], x[0]),
    )


def algebra(d: Any) -> Any:
    x = (torch.eye(3) * 2 + 1).to(d)
    return (
        *(
            torch.linalg.inv(x),
            torch.linalg.det(x),
            torch.fft.fft(x[0]),
            torch.einsum("ij,kj", x, x),
        ),
        *(torch.cat([x, x]), torch.stack([x, x], 1), x.split(1), x.chunk(2), x.tril()),
        *(torch.where(x > 1, x, 0.0), x.cumsum(0), x.clamp(max=1.5), torch.block_diag(x, x)),
    )


def recurrent(d: Any) -> Any:
    torch.manual_seed(0)
    layer = nn.GRU(3, 4)
    x = torch.randn(5, 2, 3)
    return (layer.to(d)(x.to(d))[0] * 1000).round()


def frozen_statistics(d: Any) -> Any:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3)
    x = torch.randn(2, 3, 4, 4)
    layer(x)
    layer = layer.eval().to(d)
    z = x.to(d).requires_grad_()
    with torch.no_grad():
        first = layer(z)
    second = layer(z)
    second.sum().backward()
    return first, second, z.grad, layer.weight.grad, layer.running_mean


def packed_sequences(d: Any) -> Any:
    rnn = nn.utils.rnn
    x = (torch.arange(12.0).view(3, 2, 2) / 12).to(d).requires_grad_()
    with torch.no_grad():
        layer = nn.GRU(2, 2).requires_grad_(False)
        for each in layer.parameters():
            each.fill_(0.5)
    packed, last = layer.to(d)(rnn.pack_padded_sequence(x, torch.tensor([3, 1])))
    padded, lengths = rnn.pad_packed_sequence(packed)
    padded.sum().backward()
    return padded.detach().cpu().round(decimals=5), last.shape, lengths, x.grad.bool()


def copies(d: Any) -> Any:
    layer: Any = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(2.0)
    layer.tied = layer.weight
    other = copy.deepcopy(layer.to(d))
    with torch.no_grad():
        other.weight.add_(1)
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    file.seek(0)
    here = torch.load(file, weights_only=True, map_location="cpu")
    shared = loaded["tied"].data_ptr() == loaded["weight"].data_ptr()
    return (
        layer.weight,
        other.tied,
        loaded["weight"],
        here["tied"],
        shared,
        other.tied is other.weight,
    )


def copies_of_views(d: Any) -> Any:
    z = torch.tensor([1 + 2j, 3 - 4j], device=d)
    views = [z.conj(), z.conj().imag, z]
    views[0].note = ["mine"]
    made = [*copy.deepcopy(views), *pickle.loads(pickle.dumps(views))]
    layer = pickle.loads(pickle.dumps(nn.Linear(2, 2, device=d).requires_grad_(False)))
    layer.weight.fill_(1)
    copied = copy.deepcopy(views[0])
    copied.note.append("its")
    return (*made, layer.weight, layer.weight.device == z.device, views[0].note, copied.note)


def batches(d: Any) -> Any:
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    return [each[0].to(d) for each in torch.utils.data.DataLoader(data, 2, pin_memory=d != "cpu")]


def shape_that_varies(d: Any) -> Any:
    return [torch.ones(n, device=d).sum() * n for n in range(5)]


def foreach(d: Any) -> Any:
    xs = [torch.full((2,), float(n), device=d) for n in range(3)]
    torch._foreach_mul_(xs, 2.0)
    torch._foreach_add_(xs, [1.0, 2.0, 3.0])
    return xs, torch._foreach_norm(xs), torch._foreach_addcdiv(xs, xs, [x + 1 for x in xs], 0.5)


def default_types(d: Any) -> Any:
    before = torch.get_default_dtype()
    found = []
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            x = torch.arange(1, 4, device=d)
            found += [x / 2, x.sqrt(), x * 1.5, torch.ones(2, device=d), x * 1j]
            found += [torch.full((2,), 0.1, device=d), torch.linspace(0, 1, 3, device=d)]
            found += torch._foreach_div([x], 2)
    finally:
        torch.set_default_dtype(before)
    return found


def options_that_are_numbers(d: Any) -> Any:
    x = torch.arange(4.0, device=d) / 4
    found = [torch.full((2,), zero, device=d) for zero in (complex(0, -0.0), complex(-0.0, 0))]
    zeros = [(sign, torch.signbit(part)) for sign in found for part in (sign.real, sign.imag)]
    counts = [torch.histogram(x, 2, range=(0.0, most)) for most in (1.0, 2.0)]
    return zeros, counts


GROWN = (
    *(torch.add, torch.mul, torch.maximum, torch.atan2, torch.fmod, torch.mm, torch.div),
    lambda x, y, out: torch.sin(x, out=out),
    lambda x, y, out: torch.mul(x, 2, out=out),
    lambda x, y, out: torch.clamp(x, 0, 1, out=out),
    lambda x, y, out: torch.where(x > 0, x, y, out=out),
    lambda x, y, out: torch.cumsum(x, 0, out=out),
    lambda x, y, out: torch.sum(x, 0, keepdim=True, out=out),
    lambda x, y, out: torch.cat([x, y], out=out),
    lambda x, y, out: torch.sort(x, out=(out, torch.empty(0, dtype=torch.long, device=x.device))),
)


@pytest.mark.parametrize("work", GROWN)
def test_what_grows_takes_the_layout_that_torch_gives_it(work: Any, d: torch.device) -> None:
    def grown(device: Any) -> torch.Tensor:
        x, y = torch.arange(9.0).view(3, 3).t(), torch.ones(3, 3).t()
        out = torch.empty(0, device=device)
        work(x.to(device), y.to(device), out=out)
        return out

    here, there = grown("cpu"), grown(d)
    assert there.stride() == here.stride()
    assert torch.equal(there.cpu(), here)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.parametrize(
    "program",
    [
        *(views_and_writes, out_arguments, indexing, wrapped_numbers, complex_bits, foreach),
        *(devices_and_types, second_order, transforms, random_numbers, resizing, reductions),
        *(frozen_statistics, algebra, recurrent, copies, batches, shape_that_varies),
        *(default_types, options_that_are_numbers, copies_of_views, packed_sequences),
    ],
    ids=lambda program: program.__name__,
)
def test_program(program: Callable[[Any], Any], d: torch.device) -> None:
    assert same(program(d), program("cpu"))


def test_plain_tensors_say_where_they_are(d: torch.device, other: torch.device) -> None:
    x = torch.ones(2, device=other)
    assert type(x) is torch.Tensor
    assert x.device == other
    assert repr(x) == f"tensor([1., 1.], device='{other}')"
    assert x.is_mesh  # type: ignore[attr-defined]
    assert torch.ones(2, device="mesh").device == torch.device("mesh", 0)
    assert torch.accelerator.device_count() >= 2


def test_backward_on_every_device_and_thread(d: torch.device, other: torch.device) -> None:
    found: list[torch.Tensor] = []

    def backward(device: torch.device) -> None:
        x = torch.ones(3, device=device, requires_grad=True)
        (x * 2).relu().sum().backward()
        found.append(x.grad.cpu())

    threads = [threading.Thread(target=backward, args=(each,)) for each in (d, other) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(each, torch.full((3,), 2.0)) for each in found)


def test_between_devices(loopback: Opened) -> None:
    carrier, (d, other) = loopback
    x = torch.arange(6.0, device=d).view(2, 3).t()
    before = carrier.nbytes
    moved = x.to(other)
    assert carrier.nbytes - before < 2000
    x.zero_()
    assert moved.device == other
    assert torch.equal(moved.cpu(), torch.arange(6.0).view(2, 3).t())
    for wrong in (torch.ones(3, 2), x):
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            moved + wrong


def test_optimizer_made_before_the_move_keeps_its_parameters(d: torch.device) -> None:
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer.to(d)
    layer(torch.ones(1, 2, device=d)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.weight.detach().cpu(), before - 1)


def test_autocast(d: torch.device) -> None:
    with torch.autocast("mesh", dtype=torch.bfloat16):
        weight = torch.ones(2, 3, device=d, requires_grad=True)
        y = F.linear(torch.ones(2, 3, device=d), weight)
        z = F.softmax(y, -1)
    y.sum().backward()
    assert (y.dtype, z.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_random_state_is_kept_and_forked(d: torch.device, other: torch.device) -> None:
    module: Any = torch.get_device_module("mesh")
    torch.manual_seed(5)
    state = module.get_rng_state(d)
    first = torch.randn(3, device=d).cpu()
    assert torch.equal(torch.randn(3, device=other).cpu(), first)  # each has its own
    module.set_rng_state(state, d)
    assert torch.equal(torch.randn(3, device=d).cpu(), first)
    with torch.random.fork_rng([d.index], device_type="mesh"):
        inside = torch.randn(3, device=d).cpu()
    assert torch.equal(torch.randn(3, device=d).cpu(), inside)


def test_checkpointing_draws_again_what_it_has_drawn(d: torch.device, other: torch.device) -> None:
    for device in (d, other):
        x = torch.ones(64, device=device, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(F.dropout, x, use_reentrant=False)
        torch.randn(3, device=device)
        y.sum().backward()
        assert torch.equal(x.grad.cpu(), y.detach().cpu())


def test_an_error_is_told_where_its_value_is_read(loopback: Opened) -> None:
    carrier, (d, _) = loopback
    x = torch.ones(3, device=d)
    bad = x.index_select(0, torch.tensor([7]).to(d))  # called here
    after = (bad * 2) + 1
    written = x + 1
    written.add_(after)
    for broken in (after, written, bad):
        with pytest.raises(OperationFailed) as caught:
            broken.cpu()
        text = str(caught.value)
        assert "index out of range" in text
        assert "aten::index_select" in text
        assert "test_tensors.py:" in text
        assert "a peer" in text
    line = int(text.split("test_tensors.py:")[1].split(",")[0])
    source = Path(__file__).read_text().splitlines()
    assert "# called here" in source[line - 1]
    with pytest.raises(OperationFailed):
        (x / bad).nonzero()
    assert torch.equal(x.cpu(), torch.ones(3))
    del bad, after, broken, written
    carrier.session.flush()


def test_handles_go_with_their_storages(loopback: Opened) -> None:
    carrier, (d, _) = loopback
    gc.collect()
    carrier.session.flush()
    before, used = carrier.machine.handles, carrier.machine.used
    xs = [torch.ones(10, device=d) for _ in range(5)]
    view = xs[0][2:4]
    carrier.session.flush()
    assert carrier.machine.handles - before == 5
    assert carrier.machine.used - used == 5 * 40
    del xs
    gc.collect()
    carrier.session.flush()
    assert carrier.machine.handles - before == 1
    assert view.tolist() == [1.0, 1.0]
    del view
    gc.collect()
    carrier.session.flush()
    assert (carrier.machine.handles, carrier.machine.used) == (before, used)


def test_chained_operations_are_sent_in_few_batches(loopback: Opened) -> None:
    carrier, (d, _) = loopback
    x = torch.zeros(4, device=d)
    x = x + 1
    carrier.session.flush()
    batches, nbytes, templates = carrier.batches, carrier.nbytes, carrier.machine.templates
    for _ in range(1000):
        x = x + 1
    assert x.tolist() == [1001.0] * 4
    assert carrier.batches - batches <= 10
    assert carrier.nbytes - nbytes < 1000 * 64
    assert carrier.machine.templates - templates <= 1  # of the read


def test_numbers_that_change_make_no_new_templates(loopback: Opened) -> None:
    carrier, (d, _) = loopback
    x, y = torch.ones(2, device=d), torch.ones(2, device=d)
    (x + 0, x + 0.5, x.mul_(0.5), x.add_(y, alpha=0.5), x**2.5)
    carrier.session.flush()
    before = carrier.machine.templates
    for n in range(2, 10):
        (x + n, x + n / 7, x.mul_(n / 3), x.add_(y, alpha=n / 5), x ** (n / 2))
    carrier.session.flush()
    assert carrier.machine.templates == before


def test_a_tensor_that_is_resized_to_its_own_size_keeps_its_layout(d: torch.device) -> None:
    for device in ("cpu", d):
        x = torch.zeros(2, 3, device=device).t()
        assert x.resize_(3, 2).stride() == (1, 3)
        assert x.resize_(3, 2, memory_format=torch.contiguous_format).stride() == (2, 1)


def test_a_storage_does_not_grow_here_alone(d: torch.device) -> None:
    x, small = torch.ones(8, device=d), torch.ones(2, device=d)
    x.set_(small.untyped_storage(), 1, (1,))
    assert x.tolist() == [1.0]
    with pytest.raises(RuntimeError, match="not resizable"):
        x.set_(small.untyped_storage(), 0, (4,))
    assert small.untyped_storage().nbytes() == 8


def test_tensors_of_any_type_are_plain_and_outlive_what_made_them(d: torch.device) -> None:
    for dtype in (torch.float32, torch.complex64, torch.bool, torch.uint16, torch.float8_e5m2):
        form = Form(d, dtype, (2, 3), (1, 2))
        made = [form.make() for _ in range(3)]
        del form
        others = [Form(d, torch.int64, (size,), (1,)) for size in range(8)]  # in its place
        for tensor in made:
            assert type(tensor) is torch.Tensor
            assert (tensor.dtype, tensor.shape, tensor.stride()) == (dtype, (2, 3), (1, 2))
            assert tensor.untyped_storage().nbytes() == 6 * dtype.itemsize
            assert tensor.device == tensor.untyped_storage().device == d
        del made, tensor, others
        assert torch.zeros(2, dtype=dtype, device=d).cpu().dtype is dtype


def test_what_is_not_supported_says_what_to_do(d: torch.device) -> None:
    x = torch.ones(2, 2, device=d)
    with pytest.raises(UnsupportedOnDevice, match=r"to_sparse.*cpu"):
        x.to_sparse()
    with pytest.raises(UnsupportedOnDevice, match=r"tensor\.cpu\(\)"):
        torch.utils.dlpack.to_dlpack(x)
    with pytest.raises(UnsupportedOnDevice, match=r"tensor\.cpu\(\)"):
        torch.from_dlpack(x)
    picked = nn.Embedding(2, 2, sparse=True, device=d)(torch.tensor([0], device=d)).sum()
    with pytest.raises(UnsupportedOnDevice, match="sparse_coo"):
        picked.backward()
    with pytest.raises(UnsupportedOnDevice, match="Seed the device"):
        torch.rand(2, device=d, generator=torch.Generator())
    with pytest.raises(TypeError, match=r"Tensor\.cpu\(\)"):
        x.numpy()
    with pytest.raises(DeviceError, match=r"mesh\.device"):
        torch.ones(2, device="mesh:99")
    with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
        torch.add(x, 1, out=torch.empty(2, 2))


@pytest.mark.slow  # torch.compile loads for seconds
def test_compiled_without_code_generation(d: torch.device) -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).to(d)
    x = torch.ones(2, 3, device=d)
    compiled = torch.compile(layer, backend="aot_eager")
    y = compiled(x)
    y.sum().backward()
    assert torch.equal(y.detach().cpu(), layer(x).detach().cpu())


def test_a_quota_fails_what_does_not_fit_and_nothing_else() -> None:
    from mesh.device.client.tensors import devices
    from mesh.device.server.machine import MachineLimits

    carrier, (d,) = open_devices(1, MachineLimits(max_bytes=4096))
    x = torch.ones(256, device=d)
    big = torch.zeros(1024, device=d)
    grown = x.repeat(4) + 1
    with pytest.raises(QuotaExceeded, match="of 4096 bytes are left"):
        big.cpu()
    with pytest.raises(QuotaExceeded):
        grown.cpu()
    assert x.sum().item() == 256
    del big, grown
    assert torch.ones(512, device=d).sum().item() == 512
    assert device_of(d).session is carrier.session
    carrier.session.close()
    with pytest.raises(DeviceError, match="it was closed"):
        x.cpu()
    devices.pop()
