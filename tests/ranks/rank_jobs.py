"""What ranks do in tests: each function runs on every rank of a world that may have one."""

import copy
import dataclasses
import gc
import itertools
import os
import signal
import time
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import dynamic_module_utils

import penstock.engine.meeting
import penstock.run.loading
import penstock.run.train
from penstock.checkpoint import export_ranks
from penstock.checkpoint.fingerprint import model_fingerprint
from penstock.checkpoint.resume import Saved, restore
from penstock.checkpoint.store import open_checkpoint
from penstock.checkpoint.tensors import receive_blocks, send_tensors
from penstock.data.loader import Position, prepare
from penstock.engine.fsdp import load_for_ranks, shard_over_ranks
from penstock.engine.meeting import joined
from penstock.engine.native import NativeEngine
from penstock.engine.ranks import ALONE, SHARE_GPU, bind, find_world
from penstock.errors import Interrupted, ModelError, RecipeError, UserError
from penstock.machine import hardware
from penstock.machine.hardware import COMPILED_FROM
from penstock.model.attention import use_attention
from penstock.model.decoder import find_decoder
from penstock.model.load import load_config, load_model, load_tokenizer, model_class
from penstock.model.load_rows import _read, build_on_meta
from penstock.model.source import find_source
from penstock.offload import placing
from penstock.offload.adamw import OffloadAdamW
from penstock.offload.dtensors import all_say, extents, gathered_groups, is_streamed, local, local_start, share_of_host
from penstock.offload.placing import placement_for
from penstock.offload.saved_tensors import SavedTensor, state_tensors
from penstock.offload.saved_tensors import whole as whole_tensor
from penstock.offload.trained import Trained, find_trained
from penstock.plan.layout import FORMATS, model_buffers, state_buffers, unit_buffers
from penstock.plan.split import Manner, Profile, Rates
from penstock.recipe.presets import PRESETS
from penstock.recipe.recipe import with_values
from penstock.report.console import Console
from penstock.report.facts import Recorder
from penstock.run.generate import answer
from penstock.update.host_threads import HostThreads

DEVICE = torch.device("cuda", 0) if os.environ.get(SHARE_GPU) == "1" else torch.device("cpu")
"""Of all ranks: the CPU, or a GPU that they share."""
SHAPES = {
    "llama-8b": "num_attention_heads=4,num_key_value_heads=2",
    # Three experts: of four ranks the last holds none of them.
    "qwen3-30b-a3b": "num_attention_heads=4,num_key_value_heads=2,head_dim=8,num_experts=3,num_experts_per_tok=2,"
    "moe_intermediate_size=16",
}


def silent(_):
    pass


def tiny(preset="llama-8b", **changes):
    if preset == "demo":  # tied
        base = dataclasses.replace(PRESETS["demo"], max_length=64)
    else:
        shape = f"num_hidden_layers=2,hidden_size=32,intermediate_size=48,vocab_size=2048,{SHAPES[preset]}"
        base = dataclasses.replace(PRESETS[preset], init="random", shape=shape, tokenizer="demo", data="demo")
    values = {"dtype": "fp32", "batch_size": 5, "max_length": 64, "eps": 1e-3, "data_percent": 10.0, **changes}
    return dataclasses.replace(base, **values)


def load(world, recipe):
    config = load_config(recipe)
    if world.many:
        own = load_for_ranks(recipe, config, DEVICE, world.size, silent)
        return own.model, own.remainders
    return load_model(recipe, config, DEVICE, silent), {}


def whole(tensor):
    if is_streamed(tensor) and isinstance(tensor, DTensor):  # its rows are in host memory, of which NCCL knows nothing
        tensor = DTensor.from_local(local(tensor).to(DEVICE), tensor.device_mesh, tensor.placements, run_check=False,
                                    shape=tensor.shape, stride=tensor.stride())  # fmt: skip
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


_root_pre_forward = FSDPState._root_pre_forward


def _as_on_a_gpu(state, module, args, kwargs):
    """FSDP2 takes what a model is called with to the device, unless that is the CPU."""
    args, kwargs = _root_pre_forward(state, module, args, kwargs)
    args, kwargs = _to_kwargs(args, kwargs, DEVICE, False)
    return args[0], kwargs[0]


