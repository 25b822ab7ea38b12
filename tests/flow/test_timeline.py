import time

import torch
from small_net import offload
from torch import nn

from penstock.flow.lanes import Lane
from penstock.flow.timeline import Timeline

CPU = torch.device("cpu")


def test_the_timeline_says_how_long_a_lane_was_busy():
    timeline = Timeline(CPU)
    lane = Lane("in", timeline)
    with lane.work():  # not recorded: the timeline is off
        time.sleep(0.01)
    timeline.start()
    with lane.work():
        time.sleep(0.05)
    with timeline.on_host("cpu"):
        time.sleep(0.02)
    spans = {span.lane: span for span in timeline.stop()}
    assert set(spans) == {"in", "cpu"}
    assert 0.05 <= spans["in"].end - spans["in"].start < 0.5
    assert spans["in"].end <= spans["cpu"].start
    with lane.work():
        pass
    assert len(timeline.stop()) == 2
    timeline.start()
    with lane.work("down"):
        pass
    assert [span.lane for span in timeline.stop()] == ["down"], "under another name, and begun anew"


def test_every_lane_of_a_step_is_on_the_timeline():
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 30))
    optimizer = offload(model, homes={"gpu": 0.4, "stream": 0.3, "host": 0.3}, chunk_size=100)
    optimizer.timeline.start()
    for _ in range(2):
        model(torch.randn(4, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    spans = optimizer.timeline.stop()
    assert {span.lane for span in spans} >= {"in", "update", "out", "cpu", "wait"}
    assert all(span.end >= span.start >= 0 for span in spans)
