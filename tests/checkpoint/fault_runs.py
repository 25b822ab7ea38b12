"""Real runs of the command with faults at exact places: see fault.c and fork_server.py."""

import json
import re
from dataclasses import dataclass

TINY = "num_hidden_layers=1,hidden_size=16,intermediate_size=16,num_attention_heads=2,num_key_value_heads=1,head_dim=8"
RUN = [
    "train", "demo", "--init", "random", "--shape", TINY, "--prompt", "None", "--data-percent", "20",
    "--max-length", "64", "--batch-size", "2", "--device", "cpu", "--log-every", "1",
]  # fmt: skip
COUNT, KILL_BEFORE, KILL_AFTER, NO_SPACE, TERMINATE, TERMINATE_TWICE = range(6)


@dataclass(frozen=True)
class Ended:
    """A child that has ended: exit code (or minus the signal), and all that it printed."""

    code: int
    text: str

    @property
    def calls(self):
        return int(re.findall(r"^calls (\d+)$", self.text, flags=re.M)[-1])

    @property
    def trace(self):
        """The calls of a run that only counted them, by name and in order."""
        return re.findall(r"^call (\w+)$", self.text, flags=re.M)


class Server:
    """The warm process that runs are forked from."""

    def __init__(self, process, directory):
        self._process, self._directory, self._outputs, self._count = process, directory, {}, 0

    def _ask(self, request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork server has died"
        return int(answer)

    def start(self, *words, **options):
        self._count += 1
        out = self._directory / f"out-{self._count}.txt"
        pid = self._ask({"argv": [str(word) for word in words], "out": str(out), **options})
        self._outputs[pid] = out
        return pid

    def wait(self, pid):
        return Ended(self._ask({"wait": pid}), self._outputs.pop(pid).read_text())

    def penstock(self, *words, **options):
        return self.wait(self.start(*words, **options))

    def train(self, run, *flags, **options):
        return self.penstock(*RUN, "--output-dir", run, *flags, **options)


def digests(checkpoint):
    """Checksums of the tensors of a checkpoint, by file."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {name: entry["xxh3_128"] for name, entry in files.items() if name.endswith(".safetensors")}


def checkpoints(run):
    """Complete checkpoints by name, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step-*") if (path / "manifest.json").exists())


def rows(run, name="metrics.jsonl"):
    """What a run wrote down, without the times."""
    lines = (run / name).read_text().splitlines()
    times = ("step_seconds", "tokens_per_s", "model_tflops", "reference_tflops")
    return [{k: v for k, v in json.loads(line).items() if k not in times} for line in lines]