class Chosen(nn.Module):
    """Experts of which some get tokens; the others are not called."""

    def __init__(self, size):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(3))
        self.used = ()

    def forward(self, hidden):
        return sum(self.experts[number](hidden) for number in self.used)


def some_gradients(used):
    """Steps of a model of which each rank uses some experts: `used[step][rank]`. What they were refused with."""
    world = find_world()
    with joined(world, DEVICE):
        recipe = tiny()
        model = load_model(recipe, load_config(recipe), DEVICE, silent)
        for layer in model.model.layers:
            layer.mlp = Chosen(model.config.hidden_size).to(DEVICE)
        shard_over_ranks(model, init_device_mesh(DEVICE.type, (world.size,)), torch.float32)
        for step in used:
            for layer in model.model.layers:
                layer.mlp.used = step[world.rank]
            try:
                model(torch.arange(4, device=DEVICE)[None]).logits.square().sum().backward()
            except ModelError as error:
                return str(error)
        return [[p.grad is not None for p in layer.mlp.parameters()] for layer in model.model.layers]


def slowly(*args, fast=HostThreads.begin):
    """An update that takes so long that whoever does not wait for it reads old weights."""
    time.sleep(0.02)
    return fast(*args)


def train(configs, steps=2, slow=0):
    """A few steps of every config; losses, norms, evaluation and weights. Updates of the first `slow` take long."""
    world = find_world()
    found = []
    with joined(world, DEVICE), mock.patch.object(FSDPState, "_root_pre_forward", _as_on_a_gpu):
        begins = HostThreads.begin
        for place, config in enumerate(configs):
            HostThreads.begin = slowly if place < slow else begins
            recipe = tiny(**config)
            model, remainders = load(world, recipe)
            tokenizer = load_tokenizer(recipe)
            with world.in_turn():
                loader = prepare(recipe, tokenizer, model.config.vocab_size, silent).train
            engine = NativeEngine(model, recipe, silent, world, remainders, DEVICE)
            position, rows, streamed = Position(), [], sum(is_streamed(p) for p in model.parameters())
            for _ in range(steps):
                tokens, trained, _ = loader.counts_at(position)
                batches, position = loader.step_at(position, world.rank, world.size)
                engine.begin(1e-2)
                for number, batch in enumerate(batches, start=1):
                    engine.accumulate(batch, trained, last=number == len(batches))
                result = engine.step()
                rows.append((result.loss, result.grad_norm, tokens, trained))
            evaluated = engine.evaluate(loader.of_rank(world.rank, world.size))
            weights = {name: whole(p) for name, p in model.named_parameters()}
            engine.release()
            found.append({"rows": rows, "eval": evaluated, "weights": weights, "dtype": model.dtype})
            found[-1]["streamed"] = streamed
    return found


def whole_numbers(shape, generator):
    """Random numbers of 16 bits over 2^14, the same on every machine."""
    return torch.randint(-(2**15), 2**15, tuple(shape), generator=generator).float() / 2**14


class Plain(nn.Module):
    """Parameters whose shards begin at blocks of int8; of four ranks the last has nothing of `small`."""

    def __init__(self, shapes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in shapes)
        generator = torch.Generator().manual_seed(3)
        for layer, shape in zip(self.layers, shapes, strict=True):
            layer.weight = nn.Parameter(whole_numbers(shape, generator).bfloat16())


