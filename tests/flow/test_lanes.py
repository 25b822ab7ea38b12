"""Lanes keep an order, and what they make waits for them; on a CPU everything happens at once."""

import threading

import pytest
import torch

from penstock.flow.lanes import Streams

CPU = torch.device("cpu")


def test_a_mark_of_a_device_without_streams_is_passed_at_once():
    streams = Streams(CPU)
    lane = streams.lane("in")
    assert lane.mark().ready()
    assert streams.main_mark().ready()
    lane.wait(streams.main_mark())
    streams.main_waits(lane.mark())
    lane.mark().wait_on_host()
    streams.synchronize()


def test_numbers_reach_the_host_as_they_were(device):
    streams = Streams(torch.device(device))
    numbers = torch.arange(5.0, device=device) + 1
    on_host = streams.to_host(numbers)
    assert on_host.read().tolist() == [1, 2, 3, 4, 5]
    assert on_host.read().device == CPU
    assert on_host.ready()
    assert streams.separate_memory == (device == "cuda")


def test_numbers_reach_the_host_whatever_the_default_device(device, monkeypatch):
    monkeypatch.setattr(Streams, "separate_memory", True)
    streams, numbers = Streams(torch.device(device)), torch.arange(3.0, device=device)
    with torch.device("cuda" if device == "cuda" else "meta"):
        on_host = streams.to_host(numbers)
    assert on_host.read().tolist() == [0, 1, 2]


def test_work_of_a_thread_is_in_order_and_not_in_the_callers():
    thread, seen = Streams(CPU).thread("penstock-test"), []
    for number in range(20):
        thread.submit(lambda number=number: seen.append((number, threading.current_thread().name)))
    thread.shutdown()
    assert [number for number, _ in seen] == list(range(20))
    assert {name.rsplit("_", 1)[0] for _, name in seen} == {"penstock-test"}


@pytest.mark.gpu
def test_a_lane_waits_for_the_model_and_the_model_for_a_lane():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU on this machine")
    streams = Streams(torch.device("cuda"))
    first, second = streams.lane("in"), streams.lane("update", urgent=True)
    values = torch.zeros(2**26, device="cuda")
    for _ in range(10):
        values.add_(1)  # still under way when the lane is told to wait
        first.wait(streams.main_mark())
        with first.work():
            values.mul_(2)
        second.wait(first.mark())
        with second.work():
            values.sub_(1)
        streams.main_waits(second.mark())
    wanted = 0
    for _ in range(10):
        wanted = 2 * (wanted + 1) - 1
    assert values.unique().tolist() == [wanted]
