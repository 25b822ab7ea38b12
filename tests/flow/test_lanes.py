import time

import torch
from torch import nn

from penstock.flow.lanes import Lane, Tape
from penstock.offload.optimizer import OffloadAdamW

CPU = torch.device("cpu")


def test_the_tape_says_how_long_a_lane_was_busy():
    tape = Tape(CPU)
    lane = Lane("in", CPU, tape)
    with lane.work():  # not recorded: the tape is off
        time.sleep(0.01)
    tape.start()
    with lane.work():
        time.sleep(0.05)
    with tape.on_host("cpu"):
        time.sleep(0.02)
    spans = {span.lane: span for span in tape.stop()}
    assert set(spans) == {"in", "cpu"}
    assert 0.05 <= spans["in"].end - spans["in"].start < 0.5
    assert spans["in"].end <= spans["cpu"].start
    with lane.work():
        pass
    assert len(tape.stop()) == 2


def test_every_lane_of_a_step_is_on_the_tape():
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 30))
    optimizer = OffloadAdamW(model, homes={"gpu": 0.4, "stream": 0.3, "host": 0.3}, chunk_size=100)
    optimizer.tape.start()
    for _ in range(2):
        model(torch.randn(4, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    spans = optimizer.tape.stop()
    assert {span.lane for span in spans} >= {"in", "update", "out", "cpu", "wait"}
    assert all(span.end >= span.start >= 0 for span in spans)
