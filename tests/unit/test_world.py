"""The process group of a single process: reachable from no other machine, and gone at its end."""

from __future__ import annotations

import os

import psutil
import pytest
import torch.distributed as dist

from vlmrl.dist.world import GLOO_INTERFACE, group_of_one


@pytest.mark.parametrize("configured", [None, "eth7"])
def test_it_listens_on_the_loopback_interface_only_and_the_variable_is_as_before(monkeypatch, configured):
    """By default gloo takes the interface of the machine's name: so the variable is looked at, too."""
    if configured is None:
        monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    else:
        monkeypatch.setenv(GLOO_INTERFACE, configured)
    real, interfaces = dist.init_process_group, []

    def begin(*args, **more):
        interfaces.append(os.environ.get(GLOO_INTERFACE))
        real(*args, **more)

    monkeypatch.setattr(dist, "init_process_group", begin)
    with group_of_one("cpu"):
        assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
        assert os.environ.get(GLOO_INTERFACE) == configured
        ports = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
        assert set(ports) <= {"127.0.0.1", "::1"}
        with group_of_one("cpu"):  # there is one already: nothing changes, also at its end
            pass
        assert dist.is_initialized()
    assert not dist.is_initialized()
    [interface] = interfaces
    assert interface in psutil.net_if_addrs() and "127.0.0.1" in [a.address for a in psutil.net_if_addrs()[interface]]


def test_it_ends_with_an_error_too():
    with pytest.raises(KeyError), group_of_one("cpu"):
        raise KeyError("x")
    assert not dist.is_initialized()
