"""Tests of quaternions against rotation matrices that are built here from first principles."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpusim_rl.sim.quaternion import (
    euler_xyz,
    quat_conjugate,
    quat_difference,
    quat_from_axis_angle,
    quat_multiply,
    quat_rotate,
    quat_rotate_inverse,
    quat_yaw,
)

relaxed = settings(deadline=None)  # the first call compiles and imports

component = st.floats(-1.0, 1.0, width=32)
vector = st.tuples(*[st.floats(-10.0, 10.0, width=32)] * 3).map(torch.tensor)
angle = st.floats(-math.pi, math.pi)


@st.composite
def rotations(draw) -> Tensor:
    """Draw unit quaternions that cover all rotations."""
    quat = torch.tensor(draw(st.tuples(*[component] * 4)), dtype=torch.float64)
    if quat.norm() < 1e-3:
        quat = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    return (quat / quat.norm()).float()


def rodrigues(axis: Tensor, angle: float) -> Tensor:
    """Return the rotation matrix I + sin(a) K + (1 - cos(a)) K^2 about a unit axis."""
    x, y, z = axis.double().tolist()
    k = torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]], dtype=torch.float64)
    eye = torch.eye(3, dtype=torch.float64)
    return eye + math.sin(angle) * k + (1 - math.cos(angle)) * (k @ k)


def matrix(quat: Tensor) -> Tensor:
    """Return the rotation matrix of a unit quaternion by its axis and angle."""
    quat = quat.double()
    sine = quat[1:].norm()
    if sine < 1e-12:
        return torch.eye(3, dtype=torch.float64)
    return rodrigues(quat[1:] / sine, 2 * math.atan2(sine.item(), quat[0].item()))


def close(actual: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=atol, rtol=1e-5)


@relaxed
@given(rotations(), vector)
def test_rotation_equals_the_rotation_matrix(quat, vec):
    close(quat_rotate(quat, vec), matrix(quat) @ vec.double())
    close(quat_rotate_inverse(quat, vec), matrix(quat).T @ vec.double())


@relaxed
@given(rotations(), vector)
def test_inverse_undoes_the_rotation(quat, vec):
    close(quat_rotate_inverse(quat, quat_rotate(quat, vec)), vec)
    close(quat_rotate(quat_conjugate(quat), vec), quat_rotate_inverse(quat, vec))


@relaxed
@given(rotations(), rotations())
def test_product_equals_the_matrix_product(a, b):
    product = quat_multiply(a, b)
    assert product.norm().item() == pytest.approx(1.0, abs=1e-5)
    close(matrix(product / product.norm()), matrix(a) @ matrix(b), atol=1e-5)


@relaxed
@given(rotations(), rotations())
def test_difference_equals_the_product_with_the_inverse(a, b):
    close(quat_difference(a, b), quat_multiply(a, quat_conjugate(b)), atol=1e-6)
    close(quat_difference(a, a), torch.tensor([1.0, 0.0, 0.0, 0.0]), atol=1e-6)


@relaxed
@given(rotations(), angle)
def test_axis_angle_equals_rodrigues_formula(quat, a):
    axis = quat[1:] / quat[1:].norm() if quat[1:].norm() > 1e-3 else torch.tensor([0.0, 1.0, 0.0])
    made = quat_from_axis_angle(axis, torch.tensor(a, dtype=torch.float32))
    close(matrix(made / made.norm()), rodrigues(axis / axis.norm(), a), atol=1e-5)


@relaxed
@given(angle, st.floats(-math.pi / 2 + 0.01, math.pi / 2 - 0.01), angle)
def test_euler_angles_are_extrinsic_xyz(roll, pitch, yaw):
    axes = torch.eye(3)
    about_x, about_y, about_z = (
        quat_from_axis_angle(axes[i], torch.tensor(a, dtype=torch.float32)) for i, a in enumerate((roll, pitch, yaw))
    )
    quat = quat_multiply(about_z, quat_multiply(about_y, about_x))
    expected = rodrigues(axes[2], yaw) @ rodrigues(axes[1], pitch) @ rodrigues(axes[0], roll)
    close(matrix(quat / quat.norm()), expected, atol=1e-5)
    assert torch.equal(quat_yaw(quat), euler_xyz(quat)[2])
    # the angles themselves, up to whole turns
    for actual, wanted in zip(euler_xyz(quat), (roll, pitch, yaw), strict=True):
        difference = actual.item() - wanted
        assert math.remainder(difference, 2 * math.pi) == pytest.approx(0.0, abs=5e-4)


def test_pitch_saturates_at_the_poles():
    half = math.sqrt(0.5)
    up = torch.tensor([half, 0.0, half, 0.0]) * 1.0001  # not quite unit, as after float32 rounding
    _, pitch, _ = euler_xyz(up)
    assert pitch.item() == pytest.approx(math.pi / 2)


def test_functions_accept_batch_dimensions():
    random = torch.Generator().manual_seed(0)
    quat = torch.nn.functional.normalize(torch.randn(2, 5, 4, generator=random), dim=-1)
    other = torch.nn.functional.normalize(torch.randn(2, 5, 4, generator=random), dim=-1)
    vec = torch.randn(2, 5, 3, generator=random)
    for i, j in torch.cartesian_prod(torch.arange(2), torch.arange(5)).tolist():
        for function, more in ((quat_rotate, vec), (quat_rotate_inverse, vec), (quat_multiply, other)):
            close(function(quat, more)[i, j], function(quat[i, j], more[i, j]))
        close(quat_difference(quat, other)[i, j], quat_difference(quat[i, j], other[i, j]))
        close(torch.stack(euler_xyz(quat))[:, i, j], torch.stack(euler_xyz(quat[i, j])))
