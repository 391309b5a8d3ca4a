"""What a job of three workers does with modules that are elsewhere, without a pickle."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from mesh import rpc
from mesh.nn import RemoteModule

__all__ = ["Scale", "use_modules"]


@rpc.exposed
class Scale(torch.nn.Module):
    """Multiplies by a parameter."""

    def __init__(self, factor: float, *, shift: float = 0.0) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))
        self.shift = shift
        self.inner = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        y = x * self.factor.detach() + self.shift
        return y * 2 if twice else y


class Hidden(torch.nn.Module):
    """Nobody has exposed it."""


@rpc.exposed
def not_a_module() -> int:
    return 3


@rpc.exposed
def run_it(module: RemoteModule, x: torch.Tensor) -> torch.Tensor:
    return module(x)  # type: ignore[no-any-return]


@rpc.exposed
def make_hidden() -> Hidden:
    return Hidden()


def raises(kind: type[Exception], text: str, function: Callable[[], Any]) -> None:
    try:
        function()
    except kind as error:
        assert re.search(text, str(error)), error  # noqa: PT017
    else:
        raise AssertionError(f"{text!r} was not raised")


def use_modules(rank: int) -> None:
    """Workers 1 and 2 only answer."""
    if rank == 0:
        places()
        refusals()
    rpc.shutdown()


def places() -> None:
    x = torch.ones(2)
    beta = rpc.get_worker_info("beta").node_id
    for where in ("beta/cpu", "beta", "rank:1/cpu", "rank:1", f"{beta}/cpu", str(beta), "cpu"):
        module = RemoteModule(where, Scale, (3.0,), {"shift": 1.0})
        assert torch.equal(module(x), torch.full((2,), 4.0))
        owner = "alpha" if where == "cpu" else "beta"
        assert module.get_module_rref().owner_name() == owner
    module = RemoteModule("beta/cpu", Scale, (3.0,))
    assert torch.equal(module.forward_async(x, twice=True).wait(), torch.full((2,), 6.0))
    factor, *inner = module.remote_parameters()
    assert factor.to_here().item() == 3.0
    assert factor.owner_name() == "beta"
    assert len(inner) == 2
    assert len(module.remote_parameters(recurse=False)) == 1

    model = torch.nn.Sequential(torch.nn.Identity(), module, torch.nn.Linear(2, 1))
    assert model(x).shape == (1,)
    assert len(list(model.parameters())) == 2  # those that are here
    model.eval()
    assert module.get_module_rref().rpc_sync().extra_repr() == ""
    raises(ValueError, "state_dict", model.state_dict)

    # A third worker runs it where it is.
    assert torch.equal(rpc.rpc_sync("gamma", run_it, (module, x)), torch.full((2,), 3.0))
    again = RemoteModule.init_from_module_rref("beta", module.get_module_rref())
    assert torch.equal(again(x), module(x))


def refusals() -> None:
    hidden = RemoteModule("beta", Hidden)
    raises(rpc.NotExposed, "Hidden", hidden.get_module_rref().to_here)
    raises(ValueError, "returns an instance of", RemoteModule("beta", not_a_module).forward)
    raises(rpc.Unsendable, r"args\[1\]", lambda: RemoteModule("beta", Scale, (object(),)))
    raises(TypeError, "positional", RemoteModule("beta", Scale, (1.0, 2.0)).forward)
    # A reference to a module is no leave to run it: neither is made for that, nor is it exposed.
    hidden_ref = rpc.remote("beta", make_hidden)
    other = RemoteModule.init_from_module_rref("beta", hidden_ref)
    raises(rpc.NotExposed, "forward", lambda: other(torch.ones(1)))
    raises(rpc.NotExposed, "parameters", other.remote_parameters)
    number = RemoteModule.init_from_module_rref("beta", rpc.remote("beta", not_a_module))
    raises(rpc.NotExposed, "no module", lambda: number(1))
    raises(rpc.NotExposed, "no device", RemoteModule("beta/meta", Scale, (1.0,)).forward)
    raises(rpc.RpcError, "could not find destination", lambda: RemoteModule("nobody/cpu", Scale))
