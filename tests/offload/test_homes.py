"""The order in which a home waits. On a CPU copies are made at once, so the marks themselves are watched."""

import torch

from penstock.flow.lanes import Lane, Mark, Tape, ToHost
from penstock.offload.homes import Chunk, Coefficients, StreamHome, Update
from penstock.update.formats import FORMATS
from penstock.update.kernels import NUM_COEFFICIENTS

CPU = torch.device("cpu")


def test_a_streamed_chunk_does_not_set_out_before_it_came_home(monkeypatch):
    """A host that runs ahead asks for a chunk again while its last update has not even begun."""
    log = []

    class Watched(Mark):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def wait_on_host(self):
            log.append(f"waited for {self.name}")

    lanes = []
    monkeypatch.setattr(Lane, "mark", lambda lane: (lanes.append(lane.name), Watched(f"{lane.name} {len(lanes)}"))[1])
    chunk = Chunk(0, 0, 8, torch.float32, FORMATS["fp32"])
    home = StreamHome([chunk], CPU, Tape(CPU), cores=[0])
    real = home._in.work
    monkeypatch.setattr(home._in, "work", lambda: (log.append("in"), real())[1])
    row = torch.ones(NUM_COEFFICIENTS)
    update = Update(chunk, torch.zeros(8), torch.ones(8), Coefficients(row, ToHost.of(row[None]), 0), Mark())
    for _ in range(3):
        home.update(update).result()
    home.close()
    assert log[:5] == ["in", "waited for out 3", "in", "waited for out 6", "in"]
