"""The page, as text and in a browser."""

import html.parser
import json
import re
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from penstock.command.cli import main

pytest.importorskip("vl_convert", reason="the extra `report` is not installed")

from penstock.report.page import render, report
from penstock.report.runs import read_runs

CHARTS = ["loss", "lr", "norm", "throughput", "memory", "homes", "timeline"]
BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
needs_browser = pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def page(finished_run, tmp_path_factory):
    return report([finished_run], to=str(tmp_path_factory.mktemp("page") / "report.html")).page


class Elements(html.parser.HTMLParser):
    """Tags and attributes of a page, and the text outside scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] not in ("script", "style"):
            self.text.append(data)


def test_the_page_shows_every_part(page):
    elements = Elements(page.read_text())
    text = " ".join(elements.text)
    for title in ("Loss by step", "Learning rate", "Gradient norm", "Tokens a second", "Memory by place",
                  "Where every byte of optimizer state lives", "Step 3 on the lanes", "was hidden", "On a CPU",
                  "before", "after",
                  "Recipe", "Environment", "trained on", "Python 3"):  # fmt: skip
        assert title in text, title
    assert [a["data-chart"] for _, a in elements.tags if "data-chart" in a][:4] == CHARTS[:4]
    specs = json.loads(re.search(r'id="specs">(.*?)</script>', page.read_text(), re.S).group(1))
    assert set(specs) == set(CHARTS)


def test_text_of_the_run_cannot_become_part_of_the_page(page):
    """Rows and prompt hold a script and an image: none of either is an element, and all of it can be read."""
    elements = Elements(page.read_text())
    assert "img" not in [tag for tag, _ in elements.tags]
    assert len([tag for tag, _ in elements.tags if tag == "script"]) == 4
    assert "onerror=alert(1)" in " ".join(elements.text)


def test_the_page_names_no_address(page):
    elements = Elements(page.read_text())
    loaded = [a for _, a in elements.tags if {"src", "href"} & set(a)]
    assert loaded == [{"rel": "icon", "href": "data:,"}]
    policy = next(a["content"] for tag, a in elements.tags if tag == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert "eval" not in policy
    assert page.stat().st_size < 1.5e6


def test_several_runs_are_compared(finished_run, tmp_path):
    other = tmp_path / "second"
    shutil.copytree(finished_run, other, ignore=shutil.ignore_patterns("model", "checkpoints"))
    recipe = (other / "recipe.yaml").read_text()
    (other / "recipe.yaml").write_text(recipe.replace("seed: 42", "seed: 43"))
    text = render(read_runs([finished_run, other]), library="")
    assert "2 runs compared" in text
    assert re.search(r'class="differs">seed</th>', text)
    assert not re.search(r'class="differs">lr</th>', text)
    specs = json.loads(re.search(r'id="specs">(.*?)</script>', text, re.S).group(1))
    assert {point["run"] for point in specs["lr"]["data"]["values"]} == {"first", "second"}
    assert {"timeline-1", "timeline-2"} <= set(specs)


def test_the_page_has_both_rates_and_does_without_them_in_old_runs(finished_run, tmp_path):
    text = render(read_runs([finished_run]), library="")
    assert "<dt>model TFLOP/s</dt>" in text
    assert "by the reference&#39;s formula" in text
    run = tmp_path / "old"
    shutil.copytree(finished_run, run, ignore=shutil.ignore_patterns("model", "checkpoints"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["tokens_per_s"], row["model_tflops"], row["reference_tflops"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = render(read_runs([run]), library="")
    assert "tokens a second" in text
    assert "TFLOP/s" not in text


def test_the_page_says_of_how_many_ranks_a_rate_is(finished_run, tmp_path):
    run = tmp_path / "ranks"
    shutil.copytree(finished_run, run, ignore=shutil.ignore_patterns("model", "checkpoints"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["ranks"] for row in rows} == {1}

    def shown(*ranks):
        changed = [{**row, "ranks": count} for row, count in zip(rows, ranks, strict=True)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
        return render(read_runs([run]), library="")

    both = shown(*(2 for _ in rows))
    assert "<dt>model TFLOP/s of one rank</dt>" in both
    assert "<dt>optimizer state of the first rank</dt>" in both
    mixed = shown(1, *(2 for _ in rows[1:]))
    assert "<dt>model TFLOP/s, 1 step on 1 rank</dt>" in mixed
    assert f"<dt>model TFLOP/s of one rank, {len(rows) - 1} steps on 2 ranks</dt>" in mixed
    assert f"<dt>tokens a second, {len(rows) - 1} steps on 2 ranks</dt>" in mixed


def test_a_run_without_a_step_has_a_page(finished_run, tmp_path):
    shutil.copy(finished_run / "recipe.yaml", tmp_path)
    assert "none yet" in render(read_runs([tmp_path]), library="")


def test_images(finished_run, tmp_path, capsys):
    assert main(["report", str(finished_run), "--to", str(tmp_path / "r.html"), "--images", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert {path.rpartition("/")[2] for path in written["images"]} == {
        f"{c}.{e}" for c in CHARTS for e in ("svg", "png")
    }
    assert "Loss by step" in (tmp_path / "report-images" / "loss.svg").read_text()
    assert (tmp_path / "report-images" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_that_does_not_fit_leaves_what_was_there(finished_run, tmp_path, capsys):
    page = tmp_path / "page.html"
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for there in ([], ["page.html"]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            assert main(["report", str(finished_run), "--to", str(page)]) == 3
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "cannot be written (File too large)\n  The disk is not full" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == there
        page.write_text("as it was")
    signal.signal(signal.SIGXFSZ, handler)
    assert page.read_text() == "as it was"


def test_a_full_disk_has_its_own_exit_code(finished_run, capsys):
    assert main(["report", str(finished_run), "--to", "/dev/full"]) == 3
    assert "/dev/full: cannot be written (No space left on device)\n  Free space there" in capsys.readouterr().err
    assert Path("/dev/full").is_char_device(), "a device is not replaced"


def test_a_report_does_not_make_the_directory_someone_elses(finished_run, capsys):
    """report.html lies in the run's directory, which must still be known as a run's and nothing else's."""
    from penstock.checkpoint.run_dir import check_run_dir

    assert main(["report", str(finished_run)]) == 0
    assert str(finished_run / "report.html") in capsys.readouterr().out
    check_run_dir(finished_run, overwrite=True)


