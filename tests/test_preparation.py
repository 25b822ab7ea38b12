"""What a run knows before its weights are loaded. Its checks are tried in test_cli.py, as a user meets them."""

import dataclasses

from penstock import probe
from penstock.engine.ranks import ALONE
from penstock.machines import H200
from penstock.preparation import planned, prepare_run
from penstock.presets import PRESETS
from penstock.report.console import Console

DEMO = PRESETS["demo"]


def test_a_run_says_its_plan_once_the_machine_was_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    run = prepare_run(DEMO, Console(quiet=True))
    assert planned(run, Console(), ALONE)[1] is None, "a CPU is not measured for it"
    monkeypatch.setattr(probe, "measure", lambda: dataclasses.replace(H200, name="cpu", gpu_bytes=0))
    probe.this_machine(remeasure=False, say=print)
    if run.device.type == "cpu":
        _, plan = planned(run, Console(), ALONE)
        assert plan is not None
        assert plan.fits
        assert "planned: " in capsys.readouterr().out
