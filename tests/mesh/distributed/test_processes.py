"""torch.distributed over the mesh between real processes: training, objects, subgroups, death."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.mesh.distributed import processes
from tests.mesh.distributed.worker import Model, batches

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

WAYS = ("host", "quic")
EVERY_TIME = (pytest.mark.slow, pytest.mark.timeout(900))


def test_training_in_two_processes_equals_training_in_each(tmp_path: Path) -> None:
    """Batch statistics are each rank's own, so the reference averages two models step by step."""
    states = processes.run("ddp", 2, tmp_path)
    reference = averaged_training(2)
    assert states[0].keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        expected = value.double().flatten()
        found = torch.tensor(states[0][name], dtype=torch.float64)
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6), name
    for name, _ in reference.named_parameters():
        assert states[0][name] == states[1][name]
    # Buffers of rank 0 were brought to all ranks before each step, of whatever type.
    assert states[1]["mask"] == [1.0, 0.0] * 4
    assert states[1]["scale"] == [1.0, 1.0]


def test_gradients_over_many_buckets_are_the_mean(tmp_path: Path) -> None:
    assert max(processes.run("ddp_static_buckets", 2, tmp_path)) < 1e-6


def test_what_torch_builds_on_groups_computes_what_one_process_does(tmp_path: Path) -> None:
    """Hooks, sharded optimizers and parameters, uneven inputs, distributed tensors, functions."""
    for found in processes.run("stack", 3, tmp_path):
        assert found.pop("compressed") < 1e-3  # gradients travel in 16 bits
        assert found.pop("power_sgd") < 1e-2
        assert len(found) == 9
        assert max(found.values()) < 1e-5, found


def test_object_collectives(tmp_path: Path) -> None:
    expected = [[0, 1, 2], [0, 1000, 2000], [{"from": 2}, [2, 2, 2]]]
    assert processes.run("objects", 3, tmp_path) == [expected] * 3


def test_subgroups_with_their_own_timeout_and_options(tmp_path: Path) -> None:
    assert processes.run("subgroups", 3, tmp_path) == [
        [True, 4, [1], True, 9],  # by its number in the group of two
        [2, 9],
        [True, 4, 9],
    ]


def test_dimensions_of_a_device_mesh_have_another_backend_inside_hosts(tmp_path: Path) -> None:
    found = processes.run("device_mesh", 4, tmp_path)
    assert found == [
        [101.0, True, 11.0, True],
        [1010.0, True, 11.0, True],
        [101.0, True, 1100.0, True],
        [1010.0, True, 1100.0, True],
    ]


def test_a_group_can_be_left_and_formed_again_over_one_store(tmp_path: Path) -> None:
    assert processes.run("again", 2, tmp_path) == [[1, 3, 5]] * 2


def test_a_failing_all_reduce_makes_backward_raise(tmp_path: Path) -> None:
    result = processes.run("doomed_backward", 2, tmp_path)
    assert result[1] == "aborted"
    step, kind, text = result[0]
    assert step >= 2
    assert kind == "RuntimeError"
    assert "rank 1" in text
    assert "aborted" in text


@pytest.mark.parametrize(
    ("way", "size", "victims", "how"),
    [
        ("quic", 3, [2], signal.SIGKILL),
        ("quic", 4, [2, 3], signal.SIGKILL),
        ("host", 4, [1, 3], signal.SIGKILL),
        ("host", 3, [1], signal.SIGSTOP),
    ],
)
def test_killed_and_stopped_ranks_are_named_by_every_survivor(
    tmp_path: Path, way: str, size: int, victims: list[int], how: signal.Signals
) -> None:
    lose(tmp_path, way, size, victims, how)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_of_four_are_named_every_time(tmp_path: Path) -> None:
    for turn in range(20):
        victims = sorted({turn % 4, (turn + 1 + turn // 4 % 3) % 4})
        lose(tmp_path, "host", 4, victims, signal.SIGKILL)


def lose(tmp_path: Path, way: str, size: int, victims: list[int], how: signal.Signals) -> None:
    """Lose ranks amid an all-reduce: all others name all of them in time."""
    ranks = processes.start("killed", size, tmp_path, way)
    try:
        for rank in ranks:
            rank.wait_ready()
        time.sleep(0.3)  # somewhere in the middle of an all-reduce
        killed_at = time.time()
        for victim in victims:
            os.kill(ranks[victim].process.pid, how)
        for number, rank in enumerate(ranks):
            if number in victims:
                continue
            kind, text, blamed, raised_at, burnt, shared, after = rank.result()
            assert kind == "RankLost"
            assert blamed == victims
            assert all(f"rank {victim} (" in text for victim in victims)
            assert "all_reduce #" in text
            assert raised_at - killed_at < 3
            assert burnt < 0.05, "a survivor spins"
            assert shared == (way == "host")
            assert after == size - len(victims), "no new group"
    finally:
        processes.end(ranks)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_many_ranks_on_one_machine_form_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "DEADLINE", 300.0)
    for seconds, total, _ in processes.run("meet", 24, tmp_path):
        assert seconds < 30
        assert total == 24


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["host", "quic"])
def test_all_gathers_keep_memory_flat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(processes, "DEADLINE", 300.0)
    ranks = processes.start("flat_memory", 2, tmp_path, way)
    try:
        assert all(rank.result() < 32 << 20 for rank in ranks)
    finally:
        processes.end(ranks)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are not forked")
def test_data_is_loaded_by_forked_workers_beside_a_training(tmp_path: Path) -> None:
    indices = float(sum(range(50)))
    assert processes.run("load_data", 2, tmp_path) == [[50, [2 * indices] * 6]] * 2


@pytest.mark.parametrize("times", [1, pytest.param(50, marks=EVERY_TIME)])
def test_exit_without_leaving_is_clean_and_quiet(tmp_path: Path, times: int) -> None:
    for turn in range(times):
        ranks = processes.start("fall_off", 3 if times == 1 else 2, tmp_path, WAYS[turn % 2])
        try:
            for rank in ranks:
                was_summed, ended_at = rank.result()
                assert was_summed
                assert time.time() - ended_at < 10  # a second or two, on a quiet machine
        finally:
            processes.end(ranks)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scenario", ["send_and_leave", "send_and_fall_off"])
def test_what_was_sent_arrives_though_its_sender_is_gone_at_once(
    tmp_path: Path, scenario: str, way: str
) -> None:
    assert processes.run(scenario, 2, tmp_path, way) == ["gone", True]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_message_of_more_than_two_gibibytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "DEADLINE", 1500.0)
    assert processes.run("send_large", 2, tmp_path) == [True, True]


def averaged_training(size: int) -> Model:
    """Train as many models as ranks on their parts of the data, and average the gradients."""
    models = [Model() for _ in range(size)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    parts = [batches(rank, size) for rank in range(size)]
    for step in range(len(parts[0])):
        for model in models[1:]:  # buffers are rank 0's at the start of every step
            for own, first in zip(model.buffers(), models[0].buffers(), strict=True):
                own.copy_(first)
        for model, part in zip(models, parts, strict=True):
            inputs, targets = part[step]
            model.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(parameter.grad for parameter in parameters) / size
            for parameter in parameters:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return models[0]