def test_the_page_holds_the_plan_against_what_was_measured(finished_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    (run / "facts" / "plan.json").unlink(missing_ok=True)
    assert main(["report", str(run)]) == 0
    assert "Predicted against measured" not in (run / "report.html").read_text()
    (run / "facts" / "plan.json").write_text('{"step_seconds": 1000.0, "gpu_bytes": 0, "host_bytes": 1}')
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert "Predicted against measured" in text
    assert "<td>1e+03 s</td>" in text
    assert "<td>-100%</td>" in text
    assert "gpu memory" not in text, "there is none"


def test_a_run_without_some_facts_still_has_a_page(finished_run, tmp_path):
    """Killed before its third step, say: no step was on the timeline."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    for name in ("timeline", "placement", "memory", "summary"):
        assert main(["report", str(run), str(finished_run), "--to", str(tmp_path / "two.html")]) == 0
        assert main(["report", str(run)]) == 0
        (run / "facts" / f"{name}.json").unlink()
    assert main(["report", str(run)]) == 0


def browse(page, profile, *flags):
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
               "--virtual-time-budget=10000", "--enable-logging=stderr", *flags,
               "--dump-dom", page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_browser
@pytest.mark.slow
def test_a_browser_draws_every_chart_and_has_nothing_to_say(page, tmp_path):
    dom, said = browse(page, tmp_path / "profile")
    assert said == []
    assert f'data-drawn="{len(CHARTS)}"' in dom
    for chart in CHARTS:
        drawn = re.search(rf'data-chart="{chart}".*?</svg>', dom, re.S).group()
        assert drawn.count("<path") > 5, chart
    assert "<title>broken" not in dom


@needs_browser
@pytest.mark.slow
def test_the_browser_asks_the_network_for_nothing(page, tmp_path):
    """Its own log of the network: the file, and no other address."""
    log = tmp_path / "net.json"
    browse(page, tmp_path / "profile", f"--log-net-log={log}", "--disable-background-networking",
           "--disable-component-update", "--no-first-run")  # fmt: skip
    asked = set(re.findall(r'"url":"([^"]+)"', log.read_text()))
    own = {url for url in asked if "google" in url or "gvt" in url}  # the browser's own errands
    assert {url for url in asked - own if not url.startswith(("file:", "data:", "chrome"))} == set()


@needs_browser
@pytest.mark.slow
def test_the_browser_would_refuse_a_request(page, tmp_path):
    """Breaks the page on purpose: were there an image from the network, the policy would stop it and say so."""
    bad = tmp_path / "bad.html"
    bad.write_text(page.read_text().replace("</main>", '<img src="http://127.0.0.1:9/x.png"></main>'))
    _, said = browse(bad, tmp_path / "profile")
    assert any("Content Security Policy" in line for line in said)
