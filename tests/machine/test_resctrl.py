"""Partitions on a resctrl tree as the kernel shows it, in a directory of our own."""

import pytest

from penstock.errors import OutputError
from penstock.machine.resctrl import apply, cpus_list, partitions, support

XEON = "    L3:0=7fff;1=7fff\n    MB:0=100;1=100\n"
GRACE = "L3:1=fff\nMB:1=100\n"  # MPAM, as Linux shows it on Arm


@pytest.fixture
def tree(tmp_path):
    def make(schemata=XEON, mask="7fff", least="1", grain="10"):
        root = tmp_path / "resctrl"
        for kind, files in {
            "L3": {"cbm_mask": mask, "min_cbm_bits": least, "num_closids": "16"},
            "MB": {"bandwidth_gran": grain, "min_bandwidth": grain},
            "L3_MON": {"num_rmids": "32"},
        }.items():
            (root / "info" / kind).mkdir(parents=True)
            for name, value in files.items():
                (root / "info" / kind / name).write_text(value + "\n")
        (root / "schemata").write_text(schemata)
        return root

    return make


def test_the_two_groups_share_out_ways_and_bandwidth(tree):
    train, adam = partitions([14, 15], list(range(14)), tree())
    assert (train.name, train.cpus_list) == ("penstock-train", "14-15")
    assert (adam.name, adam.cpus_list) == ("penstock-adam", "0-13")
    assert train.schemata == ("L3:0=7ff0;1=7ff0", "MB:0=100;1=100")
    assert adam.schemata == ("L3:0=f;1=f", "MB:0=80;1=80")


def test_masks_do_not_overlap_and_are_contiguous(tree):
    train, adam = partitions([71], list(range(71)), tree(GRACE, "fff", grain="5"))
    high, low = (int(group.schemata[0].split("=")[1], 16) for group in (train, adam))
    assert high & low == 0
    assert high | low == 0xFFF
    for mask in (high, low):
        assert "01" not in f"{mask:b}"


def test_too_few_ways_are_left_alone(tree):
    train, adam = partitions([1], [0], tree("L3:0=3\n", "3", least="2"))
    assert train.schemata == adam.schemata == ()


def test_applying_writes_the_files_and_twice_is_no_change(tree):
    root = tree()
    groups = partitions([14, 15], list(range(14)), root)
    for _ in range(2):
        apply(groups, root)
        assert (root / "penstock-adam" / "cpus_list").read_text() == "0-13\n"
        assert (root / "penstock-adam" / "schemata").read_text() == "L3:0=f;1=f\nMB:0=80;1=80\n"
        assert (root / "penstock-train" / "schemata").read_text() == "L3:0=7ff0;1=7ff0\nMB:0=100;1=100\n"
    assert (root / "schemata").read_text() == XEON, "what everyone else uses stays as it was"


def test_a_refusal_of_the_kernel_is_passed_on(tree):
    root = tree()
    (root / "penstock-train").write_text("in the way")  # root may write anywhere, so that permissions show nothing
    (root / "info" / "last_cmd_status").write_text("No free CLOSID\n")
    with pytest.raises(OutputError, match="No free CLOSID") as caught:
        apply(partitions([1], [0], root), root)
    assert "as root" in str(caught.value)


def test_support_is_told_from_the_kernels_own_list(tree, tmp_path):
    filesystems = tmp_path / "filesystems"
    filesystems.write_text("nodev\tsysfs\nnodev\tresctrl\n\text4\n")
    nothing = support(tmp_path / "none", filesystems)
    assert (nothing.in_kernel, nothing.mounted, nothing.resources) == (True, False, ())
    found = support(tree(), tmp_path / "no-such-file")
    assert (found.in_kernel, found.mounted, found.resources) == (True, True, ("L3", "MB"))
    assert not support(tmp_path / "none", tmp_path / "no-such-file").in_kernel


@pytest.mark.parametrize(("cores", "text"), [([0, 1, 2, 3, 8], "0-3,8"), ([5], "5"), ([], ""), ([3, 1, 2], "1-3")])
def test_cores_are_written_as_the_kernel_does(cores, text):
    assert cpus_list(cores) == text
