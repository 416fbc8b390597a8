"""Named targets: their figures and devices, and what is said where there is no compiler for them."""

from __future__ import annotations

import pytest

from kvjax import topology
from kvjax.resources import ResourceError


def test_unknown_target_is_named():
    with pytest.raises(topology.TopologyError, match="unknown target 'v9'; known targets: h100, h100-8"):
        topology.devices("v9")


@pytest.mark.parametrize(("name", "package"), [("v5e-8", "libtpu"), ("h100", "jax-cuda12-plugin")])
def test_missing_compiler_is_named(name: str, package: str):
    reason = topology.missing(name)
    if reason is None:
        pytest.skip(f"this environment can compile for {name}")
    assert package in reason
    with pytest.raises(topology.TopologyError, match=package):
        topology.devices(name)


def test_gpu_description_is_readable():
    assert "compute_capability { major: 9" in topology._specification("h100")
    with pytest.raises(ResourceError, match="configs/targets/b200.txtpb"):
        topology._specification("b200")


@pytest.mark.aot
@pytest.mark.parametrize("name", sorted(topology.TARGETS))
def test_every_target_has_its_devices(mesh_for, name: str):
    target = topology.target(name)
    mesh = mesh_for(name, model=target.devices)
    assert mesh.devices.size == target.devices
    assert {device.platform for device in mesh.devices.flat} == {target.platform}