def updates(states, home, update="after-norm", shapes=((64, 512), (3, 256), (1024,)), bad_rank=None, steps=4):
    """Updates from given gradients, without any backward: this rank's part of all weights and state."""
    world = find_world()
    with joined(world, DEVICE):
        model = Plain(shapes).to(DEVICE)
        if world.many:
            mesh = init_device_mesh(DEVICE.type, (world.size,))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
        clip = 0.0 if update == "in-backward" else 1e30  # never reached: the scale is exactly one
        try:
            placement = placement_for(model, home, states=states, chunk_size=1024)
            optimizer = OffloadAdamW(model, lr=1e-2, max_grad_norm=clip, states=states, homes=placement, update=update)
        except RecipeError as error:
            return str(error)
        generator = torch.Generator().manual_seed(5)
        applied = []
        for step in range(steps):
            for p in model.parameters():
                gradient = whole_numbers(p.shape, generator).bfloat16().to(DEVICE)
                start, own = local_start(p), local(p)
                part = gradient.view(-1)[start : start + own.numel()].view(own.shape).clone()
                if bad_rank == world.rank and step == 1 and p.ndim == 1:
                    part[0] = float("inf")
                p.grad = (
                    DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
                    if world.many
                    else part
                )
            optimizer.step()
            optimizer.synchronize()  # as no module is called that would wait
            optimizer.zero_grad()
            applied.append(bool(optimizer.report.applied))
        optimizer.synchronize()
        names = {p: name for name, p in model.named_parameters()}
        pieces = {t.name: [piece.clone() for piece in t.pieces] for t in state_tensors(optimizer, names)}
        pieces |= {name: [local(p).clone().view(-1)] for p, name in names.items()}
        norm = optimizer.report.grad_norm.clone()
        optimizer.close()
        return {"pieces": pieces, "applied": applied, "norm": norm, "sharded": [names[p] for p in names]}


def sharded_the_older_way():
    """The error for a model under torch's first FSDP."""
    with joined(find_world(), DEVICE):
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        try:
            OffloadAdamW(FullyShardedDataParallel(nn.Linear(8, 8), device_id=DEVICE))
        except RecipeError as error:
            return str(error)
        finally:
            dist.destroy_process_group()


def replicas(**options):
    """Steps of a model under DistributedDataParallel, each rank with its share of the rows: weights and norms."""
    world = find_world()
    with joined(world, DEVICE):
        result = _replicas(world, **options)
        gc.collect()  # torch hangs in the end of a model under DDP whose group has ended before it
        return result


def _replicas(world, steps=4, dtype="float32", micro_batches=1, views=False, first=True, **options):
    torch.manual_seed(world.rank)  # the ranks begin with other weights, and get those of the first
    model = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 1))
    model = model.to(DEVICE, getattr(torch, dtype))
    wrapped = model
    if world.many and not first:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    optimizer = OffloadAdamW(wrapped, lr=1e-2, micro_batches=micro_batches, **options)
    if world.many and first:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    generator = torch.Generator().manual_seed(7)
    norms = []
    for _ in range(steps):
        for number in range(micro_batches):
            x = torch.randn(8, 24, generator=generator)[world.rank :: world.size].to(DEVICE, getattr(torch, dtype))
            with wrapped.no_sync() if world.many and number < micro_batches - 1 else nullcontext():
                (wrapped(x).float().square().mean() / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.report.grad_norm))
    optimizer.close()
    return {"weights": [p.detach().clone() for p in model.parameters()], "norms": norms}


def answering():
    """The tokens that each rank answers with, all of which compute other logits."""
    world, recipe = find_world(), tiny()
    with joined(world, DEVICE), mock.patch.object(FSDPState, "_root_pre_forward", _as_on_a_gpu):
        model, _ = load(world, recipe)
        generator = torch.Generator().manual_seed(world.rank)

        def disturb(module, args, output):
            noise = torch.randn(output.logits.shape, generator=generator).to(DEVICE)
            if float(noise[0, 0, 0]) > 0:  # the end, sooner or later, and not on all ranks at once
                noise[..., load_tokenizer(recipe).eos_token_id] += 9
            output.logits = output.logits + noise

        model.register_forward_hook(disturb)
        return answer(model, load_tokenizer(recipe), recipe, "What is a penstock?", max_new_tokens=12)


