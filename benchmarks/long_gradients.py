"""Gradients of one long row, computed in each way that there is: how far each is from the first, layer by layer.

    python benchmarks/long_gradients.py RECIPE FILE LENGTH [field=value ...] [-- VARIANT...]

No optimizer: gradients are compared as they come, and dropped. A line of FILE has, for every unit (layer, embedding,
head) and for every kind of weight (q_proj, input_layernorm), the norm of its gradient, and that of its difference to
the first variant's, relative to the former.
"""

import dataclasses
import json
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.engine.layerwise import LayerByLayer
from penstock.engine.packed import PackedModel
from penstock.engine.parked import saved_inputs
from penstock.engine.trial import full_batch
from penstock.engine.weights import layer_by_layer
from penstock.flow.transfers import link_of
from penstock.machine.hardware import pick_device, pick_dtype
from penstock.model.load import load_config, load_model
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import inputs_every, with_values

FLASH = "flash attention"
VARIANTS = {
    "rows": {"compile": False, "recompute": "full"},
    FLASH: {"compile": False, "recompute": "full"},
    "rows, compiled": {"recompute": "full"},
    "rows, compiled, selected": {"recompute": "selected"},
    "rows, compiled, full and selected": {"recompute": "full:half"},
    "layers": {"compile": False, "order": "layers", "tile": "none", "inputs": "kept"},
    "layers, compiled": {"order": "layers", "tile": "none", "inputs": "kept"},
    "layers, compiled, parked": {"order": "layers", "tile": "none", "inputs": "parked"},
    "tiles": {"compile": False, "order": "layers", "inputs": "kept"},
    "tiles, compiled, parked": {"order": "layers", "inputs": "parked"},
}


class Compared:
    """Of every unit and kind the sums of squares of its gradient, and of what it is off that of the first variant."""

    def __init__(self, model):
        self.names = {p: name for name, p in model.named_parameters()}
        self.first, self._final = {}, True
        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(self._came)

    def start(self):
        """A variant begins."""
        self.squares, self.off = {}, {}

    @contextmanager
    def held(self):
        """What comes inside is part of a sum."""
        self._final = False
        yield
        self._final = True

    def _came(self, parameter):
        if not self._final:
            return
        name, gradient = self.names[parameter], parameter.grad
        words = name.split(".")
        unit, kind = words[2] if "layers" in words else words[-2], words[-2]
        square, off = gradient.double().square().sum(), torch.zeros((), dtype=torch.float64, device=gradient.device)
        if name in self.first:
            off = (gradient.double() - self.first[name].to(gradient.device).double()).square().sum()
        else:
            self.first[name] = gradient.to("cpu")
        for part in {"all", unit, kind, f"{unit}.{kind}"}:
            self.squares[part] = self.squares.get(part, 0) + square
            self.off[part] = self.off.get(part, 0) + off
        parameter.grad = None

    def result(self):
        """Of each its norm, and its difference beside that."""
        norms = {part: float(square) ** 0.5 for part, square in self.squares.items()}
        return norms, {part: float(square) ** 0.5 / norms[part] for part, square in self.off.items()}


def gradients(model, recipe, batch, held):
    """Compute them all."""
    device = next(model.parameters()).device
    one_by_one = layer_by_layer(recipe)
    packed = PackedModel(model, recipe, lambda text: print(text, flush=True), one_by_one=one_by_one)
    if not one_by_one:
        loss = packed.loss_sum(batch) / batch.num_trained
        loss.backward()
        return loss.item()
    link = link_of(device)
    inputs = saved_inputs(packed, recipe, link)
    layers = LayerByLayer(packed, None, inputs, link.streams.timeline, inputs_every(recipe.inputs))
    try:
        return layers.run([batch], batch.num_trained, held).item()
    finally:
        inputs.close()


def main(preset, file, length, *words):
    words = list(words)
    chosen = words[words.index("--") + 1 :] if "--" in words else list(VARIANTS)
    settings = words[: words.index("--")] if "--" in words else words
    device = pick_device("auto")
    values = {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in settings)}
    tile = str(values.pop("tile", 16384))
    values = {"batch_size": 1, "max_length": int(length), "weights": "resident", **values}
    base = with_values(dataclasses.replace(PRESETS[preset], init="random", compile=True), values, "arguments")
    base = dataclasses.replace(base, dtype=pick_dtype(base.dtype, device))
    config = load_config(base)
    text = config.get_text_config()
    model = load_model(base, config, device, print)
    compared, batch = Compared(model), full_batch(1, base.max_length, text.vocab_size)
    for name in chosen:
        change = {k: v.replace("half", str(text.num_hidden_layers // 2)) if k == "recompute" else v
                  for k, v in VARIANTS[name].items()}  # fmt: skip
        recipe = dataclasses.replace(base, **({"tile": tile} if "order" in change else {}) | change)
        compared.start()
        start = time.perf_counter()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if name == FLASH else nullcontext():
            loss = gradients(model, recipe, batch, compared.held)
        seconds = time.perf_counter() - start
        norms, off = compared.result()
        row = {"recipe": preset, "length": base.max_length, "variant": name, "loss": loss, "seconds": seconds,
               "norms": norms, "off": off, "torch": torch.__version__}  # fmt: skip
        with Path(file).open("a") as rows:
            rows.write(json.dumps(row) + "\n")
        parts = [part for part in sorted(off, key=off.get, reverse=True) if "." not in part]
        worst = ", ".join(f"{part} {off[part]:.2e}" for part in parts[:4])
        print(f"{name:34} {seconds:6.1f} s  loss {loss:.6f}  norm {norms['all']:.6f}  off {off['all']:.2e} ({worst})",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
