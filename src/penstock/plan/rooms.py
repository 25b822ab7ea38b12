"""What a machine has room for: memory of a GPU and its host less what others take and what is kept free."""

from __future__ import annotations

from penstock.machine.known import Machine
from penstock.plan.job import Job
from penstock.plan.layout import HOST_RESERVE, gpu_reserve
from penstock.plan.memory import COMPILER_BYTES, CONTEXT_BYTES, CPU_PROCESS_BYTES, PROCESS_BYTES
from penstock.plan.split import Room


def process_bytes(job: Job, machine: Machine) -> float:
    """Host memory of the process itself."""
    return PROCESS_BYTES + job.compiled * COMPILER_BYTES if machine.has_gpu else CPU_PROCESS_BYTES


def host_reserve(machine: Machine) -> int:
    """What is left free of a host's memory."""
    return HOST_RESERVE if machine.has_gpu else min(HOST_RESERVE, machine.host_bytes // 20)


def sharing_a_host(machine: Machine, gpus: int) -> int:
    """How many of the GPUs share the memory of one host."""
    return min(gpus, machine.gpus_per_host or gpus)


def rooms(job: Job, machine: Machine, gpus: int) -> Room:
    """Bytes for everything but the driver and the reserves, on one GPU and in its share of the host."""
    share = (machine.host_bytes - host_reserve(machine)) / sharing_a_host(machine, gpus)
    host = share - process_bytes(job, machine)
    if machine.unified:  # one memory for both: what the GPU takes the host has not
        return Room(host - CONTEXT_BYTES, 0.0)
    if not machine.has_gpu:
        return Room(host, 0.0)
    return Room(machine.gpu_bytes - CONTEXT_BYTES - gpu_reserve(machine.gpu_bytes), host)