class Residual(nn.Module):
    """Layers, a norm and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(self.norm(x))


def gathered_early(how, homes):
    """Losses of steps whose updates take long, where FSDP2 gathers weights before their module is called."""
    with joined(find_world(), DEVICE), mock.patch.object(HostThreads, "begin", slowly):
        model = Residual().to(DEVICE)
        mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
        last = [[model.norm, model.head]] if how == "together" else [model.norm, model.head]
        for module in [*model.layers, *last, model]:
            fully_shard(module, mesh=mesh)
        if how == "prefetched":
            for one, other in itertools.pairwise(model.layers):
                one.set_modules_to_forward_prefetch([other])
        optimizer = OffloadAdamW(model, lr=1e-1, homes=homes)
        x = torch.ones(2, 8, device=DEVICE) * (dist.get_rank() + 1)
        losses = []
        for _ in range(3):
            if how == "unsharded":
                model.layers[0].unshard()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        optimizer.close()
        assert not any("unshard" in vars(group) for m in model.modules() for group in gathered_groups(m)), "undone"
        return losses


def set_after_a_forward():
    """Losses of a model after a step, and once that state was loaded again after others and an evaluation."""
    with joined(find_world(), DEVICE):
        model = Residual().to(DEVICE)
        mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
        for module in [*model.layers, model]:  # the root keeps its weights gathered after forward
            fully_shard(module, mesh=mesh)
        optimizer, x, losses = OffloadAdamW(model, lr=1e-1, homes="host"), torch.ones(2, 8, device=DEVICE), []
        for step in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                saved = copy.deepcopy(optimizer.state_dict())
            with torch.no_grad():
                losses.append(float(model(x).square().mean()))
        optimizer.load_state_dict(saved)
        with torch.no_grad():
            losses.append(float(model(x).square().mean()))
        optimizer.close()
        return losses


class Largest(TorchDispatchMode):
    """The largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and tensor.device == DEVICE:
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return out


def loading(directory, dtype):
    """Sizes while a model is loaded, its weights and remainders, and its fingerprint."""
    world = find_world()
    recipe = dataclasses.replace(tiny(dtype=dtype), model=directory, init="pretrained", shape=None)
    with joined(world, DEVICE):
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # a dispatch mode sees one thread only
        with Largest() as seen:
            model, remainders = load(world, recipe)
        own = sum(local(p).nbytes for p in model.parameters())
        return {
            "largest": seen.num_bytes,
            "own": own,
            "all": sum(p.numel() * p.itemsize for p in model.parameters()),
            "weights": {name: whole(p) for name, p in model.named_parameters()},
            "buffers": dict(model.named_buffers()),
            "remainders": {name: remainders[p] for name, p in model.named_parameters() if p in remainders},
            "fingerprint": model_fingerprint(model, values=True, remainders=remainders),
        }


def drawing(presets):
    """Random weights."""
    world = find_world()
    with joined(world, DEVICE):
        models = [load(world, tiny(preset, init="random"))[0] for preset in presets]
        return [{name: whole(p) for name, p in model.named_parameters()} for model in models]


def agreement():
    """What a world can do for its ranks."""
    world = find_world()
    with joined(world, DEVICE):
        before = os.sched_getaffinity(0)
        order = []
        with world.in_turn():
            order.append(time.monotonic())
        return {
            "shared": world.share(lambda: {"from": world.rank}),
            "largest": world.largest(world.rank * 15),
            "total": float(world.total(torch.tensor(world.rank + 0.5, device=DEVICE))),
            "turn": order[0],
            "before": before,
            "cores": bind(world, DEVICE),
            "groups": dist.is_initialized(),
        }


def cores_of_hosts(num_hosts):
    """The cores that this rank keeps to, where SLURM gives ranks to hosts in turn (cyclic)."""
    world = find_world()
    with joined(world, DEVICE), mock.patch("socket.gethostname", return_value=f"host {world.rank % num_hosts}"):
        local_rank, local_size = world.rank // num_hosts, world.size // num_hosts
        return bind(dataclasses.replace(world, local_rank=local_rank, local_size=local_size), DEVICE)


def slow_disk():
    """What rank 0 has received of rank 1 after a while."""
    world = find_world()
    tensor = SavedTensor("t", torch.uint8, (1000,), (torch.full((1000,), 7, dtype=torch.uint8),), (0, 1000))
    with mock.patch.object(penstock.engine.meeting, "CONNECTING", timedelta(seconds=2)), joined(world, DEVICE):
        if world.rank:
            return send_tensors([tensor])
        time.sleep(4)
        return b"".join(bytes(block) for block in receive_blocks(1, 1000))


