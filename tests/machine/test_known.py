import pytest

from penstock.errors import RecipeError
from penstock.machine.known import H200, MACHINES, PARAMS_PER_CORE, find_machine, parse_bytes

ASKED = {"h200", "h100", "gh200", "gb200", "mi300a", "a100", "rtx4090", "rtx5090", "gb10"}


def test_the_machines_people_ask_for_are_there_with_their_sources():
    assert set(MACHINES) >= ASKED
    for machine in MACHINES.values():
        assert machine.sources, machine.name
        assert machine.measured == (machine.name == "h200")
        if not machine.measured:
            assert any(source.startswith("https://") for source in machine.sources), machine.name
        assert machine.host_bytes > 0
        assert (machine.gpu_bytes > 0) != machine.unified
        assert 1e12 < machine.matrix_flops_per_s < 1e16
        assert 1e11 < machine.device_memory_bytes_per_s < 2e13
        assert 1e9 < machine.link_bytes_per_s < 1e13
        assert 1e8 < machine.host_params_per_s < 1e11


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1MB", 10**6),
        ("480GiB", 480 * 2**30),
        ("128GB", 128 * 10**9),
        ("1.5 TiB", int(1.5 * 2**40)),
        ("134217728", 2**27),
        ("64g", 64 * 10**9),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_bytes(text, "--host-memory") == size


@pytest.mark.parametrize("text", ["", "many", "-5GB", "0", "12", "5 parsecs"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(RecipeError, match="is not a size"):
        parse_bytes(text, "--host-memory")


def test_what_the_caller_knows_better_counts():
    found = find_machine("GH200", host_memory="512GiB", link="225GB/s", cores=36)
    base = MACHINES["gh200"]
    assert found.host_bytes == 512 * 2**30
    assert found.link_bytes_per_s == pytest.approx(base.link_bytes_per_s / 2)
    assert found.host_params_per_s == pytest.approx(0.9 * 36 * PARAMS_PER_CORE)
    assert not find_machine("h200", link="64GB/s").measured
    assert find_machine("h200") is H200


def test_cores_count_where_weights_stream_too_and_no_further_than_memory():
    for machine in MACHINES.values():
        same, few = (find_machine(machine.name, cores=cores) for cores in (machine.cores, 1))
        for rate in ("host_params_per_s", "masters_per_s"):
            assert getattr(same, rate) == pytest.approx(getattr(machine, rate))
            assert getattr(few, rate) < getattr(machine, rate) / 4
            if machine is not H200:  # data sheets say how fast the host's memory is
                most = [getattr(find_machine(machine.name, cores=cores), rate) for cores in (1000, 2000)]
                assert most[0] == most[1]


def test_mistakes_are_named():
    with pytest.raises(RecipeError, match="Did you mean 'h200'"):
        find_machine("h20")
    with pytest.raises(RecipeError, match="has one memory"):
        find_machine("gb10", gpu_memory="64GB")
    with pytest.raises(RecipeError, match="must be positive"):
        find_machine("h100", cores=-1)
