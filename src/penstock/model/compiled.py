"""Decoder layers compiled for training.

`layer.forward` is replaced, not the module compiled: `module.compile()` traces forward hooks together with the module,
and the hook that waits for a unit's update is then lost without a word, so that forward reads weights that are still
being written. Layers of one kind share their code, so that one compilation serves all of them; rows have one length, so
that it serves all steps. Without gradients (evaluation, generation) the plain forward runs: shapes change there all the
time, and every shape would be compiled again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.cache import cache_dir

Say = Callable[[str], None]


def set_compile(layers: Sequence[nn.Module], on: bool, say: Say) -> None:
    """Compile every layer at its first forward with gradients, or undo it."""
    for layer in layers:
        forward = vars(layer).get("forward")
        if isinstance(forward, _Compiled):
            del layer.forward
            if layer.forward != forward.plain:
                layer.forward = forward.plain
    if not on:
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir("compiled")))  # the default is emptied with /tmp
    attempt = _Attempt(say)
    for layer in layers:
        layer.forward = _Compiled(layer.forward, attempt)


@dataclass
class _Attempt:
    """What all layers know of the compiler: it works, it does not, or nobody has tried yet."""

    say: Say
    works: bool = False
    failed: bool = False


class _Compiled:
    """A forward that is compiled where gradients are wanted."""

    def __init__(self, plain: Callable[..., Any], attempt: _Attempt) -> None:
        functools.update_wrapper(self, plain)  # transformers reads the signatures of forwards
        self.plain, self._attempt = plain, attempt
        self._compiled = torch.compile(plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._attempt.failed or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        if self._attempt.works:
            return self._compiled(*args, **kwargs)
        try:
            result = self._compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:  # not what the model itself may raise
            first = str(error).strip().splitlines()[0]
            self._attempt.failed = True
            self._attempt.say(f"layers run uncompiled, which is slower: the compiler failed ({first})")
            return self.plain(*args, **kwargs)
        self._attempt.works = True
        return result