def cutting(shapes):
    """What FSDP2 gives this rank of parameters, and where we say it lies."""
    world = find_world()
    with joined(world, DEVICE):
        model = nn.Module()
        wholes = [torch.arange(float(torch.Size(shape).numel())).view(shape) for shape in shapes]
        for number, tensor in enumerate(wholes):
            model.register_parameter(f"p{number}", nn.Parameter(tensor.clone().to(DEVICE)))
        fully_shard(model, mesh=init_device_mesh(DEVICE.type, (world.size,)))
        cuts = []
        for p, tensor in zip(model.parameters(), wholes, strict=True):
            own = local(p).flatten()
            start = int(own[0]) if own.numel() else extents(p)[world.rank][0]
            cuts.append({
                "extent": extents(p)[world.rank], "found": (start, own.numel()), "all": extents(p),
                "total": tensor.numel(),
            })  # fmt: skip
        # Beside it, what ranks agree on.
        assert all_say(True, p)
        assert not all_say(world.rank == 0, p)
        with mock.patch("socket.gethostname", return_value=f"machine {world.rank // 3}"):  # three ranks there, one here
            share = share_of_host(900 if world.rank else 600, p)
        assert share == (200 if world.rank < 3 else 900)
        assert share_of_host(900, local(p)) == 900, "alone"
        return cuts


def refused(directory, method, gguf):
    """The error for a model that cannot be read in rows."""
    world = find_world()
    recipe = dataclasses.replace(tiny(), model=directory, init="pretrained", shape=None)
    with joined(world, DEVICE):
        config = load_config(recipe)
        if method:
            config.quantization_config = {"quant_method": method}
        source = dataclasses.replace(find_source(directory, None), gguf_file=gguf or None)
        try:
            _read(recipe, config, source, DEVICE, lambda model: None, silent)
        except ModelError as error:
            return str(error)


def exporting(directory, preset, model="", modules=""):
    """Export a model whose rows lie on ranks in small files, after a step's worth of change."""
    world = find_world()
    export_ranks.FILE_BYTES = 40_000
    recipe = tiny(preset, init="random")
    if model:  # one with code of its own
        dynamic_module_utils.HF_MODULES_CACHE = modules
        recipe = dataclasses.replace(tiny(), model=model, init="pretrained", shape=None, trust_remote_code=True)
    with joined(world, DEVICE):
        with world.in_turn():  # as a run does
            model_class(recipe, load_config(recipe))
        model, _ = load(world, recipe)
        tokenizer = load_tokenizer(recipe)
        use_attention(model, "auto")
        export_ranks.export_from_ranks(model, tokenizer, Path(directory), recipe, world, print)
        return {name: whole(p) for name, p in model.named_parameters()}


def fingerprint(shapes):
    """Of a model some of whose parameters have fewer rows than there are ranks."""
    world = find_world()
    with joined(world, DEVICE):
        model = Plain(shapes).to(DEVICE)
        for layer in model.layers if world.many else ():
            fully_shard(layer, mesh=init_device_mesh(DEVICE.type, (world.size,)))
        return model_fingerprint(model, values=True)


def refusing(directory, **options):
    """The error of a run whose directory the first rank refuses."""
    try:
        penstock.run.train.train(tiny("demo", output_dir=directory), Console(quiet=True), world=find_world(), **options)
    except UserError as error:
        return type(error).__name__, str(error)


def restoring(checkpoint, shapes):
    """What a rank says to a checkpoint, when its model has weights of these names and shapes."""
    world = find_world()
    tensors = [whole_tensor(name, torch.zeros(shape)) for name, shape in shapes.items()]
    engine = SimpleNamespace(rows_on_ranks=world.many, saved_tensors=lambda: {"weights": tensors})
    saved = Saved(open_checkpoint(Path(checkpoint)), Position(), {}, 1, "", "", "", {})
    with joined(world, DEVICE):
        try:
            restore(saved, engine, silent, world)
        except Exception as error:
            return type(error).__name__, str(error)


def interrupting(directory):
    """Whether the model is there when a run ends that a signal stops, if one rank writes it for all, and slowly.

    As with DeepSpeed, ranks do not share tensors: here each has an engine of its own, which knows no others.
    """
    world, export = find_world(), penstock.run.train.export
    steps = penstock.run.train.run_steps

    def load(run, console, world):
        return load_model(run.recipe, run.config, DEVICE, silent), {}

    def start_engine(model, remainders, run, saved, console, world):
        return NativeEngine(model, run.recipe, silent, ALONE), ""

    def run_steps(start, loaded, records, stop, *others):
        stop.number = signal.SIGTERM
        return steps(start, loaded, records, stop, *others)

    def slowly(*args, **options):
        time.sleep(1)
        export(*args, **options)

    recipe = tiny("demo", output_dir=directory, keep=0, max_steps=3, prompt=None)
    with (
        mock.patch.multiple(penstock.run.loading, load=load, start_engine=start_engine, check_disk_of=mock.DEFAULT),
        mock.patch.multiple(penstock.run.train, run_steps=run_steps, export=slowly),
    ):
        try:
            penstock.run.train.train(recipe, Console(quiet=True), world=world)
        except Interrupted:
            return (Path(directory) / "model" / "config.json").exists()


class OnGpu(Trained):
    """Parameters without memory, as if they were on a GPU, but for those that stream."""

    gone = frozenset()

    @property
    def streamed(self):
        return self.gone


def chosen_without_memory(preset, profile, rates, gpu_bytes, gpu_free, host_free, streamed=0):
    """Buffers of what this rank would choose to hold of a large model, which is built without allocating any of it.

    Of the last `streamed` layers the weights lie in host memory. `profile` and `rates`: what a trial and the links are
    taken to have shown; the others are bytes, free ones beside the weights.
    """
    world = find_world()
    recipe = dataclasses.replace(PRESETS[preset], init="random")
    with joined(world, DEVICE):
        mesh = init_device_mesh(DEVICE.type, (world.size,))

        def shard(model):
            shard_over_ranks(model, mesh, torch.float32)

        model = build_on_meta(recipe, load_config(recipe), torch.bfloat16, shard)
        found, layers = find_trained(model, None, None), find_decoder(model).layers
        units = [tuple(layer.parameters()) for layer in layers[len(layers) - streamed :]]
        trained = OnGpu(found.parameters, found.units, torch.device("cuda"), found.types)
        OnGpu.gone = frozenset(
            index for index, p in enumerate(trained.parameters) if any(p is q for unit in units for q in unit)
        )
        with mock.patch.multiple(
            placing, gpu_room=lambda _: (gpu_free, gpu_bytes), gpu_left=lambda _: gpu_free,
            available_host_bytes=lambda: host_free, measure_rates=lambda *_, **__: Rates(**rates),
            near_cores=lambda _: [0, 1],
        ):  # fmt: skip
            format, manner = FORMATS["fp32"], Manner(in_backward=False, sharded=True)
            dealt = placing.place(trained, format, "auto", Profile(**profile), manner).chunks
        sizes = [local(p).numel() for p in trained.parameters]
        buffers = state_buffers(dealt, on_gpu=True, streamed=trained.streamed, in_backward=False)
        buffers += model_buffers(sizes, 2, streamed=trained.streamed)
        buffers += unit_buffers([[local(p).numel() for p in unit] for unit in units], 2, slots=0)
        on_host = Counter[int]()
        for chunk in dealt["host"]:
            on_host[chunk.parameter] += chunk.size
        stay = sum(2 * n for index, n in enumerate(sizes) if index not in trained.streamed and on_host[index] < n)
        return {(buffer.place, buffer.name): buffer.num_bytes for buffer in buffers} | {("gpu", "gradients"): stay}


def whole_run(directory, preset="llama-8b", resume="", forgets=None, of_others=None, **changes):
    """The summary of a run as `penstock train` makes it, from its data to the exported model.

    Layers are compiled if `compile` is asked for, however small the model is. `forgets`: a rank that cannot say what
    takes its memory. `of_others`: what ranks but the first were told besides.
    """
    if forgets is not None:
        Recorder.memory = (lambda _: 1 / 0) if find_world().rank == forgets else lambda _: []
    recipe = tiny(
        preset,
        **{"output_dir": directory, "device": DEVICE.type, "max_steps": 6, "epochs": 9, "prompt": None, **changes},
    )
    if not find_world().first:
        recipe = with_values(recipe, of_others or {}, "the second machine")
    hardware.COMPILED_FROM = 0 if changes.get("compile") else COMPILED_FROM
    try:
        return penstock.run.train.train(recipe, Console(quiet=True), world=find_world(), resume=resume)
    except UserError as error:
        return type(error).__name__, str(error)
